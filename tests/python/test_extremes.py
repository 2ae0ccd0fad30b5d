"""Scores and values at the ends of what the types hold: huge, all equal, one far above the others,
subnormal, infinite. Results follow IEEE arithmetic, through one part and through several."""

import pytest
import torch
from cases import HALF_DTYPES
from reference import Rule, Sequence, attend

from flashattn_ext import flash_fwd, flash_fwd_splitkv

KEYS, D = 300, 64
WAYS = {"flash_fwd": None, "whole": {"num_splits": 1}, "parts": {"num_splits": 3}}
every_way = pytest.mark.parametrize("way", WAYS)
every_dtype = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)


def attention(way, q, k, v, scale=1.0):
    """(out, lse) of one sequence: q (rows, 1, D), k and v (keys, 1, D)."""
    options = {"softmax_scale": scale, "return_lse": True}
    if WAYS[way] is None:
        out, lse = flash_fwd(q[None], k[None], v[None], **options)
    else:
        options |= {"cache_seqlens": len(k), **WAYS[way]}
        out, lse = flash_fwd_splitkv(q[None], k[None], v[None], **options)
    return out[0], lse[0]


def full(rows, value, dtype, device):
    return torch.full((rows, 1, D), value, dtype=dtype, device=device)


def normal(rows, dtype, device, seed=0):
    source = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, 1, D, generator=source, device=device).to(dtype)


def assert_as_exact(way, q, k, v, scale=1.0):
    """Against float64: also which numbers are infinite and which are none."""
    out, lse = attention(way, q, k, v, scale)
    expected, expected_lse = attend(Sequence(q, k, v), Rule(scale))
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(out), kind(expected)), kind
    there = expected.isfinite()
    close = {"rtol": 2 * torch.finfo(q.dtype).eps, "atol": 2 * torch.finfo(q.dtype).eps}
    torch.testing.assert_close(out.double()[there], expected[there], **close)
    there = expected_lse.isfinite()
    torch.testing.assert_close(lse.double()[there], expected_lse[there], rtol=2e-7, atol=1e-4)
    assert not lse[~there].isfinite().any()


@every_way
@every_dtype
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_100000(sign, dtype, way, device):
    """64 * 50 * 31.25, which all types hold; one key has the score 0."""
    q, k = full(5, 50.0, dtype, device), full(KEYS, sign * 31.25, dtype, device)
    k[77] = 0
    assert_as_exact(way, q, k, normal(KEYS, dtype, device))


@every_way
@every_dtype
def test_all_scores_equal(dtype, way, device):
    for score in (0.0, 3.0):
        q, k = full(5, score / D, dtype, device), full(KEYS, 1.0, dtype, device)
        assert_as_exact(way, q, k, normal(KEYS, dtype, device))


@every_way
@every_dtype
@pytest.mark.parametrize("place", [0, 63, 64, 150, KEYS - 1])
def test_one_score_above_all_others(place, dtype, way, device):
    """By so much that the result is its value."""
    q, k, v = (
        full(5, 1.0, dtype, device),
        full(KEYS, 0.0, dtype, device),
        normal(KEYS, dtype, device),
    )
    k[place] = 1.0
    out, lse = attention(way, q, k, v)
    assert torch.equal(out, v[place].expand_as(out)) and ((lse - D).abs() < 1e-4).all()


@every_way
@every_dtype
def test_subnormal_values(dtype, way, device):
    """Of one key the result is its value; bfloat16 has the exponents of float32, whose subnormals a
    GPU may take for 0."""
    smallest = torch.finfo(dtype).smallest_normal
    v = (normal(1, torch.float32, device) * smallest / 8).to(dtype)
    out, _ = attention(way, full(2, 0.0, dtype, device), full(1, 0.0, dtype, device), v)
    allowed = smallest if dtype == torch.bfloat16 else 0.0
    assert v.any() and ((out - v).abs() <= allowed).all()


@every_way
def test_subnormal_keys_count(way, device):
    """60000 times 2^-20, 64 times: scores from 0 to 7."""
    k = torch.randint(0, 3, (KEYS, 1, D), device=device).half() * 2.0**-20
    assert (k.abs() < torch.finfo(torch.float16).smallest_normal).all()
    q = full(5, 60_000.0, torch.float16, device)
    assert_as_exact(way, q, k, normal(KEYS, torch.float16, device))


@every_way
@every_dtype
@pytest.mark.parametrize("place", [0, 150, KEYS - 1])
def test_infinite_values(place, dtype, way, device):
    """Of either sign, and both in one column, which is no number."""
    q, k, v = (normal(n, dtype, device, seed) for seed, n in enumerate((5, KEYS, KEYS)))
    v[place, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    v[place, 0, 3], v[place - 10, 0, 3] = torch.inf, -torch.inf
    assert_as_exact(way, q, k, v, D**-0.5)


@every_way
@every_dtype
@pytest.mark.parametrize("place", [0, 20, 150, KEYS - 1])
@pytest.mark.parametrize("largest", [5, 100, 290])
def test_infinite_values_without_any_weight(largest, place, dtype, way, device):
    """Of a key whose score is so far below the largest that its exponential is 0 in float32."""
    q, k = full(5, 8.0, dtype, device), full(KEYS, 0.0, dtype, device)
    v = normal(KEYS, dtype, device)
    k[largest] = 1.0
    v[place, 0, :2] = torch.tensor([torch.inf, torch.nan])
    out, lse = attention(way, q, k, v)
    assert not out[..., :2].isfinite().any()
    assert torch.equal(out[..., 2:], v[largest, :, 2:].expand(5, 1, D - 2))
    assert ((lse - 8 * D).abs() < 1e-3).all()


@every_way
@every_dtype
@pytest.mark.parametrize("place", [0, 150, KEYS - 1])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_infinite_keys(value, place, dtype, way, device):
    """A query whose score is +inf has no result; one whose score is -inf does without the key."""
    q, k, v = (normal(n, dtype, device, seed) for seed, n in enumerate((6, KEYS, KEYS)))
    q[:, 0, 5] = torch.tensor([1, -1, 1, -1, 1, -1])
    k[place, 0, 5] = value
    out, lse = attention(way, q, k, v, D**-0.5)
    lost = q[:, 0, 5] * value > 0
    assert out[lost].isnan().all() and not lse[:, lost].isfinite().any()
    others = torch.arange(KEYS, device=device) != place
    expected, expected_lse = attend(Sequence(q[~lost], k[others], v[others]), Rule(D**-0.5))
    close = {"rtol": 0, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out[~lost].double(), expected, **close)
    torch.testing.assert_close(lse[:, ~lost].double(), expected_lse, rtol=0, atol=1e-4)
