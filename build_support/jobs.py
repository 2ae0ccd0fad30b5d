"""How many compilers may run at once."""

import os
from pathlib import Path

from . import BuildError

# Peak memory of one compiler, rounded up. decode.cu: 3.7 GiB at head dim 128 (nvcc 13.0).
GIB_PER_CUDA_FILE = 4
GIB_PER_CPP_FILE = 1

CGROUP = Path("/sys/fs/cgroup")


def choose_jobs(environ, cores, free_gib, gib_per_file):
    """MAX_JOBS, else as many as cores and free memory allow, at least one."""
    wanted = environ.get("MAX_JOBS")
    if wanted:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise BuildError(f"MAX_JOBS: expected a whole number from 1 on, got {wanted!r}")
        return int(wanted)
    return max(1, int(min(cores, free_gib / gib_per_file)))


def usable_cores():
    return len(os.sched_getaffinity(0))


def free_gib():
    """Memory that this process may still take, the limit of its container included."""
    return min(_machine_free(), _container_free()) / 2**30


def _machine_free():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return float("inf")


def _container_free():
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(
            line.split() for line in (CGROUP / "memory.stat").read_text().splitlines()
        )
    except (OSError, ValueError):
        return float("inf")
    if limit == "max":
        return float("inf")
    # File cache counts as used but is given back on demand.
    return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
