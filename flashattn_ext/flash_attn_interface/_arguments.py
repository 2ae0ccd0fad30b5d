"""What the functions share: refusals by name, packed tensors, flash-attn's results."""

from typing import TypeVar

import torch
from torch import Tensor

from .._tensor_checks import require_tensor


Optional = TypeVar("Optional", Tensor, Tensor | None)


def refuse(name: str, value: object, served: object) -> None:
    """Raises unless an argument has the one value that is served."""
    if value is served or (isinstance(value, (int, float)) and value == served):
        return
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise NotImplementedError(f"{name}: only {served!r} is served, got {got}")


def inner_contiguous(tensor: Optional) -> Optional:
    """A copy where the last dim has another stride than 1, which flash-attn makes as well."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor  # absent, or refused by its name further on
    return tensor.contiguous() if tensor.ndim > 0 and tensor.stride(-1) != 1 else tensor


def unpack(name: str, packed: Tensor, parts: int, *rows: str) -> tuple[Tensor, ...]:
    """The ``parts`` tensors that are stacked in front of the heads, as views."""
    require_tensor(name, packed)
    if packed.ndim != len(rows) + 3 or packed.shape[-3] != parts:
        expected = ", ".join((*rows, str(parts), "heads", "d"))
        raise ValueError(f"{name}: expected ({expected}), got shape {tuple(packed.shape)}")
    return packed.unbind(-3)


def results(
    out: Tensor, lse: Tensor, return_attn_probs: bool
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """flash-attn's third result has no elements where there is no dropout."""
    return (out, lse, out.new_empty(0)) if return_attn_probs else out
