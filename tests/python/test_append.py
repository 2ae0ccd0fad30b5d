"""New tokens written into the cache before they are attended to, with and without rotation."""

import pytest
import torch
from caches import PAGE_SIZES, CacheCase, dense_cache, packed_cache
from cases import DTYPES, HALF_DTYPES, HEAD_DIMS, ints, sample
from reference import rotate
from strided import POOLS

import flashattn_ext

MASKS = ({}, {"causal": True}, {"window": (30, -1)}, {"causal": True, "window": (65, -1)})
ROTARY = (
    {},
    {"rotary": 1.0},
    {"rotary": 0.5},
    {"rotary": 1.0, "interleaved": False},
    {"rotary": 0.5, "interleaved": False},
)
PLACES = ({}, {"batch_idx": True}, {"leftpad": (3, 0)}, *({"page": page} for page in PAGE_SIZES))


@pytest.mark.parametrize(
    "case",
    sample(
        100,
        seed=40,
        kind=CacheCase,
        place=PLACES,
        layout=[
            {"lengths": ((1, 100), (1, 63)), "new": 1},
            {"lengths": ((4, 64), (4, 0)), "new": 4},
            {"lengths": ((5, 200), (5, 7)), "new": 2},
            {"lengths": ((1, 300), (33, 18)), "new": 70, "packed": True},
            {"lengths": ((2, 3), (1, 129)), "new": 2, "packed": True},
        ],
        rotary=ROTARY,
        mask=MASKS,
        d=(32, 64, 96, 128, 256),
        dtype=DTYPES,
        heads=((4, 2), (8, 1), (3, 3), (6, 2)),
        split=({}, {"splits": 1}, {"splits": 3}, {"split_size": 64}),
        pool=POOLS,
        option=({}, {"alibi": "bh"}, {"sinks": "fp32"}, {"softcap": 5.0}),
    ),
    ids=str,
)
def test_sizes(case, device):
    case.check(device)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_rotary_of_every_head_dim(d, interleaved, device):
    """D13: also where the rotated part ends inside the head (d = 72: 64 of 72)."""
    for fraction in (0.5, 1.0):
        options = {"rotary": fraction, "interleaved": interleaved, "new": 3, "causal": True}
        case = dense_cache(3, 70, 0, d=d, **options)
        if case.rotary_dim:
            case.check(device)
            case.but(causal=False, page=16).check(device)


@pytest.mark.parametrize("is_local", [False, True], ids=["full", "causal"])
def test_queries_turn_by_their_own_place_or_by_the_first(is_local, device):
    """Query i: cache_seqlens + i when causal or windowed, otherwise cache_seqlens for all."""
    for mask in (
        ({"causal": True}, {"window": (200, -1)}, {"window": (-1, 200)}) if is_local else ({},)
    ):
        case = dense_cache(5, 40, 9, new=5, rotary=1.0, **mask)
        case.check(device)
        packed_cache((5, 40), (2, 9), new=5, rotary=1.0, **mask).check(device)


@pytest.mark.parametrize("page", [0, 1, 16])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
def test_c60_one_token_at_a_time_equals_all_at_once(interleaved, page, device):
    """A sequence grown by single tokens leaves the cache that one long append leaves."""
    options = {"page": page, "rotary": 1.0, "interleaved": interleaved, "dtype": torch.float16}
    call = dense_cache(20, 30, 7, new=20, causal=True, room=0, **options).build(device)
    out, _ = call.run()
    call.compare_cache()
    whole = [buffer.clone() for buffer in call.buffers]
    single = dense_cache(20, 30, 7, new=20, causal=True, room=0, **options).build(device)
    o = dict(single.options)
    rows = []
    for t in range(20):
        o["cache_seqlens"] = single.options["cache_seqlens"] + t
        o["k_new"], o["v_new"] = (single.options[n][:, t : t + 1] for n in ("k_new", "v_new"))
        q = single.q[:, t : t + 1]
        rows.append(flashattn_ext.flash_fwd_splitkv(q, single.k, single.v, **o))
    for mine, theirs in zip(single.buffers, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(torch.cat(rows, 1), out, rtol=2**-9, atol=2e-3)


def test_rotation_of_a_known_angle(device):
    """A quarter turn takes (1, 0) to (0, 1), in either layout, and the oracle agrees."""
    for interleaved in (True, False):
        call = dense_cache(1, 0, heads=(1, 1), d=16, new=1, rotary=1.0).build(device)
        o = call.options
        o["rotary_interleaved"] = interleaved
        o["rotary_cos"].zero_()
        o["rotary_sin"].fill_(1)
        o["k_new"].zero_()
        o["k_new"][..., 0] = 1
        call.run()
        turned = torch.zeros(16)
        turned[1 if interleaved else 8] = 1
        assert torch.equal(call.k[0, 0, 0].float().cpu(), turned)
        tables = (o["rotary_cos"], o["rotary_sin"], interleaved)
        oracle = rotate(o["k_new"][0], torch.tensor([0], device=device), *tables)
        assert torch.equal(oracle[0, 0].float().cpu(), turned)


@pytest.mark.parametrize("page", [0, 1, 16, 48])
@pytest.mark.parametrize("new", [1, 5, 70])
def test_c61_d08_full_cache(new, page, device):
    """What does not fit is not written, anywhere; what fits is, and is attended to."""
    for room in (-new, -1, 0):
        for splits in (1, 3):
            case = dense_cache(2, 96, 95, 70, page=page, new=new, room=room, splits=splits)
            case.check(device)
            packed_cache((2, 96), (1, 0), page=page, new=new, room=room).check(device)


@pytest.mark.parametrize("rotary", [0.0, 1.0])
def test_new_tokens_of_no_sequences(rotary, device):
    """There is no length that more tokens than the cache and the rotary tables hold could break."""
    for is_packed in (False, True):
        case = CacheCase((), is_packed, new=5, room=-3, rotary=rotary)
        call = case.build(device)
        for name in ("rotary_cos", "rotary_sin") if rotary else ():
            call.options[name] = call.options[name][:1]
        call.compare(*call.run())


def test_c61_full_cache_that_the_host_knows(device):
    for page in (0, 16):
        case = dense_cache(1, 96, 96, page=page, new=2, room=-2, one_length=True)
        call = case.build(device)
        with pytest.raises(ValueError, match=r"cache_seqlens.*9[68]"):
            call.run()
        call.expected = tuple(buffer.clone() for buffer in call.buffers)
        assert call.run(cache_seqlens=94)[0].isfinite().all()


@pytest.mark.parametrize("lengths", [(-5, 2**31 - 1), (2**31 - 2, -(2**31))], ids=str)
def test_hostile_lengths_write_inside_the_cache(lengths, device):
    """Clamped on both sides, also where the sum with the new tokens overflows 32 bits."""
    for page in (0, 16):
        case = dense_cache(1, 0, 96, page=page, new=3, room=-3)
        if lengths[0] > 0:
            case = case.but(lengths=((1, 96), (1, 0)))
        call = case.build(device)
        call.compare(*call.run(cache_seqlens=ints(lengths, device)))


@pytest.mark.parametrize("bad", [-1, 2**31 - 1, "pages"])
def test_new_tokens_for_a_page_that_does_not_exist(bad, device):
    for page in (1, 16):
        call = dense_cache(1, 33, 20, page=page, new=2).build(device)
        before = [buffer.clone() for buffer in call.buffers]
        table = call.options["block_table"].clone()
        table[0, 33 // page :] = len(call.k) if bad == "pages" else bad
        call.run(block_table=table)
        for n, buffer in enumerate(call.buffers):
            twin = before[n].as_strided(call.k.shape, call.k.stride(), call.k.storage_offset())
            places = call.cache.where(1, 20, 22)
            twin[places] = call.options[("k_new", "v_new")[n]][1]
            torch.testing.assert_close(buffer, before[n], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [(-1, 1), (99, 0)], ids=str)
def test_new_tokens_for_a_cache_row_that_does_not_exist(rows, device):
    call = dense_cache(1, 33, 20, batch_idx=True, new=2).build(device)
    before = call.buffers[0].clone()
    call.run(cache_batch_idx=ints(rows, device))
    changed = (before.nan_to_num(0) != call.buffers[0].nan_to_num(0)).flatten(1).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [1 + rows[1]]


def test_d02_rotary_positions_beyond_the_tables(device):
    """D02: a length on the device that leads past the tables reads nothing behind them."""
    call = dense_cache(2, 60, 10, new=2, rotary=1.0, causal=True).build(device)
    o = call.options
    for name in ("rotary_cos", "rotary_sin"):
        rows, half = o[name].shape
        behind = torch.full((2 * rows, half), torch.nan, dtype=o[name].dtype, device=device)
        behind[:20] = o[name][:20]
        o[name] = behind[:20]
    try:
        out, lse = call.run()
    except ValueError as error:  # tables that are shorter than the capacity may be refused
        assert "rotary_cos" in str(error)
    else:
        assert not out.isnan().any() and not lse.isnan().any()


@pytest.mark.parametrize("bound", [2, 3, 50])
def test_rotary_tables_need_not_reach_a_loose_bound(bound, device):
    """Of packed queries, only the device knows how many a sequence has."""
    half = {"dtype": torch.float16, "device": device}
    k, v = (torch.zeros(2, 200, 2, 64, **half) for _ in range(2))
    k_new, v_new = (torch.randn(2, 1, 2, 64, device=device).half() for _ in range(2))
    tables = (torch.rand(102, 16, device=device).half() for _ in range(2))
    options = dict(zip(("rotary_cos", "rotary_sin"), tables, strict=True))
    out = flashattn_ext.flash_fwd_splitkv(
        torch.randn(3, 8, 64, device=device).half(), k, v, cache_seqlens=100, k_new=k_new,
        v_new=v_new, cu_seqlens_q=ints([0, 2, 3], device), max_seqlen_q=bound, causal=True,
        **options,
    )  # fmt: skip
    assert not out.isnan().any() and k[:, 100].count_nonzero() > 0


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_only_the_caches_change(dtype, device):
    """q is rotated in a copy; new tokens, tables, lengths stay, and a second call is the same."""
    call = dense_cache(3, 70, 5, new=3, rotary=1.0, causal=True, dtype=dtype).build(device)
    tensors = [call.q, *(o for o in call.options.values() if torch.is_tensor(o))]
    before = [t.clone() for t in tensors]
    first = call.run()
    call.compare(*first)
    for t, copy in zip(tensors, before, strict=True):
        assert torch.equal(t, copy)
    for a, b in zip(first, call.run(), strict=True):
        assert torch.equal(a, b)
    call.compare_cache()


@pytest.mark.parametrize("name", ["k_new", "v_new"])
def test_new_tokens_by_stride(name, device):
    """Out of one packed projection, whose rows are wider; K and V differ."""
    for is_packed in (False, True):
        case = CacheCase(((2, 40), (2, 9)), is_packed, new=2, page=16, causal=True)
        call = case.build(device)
        new = call.options[name]
        b, s, hk, d = new.shape
        wide = torch.full((b, s + 1, 3 * hk, d + 8), torch.nan, dtype=new.dtype, device=device)
        view = wide[:, :s, hk : 2 * hk, :d]
        view.copy_(new)
        call.compare(*call.run(**{name: view}))


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_append_equals_writing_first(splits, device):
    """Bit by bit what a call over the grown cache gives."""
    for page in (0, 16):
        call = dense_cache(2, 100, 31, new=2, page=page, causal=True, splits=splits).build(device)
        out, lse = call.run()
        options = {n: o for n, o in call.options.items() if n not in ("k_new", "v_new")}
        options["cache_seqlens"] = call.options["cache_seqlens"] + 2
        again = flashattn_ext.flash_fwd_splitkv(call.q, call.k, call.v, **options, return_lse=True)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
        call.compare_cache()


def test_no_new_tokens_is_no_append(device):
    """s_new = 0 writes nothing."""
    call = dense_cache(1, 40, 5).build(device)
    empty = torch.empty(2, 0, 2, 64, dtype=call.q.dtype, device=device)
    call.compare(*call.run(k_new=empty, v_new=empty))


@pytest.mark.parametrize("packed", [False, True])
def test_new_tokens_without_queries(packed, device):
    """Nobody asks anything: the call appends, whatever the capacity is."""
    k, v = (torch.zeros(2, 4096, 2, 64, dtype=torch.float16, device=device) for _ in range(2))
    k_new, v_new = (torch.randn(2, 3, 2, 64, device=device).half() for _ in range(2))
    lengths = torch.tensor([5, 4000], dtype=torch.int32, device=device)
    options = {"cache_seqlens": lengths, "k_new": k_new, "v_new": v_new, "return_lse": True}
    if packed:
        starts = torch.zeros(3, dtype=torch.int32, device=device)
        q = torch.empty(0, 8, 64, dtype=torch.float16, device=device)
        options |= {"cu_seqlens_q": starts, "max_seqlen_q": 0}
    else:
        q = torch.empty(2, 0, 8, 64, dtype=torch.float16, device=device)
    out, lse = flashattn_ext.flash_fwd_splitkv(q, k, v, **options)
    assert out.shape == q.shape and lse.numel() == 0
    for n, begin in enumerate((5, 4000)):
        assert torch.equal(k[n, begin : begin + 3], k_new[n])
        assert torch.equal(v[n, begin : begin + 3], v_new[n])
    assert k.count_nonzero() == k_new.count_nonzero()
