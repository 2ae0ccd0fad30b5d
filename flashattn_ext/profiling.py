"""Ranges for profilers: each call of an operator under a name that tells what it works on.

    from flashattn_ext import profiling
    profiling.enable()  # or FLASHATTN_EXT_NVTX=1 in the environment when flashattn_ext is imported

A range begins and ends on the host, around the launches of one call. `torch.profiler` shows it on
any device; on a GPU it is an NVTX range too, for Nsight Systems and others. Examples::

    flash_fwd q=(2, 1024, 32, 128) k=(2, 1024, 8, 128) bfloat16 causal
    flash_fwd q=(1000, 32, 128) k=(1000, 8, 128) bfloat16 2 sequences window=(256, 0) softcap=30.0
    flash_fwd_splitkv q=(64, 1, 32, 128) cache=(6400, 16, 8, 128) bfloat16 pages=(64, 512) new=1
    flash_combine parts=(4, 2, 1024, 32, 128) float32

Off by default, and then there is nothing to pay: the functions call the operators themselves. On, a
call takes about 15 µs of host time more, most of it in `record_function`. Compiled and exported
graphs call the operators without ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.compiler import is_compiling

from . import _ops

_Arguments = dict[str, Any]  # of an operator, by name


def enable() -> None:
    """Puts the ranges around all calls from now on. Twice is once.

    Raises:
        RuntimeError: the compiled library is missing or does not load.
    """
    if _ops.load_error:
        raise RuntimeError(_ops.load_error)
    for name, describe in _NAMES.items():
        setattr(_ops, name, _in_range(name, describe))


def disable() -> None:
    """Takes them away again."""
    if not _ops.load_error:
        for name in _NAMES:
            setattr(_ops, name, _operator(name))


def _operator(name: str) -> Callable[..., Any]:
    operator: Callable[..., Any] = getattr(torch.ops.flashattn_ext, name).default
    return operator


def _in_range(name: str, describe: Callable[[_Arguments], list[str]]) -> Callable[..., Any]:
    operator, arguments = _operator(name), _ops._ARGUMENTS[name]

    def call(*values: Any) -> Any:
        if is_compiling():
            return operator(*values)
        given = dict(zip(arguments, values, strict=False))  # the last ones may be left out
        text = " ".join(describe(given))
        with_nvtx = values[0].is_cuda
        if with_nvtx:
            torch.cuda.nvtx.range_push(text)
        try:
            with record_function(text):
                return operator(*values)
        finally:
            if with_nvtx:
                torch.cuda.nvtx.range_pop()

    return call


def _forward(a: _Arguments) -> list[str]:
    return ["flash_fwd", f"q={_shape(a['q'])}", f"k={_shape(a['k'])}", *_common(a)]


def _over_cache(a: _Arguments) -> list[str]:
    words = ["flash_fwd_splitkv", f"q={_shape(a['q'])}", f"cache={_shape(a['k_cache'])}"]
    words += _common(a)
    if a["block_table"] is not None:
        words.append(f"pages={_shape(a['block_table'])}")
    if "k_new" in a:
        words.append(f"new={a['k_new'].shape[1]}")
    words += [f"{name}={a[name]}" for name in ("num_splits", "split_size") if a.get(name)]
    return words


def _common(a: _Arguments) -> list[str]:
    words = [_dtype(a["q"])]
    if a.get("cu_seqlens_q") is not None:
        words.append(f"{a['cu_seqlens_q'].shape[0] - 1} sequences")
    window = a.get("window_left", -1), a.get("window_right", -1)
    if window != (-1, -1):
        words.append("causal" if window == (-1, 0) else f"window={window}")
    if a.get("softcap"):
        words.append(f"softcap={a['softcap']}")
    return words + [name for name in ("alibi_slopes", "sinks") if a.get(name) is not None]


def _merge(a: _Arguments) -> list[str]:
    parts = a["out_partial"]
    return ["flash_combine", f"parts={_shape(parts)}", _dtype(parts)]


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_NAMES = {
    "fwd": _forward,
    "fwd_lse": _forward,
    "fwd_out": _forward,
    "fwd_splitkv_basic": _over_cache,
    "fwd_splitkv": _over_cache,
    "fwd_splitkv_lse": _over_cache,
    "fwd_splitkv_out": _over_cache,
    "fwd_splitkv_append": _over_cache,
    "fwd_splitkv_append_lse": _over_cache,
    "fwd_splitkv_append_out": _over_cache,
    "combine": _merge,
    "combine_out": _merge,
}
