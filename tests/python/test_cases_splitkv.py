"""Kinds of faults that users of attention libraries reported, by their id in docs/cases.md: splits,
their merge, lengths of a cache, many sizes. What an older test excludes is in that table only."""

import inspect
import time
from itertools import product

import pytest
import torch
from caches import CacheCase, dense_cache, packed_cache
from cases import HALF_DTYPES, dense, ints, packed
from reference import Rule, Sequence, assert_close_to_reference
from test_memory import CANARY
from test_splitkv import TOGGLES

import flashattn_ext
from flashattn_ext import _plan_gpus, flash_combine, merge_attention_states, plan
from flashattn_ext.flash_attn_interface import flash_attn_with_kvcache
from flashattn_ext.planning import Gpu


def run_between_canaries(call):
    """(out, lse), both of which held NaN, of the op that writes into given tensors."""
    flats, results = [], []
    for nan in (call.nan_out(), call.nan_lse()):
        flats.append(torch.full((nan.numel() + 1024,), CANARY, dtype=nan.dtype, device=nan.device))
        results.append(flats[-1][512:-512].view_as(nan).copy_(nan))
    call.op("_out")(*results, *call.op_arguments())
    for flat in flats:
        canary = torch.tensor(CANARY, dtype=flat.dtype, device=flat.device)
        assert (flat[:512] == canary).all() and (flat[-512:] == canary).all()
    return results


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 7, 33])
def test_c32_rows_that_fill_no_block_of_the_merge(rows, heads, dtype, device):
    """Neither results past the last row nor results of a neighbour: all lie between canaries."""
    options = {"heads": heads, "d": 32, "dtype": dtype, "room": 0, "tail": 0}
    for splits in (0, 1, 2, 5):
        for is_packed in (False, True):
            case = CacheCase(((rows, 257),), is_packed, splits=splits, **options)
            call = case.build(device)
            call.compare(*run_between_canaries(call))


@pytest.mark.parametrize("heads", [(8, 1), (12, 3), (16, 8)], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_c36_many_splits_under_grouped_heads(d, heads, device):
    cached = 4096 if device == "cuda" else 1500
    for splits, dtype in product((1, 2, 3, 7, 16, 32), HALF_DTYPES):
        case = dense_cache(1, cached, heads=heads, d=d, dtype=dtype, splits=splits)
        call = case.build(device)
        call.compare(*run_between_canaries(call))


@pytest.mark.parametrize(
    "split", [{"num_splits": n} for n in (0, 1, 2, 7, 64)] + [{"split_size": 64}]
)
@pytest.mark.parametrize("place", [{}, {"page": 16}, {"leftpad": (5, 0)}, {"new": 2}], ids=str)
def test_c38_the_lse_is_stored_whether_asked_for_or_not(place, split, device):
    for sq, is_packed in ((1, False), (5, True), (70, False)):
        case = CacheCase(((sq, 300), (sq, 70)), is_packed, causal=True, tail=0, **place)
        asked = case.build(device).run(**{"num_splits": 0, **split})[0]
        call = case.build(device)
        options = {**call.options, "num_splits": 0, **split}
        assert torch.equal(
            flashattn_ext.flash_fwd_splitkv(call.q, call.k, call.v, **options), asked
        )


def seconds_of(call, **options):
    """The shortest of some runs."""

    def wait():
        if call.q.is_cuda:
            torch.cuda.synchronize()

    best = float("inf")
    for _ in range(9):
        wait()
        start = time.perf_counter()
        for _ in range(5):
            flashattn_ext.flash_fwd_splitkv(call.q, call.k, call.v, **call.options | options)
        wait()
        best = min(best, (time.perf_counter() - start) / 5)
    return best


@pytest.mark.parametrize("splits", [0, 16, 64])
@pytest.mark.parametrize("page", [0, 16])
def test_c41_cost_follows_the_length_and_not_the_capacity(page, splits, device):
    """64 of 131072 tokens: whoever walks the capacity needs a thousand times as long."""
    case = dense_cache(1, 64, room=131072 - 64, heads=(2, 1), page=page)
    call = case.build(device)
    call.compare(*call.run(num_splits=splits))
    single = seconds_of(call, num_splits=1)
    assert seconds_of(call, num_splits=splits) <= 8 * single + 100e-6


@pytest.fixture
def default_build(monkeypatch):
    pytest.importorskip("flashattn_ext._host")
    monkeypatch.setattr(_plan_gpus, "BUILD", {})


GPUS = {16: Gpu("small", 86, 16), 76: Gpu("76", 89, 76), 108: "A100", 132: "H200"}


@pytest.mark.parametrize("heads_kv", [64, 8])
@pytest.mark.parametrize("multiprocessors", GPUS)
def test_c43_d16_workspace_of_the_documented_size(multiprocessors, heads_kv, default_build):
    """2 S m (d + 1) 4 bytes and less than 100 a tile, whatever the batch: no gigabytes."""
    call = dict(batch=4096, heads=64, heads_kv=heads_kv, head_dim=128, seqlen_q=[1] * 4096)
    made = plan(**call, seqlen_k=4096, cache="contiguous", gpu=GPUS[multiprocessors])
    decode = made.launches[0]
    blocks, rows = decode.grid[0], decode.tile[0]
    assert rows in (16, 32) and multiprocessors <= blocks <= 3 * multiprocessors
    formula = 2 * blocks * rows * (128 + 1) * 4
    assert formula <= made.workspace_bytes <= formula + 100 * 2 * blocks + 3 * 128
    assert made.workspace_bytes < 20 * 2**20


def test_c44_prefix_in_pages_and_suffix_merge_by_natural_logarithms(device):
    """3072 + 64 keys: base 2 in one of them would be off by more than a tenth."""
    prefix = dense_cache(2, 3072, 3072, heads=(4, 2), page=16, splits=3).build(device)
    suffix = dense(2, 2, 64, heads=(4, 2), seed=1).build(device)
    suffix.q.copy_(prefix.q)
    out, lse = merge_attention_states(*prefix.run(), *suffix.run())
    for n, (a, b) in enumerate(zip(prefix.sequences, suffix.sequences, strict=True)):
        whole = Sequence(a.q, torch.cat([a.k, b.k]), torch.cat([a.v, b.v]))
        assert_close_to_reference(out[n], lse[n], whole, Rule(64**-0.5))


@pytest.mark.parametrize("d", [128, 256])
def test_c45_chosen_numbers_of_splits_are_right(d, device, default_build):
    """All that the planner picks for 1, 8, 4096 heads and 1, 2, 513 blocks, run as given."""
    chosen = set()
    for gpu in GPUS.values():
        for batch in (1, 8, 4096):
            for blocks in (1, 2, 513):
                one = dict(batch=batch, heads=1, heads_kv=1, head_dim=d, seqlen_q=200)
                made = plan(**one, seqlen_k=128 * blocks, cache="contiguous", gpu=gpu)
                assert 1 <= made.launches[0].splits <= min(2 * blocks, 256)
                chosen.add(made.launches[0].splits)
    assert len(chosen) > 2 and max(chosen) > 16
    cached = 513 * 128 if device == "cuda" else 2000
    call = packed_cache((20, cached), (1, 130), (3, 1), heads=(1, 1), d=d, tail=0).build(device)
    for splits in sorted(chosen):
        call.compare(*call.run(num_splits=splits))


def test_c66_d06_a_bound_below_the_longest(device, monkeypatch):
    """Keys: the bound plays no part. Queries: nothing outside of the results is touched, and
    sequences within the bound are right."""
    monkeypatch.delenv("FLASHATTN_EXT_CHECK", raising=False)
    call = packed((40, 130), (3, 64), causal=True, tail=0).build(device)
    call.compare(*call.run(max_seqlen_k=64))
    for bound, good in ((2, (1, 2)), (40, (0, 1, 2, 3))):
        for splits in (0, 1, 3):
            case = packed_cache((40, 130), (1, 70), (2, 9), (17, 64), page=16, causal=True, tail=0)
            call = case.but(splits=splits).build(device)
            call.options["max_seqlen_q"] = bound
            results = list(call.per_sequence(*run_between_canaries(call)))
            for n in good:
                assert_close_to_reference(*results[n], call.sequences[n], case.rule())
            call.compare_cache()


def other_rotary(call):
    return {name: call.options[name].flip(0) for name in ("rotary_cos", "rotary_sin")}


# What TOGGLES of test_splitkv.py cannot toggle alone: (case, the call's options -> others).
MORE_TOGGLES = {
    "block_table": ({"page": 16}, lambda c: {"block_table": c.options["block_table"].flip(0)}),
    "k_new": ({"new": 2}, lambda c: {"k_new": c.options["k_new"] + 1}),
    "v_new": ({"new": 2}, lambda c: {"v_new": c.options["v_new"] + 1}),
    "rotary_cos": (
        {"new": 2, "rotary": 1.0},
        lambda c: {"rotary_cos": other_rotary(c)["rotary_cos"]},
    ),
    "rotary_sin": (
        {"new": 2, "rotary": 1.0},
        lambda c: {"rotary_sin": other_rotary(c)["rotary_sin"]},
    ),
    "rotary_interleaved": ({"new": 2, "rotary": 1.0}, lambda c: {"rotary_interleaved": False}),
    "cu_seqlens_q": (
        {"packed": True, "causal": True, "slack": 8},
        lambda c: {"cu_seqlens_q": c.options["cu_seqlens_q"] + ints([0, 1, 0], c.q.device)},
    ),
}
# How the work is cut and where the result goes: test_splits.py, C66, C38 and test_splitkv_ops.py.
NOT_IN_THE_RESULT = {"max_seqlen_q", "num_splits", "split_size", "out", "return_lse"}


def test_c67_every_argument_has_its_toggle():
    arguments = set(inspect.signature(flashattn_ext.flash_fwd_splitkv).parameters)
    toggled = {*TOGGLES, *MORE_TOGGLES, *NOT_IN_THE_RESULT, "q", "k_cache", "v_cache"}
    assert arguments == toggled


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", MORE_TOGGLES)
def test_c67_the_rest_of_the_options_changes_the_result(name, splits, device):
    fields, change = MORE_TOGGLES[name]
    case = CacheCase(((8, 64), (8, 64)), splits=splits, tail=0, **fields)
    plain = case.build(device).run()[0]
    call = case.build(device)
    changed = call.run(**change(call))[0]
    assert (plain != changed).any() and changed.isfinite().all()


def test_c96_heads_and_rows_swapped(anywhere):
    """(1, 3, 71280, 128): 71280 rows, handed over as heads."""
    wrong = torch.zeros(128, dtype=torch.bfloat16, device=anywhere).expand(1, 3, 71280, 128)
    with pytest.raises(ValueError, match=r"q.*71280.*transpose"):
        flashattn_ext.flash_fwd_splitkv(wrong, wrong, wrong, cache_seqlens=3)


SHARED_MEMORY = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448}


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_c98_kernels_fit_the_shared_memory(d, capability, default_build):
    """The limits of a thread block in CUDA's programming guide, compute capabilities."""
    gpu = Gpu("some", capability, 80)
    call = dict(batch=2, heads=8, heads_kv=2, head_dim=d, seqlen_k=256, gpu=gpu)
    for cache in (None, "contiguous", 16):
        for sq in (1, 8, 256):
            for launch in plan(**call, seqlen_q=sq, cache=cache, causal=True).launches:
                assert (launch.smem_bytes or 0) <= SHARED_MEMORY[capability], launch


@pytest.mark.gpu
@pytest.mark.parametrize("merge", [flash_combine, merge_attention_states], ids=lambda f: f.__name__)
def test_c100_merge_on_a_side_stream(merge):
    """It reads what its own stream has written before, and nothing earlier."""
    sources = [torch.randn(2, 2, 50, 4, 64, device="cuda"), torch.randn(2, 2, 4, 50, device="cuda")]
    inputs = [torch.empty_like(t) for t in sources]

    def run():
        out, lse = inputs
        return merge(out, lse) if merge is flash_combine else merge(out[0], lse[0], out[1], lse[1])

    for t, source in zip(inputs, sources, strict=True):
        t.copy_(source)
    expected = [t.clone() for t in run()]
    stream = torch.cuda.Stream()
    for _ in range(50):
        for t in inputs:
            t.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(500_000)
            for t, source in zip(inputs, sources, strict=True):
                t.copy_(source)
            results = run()
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("page", [0, 16])
def test_c107_the_number_of_splits_is_not_dropped_on_the_way(page, device):
    """Through flash-attn's name: with num_splits=1 the bits of a row are those of it alone."""
    call = dense_cache(1, 300, 7, 900, 64, heads=(8, 2), page=page).build(device)
    names = {"cache_seqlens", "block_table"} & set(call.options)

    def run(rows, **options):
        given = {name: call.options[name][rows] for name in names}
        k, v = (call.k, call.v) if page else (call.k[rows], call.v[rows])
        return flash_attn_with_kvcache(call.q[rows], k, v, **given, **options)

    whole = run(slice(None), num_splits=1)
    for n in range(4):
        assert torch.equal(run(slice(n, n + 1), num_splits=1)[0], whole[n])
    assert not torch.equal(run(slice(None), num_splits=5), whole), "the number has no effect"


@pytest.mark.parametrize("d", [64, 256])
def test_c109_repeats_are_bitwise_equal(d, device):
    """Splits that the call chooses and their merge; and the merge alone."""
    call = packed_cache((1, 1025), (3, 70), (40, 90), d=d, heads=(8, 2), page=16, tail=0)
    call = call.build(device)
    parts = torch.randn(33, 2, 40, 3, d, device=device), torch.randn(33, 2, 3, 40, device=device)

    def results():
        return [*call.run(), *flash_combine(*parts)]

    first = [t.clone() for t in results()]
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000 if device == "cuda" else 5):
        different += sum((a != b).any() for a, b in zip(results(), first, strict=True))
    assert different == 0
