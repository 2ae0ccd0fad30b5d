"""The operators of the compiled library, each overload bound once, and their fake kernels.

The only place that knows the operators' namespace and the library's file. Without a usable
library ``load_error`` says why and every operator raises it.
"""

import torch

from . import _checks
from ._build import LIBRARY, PACKAGE_DIR

_REBUILD = "Build and install it with `pip install .` in the source tree of flashattn_ext."

# The arguments of both ops, in order; `fwd_out` has out and lse after them.
_FWD_ARGUMENTS = [
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k",
    "softmax_scale", "window_left", "window_right", "softcap", "alibi_slopes", "sinks",
]  # fmt: skip


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
        schema = torch.ops.flashattn_ext.fwd.default._schema
    except (OSError, RuntimeError, AttributeError) as error:
        return (
            f"{LIBRARY} does not load with torch {torch.__version__} "
            f"({error.__cause__ or error}): flashattn_ext "
            f"needs torch 2.10 or newer. {_REBUILD}"
        )
    if [argument.name for argument in schema.arguments] != _FWD_ARGUMENTS:
        return f"{LIBRARY} belongs to another version of flashattn_ext's Python code. {_REBUILD}"
    return ""


def _unavailable(*_args, **_kwargs):
    raise RuntimeError(load_error)


def _fake_fwd(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k,
    softmax_scale, window_left, window_right, softcap, alibi_slopes, sinks,
):  # fmt: skip
    _checks.check_op(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale, window_left, window_right,
        softcap, alibi_slopes, sinks, None, None,
    )  # fmt: skip
    lse = q.new_empty(_checks.lse_shape(q), dtype=torch.float32)
    return q.new_empty(q.shape), lse


def _fake_fwd_out(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k,
    softmax_scale, window_left, window_right, softcap, alibi_slopes, sinks, out, lse,
):  # fmt: skip
    _checks.check_op(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale, window_left, window_right,
        softcap, alibi_slopes, sinks, out, lse,
    )  # fmt: skip


load_error = _load()
if load_error:
    fwd = fwd_out = _unavailable
else:
    fwd = torch.ops.flashattn_ext.fwd.default
    fwd_out = torch.ops.flashattn_ext.fwd_out.default
    torch.library.register_fake("flashattn_ext::fwd", _fake_fwd)
    torch.library.register_fake("flashattn_ext::fwd_out", _fake_fwd_out)
