"""nvcc out of Python packages: how the build finds it and makes a toolkit of it."""

import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest
from nvcc_stand_in import write_nvcc

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from build_support import BuildError, backend, packages, plan, toolchain, tools  # noqa: E402


def write_packages(site, folder="nvidia/cu13"):
    """The layout of NVIDIA's packages."""
    toolkit = site / folder
    write_nvcc(toolkit)
    for name in (
        "include/cccl/x.h",
        "nvvm/bin/cicc",
        "lib/libcudart.so.13",
        "lib/libcudart_static.a",
    ):
        (toolkit / name).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / name).touch()
    return toolkit


@pytest.fixture
def only_packages(monkeypatch, tmp_path):
    """A machine whose only nvcc is in packages, linked to below tmp_path. Gives the toolkit."""
    toolkit = write_packages(tmp_path / "site")
    find, link = toolchain.find, toolchain.link_home
    monkeypatch.setattr(tools, "DEFAULT_CUDA_HOME", tmp_path / "none")
    monkeypatch.setattr(toolchain, "find", lambda: find([tmp_path / "site"]))
    monkeypatch.setattr(toolchain, "link_home", lambda found: link(found, tmp_path / "home"))
    return toolkit


def test_newest_toolkit_of_the_first_folder_that_has_one(tmp_path):
    write_packages(tmp_path / "a", "nvidia/cuda_nvcc")  # before CUDA 13: parts of one
    write_packages(tmp_path / "b", "nvidia/cu9")
    newest = write_packages(tmp_path / "b", "nvidia/cu13")
    write_packages(tmp_path / "c", "nvidia/cu14")
    folders = [tmp_path / name for name in "abc"]
    assert toolchain.find(folders) == newest
    assert toolchain.find(folders[:1]) is None


def test_looks_where_build_isolation_does_not(tmp_path, monkeypatch):
    toolkit = write_packages(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert toolchain.find() == toolkit


def test_links_look_like_a_toolkit(tmp_path):
    toolkit, home = write_packages(tmp_path / "site"), tmp_path / "build" / "cuda_home"
    for _ in range(2):  # what an earlier build left is replaced
        assert toolchain.link_home(toolkit, home) == home / "bin" / "nvcc"
    assert not (home / "bin").is_symlink() and (home / "bin" / "nvcc").is_symlink()
    assert (home / "include" / "cccl" / "x.h").is_file() and (
        home / "nvvm" / "bin" / "cicc"
    ).is_file()
    assert (home / "lib64" / "libcudart_static.a").is_file()
    assert os.path.realpath(home / "lib64" / "libcudart.so") == str(
        toolkit / "lib" / "libcudart.so.13"
    )


@pytest.mark.parametrize("mode", ["auto", "on", "packages"])
def test_build_takes_it(mode, only_packages, tmp_path):
    found, reason = plan.find_cuda({"PATH": "/nowhere", "FLASHATTN_EXT_CUDA": mode})
    assert found == tools.Nvcc(tmp_path / "home/bin/nvcc", "13.0", (75, 80, 90)) and reason == ""


def test_an_installed_toolkit_comes_first_unless_packages_are_asked_for(only_packages, tmp_path):
    installed = write_nvcc(tmp_path / "cuda")
    environ = {"CUDA_HOME": str(tmp_path / "cuda")}
    assert plan.find_cuda(environ)[0].path == installed
    asked = plan.find_cuda({**environ, "FLASHATTN_EXT_CUDA": "packages"})[0]
    assert asked.path == tmp_path / "home/bin/nvcc"


@pytest.mark.parametrize(
    "torch_cuda, expected",
    [("13.0", "cuda-toolkit[nvcc,cccl]==13.0.*"), ("12.8", None), ("", None)],
)
def test_pip_is_asked_for_it_under_build_isolation(torch_cuda, expected, monkeypatch):
    monkeypatch.setattr(toolchain, "find", lambda: None)
    found = {"TORCH_DIR": "/torch", "TORCH_CUDA": torch_cuda}
    monkeypatch.setattr(packages, "find_all", lambda: found)
    environ = {"PATH": "/nowhere", "FLASHATTN_EXT_CUDA": "packages"}
    missing = backend.missing_requirements(environ)
    assert missing[-2:] == [expected or toolchain.REQUIREMENT, "nvidia-cutlass>=4.2"]


def test_without_build_isolation_the_message_names_it(monkeypatch):
    monkeypatch.setattr(toolchain, "find", lambda: None)
    with pytest.raises(BuildError, match=r"no package here has nvcc: pip install 'cuda-toolkit\["):
        plan.find_cuda({"FLASHATTN_EXT_CUDA": "packages"})


def test_nothing_is_fetched_that_is_there(only_packages, monkeypatch):
    found = {"TORCH_DIR": "/torch", "CUTLASS_INCLUDE": "/cutlass"}
    monkeypatch.setattr(packages, "find_all", lambda: found)
    monkeypatch.setattr(tools, "find_cmake", lambda: "/cmake")
    environ = {"PATH": "/nowhere", "FLASHATTN_EXT_CUDA": "packages"}
    assert backend.missing_requirements(environ) == []


def test_extra_is_what_the_build_asks_for():
    extra = re.search(r"^toolchain = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra[1] == f'"{toolchain.REQUIREMENT}"'
