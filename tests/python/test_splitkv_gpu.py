"""Graphs replayed over other lengths, streams, devices, and that no call over a cache waits."""

import pytest
import torch
from caches import CacheCase, dense_cache, packed_cache
from cases import ints
from test_gpu import capture
from test_splitkv_ops import CASES

from flashattn_ext import flash_combine, flash_fwd_splitkv

pytestmark = pytest.mark.gpu

CAPTURED = 1000
REPLAYS = ([1, 17, 999, 1000], [0, 0, 0, 1], [1000] * 4, [0] * 4, [64, 65, 128, 129])


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("place", [{}, {"page": 16}, {"leftpad": (0,) * 4}], ids=str)
@pytest.mark.parametrize("lengths", REPLAYS, ids=str)
def test_c12_c101_graph_over_other_lengths(lengths, place, splits):
    """Captured with all lengths 1000, replayed with others: bit by bit the eager call."""
    case = CacheCase(((1, CAPTURED),) * 4, heads=(8, 2), splits=splits, room=24, **place)
    for is_packed in (False, True):
        call = case.but(packed=is_packed, tail=0).build("cuda")
        graph, (out, lse) = capture(call.run)
        call.options["cache_seqlens"].copy_(ints(lengths, "cuda"))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        call.case = call.case.but(lengths=tuple((1, n) for n in lengths))
        call.reread()
        call.compare(out, lse)
        eager = call.run()
        assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])


@pytest.mark.parametrize("splits", [0, 3])
def test_c101_graph_over_other_query_lengths(splits):
    call = packed_cache(*[(40, 300)] * 4, page=16, causal=True, splits=splits, tail=0).build("cuda")
    graph, (out, lse) = capture(call.run)
    starts = [0, 1, 1, 41, 80]
    call.options["cu_seqlens_q"].copy_(ints(starts, "cuda"))
    call.options["cache_seqlens"].copy_(ints([300, 2, 77, 129], "cuda"))
    out.fill_(torch.nan)
    graph.replay()
    assert out[80:].isnan().all()
    call.case = call.case.but(lengths=((1, 300), (0, 2), (40, 77), (39, 129)), tail=80)
    call.rows = list(zip(starts[:-1], starts[1:], strict=True))
    call.reread()
    call.compare(out, lse)


SHARES = [
    # On 132 multiprocessors the last share of 93 and of 155 key blocks has an entry without one.
    *(dense_cache(1, 64 * 31 * size, heads=(32, 8), sinks="fp32") for size in (1, 3, 5)),
    # All of one length, of which each thread block has two; then one with a key block more.
    *(dense_cache(1, *[100] * 33, last, heads=(32, 8), page=16) for last in (100, 129)),
    dense_cache(4, *[250] * 66, heads=(32, 8), causal=True),
    # Beside a chunk, tiles of five key blocks; then short and long ones.
    packed_cache(*[(1, 300)] * 10, (100, 300), heads=(32, 8), causal=True),
    packed_cache((1, 70), (1, 300), (1, 1), (1, 1000), (100, 400), heads=(32, 8), causal=True),
]


@pytest.mark.parametrize("case", SHARES, ids=str)
def test_shares_of_all_kinds(case):
    call = case.but(d=128).build("cuda")
    call.compare(*call.run())


def test_graph_that_appends_grows_the_sequence():
    """Each replay writes a token where the length says, and the length moves on the device."""
    call = dense_cache(1, 30, 7, new=1, rotary=1.0, causal=True, page=16).build("cuda")
    lengths = call.options["cache_seqlens"]
    before = [t.clone() for t in (call.k, call.v)]

    def step():
        results = call.run()
        lengths.add_(1)
        return results

    graph, (out, lse) = capture(step)
    # Its warm-up has appended, too: a first replay that writes nothing would not be seen.
    for t, old in zip((call.k, call.v), before, strict=True):
        t.copy_(old)
    twin = dense_cache(1, 30, 7, new=1, rotary=1.0, causal=True, page=16).build("cuda")
    for first in ([30, 7], [31, 8], [50, 0]):
        lengths.copy_(ints(first, "cuda"))
        graph.replay()
        assert lengths.tolist() == [n + 1 for n in first]
        eager = twin.run(cache_seqlens=ints(first, "cuda"))
        assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
        assert torch.equal(call.k.nan_to_num(7), twin.k.nan_to_num(7))
        assert torch.equal(call.v.nan_to_num(7), twin.v.nan_to_num(7))


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_c103_captured_with_lengths_beyond_the_table(splits):
    call = dense_cache(1, 128, 128, page=16, room=0, splits=splits).build("cuda")
    lengths = call.options["cache_seqlens"]
    lengths.fill_(129)
    graph, (out, lse) = capture(call.run)
    graph.replay()
    call.compare(out, lse)
    lengths.copy_(ints([5, 128], "cuda"))
    graph.replay()
    call.case = call.case.but(lengths=((1, 5), (1, 128)))
    call.reread()
    call.compare(out, lse)


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype != torch.float32], ids=str)
def test_no_host_synchronisation(case):
    call = case.build("cuda")
    out = call.nan_out()
    call.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run(out=out)
        call.run(out=None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda._sleep(1_000_000_000)
    call.run(out=out)
    assert not torch.cuda.current_stream().query(), "the call returned after the work before it"


@pytest.mark.parametrize("case", [CASES[0].but(splits=4), CASES[3], CASES[6]], ids=str)
def test_c100_side_stream(case):
    """Attention, append and combine read what their own stream has written, and nothing earlier."""
    call = case.build("cuda")
    expected = [t.clone() for t in call.run()]
    inputs = (call.q, call.k, call.v)
    sources = [t.clone() for t in inputs]
    stream = torch.cuda.Stream()
    for _ in range(50):
        for t in inputs:
            t.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(500_000)
            for t, source in zip(inputs, sources, strict=True):
                t.copy_(source)
            out, lse = call.run()
        stream.synchronize()
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_c99_other_device():
    with torch.cuda.device(0):
        for case in (CASES[0].but(splits=4), CASES[3], CASES[6]):
            call = case.build("cuda:1")
            out, lse = call.run()
            assert out.device == lse.device == torch.device("cuda:1")
            assert torch.cuda.current_device() == 0
            call.compare(out, lse)
        parts = torch.randn(3, 2, 5, 4, 64, device="cuda:1"), torch.zeros(3, 2, 4, 5).to("cuda:1")
        combined = flash_combine(*parts)[0]
        torch.testing.assert_close(combined, parts[0].mean(0))


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_kernels_side_by_side_read_what_was_written_just_before(is_graph):
    """A chunk kernel behind a decode kernel does not wait itself for what comes before the call."""
    pages, page, total = 130, 16, 135

    def state(seed, lengths):
        torch.manual_seed(seed)
        ends = torch.tensor([queries for queries, _ in lengths]).cumsum(0)
        return (
            torch.randn(total, 8, 128, device="cuda", dtype=torch.bfloat16),
            torch.randn(pages, page, 2, 128, device="cuda", dtype=torch.bfloat16),
            torch.randn(pages, page, 2, 128, device="cuda", dtype=torch.bfloat16),
            torch.randint(pages, (3, 84), device="cuda", dtype=torch.int32),
            torch.tensor([0, *ends], device="cuda", dtype=torch.int32),
            torch.tensor([keys for _, keys in lengths], device="cuda", dtype=torch.int32),
        )

    states = [
        state(1, ((1, 1328), (5, 18), (129, 463))),
        state(2, ((129, 700), (5, 1200), (1, 40))),
    ]
    now = [t.clone() for t in states[0]]

    def call():
        q, k, v, table, ends, lengths = now
        return flash_fwd_splitkv(
            q, k, v, cache_seqlens=lengths, block_table=table, cu_seqlens_q=ends,
            max_seqlen_q=129, causal=True,
        )  # fmt: skip

    def take(number):
        for target, source in zip(now, states[number], strict=True):
            target.copy_(source)

    expected = []
    for number in (0, 1):
        take(number)
        torch.cuda.synchronize()
        expected.append(call())
        torch.cuda.synchronize()
    assert not torch.equal(*expected)

    def alternate():
        outs = []
        for number in (0, 1) * 10:
            take(number)
            outs.append(call())
        return outs

    if is_graph:
        graph, outs = capture(alternate)
    for _ in range(10):
        if is_graph:
            graph.replay()
        else:
            outs = alternate()
        for number, out in zip((0, 1) * 10, outs, strict=True):
            assert torch.equal(out, expected[number])
