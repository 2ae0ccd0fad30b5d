"""A paged key/value cache, the way serving engines keep it, and attention over it.

The keys and values of all sequences lie in one pool of small pages. A sequence owns the pages that
it fills, wherever they are, and its block table lists them in order: token j is slot j % page of
page table[j // page]. Nothing is reserved for tokens that may never come, nothing is moved when a
sequence grows, and the pages of one that ended serve the next.

A model runs in steps. `Prefill` holds the prompts of new sequences, packed one behind the other
without padding; `Decode` the next token of each running sequence. Every layer calls the step's
`attend` with its queries, keys and values.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from flashattn_ext import flash_fwd, flash_fwd_splitkv


class PagedCache:
    """Pages and who owns them. The pools are on the device, the books are kept on the host."""

    def __init__(self, layers, pages, heads_kv, head_dim, dtype, device, page=16):
        self.page, self.device = page, device
        shape = (layers, pages, page, heads_kv, head_dim)
        self.k, self.v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.free = list(reversed(range(pages)))
        self.tables = {}  # sequence -> its pages
        self.lengths = {}  # sequence -> its tokens
        self.most_used = 0

    def extend(self, sequence, tokens):
        """Takes pages for this many more tokens of a sequence, new or known."""
        table = self.tables.get(sequence, [])
        length = self.lengths.get(sequence, 0) + tokens
        missing = -(-length // self.page) - len(table)
        if missing > len(self.free):
            raise MemoryError(
                f"sequence {sequence}: {missing} more pages wanted for {length} tokens, "
                f"{len(self.free)} are free"
            )
        table.extend(self.free.pop() for _ in range(missing))
        self.tables[sequence] = table
        self.lengths[sequence] = length
        used = self.k.shape[1] - len(self.free)
        self.most_used = max(self.most_used, used)

    def release(self, sequence):
        self.free.extend(reversed(self.tables.pop(sequence)))
        del self.lengths[sequence]

    def slot(self, sequence, token):
        """Where a token is when the pool is seen as one long row of slots."""
        return self.tables[sequence][token // self.page] * self.page + token % self.page

    def block_table(self, sequences):
        """int32 (sequences, columns), filled up with -1, which is never read."""
        tables = [self.tables[sequence] for sequence in sequences]
        columns = max(map(len, tables))
        return self.tensor([table + [-1] * (columns - len(table)) for table in tables])

    def tensor(self, values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=self.device)


class Prefill:
    """The prompts of new sequences, {sequence: its tokens}, as one packed row of tokens."""

    def __init__(self, cache, prompts):
        self.cache, self.sequences = cache, list(prompts)
        for sequence, prompt in prompts.items():
            cache.extend(sequence, len(prompt))
        lengths = [len(prompt) for prompt in prompts.values()]
        places = [(sequence, i) for sequence, length in zip(prompts, lengths, strict=True)
                  for i in range(length)]  # fmt: skip
        ends = list(accumulate(lengths))
        self.longest = max(lengths)
        self.cu_seqlens = cache.tensor([0, *ends])
        self.slots = cache.tensor([cache.slot(*place) for place in places], torch.long)
        tokens = [token for prompt in prompts.values() for token in prompt]
        self.input_ids = cache.tensor([tokens], torch.long)
        self.position_ids = cache.tensor([[i for _, i in places]], torch.long)
        self.last = cache.tensor([end - 1 for end in ends], torch.long)  # rows that predict

    def attend(self, layer, q, k, v, scale):
        """q (1, tokens, h, d), k and v (1, tokens, hk, d); returns the shape of q."""
        q, k, v = q[0], k[0], v[0]
        self.cache.k[layer].flatten(0, 1)[self.slots] = k
        self.cache.v[layer].flatten(0, 1)[self.slots] = v
        return flash_fwd(
            q, k, v,
            cu_seqlens_q=self.cu_seqlens, cu_seqlens_k=self.cu_seqlens,
            max_seqlen_q=self.longest, max_seqlen_k=self.longest,
            softmax_scale=scale, causal=True,
        )[None]  # fmt: skip


class Decode:
    """One more token of each running sequence, {sequence: token}."""

    def __init__(self, cache, tokens):
        self.cache, self.sequences = cache, list(tokens)
        lengths = [cache.lengths[sequence] for sequence in tokens]
        for sequence in tokens:
            cache.extend(sequence, 1)
        self.cache_seqlens = cache.tensor(lengths)  # without the new token
        self.block_table = cache.block_table(tokens)
        self.input_ids = cache.tensor([[token] for token in tokens.values()], torch.long)
        self.position_ids = self.cache_seqlens.long()[:, None]
        self.last = 1  # each sequence's only row predicts

    def attend(self, layer, q, k, v, scale):
        """q (sequences, 1, h, d), k and v (sequences, 1, hk, d); returns the shape of q.

        The operator writes k and v into the cache before it attends to all of a sequence's tokens.
        """
        return flash_fwd_splitkv(
            q, self.cache.k[layer], self.cache.v[layer],
            cache_seqlens=self.cache_seqlens, block_table=self.block_table, k_new=k, v_new=v,
            softmax_scale=scale, causal=True,
        )  # fmt: skip
