"""A PNG for each suite: bars beside the roof, and lines for what grows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .measure import Record
from .table import cut, group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR = 0.16  # inches
UNIT_OF_TIME = "us"


def missing() -> str:
    """Why there can be no plots, or ""."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        return f"no plots: {error}; pip install 'flashattn_ext[bench]' (or matplotlib alone)"
    return ""


def write_plots(
    folder: Path, records: list[Record], titles: dict[str, str], machine: str
) -> list[Path]:
    """Writes ``folder/SUITE.png`` for each suite with something measured; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for suite in dict.fromkeys(record.suite for record in records):
        mine = [r for r in records if r.suite == suite and r.status == "measured"]
        if mine:
            figure = (_growth if suite == "growth" else _bars)(mine, titles)
            figure.suptitle(f"{suite}: {machine}", fontsize=9)
            paths.append(folder / f"{suite}.png")
            figure.savefig(paths[-1], dpi=130)
    return paths


def _bars(records: list[Record], titles: dict[str, str]) -> Figure:
    """Axes for each unit, and in them a group of bars per case."""
    from matplotlib.figure import Figure

    parts = [[r for r in records if r.unit == u] for u in dict.fromkeys(r.unit for r in records)]
    backends = list(dict.fromkeys(record.backend for record in records))
    heights = [len(set(map(_row, part))) for part in parts]
    inches = 1.4 * len(parts) + BAR * sum(heights) * (len(backends) + 1)
    figure = Figure(figsize=(9, inches), layout="constrained")
    grid = figure.subplots(len(parts), squeeze=False, height_ratios=heights)[:, 0]
    for axes, part in zip(grid, parts, strict=True):
        _draw_bars(axes, part, backends, titles)
    return figure


def _draw_bars(
    axes: Axes, records: list[Record], backends: list[str], titles: dict[str, str]
) -> None:
    """The rate, or the time where no rate counts."""
    rows = list(dict.fromkeys(map(_row, records)))
    thickness = 1 / (len(backends) + 1)
    for n, backend in enumerate(backends):
        mine = [record for record in records if record.backend == backend]
        if not mine:
            continue
        places = [rows.index(_row(record)) + (n + 0.5) * thickness for record in mine]
        axes.barh(
            places, list(map(_value, mine)), height=thickness, color=f"C{n}", label=titles[backend]
        )
    for roof, row in {(record.roof, _row(record)) for record in records if record.roof}:
        axes.vlines(roof, rows.index(row), rows.index(row) + 0.8, color="black", linewidth=2)
    axes.set_yticks([n + 0.4 for n in range(len(rows))], [cut(row, 60) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    unit = records[0].unit or UNIT_OF_TIME
    axes.set_xlabel(f"{unit}, black: roof" if records[0].roof else unit)
    axes.legend(fontsize=7)


def _growth(records: list[Record], titles: dict[str, str]) -> Figure:
    """A pair of axes per dimension that grows, both logarithmic, with the range of p10 to p90."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(group(record) for record in records))
    figure = Figure(figsize=(4.5 * len(groups), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        for n, backend in enumerate(dict.fromkeys(record.backend for record in records)):
            mine = [r for r in records if r.backend == backend and group(r) == name]
            if not mine:
                continue
            dimension = name.replace("-", "_")
            mine.sort(key=lambda record: record.shape[dimension])
            x = [record.shape[dimension] for record in mine]
            color = f"C{n}"
            axes.plot(
                x, [r.median_us for r in mine], marker="o", ms=3, color=color, label=titles[backend]
            )
            spread = [r.p10_us for r in mine], [r.p90_us for r in mine]
            axes.fill_between(x, *spread, alpha=0.2, color=color)
        axes.set(yscale="log", xlabel=name, ylabel=UNIT_OF_TIME)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figure


def _row(record: Record) -> str:
    return record.label if record.case == record.suite else f"{record.case} {record.label}"


def _value(record: Record) -> float:
    return record.median_us if record.rate is None else record.rate
