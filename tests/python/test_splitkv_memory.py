"""Of a cache, what is no key is never read into a result; nothing is written but the results.
Lengths, cache rows and starts on the device are not trusted."""

import pytest
import torch
from caches import dense_cache, packed_cache
from cases import ints
from test_memory import CANARY, POISON

import flashattn_ext


@pytest.mark.parametrize("value", POISON, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_c14_c15_garbage_past_the_tokens(splits, value, device):
    for case in (
        dense_cache(1, 1, 3, heads=(1, 1), dtype=torch.float16, room=0),
        dense_cache(1, 32, 64, 96, 48, heads=(8, 8), room=32, leftpad=(0, 1, 65, 48)),
        dense_cache(70, 32, 100, heads=(2, 2), causal=True, pool="k_heads_first"),
    ):
        call = case.but(splits=splits).build(device)
        for t in (*call.buffers, *call.expected):
            t.copy_(torch.where(t.isnan(), value, t))
        call.compare(*call.run())


def test_c38_the_lse_is_stored_whether_asked_for_or_not(device):
    for case in (dense_cache(1, 300, 70), packed_cache((5, 300), (1, 70), tail=0)):
        call = case.but(splits=4).build(device)
        out, _ = call.run()
        only_out = flashattn_ext.flash_fwd_splitkv(call.q, call.k, call.v, **call.options)
        assert torch.equal(out, only_out)


@pytest.mark.parametrize("lengths", [(-5, 10_000), (2**31 - 1, -(2**31)), (131, 130)], ids=str)
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_d01_d03_lengths_are_clamped_on_both_sides(splits, lengths, device):
    """C50: what is not in the cache is not there, without a word. The int is known and raises."""
    full = tuple(min(max(n, 0), 130) for n in lengths)
    case = dense_cache(2, *full, room=0 if max(full) == 130 else 130 - max(full), splits=splits)
    call = case.build(device)
    call.compare(*call.run(cache_seqlens=ints(lengths, device)))
    with pytest.raises(ValueError, match="cache_seqlens.*131"):
        call.run(cache_seqlens=131)


@pytest.mark.parametrize("pads", [(-1, -(2**31)), (200, 2**31 - 1)], ids=str)
def test_left_padding_out_of_range(pads, device):
    lengths = (100, 70)
    kept = tuple(min(max(pad, 0), n) for pad, n in zip(pads, lengths, strict=True))
    call = dense_cache(2, *lengths, leftpad=kept, splits=2).build(device)
    call.compare(*call.run(cache_leftpad=ints(pads, device)))


@pytest.mark.parametrize("rows", [(-1, 4), (5, 2**31 - 1), (-(2**31), 1)], ids=str)
def test_cache_rows_that_do_not_exist(rows, device):
    """A sequence whose cache row is none of the cache has no keys."""
    call = dense_cache(2, 100, 70, batch_idx=True, splits=2).build(device)
    out, lse = call.run(cache_batch_idx=ints(rows, device))
    for n, row in enumerate(rows):
        if not 0 <= row < len(call.k):
            assert (out[n] == 0).all() and (lse[n] == -torch.inf).all()
    call.compare_cache()


@pytest.mark.parametrize(
    "starts", [[0, 50, 20, 40], [0, -5, 10, 40], [0, 10, 900, 40], [7, 3, 1, 0]]
)
def test_hostile_starts_stay_inside_the_tensors(starts, device):
    call = packed_cache((10, 20), (20, 10), (10, 40), tail=0, splits=3).build(device)
    flat = torch.full((3 * call.q.numel(),), CANARY, dtype=call.q.dtype, device=device)
    n = call.q.numel()
    call.run(out=flat[n : 2 * n].view_as(call.q), cu_seqlens_q=ints(starts, device))
    canary = torch.tensor(CANARY, dtype=flat.dtype)
    assert (flat[:n] == canary).all() and (flat[2 * n :] == canary).all()
    call.compare(*call.run())


@pytest.mark.parametrize("case", [dense_cache(1, 100, 3), packed_cache((5, 100), (1, 3))], ids=str)
def test_results_between_canaries(case, device):
    for splits in (0, 1, 4):
        call = case.but(splits=splits).build(device)
        results = []
        for nan in (call.nan_out(), call.nan_lse()):
            flat = torch.full((nan.numel() + 1024,), CANARY, dtype=nan.dtype, device=device)
            results.append((flat, flat[512:-512].view_as(nan).copy_(nan)))
        out, lse = (inner for _, inner in results)
        call.op("_out")(out, lse, *call.op_arguments())
        call.compare(out, lse)
        for flat, _ in results:
            canary = torch.tensor(CANARY, dtype=flat.dtype)
            assert (flat[:512] == canary).all() and (flat[-512:] == canary).all()


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_c74_window_reads_the_last_tokens_only(splits, device):
    call = dense_cache(1, 256, heads=(2, 1), window=(32, 0), splits=splits).build(device)
    call.k[:, :223] = 100
    call.v[:, :223] = 1e4
    call.reread()
    call.compare(*call.run())
