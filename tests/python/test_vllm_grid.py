"""vLLM's test grid of its unified attention, as data, through flash_fwd_splitkv and through the
function that carries vLLM's name and signature."""

from itertools import product

import pytest
import torch
from caches import packed_cache
from reference import attend

import flashattn_ext
from flashattn_ext.integrations.vllm_names import unified_attention

LENGTHS = (
    ((1, 1328), (5, 18), (129, 463)),
    ((1, 523), (1, 37), (1, 2011)),
)
HEADS = ((4, 4), (8, 2), (5, 1))
HEAD_DIMS = (128, 256)
WINDOWS = (None, 64, 128, 256)
SOFTCAPS = (0.0, 50.0)
POOLS = (32768, 2048)  # pages
GRID = list(product(LENGTHS, HEADS, HEAD_DIMS, WINDOWS, SOFTCAPS))


def case_of(lengths, heads, d, window, softcap, **fields):
    """Page numbers are drawn at random from the pool and may repeat. Softcap 50 of plain scores."""
    fields = {"page": 16, "causal": True, "table": "random", "tail": 0, "room": 0} | fields
    window = (-1 if window is None else window - 1, 0)
    return packed_cache(*lengths, heads=heads, d=d, window=window, softcap=softcap, **fields)


def in_large_pool(call, pages):
    """The same keys in a pool of `pages` pages, at random places; the rest is NaN."""
    source = torch.Generator(call.k.device).manual_seed(pages)
    count = len(call.k)
    places = torch.randperm(pages, generator=source, device=call.k.device)[:count]
    pools = []
    for t in (call.k, call.v):
        pool = torch.full((pages, *t.shape[1:]), torch.nan, dtype=t.dtype, device=t.device)
        pool[places] = t
        pools.append(pool)
    return *pools, places[call.options["block_table"].long()].int()


def vllm_arguments(call, out):
    o, case = call.options, call.case
    return {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "out": out,
        "cu_seqlens_q": o["cu_seqlens_q"],
        "max_seqlen_q": o["max_seqlen_q"],
        "seqused_k": o["cache_seqlens"],
        "max_seqlen_k": case.longest,
        "softmax_scale": case.rule().scale,
        "causal": True,
        "window_size": case.window,
        "block_table": o["block_table"],
        "softcap": case.softcap,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
    }


def check(case, device, pages=None):
    call = case.build(device)
    arguments = vllm_arguments(call, call.nan_out())
    if pages is not None:
        k, v, table = in_large_pool(call, pages)
        arguments |= {"k": k, "v": v, "block_table": table}
    out, lse = flashattn_ext.flash_fwd_splitkv(
        call.q, arguments["k"], arguments["v"], block_table=arguments["block_table"],
        cache_seqlens=arguments["seqused_k"], cu_seqlens_q=arguments["cu_seqlens_q"],
        max_seqlen_q=arguments["max_seqlen_q"], causal=True, window_size=case.window,
        softcap=case.softcap, return_lse=True,
    )  # fmt: skip
    call.compare(out, lse)
    assert unified_attention(**arguments) is None
    assert torch.equal(arguments["out"], out)
    for seq, (out_n, _) in zip(call.sequences, call.per_sequence(out, lse), strict=True):
        plain = attend(seq, case.rule(), torch.float32)[0].to(out.dtype)  # vLLM's own rule
        torch.testing.assert_close(out_n, plain, atol=1.5e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", POOLS)
@pytest.mark.parametrize("row", GRID, ids=str)
def test_c58_grid(row, pages):
    check(case_of(*row), "cuda", pages)


@pytest.mark.parametrize("row", GRID[::7], ids=str)
def test_grid_in_part(row):
    """Every value of every axis at least once; a pool as small as the keys allow."""
    check(case_of(*row), "cpu")


@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("d", [40, 72, 80])
def test_more_head_dims(d, page, device):
    for lengths in LENGTHS if device == "cuda" else (((1, 328), (5, 18), (29, 163)),):
        check(case_of(lengths, (8, 2), d, 64, 0.0, page=page), device)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (16, 2)], ids=str)
@pytest.mark.parametrize("d", [128, 256])
@pytest.mark.parametrize("page", [16, 32])
def test_c58_decode_over_pages(page, d, heads, device):
    check(case_of(((1, 463), (1, 18), (1, 1)), heads, d, None, 0.0, page=page), device)


SMALL = packed_cache((1, 100), (5, 18), page=16, causal=True, window=(-1, 0))


def test_options_of_the_signature(device):
    """ALiBi (vLLM's up to what a softmax does not see), sinks, softcap as an int or None."""
    for fields in ({"alibi": "h"}, {"sinks": "fp32"}, {"sinks": "same"}, {"softcap": 30.0}):
        call = SMALL.but(**fields).build(device)
        given = {n: call.options[n] for n in ("alibi_slopes", "sinks") if n in call.options}
        out = call.nan_out()
        unified_attention(**vllm_arguments(call, out) | given)
        call.compare(out, call.run()[1])
    call = SMALL.build(device)
    for softcap in (0, None):
        out = call.nan_out()
        unified_attention(**vllm_arguments(call, out) | {"softcap": softcap})
        call.compare(out, call.run()[1])


def test_segment_buffers_are_not_needed(device):
    call = SMALL.build(device)
    segments = {
        "seq_threshold_3D": 8,
        "num_par_softmax_segments": 16,
        "softmax_segm_output": torch.full((8, 4, 16, 64), torch.nan, device=device),
        "softmax_segm_max": torch.full((8, 4, 16), torch.nan, device=device),
        "softmax_segm_expsum": torch.full((8, 4, 16), torch.nan, device=device),
    }
    out = call.nan_out()
    unified_attention(**vllm_arguments(call, out), **segments)
    call.compare(out, call.run()[1])
    assert segments["softmax_segm_output"].isnan().all()


def test_scales_of_a_cache_that_is_not_quantised(device):
    """vLLM passes them always; only an fp8 cache is multiplied by them."""
    call = SMALL.build(device)
    out, ones = call.nan_out(), torch.ones(2, 2, device=device)
    unified_attention(**vllm_arguments(call, out) | {"k_descale": ones, "v_descale": ones})
    call.compare(out, call.run()[1])


def test_options_left_out_may_be_none(device):
    call = SMALL.but(window=(-1, -1)).build(device)
    out = call.nan_out()
    unified_attention(**vllm_arguments(call, out) | {"kv_quant_mode": None, "window_size": None})
    call.compare(out, call.run()[1])


REFUSED = [
    ("causal", False),
    ("q_descale", torch.ones(1)),
    ("output_scale", torch.ones(1)),
    ("qq_bias", torch.zeros(2, 2)),
    ("mm_prefix_range", torch.zeros(2, 1, 2, dtype=torch.int32)),
    ("use_alibi_sqrt", True),
    ("kv_quant_mode", 1),
    ("k_scale_cache", torch.ones(1)),
    ("v_scale_cache", torch.ones(1)),
    ("chunk_lookback", 1),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[name for name, _ in REFUSED])
def test_refused_by_name(name, value, device):
    call = SMALL.build(device)
    out = call.nan_out()
    with pytest.raises(NotImplementedError, match=name):
        unified_attention(**vllm_arguments(call, out) | {name: value})
    assert out.isnan().all()


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "block_table"])
def test_needed_tensors(name, device):
    call = SMALL.build(device)
    with pytest.raises(ValueError, match=f"^{name}: expected a torch.Tensor, got None"):
        unified_attention(**vllm_arguments(call, call.nan_out()) | {name: None})


def test_quantised_cache_is_refused(device):
    call = SMALL.build(device)
    arguments = vllm_arguments(call, call.nan_out())
    arguments["k"] = arguments["k"].to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="k.*float8_e4m3fn"):
        unified_attention(**arguments)


def test_alibi_with_sinks_is_refused(device):
    """vLLM's bias is shifted by the row, which only a sink makes visible."""
    call = SMALL.but(alibi="h", sinks="fp32").build(device)
    given = {n: call.options[n] for n in ("alibi_slopes", "sinks")}
    with pytest.raises(NotImplementedError, match="alibi_slopes.*sinks"):
        unified_attention(**vllm_arguments(call, call.nan_out()) | given)
