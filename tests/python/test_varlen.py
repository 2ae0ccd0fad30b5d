"""Packed batches: ragged and uniform lengths, empty sequences, bounds, the dense call as a twin."""

import random

import pytest
import torch
from cases import DTYPES, HEAD_DIMS, TILE_EDGES, dense, packed, sample
from test_dense import HEADS, MASKS


def ragged(count, seed):
    """Batches of 1 to 6 sequences with lengths at tile edges, some of them empty."""
    source = random.Random(seed)
    edges = (0, *TILE_EDGES[:10])
    batches = []
    for _ in range(count):
        size = source.randint(1, 6)
        batches.append(tuple((source.choice(edges), source.choice(edges)) for _ in range(size)))
    return batches


SAMPLED = sample(
    90,
    seed=2,
    lengths=ragged(90, seed=3),
    packed=(True,),
    heads=HEADS,
    d=HEAD_DIMS,
    dtype=DTYPES,
    mask=MASKS,
    slack=(0, 1, 1000),
    tail=(0, 3),
)


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_sizes(case, device):
    case.check(device)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims(d, device):
    for dtype in (torch.bfloat16, torch.float16):
        lengths = (5, 5), (129, 65), (1, 130), (64, 64)
        packed(*lengths, d=d, dtype=dtype, heads=(3, 1), causal=True, seed=d).check(device)


@pytest.mark.parametrize("d", [36, 59, 100, 111])
def test_c83_head_dim_not_a_multiple_of_8(d, device):
    packed((33, 66), (0, 4), (17, 5), d=d, causal=True, seed=d).check(device)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_c04_sequences_without_keys(d, causal, device):
    case = packed((5, 0), (64, 64), (1, 0), (130, 130), d=d, causal=causal)
    out, lse = case.check(device)
    for rows in (slice(0, 5), slice(69, 70)):
        assert (out[rows] == 0).all() and (lse[:, rows] == -torch.inf).all()
    _, lse = case.but(sinks="same").check(device)
    assert lse[:, :5].isfinite().all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_c13_sequence_without_queries(causal, device):
    for d in (32, 64, 128, 192):
        packed((150, 100), (0, 100), (150, 100), d=d, causal=causal).check(device)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_c03_every_sentinel_is_the_same(heads, device):
    """No keys by length, by seqused_k, by mask; dense and packed: out 0, lse -inf."""
    for case in (
        dense(1, 4, 0, heads=heads),
        dense(1, 4, 9, heads=heads, used=(0,)),
        packed((4, 0), heads=heads, tail=0),
        packed((4, 9), heads=heads, used=(0,), tail=0),
    ):
        out, lse = case.check(device)
        assert (out == 0).all() and (lse == -torch.inf).all()
    out, lse = dense(1, 8, 4, heads=heads, causal=True).check(device)
    assert (out[:, :4] == 0).all() and (lse[..., :4] == -torch.inf).all()
    assert (out[:, 4:] != 0).any(dim=-1).all() and lse[..., 4:].isfinite().all()


def test_no_sequences_at_all(device):
    out, lse = packed(tail=4).build(device).run()
    assert out.shape == (4, 4, 64) and lse.shape == (4, 4)
    assert out.isnan().all(), "rows of no sequence were written"
    packed((0, 0), (0, 0), tail=0).check(device)


@pytest.mark.parametrize("case", SAMPLED[::9], ids=str)
def test_result_does_not_depend_on_max_seqlen(case, device):
    """Upper bounds only: tight, one more, the total, far too large. Bit by bit."""
    call = case.build(device)
    first = list(call.per_sequence(*call.run()))
    for extra in (1, 130, 100_000):
        bounds = {name: call.options[name] + extra for name in ("max_seqlen_q", "max_seqlen_k")}
        other = call.per_sequence(*call.run(**bounds))
        for (out, lse), (other_out, other_lse) in zip(first, other, strict=True):
            assert torch.equal(out, other_out) and torch.equal(lse, other_lse)


@pytest.mark.parametrize("length", [1, 64, 129])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_uniform_lengths_equal_the_dense_call(length, mask, device):
    """Uniform lengths hide what ragged ones show, and the other way round."""
    case = packed(*[(length, length)] * 3, tail=0, **mask)
    call = case.build(device)
    out, lse = call.run()
    call.compare(out, lse)
    twin = dense(3, length, length, **mask).build(device)
    for mine, theirs in zip((twin.q, twin.k, twin.v), (call.q, call.k, call.v), strict=True):
        mine.copy_(theirs.view_as(mine))
    dense_out, dense_lse = twin.run()
    torch.testing.assert_close(out.view_as(dense_out), dense_out, rtol=0, atol=0)
    packed_lse = lse.view(lse.shape[0], 3, length).transpose(0, 1)
    torch.testing.assert_close(packed_lse, dense_lse, rtol=0, atol=0)


def test_a_sequence_does_not_depend_on_its_batch(device):
    """Bitwise: a sequence alone, and among longer, shorter and empty ones."""
    call = packed((200, 300), (5, 5), (0, 7), (70, 129), (1, 1), causal=True, tail=0).build(device)
    results = list(call.per_sequence(*call.run()))
    for n in (1, 3):
        seq = call.sequences[n]
        options = call.options | {
            "cu_seqlens_q": torch.tensor([0, len(seq.q)], dtype=torch.int32, device=device),
            "cu_seqlens_k": torch.tensor([0, len(seq.k)], dtype=torch.int32, device=device),
        }
        alone = type(call)(call.case, seq.q, seq.k, seq.v, options).run()
        assert torch.equal(alone[0], results[n][0]) and torch.equal(alone[1], results[n][1])


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "ragged"])
def test_many_sequences(uniform, device):
    lengths = [(1, 17)] * 130 if uniform else [(n % 4, (7 * n) % 40) for n in range(130)]
    packed(*lengths, heads=(2, 1), d=32, causal=True).check(device)
