"""flash_combine and merge_attention_states: any number of parts, empty ones of either sign,
strides, types; parts made by hand equal the whole."""

import pytest
import torch
from caches import dense_cache
from cases import HALF_DTYPES, SHORT_NAMES, dense, packed
from reference import merge

import flashattn_ext
from flashattn_ext import flash_combine, merge_attention_states

F32 = torch.float32
SPLITS = (1, 2, 3, 5, 17, 32, 55, 97, 133)
HEAD_DIMS = (64, 96, 128, 192, 256, 512)
ALL_DTYPES = (F32, *HALF_DTYPES)


def draw(*shape, seed=0, device="cpu", dtype=F32):
    source = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=source, device=device).to(dtype)


def parts(splits, shape, d, device, seed=0, dtype=F32):
    """out (S, b, s, h, d) as every second of 2 S, and lse (S, b, h, s), not contiguous either."""
    b, s, h = shape
    out = draw(2 * splits, b, s, h, d, seed=seed, device=device, dtype=dtype)[::2]
    lse = draw(splits, b, s, 2 * h, seed=seed + 1, device=device)[..., :h].transpose(2, 3) * 3
    return out, lse


def expected(out, lse):
    rows_first = lse.transpose(-1, -2)
    merged, merged_lse = merge(out, rows_first)
    return merged, merged_lse.transpose(-1, -2)


def check(result, out, lse, dtype):
    want, want_lse = expected(out, lse)
    got, got_lse = result
    assert got.dtype == dtype and got.shape == out.shape[1:] and got.is_contiguous()
    assert got_lse.dtype == F32 and got_lse.shape == lse.shape[1:] and got_lse.is_contiguous()
    noise = torch.finfo(dtype).eps * want.abs().max().item() + 1e-5
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=noise)
    torch.testing.assert_close(got_lse.double(), want_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=SHORT_NAMES.get)
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("splits", SPLITS)
def test_grid(splits, d, dtype, device):
    """FlashAttention-3's grid: half of the rows end in empty parts, with whatever values."""
    shape = (2, 3, 4) if device == "cpu" else (5, 113, 16)
    out, lse = parts(splits, shape, d, device, seed=splits + d)
    empty = splits // 3
    if empty:
        lse[-empty:, :, : shape[2] // 2] = -torch.inf
        out[-empty:, :, :, : shape[2] // 2] = torch.nan
    check(flash_combine(out, lse, out_dtype=dtype), out, lse, dtype)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("splits", [1, 2, 3, 33, 133])
def test_c40_empty_parts(splits, sign, device):
    """All parts empty: out 0, lse -inf. One part not empty: exactly that part."""
    out, lse = parts(splits, (2, 5, 3), 64, device)
    lse.fill_(sign * torch.inf)
    got, got_lse = flash_combine(out, lse)
    assert (got == 0).all() and (got_lse == -torch.inf).all()
    for last in {0, splits // 2, splits - 1}:
        lse.fill_(sign * torch.inf)
        lse[last] = draw(2, 3, 5, seed=7, device=device)
        got, got_lse = flash_combine(out, lse)
        assert torch.equal(got, out[last])
        torch.testing.assert_close(got_lse, lse[last], rtol=0, atol=1e-6)
    out[:] = torch.nan
    lse.fill_(sign * torch.inf)
    assert (flash_combine(out, lse)[0] == 0).all()


def test_both_signs_of_empty_at_once(device):
    out, lse = parts(5, (2, 5, 3), 64, device)
    lse[0], lse[3] = torch.inf, -torch.inf
    check(flash_combine(out, lse), out, lse, F32)


def test_what_is_not_finite_reaches_out_without_any_weight(device):
    """As in a call without splits: from a part whose weight is 0 in fp32, wherever it is among 41,
    but not from the empty one behind it."""
    for place in range(41):
        out, lse = parts(41, (2, 5, 3), 64, device)
        out[place, ..., 0::4], out[place, ..., 1::4] = torch.inf, torch.nan
        lse[place] -= 1000
        empty = (place + 1) % 41
        out[empty], lse[empty] = torch.nan, -torch.inf
        got, got_lse = flash_combine(out, lse)
        assert got[..., 0::4].isnan().all() and got[..., 1::4].isnan().all()
        others = out[..., 2::4]
        check((got[..., 2::4].contiguous(), got_lse), others, lse, F32)


@pytest.mark.parametrize("partial", ALL_DTYPES, ids=SHORT_NAMES.get)
@pytest.mark.parametrize("dtype", [None, *ALL_DTYPES], ids=lambda d: SHORT_NAMES.get(d, "default"))
def test_types(dtype, partial, device):
    """Without out_dtype, the type of the parts."""
    out, lse = parts(6, (2, 70, 3), 72, device, dtype=partial)
    check(flash_combine(out, lse, out_dtype=dtype), out, lse, dtype or partial)


@pytest.mark.parametrize("d", [8, 40, 64, 128, 248])
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 130])
def test_packed_parts(rows, d, device):
    for splits in (1, 4, 70):
        out = draw(splits, rows, 6, d, seed=d, device=device)
        lse = draw(splits, 6, rows, seed=rows, device=device) * 4
        check(flash_combine(out, lse), out, lse, F32)


def test_c35_strides_of_parts_and_of_out(device):
    """C35: parts with padded rows; parts as transposed views; an expanded part; a strided out."""
    out, lse = parts(4, (2, 9, 3), 64, device)
    padded = torch.full((4, 2, 11, 4, 72), torch.nan, device=device)[:, :, :9, :3, :64]
    heads_first = torch.full((4, 2, 3, 9, 64), torch.nan, device=device).transpose(2, 3)
    splits_inside = torch.full((2, 9, 3, 4, 64), torch.nan, device=device).permute(3, 0, 1, 2, 4)
    for view in (padded, heads_first, splits_inside):
        check(flash_combine(view.copy_(out), lse), out, lse, F32)
    expanded = out[:1].expand(4, -1, -1, -1, -1)
    check(flash_combine(expanded, lse), expanded, lse, F32)
    for view in (
        torch.full((2, 11, 4, 72), torch.nan, device=device)[:, :9, :3, :64],
        torch.full((2, 3, 9, 64), torch.nan, device=device).transpose(1, 2),
    ):
        got, got_lse = flash_combine(out, lse, out=view)
        assert got is view
        check((got.contiguous(), got_lse), out, lse, F32)
    base = torch.full((2, 11, 4, 72), 7.0, device=device)
    flash_combine(out, lse, out=base[:, :9, :3, :64])
    assert (base[:, 9:] == 7).all() and (base[..., 3, :] == 7).all() and (base[..., 64:] == 7).all()


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 3, 0)], ids=str)
def test_nothing_to_combine(shape, device):
    out, lse = parts(3, shape, 64, device)
    got, got_lse = flash_combine(out, lse)
    assert got.shape == out.shape[1:] and got_lse.shape == lse.shape[1:]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=SHORT_NAMES.get)
@pytest.mark.parametrize("d", [1, 3, 33, 65, 130, 1030])
def test_any_head_dim_and_alignment(d, dtype, device):
    """Rows that begin anywhere are read and written in elements instead of pieces."""
    out, lse = parts(6, (2, 5, 3), d, device, dtype=dtype)
    memory = torch.zeros(out.numel() + 1, device=device, dtype=dtype)
    moved = memory[1:].view(out.shape).copy_(out)
    check(flash_combine(moved, lse), out, lse, dtype)
    result = torch.full((2, 5, 3, d + 1), torch.nan, device=device, dtype=dtype)
    flash_combine(moved, lse, out=result[..., :d])
    assert torch.equal(result[..., :d], flash_combine(moved, lse)[0])
    assert result[..., d].isnan().all()


def test_very_many_columns(device):
    out, lse = parts(2, (1, 1, 1), 9_000_001, device)
    check(flash_combine(out, lse), out, lse, F32)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=SHORT_NAMES.get)
@pytest.mark.parametrize("d", [8, 32, 64, 128, 256])
def test_bits_do_not_depend_on_how_many_empty_parts_follow(d, dtype, device):
    """Nor on other rows: what `split_size` promises of capacities and batches rests on it."""
    out, lse = parts(40, (2, 3, 4), d, device, dtype=dtype)
    for full in (1, 3, 4, 5, 20, 33):
        lse[full:] = -torch.inf
        want = flash_combine(out[:full], lse[:full])
        for count in (full + 1, 40):
            got = flash_combine(out[:count], lse[:count])
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        one = flash_combine(out[:full, 1:, 2:], lse[:full, 1:, :, 2:])
        assert torch.equal(one[0], want[0][1:, 2:]) and torch.equal(one[1], want[1][1:, :, 2:])
        lse = parts(40, (2, 3, 4), d, device, dtype=dtype)[1]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 3e4])
def test_far_apart_scores(scale, device):
    """lse of any size: weights neither overflow nor turn into NaN."""
    out, lse = parts(5, (2, 20, 3), 64, device)
    lse = lse * scale
    got, got_lse = flash_combine(out, lse)
    want, want_lse = expected(out, lse)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(got_lse.double(), want_lse, rtol=1e-6, atol=1e-5)


def test_rows_are_not_mixed_up(device):
    """Every row of the output is of its own row: one-hot parts."""
    rows, heads, d = 37, 5, 64
    out = (
        torch.arange(2 * rows * heads, device=device).view(2, rows, heads, 1).expand(-1, -1, -1, d)
    )
    out = torch.stack([out.float().contiguous(), torch.full_like(out, -1, dtype=F32)])
    lse = torch.zeros(2, 2, heads, rows, device=device)
    lse[1] = -torch.inf
    assert torch.equal(flash_combine(out, lse)[0], out[0])


@pytest.mark.parametrize("repeats", [20])
def test_bitwise_reproducible(repeats, device):
    out, lse = parts(133, (2, 40, 3), 128, device)
    first = flash_combine(out, lse)
    for _ in range(repeats):
        again = flash_combine(out, lse)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=SHORT_NAMES.get)
@pytest.mark.parametrize("cut", [3072, 1, 3135])
def test_c44_two_calls_over_parts_equal_one(cut, dtype, device):
    """A long prefix and a short suffix, merged by their natural logarithms."""
    call = dense(1, 4, 3136, heads=(2, 1), dtype=dtype).build(device)
    whole, whole_lse = call.run()
    results = []
    for keys in (slice(0, cut), slice(cut, None)):
        k, v = (t[:, keys].contiguous() for t in (call.k, call.v))
        results += flashattn_ext.flash_fwd(call.q, k, v, return_lse=True)
    out, lse = merge_attention_states(*results)
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, whole, rtol=2 * eps, atol=eps / 4)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)


def test_merge_of_packed_results_with_empty_sequences(device):
    call = packed((5, 64), (3, 0), (1, 9), tail=0).build(device)
    out, lse = call.run()
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for pair in ((out, lse, *nothing), (*nothing, out, lse)):
        merged, merged_lse = merge_attention_states(*pair)
        assert torch.equal(merged, out)
        torch.testing.assert_close(merged_lse, lse, rtol=0, atol=1e-6)
    merged, merged_lse = merge_attention_states(*nothing, *nothing)
    assert (merged == 0).all() and (merged_lse == -torch.inf).all()


def test_merge_takes_the_type_of_the_first(device):
    a, b = draw(2, 3, 4, 64, device=device), draw(2, 3, 4, 64, seed=1, device=device)
    lses = draw(2, 4, 3, seed=2, device=device), draw(2, 4, 3, seed=3, device=device)
    for dtype in ALL_DTYPES:
        out, lse = merge_attention_states(a.to(dtype), lses[0], b.to(dtype), lses[1])
        stacked = torch.stack([a.to(dtype), b.to(dtype)]), torch.stack(lses)
        check((out, lse), *stacked, dtype)


def test_splits_by_hand_equal_the_call(device):
    """Parts of a cache, each its own call, combined: what num_splits does inside."""
    call = dense_cache(3, 384, heads=(4, 2), dtype=torch.float16, room=0).build(device)
    outs, lses = [], []
    for begin in range(0, 384, 128):
        k, v = (t[:, begin : begin + 128] for t in (call.k, call.v))
        out, lse = flashattn_ext.flash_fwd(call.q, k, v, return_lse=True)
        outs.append(out)
        lses.append(lse)
    call.compare(*flash_combine(torch.stack(outs), torch.stack(lses)))


def test_parts_are_not_changed(device):
    out, lse = parts(3, (2, 5, 3), 64, device)
    before = out.clone(), lse.clone()
    flash_combine(out, lse)
    assert torch.equal(out, before[0]) and torch.equal(lse, before[1])
