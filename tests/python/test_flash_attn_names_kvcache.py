"""flash-attn's flash_attn_with_kvcache: each of its arguments, and of those of FlashAttention-3."""

import inspect

import pytest
import torch
from caches import dense_cache, packed_cache
from flash_attn_calls import score_of
from test_flash_attn_signatures import parameters

import flashattn_ext.flash_attn_interface as flash_attn

KVCACHE = dense_cache(3, 40, 70, 12, heads=(6, 2), causal=True, splits=2)
CACHES = {
    "contiguous": KVCACHE,
    "one query": dense_cache(1, 40, 70, 12, heads=(6, 2), causal=True),
    "not causal": KVCACHE.but(causal=False),
    "int": dense_cache(3, 40, 40, heads=(6, 2), one_length=True, new=2),
    "batch_idx": KVCACHE.but(batch_idx=True, new=3),
    "leftpad": KVCACHE.but(leftpad=(3, 20, 0)),
    "pages": KVCACHE.but(page=16, new=3),
    "pages leftpad": KVCACHE.but(page=16, leftpad=(3, 20, 0)),
    "rotary": KVCACHE.but(new=3, rotary=0.5),
    "rotary halves": KVCACHE.but(new=3, rotary=1.0, interleaved=False, page=16),
    "window": KVCACHE.but(causal=False, window=(9, 1)),
    "softcap": KVCACHE.but(softcap=15.0),
    "scale": KVCACHE.but(scale=0.3),
    "alibi": KVCACHE.but(alibi="bh"),
    "alibi one query": dense_cache(1, 40, 12, heads=(6, 2), causal=True, alibi="h"),
    "no split": KVCACHE.but(splits=1),
    "packed queries": packed_cache((3, 40), (1, 70), (5, 5), heads=(6, 2), causal=True, page=16),
}


def run_cache(call, **changes):
    o, case = call.options, call.case
    given = score_of(call) | {
        "k": o.get("k_new"),
        "v": o.get("v_new"),
        "num_splits": case.splits,
        "return_softmax_lse": True,
    }
    passed_on = (
        "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad",
        "block_table", "rotary_interleaved", "cu_seqlens_q", "max_seqlen_q",
    )  # fmt: skip
    given |= {name: o[name] for name in passed_on if name in o}
    return flash_attn.flash_attn_with_kvcache(call.q, call.k, call.v, **given | changes)


@pytest.mark.parametrize("name", CACHES)
def test_kvcache(name, device):
    """The result, and the cache bit by bit: new tokens are in their places and nowhere else."""
    call = CACHES[name].build(device)
    out, lse = run_cache(call)
    call.compare_cache()
    call.compare_sequences(out, lse)


def test_kvcache_positions_of_the_arguments(device):
    """All of flash-attn 2's arguments, in its order."""
    case = KVCACHE.but(new=3, rotary=0.5, interleaved=False, leftpad=(1, 2, 3), window=(60, -1))
    case = case.but(batch_idx=True, scale=0.3, softcap=15.0, alibi="h")
    call = case.build(device)
    o = call.options
    out, lse = flash_attn.flash_attn_with_kvcache(
        call.q, call.k, call.v, o["k_new"], o["v_new"], o["rotary_cos"], o["rotary_sin"],
        o["cache_seqlens"], o["cache_batch_idx"], o["cache_leftpad"], None, 0.3, True, (60, -1),
        15.0, False, o["alibi_slopes"], 2, True,
    )  # fmt: skip
    call.compare_cache()
    call.compare_sequences(out, lse)


def test_kvcache_results(device):
    call = KVCACHE.build(device)
    out = run_cache(call, return_softmax_lse=False)
    assert isinstance(out, torch.Tensor) and torch.equal(out, run_cache(call)[0])


@pytest.mark.parametrize("page", [0, 16])
def test_kvcache_without_lengths_is_full(page, device):
    call = dense_cache(2, 48, 48, heads=(4, 2), room=0, page=page).build(device)
    out, lse = run_cache(call, cache_seqlens=None)
    call.compare_sequences(out, lse)
    new = torch.zeros(2, 1, 2, 64, dtype=call.q.dtype, device=device)
    with pytest.raises(ValueError, match="^cache_seqlens: .* k and v are written, got None"):
        run_cache(call, cache_seqlens=None, k=new, v=new)


def test_page_table_is_the_block_table(device):
    call = KVCACHE.but(page=16).build(device)
    table = call.options["block_table"]
    out, lse = run_cache(call, block_table=None, page_table=table)
    call.compare_sequences(out, lse)
    with pytest.raises(ValueError, match="^page_table: expected None beside block_table"):
        run_cache(call, page_table=table)


def test_num_splits_has_an_effect_on_rounding_only(device):
    call = dense_cache(1, 500, heads=(4, 2), dtype=torch.float16).build(device)
    outs = [run_cache(call, num_splits=n) for n in (1, 3, 0)]
    for out, lse in outs:
        call.compare_sequences(out, lse)
    with pytest.raises(ValueError, match="^num_splits: expected 0"):
        run_cache(call, num_splits=-1)


def test_rotary_interleaved_alone_means_nothing(device):
    call = KVCACHE.build(device)
    assert torch.equal(run_cache(call, rotary_interleaved=False)[0], run_cache(call)[0])


def test_kvcache_takes_queries_and_new_tokens_of_other_strides(device):
    call = KVCACHE.but(new=3, batch_idx=True).build(device)
    call.q = call.q.transpose(-1, -2).contiguous().transpose(-1, -2)
    new = {
        name: call.options[f"{name}_new"].transpose(-1, -2).contiguous().transpose(-1, -2)
        for name in ("k", "v")
    }
    index = call.options["cache_batch_idx"]
    new["cache_batch_idx"] = torch.stack([index, torch.zeros_like(index)], dim=1)[:, 0]
    out, lse = run_cache(call, **new)
    call.compare_cache()
    call.compare_sequences(out, lse)


NOT_SERVED = {
    "qv": torch.zeros(3, 3, 6, 64),
    "cu_seqlens_k_new": torch.zeros(4, dtype=torch.int32),
    "rotary_seqlens": torch.zeros(3, dtype=torch.int32),
    "q_descale": torch.ones(3, 2),
    "k_descale": torch.ones(3, 2),
    "v_descale": torch.ones(3, 2),
    "attention_chunk": 128,
    "scheduler_metadata": torch.zeros(4, dtype=torch.int32),
    "pack_gqa": True,
    "sm_margin": 8,
}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_kvcache_refuses_by_name(name, device):
    call = KVCACHE.but(new=3).build(device)
    before = call.k.clone()
    with pytest.raises(NotImplementedError, match=rf"^{name}: only .* is served, got"):
        run_cache(call, **{name: NOT_SERVED[name]})
    assert torch.equal(call.k.isnan(), before.isnan()), "the cache was written all the same"


def test_not_served_and_served_are_all_of_version_3():
    served = {"page_table", "cu_seqlens_q", "max_seqlen_q"}
    added = parameters("flash_attn_with_kvcache", inspect.Parameter.KEYWORD_ONLY)
    assert added.keys() == NOT_SERVED.keys() | served


def test_kvcache_gradients_are_refused(device):
    call = KVCACHE.build(device)
    call.q.requires_grad_()
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        run_cache(call)
    with torch.no_grad():
        run_cache(call)


def test_one_graph_for_all_lengths(device):
    """Compiled whole, and an int length is no constant of the graph: the cache grows in it."""
    call = dense_cache(1, 40, 40, heads=(6, 2), one_length=True).build(device)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k_cache, v_cache, length):
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=length, causal=True, return_softmax_lse=True
        )

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    with torch.no_grad():
        for length in (36, 37, 40):
            got = compiled(call.q, call.k, call.v, length)
            expected = step(call.q, call.k, call.v, length)
            torch.testing.assert_close(got[0], expected[0], rtol=2**-6, atol=4e-3)
            torch.testing.assert_close(got[1], expected[1], rtol=0, atol=2e-5)
    assert len(graphs) == 1
