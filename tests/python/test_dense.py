"""Dense batches: lengths around tile edges, head dims, types, grouped heads, empty inputs."""

import pytest
import torch
from caches import dense_cache
from cases import DTYPES, HALF_DTYPES, HEAD_DIMS, TILE_EDGES, dense, sample

import flashattn_ext

HEADS = ((1, 1), (2, 2), (4, 2), (6, 2), (4, 1), (9, 3), (5, 1))
MASKS = (
    {},
    {"causal": True},
    {"window": (7, -1)},
    {"window": (40, 0)},
    {"window": (-1, 5)},
    {"window": (33, 17)},
)


def same_length(pairs, batches=(1, 2, 3)):
    return [
        {"lengths": ((sq, sk),) * batches[n % len(batches)]} for n, (sq, sk) in enumerate(pairs)
    ]


PAIRS = [(n, n) for n in TILE_EDGES]
PAIRS += list(zip(TILE_EDGES, reversed(TILE_EDGES), strict=True))
PAIRS += [(1, n) for n in TILE_EDGES[1:]] + [(n, 1) for n in TILE_EDGES[1:]]
PAIRS += [(3, 513), (113, 203), (128, 217), (307, 256), (300, 97)]


@pytest.mark.parametrize(
    "case",
    sample(
        110,
        seed=1,
        lengths=same_length(PAIRS),
        heads=HEADS,
        d=HEAD_DIMS,
        dtype=DTYPES,
        mask=MASKS,
    ),
    ids=str,
)
def test_sizes(case, device):
    case.check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims(d, dtype, device):
    """One length below and one past a tile, so that every head dim sees a full and a ragged one."""
    for causal in (False, True):
        dense(2, 70, 135, d=d, dtype=dtype, heads=(3, 1), causal=causal, seed=d).check(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 7, 36, 59, 100, 111, 250])
def test_c83_head_dim_not_a_multiple_of_8(d, dtype, device):
    """Also: the default scale is that of the caller's d, not of the padded one."""
    dense(2, 33, 66, d=d, dtype=dtype, causal=True, softcap=4.0, seed=d).check(device)


@pytest.mark.parametrize("heads", [*HEADS, (8, 4), (7, 7), (32, 4), (16, 1), (33, 3)], ids=str)
def test_grouped_heads(heads, device):
    dense(2, 65, 130, heads=heads, d=32, causal=True).check(device)


@pytest.mark.parametrize("sq", [7, 8, 9])
def test_c64_lengths_near_the_group_size(sq, device):
    for sk in (1, 3, sq, 500):
        dense(1, sq, sk, heads=(32, 4), causal=True).check(device)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_c23_one_key(d, dtype, device):
    """A softmax over one key: its value, bit by bit, and its score as lse."""
    call = dense(2, 3, 1, d=d, dtype=dtype).build(device)
    out, lse = call.run()
    call.compare(out, lse)
    assert torch.equal(out, call.v.repeat_interleave(2, dim=2).expand(-1, 3, -1, -1))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("sk", [1, 339])
def test_c111_one_query(sk, dtype, device):
    """Where the error of the low-precision reference is 0, the bound is not."""
    dense(1, 1, sk, heads=(1, 1), d=128, dtype=dtype).check(device)


@pytest.mark.parametrize("d", range(128, 257, 8))
def test_c112_every_large_head_dim(d, device):
    """On each GPU that runs the suite: code that is right on one may be wrong on another."""
    for n, dtype in enumerate(HALF_DTYPES):
        dense(2, 129, 200, heads=(4, 2), d=d, dtype=dtype, causal=n == 0).check(device)
        dense_cache(1, 200, 70, heads=(4, 2), d=d, dtype=dtype, splits=3 * n).check(device)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 0), (2, 0, 5), (2, 0, 0), (1, 129, 0)], ids=str)
def test_c06_no_keys_or_no_queries(shape, mask, device):
    case = dense(*shape, **mask)
    out, lse = case.check(device)
    assert (out == 0).all() and (lse == -torch.inf).all()
    if shape[1] > 0:
        _, lse = case.but(sinks="fp32").check(device)
        assert lse.isfinite().all()


def test_c07_empty_batch(device):
    q = torch.empty(0, 3952, 10, 64, dtype=torch.float16, device=device)
    k = torch.empty(0, 16, 10, 64, dtype=torch.float16, device=device)
    for causal in (False, True):
        out, lse = flashattn_ext.flash_fwd(q, k, k, causal=causal, return_lse=True)
        assert out.shape == (0, 3952, 10, 64) and out.dtype == torch.float16
        assert lse.shape == (0, 10, 3952) and lse.dtype == torch.float32


@pytest.mark.parametrize("d", [64, 128])
def test_a_row_does_not_depend_on_its_batch(d, device):
    """Bitwise: the sequence alone, in a batch, and the same rows under more heads."""
    case = dense(5, 129, 200, d=d, causal=True, alibi="h")
    call = case.build(device)
    out, lse = call.run()
    for n in (0, 3):
        alone = flashattn_ext.flash_fwd(
            call.q[n : n + 1], call.k[n : n + 1], call.v[n : n + 1], **call.options, return_lse=True
        )
        assert torch.equal(alone[0][0], out[n]) and torch.equal(alone[1][0], lse[n])
    options = call.options | {"alibi_slopes": call.options["alibi_slopes"][2:]}
    heads = flashattn_ext.flash_fwd(call.q[:, :, 2:], call.k[:, :, 1:], call.v[:, :, 1:], **options)
    assert torch.equal(heads, out[:, :, 2:])


def test_repeats_are_bitwise_equal(device):
    call = dense(2, 257, 257, d=64, causal=True).build(device)
    first = call.run()
    for _ in range(10):
        again = call.run()
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_inputs_are_not_written(device):
    call = dense(2, 65, 65, alibi="bh", sinks="fp32", used=(60, 9)).build(device)
    tensors = [call.q, call.k, call.v, *(o for o in call.options.values() if torch.is_tensor(o))]
    before = [t.clone() for t in tensors]
    call.run()
    for t, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(t, copy, rtol=0, atol=0, equal_nan=True)
