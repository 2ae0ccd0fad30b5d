"""Chunks of a prompt with automatic splits, for every kernel and option: those with tiles of their
own, and those of few rows, which are decoded in several tiles."""

import pytest
from caches import CacheCase

HEADS = (8, 2)  # 4 query heads for a key/value head: 33 tokens are more than 128 rows
LONG = ((140, 700), (1, 300), (33, 70))
SHORT = ((32, 700), (1, 300), (9, 70), (20, 20))
HEAD_DIMS = (32, 64, 128, 136, 192, 200, 224, 248, 256)
OPTIONS = {
    "causal": {"causal": True},
    "full": {},
    "window": {"window": (3, 2)},
    "past": {"causal": True, "window": (40, -1), "leftpad": True},
    "alibi": {"causal": True, "alibi": "bh"},
    "softcap-sinks": {"softcap": 5.0, "sinks": "fp32"},
    "page": {"causal": True, "page": 16},
    "page7": {"page": 7, "sinks": "fp32"},
}


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [LONG, SHORT], ids=["long", "short"])
def test_chunks_of_every_head_dim(lengths, name, d, device):
    options = dict(OPTIONS[name])
    if options.pop("leftpad", False):
        options["leftpad"] = tuple(min(n, keys) for n, (_, keys) in enumerate(lengths, 30))
    CacheCase(lengths, True, tail=0, d=d, heads=HEADS, **options).check(device)


# Up to head dim 160 the calls above have chunk tiles of 64 rows. There are 128 where bits must not
# depend on the batch (one split, or a size), and for a token of 96 heads that share keys.
@pytest.mark.parametrize("d", [32, 64, 96, 128, 160])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("splits", [{"splits": 1}, {"splits": 3}, {"split_size": 128}], ids=str)
def test_chunks_with_given_splits(splits, name, d, device):
    options = dict(OPTIONS[name])
    if options.pop("leftpad", False):
        options["leftpad"] = tuple(min(n, keys) for n, (_, keys) in enumerate(LONG, 30))
    CacheCase(LONG, True, tail=0, d=d, heads=HEADS, **splits, **options).check(device)


@pytest.mark.parametrize("d", [32, 64, 96, 128, 160])
@pytest.mark.parametrize("name", ["causal", "full", "window", "page7"])
def test_chunks_of_many_heads_for_a_key(name, d, device):
    lengths = ((3, 700), (2, 300), (5, 70))
    CacheCase(lengths, True, tail=0, d=d, heads=(96, 1), **OPTIONS[name]).check(device)


# Rows of more than 32 parts, and slices of few columns.
@pytest.mark.parametrize("d", [8, 24, 40, 64, 72, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 8)], ids=str)
def test_one_row_of_many_parts(heads, d, device):
    CacheCase(((1, 20000),), False, d=d, heads=heads, causal=True).check(device)
