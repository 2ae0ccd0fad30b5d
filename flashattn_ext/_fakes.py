"""The operators for tensors without memory: the same checks, and results of the right shape."""

from typing import Any

import torch
from torch import Tensor

from . import _checks, _splitkv_checks
from ._combine_checks import check_combine, partial_lse_shape
from ._operand_checks import lse_shape


def fwd(q: Tensor, *others: Any) -> Tensor:
    _checks.check_op(q, *others)
    return _out(q)


def fwd_lse(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return fwd(q, *others), _lse(q)


def fwd_out(out: Tensor, lse: Tensor | None, *inputs: Any) -> None:
    _checks.check_op(*inputs, out=out, lse=lse)


def fwd_splitkv(q: Tensor, *others: Any) -> Tensor:
    _splitkv_checks.check_op(q, *others)
    return _out(q)


def fwd_splitkv_basic(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None,
    block_table: Tensor | None, window_right: int = -1, cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = -1,
) -> Tensor:  # fmt: skip
    _splitkv_checks.check_op(
        q, k_cache, v_cache, cache_seqlens, block_table, window_right,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip
    return _out(q)


def fwd_splitkv_lse(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return fwd_splitkv(q, *others), _lse(q)


def fwd_splitkv_out(out: Tensor, lse: Tensor | None, *inputs: Any) -> None:
    _splitkv_checks.check_op(*inputs, out=out, lse=lse)


def fwd_splitkv_append(*arguments: Any) -> Tensor:
    append, q, others = arguments[:5], arguments[5], arguments[6:]
    _splitkv_checks.check_op(q, *others, append=append)
    return _out(q)


def fwd_splitkv_append_lse(*arguments: Any) -> tuple[Tensor, Tensor]:
    return fwd_splitkv_append(*arguments), _lse(arguments[5])


def fwd_splitkv_append_out(out: Tensor, lse: Tensor | None, *inputs: Any) -> None:
    _splitkv_checks.check_op(*inputs[5:], append=inputs[:5], out=out, lse=lse)


def combine(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    dtype = check_combine(out_partial, lse_partial, None, out_dtype)
    shape = out_partial.shape
    lse = out_partial.new_empty(partial_lse_shape(shape)[1:], dtype=torch.float32)
    return out_partial.new_empty(shape[1:], dtype=dtype), lse


def combine_out(out_partial: Tensor, lse_partial: Tensor, out: Tensor, lse: Tensor) -> None:
    check_combine(out_partial, lse_partial, out, None, lse)


def _out(q: Tensor) -> Tensor:
    return q.new_empty(q.shape)


def _lse(q: Tensor) -> Tensor:
    return q.new_empty(lse_shape(q), dtype=torch.float32)
