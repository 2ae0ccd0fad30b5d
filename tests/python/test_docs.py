"""docs/how-it-works.md: its code runs, its links lead somewhere, its pictures are current."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashattn_ext import _host

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = DOCS / "figures"
PAGE = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINKS = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", PAGE)
SYMBOLS = [(*text.strip("`").split(": "), to) for text, to in LINKS if ": " in text]


def draw(folder):
    subprocess.run([sys.executable, FIGURES / "make.py", folder], check=True, timeout=120)
    return {path.name: path.read_text(encoding="utf-8") for path in Path(folder).glob("*.svg")}


def anchor(heading):
    """As GitHub makes it."""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.fixture
def page(monkeypatch):
    """All that the page's code defines; the code asserts what the page says of it."""
    monkeypatch.delenv("FLASHATTN_EXT_CHECK", raising=False)  # it would refuse the bad page
    names = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"docs/how-it-works.md, block {number}", "exec"), names)
    return names


def test_code_runs_in_order(page):
    assert len(BLOCKS) == len(re.findall(r"^```python$", PAGE, re.MULTILINE)) >= 10
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


def test_links_lead_somewhere():
    headings = {anchor(h) for h in re.findall(r"^## (.*)$", PAGE, re.MULTILINE)}
    local = [to for _, to in LINKS if not to.startswith("https://")]
    assert len(local) > 50
    broken = [to for to in local if to not in headings and not (DOCS / to).is_file()]
    assert not broken


@pytest.mark.parametrize("file, symbol, target", SYMBOLS)
def test_symbol_is_in_its_file(file, symbol, target):
    path = DOCS / target
    assert path.name == file
    code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    assert re.search(rf"\b{symbol}\b", code), f"{target} has no {symbol}"


def test_symbols_are_found_on_the_page():
    # Each "`file.h: name`" of the page is one of the links that the test above checks.
    assert len(SYMBOLS) == len(re.findall(r"`\w+\.(?:h|cu|cpp|py): \w+`", PAGE)) >= 30


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_page_is_linked(page):
    text = (DOCS.parent / page).read_text(encoding="utf-8")
    targets = {(DOCS.parent / page).parent / to for to in re.findall(r"\]\(([^)\s#]+)\)", text)}
    assert DOCS / "how-it-works.md" in targets


def test_pictures_are_shown():
    shown = {Path(to).name for _, to in LINKS if to.endswith(".svg")}
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
        "print(block, work.key_blocks, work.tiles, work.busy, work.share, work.cut)"
    )
    command = [sys.executable, "-c", code, FIGURES]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["64", "72", "6", "6", "12", "4"]
