"""`flash_combine` and `merge_attention_states`: attention over disjoint sets of keys, merged."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _combine_checks, _ops


def flash_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges attention results over disjoint sets of keys into the result over all of them.

    ``lse = log(sum_s exp(lse_s))``, ``out = sum_s exp(lse_s - lse) * out_s``, in float32 and in an
    order that depends on ``d`` alone, so that the same parts give the same bits.

    Args:
        out_partial: ``(S, b, sq, h, d)``, or packed ``(S, Tq, h, d)``: ``S`` results, each
            normalised over its own keys. float32, float16 or bfloat16; the last dim has stride 1,
            the others any.
        lse_partial: float32 ``(S, b, h, sq)``, or packed ``(S, h, Tq)``, any strides: the natural
            logarithms of their softmax denominators. -inf and +inf mark an empty part; its ``out``
            is not looked at.
        out: written instead of a new tensor: shape ``out_partial.shape[1:]``, last stride 1, not
            overlapping an input.
        out_dtype: float32, float16 or bfloat16; default: that of `out`, or else of `out_partial`.

    Returns:
        The tuple ``(out, lse)``, with float32 ``lse (b, h, sq)`` or ``(h, Tq)``. Where all parts
        are empty, and for ``S = 0``, ``out`` is 0 and ``lse`` -inf.

    Raises:
        ValueError: an argument does not fit; the message names it, what it got, what is allowed.
        NotImplementedError: gradients, other dtypes of `out_partial`, other devices, on a GPU 2**31
            rows (``b * sq * h``) and more.
        RuntimeError: the compiled library is missing or does not load, or a launch failed.

    Runs on the device of `out_partial`, on that device's current stream, and never waits for it.
    """
    dtype = _combine_checks.check_combine(out_partial, lse_partial, out, out_dtype)
    if out is None:
        out, lse = _ops.combine(out_partial, lse_partial, dtype)
        return out, lse
    lse = torch.empty(
        _combine_checks.partial_lse_shape(out.shape), dtype=torch.float32, device=out.device
    )
    _ops.combine_out(out_partial, lse_partial, out, lse)
    return out, lse


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merges two attention results of the same queries over disjoint keys (a shared prefix and the
    rest of each sequence, for example), as `flash_combine` does.

    Args:
        out_a, out_b: ``(b, sq, h, d)``, or packed ``(Tq, h, d)``; float32, float16 or bfloat16, any
            strides.
        lse_a, lse_b: float32 ``(b, h, sq)``, or packed ``(h, Tq)``, as `flash_fwd` and
            `flash_fwd_splitkv` return them. At most one of the two may contain a sink.

    Returns:
        The tuple ``(out, lse)``: `out` in the dtype of `out_a`, float32 `lse` shaped like `lse_a`.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as in `flash_combine`.
    """
    _combine_checks.check_merge(out_a, lse_a, out_b, lse_b)
    dtype = out_a.dtype
    if out_b.dtype is not dtype:
        out_a, out_b = out_a.float(), out_b.float()
    out, lse = _ops.combine(torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b)), dtype)
    return out, lse
