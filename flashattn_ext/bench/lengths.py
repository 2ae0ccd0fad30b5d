"""Lengths of the sequences of a batch: how they are written, read and drawn."""

from __future__ import annotations

import math
import re
from itertools import groupby

import torch

_PIECE = re.compile(r"(?:(\d+)x)?(\d+):(\d+)")


def read_lengths(text: str) -> tuple[tuple[int, int], ...]:
    """``"2048:8192,63x1:4096"`` (times x queries : cached tokens) as pairs of all sequences."""
    pairs = []
    for piece in text.split(","):
        match = _PIECE.fullmatch(piece.strip())
        if match is None:
            raise ValueError(f"expected QUERIES:TOKENS or TIMESxQUERIES:TOKENS, got {piece!r}")
        times, queries, tokens = match.groups()
        if min(int(times or 1), int(queries), int(tokens)) < 1:
            raise ValueError(f"expected numbers from 1 on, got {piece!r}")
        pairs += [(int(queries), int(tokens))] * int(times or 1)
    return tuple(pairs)


def write_lengths(pairs: tuple[tuple[int, int], ...]) -> str:
    """The text that `read_lengths` reads back."""
    pieces = []
    for (queries, tokens), run in groupby(pairs):
        times = len(list(run))
        pieces.append(f"{times}x{queries}:{tokens}" if times > 1 else f"{queries}:{tokens}")
    return ",".join(pieces)


def log_normal(count: int, largest: int, seed: int) -> list[int]:
    """`count` lengths as real traffic has them: many short ones, few long ones, one `largest`."""
    source = torch.Generator().manual_seed(seed)
    lengths = torch.exp(torch.randn(count, generator=source) * 1.2 + math.log(largest / 16))
    result: list[int] = lengths.clamp(1, largest).long().tolist()
    result[0] = largest
    return result
