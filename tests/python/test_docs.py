"""All pages: their code runs, links lead somewhere, what they name exists, the site builds."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from flashattn_ext.bench.devices import device_of
from flashattn_ext.bench.grids import SUITES
from flashattn_ext.bench.options import given_shape, parser
from pages import ROOT, Page, all_pages, definition

PAGES = {page.name: page for page in all_pages()}
README = PAGES["README.md"]

# What a block of code may be. Python runs, but for benchmarks/README.md, which shows a signature.
LANGUAGES = {"python", "sh", "text", "diff", "cmake", "{eval-rst}", ""}
RUN = [name for name in PAGES if PAGES[name].python and not name.startswith("benchmarks/")]
# Their tests look at the results; the last runs in two processes.
RUN_BY_OTHERS = {"docs/how-it-works.md", "docs/migration.md", "docs/distributed.md"}
WITH_DEVICE = [name for name in RUN if re.search(r'device ?= ?"', PAGES[name].text)]
SYMBOLS = [(name, *symbol) for name, page in PAGES.items() for symbol in page.symbols]


def test_pages_are_found():
    assert {"docs/start.md", "docs/semantics.md", "docs/options.md", *RUN_BY_OTHERS} <= set(RUN)
    assert {"README.zh-CN.md", "docs/zh/how-it-works.md"} <= set(RUN)
    languages = {block.language for page in PAGES.values() for block in page.blocks}
    assert languages <= LANGUAGES


# Code


@pytest.fixture
def names(monkeypatch, tmp_path):
    """What the code of a page finds: any build plans for all head dims, and a model at `path`."""
    from flashattn_ext import _plan_gpus

    monkeypatch.delenv("FLASHATTN_EXT_CHECK", raising=False)
    monkeypatch.setattr(_plan_gpus, "BUILD", {})
    return {"path": tmp_path}


def write_model(path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(path)


@pytest.mark.parametrize("name", [name for name in RUN if name not in RUN_BY_OTHERS])
def test_code_runs_in_order(name, names):
    if "from_pretrained(path" in PAGES[name].text:
        pytest.importorskip("transformers")
        write_model(names["path"])
    PAGES[name].run(names)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in WITH_DEVICE if name not in RUN_BY_OTHERS])
def test_code_runs_in_order_on_a_gpu(name, names):
    if "from_pretrained(path" in PAGES[name].text:
        pytest.importorskip("transformers")
        write_model(names["path"])
    PAGES[name].run(names, "cuda")


COMMANDS = {
    line.split("#")[0].strip()
    for page in PAGES.values()
    for block in page.blocks
    if block.language == "sh"
    for line in block.lines
    if line.startswith("python -m flashattn_ext.")
}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_command_runs(command):
    words = [sys.executable, *command.split()[1:]]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environ)
    assert done.returncode == 0 and done.stdout, done.stderr


BENCH = {
    words.strip()
    for page in PAGES.values()
    for words in re.findall(r"python -m flashattn_ext\.bench ([^`#|\n]*)", page.text)
} - {"", "--help", "SUITE …"}


@pytest.mark.parametrize("words", sorted(BENCH))
def test_benchmark_has_cases(words):
    """In blocks and in sentences; most of it is measured on a GPU."""
    arguments = parser().parse_args(words.split())
    assert arguments.suites
    for suite in (SUITES[name] for name in arguments.suites):
        assert suite.cases(device_of(suite), given_shape(arguments), arguments.case)


@pytest.mark.parametrize("name", PAGES)
def test_cmake_lines_are_those_of_the_example(name):
    """Which ctest builds against an installed library."""
    example = (ROOT / "examples/cpp/CMakeLists.txt").read_text(encoding="utf-8").splitlines()
    for block in (block for block in PAGES[name].blocks if block.language == "cmake"):
        assert {line.replace("engine", "attention") for line in block.lines} <= set(example)


@pytest.mark.parametrize("name", PAGES)
def test_cmake_options_exist(name):
    listed = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    options = set(re.findall(r"^(?:set|option)\((FLASHATTN_\w+) ", listed, re.MULTILINE))
    in_words_or_a_row = r"-D(FLASHATTN_\w+)|^\| `(FLASHATTN_(?!EXT_)\w+)` \|"
    named = re.findall(in_words_or_a_row, PAGES[name].text, re.MULTILINE)
    assert {given or row for given, row in named} <= options


@pytest.mark.parametrize("name", PAGES)
def test_diffs_begin_with_lines_that_exist(name):
    """Each diff belongs to the file of the last link before it."""
    page = PAGES[name]
    for block in (block for block in page.blocks if block.language == "diff"):
        target = re.findall(r"\]\(([^)#\s]+)\)", page.text[: block.begin])[-1]
        old = "\n".join(line[1:] for line in block.lines if line[0] in " -")
        text = (page.path.parent / target).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{target} does not have, or has twice:\n{old}"


# Links


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = PAGES[name]
    broken = []
    for _, target in page.links:
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


def anchors(path):
    return Page(str(path.relative_to(ROOT))).anchors


@pytest.mark.parametrize("name, file, symbol, target", SYMBOLS)
def test_symbol_is_defined_in_its_file(name, file, symbol, target):
    path = PAGES[name].path.parent / target
    assert path.name == file
    lines = path.read_text(encoding="utf-8").splitlines()
    assert definition(lines, symbol), f"{target} does not define {symbol}"


@pytest.mark.parametrize("name", PAGES)
def test_symbols_are_links(name):
    """Each "`file.h: name`" is one of the links that the test above checks."""
    named = re.findall(r"`\w+\.(?:h|cu|cpp|py): \w+`", PAGES[name].prose)
    assert len(named) == len(PAGES[name].symbols)


def test_every_page_is_reached_from_the_readme():
    reached, todo = set(), [README]
    while todo:
        page = todo.pop()
        if page.name in reached:
            continue
        reached.add(page.name)
        for _, target in page.links:
            path = (page.path.parent / target.partition("#")[0]).resolve()
            name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
            todo += [PAGES[name]] if name in PAGES else []
    assert set(PAGES) - reached <= {"CHANGELOG.md"}


# The site


@pytest.mark.slow
@pytest.mark.skipif(not (find_spec("sphinx") and find_spec("furo")), reason="needs `make docs`")
def test_site_builds_without_a_warning(tmp_path):
    """What `make docs` does; its links to files of the repository lead to the line they name."""
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-c", ROOT / "docs/site"]
    done = subprocess.run([*command, ROOT, tmp_path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for name in ("docs/how-it-works.html", "docs/zh/how-it-works.html"):
        page = (tmp_path / name).read_text(encoding="utf-8")
        links = re.findall(r'href="(?:\.\./)+files/([^"#]+)\.html#L-(\d+)"', page)
        assert len(links) >= 30
        for file, line in links:
            assert f'name="L-{line}"' in (tmp_path / "files" / f"{file}.html").read_text("utf-8")
