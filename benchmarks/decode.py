#!/usr/bin/env python3
"""Decode and mixed batches over a cache, beside FlashAttention-3 and vLLM's Triton kernel.

    python benchmarks/decode.py [--out benchmarks/results/NAME.json]

All are measured in one run, the peers if a module `peers` can be imported that has fa3(...) and
unified_attention(...); otherwise their columns are empty. bf16. Every call is captured in a CUDA
graph that rotates over several caches (1.2 GB at least), so that memory is measured and not the L2
cache; times are the median of 15 replays. TB/s counts the keys and values that the lengths say,
once. Results are compared before they are timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys

import torch

import flashattn_ext

try:
    import peers
except ImportError:
    peers = None

# (batch, heads, heads_kv, head_dim, cached tokens)
DECODE = (
    (1, 32, 8, 128, 8192), (1, 32, 8, 128, 131072), (8, 32, 8, 128, 8192), (64, 32, 8, 128, 2048),
    (64, 32, 8, 128, 8192), (64, 64, 8, 128, 8192), (128, 32, 32, 128, 1024),
    (16, 32, 1, 128, 16384), (256, 9, 3, 64, 2048), (32, 16, 8, 256, 4096),
)  # fmt: skip
PAGE = 16


def log_normal(count: int, largest: int, seed: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    lengths = torch.exp(torch.randn(count, generator=source) * 1.2 + math.log(largest / 16))
    lengths = lengths.clamp(1, largest).long().tolist()
    lengths[0] = largest
    return lengths


# name: (query, key) lengths; 32/8 heads, head dim 128, causal
MIXED = {
    "(1, 1328) (5, 18) (129, 463)": [(1, 1328), (5, 18), (129, 463)],
    "2048-token chunk at 8k + 63 decodes to 64k": [
        (2048, 8192),
        *((1, n) for n in log_normal(63, 65536, 1)),
    ],
    "128 decodes, log-normal to 128k": [(1, n) for n in log_normal(128, 131072, 2)],
    "64 x 4 query tokens at 4k": [(4, 4096)] * 64,
}


def random_cache(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return k, v


class Batch:
    """A paged or contiguous cache in several copies, and the queries of one call."""

    def __init__(self, lengths, heads, heads_kv, head_dim, page):
        self.lengths, self.heads_kv, self.head_dim, self.page = lengths, heads_kv, head_dim, page
        keys = [k for _, k in lengths]
        self.bytes = sum(keys) * heads_kv * head_dim * 4
        self.longest = max(keys)
        columns = -(-self.longest // page) if page else 1
        rows = sum(-(-k // page) for k in keys) if page else len(keys)
        shape = (rows, page or self.longest, heads_kv, head_dim)
        copies = max(1, min(16, int(1.2e9 // self.bytes) + 1))
        self.caches = [random_cache(*shape) for _ in range(copies)]
        self.table = torch.zeros(len(keys), columns, dtype=torch.int32, device="cuda")
        pages = torch.randperm(rows, device="cuda", dtype=torch.int32) if page else None
        for n, k in enumerate(keys if page else ()):
            used = -(-k // page)
            self.table[n, :used], pages = pages[:used], pages[used:]
        queries = [q for q, _ in lengths]
        self.longest_query = max(queries)
        self.q = torch.randn(sum(queries), heads, head_dim, device="cuda", dtype=torch.bfloat16)
        self.starts = torch.tensor([0, *queries], device="cuda").cumsum(0).int()
        self.used = torch.tensor(keys, dtype=torch.int32, device="cuda")

    def ours(self, k, v, **options):
        paged = {"block_table": self.table} if self.page else {}
        return flashattn_ext.flash_fwd_splitkv(
            self.q, k, v, cache_seqlens=self.used, cu_seqlens_q=self.starts,
            max_seqlen_q=self.longest_query, causal=True, **paged, **options,
        )  # fmt: skip

    def fa3(self, k, v):
        paged = {"block_table": self.table} if self.page else {}
        return peers.fa3(
            self.q, k, v, cu_seqlens_q=self.starts, seqused_k=self.used,
            max_seqlen_q=self.longest_query, max_seqlen_k=self.longest, causal=True,
            num_splits=0, **paged,
        )[0]  # fmt: skip

    def triton(self, k, v):
        if not self.page:
            raise RuntimeError("pages only")
        return peers.unified_attention(
            self.q, k, v, cu_seqlens_q=self.starts, seqused_k=self.used,
            max_seqlen_q=self.longest_query, max_seqlen_k=self.longest, block_table=self.table,
        )  # fmt: skip


def microseconds(call, caches) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(*caches[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [call(*cache) for cache in caches]
        times = []
        for _ in range(18):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(caches))
    del kept
    return statistics.median(times[3:])


def measure(name: str, batch: Batch) -> dict:
    row = {"case": name, "page": batch.page}
    calls = {"ours": batch.ours, "ours_split_1024": lambda k, v: batch.ours(k, v, split_size=1024)}
    if peers is not None:
        calls |= {"fa3": batch.fa3, "triton": batch.triton}
    reference = batch.ours(*batch.caches[0]).float()
    for backend, call in calls.items():
        try:
            difference = (call(*batch.caches[0]).float() - reference).abs().max().item()
            if difference > 0.03:
                raise SystemExit(f"{backend} differs from flashattn_ext by {difference} at {name}")
            row[backend] = microseconds(call, batch.caches)
        except (RuntimeError, AttributeError, TypeError) as error:
            row[backend] = None
            row[f"{backend}_error"] = str(error).split("\n")[0][:200]
    row["tb_per_s"] = batch.bytes / row["ours"] / 1e6
    for peer in ("fa3", "triton"):
        if row.get(peer):
            row[f"speed_over_{peer}"] = row[peer] / row["ours"]
    print_row(row)
    return row


def print_row(row: dict) -> None:
    backends = ("ours", "ours_split_1024", "fa3", "triton")
    cells = "".join(f"{row[b]:11.1f}" if row.get(b) else f"{'-':>11}" for b in backends)
    speeds = ("speed_over_fa3", "speed_over_triton")
    ratios = "".join(f"{row[s]:8.2f}" if s in row else f"{'-':>8}" for s in speeds)
    kind = f"page {row['page']}" if row["page"] else "contiguous"
    print(f"{row['case']:44}{kind:>11}{cells}{row['tb_per_s']:7.2f}{ratios}", flush=True)


def long_capacity() -> dict:
    """What a capacity of 131072 costs when 64 tokens are there."""
    times = {}
    for capacity in (64, 131072):
        caches = [random_cache(1, capacity, 8, 128) for _ in range(4)]
        q = torch.randn(1, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        used = torch.full((1,), 64, dtype=torch.int32, device="cuda")
        times[capacity] = microseconds(
            lambda k, v, q=q, used=used: flashattn_ext.flash_fwd_splitkv(
                q, k, v, cache_seqlens=used
            ),
            caches * 4,
        )
    print(f"64 tokens in a capacity of 64: {times[64]:.1f} us, of 131072: {times[131072]:.1f} us")
    return {"case": "64 tokens", "us_by_capacity": times}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", help="write JSON here")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    args = parser.parse_args()
    machine = (
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"flashattn_ext {flashattn_ext.__version__}; {datetime.date.today().isoformat()}; "
        "microseconds, TB/s"
    )
    print(machine)
    header = "".join(f"{b:>11}" for b in ("ours", "split 1024", "FA3", "Triton"))
    print(f"{'':55}{header}{'TB/s':>7}{'/FA3':>8}{'/Triton':>8}")
    rows = []
    for b, h, hk, d, n in DECODE:
        name = f"b {b}, {h}/{hk}, d {d}, {n}"
        for page in (0, PAGE) if args.only in name else ():
            rows.append(measure(name, Batch([(1, n)] * b, h, hk, d, page)) | {"group": "decode"})
    for name, lengths in MIXED.items():
        if args.only in name:
            rows.append(measure(name, Batch(lengths, 32, 8, 128, PAGE)) | {"group": "mixed"})
    rows.append(long_capacity())
    for group in ("decode", "mixed"):
        for peer in ("fa3", "triton"):
            speed = f"speed_over_{peer}"
            ratios = [r[speed] for r in rows if r.get("group") == group and speed in r]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                print(f"{group}: geometric mean over {peer}: {mean:.2f}")
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
