"""From the plan that C++ makes to the kernels that run, as a profiler would list them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Of the kernels without matrix instructions (csrc/kernels/): threads of a block and what one takes.
APPEND_THREADS, APPEND_ELEMENTS = 256, 8
LANES = 32


@dataclass(frozen=True)
class Shares:
    """The decode work of a call with automatic splits, for the lengths that `plan` was given.

    Attributes:
        tiles: query tiles of all sequences that are decoded.
        entries: of the list that thread blocks take equal shares of: the key blocks of all tiles.
            Few tiles have more entries, up to a multiple of 2, beside chunks of 4.
        size: entries of one share.
        busy: thread blocks that have a share.
        cut: tiles whose keys more than one thread block has.
        team: neighbouring thread blocks that have the same keys of different heads.
    """

    tiles: int
    entries: int
    size: int
    busy: int
    cut: int
    team: int


@dataclass(frozen=True)
class Launch:
    """One kernel of a call.

    Attributes:
        kernel: its name, as a profiler shows it, without template arguments.
        role: "prefill", "chunk", "short chunk", "decode", "wide decode"; "append" writes new tokens
            and rotates; "merge" adds up partial results.
        grid: thread blocks in x, y, z.
        warps: of a thread block.
        tile: (query rows, keys of a block) of a thread block; None for append and merge.
        packed_heads: query heads of one key/value head that share a tile's rows; 0 without a tile.
        stages: key and value blocks in shared memory at once; 0 without a tile.
        smem_bytes: shared memory that the planner counts with for a thread block: an upper bound of
            what is reserved at the launch.
        splits: parts into which the keys of a tile are cut at the most. None without a tile, and
            where thread blocks take equal shares of the keys of all tiles.
        shares: those equal shares, for the lengths given.
    """

    kernel: str
    role: str
    grid: tuple[int, int, int]
    warps: int
    tile: tuple[int, int] | None = None
    packed_heads: int = 0
    stages: int = 0
    smem_bytes: int = 0
    splits: int | None = None
    shares: Shares | None = None

    @property
    def threads(self) -> int:
        """Of a thread block."""
        return LANES * self.warps


def forward_launches(host: Any, call: Any, arch: int, kernel_head_dim: int) -> tuple[Launch, ...]:
    """Of `flash_fwd`. ``host`` is the module `_host`, ``call`` its PlannedCall."""
    plan = host.plan_forward(call, arch, kernel_head_dim)
    describe = _Attention(host, "flash_fwd_kernel", arch, kernel_head_dim)
    return (describe(host.Role.prefill, plan, (plan.tiles, 1, 1), splits=1),)


def splitkv_launches(
    host: Any, call: Any, plan: Any, arch: int, kernel_head_dim: int
) -> tuple[Launch, ...]:
    """Of the attention of `flash_fwd_splitkv`, in the order in which they start; ``plan`` is a
    SplitkvPlan of _host."""
    launches = []
    describe = _Attention(host, "flash_fwd_splitkv_kernel", arch, kernel_head_dim)
    if plan.may_decode and plan.shares > 0:
        keys = host.tile_shape(arch, plan.decode_role, kernel_head_dim).n
        work = host.decode_work(call, plan, keys)
        shares = Shares(work.tiles, work.entries, work.share, work.busy, work.cut, work.team)
        grid = (plan.shares, 1, 1)
        launches.append(describe(plan.decode_role, plan.decode, grid, shares=shares))
    elif plan.may_decode:
        grid = (plan.decode.tiles, plan.splits, 1)
        launches.append(describe(plan.decode_role, plan.decode, grid, splits=plan.splits))
    if plan.may_chunk:
        grid = (plan.chunk.tiles, plan.chunk_splits, 1)
        launches.append(describe(plan.chunk_role, plan.chunk, grid, splits=plan.chunk_splits))
    return tuple(launches)


def append_launches(new_heads: int, rotated_heads: int, head_dim: int) -> tuple[Launch, ...]:
    """Of the new tokens' heads that are written, and the queries' heads that are rotated."""
    blocks = _ceil((new_heads + rotated_heads) * (head_dim // APPEND_ELEMENTS), APPEND_THREADS)
    if blocks == 0:
        return ()
    return (Launch("append_kv_kernel", "append", (blocks, 1, 1), APPEND_THREADS // LANES),)


def merge_launches(host: Any, call: Any, plan: Any, head_dim: int) -> tuple[Launch, ...]:
    """Of the merge of partial results, if the SplitkvPlan has any."""
    if plan.splits > 1:
        name = "flash_fwd_splitkv_combine_kernel"
        grid = (host.combine_grid(plan.rows, head_dim), 1, 1)
    elif plan.merges:
        name = "flash_fwd_splitkv_combine_cuts_kernel"
        grid = (host.merge_blocks(call, plan), 1, 1)
    else:
        return ()
    return (Launch(name, "merge", grid, host.merge_warps),)


class _Attention:
    """Describes launches of one attention kernel."""

    def __init__(self, host: Any, kernel: str, arch: int, kernel_head_dim: int):
        self.host, self.kernel, self.arch, self.head_dim = host, kernel, arch, kernel_head_dim

    def __call__(
        self, role: Any, tiles: Any, grid: tuple[int, int, int], splits: int | None = None,
        shares: Shares | None = None,
    ) -> Launch:  # fmt: skip
        """``tiles``: a ForwardPlan of _host."""
        tile = self.host.tile_shape(self.arch, role, self.head_dim)
        return Launch(
            kernel=self.kernel,
            role=role.name.replace("_", " "),
            grid=grid,
            warps=tile.warps,
            tile=(tile.m, tile.n),
            packed_heads=tiles.pack,
            stages=tile.stages,
            smem_bytes=self.host.smem_bytes(self.arch, role, self.head_dim),
            splits=splits,
            shares=shares,
        )


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
