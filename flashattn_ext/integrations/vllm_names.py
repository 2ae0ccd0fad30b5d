"""vLLM's names over flashattn_ext: what calls vLLM's ``unified_attention`` switches by one import.

``from flashattn_ext.integrations.vllm_names import unified_attention`` takes the place of the
function in ``vllm.v1.attention.ops.triton_unified_attention`` (vLLM 0.20). Imports nothing of vLLM.
"""

from __future__ import annotations

from torch import Tensor

from .._tensor_checks import require_tensor
from ..splitkv import flash_fwd_splitkv


def unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] | None,
    block_table: Tensor,
    softcap: float | None,
    q_descale: Tensor | None,
    k_descale: Tensor | float | None,
    v_descale: Tensor | float | None,
    seq_threshold_3D: int | None = None,  # noqa: N803  vLLM's spelling
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: Tensor | None = None,
    softmax_segm_max: Tensor | None = None,
    softmax_segm_expsum: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    output_scale: Tensor | None = None,
    qq_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    use_alibi_sqrt: bool = False,
    kv_quant_mode: int | None = 0,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    chunk_lookback: int = -1,
) -> None:
    """Causal attention of packed queries over a cache in pages, written into ``out``.

    Args:
        q, out: ``(tokens, heads, head_dim)``; rows of ``out`` from ``cu_seqlens_q[-1]`` on stay.
        k, v: page pools ``(pages, page size, key/value heads, head_dim)``, of any strides and any
            page size, of the dtype of q.
        cu_seqlens_q, max_seqlen_q: int32 ``(sequences + 1,)`` starts of the sequences in q, and an
            upper bound of their lengths.
        seqused_k, block_table: int32 lengths, those of this call's tokens included (they are in
            the cache already), and pages of each sequence.
        softmax_scale, softcap, alibi_slopes, sinks: as in `flash_fwd_splitkv`. vLLM's ALiBi bias
            differs by a constant in each row, which no softmax shows, except beside a sink.
        window_size: ``(left, right)``; the right side is 0 in effect, as the call is causal.
        max_seqlen_k, seq_threshold_3D, num_par_softmax_segments: choose vLLM's way of splitting the
            keys. Splits are planned here: these are not read.
        softmax_segm_output, softmax_segm_max, softmax_segm_expsum: workspace of those splits,
            neither read nor written: the splits here have memory of their own.
        k_descale, v_descale: scales of an fp8 cache, which callers also pass for other caches,
            where they mean nothing.

    Raises:
        NotImplementedError: an option that is not served, by its name: quantised caches and
            outputs, ``qq_bias``, ``mm_prefix_range``, ``use_alibi_sqrt``, ``chunk_lookback``.
        ValueError: as `flash_fwd_splitkv` does.
    """
    needed: dict[str, Tensor] = {"q": q, "k": k, "v": v, "out": out, "cu_seqlens_q": cu_seqlens_q}
    for name, tensor in {**needed, "seqused_k": seqused_k, "block_table": block_table}.items():
        require_tensor(name, tensor)
    del max_seqlen_k, seq_threshold_3D, num_par_softmax_segments
    del softmax_segm_output, softmax_segm_max, softmax_segm_expsum
    _refuse_quantised(q, k, v, q_descale, output_scale, kv_quant_mode, k_scale_cache, v_scale_cache)
    del k_descale, v_descale  # the cache is not fp8
    _refuse("causal", causal, True)
    _refuse("qq_bias", qq_bias, None)
    _refuse("mm_prefix_range", mm_prefix_range, None)
    _refuse("use_alibi_sqrt", use_alibi_sqrt, False)
    _refuse("chunk_lookback", chunk_lookback, -1)
    if alibi_slopes is not None and sinks is not None:
        raise NotImplementedError(
            "alibi_slopes, sinks: not served together, as vLLM measures the bias of a row from "
            "another key than flashattn_ext, which a sink makes visible"
        )
    flash_fwd_splitkv(
        q,
        k,
        v,
        cache_seqlens=seqused_k,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        causal=True,
        window_size=(-1, -1) if window_size is None else window_size,
        softcap=0.0 if softcap is None else softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        out=out,
    )


def _refuse_quantised(
    q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor | None, output_scale: Tensor | None,
    kv_quant_mode: int | None, k_scale_cache: Tensor | None, v_scale_cache: Tensor | None,
) -> None:  # fmt: skip
    _refuse("kv_quant_mode", 0 if kv_quant_mode is None else int(kv_quant_mode), 0)
    for name, cache in (("k", k), ("v", v)):
        if cache.dtype != q.dtype:
            raise NotImplementedError(
                f"{name}: expected a cache of q's dtype {q.dtype}, got {cache.dtype} (quantised "
                "caches are not served)"
            )
    _refuse("q_descale", q_descale, None)
    _refuse("output_scale", output_scale, None)
    _refuse("k_scale_cache", k_scale_cache, None)
    _refuse("v_scale_cache", v_scale_cache, None)


def _refuse(name: str, value: object, served: object) -> None:
    if value is served or (isinstance(value, (int, bool)) and value == served):
        return
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise NotImplementedError(f"{name}: only {served!r} is served, got {got}")
