"""The Markdown pages of the repository: their code, links and headings."""

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))

from definitions import definition  # noqa: E402, F401  as the site finds symbols

_FENCED = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    lines: tuple[str, ...]  # without the indentation of the block
    begin: int  # place in the page's text

    @property
    def code(self):
        return "\n".join(self.lines) + "\n"


@dataclass(frozen=True)
class Page:
    name: str  # path below the root

    @property
    def path(self):
        return ROOT / self.name

    @cached_property
    def text(self):
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self):
        blocks = []
        for found in _FENCED.finditer(self.text):
            indent, language, code = found.groups()
            lines = tuple(line[len(indent) :] for line in code.splitlines())
            blocks.append(Block(language, lines, found.start()))
        return blocks

    @property
    def python(self):
        return [block for block in self.blocks if block.language == "python"]

    @cached_property
    def prose(self):
        return _FENCED.sub("", self.text)

    @cached_property
    def links(self):
        """(text, target) of each link and picture."""
        return re.findall(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", self.prose)

    @cached_property
    def anchors(self):
        """As code hosts make them of headings, in order."""
        headings = re.findall(r"^#+ (.*)$", self.prose, re.MULTILINE)
        return [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]

    @cached_property
    def symbols(self):
        """(file, symbol, target) of the links whose text is `file: symbol`."""
        named = [(text.strip("`"), to) for text, to in self.links if re.match(r"`.*: .*`$", text)]
        return [(*text.split(": "), to) for text, to in named]

    def run(self, names, device="cpu"):
        """Runs the Python of the page, top to bottom, in `names`."""
        for number, block in enumerate(self.python):
            code = block.code
            for other in ("cpu", "cuda"):
                code = code.replace(f'device = "{other}"', f'device = "{device}"')
                code = code.replace(f'device="{other}"', f'device="{device}"')
            exec(compile(code, f"{self.name}, block {number}", "exec"), names)
        return names


def all_pages():
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    return [Page(str(path.relative_to(ROOT))) for path in sorted(found)]
