"""Streams, graphs, devices: what exists on a GPU only."""

import pytest
import torch
from cases import dense, packed

import flashattn_ext

pytestmark = pytest.mark.gpu


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def capture(function):
    """A CUDA graph of `function` and the tensors it returns."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_c100_side_stream(is_packed):
    """The call reads what its own stream has written before, and nothing earlier."""
    lengths = ((100, 200), (100, 200))
    call = (packed(*lengths) if is_packed else dense(2, 100, 200)).build("cuda")
    expected = [t.clone() for t in call.run()]
    sources = [t.clone() for t in (call.q, call.k, call.v)]
    stream = torch.cuda.Stream()
    for _ in range(50):
        for t in (call.q, call.k, call.v):
            t.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(500_000)
            for t, source in zip((call.q, call.k, call.v), sources, strict=True):
                t.copy_(source)
            out, lse = call.run()
        stream.synchronize()
        rows = call.rows[-1][1] if is_packed else 2
        assert torch.equal(out[:rows], expected[0][:rows])
        assert torch.equal(lse[..., :100], expected[1][..., :100])


def test_results_of_a_side_stream_are_not_reused_early():
    stream = torch.cuda.Stream()
    call = dense(2, 300, 300).build("cuda")
    expected = call.run()[0]
    torch.cuda.synchronize()
    outs = []
    with torch.cuda.stream(stream):
        for _ in range(20):
            outs.append(flashattn_ext.flash_fwd(call.q, call.k, call.v))
    stream.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("d", [64, 36, 128, 256])
def test_graph_over_new_inputs(d):
    call = dense(2, 70, 130, d=d, causal=True, alibi="bh", sinks="fp32").build("cuda")
    arguments = dict(call.options, return_lse=True)
    graph, results = capture(lambda: flashattn_ext.flash_fwd(call.q, call.k, call.v, **arguments))
    for t in (call.q, call.k, call.v):
        t.normal_()
    for t in results:
        t.fill_(torch.nan)
    graph.replay()
    call.compare(*results)


@pytest.mark.parametrize(
    "lengths", [[1, 17, 999, 1000], [0, 0, 0, 1], [1000] * 4, [0] * 4], ids=str
)
def test_c101_graph_over_other_lengths(lengths):
    """Captured with all lengths 1000: the lengths live on the device and nowhere else."""
    for queries in (lengths, [min(n, 70) for n in lengths]):
        call = packed(*[(1000, 1000)] * 4, heads=(2, 1), causal=True, tail=0).build("cuda")
        out = call.nan_out()
        graph, (_, lse) = capture(lambda call=call, out=out: call.run(out=out))
        replay = packed(*zip(queries, lengths, strict=True), heads=(2, 1), causal=True).build(
            "cuda"
        )
        for t, source in ((call.q, replay.q), (call.k, replay.k), (call.v, replay.v)):
            t.fill_(torch.nan)
            rows = min(len(t), len(source))
            t[:rows] = source[:rows]
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            call.options[name].copy_(replay.options[name])
        out.fill_(torch.nan)
        graph.replay()
        total = sum(queries)
        assert out[total:].isnan().all()
        eager_out, eager_lse = replay.run()
        replay.compare(eager_out, eager_lse)
        assert torch.equal(out[:total], eager_out[:total])
        assert torch.equal(lse[:, :total], eager_lse[:, :total])


def test_c12_graph_with_half_the_batch_empty():
    used = ints([64] * 8)
    call = dense(8, 1, 64, heads=(8, 2)).build("cuda")
    call.options["seqused_k"] = used
    graph, (out, lse) = capture(lambda: call.run())
    used.copy_(ints([0, 64, 0, 33, 0, 1, 0, 17]))
    graph.replay()
    eager = call.run()
    assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
    assert (out[::2] == 0).all() and (lse[::2] == -torch.inf).all()


def test_no_host_synchronisation():
    """Neither a call nor its checks wait for the device."""
    calls = [
        dense(2, 70, 130, causal=True, alibi="bh", sinks="same", used=(5, 130)).build("cuda"),
        packed((70, 130), (1, 4), alibi="h", used=(5, 4)).build("cuda"),
        dense(2, 70, 130, d=36).build("cuda"),
    ]
    outs = [call.nan_out() for call in calls]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call, out in zip(calls, outs, strict=True):
            call.run(out=out)
            call.run(out=None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_it_does_not_wait_for_running_work():
    call = dense(1, 64, 64).build("cuda")
    call.run()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    flashattn_ext.flash_fwd(call.q, call.k, call.v)
    assert not torch.cuda.current_stream().query(), "the call returned after the work before it"
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_c99_other_device(is_packed):
    case = packed((70, 130), (5, 5)) if is_packed else dense(2, 70, 130, alibi="h")
    with torch.cuda.device(0):
        call = case.build("cuda:1")
        out, lse = call.run()
        assert out.device == lse.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        call.compare(out, lse)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_c99_mixed_devices_are_refused():
    call = dense(2, 70, 130).build("cuda:0")
    call.k = call.k.to("cuda:1")
    with pytest.raises(ValueError, match="k.*cuda:0.*cuda:1"):
        call.run()
