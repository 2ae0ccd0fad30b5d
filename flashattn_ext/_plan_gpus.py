"""The GPUs that `plan` can be asked about, and which kernels of this build they run."""

from __future__ import annotations

from dataclasses import dataclass
from sys import float_info

import torch

from ._build import BUILD
from ._score_checks import is_int

_DEFAULT_ARCHS = (80, 90)  # of a build without CUDA kernels: those that CMakeLists.txt would build
_MAX_MULTIPROCESSORS = 4096


@dataclass(frozen=True)
class Gpu:
    """What `plan` needs to know of a GPU.

    Attributes:
        name: for the printed text.
        capability: 90 for compute capability 9.0.
        multiprocessors: how many it has.
        bytes_per_second: peak bandwidth of its memory; None when not known.
        flops_per_second: peak rate of dense fp16/bf16 matrix products with fp32 accumulation; None
            when not known.
    """

    name: str
    capability: int
    multiprocessors: int
    bytes_per_second: float | None = None
    flops_per_second: float | None = None

    def __post_init__(self) -> None:
        most = _MAX_MULTIPROCESSORS
        if not is_int(self.multiprocessors) or not 0 < self.multiprocessors <= most:
            got = repr(self.multiprocessors)
            raise ValueError(f"multiprocessors: expected an int from 1 to {most}, got {got}")
        if not is_int(self.capability) or self.capability < 10:
            raise ValueError(
                "capability: expected ten times the compute capability (90 for 9.0), got "
                f"{self.capability!r}"
            )
        for field in ("bytes_per_second", "flops_per_second"):
            value = getattr(self, field)
            is_number = isinstance(value, int | float)
            if value is not None and not (is_number and 0 < value <= float_info.max):
                raise ValueError(f"{field}: expected None or a number above 0, got {value!r}")


# Peaks of NVIDIA's data sheets (H100, H200, A100, L4) and architecture papers (Ada, GA102), without
# sparsity: roofs that no kernel reaches.
_KNOWN = {
    "H200": Gpu("H200", 90, 132, 4.8e12, 989e12),
    "H100": Gpu("H100", 90, 132, 3.35e12, 989e12),
    "H100 PCIe": Gpu("H100 PCIe", 90, 114, 2.0e12, 756e12),
    "A100": Gpu("A100", 80, 108, 2.039e12, 312e12),
    "A100 40GB": Gpu("A100 40GB", 80, 108, 1.555e12, 312e12),
    "L4": Gpu("L4", 89, 58, 0.3e12, 121e12),
    "RTX 4090": Gpu("RTX 4090", 89, 128, 1.008e12, 165.2e12),
    "RTX 3090": Gpu("RTX 3090", 86, 82, 0.936e12, 71e12),
}

# As torch names them -> the row above.
_DEVICE_NAMES = {
    "NVIDIA H200": "H200",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA L4": "L4",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
}


def gpu_names() -> list[str]:
    return list(_KNOWN)


def find_gpu(gpu: str | Gpu | None) -> Gpu:
    """The GPU of that name; None: torch's current one, or an H200 where there is none."""
    if isinstance(gpu, Gpu):
        return gpu
    if gpu is None:
        visible = torch.version.cuda is not None and torch.cuda.is_available()
        return _current() if visible else _KNOWN["H200"]
    if isinstance(gpu, str) and gpu in _KNOWN:
        return _KNOWN[gpu]
    names = ", ".join(map(repr, _KNOWN))
    raise ValueError(f"gpu: expected None, a flashattn_ext.planning.Gpu, or {names}; got {gpu!r}")


def _current() -> Gpu:
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    known = _KNOWN.get(_DEVICE_NAMES.get(device.name, ""))
    return Gpu(
        name=device.name,
        capability=10 * device.major + device.minor,
        multiprocessors=device.multi_processor_count,  # a part of the GPU has fewer (MIG)
        bytes_per_second=known.bytes_per_second if known else None,
        flops_per_second=known.flops_per_second if known else None,
    )


def arch_of(gpu: Gpu) -> int:
    """The architecture whose kernels that GPU runs: csrc/dispatch.cpp picks the same."""
    archs = BUILD.get("cuda_archs") or _DEFAULT_ARCHS
    ptx = (BUILD.get("ptx_arch") if BUILD.get("cuda_archs") else max(archs)) or 0
    capability = gpu.capability
    own = [arch for arch in archs if arch // 10 == capability // 10 and arch <= capability]
    if own:
        return max(own)
    if 0 < ptx <= capability:
        return ptx
    built = ", ".join(f"sm_{arch}" for arch in archs)
    raise NotImplementedError(
        f"gpu: {gpu.name} is sm_{capability} and this build covers {built}"
        + (": GPUs older than sm_80 are not supported" if capability < 80 else "")
    )


def kernel_head_dim(head_dim: int, every_head_dim: list[int]) -> int:
    """The head dim of the smallest kernel that holds `head_dim`."""
    built = BUILD.get("head_dims") or every_head_dim
    fitting = [dim for dim in built if dim >= head_dim]
    if not fitting:
        raise NotImplementedError(
            f"head_dim: expected at most {max(built)}, the largest kernel of this build, "
            f"got {head_dim}"
        )
    return min(fitting)
