"""Tile maps as a picture, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ._plan_map import CLEAN, MASKED, SKIPPED, QueryTile, TileMap
from ._plan_map_text import span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib's backends that write files only.
_WINDOWLESS = {"agg", "cairo", "pdf", "pgf", "ps", "svg", "template"}
# Of parts with even and with odd thread blocks, so that neighbours differ.
_COLORS = {
    CLEAN: ("#56a0d3", "#7cb5de"),
    MASKED: ("#f0a04b", "#f6bd82"),
    SKIPPED: ("#eeeeee", "#eeeeee"),
}
_MEANINGS = {
    CLEAN: "clean: every query sees every key",
    MASKED: "masked",
    SKIPPED: "skipped: not loaded",
}
_INK = "#222222"
_MOST_TILES = 256  # of a map; what is more is left out
_MOST_NAMES = 48  # beside the rows; with more rows, parts have no numbers
_MOST_LINES = 96  # between key blocks
_WIDTH = 10.0  # inches, as are the following
_TALLEST_ROW, _TALLEST_MAP = 0.28, 9.0
_LETTER = 0.065
_CELLS, _LINES, _TEXT = 1, 2, 3  # what covers what


def missing() -> str:
    """Why there can be no picture, or ""."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        return f"a picture needs matplotlib ({error}): pip install matplotlib"
    return ""


def save(maps: Sequence[TileMap], path: str | Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    draw(figure, maps)
    figure.savefig(path, dpi=130)


def open_window(maps: Sequence[TileMap]) -> bool:
    """Waits until the window is closed. False where there can be none."""
    import matplotlib.pyplot as plt

    if plt.get_backend().lower() in _WINDOWLESS:
        return False
    draw(plt.figure(), maps)
    plt.show()
    return True


def draw(figure: Figure, maps: Sequence[TileMap]) -> None:
    """Rows are tiles, keys go to the right; frames and numbers are thread blocks."""
    from matplotlib.patches import Patch

    shown = [tile_map.excerpt(_MOST_TILES) for tile_map in maps]
    heights = [max(len(tiles), 2) for tiles in shown]
    row = min(_TALLEST_ROW, _TALLEST_MAP / sum(heights))
    figure.set_size_inches(_WIDTH, row * sum(heights) + 0.9 * len(maps) + 0.4)
    figure.set_layout_engine("constrained")
    grid = figure.subplots(len(maps), squeeze=False, height_ratios=heights)[:, 0]
    for axes, tile_map, tiles in zip(grid, maps, shown, strict=True):
        _name(axes, tile_map, tiles)
        _draw_cells(axes, tile_map, tiles)
        _draw_parts(axes, tile_map, tiles)
    patches = [Patch(facecolor=_COLORS[state][0], label=text) for state, text in _MEANINGS.items()]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8
    )


def _name(axes: Axes, tile_map: TileMap, tiles: Sequence[QueryTile]) -> None:
    launch = tile_map.launch
    rows, keys = launch.tile or (0, 0)
    title = f"{launch.kernel}, {launch.role}: tiles of {rows} rows × {keys} keys; "
    title += "numbers: thread blocks" if launch.grid[1] == 1 else "numbers: thread block, split"
    if more := len(tile_map.tiles) - len(tiles):
        title += f"; {more} tiles more are not shown"
    axes.set_title(title, fontsize=9, loc="left")
    named = list(enumerate(tiles))[:: -(-len(tiles) // _MOST_NAMES) or 1]
    axes.set_yticks(
        [y + 0.5 for y, _ in named],
        [
            f"seq {tile.sequence}, head {span(tile.heads)}, query {span(tile.queries)}"
            for _, tile in named
        ],
        fontsize=7,
    )
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("keys", fontsize=8)
    axes.spines[:].set_visible(False)
    axes.set_xlim(0, _longest(tiles))
    axes.set_ylim(max(len(tiles), 1), 0)


def _draw_cells(axes: Axes, tile_map: TileMap, tiles: Sequence[QueryTile]) -> None:
    _, block = tile_map.launch.tile or (0, 1)
    for y, tile in enumerate(tiles):
        for part, state, begin, end in tile.runs():
            color = _COLORS[state][sum(part.thread_block) % 2 if part else 0]
            bar = _bar(begin, end, block, tile.keys)
            axes.broken_barh([bar], (y, 1), facecolor=color, linewidth=0, zorder=_CELLS)
    if (longest := _longest(tiles)) // block <= _MOST_LINES:
        edges = range(block, longest, block)
        axes.vlines(edges, 0, len(tiles), color="white", linewidth=0.6, zorder=_CELLS)


def _draw_parts(axes: Axes, tile_map: TileMap, tiles: Sequence[QueryTile]) -> None:
    _, block = tile_map.launch.tile or (0, 1)
    numbers = 2 if tile_map.launch.grid[1] > 1 else 1
    numbered = len(tiles) <= _MOST_NAMES
    keys_per_inch = _longest(tiles) / (0.8 * _WIDTH)  # row names take the rest
    for y, tile in enumerate(tiles):
        for part in tile.parts:
            left, width = _bar(part.begin, part.end, block, tile.keys)
            axes.broken_barh(
                [(left, width)], (y, 1), facecolor="none", edgecolor=_INK,
                linewidth=0.8 if numbered else 0.2, zorder=_LINES,
            )  # fmt: skip
            name = ",".join(map(str, part.thread_block[:numbers]))
            room = width >= (len(name) + 1) * _LETTER * keys_per_inch
            if numbered and (room or part is tile.parts[-1]):
                at, align = (left + width / 2, "center") if room else (left + width, "left")
                axes.text(
                    at, y + 0.5, name if room else f" {name}", ha=align, va="center_baseline",
                    fontsize=7, color=_INK, zorder=_TEXT,
                )  # fmt: skip


def _longest(tiles: Sequence[QueryTile]) -> int:
    return max((tile.keys for tile in tiles), default=0) or 1


def _bar(begin: int, end: int, block: int, keys: int) -> tuple[int, int]:
    """Key blocks as (first key, number of keys)."""
    left, right = min(begin * block, keys), min(end * block, keys)
    return left, right - left
