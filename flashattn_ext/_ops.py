"""The operators of the compiled library, each overload bound once with its fake kernel.

The only place that knows the operators' namespace and the library's file. Without a usable
library ``load_error`` says why and every operator raises it.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from . import _fakes
from ._build import LIBRARY, PACKAGE_DIR
from ._environment import is_on

_REBUILD = "Build and install it with `pip install .` in the source tree of flashattn_ext."

# The operators' arguments, in order.
_FWD = [
    "q", "k", "v", "window_right", "softmax_scale", "window_left", "cu_seqlens_q", "cu_seqlens_k",
    "max_seqlen_q", "max_seqlen_k", "seqused_k", "softcap", "alibi_slopes", "sinks",
]  # fmt: skip
_SPLITKV = [
    "q", "k_cache", "v_cache", "cache_seqlens", "block_table", "window_right", "softmax_scale",
    "window_left", "cu_seqlens_q", "max_seqlen_q", "cache_seqlen", "cache_batch_idx",
    "cache_leftpad", "num_splits", "split_size", "softcap", "alibi_slopes", "sinks",
]  # fmt: skip
_APPEND = ["k_new", "v_new", "rotary_cos", "rotary_sin", "rotary_interleaved", *_SPLITKV]
_RESULTS = ["out", "lse"]
_ARGUMENTS = {
    "fwd": _FWD,
    "fwd_lse": _FWD,
    "fwd_out": _RESULTS + _FWD,
    "fwd_splitkv_basic": [*_SPLITKV[:6], "cu_seqlens_q", "max_seqlen_q"],
    "fwd_splitkv": _SPLITKV,
    "fwd_splitkv_lse": _SPLITKV,
    "fwd_splitkv_out": _RESULTS + _SPLITKV,
    "fwd_splitkv_append": _APPEND,
    "fwd_splitkv_append_lse": _APPEND,
    "fwd_splitkv_append_out": _RESULTS + _APPEND,
    "combine": ["out_partial", "lse_partial", "out_dtype"],
    "combine_out": ["out_partial", "lse_partial"] + _RESULTS,
}


def _bind(name: str) -> Any:
    return getattr(torch.ops.flashattn_ext, name).default


def _load() -> str:
    """Loads the library; returns why that failed, or an empty string."""
    if not LIBRARY.exists() and (PACKAGE_DIR.parent / "CMakeLists.txt").exists():
        return (
            f"{PACKAGE_DIR} is flashattn_ext's source folder and not built: {LIBRARY} does not "
            "exist. Build it in place with `pip install -e .`, or start Python in another folder "
            "to use an installed copy, which this folder hides."
        )
    if not LIBRARY.exists():
        return f"flashattn_ext is not built: {LIBRARY} does not exist. {_REBUILD}"
    try:
        torch.ops.load_library(str(LIBRARY))
        _bind("fwd")
    except (OSError, RuntimeError, AttributeError) as error:
        return (
            f"{LIBRARY} does not load with torch {torch.__version__} "
            f"({error.__cause__ or error}): flashattn_ext "
            f"needs torch 2.10 or newer. {_REBUILD}"
        )
    if not all(_has_arguments(name, names) for name, names in _ARGUMENTS.items()):
        return f"{LIBRARY} belongs to another version of flashattn_ext's Python code. {_REBUILD}"
    try:
        is_on("FLASHATTN_EXT_NVTX")  # importing the package never fails, so the calls say it
    except ValueError as error:
        return str(error)
    return ""


def _has_arguments(name: str, names: list[str]) -> bool:
    if not hasattr(torch.ops.flashattn_ext, name):
        return False
    has: list[str] = [argument.name for argument in _bind(name)._schema.arguments]
    return has == names


def _unavailable(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(load_error)


def _refuse_vmap(*_args: Any) -> NoReturn:
    raise NotImplementedError("flashattn_ext's operators are not served inside torch.vmap")


def _operator(name: str) -> Callable[..., Any]:
    if load_error:
        return _unavailable
    torch.library.register_fake(f"flashattn_ext::{name}", getattr(_fakes, name))
    torch.library.register_vmap(f"flashattn_ext::{name}", _refuse_vmap)
    operator: Callable[..., Any] = _bind(name)
    return operator


load_error = _load()
fwd = _operator("fwd")
fwd_lse = _operator("fwd_lse")
fwd_out = _operator("fwd_out")
fwd_splitkv_basic = _operator("fwd_splitkv_basic")
fwd_splitkv = _operator("fwd_splitkv")
fwd_splitkv_lse = _operator("fwd_splitkv_lse")
fwd_splitkv_out = _operator("fwd_splitkv_out")
fwd_splitkv_append = _operator("fwd_splitkv_append")
fwd_splitkv_append_lse = _operator("fwd_splitkv_append_lse")
fwd_splitkv_append_out = _operator("fwd_splitkv_append_out")
combine = _operator("combine")
combine_out = _operator("combine_out")
