"""Pages in two languages, reduced to what translation does not change."""

import ast
import re
from collections import Counter
from itertools import zip_longest
from typing import NamedTuple
from urllib.parse import unquote

from markdown_it import MarkdownIt
from pages import ROOT, Page

TRANSLATIONS = {
    "README.md": "README.zh-CN.md",
    "docs/how-it-works.md": "docs/zh/how-it-works.md",
}
_ORIGINALS = {chinese: english for english, chinese in TRANSLATIONS.items()}
_MARKDOWN = MarkdownIt("commonmark").enable("table")


class Piece(NamedTuple):
    line: int
    facts: tuple  # what it is, and all in it that both languages share


def first_difference(english, chinese):
    """Where two pages part, as a message, or None."""
    end = Piece(0, ("end",))
    for ours, theirs in zip_longest(pieces(english), pieces(chinese), fillvalue=end):
        if ours.facts != theirs.facts:
            places = (
                f"  {page.name}:{piece.line or 'end'}: {_only(piece.facts, other.facts)}"
                for page, piece, other in ((english, ours, theirs), (chinese, theirs, ours))
            )
            return "\n".join(("the translation differs:", *places))
    return None


def _only(facts, others):
    mine, common = Counter(map(str, facts)), Counter(map(str, others))
    return ", ".join((mine - common).elements()) or "has less"


def pieces(page):
    """A page's headings, paragraphs, list items, table rows and cells, figures and code."""
    line = 0
    for token in _MARKDOWN.parse(page.text):
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline":
            yield Piece(line, ("text", *sorted(_facts(page, token.children))))
        elif token.type == "fence":
            code = _code(token.info, token.content)
            yield Piece(line, (f"code {token.info}", code, *sorted(_numbers(token.content))))
        else:
            yield Piece(line, (f"{token.type} {token.tag}",))


def _facts(page, tokens):
    for token in tokens:
        if token.type == "code_inline":
            yield f"`{token.content}`"
        elif token.type == "link_open":
            yield f"link to {_place(page, token.attrs['href'])}"
        elif token.type == "image":
            yield f"picture {_place(page, token.attrs['src'])}"
            yield from _numbers(token.content)
        elif token.type in ("em_open", "strong_open"):  # it is easily lost beside "，" and "）"
            yield token.tag
        elif token.type == "text":
            yield from _numbers(token.content)


def _numbers(text):
    return re.findall(r"[0-9]+(?:\.[0-9]+)*", text)


def _place(page, target):
    """Where a link leads: in pages that exist twice, the original's name and a heading's number."""
    if target.startswith("https://"):
        return target
    file, _, anchor = unquote(target).partition("#")
    path = (page.path.parent / file).resolve() if file else page.path
    name = str(path.relative_to(ROOT))
    if name not in TRANSLATIONS and name not in _ORIGINALS:
        return f"{name}#{anchor}"
    number = Page(name).anchors.index(anchor) if anchor else ""
    return f"{_ORIGINALS.get(name, name)}#{number}"


def _code(language, text):
    """Code without its comments, Python also without docstrings."""
    if language != "python":
        return "\n".join(line.split("#")[0].rstrip() for line in text.splitlines())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body[0].value.value = ""
    return ast.unparse(tree)
