"""The arguments of `plan`, checked on meta tensors by the checks of the call that it plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _checks, _splitkv_checks
from ._score_checks import is_int
from ._tensor_checks import dtype_name

_MOST = 2**31 - 1
_MOST_SEQUENCES = 2**20  # each is looked at
_MOST_HEADS = 2**24  # so is each head over a cache


@dataclass(frozen=True)
class Problem:
    """A call by its sizes, and by the lengths of its sequences."""

    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype
    queries: tuple[int, ...]  # of each sequence
    keys: tuple[int, ...]  # of each sequence, the new ones too
    packed: bool
    max_seqlen_q: int
    cache: str | int | None  # None, "contiguous" or a page size
    capacity: int  # without a cache: keys of the longest sequence
    new_tokens: int
    rotary_dim: int
    num_splits: int
    split_size: int | None
    window: tuple[int, int] = (-1, -1)  # causal: right side 0

    @property
    def rows(self) -> int:
        """Query rows of all sequences."""
        return sum(self.queries)

    @property
    def padded_head_dim(self) -> int:
        """What the call runs with."""
        return -(-self.head_dim // 8) * 8


def problem_of(
    batch: int, heads: int, heads_kv: int | None, head_dim: int, seqlen_q: int | Sequence[int],
    seqlen_k: int | Sequence[int], dtype: torch.dtype, max_seqlen_q: int | None,
    cache: str | int | None, capacity: int | None, new_tokens: int, rotary_dim: int,
    num_splits: int, split_size: int | None,
) -> Problem:  # fmt: skip
    """Raises ValueError or NotImplementedError for what only `plan` takes; see `check_call`."""
    heads_kv = heads if heads_kv is None else heads_kv
    _check_count("batch", batch, _MOST_SEQUENCES)
    for name, value in (
        ("heads", heads), ("heads_kv", heads_kv), ("head_dim", head_dim),
        ("new_tokens", new_tokens), ("rotary_dim", rotary_dim),
    ):  # fmt: skip
        _check_count(name, value)
    if cache is not None and batch * heads > _MOST_HEADS:
        total = batch * heads
        raise ValueError(f"batch, heads: expected at most {_MOST_HEADS} in all, got {total}")
    queries, keys = _lengths("seqlen_q", seqlen_q, batch), _lengths("seqlen_k", seqlen_k, batch)
    packed = not is_int(seqlen_q)
    bound = int(seqlen_q) if is_int(seqlen_q) else max(queries, default=0)
    if max_seqlen_q is not None:
        bound = _bound(max_seqlen_q, packed, bound)
    if cache is None:
        _refuse_without_cache(capacity, new_tokens, rotary_dim, num_splits, split_size)
    capacity = _capacity(cache, capacity, max(keys, default=seqlen_k if is_int(seqlen_k) else 0))
    for length in keys:
        if length < new_tokens:
            raise ValueError(f"seqlen_k: expected at least {new_tokens} new tokens, got {length}")
    if rotary_dim % 16 or rotary_dim > head_dim:
        raise ValueError(
            f"rotary_dim: expected a multiple of 16 from 0 to {head_dim}, got {rotary_dim}"
        )
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected torch.float16 or torch.bfloat16, got {dtype!r}")
    if dtype not in (torch.float16, torch.bfloat16):
        why = ", which runs on the CPU only" if dtype is torch.float32 else ""
        raise NotImplementedError(
            f"dtype: expected float16 or bfloat16, got {dtype_name(dtype)}{why}"
        )
    return Problem(
        batch, heads, heads_kv, head_dim, dtype, queries, keys, packed, bound, cache, capacity,
        new_tokens, rotary_dim, num_splits, split_size,
    )  # fmt: skip


def check_call(problem: Problem, causal: bool, window_size: Sequence[int]) -> tuple[int, int]:
    """Makes the checks of the planned call on meta tensors. Returns (left, right) of the window."""
    try:
        operands = _Operands(problem)
        check = _check_forward if problem.cache is None else _check_splitkv
        return check(problem, operands, causal, window_size)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError):
            raise
        raise ValueError(f"batch, heads, lengths: no tensor can be that large ({error})") from None


class _Operands:
    def __init__(self, problem: Problem):
        p = self.problem = problem
        rows = (p.rows,) if p.packed else (p.batch, p.max_seqlen_q)
        self.q = self.tensor(*rows, p.heads, p.head_dim)
        self.starts = self.ints(p.batch + 1) if p.packed else None
        self.max_seqlen_q = p.max_seqlen_q if p.packed else None

    def tensor(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.problem.dtype, device="meta")

    def ints(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")


def _check_forward(
    p: Problem, operands: _Operands, causal: bool, window_size: Sequence[int]
) -> tuple[int, int]:
    rows = (sum(p.keys),) if p.packed else (p.batch, p.capacity)
    k = operands.tensor(*rows, p.heads_kv, p.head_dim)
    score = _checks.check_call(
        operands.q, k, k, operands.starts, operands.starts, operands.max_seqlen_q,
        p.capacity if p.packed else None, None if p.packed else operands.ints(p.batch),
        None, causal, window_size, 0.0, None, None, None,
    )  # fmt: skip
    return score[1:3]


def _check_splitkv(
    p: Problem, operands: _Operands, causal: bool, window_size: Sequence[int]
) -> tuple[int, int]:
    rows, table = (p.batch, p.capacity), None
    if p.cache is not None and p.cache != "contiguous":
        page = int(p.cache)
        table = operands.ints(p.batch, p.capacity // page)
        rows = (table.numel(), page)
    k_cache, v_cache = (operands.tensor(*rows, p.heads_kv, p.head_dim) for _ in range(2))
    new = cos = None
    if p.new_tokens > 0 or p.rotary_dim > 0:
        new = operands.tensor(p.batch, p.new_tokens, p.heads_kv, p.head_dim)
    if p.rotary_dim > 0:
        cos = operands.tensor(max(p.capacity, 1), p.rotary_dim // 2)
    score = _splitkv_checks.check_call(
        operands.q, k_cache, v_cache, operands.ints(p.batch), table, operands.starts,
        operands.max_seqlen_q, new, new, None, None, cos, cos, True, None, causal, window_size,
        0.0, None, None, p.num_splits, p.split_size, None,
    )  # fmt: skip
    return score[1:3]


def _check_count(name: str, value: object, most: int = _MOST) -> None:
    if not is_int(value) or not 0 <= value <= most:
        raise ValueError(f"{name}: expected an int from 0 to {most}, got {value!r}")


def _lengths(name: str, lengths: int | Sequence[int], batch: int) -> tuple[int, ...]:
    if is_int(lengths):
        _check_count(name, lengths)
        return (int(lengths),) * batch
    if not isinstance(lengths, Sequence) or isinstance(lengths, str):
        raise ValueError(f"{name}: expected an int or a list of ints, got {lengths!r}")
    if len(lengths) != batch:
        raise ValueError(f"{name}: expected {batch} lengths (batch), got {len(lengths)}")
    for length in lengths:
        _check_count(name, length)
    return tuple(map(int, lengths))


def _bound(max_seqlen_q: int, packed: bool, longest: int) -> int:
    if not packed:
        raise ValueError("max_seqlen_q: only for packed queries, whose seqlen_q is a list")
    _check_count("max_seqlen_q", max_seqlen_q)
    if max_seqlen_q < longest:
        raise ValueError(
            f"max_seqlen_q: expected at least {longest}, the longest of seqlen_q, "
            f"got {max_seqlen_q}"
        )
    return max_seqlen_q


def _refuse_without_cache(
    capacity: int | None, new_tokens: int, rotary_dim: int, num_splits: int, split_size: int | None
) -> None:
    for name, value, absent in (
        ("capacity", capacity, None), ("new_tokens", new_tokens, 0), ("rotary_dim", rotary_dim, 0),
        ("num_splits", num_splits, 0), ("split_size", split_size, None),
    ):  # fmt: skip
        if value != absent:
            raise ValueError(f"{name}: only with a cache, got {value!r} and cache=None")


def _capacity(cache: str | int | None, capacity: int | None, longest: int) -> int:
    if cache is None:
        return longest
    unit = 1
    if cache != "contiguous":
        if not is_int(cache) or not 0 < cache <= _MOST:
            raise ValueError(
                'cache: expected None, "contiguous" or the number of tokens of a page from 1 on, '
                f"got {cache!r}"
            )
        unit = cache
    if capacity is None:
        return -(-longest // unit) * unit
    _check_count("capacity", capacity)
    if capacity < longest or capacity % unit:
        pages = f" that is a multiple of the page, {unit}," if unit > 1 else ""
        raise ValueError(
            f"capacity: expected a number{pages} from {longest} on, the longest of seqlen_k, "
            f"got {capacity}"
        )
    return capacity
