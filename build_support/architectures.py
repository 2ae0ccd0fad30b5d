"""Which GPU architectures to compile for; one is an int, 90 for compute capability 9.0."""

import re
import subprocess

from . import BuildError

OLDEST = 80
DEFAULT = (80, 90)

# The names that PyTorch accepts in TORCH_CUDA_ARCH_LIST.
NAMES = {
    "ampere": "8.0;8.6+PTX",
    "ampere+tegra": "8.7",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell": "10.0;10.3;12.0;12.1+PTX",
    "blackwell+tegra": "11.0",
}
TOO_OLD = ("kepler", "kepler+tesla", "maxwell", "maxwell+tegra", "pascal", "volta", "turing")


def parse_arch_list(text):
    """TORCH_CUDA_ARCH_LIST -> (ascending architectures, the one whose PTX is embedded).

    Newer GPUs than any in the list run the PTX: of the newest entry with +PTX or, so that they
    run at all, of the newest entry. "9.0a" counts as 9.0: the kernels use nothing of the "a".
    """
    archs, with_ptx = set(), set()
    for word in re.split(r"[;,\s]+", text.strip()):
        for entry in NAMES.get(word.lower(), word).split(";"):
            arch, ptx = _parse_entry(entry)
            archs.add(arch)
            if ptx:
                with_ptx.add(arch)
    return tuple(sorted(archs)), max(with_ptx or archs)


def _parse_entry(entry):
    match = re.fullmatch(r"(\d{1,2})\.(\d)[af]?(\+PTX)?", entry, re.IGNORECASE)
    if match is None and entry.lower() not in TOO_OLD:
        raise BuildError(
            f"TORCH_CUDA_ARCH_LIST: {entry!r} is not an architecture. Expected numbers such as "
            f"8.0, 8.6+PTX or 9.0a, or names ({', '.join(n.title() for n in NAMES)}), separated "
            "by ; , or spaces."
        )
    arch = 10 * int(match.group(1)) + int(match.group(2)) if match else 0
    if arch < OLDEST:
        raise BuildError(
            f"TORCH_CUDA_ARCH_LIST: {entry} is older than 8.0 (Ampere), the oldest architecture "
            "that the kernels support. Remove it from the list, or set FLASHATTN_EXT_CUDA=off for "
            "a CPU-only build."
        )
    return arch, match.group(3) is not None


def visible_gpus():
    """The architectures of this machine's GPUs, ascending; empty without a driver."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.findall(r"^\s*(\d+)\.(\d)\s*$", result.stdout, re.MULTILINE)
    return tuple(sorted({10 * int(major) + int(minor) for major, minor in found}))


def choose(arch_list, gpus, compilable):
    """-> (architectures, PTX architecture, where they come from).

    `arch_list` is TORCH_CUDA_ARCH_LIST or empty, `compilable` what nvcc knows.
    """
    if arch_list.strip():
        archs, ptx = parse_arch_list(arch_list)
        unknown = [arch for arch in archs if arch not in compilable]
        if unknown:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST: this nvcc cannot compile for {dotted(unknown)}; it knows "
                f"{dotted(a for a in compilable if a >= OLDEST)}. Use another CUDA toolkit "
                "(CUDA_HOME) or another list."
            )
        return archs, ptx, "TORCH_CUDA_ARCH_LIST"
    # A GPU newer than the toolkit runs the PTX of the newest architecture that nvcc knows.
    supported = {max((a for a in compilable if a <= gpu), default=0) for gpu in gpus}
    supported = tuple(sorted(arch for arch in supported if arch >= OLDEST))
    if supported:
        return supported, supported[-1], "the GPUs of this machine"
    default = tuple(arch for arch in DEFAULT if arch in compilable)
    return default, default[-1], "the default"


def dotted(archs):
    return ", ".join(f"{arch // 10}.{arch % 10}" for arch in archs)
