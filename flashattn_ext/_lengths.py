"""The checked mode: reads lengths on the host and refuses bad values by row and value.

Waits for the device. Without it the kernels clamp such values, which is safe but silent.
"""

import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ._environment import is_on
from ._rotary_checks import check_positions, rotated_queries

# The dict behind os.environ, if it has one as in CPython: a look-up there is 15 times as fast.
_ENVIRONMENT = getattr(os.environb, "_data", os.environb)


def asked_for() -> bool:
    return b"FLASHATTN_EXT_CHECK" in _ENVIRONMENT and is_on("FLASHATTN_EXT_CHECK")


def wanted(q: Tensor) -> bool:
    """Whether FLASHATTN_EXT_CHECK=1 asks for the values, and they can be read."""
    if is_dynamo_compiling() or not asked_for():
        return False
    if type(q) is not Tensor or not (q.is_cpu or q.is_cuda):
        return False  # fake or meta
    return not (q.is_cuda and torch.cuda.is_current_stream_capturing())


def check(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
) -> None:  # fmt: skip
    """Raises ValueError for lengths that break the contract of `flash_fwd`."""
    lengths_k = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        _check_starts("cu_seqlens_q", cu_seqlens_q, "q", q.shape[0], "max_seqlen_q", max_seqlen_q)
        lengths_k = _check_starts(
            "cu_seqlens_k", cu_seqlens_k, "k", k.shape[0], "max_seqlen_k", max_seqlen_k
        )
    if seqused_k is None:
        return
    for row, used in enumerate(seqused_k.tolist()):
        length = k.shape[1] if lengths_k is None else lengths_k[row]
        if not 0 <= used <= length:
            raise ValueError(f"seqused_k[{row}]: expected 0 to {length} (its keys), got {used}")


def _check_starts(
    name: str, cu_seqlens: Tensor, tensor_name: str, rows: int, bound_name: str, bound: int
) -> list[int]:
    starts = cu_seqlens.tolist()
    if starts[0] != 0:
        raise ValueError(f"{name}[0]: expected 0, got {starts[0]}")
    lengths = []
    for row in range(1, len(starts)):
        length = starts[row] - starts[row - 1]
        if length < 0:
            raise ValueError(
                f"{name}[{row}]: expected at least {name}[{row - 1}] = {starts[row - 1]}, "
                f"got {starts[row]}"
            )
        if starts[row] > rows:
            raise ValueError(
                f"{name}[{row}]: expected at most {rows}, the rows of {tensor_name}, "
                f"got {starts[row]}"
            )
        if length > bound:
            raise ValueError(
                f"{name}: sequence {row - 1} has {length} rows, more than {bound_name} = {bound}"
            )
        lengths.append(length)
    return lengths


class Places(NamedTuple):
    """Token j of sequence n is slot j % page of page table[n][j // page]. A contiguous cache has
    one page per sequence, its row."""

    page: int
    table: list[list[int]]
    begins: list[int]  # the first token of each sequence
    cached: list[int]  # one behind its last, without new ones

    def columns(self, n: int, new_tokens: int) -> range:
        """Of the table, which sequence n uses."""
        end = self.cached[n] + new_tokens
        return range(self.begins[n] // self.page, -(-end // self.page))


def check_cache(
    q: Tensor, k_cache: Tensor, cache_seqlens: int | Tensor, block_table: Tensor | None,
    cu_seqlens_q: Tensor | None, max_seqlen_q: int, new_tokens: int,
    cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None, positions: int | None,
    left: int, right: int,
) -> Places:  # fmt: skip
    """Raises ValueError for values that break the contract of `flash_fwd_splitkv`.

    Returns the Places of the sequences.
    """
    if cu_seqlens_q is None:
        queries = [q.shape[1]] * q.shape[0]
    else:
        queries = _check_starts(
            "cu_seqlens_q", cu_seqlens_q, "q", q.shape[0], "max_seqlen_q", max_seqlen_q
        )
    page = k_cache.shape[1]
    capacity = page if block_table is None else block_table.shape[1] * page
    if isinstance(cache_seqlens, Tensor):
        cached = cache_seqlens.tolist()
        _check_cached(cached, capacity, new_tokens)
    else:
        cached = [int(cache_seqlens)] * len(queries)
    if positions is not None:
        for row, tokens in enumerate(cached):
            moving = rotated_queries(queries[row], left, right)
            check_positions(f"cache_seqlens[{row}]", tokens, new_tokens, moving, positions)
    pads = [0] * len(queries) if cache_leftpad is None else cache_leftpad.tolist()
    for row, pad in enumerate(pads):
        if not 0 <= pad <= cached[row]:
            raise ValueError(
                f"cache_leftpad[{row}]: expected 0 to {cached[row]} (its tokens), got {pad}"
            )
    if block_table is None:
        rows = range(len(queries)) if cache_batch_idx is None else cache_batch_idx.tolist()
        _check_rows(rows, k_cache.shape[0])
        return Places(page, [[row] for row in rows], pads, cached)
    places = Places(page, block_table.tolist(), pads, cached)
    for row, pages in enumerate(places.table):
        _check_pages(row, pages, places.columns(row, new_tokens), k_cache.shape[0])
    return places


def _check_cached(cached: list[int], capacity: int, new_tokens: int) -> None:
    room = capacity - new_tokens
    for row, tokens in enumerate(cached):
        if not 0 <= tokens <= room:
            new = f" - {new_tokens} new tokens" if new_tokens else ""
            raise ValueError(
                f"cache_seqlens[{row}]: expected 0 to {room} (capacity {capacity}{new}), "
                f"got {tokens}"
            )


def _check_rows(rows: Iterable[int], cache_rows: int) -> None:
    for row, index in enumerate(rows):
        if not 0 <= index < cache_rows:
            raise ValueError(
                f"cache_batch_idx[{row}]: expected 0 to {cache_rows - 1} (rows of k_cache), "
                f"got {index}"
            )


def _check_pages(row: int, pages: list[int], columns: range, count: int) -> None:
    for column in columns:
        if not 0 <= pages[column] < count:
            raise ValueError(
                f"block_table[{row}, {column}]: expected 0 to {count - 1} (pages of k_cache), "
                f"got {pages[column]}"
            )
