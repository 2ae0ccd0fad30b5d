"""Causal and window masks: alignment, inclusive bounds, rows without keys, equal descriptions."""

import pytest
import torch
from cases import HALF_DTYPES, TILE_EDGES, dense, packed, sample

SIDES = (-1, 0, 1, 31, 63, 64, 65, 128, 300)
SHAPES = [(65, 65), (40, 170), (170, 40), (129, 128), (1, 200), (200, 1), (257, 100), (64, 320)]


def twice(case, device, **changes):
    """out and lse of the case and of the changed case, over the same inputs."""
    return case.build(device).run(), case.but(**changes).build(device).run()


def assert_same(mine, theirs):
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "case",
    sample(
        81,
        seed=4,
        lengths=[((sq, sk),) * 2 for sq, sk in SHAPES],
        window=[(left, right) for left in SIDES for right in SIDES],
        d=(32, 64, 128, 96, 256),
        causal=(False, False, True),
        heads=((2, 1), (3, 3)),
        packed=(False, True),
        dtype=HALF_DTYPES,
    ),
    ids=str,
)
def test_windows(case, device):
    case.check(device)


@pytest.mark.parametrize("layout", [dense, packed], ids=["dense", "packed"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_c01_more_queries_than_keys_causal(d, layout, device):
    """The block bound of the first tiles is negative: rows 0 to 1023 see nothing."""
    lengths = (1, 2048, 1024) if layout is dense else ((2048, 1024),)
    heads = (2, 2) if device == "cpu" else (8, 8)
    out, lse = layout(*lengths, heads=heads, d=d, causal=True, tail=0).check(device)
    out, lse = (out[0], lse[0]) if layout is dense else (out, lse)
    assert (out[:1024] == 0).all() and (lse[:, :1024] == -torch.inf).all()
    assert lse[:, 1024:].isfinite().all()


@pytest.mark.parametrize("shape", [(5, 2), (129, 64), (300, 1), (257, 256), (200, 63)], ids=str)
@pytest.mark.parametrize("d", [32, 64, 128, 192])
def test_c11_masked_rows_have_no_finite_lse(shape, d, device):
    sq, sk = shape
    _, lse = dense(2, sq, sk, d=d, causal=True).check(device)
    assert (lse[..., : sq - sk] == -torch.inf).all()


@pytest.mark.parametrize("window", [(9, 0), (0, 0), (64, 0), (0, 9), (9, 9)], ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_c24_leading_key_blocks_masked(window, dtype, device):
    for d in (64, 128):
        dense(1, 600, 600, heads=(2, 1), d=d, dtype=dtype, window=window, causal=True).check(device)
    packed((600, 600), (1, 600), heads=(2, 1), dtype=dtype, window=window).check(device)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("alibi", ["", "h"])
@pytest.mark.parametrize("sq", [1, 2, 4, 16, 65])
def test_c63_several_queries_on_many_keys(sq, alibi, softcap, device):
    """Equal to the last rows of the full prefill."""
    for window in ((-1, -1), (20, -1)):
        case = dense(1, 100, 100, causal=True, window=window, alibi=alibi, softcap=softcap)
        call = case.build(device)
        out, lse = call.run()
        call.q = call.q[:, -sq:].contiguous()
        last, last_lse = call.run()
        torch.testing.assert_close(last, out[:, -sq:], rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(last_lse, lse[..., -sq:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(100, 100), (7, 200), (200, 7), (1, 1)], ids=str)
def test_causal_is_a_window_with_right_side_0(shape, device):
    for left in (-1, 5):
        case = dense(2, *shape, causal=True, window=(left, -1))
        for right in (-1, 0, 3, 1000):
            assert_same(*twice(case.but(window=(left, right)), device, window=(left, -1)))
        assert_same(*twice(case, device, causal=False, window=(left, 0)))


@pytest.mark.parametrize("layout", [dense, packed], ids=["dense", "packed"])
def test_c71_window_longer_than_the_keys(layout, device):
    """A window side that covers everything is no side; the other side, and causality, stay."""
    lengths = (1, 100, 100) if layout is dense else ((100, 100), (3, 100))
    case = layout(*lengths, tail=0)
    for left in (99, 100, 4096, 2**30):
        assert_same(*twice(case.but(causal=True), device, window=(left, 0)))
        assert_same(*twice(case.but(window=(left, 4)), device, window=(-1, 4)))
    for right in (99, 100, 4096, 2**30):
        assert_same(*twice(case.but(window=(4, right)), device, window=(4, -1)))


@pytest.mark.parametrize("shape", [(300, 100), (100, 300)], ids=str)
@pytest.mark.parametrize(
    "window", [(-1, 150), (150, -1), (120, 220), (0, 199), (201, 100)], ids=str
)
def test_sides_beyond_the_keys_keep_their_meaning(shape, window, device):
    """right >= sk with sq > sk hides keys of the first rows or of none: nothing clamps it."""
    for layout in (dense(1, *shape), packed(shape)):
        layout.but(window=window).check(device)


def test_c70_full_left_window_against_causal(device):
    for length, heads in ((50, (4, 2)), (300, (2, 2))):
        case = dense(1, length, length, heads=heads, d=128, dtype=torch.float16, causal=True)
        case.but(window=(length - 1, 0)).check(device)


@pytest.mark.parametrize(
    "window", [(0, 0), (5, 0), (31, 0), (32, 0), (63, 0), (64, 7), (0, 5)], ids=str
)
@pytest.mark.parametrize("d", [128, 256])
def test_c72_number_of_visible_keys(window, d, device):
    """One-hot values and equal scores: each row shows which keys it saw."""
    left, right = window
    call = dense(1, d, d, heads=(1, 1), d=d, dtype=torch.float16, window=window).build(device)
    call.q.zero_()
    call.v.copy_(torch.eye(d)[None, :, None])
    out, lse = call.run()
    i, j = torch.arange(d)[:, None], torch.arange(d)[None, :]
    seen = (j >= i - left) & (j <= i + right)
    assert torch.equal(out[0, :, 0].cpu() > 0, seen)
    torch.testing.assert_close(lse[0, 0].cpu(), seen.sum(dim=1).float().log(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [(128, 0), (127, 0), (5, 0), (64, 3)], ids=str)
def test_c73_one_query_keeps_its_window(window, device):
    call = dense(1, 1000, 1000, heads=(2, 1), window=window).build(device)
    out, lse = call.run()
    call.q = call.q[:, -1:].contiguous()
    last, last_lse = call.run()
    torch.testing.assert_close(last, out[:, -1:], rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(last_lse, lse[..., -1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("left", [0, 32, 64, 100])
@pytest.mark.parametrize("d", [64, 128])
def test_c74_window_reads_the_last_keys_only(left, d, device):
    """Values tell their block, and keys outside the window are huge: they must have no weight."""
    call = dense(1, 1, 256, heads=(2, 1), d=d, window=(left, 0)).build(device)
    call.v.copy_((torch.arange(256) // 32)[None, :, None, None])
    call.k[:, : 255 - left] = 100
    out, lse = call.run()
    call.compare(out, lse)
    assert (out >= (255 - left) // 32).all()


@pytest.mark.parametrize("d", [64, 128])
def test_keys_outside_the_mask_have_no_influence(d, device):
    """Bitwise, with huge values in every hidden key and value."""
    for window, hidden in (((-1, 0), slice(150, None)), ((10, -1), slice(0, 90))):
        call = dense(1, 200, 200, d=d, window=window).build(device)
        rows = slice(0, 150) if window[1] == 0 else slice(100, None)
        before = [t.clone() for t in call.run()]
        call.k[:, hidden] = 200
        call.v[:, hidden] = 2e4
        after = call.run()
        assert torch.equal(before[0][:, rows], after[0][:, rows])
        assert torch.equal(before[1][..., rows], after[1][..., rows])


@pytest.mark.parametrize("sq", TILE_EDGES)
def test_causal_at_tile_edges(sq, device):
    for sk in (max(1, sq - 1), sq, sq + 1, 64):
        dense(1, sq, sk, heads=(2, 2), d=40, causal=True).check(device)
