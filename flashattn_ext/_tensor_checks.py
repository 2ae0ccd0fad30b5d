"""Checks of one tensor on metadata: what it is, how it lies in memory, what it overlaps."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling


def check_layout(name: str, tensor: Tensor, item_bytes: int, aligned: bool) -> None:
    """Stride 1 in the last dim and, unless the tensor gets copied anyway, alignment."""
    remedy = "" if name == "out" else f": pass {name}.clone(memory_format=torch.contiguous_format)"
    strides = tensor.stride()
    if strides[-1] != 1 and tensor.shape[-1] != 1:
        raise ValueError(
            f"{name}: expected stride 1 in the last dim, got strides {tuple(strides)}{remedy}"
        )
    if not aligned:
        return
    for size, stride in zip(tensor.shape[:-1], strides[:-1], strict=True):
        if stride * item_bytes % 16 and size > 1:
            raise ValueError(
                f"{name}: expected strides that are multiples of 16 bytes ({16 // item_bytes} "
                f"elements), got strides {tuple(strides)}{remedy}"
            )
    if is_dynamo_compiling():
        return  # the fake kernel looks at the offset, which dynamo cannot
    # Only plain tensors surely have memory; for the others the offset must do. The library itself
    # looks at the address again.
    if type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta:
        try:
            offset: int | torch.SymInt = tensor.data_ptr() % 16
        except RuntimeError:
            raise NotImplementedError(
                f"{name}: expected a tensor with memory of its own, got a wrapper without (inside "
                "torch.vmap or another transform of torch.func, which are not served)"
            ) from None
    else:
        offset = tensor.storage_offset() * item_bytes % 16
    if offset:
        raise ValueError(
            f"{name}: expected data that starts at a multiple of 16 bytes, got one {offset} bytes "
            f"past it (a view at an odd offset){remedy}"
        )


def check_metadata(name: str, tensor: Tensor, device: torch.device) -> None:
    """Lengths: int32, one dim, contiguous, on q's device."""
    require_tensor(name, tensor)
    if tensor.dtype is not torch.int32 or tensor.ndim != 1:
        raise ValueError(
            f"{name}: expected a 1-D int32 tensor, got {dtype_name(tensor.dtype)} with shape "
            f"{tuple(tensor.shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device} like q, got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got stride {tensor.stride(0)}")


def check_tensor(
    name: str,
    tensor: Tensor,
    q: Tensor,
    dtypes: Iterable[torch.dtype],
    shapes: Iterable[tuple[int, ...]],
) -> None:
    require_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(dtype_name(dtype) for dtype in dtypes))
        raise ValueError(f"{name}: expected dtype {allowed}, got {dtype_name(tensor.dtype)}")
    if not any(tuple(tensor.shape) == shape for shape in shapes):
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name}: expected shape {allowed}, got {tuple(tensor.shape)}")
    if tensor.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} like q, got {tensor.device}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}: expected stride 1 in the last dim, got {tuple(tensor.stride())}")


def check_lengths(name: str, tensor: Tensor, batch: int, device: torch.device) -> None:
    """One number for each sequence."""
    check_metadata(name, tensor, device)
    if tensor.shape[0] != batch:
        raise ValueError(f"{name}: expected shape ({batch},), got ({tensor.shape[0]},)")


def check_out(out: Tensor, q: Tensor, **inputs: object) -> None:
    """A result of q's shape in memory of its own; ``inputs`` are all others that the call reads."""
    check_tensor("out", out, q, (q.dtype,), (tuple(q.shape),))
    check_layout("out", out, out.element_size(), out.shape[-1] % 8 == 0)
    check_written("out", out, q=q, **inputs)


def check_written(name: str, tensor: Tensor, /, **others: object) -> None:
    """Every element of ``tensor`` has a place of its own."""
    strides = tensor.stride()
    for size, stride in zip(tensor.shape, strides, strict=True) if 0 in strides else ():
        if stride == 0 and size > 1 and 0 not in tensor.shape:
            raise ValueError(f"{name}: expected no expanded dim, got strides {tuple(strides)}")
    if type(tensor) is not Tensor or tensor.is_meta or is_dynamo_compiling():
        return  # no memory yet
    for other_name, other in others.items():
        if type(other) is Tensor and _overlap(tensor, other):
            raise ValueError(
                f"{name}: expected memory of its own, got memory that overlaps {other_name}"
            )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors surely share memory. Interleaved views of one buffer do not count.

    Exact where one is contiguous; of two others only the first element is compared.
    """
    if a.numel() == 0 or b.numel() == 0:
        return False
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if start_a == start_b:
        return True
    if a.is_contiguous():
        return _reaches(start_a - start_b, a.nbytes, b)
    return b.is_contiguous() and _reaches(start_b - start_a, b.nbytes, a)


def _reaches(begin: int, size: int, tensor: Tensor) -> bool:
    """Whether bytes begin to begin + size - 1, counted from its first, hold some of a tensor."""
    if begin < 0:
        return begin + size > 0
    item = tensor.element_size()
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    dims = [(stride * item, count) for stride, count in dims if count > 1 and stride > 0]
    extent = item + sum(stride * (count - 1) for stride, count in dims)
    for stride, count in dims:
        if begin >= extent:
            break
        extent -= stride * (count - 1)  # of one block of this dim
        block = min(begin // stride, count - 1)
        begin -= block * stride
        if begin >= extent:  # in the gap behind the block
            return block + 1 < count and begin + size > stride
    return begin < extent


def require_tensor(name: str, value: object) -> Tensor:
    """Returns the tensor; a ValueError, like every refusal of an argument, where it is none."""
    if not isinstance(value, Tensor):
        got = "None" if value is None else type(value).__name__
        raise ValueError(f"{name}: expected a torch.Tensor, got {got}")  # noqa: TRY004
    check_strided(name, value)
    return value


def check_strided(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        got = "a nested tensor" if tensor.is_nested else str(tensor.layout)
        raise ValueError(f"{name}: expected a dense tensor (torch.strided), got {got}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
