"""Offsets of more than 2^31 elements by strides, in memory that is mapped but not used (CPU)."""

import mmap

import pytest
import torch
from cases import ints
from strided import as_bits

from flashattn_ext import flash_combine, flash_fwd, flash_fwd_splitkv

FAR = 2**31 + 64  # elements
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@pytest.fixture
def far_apart():
    """Function that gives a tensor of zeros whose dim has stride FAR. Only pages that are written
    take memory."""
    regions = []

    def make(shape, dim, dtype=torch.bfloat16):
        strides = list(torch.empty(shape, device="meta").stride())
        strides[dim] = FAR
        items = FAR * (shape[dim] - 1) + torch.Size(shape).numel()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        regions.append(mmap.mmap(-1, items * dtype.itemsize, flags=flags))
        return torch.frombuffer(regions[-1], dtype=dtype).as_strided(shape, strides)

    yield make


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def same(results, expected):
    return all(
        torch.equal(as_bits(a.contiguous()), as_bits(b))
        for a, b in zip(results, expected, strict=True)
    )


@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "rows", "heads"])
def test_dense(dim, which, far_apart):
    given = {"q": draw(2, 3, 2, 64), "k": draw(2, 3, 2, 64, seed=1), "v": draw(2, 3, 2, 64, seed=2)}
    expected = flash_fwd(**given, causal=True, return_lse=True)
    moved = far_apart((2, 3, 2, 64), dim)
    if which == "out":
        out = moved
    else:
        out, given[which] = None, moved.copy_(given[which])
    assert same(flash_fwd(**given, causal=True, return_lse=True, out=out), expected)


@pytest.mark.parametrize("which", ["q", "k", "out"])
@pytest.mark.parametrize("dim", [0, 1])
def test_packed(dim, which, far_apart):
    given = {"q": draw(5, 2, 64), "k": draw(5, 2, 64, seed=1)}
    starts = ints([0, 2, 5], "cpu")
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 3, "max_seqlen_k": 3}
    expected = flash_fwd(**given, v=given["k"], **options, return_lse=True)
    moved, out = far_apart((5, 2, 64), dim), None
    if which == "out":
        out = moved
    else:
        given[which] = moved.copy_(given[which])
    results = flash_fwd(given["q"], given["k"], given["k"], **options, return_lse=True, out=out)
    assert same(results, expected)


@pytest.mark.parametrize("append", [False, True], ids=["read", "append"])
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["pages", "slots", "heads"])
def test_pages(dim, append, far_apart):
    k, v = draw(4, 4, 2, 64, seed=1), draw(4, 4, 2, 64, seed=2)
    new = {"k_new": draw(2, 1, 2, 64, seed=3), "v_new": draw(2, 1, 2, 64, seed=4)}
    options = {"cache_seqlens": ints([7, 2], "cpu"), "block_table": ints([[3, 1], [2, 0]], "cpu")}
    options |= new if append else {}
    far_k, far_v = (far_apart(k.shape, dim).copy_(t) for t in (k, v))
    q = draw(2, 1, 4, 64)
    for splits in (0, 1, 3):
        expected = flash_fwd_splitkv(q, k, v, **options, num_splits=splits, return_lse=True)
        results = flash_fwd_splitkv(q, far_k, far_v, **options, num_splits=splits, return_lse=True)
        assert same(results, expected) and same((far_k, far_v), (k, v))


@pytest.mark.parametrize("dim", range(4))
def test_parts(dim, far_apart):
    out, lse = draw(3, 2, 3, 2, 64), draw(3, 2, 2, 3, seed=1).float()
    expected = flash_combine(out, lse)
    assert same(flash_combine(far_apart(out.shape, dim).copy_(out), lse), expected)
    far = far_apart(lse.shape, dim, torch.float32).copy_(lse)
    assert same(flash_combine(out, far), expected)
