"""Speculative decoding: several tokens of each sequence over a paged cache, in one call.

    python examples/speculative_step.py [--device cuda]

A small model has drafted four tokens for each sequence, and the large one checks them all at once:
one pass over its weights and over the cache instead of four. Its attention is a single call with
four queries a sequence. Masks are aligned to the last key, so that with `causal=True` the first
draft token sees the cache and itself, the last one everything.

The call writes the draft's keys and values into the pages first. A draft token that is rejected
needs no clean-up: lengths say what counts, and the next step writes over it.
"""

import argparse
import sys

import torch
from flashattn_ext import flash_fwd_splitkv
from paged_cache import PagedCache

HEADS, HEADS_KV, HEAD_DIM, DRAFT = 8, 2, 64, 4
PROMPTS = {"a": 37, "b": 5, "c": 120}  # tokens in the cache
ACCEPTED = {"a": 4, "b": 0, "c": 2}  # tokens of the first draft


class Layer:
    """Attention and its cache, with the prompts in it."""

    def __init__(self, device, dtype):
        self.cache = PagedCache(1, 40, HEADS_KV, HEAD_DIM, dtype, device)
        for sequence, length in PROMPTS.items():
            self.cache.extend(sequence, length + 2 * DRAFT)  # pages for two drafts, too
        source = torch.Generator(device).manual_seed(0)
        for pool in (self.cache.k, self.cache.v):
            pool.copy_(torch.randn(pool.shape, generator=source, device=device))

    def attend(self, tokens, lengths, sequences=tuple(PROMPTS)):
        """q, k, v (sequences, tokens, heads, head dim) of the next tokens; lengths before them."""
        q, k, v = tokens
        return flash_fwd_splitkv(
            q, self.cache.k[0], self.cache.v[0], k_new=k, v_new=v, causal=True,
            cache_seqlens=self.cache.tensor([lengths[sequence] for sequence in sequences]),
            block_table=self.cache.block_table(sequences),
        )  # fmt: skip


def one_by_one(layer, draft, lengths):
    """The same tokens as plain decoding sees them."""
    outs = []
    for i in range(DRAFT):
        tokens = [x[:, i : i + 1] for x in draft]
        outs.append(layer.attend(tokens, {s: length + i for s, length in lengths.items()}))
    return torch.cat(outs, dim=1)


def accepted_only(layer, draft):
    """Decodes the accepted tokens of a draft; the others never come near the cache."""
    for i in range(DRAFT):
        running = [sequence for sequence in PROMPTS if ACCEPTED[sequence] > i]
        rows = [list(PROMPTS).index(sequence) for sequence in running]
        lengths = {sequence: PROMPTS[sequence] + i for sequence in running}
        layer.attend([x[rows, i : i + 1] for x in draft], lengths, running)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.float16, 4e-3)
    torch.manual_seed(1)
    heads = (HEADS, HEADS_KV, HEADS_KV)
    first, second = (
        [torch.randn(3, DRAFT, h, HEAD_DIM, device=device).to(dtype) for h in heads]
        for _ in range(2)
    )

    layer = Layer(device, dtype)
    checked = layer.attend(first, PROMPTS)
    error_1 = (checked - one_by_one(Layer(device, dtype), first, PROMPTS)).abs().max().item()

    lengths = {sequence: PROMPTS[sequence] + ACCEPTED[sequence] for sequence in PROMPTS}
    checked = layer.attend(second, lengths)  # over what was rejected
    clean = Layer(device, dtype)
    accepted_only(clean, first)
    error_2 = (checked - one_by_one(clean, second, lengths)).abs().max().item()

    print(f"{len(PROMPTS)} sequences, {DRAFT} draft tokens each, against one token at a time:")
    print(f"  first draft: largest difference {error_1:.1e}")
    print(f"  {sum(ACCEPTED.values())} tokens accepted, next draft: {error_2:.1e}")
    return 0 if max(error_1, error_2) <= tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
