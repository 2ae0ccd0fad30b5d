"""Finds the programs of the build and checks that they work, with a remedy where they do not."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from . import BuildError

OLDEST_CMAKE = (3, 25)
OLDEST_NVCC = (12, 0)
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")


class Nvcc(NamedTuple):
    path: Path
    version: str
    compilable: tuple  # architectures


def run(command, **options):
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def locate_nvcc(environ):
    """The nvcc to use, or None. A CUDA_HOME or CUDACXX that is set must be right."""
    home, cudacxx = environ.get("CUDA_HOME"), environ.get("CUDACXX")
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
        if not nvcc.is_file():
            what = "has no bin/nvcc" if Path(home).is_dir() else "is not a folder"
            raise BuildError(
                f"CUDA_HOME={home!r} {what}. Set it to the root of a CUDA toolkit (one that has "
                "bin/nvcc), unset it to search PATH and /usr/local/cuda, or set "
                "FLASHATTN_EXT_CUDA=off for a CPU-only build."
            )
        return nvcc
    if cudacxx:
        found = shutil.which(cudacxx, path=environ.get("PATH", ""))
        if found is None:
            raise BuildError(f"CUDACXX={cudacxx!r} is not a program. Correct it or unset it.")
        return Path(found)
    found = shutil.which("nvcc", path=environ.get("PATH", ""))
    if found is not None:
        return Path(found)
    default = DEFAULT_CUDA_HOME / "bin" / "nvcc"
    return default if default.is_file() else None


def inspect_nvcc(path):
    """Version and architectures of an nvcc that can compile C++20 with the host compiler."""
    text = _output_of_nvcc(path, "--version")
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"{path} --version does not look like nvcc:\n{text}")
    version = tuple(map(int, match.groups()))
    if version < OLDEST_NVCC:
        raise BuildError(
            f"{path} is nvcc {match.group(1)}.{match.group(2)}; 12.0 or newer is needed for "
            "C++20. Set CUDA_HOME to a newer toolkit, or FLASHATTN_EXT_CUDA=off for a CPU-only "
            "build."
        )
    _compile_something(path)
    archs = re.findall(r"compute_(\d+)", _output_of_nvcc(path, "--list-gpu-arch"))
    return Nvcc(path, ".".join(map(str, version)), tuple(sorted(map(int, archs))))


def _output_of_nvcc(path, argument):
    try:
        result = run([path, argument])
    except OSError as error:
        raise BuildError(f"{path} does not run: {error}") from error
    if result.returncode != 0:
        raise BuildError(f"{path} {argument} failed:\n{result.stdout}")
    return result.stdout


def _compile_something(nvcc):
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text("#include <concepts>\n__global__ void kernel() {}\n")
        result = run([nvcc, "-std=c++20", "-c", source, "-o", Path(folder) / "probe.o"])
    if result.returncode != 0:
        raise BuildError(
            f"{nvcc} cannot compile an empty kernel with this host compiler. If the compiler is "
            "too new for nvcc, name an older one: NVCC_PREPEND_FLAGS='-ccbin g++-13'. nvcc says:\n"
            f"{result.stdout.strip()}"
        )


def _beside_python(name):
    """A console program installed for this interpreter (pip's cmake and ninja), else on PATH."""
    folders = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    # The build environment of pip puts its own programs first on PATH.
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))


def find_cmake():
    path = _beside_python("cmake")
    match = (
        re.search(r"cmake version (\d+)\.(\d+)", run([path, "--version"]).stdout) if path else None
    )
    if match is None or tuple(map(int, match.groups())) < OLDEST_CMAKE:
        got = f"{path} is older" if match else "none was found that works"
        raise BuildError(f"CMake 3.25 or newer is needed, {got}: pip install 'cmake>=3.25'")
    return path


def find_ninja():
    path = _beside_python("ninja")
    if path is None or run([path, "--version"]).returncode != 0:
        raise BuildError("ninja was not found: pip install ninja")
    return path
