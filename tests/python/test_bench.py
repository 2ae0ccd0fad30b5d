"""`python -m flashattn_ext.bench` as a program, and on a GPU."""

import json
import subprocess
import sys

import pytest
import torch
from bench_calls import SHAPES, SUITES

from flashattn_ext.bench import progress, roof, run


def program(*words, without=""):
    """Runs it as a user would, optionally where a package cannot be imported."""
    hide = f"import sys; sys.modules[{without!r}] = None; " if without else "import sys; "
    start = f"{hide}sys.argv[1:] = {list(words)!r}; import runpy; "
    start += "runpy.run_module('flashattn_ext.bench', run_name='__main__', alter_sys=True)"
    return subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=300
    )


SMALL = ("cpu", "--heads=1", "--head-dim=32", "--seqlen=16", "--dtype=bfloat16", "--seconds=0")


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_without_optional_packages(package, tmp_path):
    result = program(*SMALL, "--plots", str(tmp_path), without=package)
    assert result.returncode == 0 and "b 1 s 16 h 1 d 32 causal bf16" in result.stdout
    if package == "matplotlib":
        assert result.stderr.startswith("bench: no plots:") and result.stderr.count("\n") == 1
        assert not list(tmp_path.iterdir())


def test_without_torch():
    result = program("cpu", without="torch")
    assert result.returncode == 1 and "needs PyTorch" in result.stderr
    assert "Traceback" not in result.stderr


def test_importing_the_package_does_not_import_the_benchmarks():
    code = "import sys, flashattn_ext; sys.exit(any('bench' in m for m in sys.modules if "
    code += "m.startswith('flashattn_ext')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert run.main(["decode", "growth"]) == 2
    result = capsys.readouterr()
    assert not result.out and result.err == (
        "bench: decode, growth need a GPU, but torch sees no CUDA device; overhead and cpu run "
        "without one.\n"
    )
    assert run.main(["decode", "--list"]) == 0


def test_the_bar_counts_every_step(monkeypatch):
    """A step counts as done when the next one begins."""
    rich_progress = pytest.importorskip("rich.progress")
    bars = []

    class Bar(rich_progress.Progress):
        def __init__(self, *columns, **options):
            super().__init__(*columns, **options)
            bars.append(self)

    monkeypatch.setattr(rich_progress, "Progress", Bar)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with progress.progress(3) as began:
        (bar,) = bars
        for n in range(3):
            began(f"step {n}")
            (task,) = bar.tasks
            assert (task.completed, task.total, task.description) == (n, 3, f"step {n}")


@pytest.mark.parametrize("missing", ["rich", "terminal"])
def test_steps_without_a_bar(missing, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: missing != "terminal", raising=False)
    if missing == "rich":
        monkeypatch.setattr(progress, "_rich", lambda: None)
    with progress.progress(1) as began:
        began("a step")
    assert capsys.readouterr().out == ""


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_on_a_gpu(suite, tmp_path, monkeypatch, capsys):
    """Every clock, every backend that is there, compared first."""
    for name in ("GPU_BYTES", "CPU_BYTES"):
        monkeypatch.setattr(roof, name, 2**22)
    for name in ("GPU_SIDE", "CPU_SIDE"):
        monkeypatch.setattr(roof, name, 256)
    words = [suite, *SHAPES[suite].split(), "--refcheck", "--seconds=0"]
    words += ["--json", str(tmp_path / "run.json"), "--csv", str(tmp_path / "run.csv")]
    code = run.main(words)
    result = json.loads((tmp_path / "run.json").read_text())
    assert code == 0, [r["reason"] for r in result["records"] if r["status"] in ("failed", "wrong")]
    ours = [r for r in result["records"] if r["backend"] == "ours"]
    assert ours and all(r["status"] == "measured" and r["median_us"] > 0 for r in ours)
    clocks = {"overhead": {"host"}, "cpu": {"cpu"}, "prefill": {"events"}}
    clocks |= {"options": {"events", "graph"}, "growth": {"events", "graph"}}
    assert {r["clock"] for r in ours} == clocks.get(suite, {"graph"})
    if suite != "cpu":
        assert result["machine"]["gpu"] == torch.cuda.get_device_name()
        assert result["machine"]["driver"] and result["clocks"]["after"]["sm_mhz"] > 0
        assert {r["device"] for r in ours} == {"cuda"}
    # What torch has on every GPU that these kernels cover.
    flash = [r for r in result["records"] if r["backend"] == "sdpa-flash"]
    assert not flash or any(r["status"] == "measured" for r in flash)
    assert max(map(len, capsys.readouterr().out.split("\n"))) <= 100
