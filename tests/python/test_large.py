"""The GPU sizes: the length lists of FlashAttention-2 and -3, every head dim, indices past
2^31, long keys, races. References are computed on the GPU, of sampled rows where the whole is too
large."""

import pytest
import torch
from cases import HALF_DTYPES, dense, packed, sample
from reference import Rule, Sequence, assert_close_to_reference

import flashattn_ext

pytestmark = pytest.mark.gpu

LENGTHS = (
    (1, 1),
    (1, 3),
    (2, 1),
    (511, 1),
    (3, 513),
    (64, 128),
    (128, 128),
    (256, 256),
    (113, 203),
    (128, 217),
    (113, 211),
    (108, 256),
    (256, 512),
    (307, 256),
    (640, 128),
    (512, 256),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
    (4096, 4096),
    (4224, 4224),
)
KERNEL_HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)
MASKS = ({}, {"causal": True}, {"window": (100, 20)}, {"causal": True, "window": (65, -1)})
HEADS = ((6, 6), (6, 2), (6, 1))


@pytest.mark.parametrize("d", KERNEL_HEAD_DIMS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths, d):
    """Every length with every kernel, all masks; types and head ratios in turn."""
    for n, mask in enumerate(MASKS):
        turn = n + d // 32 + sum(lengths)
        case = dense(2, *lengths, d=d, dtype=HALF_DTYPES[turn % 2], heads=HEADS[turn % 3], **mask)
        case.check("cuda")


@pytest.mark.parametrize("d", [*range(8, 257, 8), 59, 111])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_every_head_dim(d, dtype):
    """C112, and head dims between the kernels'."""
    for lengths in ((128, 217), (307, 256), (1023, 1024)):
        dense(2, *lengths, d=d, dtype=dtype, heads=(4, 2), causal=lengths[0] != 128).check("cuda")
    packed((113, 203), (1, 1), (200, 65), d=d, dtype=dtype, causal=True).check("cuda")


@pytest.mark.parametrize(
    "case",
    sample(
        120,
        seed=8,
        lengths=[
            ((n % 300, 700 - n % 450), (2 * n, n), (0, n), (n, n)) for n in range(1, 1000, 83)
        ],
        packed=(True,),
        d=KERNEL_HEAD_DIMS,
        dtype=HALF_DTYPES,
        heads=HEADS,
        mask=MASKS,
        softcap=(0.0, 0.0, 15.0),
        alibi=("", "h", "bh"),
        sinks=("", "fp32", "same"),
    ),
    ids=str,
)
def test_packed_batches(case):
    case.check("cuda")


@pytest.mark.parametrize("alibi", ["", "h"])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_options_at_length(d, softcap, alibi):
    options = {"softcap": softcap, "alibi": alibi, "sinks": "fp32", "causal": True}
    dense(1, 2048, 2048, d=d, heads=(4, 2), **options).check("cuda")
    packed((2048, 2048), (1000, 1500), d=d, heads=(4, 2), window=(512, 0), **options).check("cuda")


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_c70_window_of_all_keys_is_causal(dtype):
    n = 16384
    case = dense(1, n, n, heads=(8, 8), d=128, dtype=dtype, causal=True)
    call = case.build("cuda")
    out, lse = call.run()
    windowed = call.run(causal=False, window_size=(n - 1, 0))
    torch.testing.assert_close(windowed[0], out, rtol=0, atol=2e-3)
    torch.testing.assert_close(windowed[1], lse, rtol=0, atol=1e-5)
    check_rows(out[0], lse[0], call.sequences[0], case.rule(), (0, n // 2 - 64, n - 64))


def check_rows(out, lse, seq, rule, starts, count=64):
    for start in starts:
        rows = range(start, min(start + count, seq.q.shape[0]))
        part = slice(rows.start, rows.stop)
        assert_close_to_reference(out[part], lse[:, part], seq, rule, rows)


@pytest.mark.parametrize("layout", ["contiguous", "batch of a wider cache"])
def test_c89_keys_past_2_to_31_elements(layout):
    """(64, 8448, 32, 128) is 2,214,592,512 elements; the last sequences lie past 2^31."""
    b, cap, hk, d = 64, 8448, 32, 128
    shape = (b, cap, hk, d) if layout == "contiguous" else (8, cap, hk * 8, d)
    k = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    if layout != "contiguous":
        k, v = k[:, :, -hk:], v[:, :, -hk:]
    k[-1].normal_()
    v[-1].normal_()
    q = torch.randn(k.shape[0], 3, hk, d, device="cuda").bfloat16()
    used = torch.tensor([1] * (k.shape[0] - 1) + [cap - 1], dtype=torch.int32, device="cuda")
    out, lse = flashattn_ext.flash_fwd(q, k, v, seqused_k=used, return_lse=True)
    seq = Sequence(q[-1], k[-1, : cap - 1], v[-1, : cap - 1])
    assert_close_to_reference(out[-1], lse[-1], seq, Rule(d**-0.5))
    assert (out[:-1] == 0).all()


@pytest.mark.parametrize("heads", [(64, 64), (64, 8)], ids=str)
def test_c91_packed_rows_past_2_to_31_elements(heads):
    """262145 rows of 64 x 128: the last row of q and out starts at element 2^31."""
    rows, d, (h, hk) = 262_145, 128, heads
    q = torch.zeros(rows, h, d, dtype=torch.bfloat16, device="cuda")
    q[-40:].normal_()
    k = torch.randn(rows if hk == h else 300, hk, d, device="cuda").bfloat16()
    starts_q = torch.tensor([0, 5, rows - 33, rows], dtype=torch.int32, device="cuda")
    keys = len(k)
    starts_k = torch.tensor([0, 3, keys - 200, keys], dtype=torch.int32, device="cuda")
    options = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": rows}
    options |= {"max_seqlen_k": keys, "causal": True, "window_size": (300, 0), "return_lse": True}
    out, lse = flashattn_ext.flash_fwd(q, k, k, **options)
    seq = Sequence(q[-33:], k[-200:], k[-200:])
    rule = Rule(d**-0.5, (300, 0))
    assert_close_to_reference(out[-33:], lse[:, -33:], seq, rule)


@pytest.mark.parametrize("d", [64, 128])
def test_c94_very_long_keys_at_any_batch_size(d):
    keys = 350_000
    call = dense(2, 2, keys, heads=(2, 1), d=d).build("cuda")
    out, lse = call.run()
    call.compare(out, lse)
    alone = flashattn_ext.flash_fwd(call.q[1:], call.k[1:], call.v[1:], return_lse=True)
    assert torch.equal(alone[0], out[1:]) and torch.equal(alone[1], lse[1:])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_c98_largest_head_dim_fits_shared_memory(dtype, causal):
    dense(2, 256, 256, heads=(4, 4), d=256, dtype=dtype, causal=causal).check("cuda")


@pytest.mark.slow
@pytest.mark.parametrize("d", [16, 32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_c109_thousand_repeats_are_bitwise_equal(causal, d):
    call = dense(2, 1025, 1025, heads=(4, 2), d=d, causal=causal).build("cuda")
    out, lse = (t.clone() for t in call.run())
    call.compare(out, lse)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        again, again_lse = call.run()
        different += (again != out).any() | (again_lse != lse).any()
    assert different == 0, f"{different} of 1000 runs"


@pytest.mark.parametrize("heads", [(1, 1), (64, 8), (128, 1)], ids=str)
def test_many_heads_and_batches(heads):
    dense(300, 1, 40, heads=heads, d=64).check("cuda")


def test_more_thread_blocks_than_a_grid_side_holds():
    """70,000 sequences and 65,535 heads: no dim of the grid may hold either."""
    q = torch.randn(70_000, 1, 2, 32, device="cuda").bfloat16()
    out, lse = flashattn_ext.flash_fwd(q, q, q, return_lse=True)
    assert torch.equal(out, q) and lse.isfinite().all()
    q = torch.randn(1, 3, 65_535, 32, device="cuda").bfloat16()
    out = flashattn_ext.flash_fwd(q, q, q, causal=True)
    assert torch.equal(out[:, 0], q[:, 0]) and out.isfinite().all()
