"""Ranges for profilers: their names, where they are, and that they are nowhere when off."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import flashattn_ext
from flashattn_ext import _ops, profiling

OPERATORS = tuple(profiling._NAMES)


@pytest.fixture
def ranges():
    profiling.enable()
    yield
    profiling.disable()


def tensors(device, *shapes):
    return [torch.randn(shape, device=device).to(torch.bfloat16) for shape in shapes]


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def dense(device):
    q, k = tensors(device, (2, 5, 8, 64), (2, 9, 2, 64))
    return flashattn_ext.flash_fwd, (q, k, k), {}


def causal_with_out(device):
    function, arguments, _ = dense(device)
    return function, arguments, {"causal": True, "out": torch.empty_like(arguments[0])}


def packed(device):
    q, k = tensors(device, (10, 8, 64), (12, 2, 64))
    slopes = torch.rand(8, device=device)
    options = {"cu_seqlens_q": ints(device, 0, 3, 10), "cu_seqlens_k": ints(device, 0, 8, 12)}
    options |= {"max_seqlen_q": 7, "max_seqlen_k": 8, "window_size": (256, 0), "softcap": 30.0}
    return flashattn_ext.flash_fwd, (q, k, k), options | {"alibi_slopes": slopes}


def contiguous(device):
    q, k, v = tensors(device, (2, 1, 8, 64), (3, 300, 2, 64), (3, 300, 2, 64))
    options = {"cache_seqlens": 200, "num_splits": 3, "sinks": torch.zeros(8, device=device)}
    return flashattn_ext.flash_fwd_splitkv, (q, k, v), options


def pages(device):
    q, k, v = tensors(device, (2, 1, 8, 64), (6, 16, 2, 64), (6, 16, 2, 64))
    (new,) = tensors(device, (2, 1, 2, 64))
    options = {"cache_seqlens": ints(device, 20, 5), "k_new": new, "v_new": new}
    options["block_table"] = ints(device, 1, 2, 3, 4).view(2, 2)
    return flashattn_ext.flash_fwd_splitkv, (q, k, v), options


def pages_with_out(device):
    function, arguments, options = pages(device)
    return function, arguments, options | {"out": torch.empty_like(arguments[0]), "split_size": 64}


def parts(device):
    return (
        flashattn_ext.flash_combine,
        (*tensors(device, (3, 2, 5, 8, 64)), torch.zeros(3, 2, 8, 5, device=device)),
        {},
    )


DENSE = "flash_fwd q=(2, 5, 8, 64) k=(2, 9, 2, 64) bfloat16"
PAGES = (
    "flash_fwd_splitkv q=(2, 1, 8, 64) cache=(6, 16, 2, 64) bfloat16 pages=(2, 2) new=1"
)  # fmt: skip
NAMES = {
    dense: DENSE,
    causal_with_out: f"{DENSE} causal",
    packed: "flash_fwd q=(10, 8, 64) k=(12, 2, 64) bfloat16 2 sequences window=(256, 0) "
    "softcap=30.0 alibi_slopes",
    contiguous: "flash_fwd_splitkv q=(2, 1, 8, 64) cache=(3, 300, 2, 64) bfloat16 sinks "
    "num_splits=3",
    pages: PAGES,
    pages_with_out: f"{PAGES} split_size=64",
    parts: "flash_combine parts=(3, 2, 5, 8, 64) bfloat16",
}
every_call = pytest.mark.parametrize("make", NAMES, ids=lambda make: make.__name__)


def recorded(run):
    """Events of the host that have to do with us, in their order."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return [event for event in profiler.events() if event.name.startswith("flash")]


@every_call
def test_names(make, device, ranges):
    function, arguments, options = make(device)
    events = recorded(lambda: function(*arguments, **options))
    names = {event.name: event for event in events}
    operator = next(event for event in events if event.name.startswith("flashattn_ext::"))
    around = names[NAMES[make]].time_range
    assert around.start <= operator.time_range.start <= operator.time_range.end <= around.end


@every_call
def test_results_are_the_same(make, device, ranges):
    function, arguments, options = make(device)
    with_ranges = function(*arguments, **options)
    profiling.disable()
    without = function(*arguments, **options)
    torch.testing.assert_close(with_ranges, without, rtol=0, atol=0)


@every_call
def test_nvtx_ranges_are_those_of_calls_on_a_gpu(make, device, ranges, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    function, arguments, options = make(device)
    function(*arguments, **options)
    assert calls == ([NAMES[make], "end"] if device == "cuda" else [])


def test_a_range_ends_when_the_call_raises(device, ranges, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    q, k = tensors(device, (2, 5, 8, 64), (2, 9, 3, 64))
    with pytest.raises(ValueError):  # 3 heads do not divide 8: by the operator itself
        _ops.fwd(q, k, k)
    assert calls[1:] == (["end"] if device == "cuda" else [])


def test_off_is_the_operators_themselves():
    """Nothing is asked at a call, so nothing is paid."""
    for _ in range(2):
        profiling.enable()
    assert all(getattr(_ops, name) is not profiling._operator(name) for name in OPERATORS)
    for _ in range(2):
        profiling.disable()
    for name in OPERATORS:
        assert getattr(_ops, name) is getattr(torch.ops.flashattn_ext, name).default
    assert set(OPERATORS) == set(_ops._ARGUMENTS)
    function, arguments, options = dense("cpu")
    events = recorded(lambda: function(*arguments, **options))
    assert {event.name for event in events} == {"flashattn_ext::fwd"}


def test_compiled_graphs_stay_whole(device, ranges):
    torch._dynamo.reset()
    function, arguments, _ = dense(device)
    compiled = torch.compile(
        lambda q, k, v: function(q, k, v), fullgraph=True, backend="aot_eager", dynamic=True
    )
    events = recorded(lambda: compiled(*arguments))
    assert DENSE not in {event.name for event in events}
    torch.testing.assert_close(compiled(*arguments), function(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize("value, on", [("1", True), ("0", False), (None, False)])
def test_environment(value, on):
    environment = {name: v for name, v in os.environ.items() if name != "FLASHATTN_EXT_NVTX"}
    if value is not None:
        environment["FLASHATTN_EXT_NVTX"] = value
    code = (
        "import flashattn_ext, torch; from flashattn_ext import _ops;"
        "print(_ops.fwd is not torch.ops.flashattn_ext.fwd.default)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [str(on)], done.stderr


def test_without_a_library(monkeypatch):
    monkeypatch.setattr(_ops, "load_error", "not built")
    with pytest.raises(RuntimeError, match="not built"):
        profiling.enable()
    profiling.disable()


def test_page():
    """The kernels that docs/profiling.md lists are all that there are."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "profiling.md").read_text(encoding="utf-8")
    sources = [path for path in (root / "csrc").rglob("*") if path.suffix in (".h", ".cu")]
    defined = r"__global__[^;{]*?\b(\w+_kernel)\("
    kernels = {name for path in sources for name in re.findall(defined, path.read_text())}
    assert kernels == set(re.findall(r"`(\w+_kernel)`", page))
