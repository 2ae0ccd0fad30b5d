"""What the machine can do at most, measured in the same run with torch's own operations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .timing import cpu_times, event_times

GPU_BYTES, CPU_BYTES = 2**30, 2**27  # of a tensor
GPU_SIDE, CPU_SIDE = 8192, 1024  # of a matrix
SECONDS = 0.2


class Roofs:
    """Bandwidths in TB/s and matrix products in TFLOP/s of one device, measured when asked for."""

    def __init__(self, device: str):
        self.device = device
        self._products: dict[str, float] = {}

    @functools.cached_property
    def bandwidth(self) -> dict[str, float]:
        """``copy`` counts what is read and what is written; ``read`` is the better of a sum and an
        inner product."""
        size = GPU_BYTES if self.device == "cuda" else CPU_BYTES
        a, b = (torch.rand(size // 4, device=self.device) for _ in range(2))
        copy = self._microseconds(lambda: a.copy_(b))
        one, two = self._microseconds(lambda: b.sum()), self._microseconds(lambda: a.dot(b))
        return {"copy": 2 * size / copy / 1e6, "read": max(size / one, 2 * size / two) / 1e6}

    @property
    def memory(self) -> float:
        """The larger of the two bandwidths, in TB/s."""
        return max(self.bandwidth.values())

    def product(self, dtype: str) -> float:
        """A square matrix product of that type, in TFLOP/s."""
        if dtype not in self._products:
            side = GPU_SIDE if self.device == "cuda" else CPU_SIDE
            shape, kind = (side, side), getattr(torch, dtype)
            a, b = (torch.randn(shape, device=self.device, dtype=kind) for _ in range(2))
            self._products[dtype] = 2 * side**3 / self._microseconds(lambda: a @ b) / 1e6
        return self._products[dtype]

    def of(self, unit: str, dtype: str) -> float:
        """The roof of a rate in "TFLOP/s" or "TB/s"."""
        return self.memory if unit == "TB/s" else self.product(dtype)

    def measured(self) -> dict[str, dict[str, float]]:
        """What has been measured so far."""
        bandwidth = self.__dict__.get("bandwidth", {})
        return {
            "tb_per_s": {name: round(value, 4) for name, value in bandwidth.items()},
            "tflops": {dtype: round(value, 3) for dtype, value in self._products.items()},
        }

    def _microseconds(self, run: Callable[[], object]) -> float:
        times = event_times if self.device == "cuda" else cpu_times
        return times(run, [()], SECONDS).median
