"""Runs the C++ tests of the kernels under the four tools of compute-sanitizer.

    python tests/sanitize_gpu.py BUILD_DIR [--seconds 480] [--tools memcheck,racecheck]

BUILD_DIR holds test_flash_fwd and test_splitkv (CMake with FLASHATTN_BUILD_TESTS=ON and CUDA). Exit
status 1 when a tool finds something, a test fails, nothing ran, or the time was not enough. Needs
compute-sanitizer, of the CUDA toolkit, and no network.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

FOUND = 99  # the exit status of a run in which the tool found something
BINARIES = ("test_flash_fwd", "test_splitkv")

# Repetitions of one call, and what is about devices instead of kernels.
LEFT_OUT = (
    "*TwentyRuns*:*WithoutADevice*:*ServesExactly*:*AHeadDimThatWasNotBuilt*:*FollowsFromSizes*"
)
# One of each kind of launch: roles, splits and their merges, pages, append, masks, uneven tiles.
KINDS = (
    "*.HeadDimsInBFloat16:*.GroupedHeads:*.Windows:*.PackedRagged*:*.RowsAndHeadsOfARole"
    ":*.MixedPackedBatches:*.AnyNumberOfSplits:*.AutomaticSplits*:*.PageSizes:*.EveryKindOfCache"
    ":*.BothRotaryLayouts:*.HostileLengths*:Combine.*"
)


class Tool(NamedTuple):
    name: str
    tests: str  # a filter of googletest
    options: tuple[str, ...] = ()


TOOLS = (
    # Allocations apart from each other, so that no access past one lands in the next. Tests provoke
    # errors of the API on purpose.
    Tool("memcheck", f"-{LEFT_OUT}", ("--padding", "512", "--report-api-errors", "no")),
    Tool("racecheck", KINDS),
    Tool("initcheck", KINDS),
    Tool("synccheck", KINDS),
)


class Run(NamedTuple):
    """What came of one binary under one tool; `fault` is empty where all is well."""

    tool: str
    binary: str
    passed: int
    seconds: float
    fault: str

    def __str__(self):
        result = f"FAILED: {self.fault}" if self.fault else "0 findings"
        return (
            f"{self.tool:10} {self.binary:15} {self.passed:3} tests {self.seconds:6.1f} s  {result}"
        )


def find_sanitizer():
    """Its path, from PATH or the toolkit; None where there is none."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def run(sanitizer, tool, binary, seconds):
    command = [
        sanitizer, "--tool", tool.name, *tool.options, "--error-exitcode", str(FOUND),
        "--print-limit", "5", str(binary), f"--gtest_filter={tool.tests}",
    ]  # fmt: skip
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=max(1.0, seconds))
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the program that it watches too
        output, status = process.communicate()[0], None
    passed = re.findall(r"^\[  PASSED  \] (\d+) test", output, re.MULTILINE)
    count = int(passed[-1]) if passed else 0
    fault = judge(output, status, count)
    if fault:
        print(output[-20000:], flush=True)
    return Run(tool.name, binary.name, count, time.monotonic() - start, fault)


def judge(output, status, passed):
    """Why a run is not good, or an empty string."""
    if status is None:
        return "out of time"
    if status == FOUND:
        return "the tool found something"
    if status != 0:
        return f"exit status {status}"
    if not re.search(r"^=+ (ERROR|RACECHECK) SUMMARY: 0 ", output, re.MULTILINE):
        return "no summary of the tool"
    return "" if passed else "no test ran"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", type=Path, metavar="BUILD_DIR")
    parser.add_argument("--seconds", type=float, default=480, help="for everything together")
    parser.add_argument("--tools", default=",".join(tool.name for tool in TOOLS))
    given = parser.parse_args(arguments)
    names = given.tools.split(",")
    if unknown := set(names) - {tool.name for tool in TOOLS}:
        parser.error(f"--tools: no {', '.join(sorted(unknown))}")
    sanitizer = find_sanitizer()
    if sanitizer is None:
        sys.exit("compute-sanitizer was not found: it is part of the CUDA toolkit (CUDA_HOME)")
    binaries = [given.build / "tests" / "cpp" / name for name in BINARIES]
    if missing := [str(path) for path in binaries if not path.exists()]:
        sys.exit(f"not built: {', '.join(missing)}")
    end = time.monotonic() + given.seconds
    runs = []
    for tool in TOOLS:
        for binary in binaries if tool.name in names else ():
            runs.append(run(sanitizer, tool, binary, end - time.monotonic()))
            print(runs[-1], flush=True)
    faults = sum(bool(one.fault) for one in runs)
    print(f"{sum(one.passed for one in runs)} tests under {len(names)} tools, {faults} bad runs")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
