"""Kernels for torch's attention operators: each serves what it can and leaves the rest to another.

Every function here takes that other kernel, ``rest(keyset, *arguments)``, and returns a kernel with
the operator's signature behind the key set. Layouts and strides of results are those that torch's
shape functions promise, which compiled graphs count on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .. import flash_fwd, flash_fwd_splitkv

if TYPE_CHECKING:
    from .._options import CommonOptions

Kernel = Callable[..., Any]  # what it returns, its operator says


def dense_cpu(rest: Kernel) -> Kernel:
    def kernel(
        keyset: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
        is_causal: bool = False, *, attn_mask: Tensor | None = None, scale: float | None = None,
    ) -> Any:  # fmt: skip
        result = None
        if attn_mask is None:
            result = _dense(query, key, value, dropout_p, is_causal, scale)
        if result is None:
            return rest(
                keyset, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        out, lse = result
        return out, lse.transpose(1, 2).contiguous().transpose(1, 2)

    return kernel


def dense_cuda(rest: Kernel) -> Kernel:
    def kernel(
        keyset: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
        is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        result = None
        if not return_debug_mask:
            result = _dense(query, key, value, dropout_p, is_causal, scale)
        if result is None:
            return rest(
                keyset, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
            )
        return *result, None, None, query.shape[2], key.shape[2], *_no_random_numbers(query)

    return kernel


def packed(rest: Kernel) -> Kernel:
    def kernel(
        keyset: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any
    ) -> Any:
        result = _packed(None, query, key, value, *others, **options)
        if result is None:
            return rest(keyset, query, key, value, *others, **options)
        return *result, *_no_random_numbers(query)

    return kernel


def packed_out(rest: Kernel) -> Kernel:
    def kernel(
        keyset: Any, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        result = _packed(out, query, key, value, *others, **options)
        if result is None:
            return rest(keyset, out, query, key, value, *others, **options)
        return result[1]

    return kernel


def nothing_else(device: str) -> Kernel:
    """Stands in where torch has no kernel of its own."""

    def rest(_keyset: Any, *_arguments: Any, **_options: Any) -> NoReturn:
        raise NotImplementedError(
            f"torch has no packed attention on the {device}, and flashattn_ext serves it without "
            "gradients, dropout and ALiBi only, num_splits with pages, and pages with seqused_k"
        )

    return rest


def _dense(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """(out like query, lse (b, h, sq)) for (b, h, s, d), or None where flash_fwd has none."""
    # torch's causal mask is aligned to the first key, ours to the last.
    if dropout_p or query.dim() != 4 or (is_causal and query.shape[2] != key.shape[2]):
        return None
    if torch.is_grad_enabled() and _any_requires_grad(query, key, value):
        return None
    out = torch.empty_like(query)
    try:
        _, lse = flash_fwd(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            softmax_scale=scale,
            causal=is_causal,
            out=out.transpose(1, 2),
            return_lse=True,
        )
    except (ValueError, NotImplementedError):  # raised before anything runs
        return None
    return out, lse


def _packed(
    out: Tensor | None, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """(out (Tq, h, d), lse (h, Tq)), or None where neither of our functions has the call.

    Dense calls come from torch's own dense kernel, which was chosen with a reason.
    """
    if cum_seq_q is None or dropout_p or return_debug_mask or alibi_slopes is not None:
        return None
    # varlen_attn switches gradients off before it calls the operator that it differentiates.
    if _any_requires_grad(query, key, value):
        return None
    options: CommonOptions = {
        "cu_seqlens_q": cum_seq_q,
        "max_seqlen_q": max_q,
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": (_side(window_size_left), _side(window_size_right)),
        "out": out,
    }
    try:
        if block_table is not None:
            if seqused_k is None:
                return None
            return flash_fwd_splitkv(
                query, key, value,
                cache_seqlens=seqused_k,
                block_table=block_table,
                num_splits=num_splits or 0,
                return_lse=True,
                **options,
            )  # fmt: skip
        if num_splits not in (None, 1):  # flash_fwd never splits
            return None
        return flash_fwd(
            query, key, value,
            cu_seqlens_k=cum_seq_k,
            max_seqlen_k=max_k,
            seqused_k=seqused_k,
            return_lse=True,
            **options,
        )  # fmt: skip
    except (ValueError, NotImplementedError):  # raised before anything runs
        return None


def _any_requires_grad(*tensors: Tensor) -> bool:
    """Asked here because the views that flash_fwd would get, made below autograd, never do."""
    return any(tensor.requires_grad for tensor in tensors)


def _side(window: int | None) -> int:
    return -1 if window is None else window


def _no_random_numbers(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and the debug mask of a call without dropout."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return state, offset, query.new_empty(0)
