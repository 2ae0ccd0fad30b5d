"""Sphinx: the site that `make docs` builds of README.md and docs/.

A page is Markdown that also reads well on a code host, so that nothing in it is Sphinx's own but
the blocks of docs/api/. What the site adds: navigation, search, and the files that pages link to.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

project = "flashattn_ext"
author = "the authors of flashattn_ext"
copyright = author
version = release = re.search(
    r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
)[1]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "source_files",
]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md"]

# The sidebar; a pattern may match nothing. A page in no list is a warning, and so an error.
navigation = {
    "Use": [
        "docs/start",
        "docs/semantics",
        "docs/options",
        "docs/migration",
        "docs/distributed",
        "docs/profiling",
        "docs/troubleshooting",
        "docs/packaging",
    ],
    "API": [
        "docs/api/functions",
        "docs/api/plan",
        "docs/api/flash_attn_interface",
        "docs/api/integrations",
        "docs/api/programs",
        "docs/api/cpp",
    ],
    "Understand": [
        "docs/how-it-works",
        "docs/architecture",
        "docs/performance*",
        "docs/accuracy",
        "docs/tuning",
        "docs/cases",
        "benchmarks/README",
    ],
    "Change": ["docs/extending", "CONTRIBUTING", "CHANGELOG"],
    "简体中文": ["README.zh-*", "docs/zh/*"],
}

myst_heading_anchors = 3
autodoc_typehints = "none"  # signatures have them
autodoc_member_order = "bysource"
default_role = "py:obj"
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_param = False  # "q, k, v: ..." is one entry

html_theme = "furo"
html_title = f"{project} {version}"
html_additional_pages = {"index": "to_readme.html"}
html_show_sourcelink = False
templates_path = ["templates"]


def add_navigation(app, docname, source):
    if docname != root_doc:
        return
    for caption, patterns in navigation.items():
        entries = "\n".join(f"/{page}" for pattern in patterns for page in pages(pattern))
        if entries:
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def pages(pattern):
    if "*" not in pattern:
        return [pattern]
    found = sorted(ROOT.glob(f"{pattern}.md"))
    return [str(path.relative_to(ROOT).with_suffix("")) for path in found]


def setup(app):
    app.connect("source-read", add_navigation)
