"""Tile maps as text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from ._plan_map import CLEAN, MASKED, SKIPPED, QueryTile, TileMap

_WIDTH = 100
_MOST_TILES = 40  # of a map; what is more is left out
_MOST_LINES = 32  # of the tiles of one head; where there are more tiles, a line has several
_GLYPHS = {CLEAN: "#", MASKED: "+", SKIPPED: "."}
_SEVERAL = "%"
_TITLES = "sequence", "heads", "queries"


def render(maps: Sequence[TileMap]) -> str:
    return "\n\n".join(map(_map, maps))


def _map(tile_map: TileMap) -> str:
    launch, shown = tile_map.launch, tile_map.excerpt(_MOST_TILES)
    rows, keys = launch.tile or (0, 0)
    title = f"{launch.kernel}, {launch.role}: tiles of {rows} rows x {keys} keys"
    if not shown:
        return f"{title}\nhas nothing to do for these sequences and heads"
    lines = list(_lines(shown))
    names = [_names(line) for line in lines]
    left = [max(map(len, column)) for column in zip(_TITLES, *names, strict=True)]
    owners = [_owners(line) for line in lines]
    cells = _WIDTH - sum(left) - 3 - 2 - max(map(len, ["thread block", *owners]))
    blocks = max(tile.key_blocks for tile in shown)
    each = max(1, -(-blocks // cells))  # key blocks of a character
    width = max(-(-blocks // each), len("key blocks"))

    text = [
        title,
        _legend(each, max(map(len, lines))),
        _columns((*_TITLES, "key blocks"), (*left, width)) + "  thread block",
    ]
    for line, name, owner in zip(lines, names, owners, strict=True):
        text.append(_columns((*name, _cells(line, each)), (*left, width)) + f"  {owner}")
        if len(line) == 1 and len(line[0].parts) > 1:
            text.append(_columns(("", "", "", _borders(line[0], each)), (*left, width)).rstrip())
    if missing := len(tile_map.tiles) - len(shown):
        text.append(f"and {missing} tiles more: choose with sequences, heads")
    return "\n".join(text)


def _lines(tiles: Iterable[QueryTile]) -> Iterable[list[QueryTile]]:
    """The tiles of each line."""
    for _, group in groupby(tiles, key=lambda tile: (tile.sequence, tile.heads.start)):
        together = list(group)
        each = -(-len(together) // _MOST_LINES)
        for first in range(0, len(together), each):
            yield together[first : first + each]


def _legend(blocks: int, tiles: int) -> str:
    meanings = [f"{glyph} {state}" for state, glyph in _GLYPHS.items()]
    if blocks * tiles > 1:
        meanings.append(f"{_SEVERAL} several")
    text = "  ".join(meanings)
    if blocks > 1:
        text += f"; a character: {blocks} key blocks"
    if tiles > 1:
        text += f"; a line: up to {tiles} tiles"
    return text


def _names(line: list[QueryTile]) -> tuple[str, str, str]:
    first = line[0]
    queries = range(first.queries.start, line[-1].queries.stop)
    return str(first.sequence), span(first.heads), span(queries)


def span(numbers: range) -> str:
    """ "3" or "0-3"."""
    first, last = numbers.start, numbers.stop - 1
    return str(first) if first == last else f"{first}-{last}"


def _owners(line: list[QueryTile]) -> str:
    """Thread blocks; of a tile whose thread blocks differ in y, their y."""
    xs = sorted({part.thread_block[0] for tile in line for part in tile.parts})
    ys = [part.thread_block[1] for part in line[0].parts]
    x, last = xs[0], xs[-1]
    if x == last and ys[-1] > ys[0]:
        return f"{x}, splits {span(range(ys[0], ys[-1] + 1))}"
    steps = {after - before for before, after in pairwise(xs)}
    if len(steps) == 1 and (step := steps.pop()) > 1:  # the parts of a tile lie a team apart
        return f"{x}-{last} by {step}"
    return span(range(x, last + 1))


def _cells(line: list[QueryTile], each: int) -> str:
    """A character for `each` key blocks."""
    states: list[set[str]] = [set() for _ in range(-(-line[0].key_blocks // each))]
    for tile in line:
        for _, state, begin, end in tile.runs():
            for cell in states[begin // each : -(-end // each)]:
                cell.add(state)
    return "".join(_GLYPHS[min(cell)] if len(cell) == 1 else _SEVERAL for cell in states)


def _borders(tile: QueryTile, each: int) -> str:
    """Below the cells: the split, or the thread block, at its first key block, if there is room."""
    first, last = tile.parts[0].thread_block, tile.parts[-1].thread_block
    axis = 0 if first[0] < last[0] else 1
    text = ""
    for part in tile.parts:
        at = part.begin // each
        if at >= len(text) + bool(text):
            text = f"{text:<{at}}{part.thread_block[axis]}"
    return text


def _columns(texts: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(f"{text:<{width}}" for text, width in zip(texts, widths, strict=True))
