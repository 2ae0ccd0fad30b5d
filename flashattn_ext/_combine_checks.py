"""The checks of `flash_combine` and `merge_attention_states`, on metadata only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._operand_checks import ITEM_BYTES, lse_shape, refuse_gradients
from ._score_checks import MAX_ROWS
from ._tensor_checks import check_tensor, check_written, dtype_name, require_tensor


def check_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None,
    lse: Tensor | None = None,
) -> torch.dtype:  # fmt: skip
    """Returns the dtype of the result."""
    require_tensor("out_partial", out_partial)
    require_tensor("lse_partial", lse_partial)
    shape = out_partial.shape
    if len(shape) not in (4, 5):
        raise ValueError(
            "out_partial: expected (splits, b, sq, h, d) or packed (splits, rows, h, d), got "
            f"shape {tuple(shape)}"
        )
    _check_floating("out_partial", out_partial.dtype)
    _check_device(out_partial)
    if out_partial.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(
            "out_partial: expected stride 1 in the last dim, got strides "
            f"{tuple(out_partial.stride())}"
        )
    if shape[-1] < 1 or shape[-3] > MAX_ROWS:
        raise ValueError(
            f"out_partial: expected a head dim and at most 2**30 rows, got shape {tuple(shape)}"
        )
    _check_lse("lse_partial", lse_partial, out_partial, partial_lse_shape(shape))
    dtype = out_partial.dtype
    if out_dtype is not None:
        dtype = _check_out_dtype(out_dtype)
    if out is not None:
        _check_out(out, out_partial, lse_partial, out_dtype)
        dtype = out.dtype
    if lse is not None:
        _check_lse("lse", lse, out_partial, partial_lse_shape(shape)[1:])
        if not lse.is_contiguous():
            raise ValueError(f"lse: expected a contiguous tensor, got strides {lse.stride()}")
    refuse_gradients("flash_combine", out_partial=out_partial, lse_partial=lse_partial, out=out)
    return dtype


def check_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        require_tensor(name, tensor)
    shape = out_a.shape
    if len(shape) not in (3, 4):
        raise ValueError(
            f"out_a: expected (b, sq, h, d) or packed (rows, h, d), got shape {tuple(shape)}"
        )
    _check_floating("out_a", out_a.dtype)
    _check_floating("out_b", out_b.dtype)
    if out_b.shape != shape:
        raise ValueError(
            f"out_b: expected shape {tuple(shape)} like out_a, got {tuple(out_b.shape)}"
        )
    if out_b.device != out_a.device:
        raise ValueError(f"out_b: expected device {out_a.device} like out_a, got {out_b.device}")
    _check_lse("lse_a", lse_a, out_a, lse_shape(out_a))
    _check_lse("lse_b", lse_b, out_a, lse_shape(out_a))
    refuse_gradients("merge_attention_states", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)


def partial_lse_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Of the partial results' lse, for their shape."""
    return (*shape[:-3], shape[-2], shape[-3])


def _check_floating(name: str, dtype: torch.dtype) -> None:
    if dtype not in ITEM_BYTES:
        raise NotImplementedError(
            f"{name}: expected dtype float16, bfloat16 or float32, got {dtype_name(dtype)}"
        )


def _check_out_dtype(dtype: object) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or dtype not in ITEM_BYTES:
        got = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        raise ValueError(f"out_dtype: expected float16, bfloat16 or float32, got {got}")
    return dtype


def _check_device(tensor: Tensor) -> None:
    if not (tensor.is_cpu or tensor.is_cuda or tensor.is_meta):
        raise NotImplementedError(
            f"out_partial: expected a tensor on cpu or cuda, got one on {tensor.device}"
        )


def _check_lse(name: str, lse: Tensor, out: Tensor, shape: tuple[int, ...]) -> None:
    if lse.dtype is not torch.float32 or lse.shape != shape:
        raise ValueError(
            f"{name}: expected float32 with shape {tuple(shape)}, got {dtype_name(lse.dtype)} with "
            f"shape {tuple(lse.shape)}"
        )
    if lse.device != out.device:
        raise ValueError(f"{name}: expected device {out.device} like its out, got {lse.device}")


def _check_out(
    out: Tensor, out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None
) -> None:
    dtypes = tuple(ITEM_BYTES) if out_dtype is None else (out_dtype,)
    require_tensor("out", out)
    if out.device != out_partial.device:
        raise ValueError(
            f"out: expected device {out_partial.device} like out_partial, got {out.device}"
        )
    check_tensor("out", out, out_partial, dtypes, (tuple(out_partial.shape[1:]),))
    check_written("out", out, out_partial=out_partial, lse_partial=lse_partial)
