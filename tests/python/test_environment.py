"""Variables of the environment. What is read once per process is tested in a new one."""

import os
import subprocess
import sys

import pytest
import torch

import flashattn_ext

PROGRAM = """
import os
import torch
import flashattn_ext

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)
q = torch.ones(2, 512, 8, 64)
torch.ones(4) @ torch.ones(4)
before = threads()
out = flashattn_ext.flash_fwd(q, q, q)
print(threads() - before, torch.equal(out, q))
"""


def run(program, **variables):
    folder = os.path.dirname(os.path.dirname(flashattn_ext.__file__))
    environment = {**os.environ, "PYTHONPATH": folder, **variables}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("threads", [1, 4])
def test_num_threads_goes_before_torch(threads):
    """What the call starts are helpers: its own thread works too. baseline is on every machine."""
    variables = {"FLASHATTN_EXT_NUM_THREADS": str(threads), "FLASHATTN_EXT_CPU_SIMD": "baseline"}
    result = run(PROGRAM, **variables)
    assert result.stdout.split() == [str(threads - 1), "True"], result.stderr


@pytest.mark.parametrize("threads", ["abc", "0", "-2", "4x", "5000", "99999999999"])
def test_a_number_of_threads_that_is_none(threads):
    result = run(PROGRAM, FLASHATTN_EXT_NUM_THREADS=threads)
    message = "ValueError: FLASHATTN_EXT_NUM_THREADS: expected a number of threads from 1 to 4096"
    assert f"{message}, got {threads}" in result.stderr


def test_an_empty_number_of_threads_is_none():
    result = run(PROGRAM, FLASHATTN_EXT_NUM_THREADS="")
    assert result.stdout.split() == ["0", "True"], result.stderr  # torch's number


def test_ranges_are_switched_by_0_and_1():
    """Importing never fails, the calls do; `supports` and `info` say it too."""
    program = "import flashattn_ext.info; print(flashattn_ext.info.collect()['load_error'])"
    message = "FLASHATTN_EXT_NVTX: expected 0 or 1 in the environment, got 'yes'"
    assert run(program, FLASHATTN_EXT_NVTX="yes").stdout.strip() == message
    assert f"RuntimeError: {message}" in run(PROGRAM, FLASHATTN_EXT_NVTX="yes").stderr


def test_the_checked_mode_is_switched_by_0_and_1(monkeypatch):
    q = torch.ones(1, 2, 4, 64)
    for value in ("", "0", "1"):
        monkeypatch.setenv("FLASHATTN_EXT_CHECK", value)
        flashattn_ext.flash_fwd(q, q, q)
    monkeypatch.setenv("FLASHATTN_EXT_CHECK", "2")
    message = "FLASHATTN_EXT_CHECK: expected 0 or 1 in the environment, got '2'"
    with pytest.raises(ValueError, match=message):
        flashattn_ext.flash_fwd(q, q, q)
    with pytest.raises(ValueError, match=message):
        flashattn_ext.flash_fwd_splitkv(q, q, q, cache_seqlens=1)


def test_an_instruction_set_that_the_machine_lacks():
    result = run(PROGRAM, FLASHATTN_EXT_CPU_SIMD="sse9")
    message = "RuntimeError: FLASHATTN_EXT_CPU_SIMD: got sse9, this machine has"
    assert message in result.stderr and "baseline" in result.stderr
