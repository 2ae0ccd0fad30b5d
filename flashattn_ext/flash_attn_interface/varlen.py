"""flash-attn's functions over sequences of different lengths, packed one behind the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .._score_checks import OPEN_WINDOW, check_bound
from .._tensor_checks import check_lengths, check_metadata, require_tensor
from ..interface import flash_fwd
from ..splitkv import flash_fwd_splitkv
from ._arguments import inner_contiguous, refuse, results, unpack

if TYPE_CHECKING:
    from .._options import CommonOptions


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """flash-attn's `flash_attn_varlen_func`, on `flashattn_ext.flash_fwd`, and with `block_table`
    on `flashattn_ext.flash_fwd_splitkv`.

    Args:
        q: ``(total_q, h, d)``; k, v: ``(total_k, hk, d)``, or with `block_table` pages
            ``(pages, page, hk, d)`` of any size and any strides (the last one 1).
        cu_seqlens_q, cu_seqlens_k: int32 ``(b + 1,)`` on q's device: where the sequences start;
            with `block_table` the differences of `cu_seqlens_k` are their lengths.
        max_seqlen_q, max_seqlen_k: ints, upper bounds of the lengths. Splits over pages are
            planned with the first; results do not depend on them, but for rounding.
        block_table: int32 ``(b, columns)``: the pages of each sequence.
        dropout_p, softmax_scale, causal, window_size, softcap: as in `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs: as in `flash_attn_func`.

    Returns:
        ``out (total_q, h, d)``; with `return_attn_probs` the tuple ``(out, softmax_lse, S_dmask)``
        with float32 ``softmax_lse (h, total_q)`` and an empty ``S_dmask``. Rows from
        ``cu_seqlens_q[-1]`` on are unspecified.

    Differences from flash-attn 2: those of `flash_attn_func` (in short: inference only, no dropout,
    ``softmax_lse`` -inf for a query without a visible key), and

        * pages of any size, there multiples of 256;
        * with `block_table`, ``d`` must be a multiple of 8 (no cache is copied to pad it), a page
          pool whose last stride is not 1 raises, and messages call `k` and `v` `k_cache` and
          `v_cache`.

    Raises:
        NotImplementedError, ValueError, RuntimeError: as in `flash_attn_func`.
    """
    del deterministic  # both values are true
    refuse("dropout_p", dropout_p, 0.0)
    options: CommonOptions = {
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }
    q = inner_contiguous(q)
    require_tensor("cu_seqlens_q", cu_seqlens_q)
    require_tensor("cu_seqlens_k", cu_seqlens_k)
    if block_table is None:
        out, lse = flash_fwd(
            q,
            inner_contiguous(k),
            inner_contiguous(v),
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_k=max_seqlen_k,
            **options,
            return_lse=True,
        )
    else:
        check_bound("max_seqlen_k", max_seqlen_k)
        out, lse = flash_fwd_splitkv(
            q,
            k,
            v,
            cache_seqlens=_lengths(q, cu_seqlens_q, cu_seqlens_k),
            block_table=inner_contiguous(block_table),
            **options,
            return_lse=True,
        )
    return results(out, lse, return_attn_probs)


def _lengths(q: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Of the keys of each sequence; stays on the device."""
    require_tensor("q", q)
    check_metadata("cu_seqlens_q", cu_seqlens_q, q.device)
    check_lengths("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape[0], q.device)
    return cu_seqlens_k[1:] - cu_seqlens_k[:-1]


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """flash-attn's `flash_attn_varlen_kvpacked_func`: `flash_attn_varlen_func` of ``kv[:, 0]`` and
    ``kv[:, 1]``, without a copy. Messages call these two `k` and `v`.

    Args:
        q: ``(total_q, h, d)``; kv: ``(total_k, 2, hk, d)``.
        The others, what is returned and raised, and the differences from flash-attn 2 (in short:
        inference only, no dropout, ``softmax_lse`` -inf for a query without a visible key, an empty
        ``S_dmask``): as in `flash_attn_varlen_func`.
    """
    k, v = unpack("kv", kv, 2, "total_k")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """flash-attn's `flash_attn_varlen_qkvpacked_func`: `flash_attn_varlen_func` of ``qkv[:, 0]``,
    ``qkv[:, 1]`` and ``qkv[:, 2]``, without a copy. Messages call these three `q`, `k` and `v`, and
    the others `cu_seqlens_q` and `max_seqlen_q`.

    Args:
        qkv: ``(total, 3, h, d)``.
        cu_seqlens, max_seqlen: of the queries and of the keys.
        The others, what is returned and raised, and the differences from flash-attn 2 (in short:
        inference only, no dropout, ``softmax_lse`` -inf for a query without a visible key, an empty
        ``S_dmask``): as in `flash_attn_varlen_func`.
    """
    q, k, v = unpack("qkv", qkv, 3, "total")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
