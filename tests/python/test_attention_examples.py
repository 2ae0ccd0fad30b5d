"""The examples of one idea each: they run, agree, and say so when the idea is broken."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each prints in its last line, and changes that make it wrong.
BROKEN = {
    "speculative_step": (
        "6 tokens accepted, next draft",
        "attend = example.flash_fwd_splitkv\n"
        "example.flash_fwd_splitkv = lambda *a, **o: attend(*a, **o | {'causal': False})",
        "example.accepted_only = lambda *a: None",
    ),
    "shared_prefix": (
        "largest difference: out",
        "example.merge_attention_states = lambda out, lse, *tails: tails",
        "example.merge_attention_states = lambda out, lse, *tails: (out, lse)",
    ),
    "sequence_parallel": (
        "ring prefill: largest difference",
        "example.merge_attention_states = lambda out, lse, *part: (out, lse)",
        "example.flash_combine = lambda out, lse, out_dtype: (out.mean(0).to(out_dtype), lse)",
    ),
}
CHANGES = [(name, change) for name, (_, *changes) in BROKEN.items() for change in changes]
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import {name} as example
{change}

def run(*arguments):  # what a new process starts with; it reads this file again
    original(*arguments)

if __name__ == "__main__":
    if hasattr(example, "run"):
        example.run = run
    sys.exit(example.main())
else:
    original = example.run
"""


def start(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("name", BROKEN)
def test_runs_and_agrees(name, device):
    done = start(EXAMPLES / f"{name}.py", "--device", device)
    assert done.returncode == 0, done.stdout + done.stderr
    assert BROKEN[name][0] in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_notices_what_is_wrong(name, change, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(EXAMPLES), name=name, change=change))
    done = start(program, "--device", "cpu")
    assert done.returncode == 1, done.stdout + done.stderr
    assert BROKEN[name][0] in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", BROKEN)
def test_is_short(name):
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) < 100 and max(map(len, lines)) <= 100
