"""Sharding of our operators for DTensor (`torch.distributed.tensor`).

    from flashattn_ext.integrations import dtensor
    dtensor.register()
    out = flashattn_ext.flash_fwd(q, k, v, causal=True)  # DTensors on one mesh

A sequence needs no other sequence, and a key/value head with its query heads no other head. So
`flash_fwd` and `flash_fwd_splitkv` run without communication where, on each dim of the mesh, all
tensors are

* replicated; or
* sharded over the batch: `Shard(0)` of all that has a batch dim. Dense queries only; a cache whose
  rows are found by `block_table` or `cache_batch_idx` is replicated; or
* sharded over the heads: q, k, v, ALiBi slopes and sinks, the rest replicated. The mesh dim has to
  divide the key/value heads; a single one is replicated.

Results are placed like q. From other placements DTensor redistributes to the cheapest of these. Not
where new tokens are written into a cache, or a copy would get them: such a call raises.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, combinations
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .. import _ops

_KEYS = "k", "v", "k_cache", "v_cache"
_NEW = "k_new", "v_new"
_OF_BATCH = (
    "q", "seqused_k", "cache_seqlens", "block_table", "cache_batch_idx", "cache_leftpad", *_NEW,
    "out", "lse",
)  # fmt: skip

# Names of tensors and results -> the dim that is sharded. What is not there is replicated.
_Way = dict[str, int]
# Names -> what DTensor knows of a tensor: mesh, placements, shape, ndim.
_Tensors = dict[str, Any]


def register() -> None:
    """Makes `flash_fwd` and `flash_fwd_splitkv` take DTensors. Twice is once.

    All tensors of a call must be DTensors on one mesh, and no gradient may be needed. With `out` a
    call raises NotImplementedError.

    Raises:
        RuntimeError: the compiled library is missing or does not load.
    """
    if _ops.load_error:
        raise RuntimeError(_ops.load_error)
    # A call with DTensors is not plain, so fwd_splitkv_basic never has any.
    for name in ("fwd", "fwd_splitkv", "fwd_splitkv_append"):
        for suffix, results in (("", ["out"]), ("_lse", ["out", "lse"])):
            operator = getattr(torch.ops.flashattn_ext, name + suffix).default
            acceptable = partial(_acceptable, results, _ops._ARGUMENTS[name])
            register_sharding(operator)(acceptable)


def _acceptable(
    results: list[str], names: list[str], *arguments: Any
) -> list[tuple[list[Placement], list[Placement | None]]]:
    """As `register_sharding` wants it: pairs of placements of the results and of the arguments, for
    a dim of the mesh. DTensor combines them over all dims. Arguments may be left out."""
    tensors = {n: x for n, x in zip(names, arguments, strict=False) if hasattr(x, "placements")}
    return [
        (
            [_placement(way, result) for result in results],
            [
                _placement(way, name) if name in tensors else None
                for name in names[: len(arguments)]
            ],
        )
        for way in _ways(tensors)
    ]


def _ways(tensors: _Tensors) -> list[_Way]:
    """Those that DTensor may choose from and combine."""
    over_batch, over_heads = _over_batch(tensors), _over_heads(tensors)
    ways = [way for way in ({}, over_batch, over_heads) if way is not None]
    sizes = [tensors["q"].mesh.size(dim) for dim in range(tensors["q"].mesh.ndim)]
    placed = _as_placed(tensors, ways)
    batch_shards, head_shards = (
        prod(size for size, way in zip(sizes, placed, strict=False) if way is wanted)
        for wanted in (over_batch, over_heads)
    )
    if placed and batch_shards <= max(1, tensors["q"].shape[0]) and _divides(head_shards, tensors):
        # Whatever these combine to, DTensor prefers what redistributes nothing.
        return [way for way in ways if way in placed]
    if "k_new" in tensors:
        raise NotImplementedError(_why_no_append(tensors))
    heads_kv = _keys(tensors).shape[-2]
    combinations_of_sizes = chain(*(combinations(sizes, n) for n in range(1, len(sizes) + 1)))
    for shards in map(prod, combinations_of_sizes):
        # DTensor itself leaves out more shards than there are heads.
        if not _divides(shards, tensors) and shards <= heads_kv:
            return [way for way in ways if way is not over_heads]
    return ways


def _over_batch(tensors: _Tensors) -> _Way | None:
    q = tensors["q"]
    if q.ndim == 3:
        return None  # packed: the rows of a share are not known
    way = dict.fromkeys(_OF_BATCH, 0)
    slopes = tensors.get("alibi_slopes")
    if slopes is not None and slopes.ndim == 2:
        way["alibi_slopes"] = 0
    if "block_table" in tensors or "cache_batch_idx" in tensors:
        return way if "k_new" not in tensors else None  # replicas would get different tokens
    if _keys(tensors).shape[0] != q.shape[0]:
        return None  # more cache rows than sequences, whose shares would not match
    return way | dict.fromkeys(_KEYS, 0)


def _over_heads(tensors: _Tensors) -> _Way:
    heads = tensors["q"].ndim - 2
    way = {"q": heads, "out": heads, "lse": heads - 1, "sinks": 0}
    if "alibi_slopes" in tensors:
        way["alibi_slopes"] = tensors["alibi_slopes"].ndim - 1
    if _keys(tensors).shape[-2] > 1:
        way |= {n: tensors[n].ndim - 2 for n in (*_KEYS, *_NEW) if n in tensors}
    return way


def _divides(shards: int, tensors: _Tensors) -> bool:
    """Whether so many shards are whole key/value heads with all their query heads. A single
    key/value head goes with any of its query heads."""
    heads, heads_kv = tensors["q"].shape[-2], _keys(tensors).shape[-2]
    return bool(shards <= heads if heads_kv == 1 else heads_kv % shards == 0)


def _as_placed(tensors: _Tensors, ways: list[_Way]) -> list[_Way]:
    """For each dim of the mesh the way in which all tensors are placed already; or []."""
    found = []
    for dim in range(tensors["q"].mesh.ndim):
        for way in ways:
            if all(x.placements[dim] == _placement(way, name) for name, x in tensors.items()):
                found.append(way)
                break
        else:
            return []
    return found


def _why_no_append(tensors: _Tensors) -> str:
    found = ", ".join(f"{name} {tensor.placements}" for name, tensor in tensors.items())
    return (
        "flash_fwd_splitkv: new tokens are written where the caches are, so nothing can be "
        "redistributed. Expected all tensors replicated, sharded over the batch (not with "
        "block_table or cache_batch_idx), or sharded over heads by a number that divides the "
        f"{_keys(tensors).shape[-2]} key/value heads; got {found}"
    )


def _placement(way: _Way, name: str) -> Placement:
    return Shard(way[name]) if name in way else Replicate()


def _keys(tensors: _Tensors) -> Any:
    return tensors["k"] if "k" in tensors else tensors["k_cache"]
