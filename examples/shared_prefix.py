"""Many sequences that begin with the same prompt: its keys are read once, not once a sequence.

    python examples/shared_prefix.py [--device cuda]

Attention over a set of keys is known by two numbers a query: the output and the log-sum-exp of the
scores. The results over two disjoint sets merge into the result over both:

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

So the queries of all sequences attend together to the prefix, as if they were the rows of one
sequence (one pass over its keys, and large matrix products), then each to its own tail, and the two
results are merged. The plain way is one call over block tables that all begin with the prefix's
pages: it stores these keys once, too, but reads them for each sequence anew.
"""

import argparse
import sys

import torch
from flashattn_ext import flash_fwd_splitkv, merge_attention_states

SEQUENCES, HEADS, HEADS_KV, HEAD_DIM = 16, 8, 2, 64
PREFIX, PAGE, TAIL_PAGES = 512, 16, 4  # tokens, tokens, pages of each sequence


def cascade(q, k_pool, v_pool, tables, tail_lengths):
    """The prefix once for all rows, the tails each for itself, merged."""
    shared = PREFIX // PAGE  # pages
    rows = q.transpose(0, 1)  # (1, sequences, h, d): the rows of one sequence
    out, lse = flash_fwd_splitkv(  # every row sees the whole prefix
        rows, k_pool, v_pool, cache_seqlens=PREFIX, block_table=tables[:1, :shared], return_lse=True
    )
    out, lse = out.transpose(0, 1), lse.permute(2, 1, 0)  # back to (sequences, 1, h, d)

    tails = flash_fwd_splitkv(
        q, k_pool, v_pool, cache_seqlens=tail_lengths, block_table=tables[:, shared:],
        return_lse=True,
    )  # fmt: skip
    return merge_attention_states(out, lse, *tails)


def plain(q, k_pool, v_pool, tables, tail_lengths):
    return flash_fwd_splitkv(
        q, k_pool, v_pool, cache_seqlens=PREFIX + tail_lengths, block_table=tables, return_lse=True
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    dtype = torch.float32 if device == "cpu" else torch.float16
    torch.manual_seed(0)

    shared = PREFIX // PAGE
    pages = shared + SEQUENCES * TAIL_PAGES
    shape = (2, pages, PAGE, HEADS_KV, HEAD_DIM)
    k_pool, v_pool = torch.randn(shape, device=device).to(dtype)
    order = torch.randperm(pages, dtype=torch.int32, device=device)  # pages lie anywhere
    own = order[shared:].view(SEQUENCES, TAIL_PAGES)
    tables = torch.cat([order[:shared].expand(SEQUENCES, -1), own], dim=1)
    tail_lengths = torch.randint(1, TAIL_PAGES * PAGE, (SEQUENCES,), device=device).int()
    q = torch.randn(SEQUENCES, 1, HEADS, HEAD_DIM, device=device).to(dtype)

    out, lse = cascade(q, k_pool, v_pool, tables, tail_lengths)
    expected, expected_lse = plain(q, k_pool, v_pool, tables, tail_lengths)
    error = (out - expected).abs().max().item()
    lse_error = (lse - expected_lse).abs().max().item()

    tails = tail_lengths.sum().item()
    print(
        f"{SEQUENCES} sequences, a shared prefix of {PREFIX} tokens, {tails} tokens of their own:"
    )
    print(f"  keys read: {PREFIX + tails} in two calls, {SEQUENCES * PREFIX + tails} in one")
    print(f"  largest difference: out {error:.1e}, lse {lse_error:.1e}")
    return 0 if error <= (1e-5 if device == "cpu" else 4e-3) and lse_error <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
