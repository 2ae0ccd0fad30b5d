"""The keywords of `flash_fwd` and `flash_fwd_splitkv` as types, which their overloads share."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class ScoreOptions(TypedDict, total=False):
    """What both take, but for ``return_lse``, which decides what is returned, and lengths."""

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    out: Tensor | None


class CommonOptions(ScoreOptions, total=False):
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None


class FwdOptions(CommonOptions, total=False):
    cu_seqlens_k: Tensor | None
    max_seqlen_k: int | None
    seqused_k: Tensor | None


class SplitkvOptions(CommonOptions, total=False):
    """Without ``cache_seqlens``, which must be given."""

    block_table: Tensor | None
    k_new: Tensor | None
    v_new: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    num_splits: int
    split_size: int | None
