"""`flash_fwd`, and `supports` for it. Every check of their arguments is in _checks.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _checks, _ops, _plain
from ._operand_checks import lse_shape
from ._score_checks import OPEN_WINDOW, check_flag

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import FwdOptions


@overload
def flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False,
    **options: Unpack[FwdOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[FwdOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[FwdOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention ``softmax(scale * q k^T + bias) v``, computed in tiles.

    The tiling with a running maximum and sum is FlashAttention (Dao et al. 2022,
    arXiv:2205.14135, algorithm 1; Dao 2023, arXiv:2307.08691, section 3.1).

    For a batch of ``b`` sequences, ``h`` query heads, ``hk`` key/value heads (``h % hk == 0``:
    query head ``n`` reads key/value head ``n // (h // hk)``) and head dim ``d`` (1 to 256):

    * dense: ``q (b, sq, h, d)``, ``k`` and ``v (b, sk, hk, d)``;
    * packed: ``q (Tq, h, d)``, ``k`` and ``v (Tk, hk, d)`` hold the sequences one after another.

    All three have one dtype: float16 or bfloat16, on the CPU also float32. The last dim must have
    stride 1, data and the other strides must be multiples of 16 bytes (unless ``d % 8 != 0``, when
    the call works on padded copies); apart from that any strides, also 0, work without a copy.

    Args:
        q, k, v: queries, keys, values.
        cu_seqlens_q, cu_seqlens_k: int32 ``(b + 1,)``, packed only: sequence ``n`` is rows
            ``cu_seqlens[n]`` to ``cu_seqlens[n + 1] - 1``; starts with 0.
        max_seqlen_q, max_seqlen_k: ints, packed only: upper bounds of the sequences' lengths. The
            result does not depend on them.
        seqused_k: int32 ``(b,)``: only the first ``seqused_k[n]`` keys of sequence ``n`` exist.
        softmax_scale: factor of ``q k^T``; default ``d ** -0.5`` (Vaswani et al. 2017,
            arXiv:1706.03762, equation 1).
        causal: query ``i`` sees keys ``j <= i + sk - sq``, so the last query sees the last key.
            The same as a window with right side 0.
        window_size: ``(left, right)``: query ``i`` sees keys ``i + sk - sq - left`` to
            ``i + sk - sq + right``, both inclusive; -1 leaves a side open.
        softcap: above 0, scores become ``softcap * tanh(score / softcap)`` (Gemma 2,
            arXiv:2408.00118, section 2).
        alibi_slopes: float32 ``(h,)`` or ``(b, h)``: adds ``-slope * |i + sk - sq - j|`` to the
            scores, after the cap (ALiBi, arXiv:2108.12409, section 3).
        sinks: ``(h,)``, float32 or q's dtype: one more logit of each softmax's denominator, with
            no value; neither scaled nor capped (attention sinks as in gpt-oss, arXiv:2508.10925).
        out: written instead of a new tensor: shape, dtype and device of q, not overlapping an
            input. Packed: rows from ``cu_seqlens_q[-1]`` on are left as they are.
        return_lse: also return the natural logarithm of each softmax's denominator.

    Returns:
        ``out``, shaped like q and contiguous (or the given tensor); with ``return_lse`` the tuple
        ``(out, lse)`` with float32 ``lse (b, h, sq)``, packed ``(h, Tq)``. A query that sees no key
        has ``out`` 0 and ``lse`` -inf, or its sink. Packed: rows from ``cu_seqlens_q[-1]`` on of
        what the call allocates are unspecified.

    Raises:
        ValueError: an argument does not fit; the message names it, what it got, what is allowed.
        NotImplementedError: meaningful, but not served by this version, build or device: gradients
            (call under ``torch.no_grad()``), dtypes, head dims over 256, a GPU not covered.
        RuntimeError: the compiled library is missing or does not load, or a launch failed.

    Runs on the device of q, on that device's current stream, and never waits for it: lengths stay
    on the device, where values out of range are clamped. With ``FLASHATTN_EXT_CHECK=1`` in the
    environment lengths are read on the host first and bad values raise a ValueError with row and
    value (this waits for the device, except while a CUDA graph is captured, which it leaves out).
    """
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    numbers = None
    if _plain.is_plain(q, k, v, alibi_slopes, sinks, out):
        numbers = _checks.plain_numbers(
            q, cu_seqlens_q, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
        )
    plain = numbers is not None
    scale, left, right, cap, bound_q, bound_k = numbers or _checks.check_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, softmax_scale,
        causal, window_size, softcap, alibi_slopes, sinks, out,
    )  # fmt: skip
    missing = 0 if plain else -q.shape[-1] % 8
    if missing:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = pad(q, (0, missing)), pad(k, (0, missing)), pad(v, (0, missing))

    # Every argument costs time. What the operator would have as its default is left out.
    more = (
        cu_seqlens_q is not None or cu_seqlens_k is not None or seqused_k is not None
        or cap != 0.0 or alibi_slopes is not None or sinks is not None
    )  # fmt: skip
    arguments: tuple[Any, ...] = (q, k, v)
    if more or left != -1:
        arguments += (right, scale, left)
    elif scale is not None:
        arguments += (right, scale)
    elif right != -1:
        arguments += (right,)
    if more:
        arguments += (
            cu_seqlens_q, cu_seqlens_k, bound_q, bound_k, seqused_k, cap, alibi_slopes, sinks,
        )  # fmt: skip

    result: Any = out
    lse: Any = None
    try:
        if out is None:
            operator = _ops.fwd_lse if return_lse else _ops.fwd
            if plain:
                operator = _plain.entry(operator)
            results = operator(*arguments)
        else:
            if return_lse:
                lse = torch.empty(lse_shape(q), dtype=torch.float32, device=q.device)
            if missing:
                # Starts as a copy of out, so that rows which are no query's come back unchanged.
                result = pad(out, (0, missing))
            _ops.fwd_out(result, lse, *arguments)
    except Exception:
        if plain:
            _plain.explain(_checks.check_call, locals())
        raise
    if out is None:
        result, lse = results if return_lse else (results, None)
        if missing:
            result = result[..., :-missing].contiguous()
    elif missing:
        result = out.copy_(result[..., :-missing])
    return (result, lse) if return_lse else result


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[bool, str]:
    """Whether ``flash_fwd`` would take exactly these arguments, and if not, why.

    Takes the arguments of `flash_fwd` and makes the same checks, including what this build and
    this GPU cover; launches nothing and writes nothing. Also works on meta and fake tensors.

    Returns:
        ``(True, "")``, or ``(False, reason)`` with the message that `flash_fwd` would raise.
    """
    if _ops.load_error:
        return False, _ops.load_error
    try:
        check_flag("return_lse", return_lse)
        _checks.check_call(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k,
            softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, out,
        )  # fmt: skip
    except (ValueError, NotImplementedError) as error:
        return False, str(error)
    return True, ""
