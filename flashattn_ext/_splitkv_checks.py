"""The checks of `flash_fwd_splitkv`, on metadata only. See _checks.py for how they work."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _append_checks, _lengths
from ._operand_checks import (
    check_32_bits,
    check_key_heads,
    check_lse_out,
    check_queries,
    check_score_tensors,
    check_storage,
    check_tensors,
    forward_ad_active,
    refuse_gradients,
)
from ._rotary_checks import check_positions, check_rotary, rotated_queries
from ._score_checks import (
    MAX_ROWS,
    NO_BOUND,
    check_bound,
    check_score,
    is_int,
)
from ._tensor_checks import (
    check_lengths,
    check_metadata,
    check_out,
    check_written,
    dtype_name,
    require_tensor,
)

_NAME = "flash_fwd_splitkv"
_MAX_SPLITS = 256
_MAX_FIXED_SPLITS = 65535  # what one dimension of a grid holds
_SPLIT_GRANULE = 64


def check_call(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: int | Tensor,
    block_table: Tensor | None, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None,
    k_new: Tensor | None, v_new: Tensor | None, cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None, rotary_cos: Tensor | None, rotary_sin: Tensor | None,
    rotary_interleaved: bool, softmax_scale: float | None, causal: bool,
    window_size: Sequence[int], softcap: float, alibi_slopes: Tensor | None, sinks: Tensor | None,
    num_splits: int, split_size: int | None, out: Tensor | None,
) -> tuple[float | None, int, int, float, int, int]:  # fmt: skip
    """Returns (scale, left, right, softcap, bound_q, split_size) as the operators take them."""
    check_tensors(q, k_cache, v_cache, "k_cache", "v_cache")
    if q.requires_grad or k_cache.requires_grad or v_cache.requires_grad or forward_ad_active():
        refuse_gradients(_NAME, q=q, k_cache=k_cache, v_cache=v_cache)
    lengths = cache_seqlens if isinstance(cache_seqlens, Tensor) else None
    batch, capacity = _check_cache(
        q, k_cache, v_cache, lengths, block_table, cu_seqlens_q, cache_batch_idx, cache_leftpad
    )
    bound_q = _check_bound_q(cu_seqlens_q, max_seqlen_q)
    score = check_score(softmax_scale, causal, window_size, softcap)
    new_tokens, positions = 0, None
    if k_new is not None or v_new is not None:
        new_tokens = _check_new_tokens(q, k_cache, v_cache, batch, k_new, v_new)
        refuse_gradients(_NAME, k_new=k_new, v_new=v_new)
    if alibi_slopes is not None or sinks is not None:
        check_score_tensors(q, batch, alibi_slopes, sinks)
        refuse_gradients(_NAME, alibi_slopes=alibi_slopes, sinks=sinks)
    if rotary_cos is not None or rotary_sin is not None or rotary_interleaved is not True:
        positions = check_rotary(q, k_new, rotary_cos, rotary_sin, rotary_interleaved)
        refuse_gradients(_NAME, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if out is not None:
        check_out(
            out, q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens,
            block_table=block_table, cu_seqlens_q=cu_seqlens_q, k_new=k_new, v_new=v_new,
            cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, alibi_slopes=alibi_slopes, sinks=sinks,
        )  # fmt: skip
        refuse_gradients(_NAME, out=out)
    if lengths is None:
        length = _check_length(cache_seqlens, capacity, new_tokens)
        if positions is not None:
            queries = 0 if cu_seqlens_q is not None else rotated_queries(q.shape[1], *score[1:3])
            check_positions("cache_seqlens", length, new_tokens, queries, positions)
    split_size = _check_splits(num_splits, split_size, capacity)
    if _lengths.wanted(q):
        places = _lengths.check_cache(
            q, k_cache, cache_seqlens, block_table, cu_seqlens_q, bound_q, new_tokens,
            cache_batch_idx, cache_leftpad, positions, *score[1:3],
        )  # fmt: skip
        if new_tokens and k_new is not None and v_new is not None:
            paged = block_table is not None
            _append_checks.check(q, k_cache, v_cache, k_new, v_new, paged, places)
    return score + (bound_q, split_size)


def plain_numbers(
    cache_seqlens: int | Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None,
    k_new: Tensor | None, v_new: Tensor | None, rotary_cos: Tensor | None,
    rotary_sin: Tensor | None, rotary_interleaved: bool, softmax_scale: float | None, causal: bool,
    window_size: Sequence[int], softcap: float, num_splits: int, split_size: int | None,
) -> tuple[float | None, int, int, float, int, int] | None:  # fmt: skip
    """What check_call returns, where an operator can do the rest of its work (_plain.py)."""
    if type(num_splits) is not int or split_size is not None:
        return None
    if (k_new is None) is not (v_new is None):
        return None
    if rotary_cos is not None or rotary_sin is not None or rotary_interleaved is not True:
        if k_new is None or rotary_cos is None or type(rotary_interleaved) is not bool:
            return None
    # An int and new tokens: the operator does not add them up for a batch of 0.
    if not isinstance(cache_seqlens, Tensor) and (
        type(cache_seqlens) is not int or k_new is not None
    ):
        return None
    bound_q = NO_BOUND
    try:
        if cu_seqlens_q is not None or max_seqlen_q is not None:
            bound_q = _check_bound_q(cu_seqlens_q, max_seqlen_q)
        return check_score(softmax_scale, causal, window_size, softcap) + (bound_q, 0)
    except Exception:
        return None  # check_call says what is wrong, in its order


def _check_bound_q(cu_seqlens_q: Tensor | None, max_seqlen_q: int | None) -> int:
    if cu_seqlens_q is not None:
        return check_bound("max_seqlen_q", max_seqlen_q)
    if max_seqlen_q is not None:
        raise ValueError("max_seqlen_q: only for packed queries, which need cu_seqlens_q too")
    return NO_BOUND


def check_op(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None,
    block_table: Tensor | None, window_right: int = -1, softmax_scale: float | None = None,
    window_left: int = -1, cu_seqlens_q: Tensor | None = None, max_seqlen_q: int = NO_BOUND,
    cache_seqlen: int = 0, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, num_splits: int = 0, split_size: int = 0,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, *,
    append: Sequence[Any] | None = None, out: Tensor | None = None, lse: Tensor | None = None,
) -> None:  # fmt: skip
    """The same for the operators; ``append`` is what those with new tokens have before the rest."""
    check_tensors(q, k_cache, v_cache, "k_cache", "v_cache")
    check_32_bits(q=q, k_cache=k_cache, v_cache=v_cache)
    batch, capacity = _check_cache(
        q, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens_q, cache_batch_idx,
        cache_leftpad,
    )  # fmt: skip
    new_tokens, positions = 0, None
    if append is not None:
        k_new, v_new, rotary_cos, rotary_sin, interleaved = append
        new_tokens = _check_new_tokens(q, k_cache, v_cache, batch, k_new, v_new)
        if rotary_cos is not None or rotary_sin is not None:
            positions = check_rotary(q, k_new, rotary_cos, rotary_sin, interleaved)
    check_score_tensors(q, batch, alibi_slopes, sinks)
    if out is not None:
        check_out(out, q)
    if cache_seqlens is None:
        _check_length(cache_seqlen, capacity, new_tokens)
        if positions is not None:
            packed = cu_seqlens_q is not None
            queries = 0 if packed else rotated_queries(q.shape[1], window_left, window_right)
            check_positions("cache_seqlens", cache_seqlen, new_tokens, queries, positions)
    check_score(softmax_scale, False, (window_left, window_right), softcap)
    _check_splits(num_splits, split_size or None, capacity)
    if lse is not None:
        check_lse_out(q, lse)


def _check_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None,
    block_table: Tensor | None, cu_seqlens_q: Tensor | None, cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
) -> tuple[int, int]:  # fmt: skip
    """Queries, cache and the metadata that finds a sequence in it. Returns (batch, capacity)."""
    shape, device = q.shape, q.device
    head_dim = check_queries(shape, cu_seqlens_q is not None)
    if head_dim % 8:
        raise NotImplementedError(
            f"q: expected a head dim that is a multiple of 8, got {head_dim}: a cache is never "
            "copied to pad it, so allocate it with a padded head dim of zeros (softmax_scale "
            "stays that of the unpadded one)"
        )
    cache_shape = k_cache.shape
    if len(cache_shape) != 4 or cache_shape[3] != head_dim:
        dims = "(rows, capacity, hk, d)" if block_table is None else "(pages, page, hk, d)"
        raise ValueError(
            f"k_cache: expected {dims} with head dim {head_dim} like q, "
            f"got shape {tuple(cache_shape)}"
        )
    if v_cache.shape != cache_shape:
        raise ValueError(
            f"v_cache: expected shape {tuple(cache_shape)} like k_cache, got {tuple(v_cache.shape)}"
        )
    check_key_heads(shape[-2], cache_shape, "k_cache")
    check_storage(q, k_cache, v_cache, head_dim, "k_cache", "v_cache")

    batch = shape[0]
    if cu_seqlens_q is not None:
        check_metadata("cu_seqlens_q", cu_seqlens_q, device)
        batch = cu_seqlens_q.shape[0] - 1
        if batch < 0:
            raise ValueError("cu_seqlens_q: expected batch + 1 entries, got none")
    if cache_seqlens is not None:
        check_lengths("cache_seqlens", cache_seqlens, batch, device)
    if cache_leftpad is not None:
        check_lengths("cache_leftpad", cache_leftpad, batch, device)
    if cache_batch_idx is not None:
        check_lengths("cache_batch_idx", cache_batch_idx, batch, device)
    return batch, _check_capacity(q, k_cache, block_table, batch, cache_batch_idx)


def _check_capacity(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, batch: int,
    cache_batch_idx: Tensor | None,
) -> int:  # fmt: skip
    rows, capacity = k_cache.shape[:2]
    if block_table is None:
        if cache_batch_idx is None and rows < batch:
            raise ValueError(
                f"k_cache: expected a row for each of {batch} sequences (or cache_batch_idx), "
                f"got shape {tuple(k_cache.shape)}"
            )
    else:
        if cache_batch_idx is not None:
            raise ValueError(
                "cache_batch_idx: only for a contiguous cache, got block_table too: select the "
                "rows of block_table instead"
            )
        _check_block_table(block_table, batch, q.device)
        if capacity < 1:
            raise ValueError(
                f"k_cache: expected pages of at least 1 token, got shape {tuple(k_cache.shape)}"
            )
        capacity = block_table.shape[1] * capacity
    if capacity > MAX_ROWS:
        raise ValueError(
            f"{'k_cache' if block_table is None else 'block_table'}: expected a capacity of at "
            f"most 2**30 tokens, got {capacity}"
        )
    return capacity


def _check_block_table(block_table: Tensor, batch: int, device: torch.device) -> None:
    require_tensor("block_table", block_table)
    shape = block_table.shape
    if block_table.dtype is not torch.int32 or len(shape) != 2 or shape[0] != batch:
        raise ValueError(
            f"block_table: expected int32 ({batch}, pages of a sequence), got "
            f"{dtype_name(block_table.dtype)} with shape {tuple(shape)}"
        )
    if block_table.device != device:
        raise ValueError(f"block_table: expected device {device} like q, got {block_table.device}")
    if block_table.stride(1) != 1 and shape[1] > 1:
        raise ValueError(
            f"block_table: expected stride 1 in the last dim, got {tuple(block_table.stride())}"
        )


def _check_new_tokens(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: int, k_new: Tensor | None,
    v_new: Tensor | None,
) -> int:  # fmt: skip
    """What gets appended, and that the cache can be written. Returns the number of new tokens."""
    k_new, v_new = require_tensor("k_new", k_new), require_tensor("v_new", v_new)
    shape, cache_shape = k_new.shape, k_cache.shape
    if (
        len(shape) != 4
        or shape[0] != batch
        or shape[2] != cache_shape[2]
        or shape[3] != cache_shape[3]
    ):
        raise ValueError(
            f"k_new: expected shape ({batch}, s_new, {cache_shape[2]}, {cache_shape[3]}), "
            f"got {tuple(shape)}"
        )
    if v_new.shape != shape:
        raise ValueError(
            f"v_new: expected shape {tuple(shape)} like k_new, got {tuple(v_new.shape)}"
        )
    check_storage(q, k_new, v_new, shape[3], "k_new", "v_new")
    check_written("k_cache", k_cache, v_cache=v_cache)
    check_written("v_cache", v_cache)
    return shape[1]


def _check_length(length: object, capacity: int, new_tokens: int) -> int:
    """A length that the host knows, which is returned."""
    if not is_int(length):
        got = "None" if length is None else repr(length)
        raise ValueError(f"cache_seqlens: expected an int or an int32 tensor, got {got}")
    if length < 0 or length + new_tokens > capacity:
        new = f" - {new_tokens} new tokens" if new_tokens else ""
        raise ValueError(
            f"cache_seqlens: expected 0 to {capacity - new_tokens} (capacity {capacity}{new}), "
            f"got {length}"
        )
    return length


def _check_splits(num_splits: int, split_size: int | None, capacity: int) -> int:
    """Returns split_size as the operators take it, 0 when absent."""
    if not is_int(num_splits) or not 0 <= num_splits <= _MAX_SPLITS:
        raise ValueError(f"num_splits: expected 0 (automatic) to {_MAX_SPLITS}, got {num_splits!r}")
    if split_size is None:
        return 0
    if not is_int(split_size) or split_size <= 0 or split_size % _SPLIT_GRANULE:
        raise ValueError(
            f"split_size: expected None or a positive multiple of {_SPLIT_GRANULE}, "
            f"got {split_size!r}"
        )
    if capacity > split_size * _MAX_FIXED_SPLITS:
        raise ValueError(
            f"split_size: expected at most {_MAX_FIXED_SPLITS} splits of a capacity of {capacity}, "
            f"got {split_size}"
        )
    if num_splits > 0:
        raise ValueError(
            f"split_size: expected None with num_splits = {num_splits}, got {split_size}: one of "
            "the two decides"
        )
    return split_size if split_size <= MAX_ROWS else MAX_ROWS  # then there is one split
