#!/usr/bin/env python3
"""Prefill speed beside torch's own kernels, in one run on one GPU or CPU.

    python benchmarks/prefill.py [--device cuda] [--out benchmarks/results/NAME.json]

TFLOP/s counts 4 * batch * heads * seqlen^2 * head_dim, half of it when causal. 16384 tokens in all,
2048 = heads * head_dim (on a CPU: one sequence, 512 = heads * head_dim). Each time is the median of
at least 10 calls after 3 unmeasured ones. The results are compared before they are timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashattn_ext


def main() -> int:
    args = parse_arguments()
    print(f"{describe_machine(args.device)}\n")
    rows = []
    for dtype in args.dtypes:
        for head_dim in args.head_dims:
            for causal in (False, True):
                for seqlen in args.seqlens:
                    rows.append(measure(args, dtype, head_dim, causal, seqlen))
                    print_row(rows[-1], header=len(rows) == 1)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"machine": describe_machine(args.device), "rows": rows}, file, indent=1)
            file.write("\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", default=None, help="bfloat16 float16 float32 (CPU)")
    parser.add_argument("--head-dims", nargs="+", type=int, default=None)
    parser.add_argument("--seqlens", nargs="+", type=int, default=None)
    parser.add_argument("--out", help="write JSON here")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    args.dtypes = args.dtypes or (["bfloat16", "float32"] if on_cpu else ["bfloat16"])
    args.head_dims = args.head_dims or ([64, 128] if on_cpu else [64, 128, 256])
    args.seqlens = args.seqlens or ([1024, 2048, 4096] if on_cpu else [1024, 4096, 16384])
    return args


def measure(args: argparse.Namespace, dtype: str, head_dim: int, causal: bool, seqlen: int) -> dict:
    on_cpu = args.device == "cpu"
    batch, heads = (1, 512 // head_dim) if on_cpu else (max(1, 16384 // seqlen), 2048 // head_dim)
    shape = (batch, seqlen, heads, head_dim)
    q, k, v = (torch.randn(shape, device=args.device).to(getattr(torch, dtype)) for _ in range(3))
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    flops = 4 * batch * heads * seqlen**2 * head_dim * (0.5 if causal else 1.0)

    calls = {"flashattn_ext": lambda: flashattn_ext.flash_fwd(q, k, v, causal=causal)}
    backends = {"sdpa_flash": SDPBackend.FLASH_ATTENTION}
    if not on_cpu:
        backends["sdpa_cudnn"] = SDPBackend.CUDNN_ATTENTION
    for name, backend in backends.items():
        calls[name] = lambda backend=backend: sdpa(backend, qt, kt, vt, causal)

    row = {
        "dtype": dtype, "head_dim": head_dim, "causal": causal, "seqlen": seqlen, "batch": batch,
        "heads": heads,
    }  # fmt: skip
    reference = None
    for name, call in calls.items():
        try:
            out = call()
        except RuntimeError:  # torch has no such kernel for this shape or machine
            row[name] = None
            continue
        if reference is None:
            reference = out.float()
        elif (difference := (out.float() - reference).abs().max().item()) > 0.05:
            raise SystemExit(f"{name} and flashattn_ext differ by {difference} at {row}")
        row[name] = flops / median_seconds(call, on_cpu) / 1e12
    if row["sdpa_flash"]:
        row["ratio_to_sdpa_flash"] = row["flashattn_ext"] / row["sdpa_flash"]
    return row


def sdpa(backend: SDPBackend, q, k, v, causal: bool) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def median_seconds(call, on_cpu: bool) -> float:
    for _ in range(3):
        call()
    times = []
    deadline = time.perf_counter() + (3.0 if on_cpu else 0.3)
    while len(times) < 10 or (time.perf_counter() < deadline and len(times) < 200):
        times.append(seconds_on_cpu(call) if on_cpu else seconds_on_gpu(call))
    return statistics.median(times)


def seconds_on_cpu(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def seconds_on_gpu(call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def print_row(row: dict, header: bool) -> None:
    names = ["flashattn_ext", "sdpa_flash", "sdpa_cudnn"]
    if header:
        titles = "".join(f"{n:>15}" for n in names)
        print(f"{'dtype':9} {'d':>4} {'mask':7} {'seqlen':>7}{titles}{'ours/flash':>12}")
    mask = "causal" if row["causal"] else "full"
    figures = [row.get(n) or 0 for n in names]
    cells = "".join(f"{x:15.1f}" if x >= 10 else f"{x:15.3f}" for x in figures)
    case = f"{row['dtype']:9} {row['head_dim']:4} {mask:7} {row['seqlen']:7}"
    print(f"{case}{cells}{row.get('ratio_to_sdpa_flash', 0):12.2f}", flush=True)


def describe_machine(device: str) -> str:
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        processor = platform.processor() or platform.machine()
        name = f"{processor}, {torch.get_num_threads()} threads"
    return (
        f"{name}; torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"flashattn_ext {flashattn_ext.__version__}; {datetime.date.today().isoformat()}; TFLOP/s"
    )


if __name__ == "__main__":
    sys.exit(main())
