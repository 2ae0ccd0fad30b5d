"""The build's reading of its environment, and `info`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flashattn_ext import info
from flashattn_ext._build import BUILD, PACKAGE_DIR
from nvcc_stand_in import write_nvcc

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from build_support import (  # noqa: E402
    BuildError, architectures, jobs, packages, plan, toolchain, tools,
)  # fmt: skip

COMPILABLE = (75, 80, 86, 87, 89, 90, 100, 103, 120)  # what a made-up nvcc knows


# Architectures


@pytest.mark.parametrize(
    "text, archs, ptx",
    [
        ("8.0", (80,), 80),
        ("9.0a", (90,), 90),
        ("9.0;8.0", (80, 90), 90),
        ("8.0,8.6 9.0", (80, 86, 90), 90),
        (" 8.0 ; 9.0 ", (80, 90), 90),
        ("8.0+PTX;9.0", (80, 90), 80),
        ("8.0+PTX 8.6+ptx 9.0", (80, 86, 90), 86),
        ("8.6;8.6+PTX", (86,), 86),
        ("Hopper", (90,), 90),
        ("ampere", (80, 86), 86),
        ("Ampere;Hopper", (80, 86, 90), 90),
        ("Ampere+Tegra", (87,), 87),
        ("Ada 10.0a 12.0f", (89, 100, 120), 89),
        ("Blackwell", (100, 103, 120, 121), 121),
    ],
)
def test_arch_list(text, archs, ptx):
    assert architectures.parse_arch_list(text) == (archs, ptx)


@pytest.mark.parametrize("text", ["7.5", "Volta", "8.0;7.0", "5.2+PTX", "Kepler+Tesla", "7.5;9.0a"])
def test_arch_list_refuses_what_is_older_than_ampere(text):
    with pytest.raises(BuildError, match=r"older than 8\.0 .*FLASHATTN_EXT_CUDA=off"):
        architectures.parse_arch_list(text)


@pytest.mark.parametrize("text", ["sm_80", "80", "8", "9.0b", "Hoper", "8.0+SASS", "8.0;;x"])
def test_arch_list_refuses_other_words(text):
    with pytest.raises(BuildError, match="TORCH_CUDA_ARCH_LIST: '.*' is not an architecture"):
        architectures.parse_arch_list(text)


@pytest.mark.parametrize(
    "arch_list, gpus, archs, ptx",
    [
        ("", (), (80, 90), 90),
        ("8.9", (90,), (89,), 89),  # the variable beats the GPUs
        ("", (86, 90), (86, 90), 90),
        ("", (75,), (80, 90), 90),  # a GPU that is too old leaves the default
        ("", (75, 89), (89,), 89),
        ("", (121,), (120,), 120),  # newer than this nvcc: the newest that it knows, with PTX
    ],
)
def test_chosen_architectures(arch_list, gpus, archs, ptx):
    assert architectures.choose(arch_list, gpus, COMPILABLE)[:2] == (archs, ptx)


def test_an_architecture_that_nvcc_does_not_know_is_refused():
    with pytest.raises(BuildError, match=r"cannot compile for 11\.0; it knows 8\.0, .*12\.0"):
        architectures.choose("9.0;11.0", (), COMPILABLE)


# Jobs and head dims


@pytest.mark.parametrize(
    "max_jobs, cores, free_gib, expected",
    [
        (None, 2, 23, 2),
        (None, 64, 30.5, 7),
        (None, 8, 3.9, 1),  # never none
        (None, 8, float("inf"), 8),
        ("3", 64, 1, 3),
        ("", 2, 23, 2),
    ],
)
def test_jobs(max_jobs, cores, free_gib, expected):
    environ = {} if max_jobs is None else {"MAX_JOBS": max_jobs}
    assert jobs.choose_jobs(environ, cores, free_gib, gib_per_file=4) == expected


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_max_jobs_must_be_a_number(text):
    with pytest.raises(BuildError, match="MAX_JOBS: expected a whole number from 1 on, got"):
        jobs.choose_jobs({"MAX_JOBS": text}, 2, 8, 4)


def test_free_memory_respects_the_limit_of_a_container(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(f"{8 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{6 * 2**30}\n")
    (tmp_path / "memory.stat").write_text(f"anon 17\ninactive_file {3 * 2**30}\n")
    monkeypatch.setattr(jobs, "CGROUP", tmp_path)
    monkeypatch.setattr(jobs, "_machine_free", lambda: 100 * 2**30)
    assert jobs.free_gib() == 5
    (tmp_path / "memory.max").write_text("max\n")
    assert jobs.free_gib() == 100


@pytest.mark.parametrize(
    "text, expected", [("", plan.HEAD_DIMS), ("128", (128,)), ("128, 64;64", (64, 128))]
)
def test_head_dims(text, expected):
    assert plan.parse_head_dims(text) == expected


@pytest.mark.parametrize("text", ["100", "64,80", "x", "-64"])
def test_unknown_head_dims_are_refused(text):
    with pytest.raises(
        BuildError, match="FLASHATTN_EXT_HEAD_DIMS: no kernel for .* Expected some of 32"
    ):
        plan.parse_head_dims(text)


def test_head_dims_are_those_of_the_kernels():
    _host = pytest.importorskip("flashattn_ext._host")
    assert list(plan.HEAD_DIMS) == _host.head_dims


# Finding nvcc


@pytest.fixture
def no_default_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(tools, "DEFAULT_CUDA_HOME", tmp_path / "none")
    monkeypatch.setattr(toolchain, "find", lambda: None)


def test_without_nvcc_the_build_is_cpu_only_and_says_why(no_default_cuda):
    made = plan.make_plan({"PATH": "/nowhere"})
    assert made.nvcc is None and made.archs == ()
    assert "nvcc was not found in CUDA_HOME, CUDACXX, PATH, /usr/local/cuda or" in made.report[0]
    assert "-DFLASHATTN_CUDA=OFF" in made.cmake_arguments()


def test_cuda_on_without_nvcc_is_an_error(no_default_cuda):
    with pytest.raises(
        BuildError, match="FLASHATTN_EXT_CUDA=on, but nvcc was not found.*-devel image"
    ):
        plan.find_cuda({"PATH": "/nowhere", "FLASHATTN_EXT_CUDA": "ON"})


def test_cuda_off_does_not_look_for_nvcc():
    nvcc, reason = plan.find_cuda({"FLASHATTN_EXT_CUDA": "off", "CUDA_HOME": "/nowhere"})
    assert nvcc is None and reason == "FLASHATTN_EXT_CUDA=off was set at build time"


def test_another_word_for_cuda_is_refused():
    with pytest.raises(BuildError, match="expected auto, on, packages or off, got 'yes'"):
        plan.find_cuda({"FLASHATTN_EXT_CUDA": "yes"})


@pytest.mark.parametrize("home", ["/nowhere", ":/usr/local/cuda", __file__])
def test_wrong_cuda_home_is_an_error(home):
    message = f"CUDA_HOME='{re.escape(home)}' is not a folder.*unset it.*FLASHATTN_EXT_CUDA=off"
    with pytest.raises(BuildError, match=message):
        plan.find_cuda({"CUDA_HOME": home})


def test_cuda_home_without_nvcc_is_an_error(tmp_path):
    with pytest.raises(BuildError, match="has no bin/nvcc"):
        plan.find_cuda({"CUDA_HOME": str(tmp_path)})


def test_cuda_home_beats_path_and_may_hold_spaces(tmp_path):
    wanted = write_nvcc(tmp_path / "my cuda")
    other = write_nvcc(tmp_path / "other")
    found, _ = plan.find_cuda({"CUDA_HOME": str(tmp_path / "my cuda"), "PATH": str(other.parent)})
    assert found == tools.Nvcc(wanted, "13.0", (75, 80, 90))


def test_plan_tells_what_it_will_compile(tmp_path):
    write_nvcc(tmp_path / "cuda")
    environ = {
        "CUDA_HOME": str(tmp_path / "cuda"),
        "TORCH_CUDA_ARCH_LIST": "8.0+PTX;9.0",
        "FLASHATTN_EXT_HEAD_DIMS": "64,128",
        "MAX_JOBS": "5",
    }
    made = plan.make_plan(environ)
    report = "\n".join(made.report)
    assert "8.0, 9.0 from TORCH_CUDA_ARCH_LIST (PTX of 8.0" in report
    assert "head dims 64, 128; fp16 and bf16: 16 CUDA files" in report
    assert "5 at a time" in report and "MAX_JOBS" in report
    arguments = made.cmake_arguments()
    assert "-DFLASHATTN_ARCHS=80;90" in arguments
    assert "-DFLASHATTN_PTX_ARCH=80" in arguments
    assert "-DFLASHATTN_CUDA_OFF_REASON=" in arguments  # clears that of an earlier build
    assert "-DFLASHATTN_HEAD_DIMS=64;128" in arguments


def test_old_nvcc_is_refused(tmp_path):
    write_nvcc(tmp_path, version="11.8")
    with pytest.raises(BuildError, match=r"is nvcc 11\.8; 12\.0 or newer"):
        plan.find_cuda({"CUDA_HOME": str(tmp_path)})


def test_a_host_compiler_that_nvcc_refuses_is_named(tmp_path):
    write_nvcc(tmp_path, fails=True)
    with pytest.raises(BuildError, match=r"(?s)-ccbin g\+\+-13.*unsupported GNU version"):
        plan.find_cuda({"CUDA_HOME": str(tmp_path)})


def test_a_cuda_version_other_than_torchs_is_told(tmp_path, monkeypatch):
    write_nvcc(tmp_path, version="12.4")
    facts = {"TORCH_DIR": "/site/torch", "TORCH_VERSION": "2.14.1+cu130", "TORCH_CUDA": "13.0"}
    monkeypatch.setattr(packages, "find_all", lambda: facts)
    report = "\n".join(plan.make_plan({"CUDA_HOME": str(tmp_path)}).report)
    assert "torch 2.14.1+cu130 in /site/torch was built for CUDA 13.0" in report
    assert "nvcc 12.4 at" in report


# Finding packages


def test_torch_is_found_without_importing_it():
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from build_support import packages\n"
    script += "print(packages.find_all()['TORCH_VERSION']); sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    import torch

    assert (result.returncode, result.stdout.strip()) == (0, torch.__version__), result.stderr


def test_torch_is_found_under_build_isolation(monkeypatch):
    import torch

    hidden = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr(sys, "path", hidden)
    assert packages.package_dir("torch") == Path(torch.__file__).parent


@pytest.mark.parametrize("inner", ["", "include"])
def test_cutlass_path(tmp_path, monkeypatch, inner):
    include = tmp_path / "include"
    (include / "cute").mkdir(parents=True)
    (include / "cute" / "tensor.hpp").touch()
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / inner))
    assert packages.cutlass_include() == include
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path / "elsewhere"))
    assert packages.cutlass_include() is None


# info


def run_info(*arguments, before="", parent=PACKAGE_DIR.parent):
    script = f"import sys, runpy; sys.argv[1:] = {list(arguments)!r}; {before}\n"
    script += f"sys.path.insert(0, {str(parent)!r})\n"
    script += "runpy.run_module('flashattn_ext.info', run_name='__main__')"
    command = [sys.executable, "-W", "ignore", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_info_ends_with_a_verdict(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["info", *arguments])
    info.main()
    out = capsys.readouterr().out
    told = json.loads(out) if arguments else {"verdict": out.splitlines()[-1], "build": BUILD}
    assert told["verdict"].startswith("Usable on the CPU") and told["build"] == BUILD


@pytest.mark.parametrize("broken", ["raise RuntimeError('broken')", "__version__ = '1.0'"])
def test_a_broken_or_old_torch_breaks_no_import(broken, tmp_path):
    (tmp_path / "torch.py").write_text(broken)
    assert "Not usable: " in run_info(before=f"sys.path.insert(0, {str(tmp_path)!r})")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(PACKAGE_DIR.parent)!r}]\n"
        "import flashattn_ext\n"
        "try:\n    flashattn_ext.flash_fwd\n"
        "except ImportError as error:\n    print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "needs PyTorch 2.10" in result.stdout, result.stderr


def test_info_works_with_a_build_that_recorded_little(monkeypatch):
    collected = info.collect() | {"build": {"version": "1"}}
    assert "none: the reason was not recorded" in info.render(collected)


def test_info_works_without_torch():
    out = run_info(before="sys.modules['torch'] = None")
    assert "Not usable: PyTorch does not import (ModuleNotFoundError" in out.splitlines()[-1]


@pytest.mark.parametrize("content", [None, "not a library"])
def test_info_works_without_a_library_that_loads(tmp_path, content):
    copy = tmp_path / "flashattn_ext"
    ignore = shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__")
    shutil.copytree(PACKAGE_DIR, copy, ignore=ignore)
    if content is not None:
        (copy / "_C.so").write_text(content)
    last = run_info(parent=tmp_path).splitlines()[-1]
    assert last.startswith("Not usable:") and str(copy / "_C.so") in last


WORKING = {
    "torch_error": "", "load_error": "", "cpu_problem": "", "cpu_simd": "avx2", "driver": [],
    "torch_cuda": "13.0", "gpus": [], "build": {"cuda_archs": [80, 90], "ptx_arch": 90},
}  # fmt: skip
NO_CUDA = {"cuda_archs": [], "cuda_off_reason": "no nvcc"}
T4 = {"index": 1, "name": "T4", "arch": 75, "problem": "NotImplementedError: T4 is sm_75."}
H200 = {"index": 0, "name": "H200", "arch": 90, "problem": ""}


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, "the CPU (avx2); there are CUDA kernels (sm_80, sm_90), but torch sees no GPU."),
        ({"driver": ["H200"], "torch_cuda": ""}, "but this torch was built without CUDA."),
        ({"build": NO_CUDA}, "; there are no CUDA kernels in this build: no nvcc."),
        ({"gpus": [H200]}, "Usable on the CPU (avx2) and GPU 0 (H200)."),
        ({"gpus": [H200, T4]}, "GPU 0 (H200), but not on GPU 1: NotImplementedError: T4 is sm_75."),
        ({"cpu_problem": "RuntimeError: x"}, "Not usable: a call on the CPU fails with RuntimeErr"),
    ],
)  # fmt: skip
def test_verdict(change, expected):
    assert expected in info.verdict(WORKING | change)
