"""Draws the pictures of docs/how-it-works.md: python docs/figures/make.py [folder]."""

import importlib
import sys
from pathlib import Path

from matplotlib import rc_context
from style import SETTINGS

HERE = Path(__file__).parent
PICTURES = ("tiles", "staircase", "packing", "pipeline", "shares", "tile_map", "pages")


def main(folder=HERE):
    """Writes one SVG for each picture into `folder`, by default beside the scripts.

    The bytes of a file depend on the picture and on matplotlib's version alone.
    """
    with rc_context(SETTINGS):
        for name in PICTURES:
            figure = importlib.import_module(name).draw()
            path = Path(folder) / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main(*sys.argv[1:2])
