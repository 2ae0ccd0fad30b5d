"""The PEP 517 backend: setuptools, plus build requirements that depend on the machine.

torch is required only where the target environment has none: linking against the torch that will
load the binary saves a download of several GB. See packages.py.
"""

import os

import setuptools
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that stay as they are

from . import BuildError, packages, plan, toolchain, tools

if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"setuptools {setuptools.__version__} is too old: "
        "pip install -U 'setuptools>=77' ninja pybind11"
    )


def missing_requirements(environ=os.environ):
    found = packages.find_all()
    missing = [] if "TORCH_DIR" in found else ["torch>=2.10"]
    try:
        tools.find_cmake()
    except BuildError:
        missing.append("cmake>=3.25")
    try:
        fetch_nvcc = plan.cuda_mode(environ) == "packages" and toolchain.find() is None
        has_kernels = fetch_nvcc or plan.find_cuda(environ)[0] is not None
    except BuildError as error:
        raise SystemExit(f"error: {error}") from None
    if fetch_nvcc:
        missing.append(toolchain.requirement())
    if has_kernels and "CUTLASS_INCLUDE" not in found:
        missing.append("nvidia-cutlass>=4.2")
    return missing


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + missing_requirements()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + missing_requirements()
