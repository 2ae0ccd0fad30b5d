"""docs/how-it-works.md: what its code defines is what the kernels do; its pictures are current."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, Page

from flashattn_ext import _host

FIGURES = ROOT / "docs" / "figures"
PAGE = Page("docs/how-it-works.md")


def draw(folder):
    subprocess.run([sys.executable, FIGURES / "make.py", folder], check=True, timeout=120)
    return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).glob("*.svg")}


@pytest.fixture
def page(monkeypatch):
    """All that the page's code defines; the code asserts what the page says of it."""
    monkeypatch.delenv("FLASHATTN_EXT_CHECK", raising=False)  # it would refuse the bad page
    return PAGE.run({})


def test_code_runs_in_order(page):
    assert len(PAGE.python) >= 10
    assert {"attention", "history", "see", "parts", "merged", "paged", "holed"} <= page.keys()


def test_visible_blocks_of_the_page_are_those_of_the_kernels(page):
    sizes, reaches = (1, 100, 128, 700), (-1, 0, 90, 300)
    compared = 0
    for len_q, len_k, left, right in itertools.product(sizes, sizes, reaches, reaches):
        see = page["band"](len_q, len_k, left, right)
        for first in range(0, len_q, 128):
            last = min(first + 128, len_q) - 1
            if see(last)[1] <= see(first)[0]:
                continue  # nobody sees anything, which the page leaves out
            real = _host.visible_blocks(len_q, len_k, left, right, first, last, 64)
            needed, clean = page["visible_blocks"](see, first, last, 64)
            assert needed == list(range(real.begin, real.end))
            assert clean == list(range(real.clean_begin, real.clean_end))
            compared += 1
    assert compared > 400


def test_pictures_are_shown():
    shown = {Path(to).name for _, to in PAGE.links if to.endswith(".svg")}
    assert shown == {path.name for path in FIGURES.glob("*.svg")}


def test_pictures_are_up_to_date(tmp_path):
    """The same bytes with the same matplotlib, with another one the same labels."""
    matplotlib = pytest.importorskip("matplotlib")
    drawn = draw(tmp_path)
    kept = {path.name: path.read_text(encoding="utf-8") for path in FIGURES.glob("*.svg")}
    assert drawn.keys() == kept.keys()
    for name, picture in drawn.items():
        if f"Matplotlib v{matplotlib.__version__}," in kept[name]:
            assert picture == kept[name], f"{name}: run docs/figures/make.py"
        else:
            assert labels(picture) == labels(kept[name]), f"{name}: run docs/figures/make.py"


def labels(picture):
    return re.findall(r"<text [^>]*>([^<]*)</text>", picture)


def test_picture_of_shares_has_the_numbers_of_the_page():
    pytest.importorskip("matplotlib")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import shares;"
        "work, block = shares.decode_work();"
        "print(block, work.entries, work.tiles, work.busy, work.share, work.cut, work.team)"
    )
    command = [sys.executable, "-c", code, FIGURES]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["64", "72", "6", "6", "12", "4", "1"]
