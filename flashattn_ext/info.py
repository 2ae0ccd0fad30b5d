"""``python -m flashattn_ext.info [--json]``: what is installed, what was built, what works here.

Every probe is guarded, so this answers in a broken installation too: that is when it is needed.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from typing import Any

from ._build import BUILD, LIBRARY, PACKAGE_DIR

_VARIABLES = (
    "CUDA_HOME", "CUDACXX", "CUDA_VISIBLE_DEVICES", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS",
    "FLASHATTN_EXT_CUDA", "FLASHATTN_EXT_HEAD_DIMS", "FLASHATTN_EXT_CHECK",
    "FLASHATTN_EXT_CPU_SIMD", "FLASHATTN_EXT_NUM_THREADS", "FLASHATTN_EXT_NVTX", "OMP_NUM_THREADS",
)  # fmt: skip


def collect() -> dict[str, Any]:
    torch_version, torch_cuda, torch_error = _torch()
    load_error = _load_error() if not torch_error else ""
    usable = not torch_error and not load_error
    return {
        "version": BUILD.get("version", ""),
        "package": str(PACKAGE_DIR),
        "installed_version": _installed_version(),
        "library": str(LIBRARY) if LIBRARY.exists() else "",
        "load_error": load_error,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "torch": torch_version,
        "torch_cuda": torch_cuda,
        "torch_error": torch_error,
        "build": BUILD,
        "cpu_simd": _cpu_simd(),
        "cpu_problem": _problem("cpu") if usable else "",
        "driver": _driver(),
        "gpus": _gpus() if usable else [],
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def verdict(info: dict[str, Any]) -> str:
    """One sentence: what this installation can do."""
    if info["torch_error"]:
        return (
            f"Not usable: PyTorch does not import ({info['torch_error']}). Install torch >= 2.10."
        )
    if info["load_error"]:
        return f"Not usable: {info['load_error']}"
    if info["cpu_problem"]:
        return f"Not usable: a call on the CPU fails with {info['cpu_problem']}"
    places = [f"the CPU ({info['cpu_simd']})" if info["cpu_simd"] else "the CPU"]
    places += [f"GPU {gpu['index']} ({gpu['name']})" for gpu in info["gpus"] if not gpu["problem"]]
    return f"Usable on {' and '.join(places)}{_but(info)}."


def _but(info: dict[str, Any]) -> str:
    broken = [gpu for gpu in info["gpus"] if gpu["problem"]]
    if broken:
        return f", but not on GPU {broken[0]['index']}: {broken[0]['problem'].rstrip('.')}"
    if not info["build"].get("cuda_archs"):
        return f"; there are no CUDA kernels in this build: {_off_reason(info['build'])}"
    if info["gpus"]:
        return ""
    archs = ", ".join(f"sm_{arch}" for arch in info["build"]["cuda_archs"])
    if info["driver"] and not info["torch_cuda"]:
        return f"; there are CUDA kernels ({archs}), but this torch was built without CUDA"
    return f"; there are CUDA kernels ({archs}), but torch sees no GPU"


def render(info: dict[str, Any]) -> str:
    build = info["build"]
    archs = ", ".join(f"sm_{arch}" for arch in build.get("cuda_archs", ()))
    rows = [
        (
            "flashattn_ext",
            f"{info['version'] or 'not built'} {_in_brackets(build.get('git_commit'))}",
        ),
        ("package", info["package"]),
        ("library", info["load_error"] or info["library"] or "missing"),
        ("python", info["python"]),
        ("platform", info["platform"]),
        (
            "torch",
            f"{info['torch'] or info['torch_error']} {_in_brackets(info['torch_cuda'], 'CUDA ')}",
        ),
    ]
    if build:
        ptx = f"; PTX of sm_{build.get('ptx_arch', '?')} for newer GPUs" if archs else ""
        rows += [
            ("CUDA kernels", f"{archs}{ptx}" if archs else f"none: {_off_reason(build)}"),
            ("head dims", ", ".join(map(str, build.get("head_dims", ()))) or "all (CPU)"),
            ("built with", _built_with(build)),
        ]
    rows.append(("CPU", info["cpu_simd"] or "unknown instruction set"))
    rows += [("driver", line) for line in info["driver"]]
    rows += [
        (f"GPU {gpu['index']}", f"{gpu['name']}, sm_{gpu['arch']}: {gpu['problem'] or 'works'}")
        for gpu in info["gpus"]
    ]
    rows += sorted(info["environment"].items())
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text.rstrip()}" for name, text in rows)


def _built_with(build: dict[str, Any]) -> str:
    nvcc = f", nvcc {build['cuda_version']}" if build.get("cuda_version") else ""
    compiler, torch_version = build.get("cxx_compiler", "?"), build.get("torch_version", "?")
    return f"{compiler}{nvcc}, torch {torch_version}"


def _off_reason(build: dict[str, Any]) -> str:
    return build.get("cuda_off_reason") or "the reason was not recorded"


def _in_brackets(text: str | None, prefix: str = "") -> str:
    return f"({prefix}{text})" if text else ""


def _installed_version() -> str:
    try:
        return importlib.metadata.version("flashattn_ext")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch() -> tuple[str, str, str]:
    """Version, its CUDA version, why it does not import."""
    try:
        import torch

        return torch.__version__, torch.version.cuda or "", ""
    except Exception as error:  # a torch with missing libraries raises all sorts of things
        return "", "", f"{type(error).__name__}: {error}"


def _load_error() -> str:
    try:
        from ._ops import load_error
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return load_error


def _cpu_simd() -> str:
    try:
        from ._host import build_info  # optional: it belongs to one version of Python

        simd: str = build_info().cpu_simd
        return simd
    except Exception:
        return ""


def _problem(device: str) -> str:
    """Makes a small call on the device; returns what went wrong."""
    try:
        import torch

        from .interface import flash_fwd

        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        ones = torch.ones(1, 4, 1, 32, dtype=dtype, device=device)
        with torch.no_grad():
            out = flash_fwd(ones, ones, ones)
        return "" if torch.equal(out, ones) else "a wrong result: attention over ones is not one"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _gpus() -> list[dict[str, Any]]:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        gpus.append({
            "index": index,
            "name": torch.cuda.get_device_name(index),
            "arch": 10 * major + minor,
            "problem": _problem(f"cuda:{index}"),
        })  # fmt: skip
    return gpus


def _driver() -> list[str]:
    """The GPUs as the driver sees them, torch or not."""
    query = "name,compute_cap,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return result.stdout.splitlines() if result.returncode == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flashattn_ext.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    as_json = parser.parse_args().json
    info = collect()
    info["verdict"] = verdict(info)
    if as_json:
        print(json.dumps(info, indent=2))
    else:
        print(f"{render(info)}\n\n{info['verdict']}")


if __name__ == "__main__":
    main()
