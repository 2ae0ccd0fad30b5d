"""One long sequence on several processes: ring attention, and decoding over a cache in shares.

    python examples/sequence_parallel.py [--device cuda]

Each process holds a share of the tokens. Attention over a share of the keys is a part of the
result, and parts merge by their log-sum-exp:

* prefill: the keys and values travel around a ring, each process merges what it sees of them;
* decode: every process asks its own keys only, and all gather the parts (a few rows, no keys).

The processes talk through gloo, which moves host memory; with NCCL the copies to it go away.
"""

import argparse
import sys
import tempfile

import torch
import torch.distributed as dist
from flashattn_ext import flash_combine, flash_fwd, merge_attention_states

PROCESSES, SHARE, HEADS, HEADS_KV, HEAD_DIM = 2, 96, 8, 2, 64


def ring_attention(q, k, v):
    """Causal, of the own share of queries over all keys before them."""
    rank, count = dist.get_rank(), dist.get_world_size()
    out, lse = flash_fwd(q, k, v, causal=True, return_lse=True)
    out = out.float()  # so that no merge rounds to 16 bits
    kv = torch.stack([k, v])
    for hop in range(1, count):
        kv = pass_on(kv, to=(rank + 1) % count, source=(rank - 1) % count)
        if rank - hop >= 0:  # keys of an earlier share: all rows see all of them
            part = flash_fwd(q, kv[0], kv[1], return_lse=True)
            out, lse = merge_attention_states(out, lse, *part)
    return out.to(q.dtype)


def pass_on(tensor, to, source):
    received = torch.empty(tensor.shape, dtype=tensor.dtype)
    sending = dist.isend(tensor.cpu(), to)
    dist.recv(received, source)
    sending.wait()
    return received.to(tensor.device)


def gathered_decode(q, k, v):
    """A query that all processes know, over the keys of all of them."""
    out, lse = flash_fwd(q, k, v, return_lse=True)
    return flash_combine(gather(out.float()), gather(lse), out_dtype=q.dtype)[0]


def gather(tensor):
    parts = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.cpu())
    return torch.stack(parts).to(tensor.device)


def draw(device):
    """The whole sequence, the same in every process, and one query more."""
    source = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.float16
    shapes = [(1, PROCESSES * SHARE, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV)]
    shapes.append((1, 1, HEADS, HEAD_DIM))
    return [torch.randn(shape, generator=source).to(device, dtype) for shape in shapes]


def run(rank, device, rendezvous):
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=PROCESSES)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    q, k, v, query = draw(device)
    mine = slice(rank * SHARE, (rank + 1) * SHARE)
    prefill = ring_attention(q[:, mine], k[:, mine], v[:, mine])
    decode = gathered_decode(query, k[:, mine], v[:, mine])

    error = (prefill - flash_fwd(q, k, v, causal=True)[:, mine]).abs().max()
    error = torch.stack([error, (decode - flash_fwd(query, k, v)).abs().max()]).float().cpu()
    dist.all_reduce(error, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{PROCESSES} processes, {SHARE} tokens each, against one process with all of them:")
        print(f"  ring prefill: largest difference {error[0]:.1e}; gathered decode: {error[1]:.1e}")
    dist.destroy_process_group()
    if error.max() > (1e-5 if device == "cpu" else 4e-3):
        sys.exit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (device, f"{folder}/rendezvous"), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
