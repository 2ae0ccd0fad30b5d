"""Checks of the queries together with their keys and values, for every function that has them."""

from collections.abc import Sequence

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from . import _device
from ._score_checks import MAX_ROWS
from ._tensor_checks import check_layout, check_strided, check_tensor, dtype_name, require_tensor

ITEM_BYTES = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4}
_MAX_HEAD_DIM = 256
_MAX_HEADS = 65535
_HAS_LEVELS = hasattr(forward_ad, "_current_level")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, k_name: str = "k", v_name: str = "v") -> None:
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        for name, value in (("q", q), (k_name, k), (v_name, v)):
            require_tensor(name, value)
    if not q.layout is k.layout is v.layout is torch.strided or (
        q.is_nested or k.is_nested or v.is_nested
    ):
        for name, tensor in (("q", q), (k_name, k), (v_name, v)):
            check_strided(name, tensor)


def check_32_bits(**tensors: Tensor) -> None:
    """Sizes as the operators take them. For tensors without memory, which no operator sees."""
    for name, tensor in tensors.items():
        for size in tensor.shape:
            if type(size) is int and size > 2**31 - 1:
                raise ValueError(f"{name}: expected a number of 32 bits, got {size}")


def check_queries(shape: Sequence[int], packed: bool) -> int:
    """Rank, heads, rows and head dim. Returns the head dim."""
    if len(shape) != (3 if packed else 4):
        raise ValueError(f"q: expected {layout('h', packed)}, got shape {tuple(shape)}")
    rows, heads, head_dim = shape[-3:]
    if not 0 < head_dim <= _MAX_HEAD_DIM:
        kind = NotImplementedError if head_dim > 0 else ValueError
        raise kind(f"q: expected a head dim from 1 to {_MAX_HEAD_DIM}, got {head_dim}")
    if heads > _MAX_HEADS:
        hint = "" if packed else ": is q (b, h, sq, d)? Then pass q.transpose(1, 2)"
        raise ValueError(
            f"q: expected at most {_MAX_HEADS} heads in {layout('h', packed)}, got {heads} in "
            f"shape {tuple(shape)}{hint}"
        )
    if rows > MAX_ROWS:
        raise ValueError(f"q: expected at most 2**30 rows, got {rows}")
    return head_dim


def check_key_heads(heads: int, k_shape: Sequence[int], k_name: str = "k") -> None:
    heads_kv = k_shape[-2]
    if heads_kv == 0 or heads % heads_kv:
        raise ValueError(
            f"{k_name}: expected a number of key/value heads that divides q's {heads} heads, "
            f"got {heads_kv} in shape {tuple(k_shape)}"
        )


def check_storage(
    q: Tensor, k: Tensor, v: Tensor, head_dim: int, k_name: str = "k", v_name: str = "v"
) -> None:
    """Dtypes, devices and memory, and whether this build serves them."""
    dtype = q.dtype
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is None or (item_bytes == 4 and q.is_cuda):
        allowed = "float16 or bfloat16" + ("" if q.is_cuda else ", on the CPU also float32")
        got = f"{dtype_name(dtype)} on {q.device}"
        raise NotImplementedError(f"q: expected dtype {allowed}, got {got}")
    if k.dtype is not dtype or v.dtype is not dtype:
        name, other = (k_name, k.dtype) if k.dtype is not dtype else (v_name, v.dtype)
        expected = dtype_name(dtype)
        raise ValueError(f"{name}: expected dtype {expected} like q, got {dtype_name(other)}")
    device = q.device
    if k.device != device or v.device != device:
        name, place = (k_name, k.device) if k.device != device else (v_name, v.device)
        raise ValueError(f"{name}: expected device {device} like q, got {place}")

    # A head dim that gets padded is copied: then alignment is free.
    in_place = head_dim % 8 == 0
    for name, tensor in (("q", q), (k_name, k), (v_name, v)):
        check_layout(name, tensor, item_bytes, in_place)
    if not q.is_cpu:
        _device.check(q, head_dim)


def check_score_tensors(
    q: Tensor, batch: int, alibi_slopes: Tensor | None, sinks: Tensor | None
) -> None:
    heads = q.shape[-2]
    if alibi_slopes is not None:
        shapes = ((heads,), (batch, heads))
        check_tensor("alibi_slopes", alibi_slopes, q, (torch.float32,), shapes)
    if sinks is not None:
        check_tensor("sinks", sinks, q, (torch.float32, q.dtype), ((heads,),))


def check_lse_out(q: Tensor, lse: Tensor) -> None:
    check_tensor("lse", lse, q, (torch.float32,), (lse_shape(q),))
    if not lse.is_contiguous():
        raise ValueError(f"lse: expected a contiguous tensor, got strides {lse.stride()}")


def forward_ad_active() -> bool:
    """Whether a tensor could be dual: cheap, as every call asks."""
    return _HAS_LEVELS and forward_ad._current_level >= 0


def refuse_gradients(function: str, **tensors: Tensor | None) -> None:
    dual = forward_ad_active()
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if (tensor.requires_grad and is_grad_enabled()) or (dual and _has_tangent(tensor)):
            raise NotImplementedError(
                f"{name}: requires a gradient, but {function} has no backward yet: call it under "
                f"torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
            )


def _has_tangent(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and forward_ad.unpack_dual(tensor).tangent is not None


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """(b, h, sq) for a dense q, (h, Tq) for a packed one."""
    shape = q.shape
    if len(shape) == 3:
        return shape[1], shape[0]
    return shape[0], shape[2], shape[1]


def layout(heads: str, packed: bool) -> str:
    return f"packed (rows, {heads}, d)" if packed else f"(b, rows, {heads}, d)"
