"""Every check of the arguments, on metadata only: nothing here waits for a device.

The public functions, `supports` and the fake kernels share these functions. A message names the
argument, what it got and what is allowed. What passes in well under a microsecond is tested inline;
whatever fails the quick test goes to a function that finds out what is wrong, or that nothing is.
"""

import math
import os
from numbers import Integral, Real

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _device, _lengths

_ITEM_BYTES = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4}
_MAX_HEAD_DIM = 256
_MAX_HEADS = 65535
_MAX_ROWS = 2**30  # so that positions and their differences fit 32 bits
_NO_BOUND = -1


def check_call(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k,
    softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, out,
):  # fmt: skip
    """Checks a call of `flash_fwd`.

    Returns (scale, left, right, softcap, bound_q, bound_k) as the operators take them.
    """
    head_dim = _check_operands(q, k, v, cu_seqlens_q is not None or cu_seqlens_k is not None)
    bound_q = bound_k = _NO_BOUND
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        bound_q, bound_k = _check_packed(
            q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        )
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        name = "max_seqlen_q" if max_seqlen_q is not None else "max_seqlen_k"
        raise ValueError(f"{name}: only for packed sequences, which need cu_seqlens_q/_k too")
    _check_extras(q, cu_seqlens_q, seqused_k, alibi_slopes, sinks)
    if out is not None:
        _check_out(out, q, k, v, head_dim)

    needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
    for extra in (sinks, alibi_slopes, out):
        needs_grad = needs_grad or (extra is not None and extra.requires_grad)
    if needs_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "q, k, v: an argument requires a gradient, but flash_fwd has no backward yet: call it "
            "under torch.no_grad() or torch.inference_mode(), or pass tensors after .detach()"
        )

    scale = head_dim**-0.5 if softmax_scale is None else _finite("softmax_scale", softmax_scale)
    left, right = _check_window(window_size)
    if causal is not False:
        if causal is not True:
            raise ValueError(f"causal: expected True or False, got {causal!r}")
        right = 0
    if softcap != 0.0 or type(softcap) is not float:
        softcap = _finite("softcap", softcap)
        if softcap < 0:
            raise ValueError(f"softcap: expected 0 (off) or a positive number, got {softcap}")
    if cu_seqlens_q is not None or seqused_k is not None:
        _check_lengths(
            q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k
        )
    return scale, left, right, softcap, bound_q, bound_k


def check_op(
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale, window_left, window_right,
    softcap, alibi_slopes, sinks, out, lse,
):  # fmt: skip
    """The same for the arguments of the operators, whose head dim is not padded."""
    head_dim = _check_operands(q, k, v, cu_seqlens_q is not None or cu_seqlens_k is not None)
    if head_dim % 8:
        raise ValueError(f"q: expected a head dim that is a multiple of 8, got {head_dim}")
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_k)
    _check_extras(q, cu_seqlens_q, seqused_k, alibi_slopes, sinks)
    _check_window((window_left, window_right))
    _finite("softmax_scale", softmax_scale)
    if _finite("softcap", softcap) < 0:
        raise ValueError(f"softcap: expected 0 (off) or a positive number, got {softcap}")
    if out is not None:
        _check_out(out, q, k, v, head_dim)
    if lse is not None:
        _check_tensor("lse", lse, q, (torch.float32,), (lse_shape(q),))
        if not lse.is_contiguous():
            raise ValueError(f"lse: expected a contiguous tensor, got strides {lse.stride()}")


def lse_shape(q):
    """(b, h, sq) for a dense q, (h, Tq) for a packed one."""
    shape = q.shape
    if len(shape) == 3:
        return shape[1], shape[0]
    return shape[0], shape[2], shape[1]


def _check_operands(q, k, v, packed):
    """Shapes, dtypes, devices and memory layout of q, k and v. Returns the head dim."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        for name, value in (("q", q), ("k", k), ("v", v)):
            _require_tensor(name, value)
    shape = q.shape
    k_shape = k.shape
    rank = 3 if packed else 4
    if len(shape) != rank:
        raise ValueError(f"q: expected {_layout('h', packed)}, got shape {tuple(shape)}")
    heads, head_dim = shape[-2], shape[-1]
    if (
        len(k_shape) != rank
        or k_shape[-1] != head_dim
        or (rank == 4 and k_shape[0] != shape[0])
    ):
        expected = f"{_layout('hk', packed)} with head dim {head_dim}"
        batch = "" if packed else f" and batch {shape[0]}"
        raise ValueError(f"k: expected {expected}{batch} like q, got shape {tuple(k_shape)}")
    if v.shape != k_shape:
        raise ValueError(f"v: expected shape {tuple(k_shape)} like k, got {tuple(v.shape)}")

    dtype = q.dtype
    item_bytes = _ITEM_BYTES.get(dtype)
    if item_bytes is None or (item_bytes == 4 and q.is_cuda):
        allowed = "float16 or bfloat16" + ("" if q.is_cuda else ", on the CPU also float32")
        raise NotImplementedError(f"q: expected dtype {allowed}, got {_plain(dtype)} on {q.device}")
    if k.dtype is not dtype or v.dtype is not dtype:
        name, other = ("k", k) if k.dtype is not dtype else ("v", v)
        raise ValueError(f"{name}: expected dtype {_plain(dtype)} like q, got {_plain(other.dtype)}")
    device = q.device
    if k.device != device or v.device != device:
        name, other = ("k", k) if k.device != device else ("v", v)
        raise ValueError(f"{name}: expected device {device} like q, got {other.device}")

    if not 0 < head_dim <= _MAX_HEAD_DIM:
        kind = NotImplementedError if head_dim > 0 else ValueError
        raise kind(f"q: expected a head dim from 1 to {_MAX_HEAD_DIM}, got {head_dim}")
    heads_kv = k_shape[-2]
    if heads_kv == 0 or heads % heads_kv:
        raise ValueError(
            f"k: the number of key/value heads must divide q's {heads} heads, got {heads_kv}"
        )
    if heads > _MAX_HEADS:
        hint = "" if packed else ": is the layout (batch, heads, rows, head dim)? Then transpose(1, 2)"
        raise ValueError(
            f"q: expected at most {_MAX_HEADS} heads in {_layout('h', packed)}, got {heads} with "
            f"shape {tuple(shape)}{hint}"
        )
    if shape[-3] > _MAX_ROWS or k_shape[-3] > _MAX_ROWS:
        raise ValueError(f"q, k: expected at most 2**30 rows, got {shape[-3]} and {k_shape[-3]}")

    _check_memory(q, k, v, item_bytes, head_dim % 8 == 0)
    if not q.is_cpu:
        _device.check(q, head_dim)
    return head_dim


def _check_memory(q, k, v, item_bytes, in_place):
    """Strides and alignment. A head dim that gets padded is copied: then only strides matter."""
    unit = 16 // item_bytes
    if type(q) is type(k) is type(v) is Tensor and not is_dynamo_compiling() and not q.is_meta:
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
        good = in_place and addresses % 16 == 0
        for stride in (q.stride(), k.stride(), v.stride()):
            # In a packed tensor the second and the last but one are the same.
            good = good and stride[-1] == 1 and (stride[0] | stride[1] | stride[-2]) % unit == 0
        if good:
            return
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_layout(name, tensor, item_bytes, in_place)


def _check_layout(name, tensor, item_bytes, aligned):
    strides = tensor.stride()
    if strides[-1] != 1 and tensor.shape[-1] != 1:
        raise ValueError(
            f"{name}: expected stride 1 in the last dim, got strides {tuple(strides)}: "
            f"pass {name}.contiguous()"
        )
    if not aligned:
        return
    for size, stride in zip(tensor.shape[:-1], strides[:-1]):
        if stride * item_bytes % 16 and size > 1:
            raise ValueError(
                f"{name}: expected strides that are multiples of 16 bytes ({16 // item_bytes} "
                f"elements), got strides {tuple(strides)}: pass {name}.contiguous()"
            )
    # Only plain tensors surely have memory; for the others the offset must do. The library itself
    # looks at the address again.
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
    if plain and not is_dynamo_compiling():
        offset = tensor.data_ptr() % 16
    else:
        offset = tensor.storage_offset() * item_bytes % 16
    if offset:
        raise ValueError(
            f"{name}: expected data that starts at a multiple of 16 bytes, got one {offset} bytes "
            f"past it (a view at an odd offset): pass {name}.clone()"
        )


def _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_k):
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor is None:
            raise ValueError(f"{name}: packed sequences need cu_seqlens_q and cu_seqlens_k, got None")
        _check_metadata(name, tensor, q)
    if cu_seqlens_q.shape[0] == 0 or cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k: expected batch + 1 entries each, got "
            f"{cu_seqlens_q.shape[0]} and {cu_seqlens_k.shape[0]}"
        )


def _check_packed(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_k)
    bound_q = _check_bound("max_seqlen_q", max_seqlen_q)
    bound_k = _check_bound("max_seqlen_k", max_seqlen_k)
    if is_dynamo_compiling():
        # The operators' integers are no symbols: a bound would be baked into the graph.
        return _NO_BOUND, _NO_BOUND
    return bound_q, bound_k


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
    return min(int(value), _MAX_ROWS)


def _check_extras(q, cu_seqlens_q, seqused_k, alibi_slopes, sinks):
    """seqused_k, alibi_slopes and sinks."""
    if seqused_k is None and alibi_slopes is None and sinks is None:
        return
    heads = q.shape[-2]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if seqused_k is not None:
        _check_metadata("seqused_k", seqused_k, q)
        if seqused_k.shape[0] != batch:
            raise ValueError(f"seqused_k: expected shape ({batch},), got ({seqused_k.shape[0]},)")
    if alibi_slopes is not None:
        shapes = ((heads,), (batch, heads))
        _check_tensor("alibi_slopes", alibi_slopes, q, (torch.float32,), shapes)
    if sinks is not None:
        _check_tensor("sinks", sinks, q, (torch.float32, q.dtype), ((heads,),))


def _check_metadata(name, tensor, q):
    """Lengths: int32, one dim, contiguous, where q is."""
    _require_tensor(name, tensor)
    if tensor.dtype is not torch.int32 or tensor.dim() != 1:
        raise ValueError(
            f"{name}: expected a 1-D int32 tensor, got {_plain(tensor.dtype)} with shape "
            f"{tuple(tensor.shape)}"
        )
    if tensor.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} like q, got {tensor.device}")
    if tensor.stride(0) != 1 and tensor.shape[0] > 1:
        raise ValueError(f"{name}: expected a contiguous tensor, got stride {tensor.stride(0)}")


def _check_tensor(name, tensor, q, dtypes, shapes):
    _require_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(_plain(dtype) for dtype in dtypes))
        raise ValueError(f"{name}: expected dtype {allowed}, got {_plain(tensor.dtype)}")
    if not any(tuple(tensor.shape) == shape for shape in shapes):
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name}: expected shape {allowed}, got {tuple(tensor.shape)}")
    if tensor.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} like q, got {tensor.device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}: expected stride 1 in the last dim, got {tuple(tensor.stride())}")


def _check_out(out, q, k, v, head_dim):
    _check_tensor("out", out, q, (q.dtype,), (tuple(q.shape),))
    _check_layout("out", out, out.element_size(), head_dim % 8 == 0)
    for size, stride in zip(out.shape, out.stride()):
        if stride == 0 and size > 1:
            raise ValueError(f"out: expected no expanded dim, got strides {tuple(out.stride())}")
    if type(out) is not Tensor or out.is_meta or is_dynamo_compiling():
        return  # no memory yet
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if type(tensor) is Tensor and _overlap(out, tensor):
            raise ValueError(f"out: expected memory of its own, got memory that overlaps {name}")


def _overlap(a, b):
    """Whether two tensors surely share memory. Interleaved views of one buffer do not count."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if start_a == start_b:
        return True
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    return start_a < start_b + b.nbytes and start_b < start_a + a.nbytes


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
        if math.isfinite(value):
            return value
    got = "a tensor" if isinstance(value, Tensor) else repr(value)
    raise ValueError(f"{name}: expected a finite number, got {got}")


def _check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k):
    """The values of the lengths, if FLASHATTN_EXT_CHECK=1 asks for it and there are any yet."""
    if is_dynamo_compiling() or os.environ.get("FLASHATTN_EXT_CHECK") != "1":
        return
    if type(q) is not Tensor or q.is_meta or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    _lengths.check(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k)


def _require_tensor(name, value):
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def _plain(dtype):
    return str(dtype).removeprefix("torch.")


def _layout(heads, packed):
    return f"packed (rows, {heads}, d)" if packed else f"(b, rows, {heads}, d)"
