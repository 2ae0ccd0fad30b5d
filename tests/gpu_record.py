"""Runs the GPU suite and records the result, so that a machine without a GPU can tell whether the
code at hand is the code that was tested.

    python tests/gpu_record.py [--ctest BUILD_DIR]   pytest -m gpu, and ctest -L gpu; writes it
    python tests/gpu_record.py --failed              runs what failed again, with mended tests
    python tests/gpu_record.py --check               needs no GPU, no torch; 1 when out of date
"""

import argparse
import datetime
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
SOURCE_DIRS = ("csrc", "flashattn_ext")
NOT_SOURCES = {".so", ".pyc", ".o", ".a"}


def source_files(root):
    """Paths of all sources, relative and in order. What a build leaves behind is none."""
    files = (p for name in SOURCE_DIRS for p in (root / name).rglob("*") if p.is_file())
    kept = (
        p.relative_to(root).as_posix()
        for p in files
        if p.suffix not in NOT_SOURCES
        and p.name != "_build_info.json"
        and "__pycache__" not in p.parts
    )
    return sorted(kept)


def content_hash(root=ROOT):
    digest = hashlib.sha256()
    for name in source_files(root):
        content = (root / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def verdict(record, current_hash):
    """(is the record good, one sentence)."""
    if record is None:
        return False, "There is no GPU record: run `python tests/gpu_record.py` on a GPU."
    what = f"{record['passed']} tests passed on {record['gpu']}, {record['date']}"
    options = ("--ignore", "--deselect", "-k", "--draws")
    left_out = [a for a in record.get("pytest_arguments", []) if a.startswith(options)]
    if left_out:
        what += f"; not all: {' '.join(left_out)}"
    if record["content_hash"] != current_hash:
        return False, (
            f"The code in csrc/ or flashattn_ext/ has changed since the GPU record ({what}): "
            "run `python tests/gpu_record.py` on a GPU."
        )
    if record["failed"] or record["failed_tests"]:
        names = ", ".join(record["failed_tests"][:3])
        return False, f"The GPU record holds {record['failed']} failed tests: {names}."
    if not record["passed"]:
        return False, "The GPU record holds no test that passed."
    return True, f"The GPU record is of this code: {what}."


def check():
    record = json.loads(RECORD.read_text()) if RECORD.exists() else None
    good, sentence = verdict(record, content_hash())
    print(sentence)
    return 0 if good else 1


def read_junit(path):
    """Counts, those of skipped tests by reason, and the ids of failed tests, out of the XML that
    pytest and ctest both write."""
    counts = {"passed": 0, "failed": 0, "skipped": Counter()}
    failed = []
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"} or case.get("status") == "fail":
            counts["failed"] += 1
            failed.append(f"{case.get('classname', 'ctest')}::{case.get('name')}")
        elif "skipped" in kinds or case.get("status") in ("notrun", "disabled"):
            skipped = case.find("skipped")
            why = None if skipped is None else skipped.get("message")
            counts["skipped"][why or case.get("status") or "no reason given"] += 1
        else:
            counts["passed"] += 1
    return counts, failed


def read_numbers(path):
    """What tests say of themselves through record_property: name -> sum of the numbers."""
    numbers = Counter()
    for item in ElementTree.parse(path).iter("property") if path.exists() else ():
        numbers[item.get("name")] += int(item.get("value"))
    return dict(numbers)


def run_suite(command, report):
    """Runs one test runner; a runner that leaves no report, or none of its tests, has failed."""
    # Not from the root: there, the source folder hides an installed package of the same name.
    exit_code = subprocess.run(command, cwd=ROOT / "tests", check=False).returncode
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": Counter()}, [
            f"{command[0]}: exit code {exit_code}"
        ]
    counts, failed = read_junit(report)
    if exit_code != 0 and not failed:
        counts["failed"] += 1
        failed = [f"{command[0]}: exit code {exit_code}"]
    return counts, failed


def environment():
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": "{}.{}".format(*torch.cuda.get_device_capability()),
        "driver": driver.split("\n")[0].strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def why_stale(package_dir, library, root=ROOT):
    """Why the package that Python imports is not built from the sources at hand, or ""."""
    sources = [root / name for name in source_files(root)]
    for source in sources:
        if source.suffix == ".py":
            installed = package_dir / source.relative_to(root / "flashattn_ext")
            if not installed.exists() or installed.read_bytes() != source.read_bytes():
                return f"{installed} is not the {source.name} of this source tree"
    if not library.exists():
        return f"{library} does not exist"
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime > library.stat().st_mtime:
        return f"{newest.relative_to(root)} is newer than {library}"
    return ""


def imported_package():
    """Where the tests will import the package from."""
    command = [sys.executable, "-c", "import flashattn_ext; print(flashattn_ext.__path__[0])"]
    run = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=True)
    return Path(run.stdout.split("\n")[-2])


def record(ctest_dir, pytest_arguments):
    package_dir = imported_package()
    stale = why_stale(package_dir, package_dir / "_C.so")
    if stale:
        print(f"Nothing was run, because {stale}: build and install again.")
        return 1
    facts = environment()
    started = time.monotonic()
    before = content_hash()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "pytest.xml"
        suite = [sys.executable, "-m", "pytest", "python", "-m", "gpu"]
        results = [run_suite([*suite, f"--junitxml={report}", *pytest_arguments], report)]
        numbers = read_numbers(report)
        if ctest_dir:
            report = Path(folder) / "ctest.xml"
            command = ["ctest", "--test-dir", str(Path(ctest_dir).resolve()), "-L", "gpu"]
            command += ["--no-tests=error", "--output-on-failure", "--output-junit", str(report)]
            results.append(run_suite(command, report))
    totals = {key: sum(counts[key] for counts, _ in results) for key in ("passed", "failed")}
    totals["skipped"] = dict(sum((counts["skipped"] for counts, _ in results), Counter()))
    failed = [name for _, names in results for name in names]
    result = {
        "content_hash": before,
        "date": datetime.date.today().isoformat(),
        **facts,
        **totals,
        "failed_tests": failed,
        "suites": ["pytest", "ctest"][: len(results)],
        "pytest_arguments": pytest_arguments,
        **({"numbers": numbers} if numbers else {}),
        "seconds": round(time.monotonic() - started),
    }
    RECORD.write_text(json.dumps(result, indent=2) + "\n")
    good, sentence = verdict(result, content_hash())
    print(f"{RECORD}: {sentence}")
    return 0 if good else 1


def node_id(name):
    """Of pytest, for the name of a failed test in a record; None where it is none of pytest."""
    module, _, test = name.partition("::")
    is_test = module.startswith("tests.python.") and test
    return f"{module.removeprefix('tests.').replace('.', '/')}.py::{test}" if is_test else None


def record_failed():
    """The rest of the record stands, as long as the code is the same: only tests have changed."""
    result = json.loads(RECORD.read_text())
    tests = [node_id(name) for name in result["failed_tests"]]
    if result["content_hash"] != content_hash() or not tests or None in tests:
        print("Nothing was run: another code, no failed test, or one that pytest cannot run alone.")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "pytest.xml"
        command = [sys.executable, "-m", "pytest", *tests, f"--junitxml={report}"]
        counts, failed = run_suite(command, report)
    result["passed"] += counts["passed"]
    result["failed"], result["failed_tests"] = counts["failed"], failed
    result["run_again"] = result.get("run_again", []) + tests
    RECORD.write_text(json.dumps(result, indent=2) + "\n")
    good, sentence = verdict(result, content_hash())
    print(f"{RECORD}: {sentence}")
    return 0 if good and counts["passed"] == len(tests) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the record with the code")
    parser.add_argument("--failed", action="store_true", help="run what failed again")
    parser.add_argument("--ctest", metavar="BUILD_DIR", help="also run ctest -L gpu there")
    arguments, for_pytest = parser.parse_known_args()
    if arguments.failed:
        return record_failed()
    return check() if arguments.check else record(arguments.ctest, for_pytest)


if __name__ == "__main__":
    sys.exit(main())
