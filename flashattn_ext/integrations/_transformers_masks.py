"""Once per forward pass of a transformers model: what padding and caches mean for `flash_fwd`."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad

OLDEST = "5.17"  # before, masks of preallocated caches are described in other ways
OTHER_VERSION = (
    f"flashattn_ext needs transformers {OLDEST} or newer, found {transformers.__version__}"
)
try:
    from transformers import masking_utils as masking_utils
except ImportError as error:
    raise ImportError(OTHER_VERSION) from error

# What `attention_mask_for` returns where lengths say it all. It has 4 dims, since transformers
# takes such a mask for finished and hands it on, and is int32, which no other mask is:
# (c, 1 + w, rows, n), where c is 1 for a causal pattern and 2 for one of both directions, and w is
# the window to apply, 0 for none. Sizes say this because a layer can read them without waiting.
# By rows:
#   prefix: keys in use of each sequence of a dense batch;
#   packed: cu_seqlens_q, cu_seqlens_k;
#   padded: see `_padded_plan`.
_ROWS = {"prefix": 1, "packed": 2, "padded": 4}
_KINDS = {rows: kind for kind, rows in _ROWS.items()}


class Plan(NamedTuple):
    """What the shape of a plan says."""

    kind: str
    causal: bool
    window_size: tuple[int, int]  # as flash_fwd takes it


def read_plan(plan: Tensor, batch: int) -> Plan:
    """Raises ValueError for a mask that is none of the plans above."""
    kind = _KINDS.get(plan.shape[2]) if plan.dim() == 4 else None
    columns = {"prefix": batch, "packed": plan.shape[-1], "padded": 3 * batch + 1}
    if kind is None or plan.shape[-1] != columns[kind] or not 1 <= plan.shape[0] <= 2:
        raise ValueError(
            f"attention_mask: expected a bool or floating-point mask, got {plan.dtype} with shape "
            f"{tuple(plan.shape)} for batch {batch}"
        )
    causal, reach = plan.shape[0] == 1, plan.shape[1] - 2
    return Plan(kind, causal, (reach, 0 if causal else reach))


class _Pattern(NamedTuple):
    """A pattern that flash_fwd can run."""

    causal: bool = True
    window: int | None = None  # keys that a query sees on its left, its own included
    sequence_ids: Tensor | None = None  # (b, s): packed sequences, numbered within a row

    def window_among(self, kv_length: int) -> int:
        """0 where the window hides none of so many keys."""
        if self.window is None:
            return 0
        # Layers without a plan apply their own window. In both directions that of some models is
        # one key smaller than that of the mask, which counts.
        own = self.window if self.causal else self.window - 1
        return self.window if kv_length > own else 0


def _code(factory: str, *arguments: object) -> CodeType | None:
    """The code object of the closures that a factory of transformers makes; versions differ in
    which factories they have, and without one no mask has its code."""
    make = getattr(masking_utils, factory, None)
    code: CodeType | None = make(*arguments).__code__ if make is not None else None
    return code


# transformers describes patterns by nested closures; their code objects tell which is which.
_AND = _code("and_masks", masking_utils.causal_mask_function)
_SLIDING = _code("sliding_window_overlay", 1)
_SLIDING_BOTH_WAYS = _code("sliding_window_bidirectional_overlay", 1)
_REMAPPED = _code("remap_positions_for_packed_sequence", None, None)
_PACKED = _code("packed_sequence_mask_function", None)


def _read_pattern(mask_function: Callable[..., Any]) -> _Pattern | None:
    """What transformers' mask function says, or None for what is not known to be servable."""
    if mask_function is masking_utils.causal_mask_function:
        return _Pattern()
    if mask_function is masking_utils.bidirectional_mask_function:
        return _Pattern(causal=False)
    if not _made_by(mask_function, _AND):
        return None
    parts = _captured(mask_function, "mask_functions")
    if len(parts) != 2:
        return None
    first, second = parts
    if _made_by(first, _SLIDING) and second is masking_utils.causal_mask_function:
        return _Pattern(window=_captured(first, "sliding_window"))
    if _made_by(first, _SLIDING_BOTH_WAYS) and second is masking_utils.bidirectional_mask_function:
        return _Pattern(causal=False, window=_captured(first, "sliding_window") + 1)
    if _made_by(second, _PACKED):
        # Some versions count positions from the start of each sequence, some from that of the row:
        # within a sequence, a causal pattern and its window say the same of both.
        remapped = _made_by(first, _REMAPPED)
        pattern = _read_pattern(_captured(first, "mask_function") if remapped else first)
        if pattern is not None and pattern.sequence_ids is None:
            return pattern._replace(sequence_ids=_captured(second, "packed_sequence_mask"))
    return None


def _made_by(function: Callable[..., Any], code: CodeType | None) -> bool:
    return code is not None and getattr(function, "__code__", None) is code


def _captured(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def attention_mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask function: what `attention_forward` gets as attention_mask in every layer."""

    def exact() -> Tensor | None:
        return masking_utils.sdpa_mask(
            batch_size, q_length, kv_length,
            q_offset,  # type: ignore[arg-type]  # a tensor where the cache is preallocated
            kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device, **kwargs,
        )  # fmt: skip

    pattern = _read_pattern(mask_function)
    if pattern is None:
        return exact()
    sequence_ids = pattern.sequence_ids
    if (sequence_ids is not None or attention_mask is not None) and torch.compiler.is_compiling():
        return exact()
    window = pattern.window_among(kv_length)
    sizes = (1 if pattern.causal else 2, 1 + window)
    if sequence_ids is not None:
        whole_rows = sequence_ids.shape == (batch_size, q_length) and kv_length == q_length
        if attention_mask is not None or not whole_rows:
            return exact()
        return _packed_plan(sequence_ids, sizes)
    everything = not pattern.causal and not window  # every query sees every key
    extent = kv_length if everything else q_offset + q_length - kv_offset
    # False asks for a mask that will be edited, except in single steps of preallocated caches.
    skip = allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip
    if not skip and not (q_length == 1 and _is_preallocated(pattern, extent, kv_length)):
        return exact()
    if not _can_be_lengths(pattern, extent, kv_length):
        return exact()
    if attention_mask is not None:
        keys = _keys_in_use(attention_mask, kv_offset, kv_length, extent)
        if keys.gaps:
            return exact()
        if keys.padded:
            first_query = None if everything else extent - q_length
            return _padded_plan(keys, q_length, kv_length, first_query, sizes)
    if not isinstance(extent, int):
        lengths = extent.to(device, torch.int32).reshape(1).repeat(batch_size)
    elif extent == kv_length and not window:
        return None
    else:
        lengths = torch.full((batch_size,), extent, dtype=torch.int32, device=device)
    return _plan("prefix", sizes, lengths)


def _is_preallocated(pattern: _Pattern, extent: int | Tensor, kv_length: int) -> bool:
    if not pattern.causal:
        return False
    return pattern.window is not None or isinstance(extent, Tensor) or extent < kv_length


def _can_be_lengths(pattern: _Pattern, extent: int | Tensor, kv_length: int) -> bool:
    """Whether the first `extent` keys are those that exist, and the last query sees the last one.

    Later slots of a preallocated cache do not exist. A window in both directions would see them.
    """
    if isinstance(extent, Tensor):
        return pattern.causal
    return extent <= kv_length if pattern.causal else extent == kv_length


class _Keys(NamedTuple):
    """Key slots [begin, end) of each row of the batch."""

    begin: Tensor
    end: Tensor
    gaps: bool  # in some row not every slot of the range is in use
    padded: bool  # in some row a slot below the extent is not in use


def _keys_in_use(mask: Tensor, kv_offset: int, kv_length: int, extent: int | Tensor) -> _Keys:
    """Reads a padding mask. The one place that waits for the device, once per forward pass."""
    if isinstance(extent, int) and mask.shape[-1] < extent + kv_offset:
        raise ValueError(
            f"attention_mask: expected a column for each of {extent + kv_offset} cached and "
            f"new tokens, got shape {tuple(mask.shape)}"
        )
    slots = torch.arange(kv_length, device=mask.device)
    padding = mask[:, kv_offset : kv_offset + kv_length]
    padding = pad(padding, (0, kv_length - padding.shape[-1]))
    used = padding.bool() & (slots < extent)
    end = torch.where(used, slots + 1, 0).amax(-1)
    begin = torch.minimum(torch.where(used, slots, kv_length).amin(-1), end)
    count = used.sum(-1)
    gaps, padded = torch.stack([end - begin != count, count != extent]).any(-1).tolist()
    return _Keys(begin, end, gaps, padded)


def _plan(kind: str, sizes: tuple[int, int], *rows: Tensor) -> Tensor:
    assert len(rows) == _ROWS[kind]
    plan = torch.stack(rows).to(torch.int32)
    return plan.expand(*sizes, *plan.shape)


def _packed_plan(sequence_ids: Tensor, sizes: tuple[int, int]) -> Tensor:
    starts = sequence_ids != sequence_ids.roll(1, dims=-1)
    starts[:, 0] = True
    cu_seqlens = pad(starts.flatten().nonzero().flatten(), (0, 1), value=sequence_ids.numel())
    return _plan("packed", sizes, cu_seqlens, cu_seqlens)


def _padded_plan(
    keys: _Keys,
    q_length: int,
    kv_length: int,
    first_query: int | Tensor | None,
    sizes: tuple[int, int],
) -> Tensor:
    """Each row of the batch as three packed sequences: padding, tokens, padding.

    first_query is the slot of its key, None where all queries see the tokens. The two sequences of
    padding have no keys, so that their queries come back as zeros. The plan's four rows: starts in
    q; starts in k, counted from the start of the batch row; the batch row; keys in use.
    """
    batch = torch.arange(len(keys.begin), device=keys.begin.device)
    zero = torch.zeros_like(batch)
    begin_k, end_k = keys.begin, keys.end
    if first_query is None:
        begin_q, end_q = zero, zero + q_length
    else:
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
    return _plan("padded", sizes, *columns)
