"""Every check of the arguments, on metadata only: nothing here waits for a device.

The public functions, `supports` and the fake kernels share these functions. A message names the
argument, what it got and what is allowed. Each call pays for the quick tests; what fails one goes
to a function that finds out what is wrong, or that nothing is (`_tensor_checks.py`).
"""

import math
import os
from numbers import Integral, Real

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from . import _device, _lengths
from ._tensor_checks import (
    check_layout,
    check_metadata,
    check_out,
    check_tensor,
    dtype_name,
    require_tensor,
)

# A call that leaves window_size alone passes this very object.
OPEN_WINDOW = (-1, -1)

_ITEM_BYTES = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4}
_MAX_HEAD_DIM = 256
_MAX_HEADS = 65535
_MAX_ROWS = 2**30  # so that positions and their differences fit 32 bits
_NO_BOUND = -1

# The dict behind os.environ, if it has one as in CPython: a look-up there is 15 times as fast.
_ENVIRONMENT = getattr(os.environb, "_data", os.environb)


def check_call(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k,
    softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, out,
):  # fmt: skip
    """Checks a call of `flash_fwd`.

    Returns (scale, left, right, softcap, bound_q, bound_k) as the operators take them.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    head_dim = _check_operands(q, k, v, packed)
    bound_q = bound_k = _NO_BOUND
    if packed:
        _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_k)
        bound_q = _check_bound("max_seqlen_q", max_seqlen_q)
        bound_k = _check_bound("max_seqlen_k", max_seqlen_k)
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        name = "max_seqlen_q" if max_seqlen_q is not None else "max_seqlen_k"
        raise ValueError(f"{name}: only for packed sequences, which need cu_seqlens_q/_k too")
    if seqused_k is not None or alibi_slopes is not None or sinks is not None or out is not None:
        _check_options(q, k, v, cu_seqlens_q, seqused_k, alibi_slopes, sinks, out)
        _refuse_gradients(alibi_slopes, sinks, out)
    if q.requires_grad or k.requires_grad or v.requires_grad:
        _refuse_gradients(q, k, v)
    if packed or seqused_k is not None:
        _check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)

    scale = head_dim**-0.5 if softmax_scale is None else _finite("softmax_scale", softmax_scale)
    left = right = -1
    if window_size is not OPEN_WINDOW:
        left, right = _check_window(window_size)
    if causal is not False:
        if causal is not True:
            raise ValueError(f"causal: expected True or False, got {causal!r}")
        right = 0
    if type(softcap) is not float or softcap != 0.0:
        softcap = _check_softcap(softcap)
    return scale, left, right, softcap, bound_q, bound_k


def check_op(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale, window_left, window_right,
    softcap, alibi_slopes, sinks, out, lse,
):  # fmt: skip
    """The same for the arguments of the operators, whose head dim is not padded."""
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    head_dim = _check_operands(q, k, v, packed)
    if head_dim % 8:
        raise ValueError(f"q: expected a head dim that is a multiple of 8, got {head_dim}")
    if packed:
        _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_k)
    _check_options(q, k, v, cu_seqlens_q, seqused_k, alibi_slopes, sinks, out)
    _finite("softmax_scale", softmax_scale)
    _check_softcap(softcap)
    _check_window((window_left, window_right))
    if lse is not None:
        check_tensor("lse", lse, q, (torch.float32,), (lse_shape(q),))
        if not lse.is_contiguous():
            raise ValueError(f"lse: expected a contiguous tensor, got strides {lse.stride()}")


def lse_shape(q):
    """(b, h, sq) for a dense q, (h, Tq) for a packed one."""
    shape = q.shape
    if len(shape) == 3:
        return shape[1], shape[0]
    return shape[0], shape[2], shape[1]


def _check_operands(q, k, v, packed):
    """Shapes, dtypes, devices and memory of q, k and v. Returns the head dim."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        for name, value in (("q", q), ("k", k), ("v", v)):
            require_tensor(name, value)
    head_dim = _check_shapes(q.shape, k.shape, v.shape, packed)

    dtype = q.dtype
    item_bytes = _ITEM_BYTES.get(dtype)
    if item_bytes is None or (item_bytes == 4 and q.is_cuda):
        allowed = "float16 or bfloat16" + ("" if q.is_cuda else ", on the CPU also float32")
        got = f"{dtype_name(dtype)} on {q.device}"
        raise NotImplementedError(f"q: expected dtype {allowed}, got {got}")
    if k.dtype is not dtype or v.dtype is not dtype:
        name, got = ("k", k.dtype) if k.dtype is not dtype else ("v", v.dtype)
        expected = dtype_name(dtype)
        raise ValueError(f"{name}: expected dtype {expected} like q, got {dtype_name(got)}")
    device = q.device
    if k.device != device or v.device != device:
        name, got = ("k", k.device) if k.device != device else ("v", v.device)
        raise ValueError(f"{name}: expected device {device} like q, got {got}")

    _check_memory(q, k, v, item_bytes, head_dim)
    if not q.is_cpu:
        _device.check(q, head_dim)
    return head_dim


def _check_shapes(q_shape, k_shape, v_shape, packed):
    rank = 3 if packed else 4
    if len(q_shape) != rank:
        raise ValueError(f"q: expected {_layout('h', packed)}, got shape {tuple(q_shape)}")
    heads, head_dim = q_shape[-2], q_shape[-1]
    if not 0 < head_dim <= _MAX_HEAD_DIM:
        kind = NotImplementedError if head_dim > 0 else ValueError
        raise kind(f"q: expected a head dim from 1 to {_MAX_HEAD_DIM}, got {head_dim}")
    if heads > _MAX_HEADS:
        hint = "" if packed else ": is q (b, h, sq, d)? Then pass q.transpose(1, 2)"
        raise ValueError(
            f"q: expected at most {_MAX_HEADS} heads in {_layout('h', packed)}, got {heads} in "
            f"shape {tuple(q_shape)}{hint}"
        )
    if len(k_shape) != rank or k_shape[-1] != head_dim or not (packed or k_shape[0] == q_shape[0]):
        batch = "" if packed else f" and batch {q_shape[0]}"
        raise ValueError(
            f"k: expected {_layout('hk', packed)} with head dim {head_dim}{batch} like q, "
            f"got shape {tuple(k_shape)}"
        )
    if v_shape != k_shape:
        raise ValueError(f"v: expected shape {tuple(k_shape)} like k, got {tuple(v_shape)}")
    heads_kv = k_shape[-2]
    if heads_kv == 0 or heads % heads_kv:
        raise ValueError(
            f"k: expected a number of key/value heads that divides q's {heads} heads, "
            f"got {heads_kv} in shape {tuple(k_shape)}"
        )
    rows, rows_k = q_shape[-3], k_shape[-3]
    if rows > _MAX_ROWS or rows_k > _MAX_ROWS:
        name, got = ("q", rows) if rows > _MAX_ROWS else ("k", rows_k)
        raise ValueError(f"{name}: expected at most 2**30 rows, got {got}")
    return head_dim


def _check_memory(q, k, v, item_bytes, head_dim):
    """Strides and alignment. A head dim that gets padded is copied: then alignment is free."""
    in_place = head_dim % 8 == 0
    if in_place and type(q) is type(k) is type(v) is Tensor and not is_dynamo_compiling():
        unit = 16 // item_bytes
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
        good = addresses > 0 and addresses % 16 == 0  # the address of a meta tensor is 0
        for stride in (q.stride(), k.stride(), v.stride()):
            # In a packed tensor the second dim and the last but one are the same.
            good &= stride[-1] == 1 and (stride[0] | stride[1] | stride[-2]) % unit == 0
        if good:
            return
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_layout(name, tensor, item_bytes, in_place)


def _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_k):
    if cu_seqlens_q is None or cu_seqlens_k is None:
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{name}: packed sequences need cu_seqlens_q and cu_seqlens_k, got None")
    device = q.device
    check_metadata("cu_seqlens_q", cu_seqlens_q, device)
    check_metadata("cu_seqlens_k", cu_seqlens_k, device)
    entries = cu_seqlens_q.numel()
    if entries == 0 or cu_seqlens_k.numel() != entries:
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k: expected batch + 1 entries each, got "
            f"{entries} and {cu_seqlens_k.numel()}"
        )


def _check_bound(name, value):
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        if isinstance(value, torch.SymInt):
            return _NO_BOUND
        got = f"a tensor on {value.device}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{name}: expected an int, an upper bound of the lengths of the packed sequences that "
            f"the host knows (reading a tensor would wait for the device), got {got}"
        )
    if value < 0:
        raise ValueError(f"{name}: expected an int >= 0, got {value}")
    # The operators' ints are no symbols: while compiling, a bound would be baked into the graph.
    return _NO_BOUND if is_dynamo_compiling() else int(value)


def _check_options(q, k, v, cu_seqlens_q, seqused_k, alibi_slopes, sinks, out):
    heads = q.shape[-2]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if seqused_k is not None:
        check_metadata("seqused_k", seqused_k, q.device)
        if seqused_k.shape[0] != batch:
            raise ValueError(f"seqused_k: expected shape ({batch},), got ({seqused_k.shape[0]},)")
    if alibi_slopes is not None:
        shapes = ((heads,), (batch, heads))
        check_tensor("alibi_slopes", alibi_slopes, q, (torch.float32,), shapes)
    if sinks is not None:
        check_tensor("sinks", sinks, q, (torch.float32, q.dtype), ((heads,),))
    if out is not None:
        check_out(out, q, k, v)


def _refuse_gradients(*tensors):
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad and is_grad_enabled():
            raise NotImplementedError(
                "q, k, v: an argument requires a gradient, but flash_fwd has no backward yet: call "
                "it under torch.no_grad() or torch.inference_mode(), or pass tensor.detach()"
            )


def _check_window(window_size):
    try:
        left, right = window_size
        good = type(left) is type(right) is int and left >= -1 and right >= -1
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(
            "window_size: expected two ints (left, right), each >= -1 (-1: no limit on that side), "
            f"got {window_size!r}"
        )
    # A side longer than any sequence limits nothing.
    return (left if left <= _MAX_ROWS else -1), (right if right <= _MAX_ROWS else -1)


def _finite(name, value):
    if isinstance(value, (Real, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool):
        value = float(value)
        if -math.inf < value < math.inf:  # dynamo cannot trace isfinite of a symbolic float
            return value
    got = "a tensor" if isinstance(value, Tensor) else repr(value)
    raise ValueError(f"{name}: expected a finite number, got {got}")


def _check_softcap(softcap):
    value = _finite("softcap", softcap)
    if value < 0:
        raise ValueError(f"softcap: expected 0 (off) or a positive number, got {value}")
    return value


def _check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k):
    """The values of the lengths, if FLASHATTN_EXT_CHECK=1 asks for it and they can be read."""
    if is_dynamo_compiling() or _ENVIRONMENT.get(b"FLASHATTN_EXT_CHECK") != b"1":
        return
    if type(q) is not Tensor or not (q.is_cpu or q.is_cuda):
        return  # fake or meta
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    _lengths.check(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)


def _layout(heads, packed):
    return f"packed (rows, {heads}, d)" if packed else f"(b, rows, {heads}, d)"
