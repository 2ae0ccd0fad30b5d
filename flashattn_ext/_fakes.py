"""The operators for tensors without memory: the same checks, and results of the right shape."""

from typing import Any

import torch
from torch import Tensor

from . import _checks, _splitkv_checks
from ._combine_checks import check_combine, partial_lse_shape
from ._operand_checks import lse_shape


def fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float,
    window_left: int, window_right: int, softcap: float, alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _checks.check_op(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale, window_left, window_right,
        softcap, alibi_slopes, sinks, None, None,
    )  # fmt: skip
    return _results(q)


def fwd_out(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float,
    window_left: int, window_right: int, softcap: float, alibi_slopes: Tensor | None,
    sinks: Tensor | None, out: Tensor, lse: Tensor | None,
) -> None:  # fmt: skip
    _checks.check_op(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale, window_left, window_right,
        softcap, alibi_slopes, sinks, out, lse,
    )  # fmt: skip


def fwd_splitkv(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _splitkv_checks.check_op(q, *others)
    return _results(q)


def fwd_splitkv_out(*arguments: Any) -> None:
    *inputs, out, lse = arguments
    _splitkv_checks.check_op(*inputs, out=out, lse=lse)


def fwd_splitkv_append(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _splitkv_checks.check_op(q, *others[:-5], append=others[-5:])
    return _results(q)


def fwd_splitkv_append_out(*arguments: Any) -> None:
    *inputs, out, lse = arguments
    _splitkv_checks.check_op(*inputs[:-5], append=inputs[-5:], out=out, lse=lse)


def combine(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    dtype = check_combine(out_partial, lse_partial, None, out_dtype)
    shape = out_partial.shape
    lse = out_partial.new_empty(partial_lse_shape(shape)[1:], dtype=torch.float32)
    return out_partial.new_empty(shape[1:], dtype=dtype), lse


def combine_out(out_partial: Tensor, lse_partial: Tensor, out: Tensor, lse: Tensor) -> None:
    check_combine(out_partial, lse_partial, out, None, lse)


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(lse_shape(q), dtype=torch.float32)
