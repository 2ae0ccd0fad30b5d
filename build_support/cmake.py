"""Runs CMake and ninja. Their output is shown as it comes: pip shows it with -v, make always."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from . import BuildError, plan, tools

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "build" / sys.implementation.cache_tag


def build(options=(), targets=(), environ=os.environ):
    """Configures and builds in DIRECTORY. `options` are CMake's own."""
    start = time.monotonic()
    cmake, ninja = tools.find_cmake(), tools.find_ninja()
    the_plan = plan.make_plan(environ)
    for line in the_plan.report:
        _say(line)
    _drop_foreign_cache(the_plan.nvcc)
    configure = [cmake, "-S", ROOT, "-B", DIRECTORY, "-G", "Ninja", "--log-level=WARNING"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
    _run([*configure, *the_plan.cmake_arguments(), *options], environ)
    goals = ["--target", *targets] if targets else []
    _run([cmake, "--build", DIRECTORY, "--parallel", str(the_plan.jobs), *goals], environ)
    _say(f"built in {time.monotonic() - start:.0f} s")


def install_python_files(package_dir):
    """Puts _C.so, _host and _build_info.json into the package."""
    command = [tools.find_cmake(), "--install", DIRECTORY, "--component", "python"]
    result = tools.run([*command, "--prefix", Path(package_dir).resolve()])
    if result.returncode != 0:
        raise BuildError(f"installing into {package_dir} failed:\n{result.stdout}")


def _drop_foreign_cache(nvcc):
    """A CMake cache cannot change its compiler, and a vanished cmake cannot be called again."""
    cache = DIRECTORY / "CMakeCache.txt"
    if not cache.is_file():
        return
    entries = dict(re.findall(r"^(\w+):\w+=(.*)$", cache.read_text(), re.MULTILINE))
    cached_nvcc = entries.get("CMAKE_CUDA_COMPILER", "")
    other_nvcc = nvcc is not None and cached_nvcc not in ("", str(nvcc.path))
    if other_nvcc or not Path(entries.get("CMAKE_COMMAND", "")).is_file():
        shutil.rmtree(DIRECTORY)


def _say(line):
    print(f"flashattn_ext: {line}", flush=True)


def _run(command, environ):
    status = "[%f/%t files, %es] "
    result = subprocess.run(command, env={"NINJA_STATUS": status, **environ})
    if result.returncode != 0:
        raise BuildError(
            f"{Path(command[0]).name} failed; its output is above (pip shows it with -v)"
        )
