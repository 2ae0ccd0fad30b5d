"""Calls of test_dtensor.py: what two processes do, each for itself, and what it checks.

Every process knows the whole tensors and cuts its shards out of them, so nothing travels but what
DTensor redistributes.
"""

import json
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import flashattn_ext
from flashattn_ext.integrations import dtensor

PROCESSES = 2
R, D = Replicate(), 64
CALLS = {}
REDISTRIBUTES = set()  # names of the calls in which something travels


def call(function):
    CALLS[function.__name__] = function
    return function


def redistributing(function):
    REDISTRIBUTES.add(function.__name__)
    return call(function)


class Rig:
    """Random tensors, shards of them, and comparisons with the call on whole tensors."""

    def __init__(self, device):
        self.device = device
        self.dtype = torch.float32 if device == "cpu" else torch.float16
        self.meshes = {shape: init_device_mesh(device, shape) for shape in ((2,), (2, 1), (1, 2))}
        self.random = torch.Generator().manual_seed(0)

    def randn(self, *shape, dtype=None):
        numbers = torch.randn(shape, generator=self.random)
        return numbers.to(self.device, self.dtype if dtype is None else dtype)

    def qkv(self, b=2, sq=5, sk=9, heads=(8, 2)):
        return self.randn(b, sq, heads[0], D), *(self.randn(b, sk, heads[1], D) for _ in range(2))

    def ints(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def put(self, tensor, *placements, mesh=(2,)):
        """A copy, placed."""
        mesh = self.meshes[mesh]
        return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)

    def close(self, found, whole, *placements):
        """That a result is placed like this, and that the own share of it is right."""
        assert found.placements == placements, found.placements
        share = distribute_tensor(whole, found.device_mesh, placements, src_data_rank=None)
        assert found.shape == whole.shape and found.to_local().shape == share.to_local().shape
        tolerance = 1e-5 if whole.dtype == torch.float32 and self.device == "cpu" else 4e-3
        torch.testing.assert_close(
            found.to_local(), share.to_local(), rtol=tolerance, atol=tolerance
        )

    def check(self, function, tensors, out=None, lse=None, mesh=(2,), travels=False, **options):
        """The call on placed tensors against that on whole ones. `tensors`: name -> (tensor, its
        placement on each dim of the mesh). Returns both."""
        whole = {name: tensor.clone() for name, (tensor, *_) in tensors.items()}
        placed = {name: self.put(t, *where, mesh=mesh) for name, (t, *where) in tensors.items()}
        expected = function(**whole, **options, return_lse=True)
        with CommDebugMode() as traffic:
            found = function(**placed, **options, return_lse=True)
        if travels is not None:
            assert bool(traffic.get_total_counts()) == travels, traffic.get_comm_counts()
        for result, tensor, where in zip(found, expected, (out, lse), strict=True):
            if where is None:  # DTensor's choice, by what it costs
                where = result.placements
            self.close(result, tensor, *(where if isinstance(where, tuple) else (where,)))
        return whole, placed


FWD, SPLITKV = flashattn_ext.flash_fwd, flashattn_ext.flash_fwd_splitkv


@call
def replicated(rig):
    q, k, v = rig.qkv()
    rig.check(FWD, {"q": (q, R), "k": (k, R), "v": (v, R)}, R, R, causal=True)


@call
def over_the_batch(rig):
    q, k, v = rig.qkv(b=3)  # 2 sequences and 1
    batch = Shard(0)
    tensors = {
        "q": (q, batch),
        "k": (k, batch),
        "v": (v, batch),
        "seqused_k": (rig.ints(9, 4, 0), batch),
        "alibi_slopes": (rig.randn(3, 8, dtype=torch.float32), batch),
        "sinks": (rig.randn(8), R),
    }
    rig.check(FWD, tensors, batch, batch, window_size=(5, 2))


@call
def over_heads(rig):
    """Two key/value heads, four query heads each."""
    q, k, v = rig.qkv()
    tensors = {
        "q": (q, Shard(2)),
        "k": (k, Shard(2)),
        "v": (v, Shard(2)),
        "seqused_k": (rig.ints(9, 4), R),
        "alibi_slopes": (rig.randn(8, dtype=torch.float32).abs(), Shard(0)),
        "sinks": (rig.randn(8), Shard(0)),
    }
    rig.check(FWD, tensors, Shard(2), Shard(1), causal=True)
    tensors["alibi_slopes"] = (rig.randn(2, 8, dtype=torch.float32), Shard(1))
    rig.check(FWD, tensors, Shard(2), Shard(1))


@call
def a_single_key_head_is_replicated(rig):
    for heads in (8, 3):
        q, k, v = rig.qkv(heads=(heads, 1))
        tensors = {
            "q": (q, Shard(2)),
            "k": (k, R),
            "v": (v, R),
            "sinks": (rig.randn(heads), Shard(0)),
        }
        rig.check(FWD, tensors, Shard(2), Shard(1))


@call
def packed_over_heads(rig):
    heads = Shard(1)
    tensors = {
        "q": (rig.randn(10, 8, D), heads),
        "k": (rig.randn(12, 2, D), heads),
        "v": (rig.randn(12, 2, D), heads),
        "cu_seqlens_q": (rig.ints(0, 3, 10), R),
        "cu_seqlens_k": (rig.ints(0, 8, 12), R),
    }
    rig.check(FWD, tensors, heads, Shard(0), max_seqlen_q=7, max_seqlen_k=8, causal=True)


@redistributing
def padded_head_dim(rig):
    """Torch pads, and may gather for that."""
    tensors = {"q": (rig.randn(2, 5, 4, 36), Shard(2))}
    tensors |= {name: (rig.randn(2, 9, 2, 36), Shard(2)) for name in ("k", "v")}
    rig.check(FWD, tensors, travels=None)


@call
def over_batch_and_heads(rig):
    q, k, v = rig.qkv()
    for mesh in ((2, 1), (1, 2)):
        for order in ((Shard(0), Shard(2)), (Shard(2), Shard(0))):
            tensors = {"q": (q, *order), "k": (k, *order), "v": (v, *order)}
            lse = tuple(Shard(min(place.dim, 1)) for place in order)
            rig.check(FWD, tensors, order, lse, mesh=mesh)


@redistributing
def other_placements_are_redistributed(rig):
    q, k, v = rig.qkv()
    rig.check(FWD, {"q": (q, Shard(1)), "k": (k, R), "v": (v, R)}, travels=True)
    rows = {"q": (q, Shard(0)), "k": (k, Shard(0)), "v": (v, Shard(3))}
    rig.check(FWD, rows, travels=True)


@redistributing
def partial_sums_are_added_up(rig):
    q, k, v = rig.qkv()
    mesh = rig.meshes[(2,)]
    half = DTensor.from_local(q / 2, mesh, [Partial()], run_check=False)
    placed = {"q": half, "k": rig.put(k, Shard(2)), "v": rig.put(v, Shard(2))}
    out = FWD(**placed)
    rig.close(out, FWD(q, k, v), *out.placements)


@redistributing
def groups_of_heads_are_not_torn(rig):
    """Three key/value heads on two processes are 2 and 1. They would meet 3 and 3 of 6 query heads,
    which is an error, or 6 and 6 of 12, which is none, but wrong."""
    for heads in ((6, 3), (12, 3)):
        q, k, v = rig.qkv(heads=heads)
        tensors = {"q": (q, Shard(2)), "k": (k, Shard(2)), "v": (v, Shard(2))}
        rig.check(FWD, tensors, travels=True)


def cache(rig, rows=2, capacity=12, heads=2):
    return rig.randn(rows, capacity, heads, D), rig.randn(rows, capacity, heads, D)


@call
def contiguous_cache_over_the_batch(rig):
    batch = Shard(0)
    k, v = cache(rig)
    tensors = {
        "q": (rig.randn(2, 3, 8, D), batch),
        "k_cache": (k, batch),
        "v_cache": (v, batch),
        "cache_seqlens": (rig.ints(12, 5), batch),
        "cache_leftpad": (rig.ints(0, 2), batch),
    }
    rig.check(SPLITKV, tensors, batch, batch, causal=True)
    del tensors["cache_seqlens"]
    rig.check(SPLITKV, tensors, batch, batch, cache_seqlens=7, num_splits=2)


def pages(rig, where, cache_place, length_place):
    k, v = cache(rig, rows=6, capacity=4)
    return {
        "q": (rig.randn(2, 1, 8, D), where),
        "k_cache": (k, cache_place),
        "v_cache": (v, cache_place),
        "cache_seqlens": (rig.ints(11, 5), length_place),
        "block_table": (rig.ints(4, 0, 2, 5, 1, -1).view(2, 3), length_place),
    }


@call
def pages_over_the_batch(rig):
    rig.check(SPLITKV, pages(rig, Shard(0), R, Shard(0)), Shard(0), Shard(0))


@call
def pages_over_heads(rig):
    rig.check(SPLITKV, pages(rig, Shard(2), Shard(2), R), Shard(2), Shard(1), causal=True)


@call
def rows_of_a_cache_by_number(rig):
    k, v = cache(rig, rows=4)
    tensors = {
        "q": (rig.randn(2, 1, 8, D), Shard(0)),
        "k_cache": (k, R),
        "v_cache": (v, R),
        "cache_seqlens": (rig.ints(11, 5), Shard(0)),
        "cache_batch_idx": (rig.ints(3, 1), Shard(0)),
    }
    rig.check(SPLITKV, tensors, Shard(0), Shard(0))


@redistributing
def more_cache_rows_than_sequences(rig):
    """Shares of 4 rows and of 2 sequences do not match."""
    k, v = cache(rig, rows=4)
    tensors = {
        "q": (rig.randn(2, 1, 8, D), Shard(0)),
        "k_cache": (k, Shard(0)),
        "v_cache": (v, Shard(0)),
        "cache_seqlens": (rig.ints(11, 5), Shard(0)),
    }
    rig.check(SPLITKV, tensors, travels=True)


@call
def packed_queries_over_heads(rig):
    k, v = cache(rig)
    tensors = {
        "q": (rig.randn(5, 8, D), Shard(1)),
        "k_cache": (k, Shard(2)),
        "v_cache": (v, Shard(2)),
        "cache_seqlens": (rig.ints(11, 5), R),
        "cu_seqlens_q": (rig.ints(0, 1, 5), R),
    }
    rig.check(SPLITKV, tensors, Shard(1), Shard(0), max_seqlen_q=4, causal=True)


def appended(rig, tensors, out, lse, mesh=(2,), **options):
    """Also what is in the caches afterwards."""
    whole, placed = rig.check(SPLITKV, tensors, out, lse, mesh=mesh, **options)
    for name in ("k_cache", "v_cache"):
        before, *where = tensors[name]
        assert not torch.equal(whole[name], before)
        rig.close(placed[name], whole[name], *where)


def new_tokens(rig, *where):
    k, v = cache(rig)
    lengths = tuple(place if place == Shard(0) else R for place in where)
    return {
        "q": (rig.randn(2, 3, 8, D), *where),
        "k_cache": (k, *where),
        "v_cache": (v, *where),
        "cache_seqlens": (rig.ints(9, 5), *lengths),
        "k_new": (rig.randn(2, 3, 2, D), *where),
        "v_new": (rig.randn(2, 3, 2, D), *where),
    }


@call
def append_over_the_batch(rig):
    tensors = new_tokens(rig, Shard(0))
    angles = rig.randn(12, 8, dtype=torch.float32)
    tensors["rotary_cos"] = (angles.cos().to(rig.dtype), R)
    tensors["rotary_sin"] = (angles.sin().to(rig.dtype), R)
    appended(rig, tensors, Shard(0), Shard(0), causal=True)


@call
def append_over_heads(rig):
    appended(rig, new_tokens(rig, Shard(2)), Shard(2), Shard(1), causal=True)
    paged = pages(rig, Shard(2), Shard(2), R)
    paged |= {name: (rig.randn(2, 1, 2, D), Shard(2)) for name in ("k_new", "v_new")}
    appended(rig, paged, Shard(2), Shard(1))


@call
def append_replicated(rig):
    appended(rig, new_tokens(rig, R), R, R)


@call
def append_over_batch_and_heads(rig):
    """Every combination, on dims of one process too, where each would cost nothing."""
    ways = {R: (R, R), Shard(0): (Shard(0), Shard(0)), Shard(2): (Shard(2), Shard(1))}
    for mesh in ((2, 1), (1, 2)):
        for first in ways:
            for second in ways:
                out, lse = zip(ways[first], ways[second], strict=True)
                appended(rig, new_tokens(rig, first, second), out, lse, mesh=mesh)


def refused(error, words, function, **arguments):
    try:
        function(**arguments)
    except error as refusal:
        assert words in str(refusal), refusal
    else:
        raise AssertionError(f"not refused: {words}")


@call
def appends_that_would_go_to_copies_are_refused(rig):
    paged = pages(rig, Shard(0), R, Shard(0))
    paged |= {name: (rig.randn(2, 1, 2, D), Shard(0)) for name in ("k_new", "v_new")}
    cases = [paged]
    for name in ("k_cache", "q", "cache_seqlens", "v_new"):
        tensors = new_tokens(rig, Shard(0))
        cases.append(tensors | {name: (tensors[name][0], R)})
    cases.append(new_tokens(rig, Shard(1)))  # everything, over tokens
    for tensors in cases:
        placed = {name: rig.put(t, *where) for name, (t, *where) in tensors.items()}
        words = "flash_fwd_splitkv: new tokens are written where the caches are"
        refused(NotImplementedError, words, SPLITKV, **placed)
        for name in ("k_cache", "v_cache"):
            rig.close(placed[name], tensors[name][0], *tensors[name][1:])


@call
def given_results_are_refused(rig):
    q, k, v = (rig.put(tensor, Shard(2)) for tensor in rig.qkv())
    words = "flashattn_ext.fwd_out.default"
    refused(NotImplementedError, words, FWD, q=q, k=k, v=v, out=torch.empty_like(q))


@call
def plain_tensors_beside_placed_ones_are_refused(rig):
    q, k, v = rig.qkv()
    words = "got mixed torch.Tensor and DTensor"
    refused(RuntimeError, words, FWD, q=rig.put(q, Shard(2)), k=k, v=v)


def run(rank, folder, device):
    """Writes {call: traceback or ""} into folder/RANK.json."""
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES)
    torch.set_num_threads(1)
    rig = Rig(device)
    results = {}
    q = rig.put(rig.randn(1, 2, 2, D), R)
    refused(NotImplementedError, "does not have a sharding strategy", FWD, q=q, k=q, v=q)
    for _ in range(2):
        dtensor.register()
    for name, function in CALLS.items():
        if device == "cuda" and name in REDISTRIBUTES:
            continue  # gloo does not move all that lies on a GPU
        try:
            function(rig)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
