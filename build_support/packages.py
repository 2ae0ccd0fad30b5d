"""Prints where torch, CUTLASS and pybind11 are, one NAME=VALUE a line, importing none of them.

Under pip's build isolation the interpreter is the user's but its packages are hidden. They are
looked at all the same: the binary is best linked with the torch that will load it, and this
saves a second torch of several GB.
"""

import importlib.machinery
import os
import re
import sys
import sysconfig
from pathlib import Path


def package_dir(name):
    target = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for path in (sys.path, target):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    return None


def torch_facts(directory):
    text = (directory / "version.py").read_text()
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda: .* = '([^']+)'", text, re.MULTILINE)
    return {
        "TORCH_DIR": directory,
        "TORCH_VERSION": version.group(1) if version else "",
        "TORCH_CUDA": cuda.group(1) if cuda else "",
    }


def cutlass_include():
    """CUTLASS_PATH is a checkout of CUTLASS or its include folder; else the pip package."""
    given = os.environ.get("CUTLASS_PATH")
    if given:
        candidates = [Path(given) / "include", Path(given)]
    else:
        package = package_dir("cutlass_library")
        candidates = [package / "source" / "include"] if package else []
    return next((c for c in candidates if (c / "cute" / "tensor.hpp").is_file()), None)


def find_all():
    found = {}
    torch = package_dir("torch")
    if torch is not None:
        found.update(torch_facts(torch))
    cutlass = cutlass_include()
    if cutlass is not None:
        found["CUTLASS_INCLUDE"] = cutlass
    pybind11 = package_dir("pybind11")
    if pybind11 is not None:
        found["PYBIND11_DIR"] = pybind11 / "share" / "cmake" / "pybind11"
    return found


if __name__ == "__main__":
    for name, value in find_all().items():
        print(f"{name}={value}")
