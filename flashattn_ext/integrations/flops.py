"""FLOPs of our operators for `torch.utils.flop_counter.FlopCounterMode`::

    from flashattn_ext.integrations import flops
    flops.register()
    with FlopCounterMode() as counter:
        flashattn_ext.flash_fwd(q, k, v, causal=True)

Counted are the two products, ``4 * h * d`` for every pair of a query and a key that it sees: what
causal masks and windows hide does not count, nor do the merge of splits and rotary embedding. Head
dims count as the operator gets them, padded to a multiple of 8. Lengths on a device are read, which
waits for it; for tensors without memory (fake, meta) upper bounds take their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from .. import _ops

Formula = Callable[..., int]


def register() -> None:
    """Makes FlopCounterMode count `flash_fwd` and `flash_fwd_splitkv`. Twice is once.

    Counters made before this call do not know the formulas.

    Raises:
        RuntimeError: the compiled library is missing or does not load.
    """
    if _ops.load_error:
        raise RuntimeError(_ops.load_error)
    for name, formula in _FORMULAS.items():
        operator = getattr(torch.ops.flashattn_ext, name)
        if operator not in flop_registry:
            add: Callable[[Formula], Formula] = register_flop_formula(operator, get_raw=True)
            add(formula)


def _fwd(
    q: Tensor, k: Tensor, v: Tensor, window_right: int = -1, softmax_scale: float | None = None,
    window_left: int = -1, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = -1, max_seqlen_k: int = -1, seqused_k: Tensor | None = None,
    *_others: Any, out_val: Any = None, **_kwargs: Any,
) -> int:  # fmt: skip
    if cu_seqlens_q is None or cu_seqlens_k is None:
        lengths_q, lengths_k = [q.shape[1]] * q.shape[0], [k.shape[1]] * q.shape[0]
    else:
        lengths_q = _packed(cu_seqlens_q, max_seqlen_q, q.shape[0])
        lengths_k = _packed(cu_seqlens_k, max_seqlen_k, k.shape[0])
    if seqused_k is not None:
        used = _read(seqused_k)
        if used is not None:
            lengths_k = [min(n, max(0, m)) for n, m in zip(lengths_k, used, strict=True)]
    return _flops(q, lengths_q, lengths_k, window_left, window_right)


def _fwd_splitkv(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None,
    block_table: Tensor | None, window_right: int = -1, softmax_scale: float | None = None,
    window_left: int = -1, cu_seqlens_q: Tensor | None = None, max_seqlen_q: int = -1,
    cache_seqlen: int = 0, _cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, *_others: Any, new: int = 0, out_val: Any = None,
    **_kwargs: Any,
) -> int:  # fmt: skip
    if cu_seqlens_q is None:
        lengths_q = [q.shape[1]] * q.shape[0]
    else:
        lengths_q = _packed(cu_seqlens_q, max_seqlen_q, q.shape[0])
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    cached = [cache_seqlen] * len(lengths_q) if cache_seqlens is None else _read(cache_seqlens)
    if cached is None:
        cached = [capacity - new] * len(lengths_q)
    lengths_k = [min(capacity, max(0, n) + new) for n in cached]
    padding = None if cache_leftpad is None else _read(cache_leftpad)
    if padding is not None:
        lengths_k = [max(0, n - max(0, m)) for n, m in zip(lengths_k, padding, strict=True)]
    return _flops(q, lengths_q, lengths_k, window_left, window_right)


def _fwd_splitkv_basic(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None,
    block_table: Tensor | None, window_right: int = -1, cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = -1, out_val: Any = None, **_kwargs: Any,
) -> int:  # fmt: skip
    return _fwd_splitkv(
        q, k_cache, v_cache, cache_seqlens, block_table, window_right,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip


def _fwd_splitkv_append(
    k_new: Tensor, v_new: Tensor, rotary_cos: Tensor | None, rotary_sin: Tensor | None,
    rotary_interleaved: bool, *arguments: Any, out_val: Any = None, **_kwargs: Any,
) -> int:  # fmt: skip
    return _fwd_splitkv(*arguments, new=k_new.shape[1])


def _into(formula: Formula) -> Formula:
    """Of the operator that has the results first."""
    return lambda out, lse, *arguments, **kwargs: formula(*arguments, **kwargs)


_FORMULAS: dict[str, Formula] = {
    "fwd": _fwd,
    "fwd_lse": _fwd,
    "fwd_out": _into(_fwd),
    "fwd_splitkv_basic": _fwd_splitkv_basic,
    "fwd_splitkv": _fwd_splitkv,
    "fwd_splitkv_lse": _fwd_splitkv,
    "fwd_splitkv_out": _into(_fwd_splitkv),
    "fwd_splitkv_append": _fwd_splitkv_append,
    "fwd_splitkv_append_lse": _fwd_splitkv_append,
    "fwd_splitkv_append_out": _into(_fwd_splitkv_append),
}


def _flops(q: Tensor, lengths_q: list[int], lengths_k: list[int], left: int, right: int) -> int:
    heads, head_dim = q.shape[-2:]
    pairs = sum(
        visible_pairs(sq, sk, left, right) for sq, sk in zip(lengths_q, lengths_k, strict=True)
    )
    return 4 * heads * head_dim * pairs


def visible_pairs(sq: int, sk: int, left: int, right: int) -> int:
    """Pairs (i, j) with ``-left <= j - (i + sk - sq) <= right``; -1 leaves a side open."""
    end = sq * sk if right < 0 else _sum_of_clamped(sk - sq + right + 1, sq, sk)
    begin = 0 if left < 0 else _sum_of_clamped(sk - sq - left, sq, sk)
    return end - begin


def _sum_of_clamped(start: int, count: int, limit: int) -> int:
    """The sum of min(max(x, 0), limit) over the `count` numbers x from `start` on."""

    def below(x: int) -> int:
        rising = max(0, min(x, limit + 1))
        return rising * (rising - 1) // 2 + max(0, x - limit - 1) * limit

    return below(start + count) - below(start)


def _packed(cu_seqlens: Tensor, bound: int, total: int) -> list[int]:
    """Lengths of packed sequences."""
    offsets = _read(cu_seqlens)
    if offsets is None:
        sequences = cu_seqlens.shape[0] - 1
        return [min(bound, total) if bound >= 0 else total] * sequences
    return [max(0, end - start) for start, end in zip(offsets, offsets[1:], strict=False)]


def _read(lengths: Tensor) -> list[int] | None:
    """The values, or None of a tensor without memory."""
    return lengths.tolist() if type(lengths) is Tensor and not lengths.is_meta else None
