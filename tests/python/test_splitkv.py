"""Queries over a contiguous cache: dense and packed, lengths, heads, options, strides."""

from itertools import combinations

import pytest
import torch
from caches import CacheCase, dense_cache, packed_cache
from cases import DTYPES, HALF_DTYPES, HEAD_DIMS, dense, sample
from reference import attend
from strided import POOLS
from test_options import SINGLE

import flashattn_ext

HEADS = ((1, 1), (4, 2), (6, 2), (4, 1), (8, 1), (5, 1), (9, 3), (16, 2))
MASKS = (
    {},
    {"causal": True},
    {"causal": True, "window": (40, -1)},
    {"window": (7, 5)},
    {"window": (-1, 5)},
)
SPLITS = (
    {},
    {"splits": 1},
    {"splits": 2},
    {"splits": 3},
    {"splits": 7},
    {"split_size": 64},
    {"split_size": 192},
)
CACHED = (1, 63, 64, 65, 127, 128, 129, 200, 257, 300)
DENSE_LENGTHS = [
    tuple((sq, CACHED[(n + 3 * i) % 10]) for i in range(1 + n % 3))
    for n, sq in enumerate((1, 1, 2, 1, 3, 4, 5, 8, 1, 16, 17, 1, 33, 64, 65, 1, 130))
]
RAGGED_LENGTHS = [
    ((1, 300), (5, 18), (129, 257)),
    ((1, 64), (1, 1), (1, 129), (1, 65)),
    ((3, 0), (1, 5), (0, 70), (2, 200)),
    ((4, 100), (4, 130), (4, 4)),
    ((65, 64), (1, 257)),
    ((16, 10),),
]
OPTIONS = {name: fields for name, fields in SINGLE.items() if name != "used"}
PAIRS = [{**OPTIONS[a], **OPTIONS[b]} for a, b in combinations(OPTIONS, 2)]


@pytest.mark.parametrize(
    "case",
    sample(
        110,
        seed=20,
        kind=CacheCase,
        layout=[{"lengths": lengths} for lengths in DENSE_LENGTHS]
        + [{"lengths": lengths, "packed": True} for lengths in RAGGED_LENGTHS],
        heads=HEADS,
        d=HEAD_DIMS,
        dtype=DTYPES,
        mask=MASKS,
        split=SPLITS,
        room=(0, 1, 70, 300),
        pool=POOLS,
        strides=("plain", "bhsd", "padded"),
    ),
    ids=str,
)
def test_sizes(case, device):
    case.check(device)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims(d, splits, device):
    for dtype in HALF_DTYPES:
        dense_cache(1, 130, 65, d=d, dtype=dtype, heads=(6, 2), splits=splits).check(device)
    case = packed_cache((1, 130), (20, 65), d=d, heads=(3, 1), splits=splits, causal=True)
    case.check(device)


@pytest.mark.parametrize("heads", [(32, 4), (8, 2), (5, 1), (17, 1), (40, 1), (64, 64)], ids=str)
def test_c64_query_rows_around_the_head_ratio(heads, device):
    """Query heads of a key/value head may share a tile: rows below, at and above a full one."""
    group = heads[0] // heads[1]
    for cached in (1, 3, 7, 8, 9, 100):
        dense_cache(1, cached, heads=heads, causal=True).check(device)
    for sq in {1, 2, max(1, group - 1), group, group + 1}:
        for cached in (sq, 200):
            dense_cache(sq, cached, 2, heads=heads, causal=True).check(device)
            packed_cache((sq, cached), (1, 9), heads=heads, causal=True, splits=2).check(device)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_alone(name, is_packed, device):
    for sq, splits in ((1, 1), (1, 3), (5, 0), (70, 2)):
        lengths = ((sq, 140), (sq + is_packed, 66))
        CacheCase(lengths, is_packed, splits=splits, **OPTIONS[name]).check(device)


@pytest.mark.parametrize(
    "case",
    sample(
        len(PAIRS),
        seed=21,
        kind=CacheCase,
        options=PAIRS,
        layout=[
            {"lengths": ((1, 140), (1, 66))},
            {"lengths": ((4, 140), (4, 66))},
            {"lengths": ((70, 140), (1, 66)), "packed": True},
        ],
        place=({}, {"leftpad": (5, 66)}, {"batch_idx": True}, {"leftpad": (130, 0)}),
        d=(32, 64, 80, 128, 192, 256),
        dtype=DTYPES,
        heads=((4, 2), (3, 1), (8, 1)),
        split=SPLITS,
    ),
    ids=str,
)
def test_in_pairs(case, device):
    case.check(device)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("d", [64, 96, 256])
def test_all_at_once(d, splits, device):
    options = {"causal": True, "window": (50, -1), "softcap": 6.0, "sinks": "fp32", "scale": 0.2}
    options |= {"leftpad": (3, 70), "batch_idx": True, "pool": "k_padded", "splits": splits}
    for alibi in ("h", "bh"):
        dense_cache(3, 130, 90, d=d, alibi=alibi, **options).check(device)
        packed_cache((1, 130), (90, 100), d=d, alibi=alibi, **options).check(device)


TOGGLES = {
    "causal": True,
    "window_size": (10, -1),
    "softcap": 2.0,
    "softmax_scale": 0.5,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05]),
    "sinks": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "cache_seqlens": torch.tensor([60, 59], dtype=torch.int32),
    "cache_leftpad": torch.tensor([1, 2], dtype=torch.int32),
    "cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("name", TOGGLES)
def test_c67_every_option_changes_the_result(name, layout, splits, device):
    """Of every sequence and head, in out and in lse (C29 among them: the cap)."""
    layout = dense_cache(8, 64, 64) if layout == "dense" else packed_cache((8, 64), (8, 64), tail=0)
    call = layout.but(splits=splits).build(device)
    value = TOGGLES[name].to(device) if torch.is_tensor(TOGGLES[name]) else TOGGLES[name]
    plain, changed = call.run(), call.run(**{name: value})
    pairs = zip(call.per_sequence(*plain), call.per_sequence(*changed), strict=True)
    for (out, lse), (other_out, other_lse) in pairs:
        for head in range(4):
            assert (out[:, head] != other_out[:, head]).any()
            assert ((lse[head] - other_lse[head]).abs() > 1e-3).any()


@pytest.mark.parametrize("splits", [0, 1, 4])
@pytest.mark.parametrize("sinks", ["", "fp32"])
def test_c03_every_sentinel_is_the_same(sinks, splits, device):
    """No tokens, all of them padding, or all of them hidden: out 0, lse -inf or the sink."""
    for case in (
        dense_cache(4, 0),
        dense_cache(1, 0, 0, room=0),
        dense_cache(4, 9, leftpad=(9,)),
        packed_cache((4, 0), (3, 0), tail=0),
        packed_cache((4, 9), leftpad=(9,), tail=0),
        dense_cache(1, 0, one_length=True),
    ):
        out, lse = case.but(sinks=sinks, splits=splits).check(device)
        assert (out == 0).all()
        assert lse.isfinite().all() if sinks else (lse == -torch.inf).all()
    out, lse = dense_cache(8, 4, causal=True, splits=splits).check(device)
    assert (out[:, :4] == 0).all() and (lse[..., :4] == -torch.inf).all()
    assert lse[..., 4:].isfinite().all()


def test_no_sequences_and_no_queries(device):
    out, lse = dense_cache(3, room=4).build(device).run()
    assert out.shape == (0, 3, 4, 64) and lse.shape == (0, 4, 3)
    out, lse = packed_cache(tail=4).build(device).run()
    assert out.isnan().all() and lse.shape == (4, 4)
    packed_cache((0, 70), (0, 0), tail=0).check(device)
    dense_cache(0, 70, 5).check(device)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("d", [64, 128])
def test_c23_one_key(d, splits, device):
    call = dense_cache(1, 1, d=d, splits=splits).build(device)
    out, lse = call.run()
    call.compare(out, lse)
    assert torch.equal(out[0, 0], call.k.new_tensor(call.v[0, 0].tolist()).repeat_interleave(2, 0))


@pytest.mark.parametrize("splits", [0, 16, 64])
def test_c41_capacity_far_above_the_length(splits, device):
    cached = dense_cache(1, 64, room=131072 - 64, heads=(2, 1), splits=splits)
    cached.check(device)
    dense_cache(1, 64, room=0, heads=(2, 1), splits=splits).check(device)


@pytest.mark.parametrize("sq", [2, 4, 16, 65])
@pytest.mark.parametrize("splits", [1, 3])
def test_c63_several_queries_on_many_tokens(splits, sq, device):
    """Equal to the last rows of the prefill."""
    prefill = dense(1, 100, 100, causal=True).build(device)
    out, lse = prefill.run()
    last = flashattn_ext.flash_fwd_splitkv(
        prefill.q[:, -sq:].contiguous(), prefill.k, prefill.v, cache_seqlens=100, causal=True,
        num_splits=splits, return_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(last[0], out[:, -sq:], rtol=2**-7, atol=2e-3)
    torch.testing.assert_close(last[1], lse[..., -sq:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_length_as_int_and_as_tensor(is_packed, device):
    lengths = ((3, 100), (3, 100))
    case = CacheCase(lengths, is_packed, one_length=True, causal=True, tail=0)
    mine, theirs = case.build(device), case.but(one_length=False).build(device)
    mine.compare(*mine.run())
    for a, b in zip(mine.run(num_splits=1), theirs.run(num_splits=1), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("score", [5_000.0, -10_000.0])
@pytest.mark.parametrize("splits", [1, 3])
def test_c26_softcap_saturates(splits, score, device):
    call = dense_cache(1, 200, heads=(1, 1), softcap=50.0, scale=1.0, splits=splits).build(device)
    call.q.fill_(score / 100)
    call.k[:, :200] = 100 / 64
    call.k[:, 0] = 0  # one key whose score is 0
    call.reread()
    out, lse = call.run()
    weight = attend(call.sequences[0], call.case.rule())[1]
    assert out.isfinite().all()
    torch.testing.assert_close(lse[0].double(), weight, rtol=0, atol=1e-3)
