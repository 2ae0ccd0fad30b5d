"""Devices. Every test that takes `device` runs on the CPU and, where one is, on a GPU."""

import pytest
import torch

from flashattn_ext._build import BUILD

NO_GPU = "no CUDA device"
LARGEST_CUDA_HEAD_DIM = max(BUILD.get("head_dims") or [256])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


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
    if item.get_closest_marker("gpu") is None:
        return
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    head_dim = params.get("d", getattr(params.get("case"), "d", 0))
    if head_dim > LARGEST_CUDA_HEAD_DIM:
        pytest.skip(f"the build has no CUDA kernel for head dim {head_dim}")


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    without_gpu = sum(NO_GPU in str(report.longrepr) for report in skipped)
    if without_gpu:
        terminalreporter.write_line(f"{without_gpu} GPU tests skipped: {NO_GPU}")
