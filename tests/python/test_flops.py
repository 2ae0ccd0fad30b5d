"""The FLOPs that FlopCounterMode counts, against pairs counted one by one."""

import pytest
import torch
from flashattn_ext.integrations import flops
from reference import visible
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import flashattn_ext

HEADS, D = 4, 64
flops.register()


def count(function, *arguments, **options):
    with FlopCounterMode(display=False) as counter:
        function(*arguments, **options)
    return counter.get_total_flops()


def counted_pairs(sq, sk, left=-1, right=-1):
    i, j = torch.arange(sq)[:, None], torch.arange(sk)[None, :]
    return int(visible(i, j, sq, sk, left, right).sum())


def tensors(device, *shapes):
    return [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (1, 9), (7, 7), (4, 9), (9, 4)], ids=str)
def test_pairs(sizes):
    for left in range(-1, 12):
        for right in range(-1, 12):
            assert flops.visible_pairs(*sizes, left, right) == counted_pairs(*sizes, left, right)


@pytest.mark.parametrize("given_out", [False, True])
def test_dense(given_out, device):
    q, k, v = tensors(device, (2, 7, HEADS, D), (2, 9, 2, D), (2, 9, 2, D))
    out = torch.empty_like(q) if given_out else None
    full = count(flashattn_ext.flash_fwd, q, k, v, out=out)
    assert full == 2 * 4 * HEADS * D * 7 * 9
    windowed = count(flashattn_ext.flash_fwd, q, k, v, causal=True, window_size=(3, -1), out=out)
    assert windowed == 2 * 4 * HEADS * D * counted_pairs(7, 9, 3, 0)
    used = count(flashattn_ext.flash_fwd, q, k, v, seqused_k=ints(device, 5, 100), out=out)
    assert used == 4 * HEADS * D * (7 * 5 + 7 * 9)


def test_packed(device):
    q, k, v = tensors(device, (10, HEADS, D), (12, HEADS, D), (12, HEADS, D))
    options = {"cu_seqlens_q": ints(device, 0, 3, 10), "cu_seqlens_k": ints(device, 0, 8, 12)}
    options |= {"max_seqlen_q": 7, "max_seqlen_k": 8}
    pairs = counted_pairs(3, 8, -1, 0) + counted_pairs(7, 4, -1, 0)
    assert count(flashattn_ext.flash_fwd, q, k, v, causal=True, **options) == 4 * HEADS * D * pairs


@pytest.mark.parametrize("given_out", [False, True])
@pytest.mark.parametrize("new", [0, 2])
def test_pages(new, given_out, device):
    q, pool = tensors(device, (2, 3, HEADS, D), (6, 16, 2, D))
    k_new, v_new = tensors(device, (2, new, 2, D), (2, new, 2, D)) if new else (None, None)
    flop = count(
        flashattn_ext.flash_fwd_splitkv, q, pool, pool.clone(),
        cache_seqlens=ints(device, 20, 5),
        block_table=ints(device, 1, 2, 3, 4).view(2, 2),
        cache_leftpad=ints(device, 0, 1),
        k_new=k_new,
        v_new=v_new,
        causal=True,
        out=torch.empty_like(q) if given_out else None,
    )  # fmt: skip
    pairs = counted_pairs(3, 20 + new, -1, 0) + counted_pairs(3, 4 + new, -1, 0)
    assert flop == 4 * HEADS * D * pairs


def test_cache_of_one_length_and_packed_queries(device):
    q, cache = tensors(device, (5, HEADS, D), (2, 32, HEADS, D))
    flop = count(
        flashattn_ext.flash_fwd_splitkv, q, cache, cache.clone(), cache_seqlens=11,
        cu_seqlens_q=ints(device, 0, 1, 5), max_seqlen_q=4,
    )  # fmt: skip
    assert flop == 4 * HEADS * D * 5 * 11


def test_without_memory_the_bounds_count():
    with FakeTensorMode():
        q, k, v = tensors("cpu", (10, HEADS, D), (12, HEADS, D), (12, HEADS, D))
        starts = torch.empty(3, dtype=torch.int32)
        options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": 7, "max_seqlen_k": 8}
        assert count(flashattn_ext.flash_fwd, q, k, v, **options) == 2 * 4 * HEADS * D * 7 * 8
        cache = torch.empty(2, 32, HEADS, D, dtype=torch.bfloat16)
        lengths = torch.empty(2, dtype=torch.int32)
        query = torch.empty(2, 3, HEADS, D, dtype=torch.bfloat16)
        flop = count(flashattn_ext.flash_fwd_splitkv, query, cache, cache, cache_seqlens=lengths)
        assert flop == 2 * 4 * HEADS * D * 3 * 32


def test_sdpa_on_our_kernels_counts_as_before(device):
    q, k, v = tensors(device, (2, HEADS, 9, D), (2, HEADS, 9, D), (2, HEADS, 9, D))
    before = count(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    with flashattn_ext.activate_sdpa():
        assert count(torch.nn.functional.scaled_dot_product_attention, q, k, v) == before


def test_registering_again_changes_nothing():
    before = dict(flop_registry)
    flops.register()
    assert flop_registry == before
