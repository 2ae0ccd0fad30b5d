"""The operators of the cache and of combine under torch's own machinery: opcheck, compile, export,
checked mode, host threads."""

import threading

import pytest
import torch
from caches import dense_cache, packed_cache
from cases import ints
from torch._dynamo.testing import CompileCounterWithBackend

from flashattn_ext import flash_combine, flash_fwd_splitkv, merge_attention_states

CASES = (
    dense_cache(1, 40, 70),
    dense_cache(3, 70, 5, causal=True, alibi="bh", sinks="fp32", leftpad=(3, 0), batch_idx=True),
    dense_cache(2, 33, 33, dtype=torch.float32, softcap=5.0, one_length=True, splits=3),
    packed_cache((4, 70), (1, 5), (0, 3), page=16, tail=0, splits=2),
    packed_cache((1, 40), (1, 9), page=4, alibi="h", sinks="same", split_size=64, tail=0),
    dense_cache(2, 40, 7, new=2, causal=True),
    dense_cache(2, 40, 7, new=2, rotary=0.5, page=16, causal=True),
    packed_cache((3, 40), (1, 7), new=3, rotary=1.0, interleaved=False, tail=0),
)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
def test_opcheck(case, device):
    call = case.build(device)
    for t in call.buffers:
        t.nan_to_num_(0)  # opcheck compares what was mutated, and NaN is not NaN
    arguments = call.op_arguments()
    out, lse = torch.zeros_like(call.q), torch.zeros_like(call.nan_lse())
    torch.library.opcheck(call.op(), arguments)
    torch.library.opcheck(call.op("_lse"), arguments)
    torch.library.opcheck(call.op("_out"), (out, lse, *arguments))
    torch.library.opcheck(call.op("_out"), (out, None, *arguments))


def test_opcheck_combine(device):
    out, lse = torch.randn(3, 2, 5, 4, 64, device=device), torch.randn(3, 2, 4, 5, device=device)
    ops = torch.ops.flashattn_ext
    for dtype in (None, torch.bfloat16):
        torch.library.opcheck(ops.combine.default, (out, lse, dtype))
    given = torch.zeros(2, 5, 4, 64, device=device), torch.zeros(2, 4, 5, device=device)
    torch.library.opcheck(ops.combine_out.default, (out, lse, *given))
    torch.library.opcheck(ops.combine_out.default, (out, lse, given[0], None))


@every_case
def test_mutation_is_declared_where_it_happens(case, device):
    """The caches are written by the ops that append, and by no other."""
    call = case.build(device)
    for suffix in ("", "_lse"):
        written = {a.name for a in call.op(suffix)._schema.arguments if a.alias_info is not None}
        assert written == ({"k_cache", "v_cache"} if case.new else set())
    written = {a.name for a in call.op("_out")._schema.arguments if a.alias_info is not None}
    assert written == {"out", "lse"} | ({"k_cache", "v_cache"} if case.new else set())


@every_case
def test_ways_to_the_same_result(case, device):
    """With and without out= and the lse, by the function and by the ops: the same bits."""
    call = case.build(device)
    out, lse = call.run()
    call.compare(out, lse)
    for given in (None, call.nan_out()):
        only_out = flash_fwd_splitkv(call.q, call.k, call.v, **call.options, out=given)
        both = call.run(out=given)
        assert torch.equal(only_out, out)
        assert torch.equal(both[0], out) and torch.equal(both[1], lse)
        assert given is None or (only_out is given and both[0] is given)
    for results in (call.run_op(), call.op("_lse")(*call.op_arguments())):
        assert torch.equal(results[0], out) and torch.equal(results[1], lse)
    given = call.nan_out()
    assert call.op("_out")(given, None, *call.op_arguments()) is None
    assert torch.equal(given, out) and torch.equal(call.op()(*call.op_arguments()), out)


class Decoder(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k_cache, v_cache, **tensors):
        out, lse = flash_fwd_splitkv(
            q, k_cache, v_cache, **self.options, **tensors, return_lse=True
        )
        return out * 2, lse


def split_options(call):
    tensors = {name: value for name, value in call.options.items() if torch.is_tensor(value)}
    return {name: value for name, value in call.options.items() if name not in tensors}, tensors


@every_case
def test_c104_compile_fullgraph(case, device):
    """One graph; the result is that of the call, and so is the cache after an append."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = case.build(device)
    options, tensors = split_options(call)
    compiled = torch.compile(Decoder(**options), fullgraph=True, backend=counter)
    out, lse = compiled(call.q, call.k, call.v, **tensors)
    call.compare_cache()
    expected, expected_lse = case.build(device).run()
    assert torch.equal(out, expected * 2) and torch.equal(lse, expected_lse)
    assert counter.frame_count == 1


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[6]], ids=str)
def test_compile_with_dynamic_batches(case, device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    options, _ = split_options(case.build(device))
    options["max_seqlen_q"] = 64 if case.packed else None
    compiled = torch.compile(Decoder(**options), fullgraph=True, dynamic=True, backend=counter)
    counts = set()
    for times in (4, 5, 6):  # no batch equals another size, which torch would tie to it
        call = case.but(lengths=case.lengths * times, seed=times).build(device)
        _, tensors = split_options(call)
        out, _ = compiled(call.q, call.k, call.v, **tensors)
        call.compare_cache()
        assert torch.equal(out, call.run()[0] * 2)
        counts.add(counter.frame_count)
    assert len(counts) == 1, "another batch compiled again"


def test_compile_combine_and_merge(device):
    torch._dynamo.reset()
    out, lse = torch.randn(3, 2, 5, 4, 64, device=device), torch.randn(3, 2, 4, 5, device=device)
    for function, arguments in (
        (flash_combine, (out, lse)),
        (merge_attention_states, (out[0], lse[0], out[1], lse[1])),
    ):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for mine, theirs in zip(compiled(*arguments), function(*arguments), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[6]], ids=str)
def test_export(case, device):
    call = case.build(device)
    options, tensors = split_options(call)
    program = torch.export.export(Decoder(**options), (call.q, call.k, call.v), tensors)
    call = case.build(device)
    _, tensors = split_options(call)
    out, lse = program.module()(call.q, call.k, call.v, **tensors)
    call.compare_cache()
    expected, expected_lse = call.run()
    assert torch.equal(out, expected * 2) and torch.equal(lse, expected_lse)


BAD_VALUES = [
    ("cu_seqlens_q", [0, 4, 3, 5], r"cu_seqlens_q\[2\].*3"),
    ("cache_seqlens", [70, 1000, 3], r"cache_seqlens\[1\].*1000"),
    ("cache_seqlens", [70, 5, -1], r"cache_seqlens\[2\].*-1"),
    ("cache_leftpad", [0, 6, 0], r"cache_leftpad\[1\].*6"),
    ("max_seqlen_q", 3, r"max_seqlen_q.*3"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_VALUES)
def test_c66_d18_checked_mode_reads_the_values(name, value, message, device, monkeypatch):
    call = packed_cache((4, 70), (1, 5), (0, 3), page=16, tail=0, leftpad=(0, 1, 0)).build(device)
    if isinstance(value, list):
        value = ints(value, device)
    monkeypatch.delenv("FLASHATTN_EXT_CHECK", raising=False)
    call.run(**{name: value})
    monkeypatch.setenv("FLASHATTN_EXT_CHECK", "1")
    call.compare(*call.run())
    with pytest.raises(ValueError, match=message):
        call.run(**{name: value})


def test_c110_calls_from_several_threads(device):
    calls = [dense_cache(1, 100 + n, 130, seed=n, splits=3).build(device) for n in range(8)]
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
