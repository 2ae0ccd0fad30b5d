"""The operators under torch's own machinery, and the public call around them: out=, return_lse,
autograd modes, opcheck, compile, export, checked mode, host threads."""

import threading

import pytest
import torch
from cases import DTYPES, dense, packed
from torch._dynamo.testing import CompileCounterWithBackend

import flashattn_ext

CASES = (
    dense(2, 40, 70),
    dense(2, 70, 40, causal=True, alibi="bh", sinks="fp32", used=(3, 40)),
    dense(1, 33, 33, dtype=torch.float32, softcap=5.0),
    packed((40, 70), (1, 5), (0, 3), tail=0),
    packed((70, 40), (9, 9), causal=True, alibi="h", sinks="same", used=(1, 9), tail=0),
)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
def test_opcheck(case, device):
    call = case.build(device)
    arguments = call.op_arguments()
    ops = torch.ops.flashattn_ext
    torch.library.opcheck(ops.fwd.default, arguments)
    torch.library.opcheck(ops.fwd_lse.default, arguments)
    out, lse = torch.zeros_like(call.q), torch.zeros_like(call.nan_lse())
    torch.library.opcheck(ops.fwd_out.default, (out, lse, *arguments))
    torch.library.opcheck(ops.fwd_out.default, (out, None, *arguments))


@every_case
def test_four_ways_to_the_same_result(case, device):
    """With and without out=, with and without the lse: bit by bit the same."""
    call = case.build(device)
    out, lse = call.run()
    call.compare(out, lse)
    for given in (None, call.nan_out()):
        only_out = flashattn_ext.flash_fwd(call.q, call.k, call.v, **call.options, out=given)
        both = call.run(out=given)
        assert torch.equal(only_out, out)
        assert torch.equal(both[0], out) and torch.equal(both[1], lse)
        assert given is None or (only_out is given and both[0] is given)


@every_case
def test_op_with_and_without_lse(case, device):
    call = case.build(device)
    out, lse = call.run()
    given = call.nan_out()
    ops, arguments = torch.ops.flashattn_ext, call.op_arguments()
    assert ops.fwd_out(given, None, *arguments) is None
    assert torch.equal(given, out) and torch.equal(ops.fwd(*arguments), out)
    results = ops.fwd_lse(*arguments)
    assert torch.equal(results[0], out) and torch.equal(results[1], lse)


@pytest.mark.parametrize("d", [64, 36])
@pytest.mark.parametrize("strides", ["plain", "bhsd", "padded", "packed_qkv", "expanded_batch"])
def test_result_is_contiguous_and_new(strides, d, device):
    call = dense(2, 20, 20, d=d, strides=strides).build(device)
    out, lse = flashattn_ext.flash_fwd(call.q, call.k, call.v, return_lse=True)
    assert out.is_contiguous() and lse.is_contiguous()
    call.compare(out, lse)
    again = flashattn_ext.flash_fwd(call.q, call.k, call.v)
    assert again.data_ptr() != out.data_ptr()


class Attention(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v, **tensors):
        out, lse = flashattn_ext.flash_fwd(q, k, v, **self.options, **tensors, return_lse=True)
        return out * 2, lse


def split_options(call):
    tensors = {name: value for name, value in call.options.items() if torch.is_tensor(value)}
    return {name: value for name, value in call.options.items() if name not in tensors}, tensors


@every_case
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_c104_compile_fullgraph(case, dynamic, device):
    """One graph, compiled once also when the lengths change; the result is that of the call."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    options, _ = split_options(case.but(slack=64).build(device))  # one bound for all lengths
    compiled = torch.compile(Attention(**options), fullgraph=True, dynamic=dynamic, backend=counter)
    compiled_graphs = set()
    for extra in (0, 1, 64) if dynamic else (0,):
        lengths = tuple((sq + extra, sk + extra) for sq, sk in case.lengths)
        call = case.but(lengths=lengths, seed=extra).build(device)
        _, tensors = split_options(call)
        out, lse = compiled(call.q, call.k, call.v, **tensors)
        expected, expected_lse = call.run()
        assert torch.equal(out, expected * 2) and torch.equal(lse, expected_lse)
        compiled_graphs.add(counter.frame_count)
    assert len(compiled_graphs) == 1, "a change of length compiled again"


def test_c104_bound_is_an_upper_bound_under_compile(device):
    torch._dynamo.reset()
    call = packed((40, 70), (1, 5), causal=True, tail=0).build(device)
    out, lse = call.run()
    compiled = torch.compile(flashattn_ext.flash_fwd, fullgraph=True, backend="aot_eager")
    for bound in (70, 4096):
        options = call.options | {"max_seqlen_q": bound, "max_seqlen_k": bound}
        result = compiled(call.q, call.k, call.v, **options, return_lse=True)
        assert torch.equal(result[0], out) and torch.equal(result[1], lse)


@pytest.mark.parametrize("options", [{}, {"window_size": (5, 2)}], ids=["defaults", "window"])
def test_compile_of_the_function_itself(options, device):
    """Its defaults are then the graph's, in which torch 2.10 does not compare identities."""
    torch._dynamo.reset()
    function = flashattn_ext.flash_fwd
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in ((20, 30), (21, 31)):
        call = dense(2, *sizes).build(device)
        out = compiled(call.q, call.k, call.v, **options)
        assert torch.equal(out, function(call.q, call.k, call.v, **options))


def test_compile_with_out(device):
    """The mutation of `out` survives functionalisation; odd head dims too."""
    torch._dynamo.reset()
    compiled = torch.compile(flashattn_ext.flash_fwd, fullgraph=True, backend="aot_eager")
    for d in (64, 36):
        call = dense(2, 20, 30, d=d).build(device)
        given = call.nan_out()
        compiled(call.q, call.k, call.v, out=given)
        assert torch.equal(given, flashattn_ext.flash_fwd(call.q, call.k, call.v))


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="inductor does not link under a path with spaces")
def test_inductor(device):
    """The whole compiler, with a padded head dim."""
    torch._dynamo.reset()
    call = dense(2, 20, 30, d=36, causal=True).build(device)
    compiled = torch.compile(Attention(causal=True), fullgraph=True)
    out, lse = compiled(call.q, call.k, call.v)
    expected, expected_lse = flashattn_ext.flash_fwd(
        call.q, call.k, call.v, causal=True, return_lse=True
    )
    torch.testing.assert_close(out, expected * 2)
    torch.testing.assert_close(lse, expected_lse)


@every_case
def test_export(case, device):
    call = case.build(device)
    options, tensors = split_options(call)
    program = torch.export.export(Attention(**options), (call.q, call.k, call.v), tensors)
    out, lse = program.module()(call.q, call.k, call.v, **tensors)
    expected, expected_lse = call.run()
    assert torch.equal(out, expected * 2) and torch.equal(lse, expected_lse)


def test_export_with_dynamic_lengths(device):
    call = dense(2, 40, 70, causal=True).build(device)
    rows, keys = (torch.export.Dim(name, min=2, max=4096) for name in ("rows", "keys"))
    program = torch.export.export(
        Attention(causal=True),
        (call.q, call.k, call.v),
        dynamic_shapes={"q": {1: rows}, "k": {1: keys}, "v": {1: keys}},
    )
    for sq, sk in ((40, 70), (5, 3), (129, 300)):
        call = dense(2, sq, sk, causal=True).build(device)
        out, _ = program.module()(call.q, call.k, call.v)
        assert torch.equal(out, call.run()[0] * 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_autograd_modes(mode, device):
    with mode():
        call = dense(2, 20, 30).build(device)
        call.compare(*call.run())
        assert not flashattn_ext.flash_fwd(call.q, call.k, call.v).requires_grad


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_c88_no_silent_gradient(name, device):
    call = dense(1, 20, 30).build(device)
    tensor = getattr(call, name).requires_grad_()
    with pytest.raises(NotImplementedError, match="no_grad"):
        flashattn_ext.flash_fwd(call.q, call.k, call.v)
    supported, reason = flashattn_ext.supports(call.q, call.k, call.v)
    assert not supported and "no_grad" in reason
    with torch.no_grad():
        call.compare(*call.run())
    setattr(call, name, tensor.detach())
    call.compare(*call.run())


def test_parameters_and_subclasses(device):
    call = dense(1, 20, 30).build(device)
    call.q = torch.nn.Parameter(call.q, requires_grad=False)
    call.compare(*call.run(out=None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_supports_says_yes_to_what_works(dtype, device):
    for case in CASES:
        if device == "cuda" and case.dtype == torch.float32:
            continue
        call = case.but(dtype=case.dtype if case.sinks == "same" else dtype).build(device)
        given = call.options | {"out": call.nan_out(), "return_lse": True}
        assert flashattn_ext.supports(call.q, call.k, call.v, **given) == (True, "")


BAD_LENGTHS = [
    ("cu_seqlens_q", [0, 40, 30, 71], r"cu_seqlens_q\[2\].*30"),
    ("cu_seqlens_k", [0, 40, 45, 99], r"cu_seqlens_k\[3\].*99"),
    ("cu_seqlens_q", [1, 40, 41, 71], r"cu_seqlens_q\[0\].*1"),
    ("max_seqlen_k", 64, r"max_seqlen_k.*64"),
    ("max_seqlen_q", 39, r"max_seqlen_q.*39"),
    ("seqused_k", [70, 6, 3], r"seqused_k\[1\].*6"),
    ("seqused_k", [70, 5, -1], r"seqused_k\[2\].*-1"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_LENGTHS)
def test_c66_checked_mode_reads_the_lengths(name, value, message, device, monkeypatch):
    """Row and value are named; without the mode nothing is read, and nothing is raised."""
    call = packed((40, 70), (1, 5), (30, 3), tail=0).build(device)
    if isinstance(value, list):
        value = torch.tensor(value, dtype=torch.int32, device=device)
    monkeypatch.delenv("FLASHATTN_EXT_CHECK", raising=False)
    call.run(**{name: value})
    monkeypatch.setenv("FLASHATTN_EXT_CHECK", "1")
    call.compare(*call.run())
    with pytest.raises(ValueError, match=message):
        call.run(**{name: value})


def test_c110_calls_from_several_threads(device):
    """The first call of a process may come from any of them; results do not mix."""
    calls = [dense(2, 100 + n, 130, causal=True, seed=n).build(device) for n in range(8)]
    results = [None] * len(calls)

    def work(n):
        for _ in range(5):
            results[n] = calls[n].run()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for call, result in zip(calls, results, strict=True):
        call.compare(*result)
