"""The product test: calls drawn from all options of all entry points, each against the oracle."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import draws
import pytest
from spaces import pairs_of

import flashattn_ext

CHUNKS = 4  # tests on a CPU
PROCESSES = min(12, os.cpu_count())  # on a GPU, where the host is the slower side
SCRIPT = Path(draws.__file__)


def count(pytestconfig, device, name):
    """How many calls to draw. Merges have fewer options."""
    calls = pytestconfig.getoption("--draws") or {"cpu": 2400, "cuda": 20_000}[device]
    return calls if name == "attention" else calls // 3


@pytest.mark.parametrize("name", ["attention", "merge"])
def test_every_pair_of_options_occurs(name, device, pytestconfig, record_property):
    if pytestconfig.getoption("--draws"):
        pytest.skip("says something of the usual number of calls only")
    space = draws.kind_of(name, device).space
    points = [space.point(n) for n in range(count(pytestconfig, device, name))]
    assert all(space.allows(point) for point in points)
    assert pairs_of(points) == set(space.pairs)
    record_property(f"drawn pairs of options: {name}", len(space.pairs))


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("name", ["attention", "merge"])
def test_calls(name, chunk, pytestconfig):
    numbers = range(chunk, count(pytestconfig, "cpu", name), CHUNKS)
    failures = draws.failures(name, numbers, "cpu")
    assert not failures, "\n".join(failures)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention", "merge"])
def test_calls_on_a_gpu(name, pytestconfig, record_property):
    calls = count(pytestconfig, "cuda", name)

    def run(first):
        numbers = f"{first}:{calls}:{PROCESSES}"
        command = [sys.executable, str(SCRIPT), name, numbers, "--device", "cuda"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(PROCESSES) as pool:
        runs = list(pool.map(run, range(PROCESSES)))
    assert all(run.returncode == 0 for run in runs), "".join(
        run.stdout + run.stderr for run in runs
    )
    record_property(f"drawn calls: {name}", calls)


def test_a_failure_is_made_simple_and_printed(monkeypatch):
    """A planted fault of two options: the command that is printed has these, and little else."""
    function = flashattn_ext.flash_fwd

    def faulty(q, k, v, **options):
        out, lse = function(q, k, v, **{**options, "out": None, "return_lse": True})
        if options["causal"] and options.get("alibi_slopes") is not None:
            out = out * 1.5
        return (out, lse) if options["return_lse"] else out

    monkeypatch.setattr(flashattn_ext, "flash_fwd", faulty)
    kind = draws.kind_of("attention", "cpu")
    point = kind.point(3, {"causal": True, "alibi": "bh", "batch": 3, "sq": "edge", "d": 100})
    command, error = kind.failure(point, 3, "cpu").split("\n")
    assert "AssertionError" in error and "'causal': True" in command and "'alibi': 'bh'" in command
    assert (
        command.startswith('python tests/python/draws.py attention 3 "{') and "'d'" not in command
    )
    assert kind.failure({**point, "causal": False}, 3, "cpu") == ""


def test_the_printed_command_makes_the_call_again():
    """As a user would, from the root of the source tree."""
    kind = draws.kind_of("attention", "cpu")
    command = kind.command(kind.point(7, {"window": (16, 5), "lengths": ((2, 3),)}), 7, "cpu")
    words = command.replace("python tests/python/draws.py", f"{sys.executable} {SCRIPT}")
    run = subprocess.run(words, shell=True, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "0 of 1 calls failed" in run.stdout, run.stderr


@pytest.mark.parametrize("wrong", ["out", "lse", "tail", "input"])
def test_what_is_wrong_is_seen(wrong, monkeypatch):
    """Or else no draw would prove anything: results a little off, a row too many, an input that
    changes."""
    function = flashattn_ext.flash_fwd

    def faulty(q, k, v, **options):
        out, lse = function(q, k, v, **options)
        if wrong == "out":
            out[1, 0] += 0.02
        elif wrong == "lse":
            lse[0, 0] += 2e-4
        elif wrong == "tail":
            out[-1, -1, -1] = 0
        else:
            q[-1, 0, 0] = 0
        return out, lse

    monkeypatch.setattr(flashattn_ext, "flash_fwd", faulty)
    kind = draws.kind_of("attention", "cpu")
    point = kind.point(5, {"layout": "packed", "out": "given"})
    assert isinstance(kind.error(point, 5, "cpu"), AssertionError)
    monkeypatch.undo()
    assert kind.error(point, 5, "cpu") is None
