"""Hugging Face transformers: language models and encoders on `flash_fwd`::

    from flashattn_ext.integrations.transformers import register
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register())

transformers calls two functions: a mask function, once per forward pass, which sees the padding and
the state of the cache, and an attention function, in every layer, which gets what the first one
returned. Ours returns None (every key exists), a small int32 tensor of lengths, or, for patterns
that `flash_fwd` does not have, the exact bool mask. So lengths are worked out once, a padded batch
is described to the kernel by offsets instead of being gathered, and no layer waits for the device.

Served: causal attention and attention in both directions, cross-attention, padding left or right,
grouped heads, dynamic, static and sliding caches, sliding windows, softcap, sinks (`s_aux`),
sequences packed by `position_ids` or by `cu_seq_lens_q/k`. Where causality or a window ties queries
to keys, queries that are padding come back as zeros. Copies: none of keys and values, except values
whose head dim is smaller than the keys', and those of a padded batch in memory that has no common
row stride (no cache of transformers); of the queries of a padded batch where a model does not lay
them out (b, s, h, d).

Left to torch SDPA, with a warning: a 4-D mask from the caller, gaps between a sequence's tokens (a
right-padded prompt that is continued), chunked and custom patterns, windows in both directions
beside a cache, and padding inside a compiled graph, which cannot read it (`generate` makes its
masks outside). Together with softcap or sinks, which SDPA lacks, these raise; so do dropout,
gradients, and the options of single models that nothing here serves.

transformers 5.17 and newer (tested: 5.17.0, 5.20.2, 5.24.0); `register` refuses older ones. What a
version describes in a way not known here gets its exact mask, and so SDPA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging

from .. import flash_fwd
from ._transformers_masks import (
    OLDEST,
    OTHER_VERSION,
    attention_mask_for,
    masking_utils,
    read_plan,
)

if TYPE_CHECKING:
    from .._options import ScoreOptions

_MAX_ROWS = 2**30  # of a packed tensor
# Options of single models that change the result and that flash_fwd does not have.
_REFUSED = (
    "position_bias", "output_attentions", "head_mask", "indices", "block_indices", "sinks",
    "block_table",
)  # fmt: skip

logger = logging.get_logger(__name__)


def register(name: str = "fa_ext") -> str:
    """Makes `attn_implementation=name` known to transformers. Returns the name."""
    if "flash" in name:
        raise ValueError(
            "name: expected one without 'flash' (transformers looks for a package of its own "
            f"behind such names), got {name!r}"
        )
    if Version(transformers.__version__) < Version(OLDEST):
        raise ImportError(OTHER_VERSION)
    AttentionInterface.register(name, attention_forward)
    masking_utils.AttentionMaskInterface.register(name, attention_mask_for)
    return name


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function. query (b, h, sq, d), key and value (b, hk, sk, d); out (b, sq, h, d).

    attention_mask: what `attention_mask_for` returned, or a caller's 4-D mask (for SDPA).
    """
    _refuse(dropout, kwargs)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is not None and attention_mask.dtype != torch.int32:
        _check_for_sdpa(attention_mask, softcap, s_aux)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=causal
        )
    kind, window_size = None, _window(sliding_window, causal)
    if attention_mask is not None:
        kind, causal, window_size = read_plan(attention_mask, len(query))
    options: ScoreOptions = {
        "softmax_scale": scaling,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim < head_dim:
        value = pad(value, (0, head_dim - value_dim))
    q, k, v = (_rows_first(tensor) for tensor in (query, key, value))

    if kwargs.get("cu_seq_lens_q") is not None:
        out = _packed(q, k, v, kind, kwargs, options)
    elif attention_mask is None:
        out = flash_fwd(q, k, v, **options)
    elif kind == "packed":
        cu_seqlens_q, cu_seqlens_k = attention_mask[0, 0]
        out = _flattened(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    elif kind == "padded":
        out = _padded(q, k, v, attention_mask[0, 0], options)
    else:
        out = flash_fwd(q, k, v, seqused_k=attention_mask[0, 0, 0], **options)
    return out[..., :value_dim], None


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(
            f"dropout: expected 0.0 (there is no training here: call model.eval()), got {dropout}"
        )
    for name in _REFUSED:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(
                f"{name}: not supported by flashattn_ext, use attn_implementation='eager' or 'sdpa'"
            )


def _check_for_sdpa(attention_mask: Tensor, softcap: float | None, s_aux: Tensor | None) -> None:
    if attention_mask.dim() != 4:
        raise ValueError(
            "attention_mask: expected None, a 4-D mask, or what the mask function of register() "
            f"made, got shape {tuple(attention_mask.shape)}"
        )
    for name, option in (("softcap", softcap), ("s_aux", s_aux)):
        if option is not None:
            raise NotImplementedError(
                f"{name}: this call's attention_mask of shape {tuple(attention_mask.shape)} needs "
                f"torch SDPA, which has no {name}: use attn_implementation='eager', and pad "
                "prompts on the left"
            )
    if not torch.compiler.is_compiling():
        logger.warning_once(
            "flashattn_ext leaves a mask that is more than padding, causal or sliding window to "
            "torch SDPA."
        )


def _window(sliding_window: int | None, causal: bool) -> tuple[int, int]:
    """transformers counts the query's own key, flash_fwd does not."""
    if sliding_window is None:
        return (-1, -1)
    return (sliding_window - 1, 0 if causal else sliding_window - 1)


def _rows_first(tensor: Tensor) -> Tensor:
    tensor = tensor.transpose(1, 2)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _padded(q: Tensor, k: Tensor, v: Tensor, plan: Tensor, options: ScoreOptions) -> Tensor:
    """Packed sequences within the batch's own memory."""
    step, k, v = _as_packed(k, v)
    start_q, start_k, batch_row, used = plan
    out = flash_fwd(
        q.flatten(0, 1), k, v,
        cu_seqlens_q=start_q,
        cu_seqlens_k=torch.add(start_k, batch_row, alpha=step),
        seqused_k=used[:-1],
        max_seqlen_q=q.shape[1],
        max_seqlen_k=step,
        **options,
    )  # fmt: skip
    rows: Tensor = out.unflatten(0, q.shape[:2])
    return rows


def _as_packed(k: Tensor, v: Tensor) -> tuple[int, Tensor, Tensor]:
    """(b, s, hk, d) as (rows, hk, d) of the same memory; batch row n starts at row n * step.

    In a cache laid out (b, hk, s, d) a row of the packed view is one of s, so that a batch row is
    hk * s of them away from the next, and the heads are reached by their stride.
    """
    batch, length, heads, head_dim = k.shape
    stride_batch, stride_row = k.stride()[:2]
    step = stride_batch // stride_row if batch > 1 and stride_row else length
    rows = (batch - 1) * step + length
    fits = step >= length and (batch == 1 or step * stride_row == stride_batch)
    if not fits or rows > _MAX_ROWS or k.stride()[:2] != v.stride()[:2]:
        return length, k.flatten(0, 1).contiguous(), v.flatten(0, 1).contiguous()
    k, v = (x.as_strided((rows, heads, head_dim), x.stride()[1:]) for x in (k, v))
    return step, k, v


def _packed(
    q: Tensor, k: Tensor, v: Tensor, kind: str | None, kwargs: dict[str, Any],
    options: ScoreOptions,
) -> Tensor:  # fmt: skip
    """Sequences that the caller packed into one row of the batch."""
    if kind == "padded":
        raise ValueError("cu_seq_lens_q: sequences are packed or padded, got both")
    if kwargs.get("cu_seq_lens_k") is None:
        raise ValueError("cu_seq_lens_k: expected a tensor, as with cu_seq_lens_q, got None")
    if len(q) != 1:
        raise ValueError(f"cu_seq_lens_q: expected one packed row, got batch size {len(q)}")
    cu_q, cu_k = (kwargs[name].to(torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    return _flattened(q, k, v, cu_q, cu_k, options)


def _flattened(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    options: ScoreOptions,
) -> Tensor:  # fmt: skip
    out = flash_fwd(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=q.shape[0] * q.shape[1],
        max_seqlen_k=k.shape[0] * k.shape[1],
        **options,
    )  # fmt: skip
    rows: Tensor = out.unflatten(0, q.shape[:2])
    return rows
