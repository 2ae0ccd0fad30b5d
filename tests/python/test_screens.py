"""Pictures of what the programs print: they are current, shown, and of the lines of today."""

import html
import re
import subprocess
import sys

import pytest
from flashattn_ext.info import collect, render
from pages import ROOT, Page

SCRIPT = ROOT / "docs" / "figures" / "screens.py"
KEPT = SCRIPT.with_suffix("")
PICTURES = sorted(path.name for path in KEPT.glob("*.svg"))


def lines(picture):
    """Its rows of text, from the top, whatever version of rich drew it."""
    rows = {}
    for y, text in re.findall(r'<text [^>]*\by="([\d.]+)"[^>]*>([^<]*)</text>', picture):
        rows[float(y)] = rows.get(float(y), "") + html.unescape(text).replace("\xa0", " ")
    return [row.rstrip() for _, row in sorted(rows.items())]


def test_screens_are_up_to_date(tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("flashattn_ext._host")  # plan needs it
    subprocess.run([sys.executable, SCRIPT, tmp_path], check=True, timeout=120)
    assert sorted(path.name for path in tmp_path.iterdir()) == PICTURES
    for name in PICTURES:
        drawn, kept = ((folder / name).read_text("utf-8") for folder in (tmp_path, KEPT))
        assert len(lines(kept)) > 8
        assert lines(drawn) == lines(kept), f"{name}: run docs/figures/screens.py"


def test_screens_are_shown():
    shown = [to for _, to in Page("docs/api/programs.md").links if to.endswith(".svg")]
    assert sorted(to.rpartition("/")[2] for to in shown if "/screens/" in to) == PICTURES


def test_info_has_the_lines_of_today():
    """Those that every machine with a build has, in their order."""
    printed = (KEPT / "info.txt").read_text(encoding="utf-8").splitlines()
    assert printed[0] == "$ python -m flashattn_ext.info" and printed[-1].startswith("Usable on ")
    names = [line.split("  ")[0] for line in render(collect()).splitlines()]
    common = names[: names.index("CPU") + 1]
    assert [line.split("  ")[0] for line in printed[1 : len(common) + 1]] == common
