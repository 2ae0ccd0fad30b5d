"""`Plan.show`: which tiles are drawn, and where to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import _plan_map_text, _plan_picture
from ._plan_launches import Launch
from ._plan_map import tile_map

if TYPE_CHECKING:
    from .planning import Plan

_MOST_SEQUENCES = 64  # unless they are named


def show(
    plan: Plan,
    path: str | Path | None,
    text: bool,
    sequences: Sequence[int] | None,
    heads: Sequence[int] | None,
) -> None:
    if path is not None and text:
        raise ValueError("path: a picture, expected None with text=True")
    if not plan.tiled_launches:
        raise ValueError("show: nothing to draw, as the call starts no attention kernel")
    if sequences is None:
        sequences = range(min(plan.problem.batch, _MOST_SEQUENCES))
    maps = [
        tile_map(plan, launch, sequences, _default_heads(launch) if heads is None else heads)
        for launch in plan.tiled_launches
    ]
    if path is not None:
        if reason := _plan_picture.missing():
            raise RuntimeError(f"path: {reason}, or show(text=True)")
        _plan_picture.save(maps, path)
    elif text or _plan_picture.missing() or not _plan_picture.open_window(maps):
        print(_plan_map_text.render(maps))


def _default_heads(launch: Launch) -> Sequence[int] | None:
    """All where heads share thread blocks, else one, which looks like the others."""
    return None if "decode" in launch.role else [0]
