"""What is no key is never read into a result, and nothing is written outside the results.

Inputs come from cases.py with NaN in every slot that does not count; here it is also infinity, and
results lie between canaries.
"""

import pytest
import torch
from cases import DTYPES, HALF_DTYPES, dense, packed, sample
from strided import VARIANTS

import flashattn_ext

CANARY = 12345.0
POISON = (float("nan"), float("inf"), float("-inf"), 3e4)


def poison(call, value):
    """Replaces the NaN that cases.py leaves in unused slots by `value`."""
    for t in (call.q, call.k, call.v):
        t.copy_(torch.where(t.isnan(), value, t))


@pytest.mark.parametrize("value", POISON, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c14_garbage_past_the_used_keys(dtype, value, device):
    for d in (64, 128, 256):
        case = dense(2, 3, 3, heads=(1, 1), d=d, dtype=dtype, used=(1, 3))
        call = case.build(device)
        poison(call, value)
        call.compare(*call.run())


@pytest.mark.parametrize("value", POISON, ids=str)
@pytest.mark.parametrize("sq", [1, 5, 70])
def test_c15_garbage_in_a_long_tail(sq, value, device):
    for is_causal in (False, True):
        case = dense(4, sq, 128, heads=(8, 8), used=(32, 64, 96, 48), causal=is_causal)
        call = case.build(device)
        poison(call, value)
        call.compare(*call.run())


@pytest.mark.parametrize("used", [1, 13, 45, 63, 64, 65, 127, 129])
def test_c16_garbage_in_the_last_block(used, device):
    for d in (40, 64, 128):
        dense(1, 33, 130, d=d, used=(used,)).check(device)
        packed((33, 130), (4, 70), d=d, used=(used, 1)).check(device)


@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("sk", [129, 65, 1])
def test_c18_no_stale_tiles_of_an_earlier_call(sk, d, device):
    """A call over full tiles of NaN, then a clean one whose last tile is partly filled."""
    dirty = dense(1, 128, 256, d=d).build(device)
    clean = dense(1, 128, sk, d=d).build(device)
    dirty.k.fill_(torch.nan)
    dirty.v.fill_(torch.nan)
    first = clean.run()
    clean.compare(*first)
    for _ in range(200 if device == "cuda" else 10):
        dirty.run()
        again = clean.run()
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("value", POISON, ids=str)
@pytest.mark.parametrize("heads", [(16, 1), (4, 4)], ids=str)
def test_c19_garbage_past_the_packed_rows(heads, value, device):
    for d in (64, 128):
        for causal in (False, True):
            call = packed((21, 21), heads=heads, d=d, causal=causal, tail=3).build(device)
            poison(call, value)
            call.compare(*call.run())


@pytest.mark.parametrize("case", [packed((9, 200), (70, 5), (0, 3), (33, 64))], ids=str)
def test_neighbours_in_a_packed_buffer(case, device):
    """The rows of the other sequences are garbage too, as far as one sequence goes."""
    call = case.build(device)
    clean = [(o.clone(), s.clone()) for o, s in call.per_sequence(*call.run())]
    for n, (seq, (out, lse)) in enumerate(zip(call.sequences, clean, strict=True)):
        other = case.build(device)
        keep = other.sequences[n]
        mine = [t.clone() for t in (keep.q, keep.k, keep.v)]
        for t in (other.q, other.k, other.v):
            t.fill_(torch.nan)
        for t, copy in zip((keep.q, keep.k, keep.v), mine, strict=True):
            t.copy_(copy)
        out_n, lse_n = list(other.per_sequence(*other.run()))[n]
        assert torch.equal(out_n, out) and torch.equal(lse_n, lse), seq.q.shape


@pytest.mark.parametrize("tail", [1, 3, 64, 200])
@pytest.mark.parametrize("d", [36, 64, 128])
def test_c20_rows_of_out_past_the_sequences_stay(d, tail, device):
    call = packed((21, 40), (5, 5), d=d, tail=tail).build(device)
    out = torch.full_like(call.q, CANARY)
    call.run(out=out)
    assert (out[26:] == torch.tensor(CANARY, dtype=out.dtype)).all()
    assert (out[:26] != torch.tensor(CANARY, dtype=out.dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c21_masking_selects_and_does_not_add(dtype, device):
    """Scores of hidden keys that are NaN or infinite, in the tile of visible ones."""
    for value in (torch.nan, torch.inf, -torch.inf):
        call = dense(2, 20, 64, dtype=dtype, causal=True).build(device)
        visible = slice(0, 10)
        clean = [t.clone() for t in call.run()]
        call.k[:, 54:] = value
        call.v[:, 54:] = 0
        out, lse = call.run()
        assert torch.equal(out[:, visible], clean[0][:, visible])
        assert torch.equal(lse[..., visible], clean[1][..., visible])


@pytest.mark.parametrize(
    "case",
    sample(
        36,
        seed=7,
        layout=[
            {"lengths": ((65, 129),) * 2},
            {"lengths": ((1, 64),) * 3},
            {"lengths": ((200, 40),)},
            {"lengths": ((5, 0), (64, 64), (1, 0), (130, 130)), "packed": True},
            {"lengths": ((129, 7), (0, 9)), "packed": True},
            {"lengths": ((33, 33),) * 3, "packed": True},
        ],
        d=(8, 32, 64, 128, 192, 256),
        dtype=DTYPES,
        causal=(False, True),
        heads=((4, 2), (3, 1)),
        sinks=("", "fp32"),
    ),
    ids=str,
)
def test_results_between_canaries(case, device):
    """The op that writes into given tensors fills out and lse, and nothing before or after them."""
    call = case.build(device)
    call.compare(*call.run_op())
    margin = 512
    results = []
    for nan in (call.nan_out(), call.nan_lse()):
        flat = torch.full((nan.numel() + 2 * margin,), CANARY, dtype=nan.dtype, device=device)
        inner = flat[margin : margin + nan.numel()].view_as(nan)
        results.append((flat, inner.copy_(nan)))
    out, lse = (inner for _, inner in results)
    torch.ops.flashattn_ext.fwd_out(out, lse, *call.op_arguments())
    call.compare(out, lse)
    for flat, _ in results:
        canary = torch.tensor(CANARY, dtype=flat.dtype)
        assert (flat[:margin] == canary).all() and (flat[-margin:] == canary).all()


@pytest.mark.parametrize("strides", VARIANTS)
def test_used_keys_over_strides(strides, device):
    if strides == "expanded_batch":
        dense(2, 70, 70, strides=strides, used=(66, 66)).check(device)
    else:
        dense(2, 70, 70, strides=strides, used=(66, 3)).check(device)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_nan_in_a_visible_key_is_not_hidden(dtype, device):
    """Garbage in, garbage out: NaN in a key or value that counts shows in exactly its rows."""
    call = dense(1, 70, 70, heads=(2, 2), dtype=dtype, causal=True).build(device)
    call.k[0, 60, 1] = torch.nan
    out, lse = call.run()
    assert out[0, 60:, 1].isnan().all() and lse[0, 1, 60:].isnan().all()
    assert out[0, :60].isfinite().all() and out[0, :, 0].isfinite().all()


@pytest.mark.parametrize(
    "starts", [[0, 50, 20, 40], [0, -5, 10, 40], [0, 10, 900, 40], [7, 3, 1, 0]]
)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_hostile_lengths_stay_inside_the_tensors(name, starts, device):
    """Lengths on the device are untrusted. What comes out is unspecified; canaries stay."""
    call = packed((10, 10), (20, 20), (10, 10), tail=0).build(device)
    flat = torch.full((3 * call.q.numel(),), CANARY, dtype=call.q.dtype, device=device)
    out = flat[call.q.numel() : 2 * call.q.numel()].view_as(call.q)
    hostile = torch.tensor(starts, dtype=torch.int32, device=device)
    call.run(out=out, **{name: hostile})
    canary = torch.tensor(CANARY, dtype=flat.dtype)
    assert (flat[: call.q.numel()] == canary).all() and (flat[2 * call.q.numel() :] == canary).all()
    assert flashattn_ext.flash_fwd(call.q, call.k, call.v, **call.options).isfinite().all()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_empty_rows_beside_values_that_are_not_finite(value, device):
    """Two queries of four see no key: 0, though the others of their tile see infinite values."""
    q, k = (torch.randn(1, n, 2, 64, device=device).half() for n in (4, 2))
    v = torch.full_like(k, value)
    out, lse = flashattn_ext.flash_fwd(q, k, v, causal=True, return_lse=True)
    assert (out[:, :2] == 0).all() and (lse[..., :2] == -torch.inf).all()
    assert not out[:, 2:].isfinite().any() and lse[..., 2:].isfinite().all()


@pytest.mark.parametrize("queries", [1, 3, 40])
def test_keys_that_no_query_of_the_call_sees(queries, device):
    """What a window has left behind may be given back: it is not read."""
    q = torch.randn(1, queries, 4, 64, device=device).half()
    k, v = (torch.randn(1, 200, 2, 64, device=device).half() for _ in range(2))
    clean = flashattn_ext.flash_fwd(q, k, v, window_size=(16, 0))
    first = 200 - queries - 16
    k[:, :first], v[:, :first] = torch.nan, torch.inf
    assert torch.equal(flashattn_ext.flash_fwd(q, k, v, window_size=(16, 0)), clean)
    lengths = torch.full((1,), 200, dtype=torch.int32, device=device)
    options = {"cache_seqlens": lengths, "window_size": (16, 0), "num_splits": 1}
    out = flashattn_ext.flash_fwd_splitkv(q, k, v, **options)
    assert (out - clean).abs().max() < 2e-3
