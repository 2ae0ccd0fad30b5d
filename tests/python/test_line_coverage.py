"""tests/line_coverage.py on reports that are made up: what it prints, and when it fails."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "line_coverage.py"
spec = importlib.util.spec_from_file_location("line_coverage", PATH)
line_coverage = importlib.util.module_from_spec(spec)
spec.loader.exec_module(line_coverage)


@pytest.fixture
def outcome(tmp_path, monkeypatch, capsys):
    """Runs it where the suites ran so many of 100 lines of Python, and of 50 + 50 of C++."""
    monkeypatch.setattr(line_coverage, "BUILD", tmp_path)
    monkeypatch.setattr(line_coverage, "make_package", lambda: None)

    def run(python, cpp, passed=True):
        summary = {"summary": {"covered_lines": python, "num_statements": 100}}
        reports = {
            "python": {"files": {"build/coverage/site/flashattn_ext/plan.py": summary}},
            "cpp": {
                "files": [
                    {"filename": "csrc/validate.cpp", "line_covered": 50, "line_total": 50},
                    {"filename": "csrc/cpu/tiling.h", "line_covered": cpp - 50, "line_total": 50},
                ]
            },
        }
        for name, report in reports.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(report))
        monkeypatch.setattr(line_coverage, "run_suites", lambda arguments: passed)
        return line_coverage.main(), capsys.readouterr().out

    return run


def test_totals(outcome):
    status, text = outcome(97, 90)
    assert status == 0
    files, totals = text.splitlines()[:-2], text.splitlines()[-2:]
    assert [line.split() for line in files] == [
        "flashattn_ext/plan.py 3 of 100 lines do not run".split(),
        "csrc/cpu/tiling.h 10 of 50 lines do not run".split(),
    ]
    assert totals == [
        "Python: 97.0 % of lines run (at least 95 %)",
        "C++: 90.0 % of lines run (at least 90 %)",
    ]


@pytest.mark.parametrize("numbers", [(94, 100), (100, 89), (100, 100, False)])
def test_what_is_too_little(numbers, outcome):
    assert outcome(*numbers)[0] == 1
