"""Automatic splits share the keys of a whole batch out equally, whatever the lengths: shares begin
and end within sequences, or hold many. Here: batches that are hard to share out.

On a GPU sequences are longer: the longest of 100,000 tokens.
"""

from itertools import cycle, islice

import pytest
import torch
from caches import CacheCase
from cases import HALF_DTYPES, sample
from strided import as_bits

PLACES = ({}, {"page": 1}, {"page": 16})
BATCHES = {
    "long_first": (2703, *(1 + 3 * n % 8 for n in range(63))),
    "long_last": (*(1 + 3 * n % 8 for n in range(63)), 2703),
    "long_neighbours": (3, 1200, 1201, 0, 900),
    "empty_among_others": (0, 0, 130, 0, 64, 65, 0, 300, 0),
    "empty": (0,) * 20,
    "equal": (130,) * 24,
    "powers": tuple(2**n for n in range(10)),
    "alone": (2703,),
}
# More sequences than thread blocks on a GPU; these do not grow.
CROWDS = {
    "of_1_to_3": tuple(1 + n % 3 for n in range(300)),
    "of_0_to_130": tuple(7 * n % 131 for n in range(600)),
}


def grown(case, device, times=8):
    if device == "cpu":
        return case
    return case.but(lengths=tuple((sq, times * cached) for sq, cached in case.lengths))


def tokens(*cached, sq=1, **fields):
    return CacheCase(tuple((sq, n) for n in cached), **fields)


def in_place(case, place):
    """A pool for so many sequences of the longest one's length is shared, where pages are small."""
    many = place.get("page") == 1 and len(case.lengths) > 30
    return case.but(**place, **({"table": "random"} if many else {}))


def assert_same_but_for_rounding(call, results, expected):
    """Of each sequence, by the magnitude of its own outputs."""
    eps = torch.finfo(call.q.dtype).eps
    pairs = zip(call.per_sequence(*results), call.per_sequence(*expected), strict=True)
    for (out, lse), (other, other_lse) in pairs:
        if out.numel():
            bound = 4 * eps * other.abs().max().item()
            torch.testing.assert_close(out, other, rtol=0, atol=bound)
            torch.testing.assert_close(lse, other_lse, rtol=0, atol=2e-5)


def check(case, device):
    """Against the oracle, and against no splits."""
    call = case.build(device)
    results = call.run()
    call.compare(*results)
    assert_same_but_for_rounding(call, results, call.run(num_splits=1))


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_one_query_each(name, place, device):
    case = in_place(tokens(*BATCHES[name], heads=(4, 1)), place)
    times = 37 if name in ("long_first", "alone") else 8
    check(grown(case, device, times), device)


@pytest.mark.parametrize("room", [0, 70])
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", CROWDS)
def test_more_sequences_than_thread_blocks(name, place, room, device):
    count = 600 if device == "cuda" else 100
    check(tokens(*CROWDS[name][:count], heads=(2, 1), d=40, room=room, **place), device)


HEADS = ((2, 2), (8, 2), (7, 1), (34, 2), (32, 1), (128, 2))
HEAD_DIMS = (40, 64, 128, 256)
OPTIONS = (
    {},
    {"causal": True},
    {"causal": True, "window": (100, -1)},
    {"window": (30, 5)},
    {"sinks": "fp32"},
    {"sinks": "same", "causal": True, "window": (7, -1)},
    {"alibi": "h"},
    {"alibi": "bh", "causal": True},
    {"softcap": 5.0},
)
SKEWED = ((300, 1, 2, 0, 65), (1, 3, 270), (64, 128, 129, 5), (140, 140))


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_groups_of_heads(heads, d, device):
    """1, 4, 7, 17, 32 and 64 query heads to a key/value head: tiles of 16 rows and of 32, filled
    or not, and several for one head."""
    for n, dtype in enumerate(HALF_DTYPES):
        case = tokens(90, 1, 33, heads=heads, d=d, dtype=dtype, page=(0, 16)[n])
        check(grown(case, device), device)


@pytest.mark.parametrize(
    "case",
    sample(
        45,
        seed=50,
        kind=CacheCase,
        layout=[
            {"lengths": tuple((sq, n) for n in cached)} for cached in SKEWED for sq in (1, 1, 2, 5)
        ],
        heads=HEADS,
        d=HEAD_DIMS,
        dtype=HALF_DTYPES,
        option=OPTIONS,
        place=PLACES,
    ),
    ids=str,
)
def test_options(case, device):
    check(grown(case, device), device)


def mixed(count, queries=(1, 2, 5, 40, 0)):
    """Sequences with some queries each over 0 to 300 tokens."""
    lengths = [(sq, 53 * n % 300) for n, sq in enumerate(islice(cycle(queries), count))]
    return {"lengths": tuple(lengths), "packed": True}


@pytest.mark.parametrize(
    "case",
    sample(
        45,
        seed=51,
        kind=CacheCase,
        layout=(
            mixed(5),
            mixed(14),
            mixed(13, (1, 40)),
            mixed(9, (0, 1)),
            mixed(7, (2, 5)),
            {"lengths": ((40, 300), *((1, 1 + n) for n in range(20))), "packed": True},
        ),
        heads=HEADS,
        d=HEAD_DIMS,
        dtype=HALF_DTYPES,
        option=OPTIONS,
        place=PLACES,
        slack=(0, 0, 100),
    ),
    ids=str,
)
def test_packed_queries_of_many_lengths(case, device):
    check(grown(case, device), device)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_repeats_are_bitwise_equal(place, d, device):
    """Which thread block finishes first has no influence."""
    batches = (BATCHES["long_first"][:16], BATCHES["empty_among_others"], BATCHES["equal"])
    cases = [tokens(*batch, heads=(4, 1), **place) for batch in batches]
    cases.append(CacheCase(**mixed(14), heads=(8, 2), causal=True, **place))
    for case in cases:
        call = grown(case.but(d=d, tail=0), device, times=37).build(device)
        first = [as_bits(t) for t in call.run()]
        different = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(20):
            again = [as_bits(t) for t in call.run()]
            different += sum((a != b).any() for a, b in zip(again, first, strict=True))
        assert different == 0, f"{different} of 20 runs"
