"""FlashAttention-3's function that merges partial results."""

from __future__ import annotations

import torch
from torch import Tensor

from .._tensor_checks import require_tensor
from ..combine import flash_combine


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-3's `flash_attn_combine`, on `flashattn_ext.flash_combine`.

    Args:
        out_partial: ``(S, b, sq, h, d)``, or packed ``(S, total_q, h, d)``: results over disjoint
            keys. float32, float16 or bfloat16.
        lse_partial: float32 ``(S, b, sq, h)``, or packed ``(S, total_q, h)``: heads last, as in
            FlashAttention-3, where `flash_combine` has them before the rows. ``softmax_lse`` of the
            other functions is ``(b, h, sq)``: pass its ``.transpose(-1, -2)``. Any strides.
        out: written instead of a new tensor.
        out_dtype: of the result; default: that of `out`, or else of `out_partial`.

    Returns:
        The tuple ``(out, softmax_lse)`` with float32 ``softmax_lse (b, sq, h)``, packed
        ``(total_q, h)``, in memory a transposed ``(b, h, sq)``, as in FlashAttention-3.

    Differences from FlashAttention-3:
        * `out_partial` may be float16 or bfloat16, and packed; there it is float32 and has 5 dims.
        * More than 256 parts are fine, and the rows of `lse_partial` need not have stride 1.
        * Parts with ``lse`` -inf or +inf are empty, and nothing of their ``out`` is looked at.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as `flash_combine` does.
    """
    require_tensor("out_partial", out_partial)
    require_tensor("lse_partial", lse_partial)
    shape = out_partial.shape
    if len(shape) in (4, 5) and lse_partial.shape != shape[:-1]:
        raise ValueError(
            f"lse_partial: expected shape {tuple(shape[:-1])}, heads last, got "
            f"{tuple(lse_partial.shape)}"
        )
    if lse_partial.ndim >= 2:
        lse_partial = lse_partial.transpose(-1, -2)
    out, lse = flash_combine(out_partial, lse_partial, out=out, out_dtype=out_dtype)
    return out, lse.transpose(-1, -2)
