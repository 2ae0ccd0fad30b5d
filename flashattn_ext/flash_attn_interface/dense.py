"""flash-attn's functions over dense batches."""

from __future__ import annotations

from torch import Tensor

from .._score_checks import OPEN_WINDOW
from ..interface import flash_fwd
from ._arguments import inner_contiguous, refuse, results, unpack


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """flash-attn's `flash_attn_func`, on `flashattn_ext.flash_fwd`.

    Args:
        q: ``(b, sq, h, d)``; k, v: ``(b, sk, hk, d)``. float16 or bfloat16, on the CPU also
            float32; ``d`` up to 256; ``h % hk == 0``.
        dropout_p: 0.0.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_fwd`, whose masks
            are aligned to the last query and the last key like flash-attn's.
        deterministic: either value: it chooses flash-attn's backward, and every forward here gives
            the same bits for the same call.
        return_attn_probs: also return ``softmax_lse`` and ``S_dmask``.

    Returns:
        ``out (b, sq, h, d)``; with `return_attn_probs` the tuple ``(out, softmax_lse, S_dmask)``:
        float32 ``softmax_lse (b, h, sq)``, natural logarithm, and an empty ``S_dmask``, as
        flash-attn fills it with dropout only.

    Differences from flash-attn 2:
        * Inference only. ``dropout_p > 0`` raises.
        * A query without a visible key has ``softmax_lse`` -inf, there +inf; its ``out`` is 0 in
          both.
        * With ``alibi_slopes``, ``softmax_lse`` is that of the documented bias
          ``-slope * |i + sk - sq - j|``. Where a call is causal without a left window, flash-attn
          adds ``slope * j``, the same up to a constant in each row: its ``softmax_lse`` is larger
          by ``slope * (i + sk - sq)``.
        * ``softcap < 0`` and a window side below -1 raise; there they mean "off".
        * ``window_size`` is never clamped; there a right side of ``sk`` or more is, which changes
          what the first queries see when ``sq > sk``.
        * Data must start at a multiple of 16 bytes, and so must every row.

    Raises:
        NotImplementedError: `dropout_p`, gradients (call under ``torch.no_grad()``), and what
            `flash_fwd` does not serve.
        ValueError: an argument does not fit; the message names it, what it got, what is allowed.
        RuntimeError: the compiled library is missing or does not load, or a launch failed.
    """
    del deterministic  # both values are true
    refuse("dropout_p", dropout_p, 0.0)
    out, lse = flash_fwd(
        inner_contiguous(q),
        inner_contiguous(k),
        inner_contiguous(v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=True,
    )
    return results(out, lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """flash-attn's `flash_attn_kvpacked_func`: `flash_attn_func` of ``kv[:, :, 0]`` and
    ``kv[:, :, 1]``, without a copy. Messages call these two `k` and `v`.

    Args:
        q: ``(b, sq, h, d)``; kv: ``(b, sk, 2, hk, d)``.
        The others, what is returned and raised, and the differences from flash-attn 2 (in short:
        inference only, no dropout, ``softmax_lse`` -inf for a query without a visible key, an empty
        ``S_dmask``): as in `flash_attn_func`.
    """
    k, v = unpack("kv", kv, 2, "b", "sk")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """flash-attn's `flash_attn_qkvpacked_func`: `flash_attn_func` of ``qkv[:, :, 0]``,
    ``qkv[:, :, 1]`` and ``qkv[:, :, 2]``, without a copy. Messages call these three `q`, `k` and
    `v`.

    Args:
        qkv: ``(b, s, 3, h, d)``.
        The others, what is returned and raised, and the differences from flash-attn 2 (in short:
        inference only, no dropout, ``softmax_lse`` -inf for a query without a visible key, an empty
        ``S_dmask``): as in `flash_attn_func`.
    """
    q, k, v = unpack("qkv", qkv, 3, "b", "s")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip
