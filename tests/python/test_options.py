"""Softcap, ALiBi, sinks, scale, seqused_k: alone, in pairs, at their extremes; none is ignored."""

from itertools import combinations

import pytest
import torch
from cases import DTYPES, HALF_DTYPES, Case, dense, packed, sample
from reference import attend
from strided import VARIANTS

import flashattn_ext

SINGLE = {
    "causal": {"causal": True},
    "left": {"window": (40, -1)},
    "right": {"window": (-1, 9)},
    "softcap": {"softcap": 4.0},
    "alibi_h": {"alibi": "h"},
    "alibi_bh": {"alibi": "bh"},
    "sinks_fp32": {"sinks": "fp32"},
    "sinks_same": {"sinks": "same"},
    "scale": {"scale": 0.03},
    "scale_0": {"scale": 0.0},
    "scale_negative": {"scale": -0.1},
    "used": {"used": (60, 1)},
}
PAIRS = [{**SINGLE[a], **SINGLE[b]} for a, b in combinations(SINGLE, 2)]
LENGTHS = {False: ((77, 140), (77, 140)), True: ((77, 140), (90, 66))}


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", SINGLE)
def test_alone(name, is_packed, device):
    for d in (64, 128, 256):
        Case(LENGTHS[is_packed], is_packed, d=d, **SINGLE[name]).check(device)


@pytest.mark.parametrize(
    "case",
    sample(
        len(PAIRS),
        seed=5,
        options=PAIRS,
        layout=[{"packed": kind, "lengths": lengths} for kind, lengths in LENGTHS.items()],
        d=(32, 64, 80, 128, 192, 256),
        dtype=DTYPES,
        heads=((4, 2), (3, 1), (2, 2)),
    ),
    ids=str,
)
def test_in_pairs(case, device):
    case.check(device)


@pytest.mark.parametrize("d", [64, 96, 256])
def test_all_at_once(d, device):
    options = {"causal": True, "window": (50, -1), "softcap": 6.0, "sinks": "fp32", "scale": 0.2}
    for alibi in ("h", "bh"):
        dense(2, 130, 90, d=d, alibi=alibi, used=(90, 33), **options).check(device)
        packed((130, 90), (1, 64), (5, 0), d=d, alibi=alibi, **options).check(device)


TOGGLES = {
    "causal": True,
    "window_size": (10, -1),
    "softcap": 2.0,
    "softmax_scale": 0.5,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05]),
    "sinks": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "seqused_k": torch.tensor([19, 63], dtype=torch.int32),
}


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("name", TOGGLES)
def test_c67_every_option_changes_the_result(name, layout, device):
    """Of every sequence and head, in out and in lse."""
    case = packed((64, 64), (64, 64), tail=0) if layout == "packed" else dense(2, 64, 64)
    call = case.build(device)
    value = TOGGLES[name].to(device) if torch.is_tensor(TOGGLES[name]) else TOGGLES[name]
    plain, changed = call.run(), call.run(**{name: value})
    pairs = zip(call.per_sequence(*plain), call.per_sequence(*changed), strict=True)
    for (out, lse), (other_out, other_lse) in pairs:
        for head in range(4):
            assert (out[:, head] != other_out[:, head]).any()
            assert ((lse[head] - other_lse[head]).abs() > 1e-3).any()


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_c29_three_caps_three_results(dtype, layout, device):
    lengths = ((100, 100), (3, 100)) if layout == "packed" else ((100, 100),) * 2
    call = Case(lengths, layout == "packed", dtype=dtype, causal=True).build(device)
    call.q.mul_(4)
    results = []
    for softcap in (0.0, 5.0, 50.0):
        call.case = call.case.but(softcap=softcap)
        out, lse = call.run(softcap=softcap)
        call.compare(out, lse)
        results.append(torch.cat([part.flatten() for _, part in call.per_sequence(out, lse)]))
    for a, b in combinations(results, 2):
        assert (a - b).abs().max() > 1e-2


@pytest.mark.parametrize("score", [5_000.0, -5_000.0, 10_000.0, -10_000.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c26_softcap_saturates(score, dtype, device):
    for d in (64, 128):
        case = dense(1, 3, 70, heads=(1, 1), d=d, dtype=dtype, softcap=50.0, scale=1.0)
        call = case.build(device)
        call.q.fill_(score / 100)
        call.k.fill_(100 / d)
        call.k[:, 0] = 0  # one key whose score is 0
        out, lse = call.run()
        weight = attend(call.sequences[0], call.case.rule())[1]
        assert out.isfinite().all()
        torch.testing.assert_close(lse[0].double(), weight, rtol=0, atol=1e-3)
        expected = call.v[0, 1:].float().mean(0) if score > 0 else call.v[0, 0].float()
        torch.testing.assert_close(out[0].float(), expected.expand(3, -1, -1), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("d", [64, 128])
def test_c27_capped_future_has_no_influence(d, device):
    call = dense(2, 150, 150, d=d, softcap=1.0, causal=True).build(device)
    rows = slice(0, 100)
    before = [t.clone() for t in call.run()]
    call.v[:, 100:] = 1e4
    out, lse = call.run()
    assert torch.equal(before[0][:, rows], out[:, rows])
    assert torch.equal(before[1], lse)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_c28_cap_then_bias_then_mask(causal, device):
    call = dense(1, 70, 512, softcap=5.0, alibi="h", causal=causal).build(device)
    call.options["alibi_slopes"].copy_(torch.tensor([1.0, 0.5, 0.1, 0.01]))
    call.compare(*call.run())


@pytest.mark.parametrize("shape", [(1, 300), (60, 60), (40, 200), (200, 40)], ids=str)
@pytest.mark.parametrize("alibi", ["h", "bh"])
def test_c75_slopes_per_head_and_per_sequence(alibi, shape, device):
    for heads in ((6, 2), (4, 4)):
        dense(3, *shape, heads=heads, alibi=alibi).check(device)
        packed(shape, (5, 5), shape, heads=heads, alibi=alibi).check(device)


def test_c77_bias_is_the_same_dense_and_packed(device):
    """One query on many keys, not causal: the distance is absolute and aligned at the last key."""
    case = packed((1, 300), (1, 300), alibi="h", tail=0)
    call, twin = case.build(device), dense(2, 1, 300, alibi="h").build(device)
    for mine, theirs in zip((twin.q, twin.k, twin.v), (call.q, call.k, call.v), strict=True):
        mine.copy_(theirs.view_as(mine))
    twin.options["alibi_slopes"] = call.options["alibi_slopes"]
    assert torch.equal(twin.run()[0].flatten(0, 1), call.run()[0])


def test_slopes_and_sinks_of_zero(device):
    """A slope of 0 is no bias; a sink at the score of a key is one more key of value 0."""
    call = dense(2, 33, 65).build(device)
    plain = call.run()
    biased = call.run(alibi_slopes=torch.zeros(4, device=device))
    assert torch.equal(plain[0], biased[0])
    call.q.zero_()
    out, lse = call.run(sinks=torch.zeros(4, device=device))
    expected = (call.v.double().sum(1) / 66).repeat_interleave(2, dim=1)[:, None].expand_as(out)
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(lse, torch.full_like(lse, 66).log(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sink", [-1e4, -50.0, 50.0, 1e4])
def test_extreme_sinks(sink, device):
    """A sink far below the scores changes nothing; one far above takes all the weight."""
    call = dense(1, 33, 65).build(device)
    plain = call.run()
    out, lse = call.run(sinks=torch.full((4,), sink, device=device))
    if sink < 0:
        assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
    else:
        assert (out.abs() < 1e-15).all()
        torch.testing.assert_close(lse, torch.full_like(lse, sink), rtol=1e-6, atol=0)


@pytest.mark.parametrize("used", [(0, 140), (1, 139), (64, 65), (128, 63), (-5, 10_000)], ids=str)
def test_seqused_k(used, device):
    """Lengths on the device are not trusted: negative is 0, too long is all there is."""
    for lengths in (((70, 140), (70, 140)), ((70, 140), (5, 80))):
        for options in ({}, {"causal": True}, {"window": (20, 5), "alibi": "h"}):
            is_packed = lengths[0] != lengths[1]
            Case(lengths, is_packed, used=used, **options).check(device)


@pytest.mark.parametrize("gain", [10.0, 40.0])
@pytest.mark.parametrize("d", [64, 256])
def test_large_scores(gain, d, device):
    """Sharp rows: the running maximum moves by tens, and nothing overflows."""
    call = dense(1, 60, 300, heads=(2, 1), d=d).build(device)
    call.q.mul_(gain)
    out, lse = call.run()
    assert out.isfinite().all()
    expected, expected_lse = attend(call.sequences[0], call.case.rule())
    torch.testing.assert_close(out[0].double(), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse[0].double(), expected_lse, rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize("strides", VARIANTS)
def test_options_over_strides(strides, device):
    case = dense(2, 70, 70, strides=strides, alibi="bh", sinks="same", softcap=5.0, causal=True)
    case.check(device)


def test_default_scale_is_of_the_callers_head_dim(device):
    call = dense(1, 20, 30, d=72).build(device)
    explicit = call.run(softmax_scale=72**-0.5)
    assert torch.equal(call.run()[0], explicit[0])
    assert flashattn_ext.flash_fwd(call.q, call.k, call.v).shape == call.q.shape
