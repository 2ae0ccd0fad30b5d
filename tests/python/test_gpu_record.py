"""The record of the GPU suite: what it hashes, what it says, what it refuses."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "gpu_record.py"
spec = importlib.util.spec_from_file_location("gpu_record", SCRIPT)
gpu_record = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_record)

GOOD = {
    "content_hash": "a",
    "gpu": "H200",
    "date": "2030-01-01",
    "passed": 3,
    "failed": 0,
    "skipped": {"no second GPU": 1},
    "failed_tests": [],
}


@pytest.fixture
def tree(tmp_path):
    for name, text in {
        "csrc/core/mask.h": "int mask;",
        "csrc/dispatch.cpp": "int main;",
        "flashattn_ext/__init__.py": "",
        "docs/page.md": "text",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_hash_sees_every_source(tree):
    seen = {gpu_record.content_hash(tree)}
    (tree / "csrc/core/mask.h").write_text("int Mask;")
    seen.add(gpu_record.content_hash(tree))
    (tree / "flashattn_ext/new.py").write_text("")
    seen.add(gpu_record.content_hash(tree))
    (tree / "csrc/dispatch.cpp").rename(tree / "csrc/moved.cpp")
    seen.add(gpu_record.content_hash(tree))
    (tree / "csrc/moved.cpp").unlink()
    seen.add(gpu_record.content_hash(tree))
    assert len(seen) == 5


def test_hash_ignores_what_a_build_leaves(tree):
    before = gpu_record.content_hash(tree)
    for name in ("_C.so", "_host.cpython-311-x86_64-linux-gnu.so", "_build_info.json"):
        (tree / "flashattn_ext" / name).write_text("built")
    (tree / "flashattn_ext/__pycache__").mkdir()
    (tree / "flashattn_ext/__pycache__/info.py").write_text("")
    (tree / "docs/page.md").write_text("other text")
    os.utime(tree / "csrc/dispatch.cpp", (1, 1))
    assert gpu_record.content_hash(tree) == before


def test_hash_keeps_name_and_content_apart(tree):
    before = gpu_record.content_hash(tree)
    (tree / "csrc/core/mask.h").write_text("int main;")
    (tree / "csrc/dispatch.cpp").write_text("int mask;")
    assert gpu_record.content_hash(tree) != before


@pytest.mark.parametrize(
    ("record", "current", "good", "word"),
    [
        (GOOD, "a", True, "3 tests passed on H200"),
        (
            GOOD | {"pytest_arguments": ["-q", "--ignore=test_x.py"]},
            "a",
            True,
            "all: --ignore=test_x.py",
        ),
        (GOOD, "b", False, "has changed"),
        (None, "a", False, "no GPU record"),
        (GOOD | {"failed": 1, "failed_tests": ["test_x"]}, "a", False, "test_x"),
        (GOOD | {"failed": 1}, "a", False, "1 failed"),
        (GOOD | {"passed": 0}, "a", False, "no test that passed"),
    ],
)
def test_verdict(record, current, good, word):
    result, sentence = gpu_record.verdict(record, current)
    assert result == good and word in sentence and "\n" not in sentence


def test_check_needs_the_standard_library_only(tree):
    """Run as a user would, in a Python that sees no installed package."""
    (tree / "tests").mkdir()
    script = tree / "tests" / "gpu_record.py"
    script.write_text(SCRIPT.read_text())
    command = [sys.executable, "-I", "-S", str(script), "--check"]
    for content_hash, exit_code in (("stale", 1), (gpu_record.content_hash(tree), 0)):
        record = GOOD | {"content_hash": content_hash}
        (tree / "tests" / "gpu_record.json").write_text(json.dumps(record))
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == exit_code, run.stderr
        assert len(run.stdout.strip().split("\n")) == 1 and not run.stderr


PYTEST_XML = """<testsuites><testsuite><testcase classname="m" name="good"/>
<testcase classname="m" name="bad"><failure>no</failure></testcase>
<testcase classname="m" name="broken"><error>no</error></testcase>
<testcase classname="m" name="left"><skipped message="no second GPU">x.py:1: no</skipped></testcase>
<testcase classname="m" name="same"><skipped message="no second GPU">y.py:2: no</skipped></testcase>
<testcase classname="m" name="mute"><skipped/></testcase></testsuite></testsuites>"""
PYTEST_PROPERTIES = """<testsuite><testcase classname="m" name="good"><properties>
<property name="drawn calls: merge" value="20000"/></properties></testcase>
<testcase classname="m" name="a"><properties><property name="refused" value="5"/></properties>
</testcase><testcase classname="m" name="b"><properties><property name="refused" value="7"/>
</properties></testcase></testsuite>"""
CTEST_XML = """<testsuite><testcase name="good" status="run"/><testcase name="bad" status="fail">
<failure/></testcase><testcase name="left" status="notrun"/></testsuite>"""


def test_reports_are_read(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(PYTEST_XML)
    assert gpu_record.read_junit(report) == (
        {"passed": 1, "failed": 2, "skipped": {"no second GPU": 2, "no reason given": 1}},
        ["m::bad", "m::broken"],
    )
    report.write_text(CTEST_XML)
    counts, failed = gpu_record.read_junit(report)
    assert counts == {"passed": 1, "failed": 1, "skipped": {"notrun": 1}} and failed == [
        "ctest::bad"
    ]


def test_numbers_of_tests_are_read(tmp_path):
    report = tmp_path / "report.xml"
    assert gpu_record.read_numbers(report) == {}
    report.write_text(PYTEST_PROPERTIES)
    assert gpu_record.read_numbers(report) == {"drawn calls: merge": 20000, "refused": 12}
    assert gpu_record.read_junit(report) == ({"passed": 3, "failed": 0, "skipped": {}}, [])


@pytest.mark.parametrize("writes_report", [False, True])
def test_a_runner_that_dies_is_a_failure(tmp_path, writes_report):
    report = tmp_path / "report.xml"
    if writes_report:
        report.write_text("<testsuite><testcase name='good'/></testsuite>")
    command = [sys.executable, "-c", "raise SystemExit(139)"]
    counts, failed = gpu_record.run_suite(command, report)
    assert counts["failed"] == 1 and "139" in failed[0]


def test_a_package_of_other_sources_is_stale(tree, tmp_path):
    installed, library = tree / "flashattn_ext", tree / "flashattn_ext/_C.so"
    assert "does not exist" in gpu_record.why_stale(installed, library, tree)
    library.write_text("built")
    for path in tree.rglob("*"):
        os.utime(path, (1000, 1000))
    assert gpu_record.why_stale(installed, library, tree) == ""
    os.utime(tree / "csrc/core/mask.h", (2000, 2000))
    assert "csrc/core/mask.h" in gpu_record.why_stale(installed, library, tree)
    os.utime(library, (3000, 3000))
    elsewhere = tmp_path / "site-packages"
    elsewhere.mkdir()
    (elsewhere / "__init__.py").write_text("old = True")
    assert "__init__.py" in gpu_record.why_stale(elsewhere, library, tree)


@pytest.fixture
def with_failures(tmp_path, monkeypatch):
    """A record of this code with one failed test; what ran is in the list that it returns."""
    record = {
        **GOOD,
        "content_hash": gpu_record.content_hash(),
        "failed": 1,
        "failed_tests": ["tests.python.test_x::test_y[cuda-1]"],
    }
    monkeypatch.setattr(gpu_record, "RECORD", tmp_path / "record.json")
    gpu_record.RECORD.write_text(json.dumps(record))
    ran = []

    def run_suite(command, report):
        ran.append(command)
        return {"passed": 1, "failed": 0}, []

    monkeypatch.setattr(gpu_record, "run_suite", run_suite)
    return ran


def test_failed_tests_run_again_and_the_rest_stands(with_failures):
    assert gpu_record.record_failed() == 0
    ((_, _, _, test, *_),) = with_failures
    assert test == "python/test_x.py::test_y[cuda-1]"
    record = json.loads(gpu_record.RECORD.read_text())
    assert (record["passed"], record["failed"], record["failed_tests"]) == (4, 0, [])
    assert record["run_again"] == [test]


@pytest.mark.parametrize(
    "change",
    [
        {"content_hash": "of another code"},
        {"failed_tests": []},
        {"failed_tests": ["ctest::Splitkv.Pages"]},
        {"failed_tests": ["python: exit code 2"]},
    ],
)
def test_nothing_runs_again_where_that_would_not_make_a_whole_record(with_failures, change):
    record = json.loads(gpu_record.RECORD.read_text()) | change
    gpu_record.RECORD.write_text(json.dumps(record))
    assert gpu_record.record_failed() == 1
    assert with_failures == [] and json.loads(gpu_record.RECORD.read_text()) == record
