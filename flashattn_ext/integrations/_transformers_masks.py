"""Once per forward pass of a transformers model: what padding and caches mean for `flash_fwd`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad

OLDEST = "5.17"  # before, masks of preallocated caches are described in other ways
OTHER_VERSION = (
    f"flashattn_ext needs transformers {OLDEST} or newer, found {transformers.__version__}"
)
try:
    from transformers import masking_utils
except ImportError as error:
    raise ImportError(OTHER_VERSION) from error

# What `attention_mask_for` returns where lengths say it all. It has 4 dims, since transformers
# takes such a mask for finished and hands it on, and is int32, which no other mask is:
# (1, w, rows, n), where w is 2 when the layer must also apply its sliding window, otherwise 1.
# By rows:
#   prefix: keys in use of each sequence of a dense batch;
#   packed: cu_seqlens_q, cu_seqlens_k;
#   padded: see `_padded_plan`.
_ROWS = {"prefix": 1, "packed": 2, "padded": 4}
_KINDS = {rows: kind for kind, rows in _ROWS.items()}


def kind_of_plan(plan: Tensor, batch: int, sliding_window: int | None) -> str:
    """Which of the plans above it is; raises when it is none or the layer cannot follow it."""
    kind = _KINDS.get(plan.shape[2]) if plan.dim() == 4 else None
    columns = {"prefix": batch, "packed": plan.shape[-1], "padded": 3 * batch + 1}.get(kind)
    if plan.shape[-1] != columns or plan.shape[0] != 1 or plan.shape[1] > 2:
        raise ValueError(
            f"attention_mask: expected a bool or floating-point mask, got {plan.dtype} with shape "
            f"{tuple(plan.shape)} for batch {batch}"
        )
    if plan.shape[1] == 2 and sliding_window is None:
        raise NotImplementedError(
            "sliding_window: the mask has a sliding window, but the model does not pass one to its "
            "attention function: use attn_implementation='sdpa'"
        )
    return kind


class _Pattern(NamedTuple):
    """A causal pattern that flash_fwd can run."""

    window: int | None = None  # keys that a query sees, itself included
    sequence_ids: Tensor | None = None  # (b, s): packed sequences, numbered within a row


def _code(factory: str, *arguments):
    """The code object of the closures that a factory of transformers makes; versions differ in
    which factories they have, and without one no mask has its code."""
    make = getattr(masking_utils, factory, None)
    return make(*arguments).__code__ if make is not None else None


# transformers describes patterns by nested closures; their code objects tell which is which.
_AND = _code("and_masks", masking_utils.causal_mask_function)
_SLIDING = _code("sliding_window_overlay", 1)
_REMAPPED = _code("remap_positions_for_packed_sequence", None, None)
_PACKED = _code("packed_sequence_mask_function", None)


def _read_pattern(mask_function) -> _Pattern | None:
    """What transformers' mask function says, or None for what is not known to be servable."""
    if mask_function is masking_utils.causal_mask_function:
        return _Pattern()
    if not _made_by(mask_function, _AND):
        return None
    parts = _captured(mask_function, "mask_functions")
    if len(parts) != 2:
        return None
    first, second = parts
    if _made_by(first, _SLIDING) and second is masking_utils.causal_mask_function:
        return _Pattern(window=_captured(first, "sliding_window"))
    if _made_by(second, _PACKED):
        # Some versions count positions from the start of each sequence, some from that of the row:
        # within a sequence, a causal pattern and its window say the same of both.
        remapped = _made_by(first, _REMAPPED)
        pattern = _read_pattern(_captured(first, "mask_function") if remapped else first)
        if pattern is not None and pattern.sequence_ids is None:
            return pattern._replace(sequence_ids=_captured(second, "packed_sequence_mask"))
    return None


def _made_by(function, code) -> bool:
    return code is not None and getattr(function, "__code__", None) is code


def _captured(function, name):
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def attention_mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs,
) -> Tensor | None:
    """The mask function: what `attention_forward` gets as attention_mask in every layer."""

    def exact():
        return masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, device=device, **kwargs,
        )  # fmt: skip

    pattern = _read_pattern(mask_function)
    if pattern is None:
        return exact()
    to_read = attention_mask is not None or pattern.sequence_ids is not None
    if to_read and torch.compiler.is_compiling():
        return exact()
    windowed = pattern.window is not None and kv_length > pattern.window
    if pattern.sequence_ids is not None:
        whole_rows = pattern.sequence_ids.shape == (batch_size, q_length) and kv_length == q_length
        if attention_mask is not None or not whole_rows:
            return exact()
        return _packed_plan(pattern.sequence_ids, windowed)
    # False asks for a mask that will be edited, except in single steps of preallocated caches.
    static = isinstance(q_offset, Tensor) or pattern.window is not None
    if not allow_is_causal_skip and not (q_length == 1 and static):
        return exact()

    # Keys that exist. Later slots of a preallocated cache do not; the last query sees the last key.
    extent = q_offset + q_length - kv_offset
    known = isinstance(extent, int)
    if known and extent > kv_length:
        return exact()
    if attention_mask is not None:
        if known and attention_mask.shape[-1] < extent + kv_offset:
            raise ValueError(
                f"attention_mask: expected a column for each of {extent + kv_offset} cached and "
                f"new tokens, got shape {tuple(attention_mask.shape)}"
            )
        keys = _keys_in_use(attention_mask[:, kv_offset:], kv_length, extent)
        if keys.gaps:
            return exact()
        if keys.padded:
            return _padded_plan(keys, q_length, kv_length, extent, windowed)
    if known and extent == kv_length and not windowed:
        return None
    if known:
        lengths = torch.full((batch_size,), extent, dtype=torch.int32, device=device)
    else:
        lengths = extent.to(device, torch.int32).reshape(1).repeat(batch_size)
    return _plan("prefix", windowed, lengths)


class _Keys(NamedTuple):
    """Key slots [begin, end) of each row of the batch."""

    begin: Tensor
    end: Tensor
    gaps: bool  # in some row not every slot of the range is in use
    padded: bool  # in some row a slot below the extent is not in use


def _keys_in_use(padding: Tensor, kv_length: int, extent: int | Tensor) -> _Keys:
    """Reads a padding mask. The one place that waits for the device, once per forward pass."""
    slots = torch.arange(kv_length, device=padding.device)
    padding = pad(padding[:, :kv_length], (0, max(0, kv_length - padding.shape[-1])))
    used = padding.bool() & (slots < extent)
    end = torch.where(used, slots + 1, 0).amax(-1)
    begin = torch.minimum(torch.where(used, slots, kv_length).amin(-1), end)
    count = used.sum(-1)
    gaps, padded = torch.stack([end - begin != count, count != extent]).any(-1).tolist()
    return _Keys(begin, end, gaps, padded)


def _plan(kind: str, windowed: bool, *rows: Tensor) -> Tensor:
    assert len(rows) == _ROWS[kind]
    plan = torch.stack(rows).to(torch.int32)
    return plan.expand(1, 2 if windowed else 1, *plan.shape)


def _packed_plan(sequence_ids: Tensor, windowed: bool) -> Tensor:
    starts = sequence_ids != sequence_ids.roll(1, dims=-1)
    starts[:, 0] = True
    cu_seqlens = pad(starts.flatten().nonzero().flatten(), (0, 1), value=sequence_ids.numel())
    return _plan("packed", windowed, cu_seqlens, cu_seqlens)


def _padded_plan(
    keys: _Keys, q_length: int, kv_length: int, extent: int | Tensor, windowed: bool
) -> Tensor:
    """Each row of the batch as three packed sequences: padding, tokens, padding.

    The two of padding have no keys, so their queries come back as zeros. The plan's four rows:
    starts in q; starts in k, counted from the start of the batch row; the batch row; keys in use.
    """
    batch = torch.arange(len(keys.begin), device=keys.begin.device)
    first_query = extent - q_length  # the slot of its key
    zero = torch.zeros_like(batch)
    begin_k, end_k = keys.begin, keys.end
    begin_q = (begin_k - first_query).clamp(0, q_length)
    end_q = (end_k - first_query).clamp(0, q_length)

    start_q = torch.stack([zero, begin_q, end_q], -1) + batch[:, None] * q_length
    start_k = torch.stack([zero, begin_k, end_k], -1)
    used = torch.stack([zero, end_k - begin_k, zero], -1)
    closing = len(batch) * q_length, kv_length, len(batch) - 1, 0
    rows = start_q, start_k, batch[:, None].expand(-1, 3), used
    columns = [
        pad(row.flatten(), (0, 1), value=last) for row, last in zip(rows, closing, strict=True)
    ]
    return _plan("padded", windowed, *columns)
