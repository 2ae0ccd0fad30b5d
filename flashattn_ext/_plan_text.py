"""A plan as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._plan_launches import Launch
    from ._plan_problem import Problem
    from .planning import Plan

_NAME, _TEXT = 11, 89  # columns


def render(plan: Plan) -> str:
    """The text of a `Plan`."""
    paragraphs = [("call", f"{plan.function}: {_call(plan.problem)}"), ("gpu", _gpu(plan))]
    for number, launch in enumerate(plan.launches, 1):
        paragraphs.append((f"kernel {number}", f"{launch.kernel}, {launch.role}"))
        paragraphs += [("", line) for line in _launch(launch)]
    if not plan.launches:
        paragraphs.append(("kernels", "none: there is nothing to do"))
    paragraphs += [
        ("workspace", _si(plan.workspace_bytes, "B")),
        ("memory", f"{_si(plan.bytes_read, 'B')} read, {_si(plan.bytes_written, 'B')} written"),
        ("arithmetic", _si(plan.flops, "FLOP")),
        ("roof", _roof(plan)),
    ]
    return "\n".join(line for name, text in paragraphs for line in _lines(name, text))


def _lines(name: str, text: str) -> list[str]:
    first, *rest = textwrap.wrap(text, _TEXT, break_on_hyphens=False)
    return [f"{name:<{_NAME}}{first}", *(" " * _NAME + line for line in rest)]


def _call(p: Problem) -> str:
    shapes = f"{'packed ' if p.packed else ''}{_range(p.queries)} x {_range(p.keys)}"
    parts = [
        f"{_count(p.batch, 'sequence')} of {shapes} (queries x keys)",
        f"{p.heads}/{p.heads_kv} heads of {p.head_dim}",
        str(p.dtype).removeprefix("torch."),
    ]
    if p.padded_head_dim > p.head_dim:
        parts[1] += f" (copies padded to {p.padded_head_dim})"
    if p.packed and p.max_seqlen_q > max(p.queries, default=0):
        parts.append(f"max_seqlen_q {p.max_seqlen_q}")
    if p.window != (-1, -1):
        parts.append("causal" if p.window == (-1, 0) else f"window {p.window}")
    if p.cache is not None:
        where = "contiguous cache" if p.cache == "contiguous" else f"pages of {p.cache}"
        parts.append(f"{where} for {p.capacity} tokens")
    for name in ("new_tokens", "rotary_dim", "num_splits", "split_size"):
        if value := getattr(p, name):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def _range(lengths: tuple[int, ...]) -> str:
    low, high = min(lengths, default=0), max(lengths, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _gpu(plan: Plan) -> str:
    gpu = plan.gpu
    return (
        f"{gpu.name}, sm_{gpu.capability}, {gpu.multiprocessors} multiprocessors; kernels of "
        f"sm_{plan.arch} for head dim {plan.kernel_head_dim}"
    )


def _launch(launch: Launch) -> list[str]:
    grid = " x ".join(str(size) for size in launch.grid[: 1 if launch.grid[1] == 1 else 2])
    lines = [f"grid {grid}, {launch.warps} warps"]
    if launch.tile is None:
        return lines
    lines[0] += f", {launch.smem_bytes / 1024:.1f} KiB of shared memory"
    rows, keys = launch.tile
    packed = f" ({launch.packed_heads} heads packed)" if launch.packed_heads > 1 else ""
    tile = f"tile of {rows} rows{packed} x {keys} keys, {_count(launch.stages, 'stage')}"
    if launch.splits is not None:
        tile += (
            f", {_count(launch.splits, 'split')} at most" if launch.splits > 1 else ", not split"
        )
    lines.append(tile)
    if (shares := launch.shares) is not None:
        lines.append(
            f"{shares.entries} list entries of {_count(shares.tiles, 'tile')} in "
            f"{_count(shares.busy, 'share')} of {shares.size}: {_count(shares.cut, 'tile')} cut"
        )
    return lines


def _roof(plan: Plan) -> str:
    gpu, memory, arithmetic = plan.gpu, plan.memory_seconds, plan.arithmetic_seconds
    bandwidth, rate = gpu.bytes_per_second, gpu.flops_per_second
    if memory is None or arithmetic is None or bandwidth is None or rate is None:
        return f"unknown: pass gpu=Gpu(...) with the peaks of {gpu.name}"
    return (
        f"{_si(max(memory, arithmetic), 's')} = the longer of memory {_si(memory, 's')} at "
        f"{_si(bandwidth, 'B/s')}, arithmetic {_si(arithmetic, 's')} at {_si(rate, 'FLOP/s')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _si(value: float, unit: str) -> str:
    """Three digits and a prefix: 12300 is "12.3 k"."""
    for factor, prefix in (
        (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"),
        (1e-6, "µ"), (1e-9, "n"),
    ):  # fmt: skip
        # 999.6 k is 1 M with three digits
        if value >= factor * (0.9995 if factor > 1 or unit == "s" else 1):
            return f"{_three_digits(value / factor)} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
