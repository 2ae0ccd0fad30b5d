"""tests/sanitize_gpu.py with a stand-in for compute-sanitizer: what counts as a finding."""

import importlib.util
import os
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "sanitize_gpu.py"
spec = importlib.util.spec_from_file_location("sanitize_gpu", PATH)
sanitize_gpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sanitize_gpu)

PASSED = "[  PASSED  ] 7 tests"
CLEAN = "========= ERROR SUMMARY: 0 errors"


@pytest.fixture
def outcome(tmp_path, monkeypatch, capsys):
    """Runs the script over a compute-sanitizer that prints lines and exits with a status."""
    build = tmp_path / "build"
    (build / "tests" / "cpp").mkdir(parents=True)
    for name in sanitize_gpu.BINARIES:
        (build / "tests" / "cpp" / name).touch()
    stand_in = tmp_path / "compute-sanitizer"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def run(*lines, status=0, sleep=0, options=("--tools", "memcheck")):
        prints = "".join(f"echo '{line}'\n" for line in lines)
        stand_in.write_text(f"#!/bin/sh\n{prints}echo arguments $@\nsleep {sleep}\nexit {status}\n")
        stand_in.chmod(0o755)
        return sanitize_gpu.main([str(build), *options]), capsys.readouterr().out

    return run


def test_clean_runs_of_all_tools(outcome):
    status, text = outcome(PASSED, CLEAN, options=())
    assert status == 0
    assert [line.split()[:2] for line in text.splitlines()[:-1]] == [
        [tool.name, binary] for tool in sanitize_gpu.TOOLS for binary in sanitize_gpu.BINARIES
    ]
    assert text.splitlines()[-1] == "56 tests under 4 tools, 0 bad runs"


@pytest.mark.parametrize(
    "lines, status, fault",
    [
        ((PASSED, CLEAN), sanitize_gpu.FOUND, "the tool found something"),
        (("[  PASSED  ] 6 tests", "[  FAILED  ] 1 test", CLEAN), 1, "exit status 1"),
        ((PASSED,), 0, "no summary of the tool"),
        ((PASSED, "========= ERROR SUMMARY: 10 errors"), 0, "no summary of the tool"),
        (("[  PASSED  ] 0 tests", "[  SKIPPED ] 7 tests", CLEAN), 0, "no test ran"),
    ],
)
def test_what_is_no_clean_run(outcome, lines, status, fault):
    result, text = outcome(*lines, status=status)
    assert result == 1 and f"FAILED: {fault}" in text


def test_a_run_that_takes_too_long(outcome):
    options = ("--tools", "memcheck", "--seconds", "0.1")
    result, text = outcome(PASSED, CLEAN, sleep=5, options=options)
    assert result == 1 and "out of time" in text


def test_the_filters_name_tests_that_exist():
    sources = [*(PATH.parent / "cpp").glob("test_*.cpp")]
    names = [line for path in sources for line in path.read_text().splitlines()]
    names = [line[5:-3].replace(", ", ".") for line in names if line.startswith("TEST(")]
    for pattern in [*sanitize_gpu.KINDS.split(":"), *sanitize_gpu.LEFT_OUT.split(":")]:
        words = [word for word in pattern.split("*") if word]
        assert any(all(word in name for word in words) for name in names), pattern
