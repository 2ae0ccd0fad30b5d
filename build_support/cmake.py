"""Runs CMake and ninja. Their output is shown as it comes: pip shows it with -v, make always."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from . import BuildError, plan, tools

ROOT = Path(__file__).resolve().parent.parent


def build(build_dir, options=(), targets=(), environ=os.environ):
    """Configures and builds in `build_dir`; returns it."""
    build_dir = Path(build_dir).resolve()
    cmake, ninja = tools.find_cmake(), tools.find_ninja()
    the_plan = plan.make_plan(environ)
    for line in the_plan.report:
        print(f"flashattn_ext: {line}", flush=True)
    _drop_foreign_cache(build_dir, [cmake, the_plan.nvcc and str(the_plan.nvcc.path), sys.executable])
    configure = [cmake, "-S", ROOT, "-B", build_dir, "-G", "Ninja", "--log-level=WARNING"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
    _run([*configure, *the_plan.cmake_arguments(), *options], environ)
    goals = ["--target", *targets] if targets else []
    _run([cmake, "--build", build_dir, "--parallel", str(the_plan.jobs), *goals], environ)
    return build_dir


def install_python_files(build_dir, package_dir):
    """Puts _C.so, _host and _build_info.json into the package."""
    command = [tools.find_cmake(), "--install", build_dir, "--component", "python"]
    command += ["--prefix", Path(package_dir).resolve()]
    result = tools.run(command)
    if result.returncode != 0:
        raise BuildError(f"installing into {package_dir} failed:\n{result.stdout}")


def _drop_foreign_cache(build_dir, programs):
    """A CMake cache cannot change its compiler or generator: other programs, other cache."""
    stamp, text = build_dir / "programs.txt", "\n".join(map(str, programs))
    if build_dir.exists() and (not stamp.exists() or stamp.read_text() != text):
        shutil.rmtree(build_dir)
    build_dir.mkdir(parents=True, exist_ok=True)
    stamp.write_text(text)


def _run(command, environ):
    status = "[%f/%t files, %es] "
    result = subprocess.run(command, env={"NINJA_STATUS": status, **environ})
    if result.returncode != 0:
        raise BuildError(f"{Path(command[0]).name} failed; its output is above (pip shows it with -v)")
