"""What is being measured: a bar on a terminal that has `rich`, otherwise nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yields what is called with a text at the beginning of each of `total` steps. What is printed
    meanwhile stands above the bar."""
    rich = _rich() if sys.stdout.isatty() else None
    if rich is None:
        yield lambda text: None
        return
    columns = (
        rich.BarColumn(24), rich.MofNCompleteColumn(), rich.TimeElapsedColumn(),
        rich.TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    # Refreshed here alone: a thread that does it would run into what is being timed.
    with rich.Progress(*columns, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=total, completed=-1)

        def began(text: str) -> None:
            bar.update(task, advance=1, description=text, refresh=True)

        yield began


def _rich() -> ModuleType | None:
    try:
        return importlib.import_module("rich.progress")
    except ImportError:
        return None
