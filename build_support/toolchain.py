"""A CUDA toolkit out of Python packages, for machines that have none: NVIDIA's `cuda-toolkit`.

The packages lay their files out in another way than nvcc and CMake look for them: libraries are in
lib instead of lib64, and libcudart has no name that a linker asks for. So a folder of links is made
that looks like an installed toolkit. nvcc finds its parts relative to the path by which it is
called, so that `bin` must be a folder of links and not a link.
"""

import shutil
import sys
import sysconfig
from pathlib import Path

from . import packages

# What the extra `toolchain` of pyproject.toml has. Packages before 13 have no nvcc.
REQUIREMENT = "cuda-toolkit[nvcc,cccl]>=13,<14"
HOME = Path(__file__).resolve().parent.parent / "build" / "cuda_home"


def requirement():
    """What pip must fetch for a build: nvcc of torch's own CUDA version where that has one."""
    major, _, minor = packages.find_all().get("TORCH_CUDA", "").partition(".")
    return f"cuda-toolkit[nvcc,cccl]=={major}.{minor}.*" if major == "13" else REQUIREMENT


def find(paths=None):
    """The folder of the packages' toolkit, the newest if there are several, or None.

    Looks into the target environment too, whose packages pip's build isolation hides.
    """
    if paths is None:
        paths = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for path in dict.fromkeys(paths):
        found = Path(path or ".").glob("nvidia/cu[0-9]*/bin/nvcc")
        newest = max(found, key=lambda nvcc: int(nvcc.parts[-3][2:]), default=None)
        if newest is not None:
            return newest.parents[1]
    return None


def link_home(toolkit, home=HOME):
    """Makes the folder of links; returns its nvcc."""
    shutil.rmtree(home, ignore_errors=True)
    (home / "bin").mkdir(parents=True)
    (home / "lib64").mkdir()
    for program in (toolkit / "bin").iterdir():
        (home / "bin" / program.name).symlink_to(program)
    for folder in ("include", "nvvm"):
        (home / folder).symlink_to(toolkit / folder)
    for library in (toolkit / "lib").iterdir():
        (home / "lib64" / library.name).symlink_to(library)
        if library.name.startswith("libcudart.so."):
            (home / "lib64" / "libcudart.so").symlink_to(library)
    return home / "bin" / "nvcc"
