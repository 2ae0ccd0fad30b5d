"""However the keys are cut: the same result; the same bits run to run and batch to batch; a decode
row is the last row of the prefill."""

from itertools import combinations

import pytest
import torch
from caches import CacheCase, dense_cache, packed_cache
from cases import DTYPES, HALF_DTYPES, Case
from reference import LSE_TOLERANCE

import flashattn_ext

SPLITS = (0, 1, 2, 3, 7, 128)
AGREE = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (90, -1)},
    "narrow": {"window": (3, 2)},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi": "bh"},
    "sinks": {"sinks": "fp32"},
    "leftpad": {"leftpad": (70, 200, 0)},
    "paged": {"page": 16},
    "page1": {"page": 1},
}


@pytest.mark.parametrize("sq", [1, 5, 70])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", AGREE)
def test_every_number_of_splits_agrees(name, is_packed, sq, device):
    """Among them more than there are blocks; in out and in lse."""
    lengths = ((sq, 400), (sq, 257), (sq, 3))
    call = CacheCase(lengths, is_packed, tail=0, **AGREE[name]).build(device)
    results = [call.run(num_splits=splits) for splits in (*SPLITS, 256)]
    results += [call.run(num_splits=0, split_size=size) for size in (64, 128, 1024)]
    for out, lse in results:
        call.compare(out, lse)
        torch.testing.assert_close(lse, results[1][1], rtol=0, atol=2e-5)
        torch.testing.assert_close(out, results[1][0], rtol=2**-6, atol=4e-3)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_number_of_splits_by_type_and_head_dim(dtype, d, device):
    for splits in (2, 3, 7):
        dense_cache(1, 513, 64, d=d, dtype=dtype, heads=(8, 2), splits=splits).check(device)


def test_sinks_count_once(device):
    """However many splits: a large sink would show at once."""
    call = dense_cache(2, 300, 5, sinks="fp32").build(device)
    call.options["sinks"].fill_(8.0)
    call.sequences = [
        type(seq)(seq.q, seq.k, seq.v, None, call.options["sinks"]) for seq in call.sequences
    ]
    for splits in SPLITS:
        call.compare(*call.run(num_splits=splits))
    call.compare(*call.run(num_splits=0, split_size=64))


FIXED = [{"num_splits": 1}, {"split_size": 64}, {"split_size": 128}]
MATES = {
    "alone": (),
    "long": ((1, 700),) * 3,
    "short": ((1, 1), (1, 0), (1, 5)),
    "many": tuple((1, 17 * n) for n in range(30)),
}


def run_alone(call, n, **changes):
    """Sequence n of a dense call over a contiguous cache, on its own."""
    o = {name: call.options[name] for name in ("causal", "window_size", "softcap")}
    o["cache_seqlens"] = call.options["cache_seqlens"][n : n + 1]
    part = (t[n : n + 1] for t in (call.q, call.k, call.v))
    return flashattn_ext.flash_fwd_splitkv(*part, **o, **changes, return_lse=True)


@pytest.mark.parametrize("fixed", FIXED, ids=str)
@pytest.mark.parametrize("sq", [1, 5, 70])
@pytest.mark.parametrize("cached", [(300, 64, 129, 1, 500)], ids=str)
def test_c107_bits_do_not_depend_on_the_batch(cached, sq, fixed, device):
    for options in ({}, {"causal": True, "window": (200, -1)}):
        call = dense_cache(sq, *cached, heads=(8, 2), **options).build(device)
        out, lse = call.run(**fixed | {"num_splits": fixed.get("num_splits", 0)})
        for n in range(len(cached)):
            alone = run_alone(call, n, **fixed)
            assert torch.equal(alone[0][0], out[n]) and torch.equal(alone[1][0], lse[n])


def move(call, n, target, m):
    """Gives sequence m of `target` the data of sequence n of `call`."""
    begin, end = target.rows[m]
    seq = call.sequences[n]
    (target.q[begin:end] if target.case.packed else target.q[m]).copy_(seq.q)
    places = target.cache.where(m, *target.case.span(m))
    target.k[places], target.v[places] = seq.k, seq.v


@pytest.mark.parametrize("fixed", FIXED, ids=str)
@pytest.mark.parametrize("mates", MATES)
def test_c107_bits_do_not_depend_on_batch_mates_capacity_or_pages(mates, fixed, device):
    fixed = {"num_splits": 0, **fixed}
    one = dense_cache(1, 300, heads=(8, 2), room=0).build(device)
    out, lse = one.run(**fixed)
    for place in ({}, {"page": 16}, {"page": 48}, {"page": 1}, {"room": 2000}, {"batch_idx": True}):
        for packed in (False, True):
            lengths = (*MATES[mates][:1], (1, 300), *MATES[mates][1:])
            call = CacheCase(lengths, packed, heads=(8, 2), **place, tail=0).build(device)
            m = lengths.index((1, 300))
            move(one, 0, call, m)
            got, got_lse = list(call.per_sequence(*call.run(**fixed)))[m]
            assert torch.equal(got, out[0]) and torch.equal(got_lse, lse[0]), (place, packed)


@pytest.mark.parametrize("fixed", FIXED, ids=str)
@pytest.mark.parametrize("mates", [(129, 70), (8, 5)], ids=str)
def test_c107_bits_do_not_depend_on_a_prefill_in_the_batch(mates, fixed, device):
    """One query token beside chunks of many, or of a few, which have a kernel of their own."""
    fixed = {"num_splits": 0, **fixed}
    one = dense_cache(1, 300, heads=(8, 2)).build(device)
    out, lse = one.run(**fixed)
    lengths = ((mates[0], 400), (1, 300), (mates[1], 90))
    call = packed_cache(*lengths, heads=(8, 2), tail=0).build(device)
    move(one, 0, call, 1)
    got, got_lse = list(call.per_sequence(*call.run(**fixed)))[1]
    assert torch.equal(got, out[0]) and torch.equal(got_lse, lse[0])


@pytest.mark.parametrize("slack", [1, 100, 100_000])
@pytest.mark.parametrize("lengths", [((1, 300), (9, 70), (40, 64)), ((1, 300), (8, 70))], ids=str)
def test_result_does_not_depend_on_max_seqlen_q(lengths, slack, device):
    case = packed_cache(*lengths, heads=(8, 2), page=16, causal=True, tail=0)
    call = case.build(device)
    first = call.run(num_splits=1)
    bound = call.options["max_seqlen_q"] + slack
    for a, b in zip(first, call.run(num_splits=1, max_seqlen_q=bound), strict=True):
        assert torch.equal(a, b)


OPTIONS = {
    "window": {"window": (128, -1)},
    "softcap": {"softcap": 4.0},
    "alibi_h": {"alibi": "h"},
    "alibi_bh": {"alibi": "bh"},
    "sinks": {"sinks": "fp32"},
    "scale": {"scale": 0.07},
    "grouped": {"heads": (8, 1)},
    "paged": {"page": 16},
    "d128": {"d": 128},
    "packed": {"packed": True},
    "many": {"splits": 3},
    "last4": {"last": 4},
}
ALONE_AND_PAIRS = [(name,) for name in OPTIONS] + list(combinations(OPTIONS, 2))


@pytest.mark.parametrize("names", ALONE_AND_PAIRS, ids="-".join)
def test_c73_decode_row_is_the_last_row_of_the_prefill(names, device):
    """For every option alone and in pairs (C77: the bias too)."""
    fields = {"dtype": torch.float16, "causal": True, "tail": 0}
    for name in names:
        fields |= OPTIONS[name]
    last = fields.pop("last", 1)
    cache_fields = {name: fields.pop(name) for name in ("page", "splits") if name in fields}
    sizes = (300, 300)
    prefill = Case(tuple((n, n) for n in sizes), **fields).build(device)
    out, lse = zip(*prefill.per_sequence(*prefill.run()), strict=True)
    decode = CacheCase(tuple((last, n) for n in sizes), **fields, **cache_fields).build(device)
    for n, seq in enumerate(prefill.sequences):
        rows = slice(*decode.rows[n])
        (decode.q[rows] if decode.case.packed else decode.q[n]).copy_(seq.q[-last:])
        places = decode.cache.where(n, 0, sizes[n])
        decode.k[places], decode.v[places] = seq.k, seq.v
    for name in ("alibi_slopes", "sinks"):
        if name in prefill.options:
            decode.options[name] = prefill.options[name]
    for n, (row, row_lse) in enumerate(decode.per_sequence(*decode.run())):
        torch.testing.assert_close(row, out[n][-last:], rtol=2**-9, atol=1e-3)
        torch.testing.assert_close(row_lse, lse[n][:, -last:], rtol=0, atol=LSE_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("splits", [0, 1, 5])
def test_c109_repeats_are_bitwise_equal(splits, d, device):
    repeats = 1000 if device == "cuda" else 5
    for case in (
        dense_cache(1, 1025, 3, 700, d=d, heads=(8, 2), page=16),
        packed_cache((1, 1025), (70, 300), (5, 5), d=d, causal=True, tail=0),
        dense_cache(1, 500, 20, d=d, new=1, rotary=1.0),
    ):
        call = case.but(splits=splits).build(device)
        out, lse = (t.clone() for t in call.run())
        call.compare(out, lse)
        different = torch.zeros((), dtype=torch.int64, device=device)
        given = call.nan_out()
        for _ in range(repeats):
            again, again_lse = call.run(out=given)
            different += (again != out).any() | (again_lse != lse).any()
        assert different == 0, f"{different} of {repeats} runs"


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("cached", [1, 2, 63, 64, 65])
def test_more_splits_than_blocks(cached, dtype, device):
    for splits in (2, 16, 128, 256):
        dense_cache(1, cached, dtype=dtype, splits=splits, room=0).check(device)
        packed_cache((1, cached), (3, 0), dtype=dtype, splits=splits, page=16).check(device)
