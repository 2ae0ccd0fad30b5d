"""Where the suites run, and why not."""

from __future__ import annotations

import torch

import flashattn_ext

from .grids import SUITES, Suite


def device_of(suite: Suite) -> str:
    """Where the suite runs here. One that needs a GPU is on "cuda" whether there is one or not."""
    if suite.device != "any":
        return suite.device
    return "cpu" if why_not("cuda") else "cuda"


def why_not(device: str) -> str:
    """Why flashattn_ext does not run on `device`, or ""."""
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    q = torch.zeros(1, 1, 1, 32, dtype=torch.bfloat16, device=device)
    return flashattn_ext.supports(q, q, q)[1].removeprefix(f"q: on {q.device}, but ")


def refuse(devices: dict[str, str]) -> str:
    """Why this machine cannot run these suites, in a sentence, or ""."""
    if reason := why_not("cpu"):
        return f"flashattn_ext does not run here: {reason}"
    wanting = [name for name, device in devices.items() if device == "cuda"]
    if wanting and (reason := why_not("cuda")):
        needs = "needs" if len(wanting) == 1 else "need"
        runs = " and ".join(name for name, suite in SUITES.items() if suite.device != "cuda")
        return f"{', '.join(wanting)} {needs} a GPU, but {reason}; {runs} run without one."
    return ""
