"""The kernel budget: few kernels, and none that spills.

    python kernel_budget.py LIBRARY      a static library, object or shared object

Lists the CUDA kernels in LIBRARY with their registers and stack, and fails when an architecture has
more than 83 of them, or one has a larger stack frame than 64 bytes.
Exits with 77 (skipped) without cuobjdump or without kernels.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# 74 of attention, 6 of flash_combine (three types, few parts or many), 2 that append, 1 that merges
MAX_KERNELS = 83
# The largest has 48 (prefill, head dim 160, sm_80): values kept across the loads of a product.
MAX_FRAME_BYTES = 64

SKIPPED = 77
ARCH = re.compile(r"^arch = sm_(\d+)", re.MULTILINE)
FUNCTION = re.compile(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def find_cuobjdump() -> str | None:
    """Of the toolkit, or else the one that comes with triton."""
    candidates = [shutil.which("cuobjdump")]
    nvcc = shutil.which("nvcc")
    toolkit = nvcc and Path(nvcc).resolve().parents[1]
    roots = [os.environ.get("CUDA_HOME"), toolkit, "/usr/local/cuda"]
    candidates += [Path(root) / "bin/cuobjdump" for root in roots if root]
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        candidates.append(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump")
    return next((str(c) for c in candidates if c and Path(c).is_file()), None)


def readable(names: list[str]) -> dict[str, str]:
    """Demangled names without namespaces and parameters, where c++filt exists."""
    if not names or not shutil.which("c++filt"):
        return {name: name for name in names}
    demangled = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    noise = re.compile(r"flashattn::|sm\d+::|^void |(?<=>)\(.*\)$")
    return {name: noise.sub("", line) for name, line in zip(names, demangled, strict=True)}


def kernels(text: str) -> dict[int, dict[str, tuple[int, int]]]:
    """Of what -res-usage prints: {architecture: {name: (registers, bytes of stack and local)}}."""
    found: dict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
    parts = ARCH.split(text)  # text before the first, then arch, text, arch, text ...
    for arch, part in zip(parts[1::2], parts[2::2], strict=True):
        for name, registers, stack, _shared, local in FUNCTION.findall(part):
            found[int(arch)][name] = (int(registers), int(stack) + int(local))
    return found


def check(found: dict[int, dict[str, tuple[int, int]]]) -> list[str]:
    faults = []
    for arch, functions in sorted(found.items()):
        names = readable(list(functions))
        print(f"sm_{arch}: {len(functions)} kernels (budget {MAX_KERNELS})\n  regs  frame  kernel")
        for name, (registers, frame) in sorted(functions.items(), key=lambda item: names[item[0]]):
            print(f"  {registers:4}  {frame:5}  {names[name]}")
            if frame > MAX_FRAME_BYTES:
                faults.append(
                    f"sm_{arch} {names[name]}: {frame} bytes of stack, allowed {MAX_FRAME_BYTES}"
                )
        if len(functions) > MAX_KERNELS:
            faults.append(f"sm_{arch}: {len(functions)} kernels, allowed {MAX_KERNELS}")
    return faults


def main(library: str) -> int:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("skipped: cuobjdump is neither in the CUDA toolkit nor in triton")
        return SKIPPED
    command = [cuobjdump, "-res-usage", library]
    listing = subprocess.run(command, check=False, capture_output=True, text=True)
    if "does not contain device code" in listing.stdout + listing.stderr:
        print(f"skipped: {library} has no CUDA kernels")
        return SKIPPED
    if listing.returncode != 0:
        print(listing.stdout + listing.stderr)
        return 1
    found = kernels(listing.stdout)
    if not any(found.values()):
        print(f"cuobjdump printed no kernel in a known form:\n{listing.stdout[:2000]}")
        return 1
    faults = check(found)
    print("\n".join(faults) or "within budget")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
