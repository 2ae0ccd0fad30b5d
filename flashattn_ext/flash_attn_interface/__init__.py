"""flash-attn's functions under their own names and signatures, on flashattn_ext.

A program written for flash-attn 2 switches by its import::

    from flashattn_ext.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
    import flashattn_ext.flash_attn_interface as flash_attn

Parameters, their order, their defaults and the shapes of the results are those of flash-attn 2.8;
`flash_attn_combine` is FlashAttention-3's, and `flash_attn_with_kvcache` also takes what
FlashAttention-3 added to it, by keyword. What is not served raises by its name, and ``help`` of
each function lists what differs. What all have in common:

* inference only: an input that requires a gradient, while gradients are recorded, raises;
* a query without a visible key has ``out`` 0 and ``softmax_lse`` -inf (flash-attn 2: +inf;
  FlashAttention-3: -inf too);
* on the CPU they run too, there also in float32.

Imports nothing of flash-attn. docs/migration.md has the tables.
"""

from .combine import flash_attn_combine
from .dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .kvcache import flash_attn_with_kvcache
from .varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
