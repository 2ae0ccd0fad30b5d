"""Links from pages to files of the repository that are no pages: the site gets these files too.

On a code host such a link shows the file. In the site it leads to a page with the file's text, at
the line of the symbol when the link's text is `file: symbol`. A folder becomes a list of its files.
"""

from pathlib import Path

from definitions import definition
from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.util.osutil import relative_uri

FOLDER = "files"  # of the site
_FORMATTER = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True)


def link_files(app, doctree):
    """Turns what MyST takes for downloads and missing pages into links to pages of files."""
    linked = app.env.__dict__.setdefault("linked_files", set())
    for node in list(doctree.findall(_is_file_link)):
        target = _target(app, node)
        if target is None:
            continue
        linked.add(target)
        page = app.builder.get_target_uri(app.env.docname)
        uri = relative_uri(page, _uri(target)) + _line_anchor(app, target, node.astext())
        node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def _is_file_link(node):
    return isinstance(node, addnodes.download_reference) or (
        isinstance(node, addnodes.pending_xref) and node.get("reftype") == "myst"
    )


def _target(app, node):
    """The file or folder below the root, or None where the link is for Sphinx to resolve."""
    root = Path(app.srcdir)
    path = (root / app.env.docname).parent / node["reftarget"]
    if node.get("refdomain") == "doc" or not path.exists():
        return None
    return str(path.resolve().relative_to(root.resolve()))


def _uri(target):
    return f"{FOLDER}/{target}.html"


def _line_anchor(app, target, text):
    symbol = text.rpartition(": ")[2] if ": " in text else ""
    if not symbol:
        return ""
    lines = (Path(app.srcdir) / target).read_text(encoding="utf-8").splitlines()
    number = definition(lines, symbol)
    return f"#L-{number}" if number else ""


def file_pages(app):
    """What Sphinx writes beside its own pages: (name, context, template)."""
    for target in sorted(app.env.__dict__.get("linked_files", ())):
        path = Path(app.srcdir) / target
        body = _listing(path) if path.is_dir() else _text(path)
        context = {"title": target, "body": f"<h1>{target}</h1>{body}"}
        yield f"{FOLDER}/{target}", context, "page.html"


def _listing(path):
    names = sorted(child.name for child in path.iterdir() if child.is_file())
    return "<ul>" + "".join(f"<li><code>{name}</code></li>" for name in names) + "</ul>"


def _text(path):
    code = path.read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    return highlight(code, lexer, _FORMATTER)


def setup(app):
    app.connect("doctree-read", link_files, priority=100)  # before downloads are collected
    app.connect("html-collect-pages", file_pages)
    return {"parallel_read_safe": False}
