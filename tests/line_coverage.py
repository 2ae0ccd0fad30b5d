"""Which lines of the package and of the host C++ the tests on a CPU run.

    python tests/line_coverage.py [pytest arguments]    after the preset `coverage` (make coverage)

Both suites run on the instrumented library. Printed: each file with lines that no test runs, and
the two totals; exit status 1 where a suite fails or a total is below its floor. GPUs are no part of
it: what only they reach counts as not run.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "coverage"
SITE = BUILD / "site"
FLOORS = {"Python": 95.0, "C++": 90.0}
CPP = ("csrc/core/", "csrc/cpu/", "csrc/torch/", r"csrc/\w+\.(cpp|h)")

FEWER_CALLS = ("--draws", "400")  # which run the same lines
# Threads count in the same place: a number may be wrong, whether it is 0 is not.
UNSYNCHRONIZED = tuple(
    f"--gcov-ignore-parse-errors={kind}_hits.warn_once_per_file"
    for kind in ("negative", "suspicious")
)


def make_package():
    """A copy of the package beside the instrumented libraries, so that nothing else is imported."""
    shutil.rmtree(SITE, ignore_errors=True)
    built = shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__")
    shutil.copytree(ROOT / "flashattn_ext", SITE / "flashattn_ext", ignore=built)
    command = ["cmake", "--install", BUILD, "--component", "python", "--prefix"]
    subprocess.run([*command, SITE / "flashattn_ext"], check=True, stdout=subprocess.DEVNULL)


def run_suites(arguments):
    """Whether both passed."""
    for counts in BUILD.rglob("*.gcda"):
        counts.unlink()
    ctest = ["ctest", "--test-dir", BUILD, "-L", "cpu", "--output-on-failure", "--progress"]
    settings = f"--rcfile={ROOT / 'pyproject.toml'}"
    pytest = [sys.executable, "-m", "coverage", "run", settings, f"--source={SITE}"]
    pytest += ["-m", "pytest", "python", "-m", "not gpu", "-q", *FEWER_CALLS, *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": str(SITE),
        "COVERAGE_FILE": str(BUILD / "python.coverage"),
    }
    statuses = [
        subprocess.run(command, cwd=ROOT / "tests", env=environment, check=False).returncode
        for command in (ctest, pytest)
    ]
    for command in (["combine", "-q"], ["json", "-q", "-o", BUILD / "python.json"]):
        subprocess.run(
            [sys.executable, "-m", "coverage", *command, settings],
            cwd=BUILD, env=environment, check=True,
        )  # fmt: skip
    filters = [word for pattern in CPP for word in ("--filter", str(ROOT / pattern))]
    subprocess.run(
        [sys.executable, "-m", "gcovr", "--root", ROOT, *filters, *UNSYNCHRONIZED,
         "--json-summary", BUILD / "cpp.json", BUILD],
        cwd=ROOT, check=True,
    )  # fmt: skip
    return not any(statuses)


def lines_of_python(report):
    """file -> (lines that ran, lines)."""
    counts = {name: file["summary"] for name, file in report["files"].items()}
    return {
        name.split("site/")[-1]: (count["covered_lines"], count["num_statements"])
        for name, count in counts.items()
    }


def lines_of_cpp(report):
    return {
        file["filename"]: (file["line_covered"], file["line_total"]) for file in report["files"]
    }


def percent(files):
    ran, lines = (sum(column) for column in zip(*files.values(), strict=True))
    return 100 * ran / lines


def main():
    make_package()
    passed = run_suites(sys.argv[1:])
    reports = [json.loads((BUILD / f"{name}.json").read_text()) for name in ("python", "cpp")]
    found = {"Python": lines_of_python(reports[0]), "C++": lines_of_cpp(reports[1])}
    for files in found.values():
        for name, (ran, lines) in sorted(files.items()):
            if ran < lines:
                print(f"{name:50} {lines - ran:4} of {lines:4} lines do not run")
    totals = {name: percent(files) for name, files in found.items()}
    for name, total in totals.items():
        print(f"{name}: {total:.1f} % of lines run (at least {FLOORS[name]:.0f} %)")
    return 0 if passed and all(totals[name] >= FLOORS[name] for name in FLOORS) else 1


if __name__ == "__main__":
    sys.exit(main())
