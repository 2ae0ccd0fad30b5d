"""Mixed calls for a while: every result has the bits of the first one, and memory does not grow."""

import os
import random
import time
from pathlib import Path

import pytest
import torch
from caches import dense_cache, packed_cache
from cases import dense, ints
from strided import as_bits
from test_concurrency import drawn, large, same
from test_gpu import capture

SECONDS = {"cpu": 3, "cuda": 15}
MOST_GROWTH = 16 * 2**20  # bytes: less than the allocator keeps or returns


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_in_use(device):
    return torch.cuda.memory_allocated() if device == "cuda" else resident_bytes()


def test_mixed_calls(device, record_property):
    """Also calls that append, which write the same tokens to the same places each time."""
    functions = [*drawn(50, device, may_append=True), large(device)]
    expected = [function() for function in functions]
    for function in functions * 2:  # by now all that is kept between calls is there
        function()
    source, calls, before = random.Random(0), 0, memory_in_use(device)
    end = time.monotonic() + SECONDS[device]
    while time.monotonic() < end:
        n = source.randrange(len(functions))
        assert same(functions[n](), expected[n]), f"call {n} after {calls} calls"
        calls += 1
    assert memory_in_use(device) - before < MOST_GROWTH, f"memory grew in {calls} calls"
    record_property(f"soak calls on {device}", calls)


class Captured:
    """A graph of one call, replayed over lengths that change on the device."""

    def __init__(self, case, lengths_name):
        self.call = case.build("cuda")
        self.lengths = self.call.options.get(lengths_name)
        if self.lengths is None:
            longest = [sk for _, sk in case.lengths]
            self.lengths = self.call.options[lengths_name] = ints(longest, "cuda")
        source, longest = random.Random(0), self.lengths.tolist()
        self.variants = [
            ints([source.randint(0, most) for most in longest], "cuda") for _ in range(8)
        ]
        self.before = [self.call.k.clone(), self.call.v.clone()]
        self.expected = [self._eager(lengths) for lengths in self.variants]
        self.graph, self.results = capture(lambda: self.call.run())

    def _start(self, lengths):
        self.lengths.copy_(lengths)
        self.call.k.copy_(self.before[0])
        self.call.v.copy_(self.before[1])

    def _eager(self, lengths):
        self._start(lengths)
        return [t.clone() for t in self.call.run()]

    def replay(self, n):
        """How many of the results differ, on the device."""
        self._start(self.variants[n])
        for t in self.results:
            t.fill_(torch.nan)
        self.graph.replay()
        pairs = zip(self.results, self.expected[n], strict=True)
        return sum((as_bits(a) != as_bits(b)).any() for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.slow
def test_graphs_over_changing_lengths(record_property):
    captured = [
        Captured(dense(4, 70, 300, causal=True), "seqused_k"),
        Captured(dense_cache(1, 2000, 900, 300, 70, heads=(8, 2), page=16), "cache_seqlens"),
        Captured(dense_cache(1, 900, 900, heads=(8, 2), new=1, rotary=1.0), "cache_seqlens"),
        Captured(packed_cache((40, 900), (1, 70), (3, 500), page=48, tail=0), "cache_seqlens"),
        Captured(dense_cache(2, 900, 70, splits=5, alibi="h", sinks="fp32"), "cache_seqlens"),
    ]
    source, replays, different = random.Random(1), 0, torch.zeros((), device="cuda").long()
    before, end = torch.cuda.memory_allocated(), time.monotonic() + 2 * SECONDS["cuda"]
    while time.monotonic() < end:
        for _ in range(100):
            different += source.choice(captured).replay(source.randrange(8))
            replays += 1
        torch.cuda.synchronize()
    assert different == 0, f"{different} results in {replays} replays"
    assert torch.cuda.memory_allocated() - before < MOST_GROWTH
    record_property("soak replays of graphs", replays)
