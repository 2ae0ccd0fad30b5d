"""On what was measured: GPU, driver, clocks, versions. Every probe is guarded."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import flashattn_ext

from .._build import BUILD

Clocks = dict[str, float | None]  # by the names of CLOCKS
CLOCKS = {
    "sm_mhz": "clocks.sm", "sm_max_mhz": "clocks.max.sm", "memory_mhz": "clocks.mem",
    "memory_max_mhz": "clocks.max.mem", "temperature_c": "temperature.gpu", "power_w": "power.draw",
    "power_limit_w": "power.limit",
}  # fmt: skip


def facts(device: str) -> dict[str, Any]:
    """What does not change during a run."""
    on_gpu = device == "cuda"
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device,
        "gpu": torch.cuda.get_device_name() if on_gpu else "",
        "capability": "{}.{}".format(*torch.cuda.get_device_capability()) if on_gpu else "",
        "driver": _query_gpu(["driver_version"])[0] if on_gpu else "",
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "flashattn_ext": flashattn_ext.__version__,
        "git_commit": BUILD.get("git_commit", ""),
        "built_with_cuda": BUILD.get("cuda_version", ""),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or "") if on_gpu else "",
        "triton": _version("triton"),
        "python": platform.python_version(),
        "checks": os.environ.get("FLASHATTN_EXT_CHECK", "") not in ("", "0"),
    }


def clocks() -> Clocks:
    """Clocks, temperature and power of the current GPU as they are now; None where unknown."""
    values = _query_gpu(list(CLOCKS.values()))
    return {name: _number(value) for name, value in zip(CLOCKS, values, strict=True)}


def describe(facts: dict[str, Any], now: Clocks | None) -> list[str]:
    """The same in a few lines, with the clocks `now` of a GPU."""
    lines = [
        f"flashattn_ext {facts['flashattn_ext']} ({facts['git_commit'] or 'commit unknown'}), "
        f"torch {facts['torch']}, CUDA {facts['cuda'] or 'none'}, Python {facts['python']}, "
        f"{facts['date'][:10]}"
    ]
    if facts["gpu"]:
        lines.append(
            f"{facts['gpu']}, sm_{facts['capability'].replace('.', '')}, driver "
            f"{facts['driver'] or 'unknown'}, cuDNN {facts['cudnn'] or 'none'}, "
            f"Triton {facts['triton'] or 'none'}"
        )
        lines += [] if now is None else [describe_clocks(now)]
    else:
        lines.append(f"{facts['cpu']}, {facts['cpu_threads']} threads")
    if facts["checks"]:
        lines.append(
            "FLASHATTN_EXT_CHECK is set: calls of flashattn_ext wait for the device to read lengths"
        )
    return lines


def describe_clocks(now: Clocks) -> str:
    shown = {name: "?" if value is None else f"{value:.0f}" for name, value in now.items()}
    return (
        f"clocks: SM {shown['sm_mhz']} of {shown['sm_max_mhz']} MHz, memory {shown['memory_mhz']} "
        f"of {shown['memory_max_mhz']} MHz; {shown['temperature_c']} C, {shown['power_w']} of "
        f"{shown['power_limit_w']} W"
    )


def _query_gpu(fields: list[str]) -> list[str]:
    """What the driver says of the current GPU; empty strings where it says nothing."""
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    by_id = [] if uuid is None else [f"--id=GPU-{str(uuid).removeprefix('GPU-')}"]
    lines = _nvidia_smi([*query, *by_id]) or _nvidia_smi(query)
    values = [value.strip() for value in lines[0].split(",")] if len(lines) == 1 else []
    return values if len(values) == len(fields) else [""] * len(fields)


def _nvidia_smi(arguments: list[str]) -> list[str]:
    try:
        run = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return run.stdout.strip().split("\n") if run.returncode == 0 else []


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", or nothing
        return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
