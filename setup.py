"""Builds the compiled parts with CMake (see CMakeLists.txt and build_support/)."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_support import BuildError, cmake  # noqa: E402

OPERATORS = "flashattn_ext._C"


class CMakeBuild(build_ext):
    def run(self):
        package_dir = Path(self.get_ext_fullpath(OPERATORS)).parent
        options = ["-DFLASHATTN_BUILD_TORCH=ON", "-DFLASHATTN_BUILD_HOST_MODULE=ON"]
        try:
            cmake.build(options, targets=["flashattn_torch", "flashattn_host"])
            cmake.install_python_files(package_dir)
        except BuildError as error:
            sys.exit(f"error: {error}")

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"


class StableAbiWheel(bdist_wheel):
    """The operators use torch's stable ABI and no Python API: every Python loads them."""

    def get_tag(self):
        return "py310", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(OPERATORS, sources=[])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": StableAbiWheel},
)
