"""`plan`: how a call will run on a GPU, asked without one. `_host` knows (csrc/host_module.cpp)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import _plan_launches, _plan_show, _plan_text
from ._plan_call import load_host, planned_call
from ._plan_gpus import Gpu, arch_of, find_gpu, kernel_head_dim
from ._plan_launches import Launch, Shares
from ._plan_map import QueryTile, TileMap, TilePart, tile_map
from ._plan_problem import Problem, check_call, problem_of
from ._score_checks import OPEN_WINDOW

__all__ = ["Gpu", "Launch", "Plan", "QueryTile", "Shares", "TileMap", "TilePart", "plan"]

_MAX_GRID = 2**31 - 1


@dataclass(frozen=True)
class Plan:
    """How a call will run. ``print`` shows it in a few lines.

    Attributes:
        function: "flash_fwd" or "flash_fwd_splitkv".
        problem: the checked arguments.
        gpu: the GPU that it is planned for.
        arch: the architecture whose kernels that GPU runs: 90 for sm_90.
        kernel_head_dim: head dim of the kernel that serves the call's.
        launches: the kernels in the order in which they start; none when there is nothing to do.
        workspace_bytes: what the kernels need beside results; a head dim that is no multiple of 8
            runs on padded copies, which do not count.
        bytes_read: queries, new tokens, and the keys and values that some query sees, each once.
        bytes_written: out, and new tokens in the cache. Lengths, tables, the log-sum-exp and the
            workspace count in neither.
        flops: ``4 * head_dim`` for each pair of a query and a key that it sees and each query head.
    """

    function: str
    problem: Problem
    gpu: Gpu
    arch: int
    kernel_head_dim: int
    launches: tuple[Launch, ...]
    workspace_bytes: int
    bytes_read: int
    bytes_written: int
    flops: int

    @property
    def memory_seconds(self) -> float | None:
        """Time to move the bytes at the GPU's peak bandwidth; None where that is not known."""
        peak = self.gpu.bytes_per_second
        return None if peak is None else (self.bytes_read + self.bytes_written) / peak

    @property
    def arithmetic_seconds(self) -> float | None:
        """Time to compute at the GPU's peak rate; None where that is not known."""
        peak = self.gpu.flops_per_second
        return None if peak is None else self.flops / peak

    @property
    def roof_seconds(self) -> float | None:
        """The longer of the two: no call is faster on that GPU (unless its L2 cache has the data).
        Launches and merges are not in it."""
        memory, arithmetic = self.memory_seconds, self.arithmetic_seconds
        return None if memory is None or arithmetic is None else max(memory, arithmetic)

    @property
    def tiled_launches(self) -> tuple[Launch, ...]:
        """Those of attention kernels; the others append or merge."""
        return tuple(launch for launch in self.launches if launch.tile is not None)

    def __str__(self) -> str:
        return _plan_text.render(self)

    def tile_maps(
        self, *, sequences: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> tuple[TileMap, ...]:
        """Which blocks of keys each tile of queries needs, and which thread blocks have them, for
        the lengths given: a map for each of the `tiled_launches`.

        Args:
            sequences: numbers in the batch; default: all.
            heads: query heads; default: all. A tile shows when it holds one of them.

        Raises:
            ValueError: a number does not fit, or there are more than 2**20 parts of tiles.
        """
        return tuple(tile_map(self, launch, sequences, heads) for launch in self.tiled_launches)

    def show(
        self,
        path: str | Path | None = None,
        *,
        text: bool = False,
        sequences: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> None:
        """Draws the tile maps: which (query block, key block) tiles are skipped, clean (no mask) or
        masked, and which thread block, or split, has them.

        By default in a window, which needs matplotlib and a screen; where either is missing,
        prints them as text. Long maps show their first tiles and say so.

        Args:
            path: file for the picture instead, PNG, SVG or PDF by its suffix.
            text: print in any case.
            sequences, heads: as in `tile_maps`; by default the first 64 sequences, all heads of a
                decode kernel, which share its thread blocks, and head 0 of others, whose heads look
                alike.

        Raises:
            ValueError: as in `tile_maps`; `path` and `text` together; no kernel has a tile.
            RuntimeError: `path` is given and matplotlib does not import.
        """
        _plan_show.show(self, path, text, sequences, heads)


def plan(
    *,
    batch: int,
    heads: int,
    heads_kv: int | None = None,
    head_dim: int,
    seqlen_q: int | Sequence[int],
    seqlen_k: int | Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN_WINDOW,
    max_seqlen_q: int | None = None,
    cache: str | int | None = None,
    capacity: int | None = None,
    new_tokens: int = 0,
    rotary_dim: int = 0,
    num_splits: int = 0,
    split_size: int | None = None,
    gpu: str | Gpu | None = None,
) -> Plan:
    """How `flash_fwd` (without a cache) or `flash_fwd_splitkv` (with one) will run on a GPU: which
    kernels with which tiles and grids, which workspace, and what the hardware allows at best.

    Launches nothing and needs no GPU. What runs follows from the sizes and bounds alone. The
    lengths of the sequences, which a real call leaves on the device, serve to predict bytes, FLOPs
    and how the work is shared out.

    Args:
        batch: sequences, here at most 2**20; over a cache batch * heads is at most 2**24.
        heads, heads_kv: query heads, and key/value heads (default: as many).
        head_dim: of q, k and v.
        seqlen_q: queries of each sequence. An int: dense, ``q (b, sq, h, d)``. A list of ``b``
            ints: packed, ``q (Tq, h, d)`` with `cu_seqlens_q` (and `cu_seqlens_k` without a cache).
        seqlen_k: keys of each sequence, with a cache those after new ones were added; an int for
            all, or a list of ``b`` ints.
        dtype: torch.float16 or torch.bfloat16.
        causal, window_size: as in `flash_fwd`.
        max_seqlen_q: packed only: the bound that the call will be given (default: the longest).
        cache: None; "contiguous"; or an int, the tokens of a page.
        capacity: with a cache: tokens that it holds for a sequence, in pages ``columns * page`` of
            the block table (default: what the longest sequence needs).
        new_tokens, rotary_dim: with a cache: ``s_new`` of `k_new`, and twice the columns of
            `rotary_cos`.
        num_splits, split_size: as in `flash_fwd_splitkv`.
        gpu: "H200", "H100", "H100 PCIe", "A100", "A100 40GB", "L4", "RTX 4090", "RTX 3090", or a
            `flashattn_ext.planning.Gpu`; default: torch's current GPU, "H200" where there is none.

    Returns:
        A `flashattn_ext.planning.Plan`. A build without CUDA kernels plans for those that a build
        has by default.

    Raises:
        ValueError, NotImplementedError: what the call would raise for these sizes, on that GPU; or
            an argument of `plan` itself does not fit.
        RuntimeError: ``flashattn_ext._host``, which knows the plans, does not import.
    """
    host = load_host()
    problem = problem_of(
        batch, heads, heads_kv, head_dim, seqlen_q, seqlen_k, dtype, max_seqlen_q, cache, capacity,
        new_tokens, rotary_dim, num_splits, split_size,
    )  # fmt: skip
    problem = replace(problem, window=check_call(problem, causal, window_size))
    gpu = find_gpu(gpu)
    arch = arch_of(gpu)
    kernel = kernel_head_dim(problem.head_dim, host.head_dims)
    if cache is None:
        launches, workspace_bytes = _plan_forward(host, problem, gpu, arch, kernel), 0
    else:
        launches, workspace_bytes = _plan_splitkv(host, problem, gpu, arch, kernel)
    _check_grids(launches)
    read, written, flops = _traffic(host, problem)
    return Plan(
        function="flash_fwd" if cache is None else "flash_fwd_splitkv",
        problem=problem,
        gpu=gpu,
        arch=arch,
        kernel_head_dim=kernel,
        launches=launches,
        workspace_bytes=workspace_bytes,
        bytes_read=read,
        bytes_written=written,
        flops=flops,
    )


def _plan_forward(host: Any, p: Problem, gpu: Gpu, arch: int, kernel: int) -> tuple[Launch, ...]:
    _check_shared_memory(host, "flash_fwd", (host.Role.prefill,), gpu, arch, kernel)
    if not _has_queries(p):
        return ()
    return _plan_launches.forward_launches(host, planned_call(host, p), arch, kernel)


def _plan_splitkv(
    host: Any, p: Problem, gpu: Gpu, arch: int, kernel: int
) -> tuple[tuple[Launch, ...], int]:
    """Returns (launches, bytes of workspace)."""
    roles = (host.Role.chunk, host.Role.decode, host.Role.wide_decode)
    _check_shared_memory(host, "flash_fwd_splitkv", roles, gpu, arch, kernel)
    appends = p.new_tokens > 0 and p.batch > 0
    if not _has_queries(p) and not appends:
        return (), 0
    call = planned_call(host, p)
    plan = host.plan_splitkv(call, arch, kernel, gpu.multiprocessors)
    rotated = p.rows * p.heads if p.rotary_dim > 0 else 0
    launches = _plan_launches.append_launches(
        p.batch * p.new_tokens * p.heads_kv, rotated, p.head_dim
    )
    if not _has_queries(p):
        return launches, 0
    launches += _plan_launches.splitkv_launches(host, call, plan, arch, kernel)
    launches += _plan_launches.merge_launches(host, call, plan, p.head_dim)
    return launches, plan.workspace_bytes


def _has_queries(p: Problem) -> bool:
    return p.rows > 0 and p.heads > 0


def _check_shared_memory(
    host: Any, function: str, roles: tuple[Any, ...], gpu: Gpu, arch: int, kernel: int
) -> None:
    """PTX of one architecture may meet a GPU with less shared memory than its tiles want."""
    needed = max(host.smem_bytes(arch, role, kernel) for role in roles)
    limit = host.smem_limit(gpu.capability)
    if needed > limit:
        raise NotImplementedError(
            f"gpu: {function}'s kernel of sm_{arch} needs {needed} bytes of shared memory, "
            f"{gpu.name} (sm_{gpu.capability}) has {limit}: it wants a build for that architecture"
        )


def _check_grids(launches: tuple[Launch, ...]) -> None:
    for launch in launches:
        if launch.grid[0] > _MAX_GRID:
            raise NotImplementedError(
                f"{launch.kernel}: {launch.grid[0]} thread blocks, the grid holds {_MAX_GRID}"
            )


def _traffic(host: Any, p: Problem) -> tuple[int, int, int]:
    """Bytes read, bytes written, FLOPs."""
    pairs = seen = 0
    for (queries, keys), count in Counter(zip(p.queries, p.keys, strict=True)).items():
        visible = host.visible(queries, keys, *p.window)
        pairs += count * visible.pairs
        seen += count * visible.keys
    if p.heads == 0:
        seen = 0
    row = p.head_dim * p.dtype.itemsize  # of one head
    queries = p.rows * p.heads * row
    keys_and_values = 2 * seen * p.heads_kv * row
    new = 2 * p.batch * p.new_tokens * p.heads_kv * row
    flops = 4 * p.head_dim * p.heads * pairs
    return queries + keys_and_values + new, queries + new, flops
