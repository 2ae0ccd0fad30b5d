"""Errors against float64 on the same inputs: ours, plain PyTorch's, and those of SDPA's kernels.

    python benchmarks/accuracy.py --device cuda --json benchmarks/results/DATE-GPU-accuracy.json
    python benchmarks/accuracy.py --draw benchmarks/results/DATE-GPU-accuracy.json

The second writes the plots of docs/accuracy.md and prints its table.

One sweep for each of length, head dim, magnitude, softcap and number of splits, in float16 and
bfloat16. A GPU takes about a minute; a CPU the shorter lengths, also about a minute.
"""

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashattn_ext

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "python"))
from reference import Rule, Sequence, attend  # noqa: E402

PLOTS = ROOT / "docs" / "figures" / "accuracy"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SDPA = {
    "SDPA math": SDPBackend.MATH,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
}
HAS_NO_KERNEL = ("No available kernel", "No viable backend", "No valid execution plans")


@dataclass(frozen=True)
class Point:
    """Queries and keys of one sequence; every number is normal, and scores have the standard
    deviation `magnitude` before the cap."""

    length: int = 1024
    head_dim: int = 128
    magnitude: float = 1.0
    softcap: float = 0.0
    splits: int = 1
    queries: int = 64
    heads: int = 4


def sweeps(device):
    """axis -> points."""
    longest = 2**20 if device == "cuda" else 2**13
    lengths = [2**n for n in range(6, 21, 2) if 2**n <= longest]
    long = Point(length=2**17 if device == "cuda" else 2**13, queries=8)
    spread = Point(magnitude=10.0)
    return {
        "length": [Point(length=n) for n in lengths],
        "head_dim": [Point(head_dim=d) for d in range(32, 257, 32)],
        "magnitude": [Point(magnitude=m) for m in (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)],
        "softcap": [replace(spread, softcap=c) for c in (0.0, 1.0, 5.0, 15.0, 30.0, 50.0, 100.0)],
        "splits": [replace(long, splits=2**n) for n in range(9)],
    }


def draw(point, dtype, device, seed):
    """q, k and v of one sequence, (rows, heads, head_dim)."""
    source = torch.Generator(device).manual_seed(seed)

    def normal(rows):
        shape = (rows, point.heads, point.head_dim)
        return torch.randn(shape, generator=source, device=device)

    q = normal(point.queries) * point.magnitude
    return [t.to(dtype) for t in (q, normal(point.length), normal(point.length))]


def ours(point, q, k, v):
    options = {"softcap": point.softcap, "num_splits": point.splits, "cache_seqlens": len(k)}
    return flashattn_ext.flash_fwd_splitkv(q[None], k[None], v[None], **options)[0]


def torchs(kernel, q, k, v):
    """SDPA's result, or None where it has no such kernel here."""
    operands = [t[None].transpose(1, 2) for t in (q, k, v)]
    try:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(*operands).transpose(1, 2)[0]
    except RuntimeError as error:
        if any(words in str(error) for words in HAS_NO_KERNEL):
            return None
        raise


def errors(point, name, device, seed=0):
    """Who computes -> [root mean square of the error, its largest], by the exact result's."""
    q, k, v = draw(point, DTYPES[name], device, seed)
    seq, rule = Sequence(q, k, v), Rule(point.head_dim**-0.5, softcap=point.softcap)
    exact = attend(seq, rule)[0]
    results = {
        "ours": ours(point, q, k, v),
        "PyTorch": attend(seq, rule, q.dtype)[0],
        "rounding": exact.to(q.dtype),
    }
    if not point.softcap:
        results |= {who: torchs(kernel, q, k, v) for who, kernel in SDPA.items()}
    found = {}
    for who, out in results.items():
        if out is not None:
            error = out.double() - exact
            rms, most = error.square().mean().sqrt(), error.abs().max()
            size = exact.square().mean().sqrt(), exact.abs().max()
            found[who] = [float(rms / size[0]), float(most / size[1])]
    return found


def measure(device):
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # math in the type, not in float32
    records = []
    for axis, points in sweeps(device).items():
        for point in points:
            for name in DTYPES:
                by_name = errors(point, name, device)
                records.append({"sweep": axis, "dtype": name, **asdict(point), "errors": by_name})
        print(f"{axis}: {len(points)} points", file=sys.stderr, flush=True)
    on_gpu = device == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {platform.machine()}"
    day = date.today().isoformat()
    return {"date": day, "device": where, "torch": torch.__version__, "records": records}


def as_json(found):
    """A line for each record."""
    records = ",\n".join(json.dumps(record) for record in found["records"])
    head = json.dumps({name: value for name, value in found.items() if name != "records"})
    return f'{head[:-1]}, "records": [\n{records}\n]}}\n'


def plot(found, folder):
    """Writes FOLDER/AXIS.png: the root mean square by what is varied, a panel for each type."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for axis in dict.fromkeys(record["sweep"] for record in found["records"]):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        for ax, name in zip(figure.subplots(1, 2, sharey=True), DTYPES, strict=True):
            mine = [r for r in found["records"] if (r["sweep"], r["dtype"]) == (axis, name)]
            for who in dict.fromkeys(who for record in mine for who in record["errors"]):
                there = [record for record in mine if who in record["errors"]]
                x = [record[axis] for record in there]
                y = [record["errors"][who][0] for record in there]
                style = {"ls": "--", "color": "black"} if who == "rounding" else {"marker": "o"}
                ax.plot(x, y, label=who, ms=3, lw=2 if who == "ours" else 1, **style)
            ax.set(title=name, xlabel=axis.replace("_", " "), yscale="log")
            if axis not in ("head_dim", "softcap"):
                ax.set_xscale("log", base=10 if axis == "magnitude" else 2)
            ax.grid(alpha=0.3)
        figure.axes[0].set_ylabel("error (rms, relative)")
        figure.axes[0].legend(fontsize=7)
        figure.savefig(folder / f"{axis}.png", dpi=130)


def table(found):
    """Of each sweep: the smallest and largest ratio of our error to the others'."""
    others = [who for who in ("PyTorch", *SDPA) if _ratios(found, None, None, who)]
    lines = ["| sweep | type | " + " | ".join(f"over {who}" for who in others) + " |"]
    lines.append("| --- | --- |" + " --- |" * len(others))
    for axis in dict.fromkeys(record["sweep"] for record in found["records"]):
        for name in DTYPES:
            cells = (_ratios(found, axis, name, who) for who in others)
            words = map(_range, cells)
            lines.append(f"| {axis.replace('_', ' ')} | {name} | {' | '.join(words)} |")
    return "\n".join(lines)


def _range(ratios):
    ends = (f"{end:.2f}" for end in (min(ratios), max(ratios))) if ratios else ["–"]
    return " to ".join(dict.fromkeys(ends))


def _ratios(found, axis, name, who):
    return [
        record["errors"]["ours"][0] / record["errors"][who][0]
        for record in found["records"]
        if who in record["errors"] and record["errors"][who][0] > 0
        if axis in (None, record["sweep"]) and name in (None, record["dtype"])
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="measure nothing, read this")
    given = parser.parse_args()
    found = json.loads(given.draw.read_text()) if given.draw else measure(given.device)
    if given.json:
        given.json.write_text(as_json(found))
    if given.draw:
        plot(found, PLOTS / given.draw.stem.split("-")[-2])
    print(table(found))


if __name__ == "__main__":
    main()
