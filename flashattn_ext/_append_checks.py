"""The checked mode of an append: what it writes, the rest of the call neither reads nor writes.

New tokens that go to one place race for it; who reads a place that is written sees the new token,
whether meant or not. The kernels cannot tell either from what is right.
"""

import torch
from torch import Tensor

from ._lengths import Places


def check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_new: Tensor, v_new: Tensor, paged: bool,
    places: Places,
) -> None:  # fmt: skip
    """Raises ValueError where new tokens go to a place in use."""
    new_tokens = k_new.shape[1]
    _check_own_pages(places, new_tokens, paged)
    for name, tensor in (("q", q), ("k_new", k_new), ("v_new", v_new)):
        for cache_name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if _spans_meet(tensor, cache):
                _check_apart(name, tensor, cache_name, cache, places, new_tokens)


def _check_own_pages(places: Places, new_tokens: int, paged: bool) -> None:
    """A page that new tokens go to is no other page of any sequence; the same for cache rows."""
    table = places.table
    writers: dict[int, tuple[int, int]] = {}
    for n, cached in enumerate(places.cached):
        for column in range(cached // places.page, places.columns(n, new_tokens).stop):
            writers[table[n][column]] = (n, column)
    for n, pages in enumerate(table):
        for column in places.columns(n, new_tokens):
            page = pages[column]
            writer = writers.get(page, (n, column))
            if writer != (n, column):
                what = "page" if paged else "cache row"
                raise ValueError(
                    f"{_entry(writer, paged)}: expected a {what} of its own for the new tokens of "
                    f"sequence {writer[0]}, got {what} {page}, which sequence {n} uses too "
                    f"({_entry((n, column), paged)})"
                )


def _entry(place: tuple[int, int], paged: bool) -> str:
    return f"block_table[{place[0]}, {place[1]}]" if paged else f"cache_batch_idx[{place[0]}]"


def _spans_meet(a: Tensor, b: Tensor) -> bool:
    """Whether the ranges of addresses from first to last element overlap: a quick test."""
    if type(a) is not Tensor or type(b) is not Tensor or a.numel() == 0 or b.numel() == 0:
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(tensor: Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_apart(
    name: str, tensor: Tensor, cache_name: str, cache: Tensor, places: Places, new_tokens: int
) -> None:
    """Compares addresses, exactly: of each vector of head_dim elements, which lie side by side."""
    written, pages, slots = _written(cache, places, new_tokens)
    bytes_of_vector = tensor.shape[-1] * tensor.element_size()
    vectors = _vectors(tensor)
    ascending = written.flatten().sort()
    first = torch.searchsorted(ascending.values, vectors - bytes_of_vector, right=True)
    first.clamp_(max=written.numel() - 1)
    meets = ((ascending.values[first] - vectors).abs() < bytes_of_vector).nonzero()
    if len(meets) == 0:
        return
    row = tuple(meets[0].tolist())
    place = torch.unravel_index(ascending.indices[first[row]], written.shape)
    n, token = int(place[0]), int(place[1])
    index = ", ".join(map(str, row[:-1]))
    raise ValueError(
        f"{name}[{index}]: expected memory that the call does not write, got memory that overlaps "
        f"{cache_name}[{int(pages[n, token])}, {int(slots[n, token])}], where new token {token} of "
        f"sequence {n} goes"
    )


def _written(cache: Tensor, places: Places, new_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Addresses (b, new, hk) of what new tokens overwrite, with their pages and slots (b, new)."""
    first = torch.tensor(places.cached, device="cpu")[:, None]
    tokens = first + torch.arange(new_tokens, device="cpu")
    pages = torch.tensor(places.table, device="cpu").gather(1, tokens // places.page)
    slots = tokens % places.page
    offsets = (pages * cache.stride(0) + slots * cache.stride(1)) * cache.element_size()
    return offsets[..., None] + _vectors(cache[0, 0]), pages, slots


def _vectors(tensor: Tensor) -> Tensor:
    """The byte address of every vector along the last dim."""
    addresses = torch.tensor(tensor.data_ptr(), device="cpu")
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        steps = torch.arange(size, device="cpu") * (stride * tensor.element_size())
        addresses = addresses[..., None] + steps
    return addresses
