"""Checks a wheel: what is in it, and its tests in clean environments, one for each torch.

    python tests/wheel_check.py dist/flashattn_ext-...whl torch==2.10.* torch

An environment has the wheel, that torch, and what the tests need; the tests are copied away from
the source tree, so that only the wheel can be what they import. --python takes another interpreter.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flashattn_ext"
# Of every path through the library, and the library itself; no test of these needs the source tree.
TESTS = (
    "library", "dense", "varlen", "masks", "strides", "errors", "splitkv", "paged", "append",
    "combine", "ops", "sdpa", "flash_attn_names_kvcache",
)  # fmt: skip
NEEDED = ("numpy", "pytest>=8")


def main():
    arguments = parse()
    wheel = arguments.wheel.resolve()
    facts = check_contents(wheel)
    print(f"{wheel.name}: {megabytes(wheel.stat().st_size)}, unpacked {megabytes(facts['bytes'])}")
    print(f"_C.so: {megabytes(facts['library'])}")
    print(f"kernels: {facts['archs']}; head dims {facts['head_dims']}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for torch in arguments.torch:
            rows.append(check_environment(wheel, torch, arguments.python, Path(folder)))
    print("\n| environment | tests | seconds |\n| --- | --- | --- |")
    print("\n".join(rows))


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("torch", nargs="*", default=["torch==2.10.*", "torch"], help="for pip")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    return parser.parse_args()


def check_contents(wheel):
    """Exits unless the wheel holds the package's files and its binaries, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        infos = [info for info in archive.infolist() if not info.is_dir()]
        infos = [info for info in infos if ".dist-info/" not in info.filename]
        build = json.loads(archive.read(f"{PACKAGE}/_build_info.json"))
    names = {info.filename for info in infos}
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob(f"{PACKAGE}/**/*.py")}
    expected = sources | {f"{PACKAGE}/{name}" for name in ("_C.so", "_build_info.json", "py.typed")}
    others = {name for name in names - expected if not re.search(r"/_host\.[\w-]+\.so$", name)}
    if others or expected - names:
        sys.exit(f"error: missing {sorted(expected - names)}, unexpected {sorted(others)}")
    archs = ", ".join(f"sm_{arch}" for arch in build["cuda_archs"])
    return {
        "bytes": sum(info.file_size for info in infos),
        "library": next(info.file_size for info in infos if info.filename.endswith("/_C.so")),
        "archs": archs or f"none, {build['cuda_off_reason']}",
        "head_dims": ", ".join(map(str, build["head_dims"])) or "–",
    }


ASK = """
import sys, torch, flashattn_ext
assert flashattn_ext.__file__.startswith(sys.prefix), flashattn_ext.__file__
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}")
print(torch.cuda.is_available())
"""


def check_environment(wheel, torch, python, folder):
    """Installs and tests; returns a row for the table."""
    start = time.monotonic()
    environment, work = folder / "environment", folder / "work"
    for path in (environment, work):
        shutil.rmtree(path, ignore_errors=True)
    run(python, "-m", "venv", environment)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "-q", torch, wheel, *NEEDED)
    shutil.copytree(ROOT / "tests" / "python", work)
    versions, has_gpu = run(python, "-c", ASK, cwd=work).splitlines()[-2:]  # behind warnings
    print(f"\n{versions}, installed in {time.monotonic() - start:.0f} s")
    print(run(python, "-m", "flashattn_ext.info", cwd=work).splitlines()[-1], flush=True)
    files = [f"test_{name}.py" for name in TESTS]
    options = ["-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
    options += [] if has_gpu == "True" else ["-m", "not gpu"]
    passed, seconds = outcome(run(python, "-m", "pytest", *options, *files, cwd=work))
    print(f"{passed} tests passed in {seconds:.0f} s", flush=True)
    return f"| {versions} | {passed} passed | {seconds:.0f} |"


def outcome(output):
    """(tests passed, seconds) of pytest's closing line, which others may follow."""
    passed, seconds = re.findall(r"^(\d+) passed.* in ([\d.]+)s", output, re.MULTILINE)[-1]
    return int(passed), float(seconds)


def run(*command, cwd=None):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=environ
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nerror: {' '.join(map(str, command))} failed")
    return done.stdout


def megabytes(size):
    return f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
