"""`flash_fwd_splitkv`. Every check of its arguments is in _splitkv_checks.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _ops, _plain, _splitkv_checks
from ._operand_checks import lse_shape
from ._score_checks import OPEN_WINDOW, check_flag, is_plain_bound

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import SplitkvOptions


@overload
def flash_fwd_splitkv(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: int | Tensor,
    return_lse: Literal[False] = False, **options: Unpack[SplitkvOptions],
) -> Tensor: ...  # fmt: skip
@overload
def flash_fwd_splitkv(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: int | Tensor,
    return_lse: Literal[True], **options: Unpack[SplitkvOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_fwd_splitkv(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: int | Tensor, return_lse: bool,
    **options: Unpack[SplitkvOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_fwd_splitkv(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: int | Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    split_size: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few or many queries over a cache of keys and values: decode, chunks of a
    prompt, and batches of both.

    The keys of a sequence are shared out over the device in splits, whose results are merged by
    their log-sum-exp (Flash-Decoding: Dao, Haziza, Massa, Sizov 2023). What attention means is
    said at `flash_fwd`, with ``sk`` the tokens that a sequence has in the cache: `flash_fwd` over
    exactly those keys gives the same result.

    For ``b`` sequences, ``h`` query heads, ``hk`` key/value heads and head dim ``d`` (a multiple of
    8 up to 256: a cache is never copied to pad it):

    * queries: dense ``q (b, sq, h, d)``, or packed ``q (Tq, h, d)`` with `cu_seqlens_q`;
    * contiguous cache: ``k_cache`` and ``v_cache (rows, capacity, hk, d)``;
    * pages: ``k_cache`` and ``v_cache (pages, page, hk, d)`` with `block_table`; any ``page >= 1``.
      Token ``j`` of sequence ``n`` is slot ``j % page`` of page ``block_table[n, j // page]``.

    All have one dtype: float16 or bfloat16, on the CPU also float32. The last dim must have stride
    1, data and the other strides must be multiples of 16 bytes; apart from that any strides work
    without a copy, and those of ``k_cache`` and ``v_cache`` may differ.

    Args:
        q, k_cache, v_cache: queries, cached keys, cached values.
        cache_seqlens: int32 ``(b,)``, or an int for all: tokens in the cache, without new ones.
        block_table: int32 ``(b, columns)``, last stride 1: page ids. Entries behind the tokens in
            use are never read. Pages may be shared, also between sequences, but a page that new
            tokens go to must have one entry in use only.
        cu_seqlens_q: int32 ``(b + 1,)``, packed queries only: the queries of sequence ``n`` are
            rows ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n + 1] - 1``; starts with 0.
        max_seqlen_q: int, packed queries only: an upper bound of their lengths. The tighter, the
            faster; the result does not depend on it, but for rounding, unless `num_splits` is 1 or
            `split_size` is given.
        k_new, v_new: ``(b, s_new, hk, d)``: written into the cache, in place, as tokens
            ``cache_seqlens`` to ``cache_seqlens + s_new - 1``, and then attended to.
            `cache_seqlens` itself is left as it is. They and ``q`` must not overlap the places that
            they are written to.
        cache_batch_idx: int32 ``(b,)``, contiguous cache only: the cache row of each sequence
            (default: row ``n`` for sequence ``n``). With new tokens, a row may be named once.
        cache_leftpad: int32 ``(b,)``: tokens 0 to ``cache_leftpad - 1`` do not exist, so
            ``sk = cache_seqlens - cache_leftpad + s_new``.
        rotary_cos, rotary_sin: ``(positions, rotary_dim / 2)``, contiguous, q's dtype; with new
            tokens only, ``rotary_dim`` a multiple of 16 up to ``d``. Rotates the first
            ``rotary_dim`` elements of the new keys and of the queries (RoFormer, arXiv:2104.09864,
            section 3.2): new key ``t`` by position ``cache_seqlens + t``; query ``i`` by
            ``cache_seqlens + i`` if causal or windowed, otherwise by ``cache_seqlens``. ``q`` and
            ``k_new`` themselves are left as they are.
        rotary_interleaved: rotate elements ``(2 t, 2 t + 1)``; otherwise
            ``(t, t + rotary_dim / 2)``.
        softmax_scale, causal, window_size, softcap, alibi_slopes, sinks: as in `flash_fwd`.
        num_splits: 0 chooses; 1 does not split; at most 256. More than there are keys for is legal.
        split_size: tokens, a multiple of 64: splits of this fixed size instead of `num_splits`.
            With it, and with ``num_splits=1``, the bits of a sequence's result depend neither on
            the rest of the batch nor on the capacity or the pages.
        out: written instead of a new tensor: shape, dtype and device of q, not overlapping an
            input. Packed: rows from ``cu_seqlens_q[-1]`` on are left as they are.
        return_lse: also return the natural logarithm of each softmax's denominator.

    Returns:
        ``out``, shaped like q and contiguous (or the given tensor); with ``return_lse`` the tuple
        ``(out, lse)`` with float32 ``lse (b, h, sq)``, packed ``(h, Tq)``. A query that sees no key
        has ``out`` 0 and ``lse`` -inf, or its sink. Packed: rows from ``cu_seqlens_q[-1]`` on of
        what the call allocates are unspecified.

    Raises:
        ValueError: an argument does not fit; the message names it, what it got, what is allowed.
            So does an int `cache_seqlens` that with the new tokens is beyond the capacity or the
            rotary tables.
        NotImplementedError: meaningful, but not served by this version, build or device: gradients
            (call under ``torch.no_grad()``), dtypes, other head dims, a GPU not covered.
        RuntimeError: the compiled library is missing or does not load, or a launch failed.

    Workspace: a call holds, while it runs, float32 parts of the result, for ``rows = b * sq * h``
    (packed: ``Tq * h``)

    * given splits: ``splits * rows * (d + 1) * 4`` bytes, where ``splits`` is `num_splits` or
      ``ceil(capacity / split_size)``; nothing when that is 1;
    * automatic splits on a GPU of ``P`` multiprocessors, whatever the batch and the capacity:
      ``2 * S * m * (d + 1) * 4`` bytes for sequences of few queries, by ``S`` thread blocks (``P``
      to ``3 * P``) with tiles of ``m`` rows (16 or 32), and at most
      ``8 / 3 * P * n * (d + 1) * 4`` bytes where there are chunks, with tiles of ``n`` rows (128;
      64 for ``d > 160``), besides less than 100 bytes a tile. At ``d = 128`` on an H200: 4 MB (9 MB
      with 32 rows) and at most 23 MB;
    * automatic splits on the CPU: as with given ones, at most 256 MiB;
    * with rotary tables, ``rows * d`` elements of q's dtype more, for the rotated queries.

    Runs on the device of q, on that device's current stream, and never waits for it: lengths,
    tables and indices stay on the device. There, values out of range are clamped: a token past the
    capacity, in a cache row or in a page that does not exist is no key, and is never written. A
    captured CUDA graph is right for later values of all of them. With ``FLASHATTN_EXT_CHECK=1`` in
    the environment they are read on the host first and bad values raise a ValueError with row and
    value, as do new tokens for a page, cache row or input that is in use beside them (this waits
    for the device, except while a CUDA graph is captured, which it leaves out).
    """
    # What serving needs most often: few arguments, each of which costs time (docs/tuning.md).
    if (
        not is_dynamo_compiling() and type(cache_seqlens) is Tensor
        and k_new is v_new is cache_batch_idx is cache_leftpad is rotary_cos is rotary_sin is None
        and rotary_interleaved is True and softmax_scale is None
        and (causal is True or causal is False) and window_size is OPEN_WINDOW
        and type(softcap) is float and softcap == 0.0 and alibi_slopes is sinks is None
        and type(num_splits) is int and num_splits == 0 and split_size is None
        and out is None and return_lse is False and _plain.is_plain(q, k_cache, v_cache)
        and (max_seqlen_q is None if cu_seqlens_q is None else is_plain_bound(max_seqlen_q))
    ):  # fmt: skip
        basic, right = _plain.entry(_ops.fwd_splitkv_basic), 0 if causal else -1
        attended: Tensor
        try:
            if cu_seqlens_q is None:
                attended = basic(q, k_cache, v_cache, cache_seqlens, block_table, right)
            else:
                attended = basic(
                    q, k_cache, v_cache, cache_seqlens, block_table, right, cu_seqlens_q,
                    max_seqlen_q,
                )  # fmt: skip
            return attended
        except Exception:
            _plain.explain(_splitkv_checks.check_call, locals())
            raise
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    numbers = None
    if _plain.is_plain(
        q, k_cache, v_cache, k_new, v_new, rotary_cos, rotary_sin, alibi_slopes, sinks, out
    ):
        numbers = _splitkv_checks.plain_numbers(
            cache_seqlens, cu_seqlens_q, max_seqlen_q, k_new, v_new, rotary_cos, rotary_sin,
            rotary_interleaved, softmax_scale, causal, window_size, softcap, num_splits, split_size,
        )  # fmt: skip
    plain = numbers is not None
    scale, left, right, cap, bound_q, size = numbers or _splitkv_checks.check_call(
        q, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens_q, max_seqlen_q, k_new, v_new,
        cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, rotary_interleaved, softmax_scale,
        causal, window_size, softcap, alibi_slopes, sinks, num_splits, split_size, out,
    )  # fmt: skip
    lengths: Tensor | None = None
    length = 0
    if isinstance(cache_seqlens, Tensor):
        lengths = cache_seqlens
    elif is_dynamo_compiling():  # as an int, it would be baked into the graph
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        lengths = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    else:
        length = int(cache_seqlens)

    # Every argument costs time. What the operator would have as its default is left out.
    more = (
        cache_batch_idx is not None or cache_leftpad is not None or num_splits != 0 or size != 0
        or cap != 0.0 or alibi_slopes is not None or sinks is not None
    )  # fmt: skip
    lengths_too = more or cu_seqlens_q is not None or length != 0
    arguments: tuple[Any, ...] = (q, k_cache, v_cache, lengths, block_table)
    if lengths_too or left != -1:
        arguments += (right, scale, left)
    elif scale is not None:
        arguments += (right, scale)
    elif right != -1:
        arguments += (right,)
    if lengths_too:
        arguments += (cu_seqlens_q, bound_q, length)
    if more:
        arguments += (cache_batch_idx, cache_leftpad, num_splits, size, cap, alibi_slopes, sinks)

    if k_new is not None:
        arguments = (k_new, v_new, rotary_cos, rotary_sin, rotary_interleaved, *arguments)
    try:
        if out is None:
            if return_lse:
                operator = _ops.fwd_splitkv_lse if k_new is None else _ops.fwd_splitkv_append_lse
            else:
                operator = _ops.fwd_splitkv if k_new is None else _ops.fwd_splitkv_append
            if plain:
                operator = _plain.entry(operator)
            results: Tensor | tuple[Tensor, Tensor] = operator(*arguments)
            return results
        lse: Any = None
        if return_lse:
            lse = torch.empty(lse_shape(q), dtype=torch.float32, device=q.device)
        operator = _ops.fwd_splitkv_out if k_new is None else _ops.fwd_splitkv_append_out
        operator(out, lse, *arguments)
        return (out, lse) if return_lse else out
    except Exception:
        if plain:
            _plain.explain(_splitkv_checks.check_call, locals())
        raise
