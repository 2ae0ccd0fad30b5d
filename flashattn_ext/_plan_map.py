"""Tile maps: which blocks of keys a tile of queries needs, and which thread block has them.

Nothing is decided here: csrc/host_tile_parts.cpp asks the functions that the kernels call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from ._plan_call import load_host, planned_call
from ._plan_launches import Launch
from ._score_checks import is_int

if TYPE_CHECKING:
    from .planning import Plan

SKIPPED, MASKED, CLEAN = "skipped", "masked", "clean"


@dataclass(frozen=True)
class TilePart:
    """Key blocks of a query tile that one thread block has.

    Attributes:
        thread_block: its x and y in the grid; where the keys of a tile are split, y is the split.
        begin, end: key blocks ``begin`` to ``end - 1``. None at all: it writes what rows without a
            visible key get.
        clean_begin, clean_end: those of them that need no mask.
    """

    thread_block: tuple[int, int]
    begin: int
    end: int
    clean_begin: int
    clean_end: int


@dataclass(frozen=True)
class QueryTile:
    """A tile of queries against all keys of its sequence.

    Attributes:
        sequence: its number in the batch.
        heads: the query heads whose rows share the tile.
        queries: the queries, counted in their sequence.
        keys: of the sequence.
        key_blocks: of the sequence; the last one may be filled in part.
        parts: from the first key block to the last.
    """

    sequence: int
    heads: range
    queries: range
    keys: int
    key_blocks: int
    parts: tuple[TilePart, ...]

    def runs(self) -> Iterator[tuple[TilePart | None, str, int, int]]:
        """``(part, state, begin, end)`` of neighbouring key blocks, over all key blocks; no part
        where they are skipped."""
        at = 0
        for part in self.parts:
            borders = part.begin, part.clean_begin, part.clean_end, part.end
            if at < part.begin:
                yield None, SKIPPED, at, part.begin
            for state, (begin, end) in zip((MASKED, CLEAN, MASKED), pairwise(borders), strict=True):
                if begin < end:
                    yield part, state, begin, end
            at = max(at, part.end)
        if at < self.key_blocks:
            yield None, SKIPPED, at, self.key_blocks

    def state(self, block: int) -> str:
        """Of a key block: "skipped" (no query of the tile sees a key of it, and it is not loaded),
        "clean" (every query sees all its keys), or "masked" (each score is compared with bounds).

        Raises:
            IndexError: the sequence has no such key block.
        """
        for _, state, begin, end in self.runs():
            if begin <= block < end:
                return state
        raise IndexError(f"block: expected 0 to {self.key_blocks - 1}, got {block}")


@dataclass(frozen=True)
class TileMap:
    """The query tiles of a kernel.

    Attributes:
        launch: the kernel; ``launch.tile`` is (query rows, keys of a block).
        tiles: by sequence, then heads, then queries.
    """

    launch: Launch
    tiles: tuple[QueryTile, ...]

    def excerpt(self, most: int) -> tuple[QueryTile, ...]:
        """The first tiles, at most that many, but of one sequence and its heads all or none, and
        at least those of the first."""
        taken: list[QueryTile] = []
        for _, group in groupby(self.tiles, key=lambda tile: (tile.sequence, tile.heads.start)):
            tiles = list(group)
            if taken and len(taken) + len(tiles) > most:
                break
            taken += tiles
        return tuple(taken)


def tile_map(
    plan: Plan, launch: Launch, sequences: Sequence[int] | None, heads: Sequence[int] | None
) -> TileMap:
    """Of a launch with a tile, for these sequences and the tiles with one of these query heads;
    None: all."""
    assert launch.tile is not None
    chosen = (
        _indices("sequences", sequences, plan.problem.batch),
        _indices("heads", heads, plan.problem.heads),
    )
    host = load_host()
    call = planned_call(host, plan.problem)
    if launch.role == "prefill":
        found = host.forward_parts(call, plan.arch, plan.kernel_head_dim, *chosen)
    else:
        made = host.plan_splitkv(call, plan.arch, plan.kernel_head_dim, plan.gpu.multiprocessors)
        chunks = launch.role in ("chunk", "short chunk")
        found = host.splitkv_parts(call, made, chunks, launch.tile[1], *chosen)
    tiles = [
        _query_tile(list(parts), launch.tile[1])
        for _, parts in groupby(found, key=lambda x: (x.sequence, x.first_head, x.first_query))
    ]
    tiles.sort(key=lambda tile: (tile.sequence, tile.heads.start, tile.queries.start))
    return TileMap(launch, tuple(tiles))


def _indices(name: str, chosen: Sequence[int] | None, count: int) -> list[int]:
    if chosen is None:
        return list(range(count))
    if not isinstance(chosen, Sequence) or isinstance(chosen, str):
        raise ValueError(f"{name}: expected None or a list of ints, got {chosen!r}")
    for index in chosen:
        if not is_int(index) or not 0 <= index < count:
            raise ValueError(f"{name}: expected ints from 0 to {count - 1}, got {index!r}")
    return list(chosen)


def _query_tile(parts: list[Any], block_keys: int) -> QueryTile:
    first = parts[0]
    return QueryTile(
        sequence=first.sequence,
        heads=range(first.first_head, first.first_head + first.heads),
        queries=range(first.first_query, first.first_query + first.queries),
        keys=first.keys,
        key_blocks=-(-first.keys // block_keys),
        parts=tuple(
            TilePart(
                thread_block=(part.block_x, part.block_y),
                begin=part.blocks.begin,
                end=part.blocks.end,
                clean_begin=part.blocks.clean_begin,
                clean_end=part.blocks.clean_end,
            )
            for part in parts
        ),
    )
