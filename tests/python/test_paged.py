"""Caches in pages: any page size, any order, shared pages, strided pools, tables without a column
too many, entries that are no page."""

import pytest
import torch
from caches import PAGE_SIZES, CacheCase, dense_cache, packed_cache
from cases import DTYPES, HALF_DTYPES, ints, sample
from reference import Sequence, attend
from strided import POOLS, as_bits
from test_memory import POISON
from test_splitkv import HEADS, MASKS, SPLITS

HUGE = 2**31 - 1


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page", PAGE_SIZES)
def test_c46_c56_page_sizes(page, splits, device):
    """Below, at and above a tile; powers of two and not."""
    for d in (64, 128):
        case = dense_cache(1, 300, 1, page, d=d, page=page, splits=splits)
        case.check(device)
        packed_cache((1, 300), (70, 257), d=d, page=page, splits=splits, causal=True).check(device)


@pytest.mark.parametrize("page", [256, 512])
def test_c56_long_sequences_in_large_pages(page, device):
    dense_cache(1, 1000, page=page, room=page).check(device)
    packed_cache((5, 1000), (1, 3), page=page, splits=3).check(device)


@pytest.mark.parametrize(
    "case",
    sample(
        99,
        seed=30,
        kind=CacheCase,
        page=PAGE_SIZES,
        layout=[
            {"lengths": ((1, 300), (1, 64), (1, 17))},
            {"lengths": ((1, 45), (1, 13))},
            {"lengths": ((4, 130), (4, 129))},
            {"lengths": ((1, 300), (5, 18), (129, 257)), "packed": True},
            {"lengths": ((3, 3), (1, 0), (0, 70), (2, 200)), "packed": True},
        ],
        heads=HEADS,
        d=(8, 40, 64, 72, 80, 128, 256),
        dtype=DTYPES,
        mask=MASKS,
        split=SPLITS,
        room=(0, 1, 200),
        pool=POOLS,
        table=("shuffled", "shared", "random"),
        option=({}, {"softcap": 5.0}, {"alibi": "bh"}, {"sinks": "fp32"}),
    ),
    ids=str,
)
def test_sizes(case, device):
    case.check(device)


@pytest.mark.parametrize("page", [1, 16, 48])
@pytest.mark.parametrize("pads", [(0, 5), (16, 47), (100, 0), (300, 64)], ids=str)
def test_left_padding_in_pages(pads, page, device):
    options = {"leftpad": pads, "page": page, "causal": True}
    for splits in (1, 3):
        dense_cache(2, 300, 64, splits=splits, alibi="h", **options).check(device)
        packed_cache((1, 300), (9, 64), splits=splits, window=(33, -1), **options).check(device)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("page", [16, 24, 128])
def test_c54_c80_strided_pools(page, pool, device):
    for d in (64, 128):
        for splits in (1, 2):
            case = dense_cache(1, 200, 33, d=d, heads=(16, 8), page=page, pool=pool, splits=splits)
            case.check(device)


def test_c54_interleaved_pool_of_the_report(device):
    """(N, 2, 16, 8, 128) with k = pool[:, 0] and v = pool[:, 1]."""
    options = {"heads": (8, 8), "d": 128, "page": 16, "pool": "interleaved"}
    call = packed_cache((1, 100), (17, 40), causal=True, **options).build(device)
    assert call.k.stride(0) == 2 * 16 * 8 * 128
    call.compare(*call.run())


def test_c05_zero_lengths_among_others(device):
    lengths = [(1, 40 + n % 25) for n in range(64)]
    lengths[1] = lengths[10] = (1, 0)
    for is_packed in (False, True):
        for splits in (0, 1, 2):
            case = CacheCase(tuple(lengths), is_packed, heads=(8, 2), page=16, splits=splits)
            call = case.but(tail=0).build(device)
            out, lse = call.run()
            call.compare(out, lse)
            rows = lse.transpose(0, 1) if is_packed else lse[..., 0]
            empty = (rows == -torch.inf).all(dim=1).nonzero().flatten().tolist()
            assert empty == [1, 10]


def test_c09_no_pages_at_all(device):
    """A pool without pages and a table without columns."""
    call = dense_cache(1, *[0] * 16, heads=(16, 1), page=64, room=64).build(device)
    call.k = call.k[:0]
    call.v = call.v[:0]
    table = ints([], device).view(16, 0)
    for changes in ({"block_table": table}, {"block_table": call.options["block_table"]}):
        for splits in (0, 1, 4):
            out, lse = call.run(num_splits=splits, **changes)
            assert (out == 0).all() and (lse == -torch.inf).all()


def test_c11_masked_rows_have_no_finite_lse(device):
    for page in (4, 16):
        for splits in (1, 3):
            case = dense_cache(5, 2, page=page, causal=True, splits=splits)
            out, lse = case.check(device)
            assert (out[:, :3] == 0).all() and (lse[..., :3] == -torch.inf).all()


@pytest.mark.parametrize("value", POISON, ids=str)
@pytest.mark.parametrize(("page", "cached"), [(4, 13), (16, 45), (16, 1), (64, 65)])
def test_c16_garbage_in_the_last_page(page, cached, value, device):
    for sq, splits in ((1, 1), (1, 3), (20, 2)):
        call = dense_cache(sq, cached, page=page, causal=True, splits=splits).build(device)
        for t in (*call.buffers, *call.expected):
            t.copy_(torch.where(t.isnan(), value, t))
        call.compare(*call.run())


def test_c21_two_sequences_share_a_page_of_garbage(device):
    """Unused entries of both tables name the same page, which holds NaN."""
    for page in (16, 64):
        call = dense_cache(1, 40, 70, page=page, room=200).build(device)
        table = call.options["block_table"]
        trash = next(p for p in range(len(call.k)) if p not in table)
        assert call.k[trash].isnan().all()
        call.compare(*call.run(block_table=torch.where(table < 0, trash, table)))


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "ragged"])
@pytest.mark.parametrize("splits", [0, 1, 2])
def test_c30_packed_queries_over_pages_in_splits(splits, uniform, device):
    """`out` holds NaN before: a sequence that is written over another one's place leaves some."""
    options = {"heads": (4, 4), "page": 256, "splits": splits, "tail": 0}
    for sq in (1, 3) if uniform else (0,):
        lengths = ((sq, 1000), (sq, 700)) if uniform else ((1, 300), (5, 1000), (129, 600))
        out, lse = packed_cache(*lengths, **options).check(device)
        assert not out.isnan().any() and not lse.isnan().any()


def test_c47_table_of_exactly_the_columns(device):
    for splits in (1, 2, 5):
        call = dense_cache(1, 257, page=64, room=0, splits=splits).build(device)
        assert call.options["block_table"].shape == (1, 5)
        call.compare(*call.run())


def test_c48_d07_exact_table_of_many_sequences(device):
    lengths = [(1, 1 + 7 * n % 200) for n in range(253)] + [(1, 200)]
    for is_packed in (False, True):
        options = {"heads": (2, 1), "d": 32, "page": 16, "room": 0, "tail": 0}
        CacheCase(tuple(lengths), is_packed, **options).check(device)


@pytest.mark.parametrize("row_stride", [0, 3])
def test_table_rows_may_lie_apart(row_stride, device):
    call = dense_cache(1, 100, 70, 3, page=16).build(device)
    table = call.options["block_table"]
    b, columns = table.shape
    wide = torch.full((b, columns + row_stride), HUGE, dtype=torch.int32, device=device)
    wide[:, :columns] = table
    call.compare(*call.run(block_table=wide[:, :columns]))


@pytest.mark.parametrize("unused", [-1, HUGE, -(2**31)])
def test_c51_unused_entries_are_not_followed(unused, device):
    for page in (1, 16, 128):
        for splits in (0, 1, 3):
            options = {"page": page, "unused": unused, "splits": splits, "room": 300}
            dense_cache(1, 100, 5, **options).check(device)
            packed_cache((20, 100), (1, 0), **options).check(device)


@pytest.mark.parametrize("bad", ["pages", -1, HUGE, -(2**31)])
@pytest.mark.parametrize("page", [1, 16, 64, 128])
def test_c52_d05_bad_pages_hold_no_keys(page, bad, device):
    """A used entry that names no page: its tokens are not there, and nothing foreign is read."""
    for splits in (1, 3):
        for sq in (1, 5):
            call = dense_cache(sq, 200, 130, page=page, splits=splits).build(device)
            table = call.options["block_table"].clone()
            column = 129 // page // 2
            table[0, column] = len(call.k) if bad == "pages" else bad
            out, lse = call.run(block_table=table)
            first, last = column * page, min(200, (column + 1) * page)
            seq = call.sequences[0]
            seq.k[first:last] = 0
            seq.v[first:last] = 0
            expected = without(seq, range(first, last), call.case.rule())
            torch.testing.assert_close(lse[0].double(), expected[1], rtol=0, atol=1e-4)
            torch.testing.assert_close(out[0].double(), expected[0], rtol=2**-7, atol=4e-3)
            call.compare_cache()


def without(seq, hidden, rule):
    """The oracle with some keys left out, of a call without masks."""
    keep = [j for j in range(len(seq.k)) if j not in hidden]
    return attend(Sequence(seq.q, seq.k[keep], seq.v[keep]), rule)


def test_c52_checked_mode_names_the_entry(device, monkeypatch):
    call = dense_cache(1, 100, 70, page=16).build(device)
    monkeypatch.setenv("FLASHATTN_EXT_CHECK", "1")
    call.compare(*call.run())  # entries that are not used may hold anything
    table = call.options["block_table"].clone()
    table[1, 2] = len(call.k)
    with pytest.raises(ValueError, match=rf"block_table\[1.*2\].*{len(call.k)}"):
        call.run(block_table=table)
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\].*-3"):
        call.run(cache_seqlens=ints([100, -3], device))


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_c50_c103_lengths_beyond_the_table(splits, device):
    """One token more than the table holds, and far more: the rest is not there."""
    for page in (16, 64):
        call = dense_cache(2, 128, 128, page=page, room=0, splits=splits).build(device)
        for extra in (1, 1000, HUGE - 128):
            lengths = ints([128 + extra, 128], device)
            call.compare(*call.run(cache_seqlens=lengths))
        with pytest.raises(ValueError, match="cache_seqlens.*129"):
            call.run(cache_seqlens=129)


def test_c55_two_equal_sequences_shorter_than_a_page(device):
    for sq, splits in ((1, 1), (1, 2), (3, 1)):
        call = dense_cache(sq, 1, 1, page=16, splits=splits).build(device)
        call.q[1] = call.q[0]
        (one, two), slot = call.options["block_table"][:, 0].tolist(), 0
        call.k[two, slot], call.v[two, slot] = call.k[one, slot], call.v[one, slot]
        call.reread()
        out, lse = call.run()
        call.compare(out, lse)
        assert torch.equal(out[0], out[1]) and torch.equal(lse[0], lse[1])
        assert (out != 0).any()


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("sq", [1, 4, 70])
def test_shared_prefix_is_read_by_all(sq, dtype, device):
    for page in (1, 16, 64):
        options = {"dtype": dtype, "page": page, "table": "shared", "causal": True}
        call = dense_cache(sq, 200, 140, 190, **options).build(device)
        table = call.options["block_table"]
        assert (table[:, 0] == table[0, 0]).all()
        call.compare(*call.run())


def test_nothing_but_results_is_written(device):
    """The caches, the table and the lengths are as they were, bit by bit."""
    call = packed_cache((1, 100), (20, 70), page=16, pool="padded", splits=3).build(device)
    tensors = [call.q, *(o for o in call.options.values() if torch.is_tensor(o))]
    before = [t.clone() for t in tensors]
    call.run()
    call.compare_cache()
    for t, copy in zip(tensors, before, strict=True):
        assert torch.equal(as_bits(t), as_bits(copy))
