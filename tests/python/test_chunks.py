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
