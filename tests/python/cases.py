"""One description of a call: every test draws its inputs, runs it and compares through it.

Whatever does not count is poison: rows past cu_seqlens[-1], keys past seqused_k and the gaps
between strided rows hold NaN, and so do `out` and `lse` before the call.
"""

import random
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest
import torch
from reference import LSE_TOLERANCE, Rule, Sequence, assert_close_to_reference
from strided import make_qkv

import flashattn_ext
from flashattn_ext._build import BUILD

LARGEST_CUDA_HEAD_DIM = max(BUILD.get("head_dims") or [256])
TILE_EDGES = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
HEAD_DIMS = (8, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALF_DTYPES = (torch.bfloat16, torch.float16)
SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Case:
    lengths: tuple[tuple[int, int], ...]  # (sq, sk) of each sequence; dense: all equal
    packed: bool = False
    heads: tuple[int, int] = (4, 2)  # query heads, key/value heads
    d: int = 64
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  # "h" or "bh": the shape of the slopes
    sinks: str = ""  # "fp32" or "same" (as q)
    scale: float | None = None
    used: tuple[int, ...] | None = None  # seqused_k
    strides: str = "plain"
    slack: int = 0  # how far max_seqlen_* lies above the true maximum
    tail: int = 3  # packed rows past cu_seqlens[-1]
    seed: int = 0

    def __str__(self):
        layout = "packed" if self.packed else f"dense{len(self.lengths)}"
        pairs = self.lengths if self.packed else self.lengths[:1]
        parts = [layout, *(f"{sq}x{sk}" for sq, sk in pairs[:5])]
        parts += [f"h{self.heads[0]}:{self.heads[1]}", f"d{self.d}", SHORT_NAMES[self.dtype]]
        parts += ["causal"] * self.causal
        parts += [f"w{self.window[0]},{self.window[1]}"] * (self.window != (-1, -1))
        parts += [f"cap{self.softcap:g}"] * (self.softcap != 0)
        parts += [f"alibi_{self.alibi}"] * (self.alibi != "")
        parts += [f"sinks_{self.sinks}"] * (self.sinks != "")
        parts += [f"scale{self.scale}"] * (self.scale is not None)
        parts += ["used"] * (self.used is not None)
        parts += [self.strides] * (self.strides != "plain")
        return "-".join(parts)

    def but(self, **changes):
        return replace(self, **changes)

    def rule(self):
        left, right = self.window
        scale = self.d**-0.5 if self.scale is None else self.scale
        return Rule(scale, (left, 0 if self.causal else right), self.softcap)

    def build(self, device):
        return _build(self, torch.device(device))

    def check(self, device):
        """Runs the library and compares with the oracle. Returns (out, lse)."""
        call = self.build(device)
        out, lse = call.run()
        call.compare(out, lse)
        return out, lse


@dataclass
class Call:
    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict
    sequences: list[Sequence] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)  # of each sequence in q and out
    lse_tolerance: float = LSE_TOLERANCE

    def nan_out(self):
        return torch.full_like(self.q, torch.nan, memory_format=torch.contiguous_format)

    def nan_lse(self):
        *outer, rows, heads, _ = self.q.shape
        return torch.full((*outer, heads, rows), torch.nan, device=self.q.device)

    def run(self, **changes):
        """(out, lse) of flash_fwd, into an `out` that holds NaN."""
        poison = self.nan_lse()
        del poison  # on a GPU, the lse that the call allocates is this block again
        options = {"out": self.nan_out(), **self.options, **changes}
        return flashattn_ext.flash_fwd(self.q, self.k, self.v, **options, return_lse=True)

    def op_arguments(self):
        """The arguments of torch.ops.flashattn_ext.fwd."""
        o, rule = self.options, self.case.rule()
        lengths = [o.get("cu_seqlens_q"), o.get("cu_seqlens_k")]
        lengths += [o.get("max_seqlen_q", -1), o.get("max_seqlen_k", -1), o.get("seqused_k")]
        score = [rule.softcap, o.get("alibi_slopes"), o.get("sinks")]
        left, right = rule.window
        return (self.q, self.k, self.v, right, rule.scale, left, *lengths, *score)

    def run_op(self):
        """(out, lse) of the op that writes into given tensors, both of which hold NaN."""
        out, lse = self.nan_out(), self.nan_lse()
        torch.ops.flashattn_ext.fwd_out(out, lse, *self.op_arguments())
        return out, lse

    def per_sequence(self, out, lse):
        for n, (begin, end) in enumerate(self.rows):
            if self.case.packed:
                yield out[begin:end], lse[:, begin:end]
            else:
                yield out[n], lse[n]

    def compare_sequences(self, out, lse):
        """Without the rows past the last sequence."""
        assert out.shape == self.q.shape and out.dtype == self.q.dtype
        assert lse.shape == self.nan_lse().shape and lse.is_contiguous()
        rule = self.case.rule()
        for seq, (out_n, lse_n) in zip(self.sequences, self.per_sequence(out, lse), strict=True):
            assert_close_to_reference(out_n, lse_n, seq, rule, lse_tolerance=self.lse_tolerance)

    def compare(self, out, lse):
        self.compare_sequences(out, lse)
        if self.case.packed and self.rows:
            assert out[self.rows[-1][1] :].isnan().all(), "rows past cu_seqlens_q[-1] were written"


def _build(case, device):
    if device.type == "cuda" and case.d > LARGEST_CUDA_HEAD_DIM:
        pytest.skip(f"this build has no CUDA kernel for head dim {case.d}")
    b = len(case.lengths)
    random_source = torch.Generator(device).manual_seed(case.seed)

    def draw(*shape):
        return torch.randn(shape, generator=random_source, device=device)

    if case.packed:
        begins_q = [0, *accumulate(sq for sq, _ in case.lengths)]
        begins_k = [0, *accumulate(sk for _, sk in case.lengths)]
        shape = (1, begins_q[-1] + case.tail, begins_k[-1] + case.tail)
    else:
        assert len(set(case.lengths)) <= 1, "a dense batch has one length"
        begins_q, begins_k = [0] * (b + 1), [0] * (b + 1)
        shape = (b, *(case.lengths[0] if b else (5, 7)))
    regions = []
    for n, (sq, sk) in enumerate(case.lengths):
        used = sk if case.used is None else min(max(case.used[n], 0), sk)
        place = 0 if case.packed else n
        regions.append((place, begins_q[n], sq, begins_k[n], used))

    gain = 3.0 if case.softcap > 0 else 1.0  # so that the cap is felt
    qkv = make_qkv(case.strides, shape, case.heads, case.d, case.dtype, device, regions, draw, gain)
    q, k, v = (t[0] for t in qkv) if case.packed else qkv
    options, slopes, sinks = score_options(case, device, draw)
    if case.packed:
        options["cu_seqlens_q"] = torch.tensor(begins_q, dtype=torch.int32, device=device)
        options["cu_seqlens_k"] = torch.tensor(begins_k, dtype=torch.int32, device=device)
        options["max_seqlen_q"] = max((sq for sq, _ in case.lengths), default=0) + case.slack
        options["max_seqlen_k"] = max((sk for _, sk in case.lengths), default=0) + case.slack

    call = Call(case, q, k, v, options)
    for n, (place, begin_q, sq, begin_k, used) in enumerate(regions):
        queries, keys = slice(begin_q, begin_q + sq), slice(begin_k, begin_k + used)
        of_q, of_k, of_v = qkv[0][place, queries], qkv[1][place, keys], qkv[2][place, keys]
        own_slopes = slopes[n] if slopes is not None and slopes.dim() == 2 else slopes
        call.sequences.append(Sequence(of_q, of_k, of_v, own_slopes, sinks))
        call.rows.append((begin_q, begin_q + sq))
    return call


def score_options(case, device, draw):
    options = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap}
    slopes = sinks = None
    if case.scale is not None:
        options["softmax_scale"] = case.scale
    if case.alibi:
        shape = {"h": (case.heads[0],), "bh": (len(case.lengths), case.heads[0])}[case.alibi]
        slopes = options["alibi_slopes"] = draw(*shape).abs() * 0.05 + 0.005
    if case.sinks:
        sinks = draw(case.heads[0]) * 2 + 1
        sinks = options["sinks"] = sinks.to(torch.float32 if case.sinks == "fp32" else case.dtype)
    if case.used is not None:
        options["seqused_k"] = torch.tensor(case.used, dtype=torch.int32, device=device)
    return options, slopes, sinks


def sample(count, seed, kind=Case, **axes):
    """`count` cases out of the product of the axes. Each axis runs through all its values in a
    shuffled order, so none is left out; a value that is a dict sets several fields at once."""
    source = random.Random(seed)
    columns = {}
    for name, values in axes.items():
        column = []
        while len(column) < count:
            column += source.sample(list(values), len(values))
        columns[name] = column[:count]
    cases = []
    for n in range(count):
        fields = {"seed": n}
        for name, column in columns.items():
            fields |= column[n] if isinstance(column[n], dict) else {name: column[n]}
        cases.append(kind(**fields))
    return cases


def dense(b, sq, sk, **fields):
    return Case(((sq, sk),) * b, **fields)


def packed(*lengths, **fields):
    return Case(lengths, packed=True, **fields)


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)
