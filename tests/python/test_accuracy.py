"""benchmarks/accuracy.py and docs/accuracy.md: what they say of our errors."""

import json
import sys

import pytest
from pages import ROOT, Page

sys.path.append(str(ROOT / "benchmarks"))
import accuracy

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*-accuracy.json"))
PAGE = Page("docs/accuracy.md")


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_kept_results(path):
    """The page has the results' table and plots; nowhere is PyTorch in the type better."""
    found = read(path)
    assert accuracy.table(found) in PAGE.text and f"results/{path.name}" in PAGE.text
    plots = f"docs/figures/accuracy/{path.stem.split('-')[-2]}/{{}}.png"
    for record in found["records"]:
        errors = record["errors"]
        assert errors["ours"][0] <= errors["PyTorch"][0] and errors["ours"][0] < 3e-3, record
        assert (ROOT / plots.format(record["sweep"])).is_file()
    assert {r["sweep"] for r in found["records"]} == set(accuracy.sweeps("cpu"))
    assert {r["dtype"] for r in found["records"]} == set(accuracy.DTYPES)


@pytest.mark.parametrize("dtype", accuracy.DTYPES)
@pytest.mark.parametrize("changes", [{}, {"softcap": 5.0, "magnitude": 10.0}, {"splits": 4}])
def test_errors(changes, dtype, device):
    """Near that of the rounding alone, and below that of the formula in the type."""
    point = accuracy.Point(length=300, queries=16, head_dim=64, **changes)
    found = accuracy.errors(point, dtype, device)
    assert found["rounding"][0] < found["ours"][0] < 2 * found["rounding"][0]
    assert found["ours"][0] < found["PyTorch"][0]
    assert ("SDPA flash" in found) == (not point.softcap)


def test_what_is_written_is_read_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    found = read(RESULTS[0])
    assert json.loads(accuracy.as_json(found)) == found
    accuracy.plot(found, tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(accuracy.sweeps("cpu"))
