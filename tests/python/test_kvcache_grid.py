"""The key/value-cache grids of FlashAttention-2 and -3: their sizes with every option in turn, and
caches and workspaces past 2^31 elements. On a GPU only."""

import pytest
import torch
from caches import CacheCase
from cases import HALF_DTYPES, ints, sample
from reference import Rule, Sequence, assert_close_to_reference

import flashattn_ext

pytestmark = pytest.mark.gpu

SIZES = (  # queries, capacity
    (1, 128),
    (1, 339),
    (3, 1024),
    (64, 800),
    (64, 256),
    (3, 799),
    (64, 2048),
    (16, 20000),
    (1, 131072),
    (16, 131072),
    (128, 128),
    (256, 512),
    (2048, 3577),
)
AXES = {
    "heads": ((6, 6), (6, 1), (6, 2)),
    "d": (32, 64, 96, 128, 160, 192, 224, 256),
    "dtype": HALF_DTYPES,
    "mask": ({}, {"causal": True}, {"causal": True, "window": (200, -1)}, {"window": (90, 30)}),
    "place": (
        {},
        {"batch_idx": True},
        {"leftpad": True},
        *({"page": page} for page in (1, 4, 16, 128, 256)),
        {"page": 16, "leftpad": True},
    ),
    "new": (0, 1, 7, 40),
    "rotary": (
        {},
        *({"rotary": r, "interleaved": i} for r in (0.5, 1.0) for i in (True, False)),
    ),
    "packed": (False, True),
    "splits": (0, 1, 3, 7, 128),
    "option": ({}, {}, {"alibi": "bh"}, {"softcap": 15.0}, {"sinks": "fp32"}),
    "pool": ("plain", "interleaved", "padded", "v_heads_first"),
}


def grid(size, count):
    sq, capacity = size
    cases = []
    for case in sample(count, seed=sum(size), kind=CacheCase, lengths=[((sq, 1),)], **AXES):
        new = min(case.new, capacity // 4)
        full = capacity - new
        queries = (sq, max(1, sq // 2), sq) if case.packed else (sq,) * 3
        lengths = tuple(zip(queries, (full, full // 3, full - full // 5), strict=True))
        pads = (full // 7, 0, full // 2) if case.leftpad else None
        rotary = case.rotary if new else 0.0
        cases.append(
            case.but(lengths=lengths, leftpad=pads, new=new, room=0, rotary=rotary, tail=0)
        )
    return cases


@pytest.mark.parametrize(
    "case", [case for size in SIZES for case in grid(size, 18 if size[1] < 9999 else 9)], ids=str
)
def test_grid(case):
    case.check("cuda")


def decode(k, v, q, **options):
    out, lse = flashattn_ext.flash_fwd_splitkv(q, k, v, return_lse=True, **options)
    return out, lse


@pytest.mark.parametrize("splits", [0, 1, 4])
def test_c53_page_at_element_2_to_31(splits):
    """65,537 pages of 64 x 8 x 64 elements: the last one starts at exactly 2^31."""
    pages, page, hk, d = 65_537, 64, 8, 64
    k, v = (torch.zeros(pages, page, hk, d, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for t in (k, v):
        t[-1].normal_()
        t[40_000].normal_()
    q = torch.randn(1, 2, 16, d, device="cuda").bfloat16()
    table = ints([[40_000, 65_536, -1]], "cuda")
    lengths = ints([100], "cuda")
    out, lse = decode(k, v, q, cache_seqlens=lengths, block_table=table, num_splits=splits)
    keys, values = (torch.cat([t[40_000], t[-1]])[:100] for t in (k, v))
    assert_close_to_reference(out[0], lse[0], Sequence(q[0], keys, values), Rule(d**-0.5))


def test_c53_append_to_a_page_at_element_2_to_31():
    k, v = (torch.zeros(65_537, 64, 8, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    new = torch.randn(2, 1, 1, 8, 64, device="cuda").bfloat16()
    table = ints([[65_536]], "cuda")
    q = torch.randn(1, 1, 8, 64, device="cuda").bfloat16()
    options = {"cache_seqlens": ints([0], "cuda"), "block_table": table}
    out, _ = decode(k, v, q, k_new=new[0], v_new=new[1], **options)
    assert torch.equal(k[-1, 0], new[0, 0, 0]) and torch.equal(out[0], new[1, 0])
    assert not k[:-1].any() and not v[:-1].any()


@pytest.mark.parametrize("splits", [0, 1, 4])
def test_c89_cache_past_2_to_31_elements(splits):
    """(64, 8448, 32, 128) is 2,214,592,512 elements; the last sequences lie past 2^31."""
    b, cap, hk, d = 64, 8448, 32, 128
    k, v = (torch.zeros(b, cap, hk, d, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k[-1].normal_()
    v[-1].normal_()
    q = torch.randn(b, 1, hk, d, device="cuda").bfloat16()
    lengths = ints([1] * (b - 1) + [cap - 1], "cuda")
    out, lse = decode(k, v, q, cache_seqlens=lengths, num_splits=splits)
    seq = Sequence(q[-1], k[-1, : cap - 1], v[-1, : cap - 1])
    assert_close_to_reference(out[-1], lse[-1], seq, Rule(d**-0.5))
    assert (out[:-1] == 0).all()


@pytest.mark.parametrize("sq", [64, 65])
def test_c92_partial_results_past_2_to_31_elements(sq):
    """32 splits x 256 x 32 heads x 64 rows x 128 is exactly 2^31 floats."""
    b, h, d, cached = 256, 32, 128, 300
    k, v = (torch.randn(b, cached, 1, d, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(b, sq, h, d, device="cuda").bfloat16()
    lengths = ints([cached] * b, "cuda")
    out, lse = decode(k, v, q, cache_seqlens=lengths, num_splits=32, causal=True)
    for n in (0, 127, b - 1):
        seq = Sequence(q[n], k[n], v[n])
        assert_close_to_reference(out[n], lse[n], seq, Rule(d**-0.5, (-1, 0)))
    single = decode(k, v, q, cache_seqlens=lengths, num_splits=1, causal=True)
    torch.testing.assert_close(out, single[0], rtol=2**-6, atol=4e-3)
    torch.testing.assert_close(lse, single[1], rtol=0, atol=2e-5)


def test_c94_very_long_keys_at_any_batch_size():
    k, v = (torch.randn(2, 350_000, 1, 64, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(2, 2, 2, 64, device="cuda").bfloat16()
    for options in ({"num_splits": 1}, {"split_size": 4096}):
        out, lse = decode(k, v, q, cache_seqlens=350_000, **options)
        alone = decode(k[1:], v[1:], q[1:], cache_seqlens=350_000, **options)
        assert torch.equal(alone[0][0], out[1]) and torch.equal(alone[1][0], lse[1])
        assert_close_to_reference(out[0], lse[0], Sequence(q[0], k[0], v[0]), Rule(64**-0.5))


def test_c43_workspace_of_many_short_sequences_is_bounded():
    """4096 sequences of one query each take what the docstring of `flash_fwd_splitkv` says."""
    b, h, d = 4096, 64, 128
    k, v = (torch.randn(33, 128, 8, d, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(b, h, d, device="cuda").bfloat16()
    table = torch.randint(33, (b, 32), dtype=torch.int32, device="cuda")
    options = {
        "cache_seqlens": ints([4096] * b, "cuda"),
        "block_table": table,
        "cu_seqlens_q": torch.arange(b + 1, dtype=torch.int32, device="cuda"),
        "max_seqlen_q": 1,
    }
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = decode(k, v, q, **options)
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes - lse.nbytes
    # Two parts for each of at most 3 P thread blocks. 8 query heads of a key/value head fit a tile
    # of 16 rows. The allocator may round `out` and the workspace up, by 1 MiB each.
    parts = 2 * 3 * torch.cuda.get_device_properties("cuda").multi_processor_count
    bound = parts * (16 * (d + 1) * 4 + 100)
    assert extra <= bound + 2 * 2**20, f"workspace of {extra / 2**20:.1f} MiB"
    for n in (0, b - 1):
        keys, values = (t[table[n].long()].flatten(0, 1) for t in (k, v))
        seq = Sequence(q[n : n + 1], keys, values)
        assert_close_to_reference(out[n : n + 1], lse[:, n : n + 1], seq, Rule(d**-0.5))


def test_c33_workspace_lives_as_long_as_its_kernels():
    """Memory nearly full, and freed blocks of the workspace's size written over at once."""
    k, v = (torch.randn(4, 20_000, 2, 128, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(4, 1, 16, 128, device="cuda").bfloat16()
    options = {"cache_seqlens": ints([20_000] * 4, "cuda"), "num_splits": 64}
    expected = [t.clone() for t in decode(k, v, q, **options)]
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(max(0, free - 400 * 2**20), dtype=torch.uint8, device="cuda")
    size = 64 * 4 * 16 * 129 * 4
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for n in range(100):
        out, lse = decode(k, v, q, **options)
        for extra in (0, 512, 4096):
            torch.empty(size + extra, dtype=torch.uint8, device="cuda").fill_(n)
        different += (out != expected[0]).any() | (lse != expected[1]).any()
    assert different == 0, f"{different} of 100 runs"
    del ballast


def test_many_sequences_and_heads():
    """More of both than a side of a grid holds."""
    k = torch.randn(70_000, 4, 1, 32, device="cuda").bfloat16()
    q = torch.randn(70_000, 1, 2, 32, device="cuda").bfloat16()
    lengths = ints([1] * 70_000, "cuda")
    out, _ = decode(k, k, q, cache_seqlens=lengths, num_splits=2)
    assert torch.equal(out, k[:, :1].expand(-1, -1, 2, -1))
