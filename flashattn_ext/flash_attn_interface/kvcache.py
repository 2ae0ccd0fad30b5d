"""flash-attn's function over a key/value cache."""

from __future__ import annotations

from torch import Tensor

from .._score_checks import OPEN_WINDOW
from .._tensor_checks import require_tensor
from ..splitkv import flash_fwd_splitkv
from ._arguments import inner_contiguous, refuse


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    qv: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash-attn's `flash_attn_with_kvcache`, on `flashattn_ext.flash_fwd_splitkv`.

    The parameters up to `return_softmax_lse` are flash-attn 2's, in its order. What
    FlashAttention-3 added follows by keyword, as its order is another one.

    Args:
        q: ``(b, sq, h, d)``, or packed ``(total_q, h, d)`` with `cu_seqlens_q`.
        k_cache, v_cache: ``(rows, capacity, hk, d)``, or pages ``(pages, page, hk, d)`` with
            `block_table`; read and written where they lie, whatever their strides (the last is 1).
        k, v: ``(b, s_new, hk, d)``: written into the cache, in place, behind `cache_seqlens`
            tokens, and then attended to.
        rotary_cos, rotary_sin, rotary_interleaved: rotate `k` and the queries, as in
            `flash_fwd_splitkv`. `rotary_interleaved` means nothing without the two.
        cache_seqlens: int, or int32 ``(b,)``: tokens in the cache without the new ones; None: it is
            full (not with `k`).
        cache_batch_idx, cache_leftpad: int32 ``(b,)``.
        block_table: int32 ``(b, columns)``; page_table: FlashAttention-3's name for it.
        cu_seqlens_q, max_seqlen_q: int32 ``(b + 1,)`` and an upper bound of the queries' lengths.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_fwd`.
        num_splits: 0 chooses; 1 does not split.
        qv, cu_seqlens_k_new, rotary_seqlens, q_descale, k_descale: FlashAttention-3's, not served:
            any other value than the default raises.
        v_descale, attention_chunk, scheduler_metadata, pack_gqa, sm_margin: the same.

    Returns:
        ``out``, shaped like q; with `return_softmax_lse` the tuple ``(out, softmax_lse)`` with
        float32 ``softmax_lse (b, h, sq)``, packed ``(h, total_q)``, natural logarithm.

    Differences from flash-attn 2 and -3:
        * A query without a visible key has ``softmax_lse`` -inf, in flash-attn 2 +inf; its ``out``
          is 0 in all three.
        * Pages of any size, with `cache_leftpad` too (flash-attn 2: multiples of 256, without it).
        * ``d`` must be a multiple of 8: no cache is copied to pad it.
        * New tokens beyond the capacity are never written, and raise where `cache_seqlens` is an
          int.
        * An input that requires a gradient raises while gradients are recorded; there the result
          just has none.
        * FlashAttention-3 returns two workspaces more behind ``softmax_lse``.
        * As in `flash_attn_func`: ``softmax_lse`` with ALiBi, ``softcap < 0``, windows that are
          never clamped, alignment to 16 bytes.
        * Messages call `k` and `v` `k_new` and `v_new`.

    Raises:
        NotImplementedError: an argument that is not served, by its name; gradients (call under
            ``torch.no_grad()``); what `flash_fwd_splitkv` does not serve.
        ValueError: an argument does not fit; the message names it, what it got, what is allowed.
        RuntimeError: the compiled library is missing or does not load, or a launch failed.
    """
    refuse("qv", qv, None)
    refuse("cu_seqlens_k_new", cu_seqlens_k_new, None)
    refuse("rotary_seqlens", rotary_seqlens, None)
    refuse("q_descale", q_descale, None)
    refuse("k_descale", k_descale, None)
    refuse("v_descale", v_descale, None)
    refuse("attention_chunk", attention_chunk, 0)
    refuse("scheduler_metadata", scheduler_metadata, None)
    refuse("pack_gqa", pack_gqa, None)
    refuse("sm_margin", sm_margin, 0)
    if page_table is not None:
        if block_table is not None:
            raise ValueError("page_table: expected None beside block_table, which is the same")
        block_table = page_table
    if cache_seqlens is None:
        cache_seqlens = _all_tokens(k_cache, block_table, k)
    if rotary_cos is None and rotary_sin is None:
        rotary_interleaved = True
    return flash_fwd_splitkv(
        inner_contiguous(q),
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        block_table=inner_contiguous(block_table),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        k_new=inner_contiguous(k),
        v_new=inner_contiguous(v),
        cache_batch_idx=inner_contiguous(cache_batch_idx),
        cache_leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_lse=bool(return_softmax_lse),
    )


def _all_tokens(k_cache: Tensor, block_table: Tensor | None, k: Tensor | None) -> int:
    """The length of every sequence of a cache that is full."""
    if k is not None:
        raise ValueError(
            "cache_seqlens: expected the number of tokens in the cache, behind which k and v are "
            "written, got None"
        )
    require_tensor("k_cache", k_cache)
    if k_cache.ndim != 4:
        return 0  # refused by its name further on
    if block_table is None:
        return k_cache.shape[1]
    require_tensor("block_table", block_table)
    return block_table.shape[-1] * k_cache.shape[1] if block_table.ndim == 2 else 0
