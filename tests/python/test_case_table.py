"""docs/cases.md: every case has a row; the tests that a row names exist and run where it says."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import draws
import pytest
from bad_inputs import SERVED, outcome, spoils
from good_calls import CALLS

TREE = Path(__file__).parents[2]
ROW = re.compile(r"^\| ((?:C|D|guard )\d+) \|(.*)\|(.*)\|(.*)\|(.*)\|$", re.MULTILINE)
TEST = re.compile(r"`(\w+\.(?:py|cpp))::([\w.]+)`")
NOT_IN_USE = {
    2,
    8,
    10,
    17,
    22,
    25,
    31,
    34,
    37,
    42,
    49,
    57,
    62,
    65,
    69,
    76,
    79,
    81,
    84,
    90,
    93,
    95,
    97,
}
NOT_IN_USE |= {102, 105, 108}
IDS = [f"C{n:02}" for n in range(1, 113) if n not in NOT_IN_USE]
IDS += [*(f"D{n:02}" for n in range(1, 19)), *(f"guard {n}" for n in range(1, 5))]


@cache
def places_of_python(file):
    """name of a test -> {"CPU", "GPU"}: where it runs."""
    tree = ast.parse((TREE / "tests/python" / file).read_text())
    all_on_gpu = any(
        "pytestmark" in ast.unparse(node) and "gpu" in ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Assign)
    )
    places = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            arguments = {argument.arg for argument in node.args.args}
            marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
            if all_on_gpu or "mark.gpu" in marks:
                places[node.name] = {"GPU"}
            else:
                places[node.name] = (
                    {"CPU", "GPU"} if arguments & {"device", "anywhere"} else {"CPU"}
                )
    return places


@cache
def places_of_cpp(file):
    """The same; ctest's label is that of the executable which has the file."""
    source = (TREE / "tests/cpp" / file).read_text()
    text = (TREE / "tests/cpp/CMakeLists.txt").read_text()
    label = re.search(rf"flashattn_add_test\(\w+ (cpu|gpu)\b[^)]*\b{file}", text).group(1)
    names = re.findall(r"^TEST\((\w+), (\w+)\)", source, re.MULTILINE)
    return {".".join(name): {label.upper()} for name in names}


def rows():
    return ROW.findall((TREE / "docs/cases.md").read_text())


def test_every_case_has_one_row():
    assert [row[0] for row in rows()] == sorted(IDS, key=order)


def order(case):
    return ("CDg".index(case[0]), int(re.search(r"\d+", case).group()))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_tests_exist_and_run_where_the_row_says(row):
    case, kind, tests, result, note = (cell.strip() for cell in row)
    named = TEST.findall(tests)
    assert kind and tests.count("`") == 2 * len(named), (
        f"{case}: expected `file::test`, got {tests}"
    )
    places = set()
    for file, name in named:
        found = places_of_python(file) if file.endswith(".py") else places_of_cpp(file)
        assert name in found, f"{case}: {file} has no {name}"
        places |= found[name]
    if case[0] in "CD" and named:
        names = " ".join(f"_{name.split('.')[-1]}" for _, name in named)
        assert re.search(rf"_{case}(?!\d)", names, re.IGNORECASE), f"{case}: no test of that name"
    if not named:
        assert result == "does not apply" and note, f"{case}: neither a test nor a reason"
    else:
        assert result == "holds: " + ", ".join(sorted(places)), f"{case}: runs on {places}"


def bad_inputs(device):
    """How many test_bad_inputs.py expects to be refused."""
    made = [(name, make(device)) for name, (_, make) in CALLS.items()]
    return sum(
        outcome(situation, name, kind) is not SERVED
        for situation, given in made
        for name in given
        for kind in spoils(name, given)
    )


def test_numbers_of_the_page():
    page = (TREE / "docs/cases.md").read_text()
    # On a GPU by the record, as head dims that a build lacks are not drawn.
    recorded = json.loads((TREE / "tests/gpu_record.json").read_text())["numbers"]
    on_gpu = [recorded[f"drawn pairs of options: {kind}"] for kind in ("attention", "merge")]
    on_cpu = [len(draws.kind_of(kind, "cpu").space.pairs) for kind in ("attention", "merge")]
    for of_calls, of_merges in (on_cpu, on_gpu):
        assert f"| {of_calls} of attention, {of_merges} of merges |" in page
    on_cpu, on_meta = bad_inputs("cpu"), bad_inputs("meta")
    assert f"| {on_cpu} on the CPU, {on_meta} on meta tensors |" in page
    assert f"| {len(rows()) - 4}, and 4 layers of guards |" in page


def test_numbers_of_the_gpu_record():
    """All that tests said of themselves; pairs of options are in the test above."""
    page = (TREE / "docs/cases.md").read_text()
    record = json.loads((TREE / "tests/gpu_record.json").read_text())
    skipped = sum(record["skipped"].values())
    passed = f"{record['passed']} tests passed on {record['date']}, none failed"
    assert f"{passed}; {skipped} were skipped" in page
    left_out = [word for word in record["pytest_arguments"] if word.startswith("--ignore")]
    assert record["failed"] == 0 and not left_out
    phrases = {
        ("drawn calls: attention", "drawn calls: merge"): "on a GPU {} and {} |",
        ("bad inputs refused on cuda", "spoilt calls refused on cuda"): "| {}; and {} drawn calls,",
        ("soak calls on cuda", "soak replays of graphs"): "| {} in 15 s, and in 30 s {} replays",
    }
    pairs = {name for name in record["numbers"] if name.startswith("drawn pairs of options")}
    assert pairs.union(*phrases) == set(record["numbers"])
    for names, phrase in phrases.items():
        assert phrase.format(*(record["numbers"][name] for name in names)) in page
