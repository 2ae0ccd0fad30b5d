"""Makes the call that a point of `call_space.py` stands for and compares it with the oracle."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from call_space import FORWARD, case_of
from strided import as_bits, make_buffer

import flashattn_ext
from flashattn_ext import flash_attn_interface

NEW_TOKENS = ("k_new", "v_new")
THREADS = torch.get_num_threads()
_OTHER_THREAD = ThreadPoolExecutor(1)


def check(point, n, device):
    """Raises AssertionError where the result is not the oracle's, or where anything was written
    beside it."""
    with _torch_threads(1):  # the oracle's tensors are small: threads would wait for each other
        _check(point, n, device)


def _check(point, n, device):
    call = build(point, n, device)
    kept = [call.q] if hasattr(call, "buffers") else [call.q, call.k, call.v]
    before = [t.clone() for t in kept]
    with _checked_mode(point["checked"]), _torch_threads(THREADS):
        out, lse = _results(call, point)
    if call.case.packed and call.rows:  # in an `out` of the call's own they may hold anything
        tail = out[call.rows[-1][1] :]
        assert point["out"] == "new" or tail.isnan().all(), "rows past the last were written"
        tail.fill_(torch.nan)
    call.compare(out, lse)
    for tensor, copy in zip(kept, before, strict=True):
        assert torch.equal(as_bits(tensor), as_bits(copy)), "an input has changed"


def build(point, n, device):
    call = case_of(point, n).build(device)
    _poison(call, float(point["poison"]))
    for name, value in call.options.items():
        if name in NEW_TOKENS and point["new_strides"] != "plain":
            moved = make_buffer(point["new_strides"], *value.shape, value.dtype, value.device)
            call.options[name] = moved.copy_(value)
        elif torch.is_tensor(value) and name not in NEW_TOKENS and point["metadata"] == "shifted":
            call.options[name] = _shifted(value, one_row=name.startswith("rotary"))
    return call


def _poison(call, value):
    """Instead of NaN, wherever nothing counts."""
    if value != value:
        return
    for tensor in (call.q, call.k, call.v, *getattr(call, "expected", ())):
        items = tensor.untyped_storage().nbytes() // tensor.element_size()
        memory = tensor.as_strided((items,), (1,), 0)
        memory.masked_fill_(memory.isnan(), value)


def _shifted(tensor, one_row):
    """The same numbers one element further on, with a gap behind each row."""
    *outer, row = (tensor.numel(),) if one_row else tensor.shape
    garbage = torch.nan if tensor.is_floating_point() else 2**31 - 1
    wide = torch.full((*outer, row + 3), garbage, dtype=tensor.dtype, device=tensor.device)
    moved = wide[..., 1 : row + 1]
    moved.copy_(tensor.reshape(moved.shape))
    return moved.view(tensor.shape) if one_row else moved


@contextmanager
def _torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _checked_mode(is_on):
    before = os.environ.pop("FLASHATTN_EXT_CHECK", None)
    if is_on:
        os.environ["FLASHATTN_EXT_CHECK"] = "1"
    try:
        yield
    finally:
        os.environ.pop("FLASHATTN_EXT_CHECK", None)
        if before is not None:
            os.environ["FLASHATTN_EXT_CHECK"] = before


def _results(call, point):
    """(out, lse). An lse that is not asked for comes from a second call."""
    out, memory = _out(call, point["out"])
    result = _on_stream(point["stream"], call.q.device, lambda: make(call, point, out=out))
    if not point["lse"]:
        again, lse = make(call, {**point, "lse": True})
        for a, b in zip(call.per_sequence(result, lse), call.per_sequence(again, lse), strict=True):
            assert torch.equal(a[0], b[0]), "out depends on whether the lse is asked for"
        result = result, lse
    if out is not None:
        assert result[0] is out, "the given out was not returned"
        result = out.clone(), result[1]
        out.fill_(torch.nan)
        assert memory.isnan().all(), "something between the rows of out was written"
    return result


def _out(call, kind):
    """A tensor of NaN to be written, and the memory that it lies in."""
    if kind == "new":
        return None, None
    if kind == "given":
        return (call.nan_out(),) * 2
    *outer, rows, heads, d = call.q.shape
    memory = torch.full((*outer, rows + 1, heads + 1, d + 8), torch.nan).to(call.q)
    return memory[..., :rows, :heads, :d], memory


def _on_stream(stream, device, function):
    """On the current stream or another one; on the CPU in this thread or another one."""
    if stream == "current":
        return function()
    if device.type == "cpu":
        return _OTHER_THREAD.submit(function).result()
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(current)
    with torch.cuda.stream(other):
        result = function()
    current.wait_stream(other)
    return result


def make(call, point, **options):
    """The call itself: (out, lse), or out."""
    entry, options = point["entry"], {**call.options, **options}
    if entry in ("flash_fwd", "flash_fwd_splitkv"):
        function = getattr(flashattn_ext, entry)
        return function(call.q, call.k, call.v, **options, return_lse=point["lse"])
    options.pop("out", None)
    if entry in FORWARD:
        name = "flash_attn_varlen_func" if call.case.packed else entry
        function = getattr(flash_attn_interface, name)
        result = function(call.q, call.k, call.v, **options, return_attn_probs=point["lse"])
        return result[:2] if point["lse"] else result
    options.pop("split_size")
    options |= {name[0]: options.pop(name) for name in NEW_TOKENS if name in options}
    function = getattr(flash_attn_interface, entry)
    return function(call.q, call.k, call.v, **options, return_softmax_lse=point["lse"])
