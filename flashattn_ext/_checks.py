"""The checks of `flash_fwd`, on metadata only: nothing here waits for a device.

The public function, `supports` and the fake kernels share them. A message names the argument, what
it got and what is allowed. A plain call pays for none of those of tensors (`_plain.py`).
"""

from collections.abc import Sequence

from torch import Tensor

from . import _lengths
from ._operand_checks import (
    check_32_bits,
    check_key_heads,
    check_lse_out,
    check_queries,
    check_score_tensors,
    check_storage,
    check_tensors,
    forward_ad_active,
    layout,
    refuse_gradients,
)
from ._score_checks import (
    MAX_ROWS,
    NO_BOUND,
    check_bound,
    check_score,
)
from ._tensor_checks import check_lengths, check_metadata, check_out


def check_call(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None, max_seqlen_k: int | None, seqused_k: Tensor | None,
    softmax_scale: float | None, causal: bool, window_size: Sequence[int], softcap: float,
    alibi_slopes: Tensor | None, sinks: Tensor | None, out: Tensor | None,
) -> tuple[float | None, int, int, float, int, int]:  # fmt: skip
    """Checks a call of `flash_fwd`.

    Returns (scale, left, right, softcap, bound_q, bound_k) as the operators take them.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    check_tensors(q, k, v)
    if q.requires_grad or k.requires_grad or v.requires_grad or forward_ad_active():
        refuse_gradients("flash_fwd", q=q, k=k, v=v)
    _check_operands(q, k, v, packed)
    bound_q = bound_k = NO_BOUND
    if packed:
        _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_k)
        bound_q = check_bound("max_seqlen_q", max_seqlen_q)
        bound_k = check_bound("max_seqlen_k", max_seqlen_k)
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        name = "max_seqlen_q" if max_seqlen_q is not None else "max_seqlen_k"
        raise ValueError(f"{name}: only for packed sequences, which need cu_seqlens_q/_k too")
    if seqused_k is not None or alibi_slopes is not None or sinks is not None:
        _check_options(q, cu_seqlens_q, seqused_k, alibi_slopes, sinks)
        refuse_gradients("flash_fwd", alibi_slopes=alibi_slopes, sinks=sinks)
    if out is not None:
        check_out(
            out, q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            seqused_k=seqused_k, alibi_slopes=alibi_slopes, sinks=sinks,
        )  # fmt: skip
        refuse_gradients("flash_fwd", out=out)
    if (packed or seqused_k is not None) and _lengths.wanted(q):
        _lengths.check(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, bound_q, bound_k)
    score = check_score(softmax_scale, causal, window_size, softcap)
    return score + (bound_q, bound_k)


def plain_numbers(
    q: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None,
    softmax_scale: float | None, causal: bool, window_size: Sequence[int], softcap: float,
) -> tuple[float | None, int, int, float, int, int] | None:  # fmt: skip
    """What check_call returns, where an operator can do the rest of its work (_plain.py)."""
    bound_q = bound_k = NO_BOUND
    try:
        if q.shape[-1] % 8:
            return None  # gets padded
        if cu_seqlens_q is not None:
            bound_q = check_bound("max_seqlen_q", max_seqlen_q)
            bound_k = check_bound("max_seqlen_k", max_seqlen_k)
        elif max_seqlen_q is not None or max_seqlen_k is not None:
            return None
        score = check_score(softmax_scale, causal, window_size, softcap)
        return score + (bound_q, bound_k)
    except Exception:
        return None  # check_call says what is wrong, in its order


def check_op(
    q: Tensor, k: Tensor, v: Tensor, window_right: int = -1, softmax_scale: float | None = None,
    window_left: int = -1, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = NO_BOUND, max_seqlen_k: int = NO_BOUND, seqused_k: Tensor | None = None,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, *,
    out: Tensor | None = None, lse: Tensor | None = None,
) -> None:  # fmt: skip
    """The same for the arguments of the operators, whose head dim is not padded."""
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    check_tensors(q, k, v)
    check_32_bits(q=q, k=k, v=v)
    head_dim = _check_operands(q, k, v, packed)
    if head_dim % 8:
        raise ValueError(f"q: expected a head dim that is a multiple of 8, got {head_dim}")
    if packed:
        _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_k)
    _check_options(q, cu_seqlens_q, seqused_k, alibi_slopes, sinks)
    if out is not None:
        check_out(out, q)
    check_score(softmax_scale, False, (window_left, window_right), softcap)
    if lse is not None:
        check_lse_out(q, lse)


def _check_operands(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> int:
    """Shapes, dtypes, devices and memory of q, k and v. Returns the head dim."""
    q_shape, k_shape = q.shape, k.shape
    head_dim = check_queries(q_shape, packed)
    if (
        len(k_shape) != len(q_shape)
        or k_shape[-1] != head_dim
        or not (packed or k_shape[0] == q_shape[0])
    ):
        batch = "" if packed else f" and batch {q_shape[0]}"
        raise ValueError(
            f"k: expected {layout('hk', packed)} with head dim {head_dim}{batch} like q, "
            f"got shape {tuple(k_shape)}"
        )
    if v.shape != k_shape:
        raise ValueError(f"v: expected shape {tuple(k_shape)} like k, got {tuple(v.shape)}")
    check_key_heads(q_shape[-2], k_shape)
    if k_shape[-3] > MAX_ROWS:
        raise ValueError(f"k: expected at most 2**30 rows, got {k_shape[-3]}")
    check_storage(q, k, v, head_dim)
    return head_dim


def _check_cu_seqlens(q: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{name}: packed sequences need cu_seqlens_q and cu_seqlens_k, got None")
    device = q.device
    check_metadata("cu_seqlens_q", cu_seqlens_q, device)
    check_metadata("cu_seqlens_k", cu_seqlens_k, device)
    entries = cu_seqlens_q.numel()
    if entries == 0 or cu_seqlens_k.numel() != entries:
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k: expected batch + 1 entries each, got "
            f"{entries} and {cu_seqlens_k.numel()}"
        )


def _check_options(
    q: Tensor, cu_seqlens_q: Tensor | None, seqused_k: Tensor | None, alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:  # fmt: skip
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if seqused_k is not None:
        check_lengths("seqused_k", seqused_k, batch, q.device)
    check_score_tensors(q, batch, alibi_slopes, sinks)
