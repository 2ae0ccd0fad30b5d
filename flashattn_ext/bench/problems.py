"""The tensors of a case. Nothing here knows who computes with them.

`rotation` holds the tensors of one call in several copies: what a measurement rotates over, so
that memory is measured and not the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Combine, Decode, Mixed, Prefill

ROTATED_BYTES = 1.2e9  # several times the L2 cache of any GPU so far
MOST_COPIES = 64
MOST_ALLOCATED = 8e9
CACHE_PAGE = 16  # pages that kernels for pages only get for a prefill


def build(case: Case, device: str, copies: bool) -> Problem:
    """Random tensors for `case` on `device`; without `copies` each exists once."""
    if isinstance(case, Prefill):
        return PrefillProblem(case, device)
    if isinstance(case, Combine):
        return CombineProblem(case, device, copies)
    return CacheProblem(case, device, copies)


def copies_of(used: int, allocated: int) -> int:
    """How many copies to rotate over, when a call uses that many bytes of what one allocates."""
    wanted = int(ROTATED_BYTES // max(1, used)) + 1
    return max(1, min(wanted, MOST_COPIES, int(MOST_ALLOCATED // max(1, allocated))))


class _Problem:
    def __init__(self, case: Case, device: str):
        self.device = device
        self.dtype: torch.dtype = getattr(torch, case.dtype)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


class PrefillProblem(_Problem):
    def __init__(self, case: Prefill, device: str):
        super().__init__(case, device)
        self.case = case
        self.q = self.random(case.batch, case.seqlen, case.heads, case.head_dim)
        self.k, self.v = (
            self.random(case.batch, case.kv_len, case.kv_heads, case.head_dim) for _ in range(2)
        )
        self.slopes: Tensor | None = None
        if case.alibi:  # 2^(-8 i / heads), as the ALiBi paper has them for powers of two
            exponents = torch.arange(1, case.heads + 1, dtype=torch.float32, device=device)
            self.slopes = 2.0 ** (-8.0 * exponents / case.heads)

    @property
    def scores(self) -> dict[str, Any]:
        """The keywords that `flash_fwd` takes for the scores, beside causal."""
        case = self.case
        return {
            "window_size": case.window, "softcap": case.softcap, "alibi_slopes": self.slopes,
        }  # fmt: skip

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q.flatten(0, 1), self.k.flatten(0, 1), self.v.flatten(0, 1)

    def starts(self, length: int) -> Tensor:
        """``(batch + 1,)``: where packed sequences of one length begin."""
        return self.ints([n * length for n in range(self.case.batch + 1)])


class CacheProblem(_Problem):
    """Packed queries ``q``, their ``starts``, the ``used`` lengths, and the block ``table``."""

    def __init__(self, case: Decode | Mixed, device: str, copies: bool):
        super().__init__(case, device)
        self.case = case
        queries = [q for q, _ in case.lengths]
        keys = [k for _, k in case.lengths]
        self.longest_query, self.longest = max(queries, default=1), max(keys, default=1)
        page = case.page_size
        rows = sum(-(-k // page) for k in keys) if page else len(keys)
        shape = (rows, page or case.capacity or self.longest, case.kv_heads, case.head_dim)
        self.table = self._table(keys, rows) if page else None
        self.q = self.random(sum(queries), case.heads, case.head_dim)
        self.starts = self.ints([sum(queries[:n]) for n in range(len(queries) + 1)])
        self.used = self.ints(keys)
        allocated = 2 * torch.Size(shape).numel() * self.dtype.itemsize
        count = copies_of(case.bytes(), allocated) if copies else 1
        self.rotation = [(self.random(*shape), self.random(*shape)) for _ in range(count)]

    def _table(self, keys: list[int], rows: int) -> Tensor:
        """Shuffled pages, each in use once."""
        page = self.case.page_size
        table = torch.zeros(len(keys), -(-self.longest // page), dtype=torch.int32)
        pages = torch.randperm(rows, dtype=torch.int32)
        for n, k in enumerate(keys):
            count = -(-k // page)
            table[n, :count], pages = pages[:count], pages[count:]
        return table.to(self.device)


class CombineProblem(_Problem):
    def __init__(self, case: Combine, device: str, copies: bool):
        super().__init__(case, device)
        self.case = case
        rows = (case.parts, case.batch, case.seqlen, case.heads, case.head_dim)
        count = copies_of(case.bytes(), case.bytes()) if copies else 1
        self.rotation = []
        for _ in range(count):
            lse = torch.randn(case.parts, case.batch, case.heads, case.seqlen, device=self.device)
            self.rotation.append((self.random(*rows), lse))


Problem = PrefillProblem | CacheProblem | CombineProblem
