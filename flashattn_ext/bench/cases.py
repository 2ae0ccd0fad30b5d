"""What can be measured: one frozen dataclass per kind of call, with its operations and its bytes.

A field that is None is filled in by `settled`. What the command line may set is in OPTIONS; the
other fields belong to the grids (grids.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .lengths import write_lengths

ELEMENT_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
OPEN_WINDOW = (-1, -1)
_OPEN: Any = None  # a number once `settled` has run
Lengths = tuple[tuple[int, int], ...]  # (queries, cached tokens) of each sequence


@dataclass(frozen=True)
class Prefill:
    """A call of `flash_fwd`: ``q (batch, seqlen, heads, head_dim)`` over ``kv_len`` keys."""

    OPTIONS: ClassVar = (
        "batch", "heads", "kv_heads", "head_dim", "seqlen", "kv_len", "causal", "dtype",
    )  # fmt: skip
    UNIT: ClassVar = "TFLOP/s"
    CALL: ClassVar = "flash_fwd"

    name: str = "prefill"
    batch: int = _OPEN
    heads: int = _OPEN
    kv_heads: int = _OPEN
    head_dim: int = 128
    seqlen: int = 4096
    kv_len: int = _OPEN
    causal: bool = False
    dtype: str = "bfloat16"
    window: tuple[int, int] = OPEN_WINDOW
    softcap: float = 0.0
    alibi: bool = False
    packed: bool = False

    def settled(self, width: int, tokens: int) -> Prefill:
        """Heads for ``heads * head_dim = width`` and a batch of `tokens` in all, if not given."""
        heads = max(1, width // self.head_dim) if self.heads is None else self.heads
        case = replace(
            self,
            heads=heads,
            kv_heads=heads if self.kv_heads is None else self.kv_heads,
            batch=max(1, tokens // self.seqlen) if self.batch is None else self.batch,
            kv_len=self.seqlen if self.kv_len is None else self.kv_len,
        )
        _check_heads(case)
        return case

    def flops(self) -> float:
        """4 * batch * heads * head_dim for each pair of a query and a key that it sees; a causal
        square counts as exactly half, as is the custom."""
        return 4.0 * self.batch * self.heads * self.head_dim * self._visible_pairs()

    def work(self) -> float:
        return self.flops()

    def _visible_pairs(self) -> float:
        shift = self.kv_len - self.seqlen
        if self.window == OPEN_WINDOW:
            if not self.causal:
                return self.seqlen * self.kv_len
            rows = min(self.seqlen, self.kv_len)  # rows further up see no key
            return rows * (self.kv_len - rows / 2)
        left, right = self.window
        right = 0 if self.causal else right
        pairs = 0
        for row in range(shift, shift + self.seqlen):
            first = 0 if left < 0 else max(0, row - left)
            last = self.kv_len - 1 if right < 0 else min(self.kv_len - 1, row + right)
            pairs += max(0, last - first + 1)
        return pairs

    def label(self) -> str:
        keys = f" kv {self.kv_len}" if self.kv_len != self.seqlen else ""
        parts = [f"b {self.batch} s {self.seqlen}{keys} h {_heads(self)} d {self.head_dim}"]
        parts += ["causal"] if self.causal else []
        return " ".join([*parts, SHORT_DTYPES[self.dtype]])


class _Cached:
    """What `Decode` and `Mixed` share: queries of `lengths` over a cache."""

    UNIT: ClassVar = "TB/s"
    CALL: ClassVar = "flash_fwd_splitkv"

    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def lengths(self) -> Lengths:
        raise NotImplementedError

    def work(self) -> float:
        return self.bytes()

    def bytes(self) -> int:
        """The keys and values that the lengths say, once."""
        row = 2 * self.kv_heads * self.head_dim * ELEMENT_SIZES[self.dtype]
        return sum(keys for _, keys in self.lengths) * row


@dataclass(frozen=True)
class Decode(_Cached):
    """A call of `flash_fwd_splitkv`: ``seqlen`` queries over ``kv_len`` tokens of each sequence, in
    pages of ``page_size`` tokens, or for 0 in a contiguous cache of ``capacity`` tokens."""

    OPTIONS: ClassVar = (*Prefill.OPTIONS, "page_size")

    name: str = "decode"
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    seqlen: int = 1
    kv_len: int = 8192
    page_size: int = 0
    causal: bool = True
    dtype: str = "bfloat16"
    capacity: int | None = None
    split_size: int | None = None

    @property
    def lengths(self) -> Lengths:
        return ((self.seqlen, self.kv_len),) * self.batch

    def settled(self) -> Decode:
        """A capacity of the tokens that are there, if not given."""
        _check_heads(self)
        if self.capacity is not None and self.capacity < self.kv_len:
            raise ValueError(f"--kv-len: {self.kv_len} is beyond the capacity of {self.name}")
        return self

    def label(self) -> str:
        queries = f" q {self.seqlen}" if self.seqlen > 1 else ""
        full = " full" if self.seqlen > 1 and not self.causal else ""
        return (
            f"b {self.batch}{queries} kv {self.kv_len} h {_heads(self)} d {self.head_dim} "
            f"{_place(self.page_size)}{full} {SHORT_DTYPES[self.dtype]}"
        )


@dataclass(frozen=True)
class Mixed(_Cached):
    """A call of `flash_fwd_splitkv` with sequences of ``lengths`` (queries, cached tokens)."""

    OPTIONS: ClassVar = (
        "lengths", "heads", "kv_heads", "head_dim", "page_size", "causal", "dtype",
    )  # fmt: skip

    name: str = "mixed"
    lengths: Lengths = ()
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    causal: bool = True
    dtype: str = "bfloat16"
    capacity: ClassVar[None] = None
    split_size: ClassVar[None] = None

    def settled(self) -> Mixed:
        _check_heads(self)
        return self

    def label(self) -> str:
        rows = write_lengths(self.lengths)
        if len(rows) > 30:
            rows = f"{len(self.lengths)} seqs {sum(k for _, k in self.lengths)} kv"
        full = "" if self.causal else " full"
        return (
            f"{rows} h {_heads(self)} d {self.head_dim} {_place(self.page_size)}{full} "
            f"{SHORT_DTYPES[self.dtype]}"
        )


@dataclass(frozen=True)
class Combine:
    """A call of `flash_combine`: ``parts`` results ``(batch, seqlen, heads, head_dim)``."""

    OPTIONS: ClassVar = ("parts", "batch", "heads", "head_dim", "seqlen", "dtype")
    UNIT: ClassVar = "TB/s"
    CALL: ClassVar = "flash_combine"

    name: str = "combine"
    parts: int = 8
    batch: int = 64
    heads: int = 32
    head_dim: int = 128
    seqlen: int = 1
    dtype: str = "float32"

    def settled(self) -> Combine:
        return self

    def work(self) -> float:
        return self.bytes()

    def bytes(self) -> int:
        """All parts read and one result written, each with its float32 lse."""
        row = self.head_dim * ELEMENT_SIZES[self.dtype] + 4
        return (self.parts + 1) * self.batch * self.seqlen * self.heads * row

    def label(self) -> str:
        return (
            f"{self.parts} parts b {self.batch} s {self.seqlen} h {self.heads} d {self.head_dim} "
            f"{SHORT_DTYPES[self.dtype]}"
        )


Case = Prefill | Decode | Mixed | Combine


def _heads(case: Prefill | Decode | Mixed) -> str:
    same = case.heads == case.kv_heads
    return str(case.heads) if same else f"{case.heads}/{case.kv_heads}"


def _place(page_size: int) -> str:
    return f"page {page_size}" if page_size else "contig"


def _check_heads(case: Prefill | Decode | Mixed) -> None:
    if case.heads % case.kv_heads:
        raise ValueError(
            f"--heads: expected a multiple of the {case.kv_heads} key/value heads, got {case.heads}"
        )
