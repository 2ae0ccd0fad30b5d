"""tests/wheel_check.py: what it lets a wheel contain."""

import json
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import wheel_check  # noqa: E402

BUILD = {"cuda_archs": [80, 90], "head_dims": [64, 128], "cuda_off_reason": ""}
BINARIES = ("_C.so", "_host.cpython-311-x86_64-linux-gnu.so", "py.typed")


def write_wheel(folder, without=(), extra=()):
    """As the build makes it, with empty binaries."""
    path = folder / "flashattn_ext-1-py310-none-any.whl"
    sources = [str(file.relative_to(ROOT)) for file in ROOT.glob("flashattn_ext/**/*.py")]
    names = [*sources, *(f"flashattn_ext/{name}" for name in BINARIES), *extra]
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            if name not in without:
                wheel.writestr(name, "12345")
        wheel.writestr("flashattn_ext/", "")  # auditwheel writes folders too
        wheel.writestr("flashattn_ext/_build_info.json", json.dumps(BUILD))
        wheel.writestr("flashattn_ext-1.dist-info/RECORD", "not counted")
    return path


def test_a_wheel_of_the_package_and_nothing_else(tmp_path):
    host = "flashattn_ext/_host.cpython-311-x86_64-linux-gnu.so"
    for without in ((), (host,)):  # _host belongs to one Python, and nothing needs it
        facts = wheel_check.check_contents(write_wheel(tmp_path, without))
        assert facts["archs"] == "sm_80, sm_90" and facts["head_dims"] == "64, 128"
    sources = len(list(ROOT.glob("flashattn_ext/**/*.py")))
    assert facts["bytes"] == 5 * (sources + 2) + len(json.dumps(BUILD)) and facts["library"] == 5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"without": ("flashattn_ext/_C.so",)}, "missing .*_C.so"),
        ({"without": ("flashattn_ext/bench/run.py",)}, "missing .*bench/run.py"),
        ({"extra": ("flashattn_ext.libs/libcudart.so.13",)}, "unexpected .*libcudart"),
        ({"extra": ("flashattn_ext/left_over.py",)}, "unexpected .*left_over"),
        ({"extra": ("tests/conftest.py",)}, "unexpected .*conftest"),
    ],
)
def test_another_wheel_is_refused(change, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        wheel_check.check_contents(write_wheel(tmp_path, **change))


def test_closing_line_of_pytest():
    output = "1 passed before\n2079 passed, 3 skipped, 14 warnings in 85.34s (0:01:25)\n[W] x\n"
    assert wheel_check.outcome(output) == (2079, 85.34)


def test_programs_see_no_source_tree(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "nowhere"))
    paths = wheel_check.run(sys.executable, "-c", "import sys; print(*sys.path)")
    assert "nowhere" not in paths and "python3" in paths


def test_files_of_the_tests_exist():
    for name in wheel_check.TESTS:
        text = (ROOT / "tests" / "python" / f"test_{name}.py").read_text(encoding="utf-8")
        assert "parents[2]" not in text  # they run away from the source tree
