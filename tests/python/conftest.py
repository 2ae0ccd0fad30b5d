"""Devices. Every test that takes `device` runs on the CPU and, where one is, on a GPU."""

import pytest
import torch

from flashattn_ext._build import BUILD


def _why_no_gpu():
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if BUILD.get("cuda_archs") else "flashattn_ext was built without CUDA kernels"


NO_GPU = _why_no_gpu()


def pytest_addoption(parser):
    parser.addoption("--draws", type=int, help="calls of test_draws.py: 2400, on a GPU 20000")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(params=["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def anywhere(request):
    return request.param


@pytest.fixture(scope="module", autouse=True)
def _return_memory():
    """What torch keeps for reuse would be missing to test processes beside this one."""
    yield
    if not NO_GPU:
        torch.cuda.empty_cache()


def _runs(item):
    """float32 exists on the CPU only: for a GPU there is no such test, not even a skipped one."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    case = params.get("case")
    dtype = params.get("dtype", getattr(case, "dtype", None))
    return not (params.get("device") == "cuda" and dtype == torch.float32)


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if not _runs(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if _runs(item)]


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None and NO_GPU:
        pytest.skip(NO_GPU)


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    without_gpu = sum(NO_GPU in str(report.longrepr) for report in skipped) if NO_GPU else 0
    if without_gpu:
        terminalreporter.write_line(f"{without_gpu} GPU tests skipped: {NO_GPU}")
