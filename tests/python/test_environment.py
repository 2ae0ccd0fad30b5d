"""Variables of the environment that the CPU backend reads once per process, each in a new one."""

import os
import subprocess
import sys

import pytest

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


def test_an_instruction_set_that_the_machine_lacks():
    result = run(PROGRAM, FLASHATTN_EXT_CPU_SIMD="sse9")
    message = "RuntimeError: FLASHATTN_EXT_CPU_SIMD: got sse9, this machine has"
    assert message in result.stderr and "baseline" in result.stderr
