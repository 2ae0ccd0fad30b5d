"""Calls over a key/value cache, contiguous or in pages: what cases.py is for `flash_fwd`.

All that is no key is poison: slots past a length or before the left padding, pages of no sequence,
gaps between strided rows, the margins of the pool. Table entries that count for nothing are -1.
"""

import random
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import pytest
import torch
from cases import LARGEST_CUDA_HEAD_DIM, Call, Case, ints, score_options
from reference import LSE_TOLERANCE, Cache, Sequence, rotate
from strided import as_bits, make_pool, once, query_buffer

import flashattn_ext

PAGE_SIZES = (1, 4, 8, 16, 32, 48, 64, 128, 256, 512, 768)


@dataclass(frozen=True)
class CacheCase(Case):
    """`lengths` are (queries, tokens in the cache before the call) of each sequence."""

    page: int = 0  # tokens; 0: a contiguous cache
    pool: str = "plain"  # strided.POOLS
    table: str = "shuffled"  # "shared": sequences share the pages that all of them fill; "random"
    room: int = 70  # tokens that the longest sequence could still take
    leftpad: tuple[int, ...] | None = None
    batch_idx: bool = False
    one_length: bool = False  # cache_seqlens is an int
    new: int = 0  # tokens to append
    rotary: float = 0.0  # fraction of the head dim
    interleaved: bool = True
    splits: int = 0
    split_size: int | None = None
    unused: int = -1  # what unused table entries hold

    def __str__(self):
        words = {
            f"cached{'_'.join(str(n) for _, n in self.lengths[:4])}": not self.packed,
            f"page{self.page}": self.page,
            self.pool: self.pool != "plain",
            self.table: self.table != "shuffled",
            "leftpad": self.leftpad is not None,
            "batch_idx": self.batch_idx,
            "int": self.one_length,
            f"new{self.new}": self.new,
            f"rotary{self.rotary:g}{'i' if self.interleaved else 'h'}": self.rotary,
            f"n{self.splits}": self.splits,
            f"size{self.split_size}": self.split_size is not None,
        }
        return "-".join([super().__str__(), *(word for word, said in words.items() if said)])

    def build(self, device):
        return _build(self, torch.device(device))

    @property
    def longest(self):
        return max((cached for _, cached in self.lengths), default=0) + self.new

    @property
    def capacity(self):
        tokens = self.longest + self.room
        return -(-tokens // self.page) * self.page if self.page else tokens

    @property
    def rotary_dim(self):
        return int(self.d * self.rotary) // 16 * 16

    def kept(self, n):
        """How many of the new tokens fit into the cache of sequence n."""
        return max(0, min(self.new, self.capacity - self.lengths[n][1]))

    def span(self, n):
        """[begin, end) of the tokens of sequence n before the append."""
        pad = self.leftpad[n] if self.leftpad is not None else 0
        return pad, self.lengths[n][1]


@dataclass
class CacheCall(Call):
    """q, k and v are q, k_cache and v_cache."""

    cache: Cache | None = None
    buffers: tuple[torch.Tensor, ...] = ()
    expected: tuple[torch.Tensor, ...] = ()  # what the buffers hold after the call
    new_places: list = field(default_factory=list)

    def run(self, **changes):
        """(out, lse) of flash_fwd_splitkv, into an `out` that holds NaN."""
        poison = self.nan_lse()
        del poison  # on a GPU, the lse that the call allocates is this block again
        options = {"out": self.nan_out(), **self.options, **changes}
        function = flashattn_ext.flash_fwd_splitkv
        return function(self.q, self.k, self.v, **options, return_lse=True)

    def op_arguments(self):
        """The arguments of torch.ops.flashattn_ext.fwd_splitkv, or with `new` of ..._append."""
        o, rule = self.options, self.case.rule()
        lengths = o["cache_seqlens"]
        lengths, length = (None, lengths) if isinstance(lengths, int) else (lengths, 0)
        queries = [o.get("cu_seqlens_q"), o.get("max_seqlen_q", -1)]
        places = [length, o.get("cache_batch_idx"), o.get("cache_leftpad")]
        splits = [o.get("num_splits", 0), o.get("split_size") or 0]
        score = [rule.softcap, o.get("alibi_slopes"), o.get("sinks")]
        left, right = rule.window
        arguments = (self.q, self.k, self.v, lengths, o.get("block_table"))
        arguments += (right, rule.scale, left, *queries, *places, *splits, *score)
        if self.case.new:
            new = [o.get(name) for name in ("k_new", "v_new", "rotary_cos", "rotary_sin")]
            arguments = (*new, o.get("rotary_interleaved", True), *arguments)
        return arguments

    def op(self, suffix=""):
        name = f"fwd_splitkv{'_append' if self.case.new else ''}{suffix}"
        return getattr(torch.ops.flashattn_ext, name).default

    def run_op(self):
        out, lse = self.nan_out(), self.nan_lse()
        self.op("_out")(out, lse, *self.op_arguments())
        return out, lse

    def compare(self, out, lse):
        self.compare_cache()
        super().compare(out, lse)

    def compare_cache(self):
        """Bit by bit, apart from the last bit of rotated keys."""
        for got, expected in zip(self.buffers, self.expected, strict=True):
            same = as_bits(got) == as_bits(expected)
            if self.case.rotary_dim:
                near = torch.finfo(got.dtype).eps * expected.abs() + 1e-6
                same |= (got - expected).abs() <= near
            assert same.all(), f"cache: {(~same).sum()} elements differ, {(~same).nonzero()[0]}"

    def reread(self):
        """After a test has changed inputs in place: what counts now. (No append, no rotary.)"""
        assert not self.case.new
        self.expected = tuple(buffer.clone() for buffer in self.buffers)
        for n, seq in enumerate(self.sequences):
            k, v = self.cache.gather(n, *self.case.span(n))
            begin, end = self.rows[n]
            q = self.q[begin:end] if self.case.packed else self.q[n]
            self.sequences[n] = Sequence(q, k, v, seq.slopes, seq.sinks)


def _build(case, device):
    if device.type == "cuda" and case.d > LARGEST_CUDA_HEAD_DIM:
        pytest.skip(f"this build has no CUDA kernel for head dim {case.d}")
    source = torch.Generator(device).manual_seed(case.seed)

    def draw(*shape):
        return torch.randn(shape, generator=source, device=device)

    hk, page = case.heads[1], case.page or case.capacity
    table, pages = _tables(case)
    pool = make_pool(case.pool, pages, page, hk, case.d, case.dtype, device)
    cache = Cache(pool[0], pool[1], table)
    if case.table == "random":  # then any page may be any token's
        for t in map(once, pool[:2]):
            t.copy_(draw(*t.shape))
    for n in range(len(case.lengths)):
        begin, end = case.span(n)
        if case.table != "random" and begin < end:
            for t in map(once, pool[:2]):
                t[cache.where(n, begin, end)] = draw(end - begin, *t.shape[2:]).to(case.dtype)

    q, rows = _queries(case, device, draw)
    options, slopes, sinks = score_options(case, device, draw)
    options |= _cache_options(case, device, cache, rows)
    call = CacheCall(case, q, pool[0], pool[1], options, rows=rows, cache=cache, buffers=pool[2])
    call.expected = tuple(buffer.clone() for buffer in call.buffers)
    if case.pool == "interleaved":
        call.expected = (call.expected[0],) * 2
    new = _append(case, device, draw, call)
    for n, (begin, end) in enumerate(rows):
        of_q = q[begin:end] if case.packed else q[n]
        old, (k_new, v_new) = cache.gather(n, *case.span(n)), new(n)
        k, v = torch.cat([old[0], k_new]), torch.cat([old[1], v_new])
        own_slopes = slopes[n] if slopes is not None and slopes.dim() == 2 else slopes
        call.sequences.append(Sequence(_turn(case, call, n, of_q), k, v, own_slopes, sinks))
    if case.rotary_dim:  # a rounding of keys and queries more, on either side of a tie
        call.lse_tolerance = LSE_TOLERANCE + torch.finfo(case.dtype).eps
    return call


def _tables(case):
    """The oracle's table, and the number of pages of the pool."""
    b, source = len(case.lengths), random.Random(case.seed)
    if not case.page:
        rows = list(range(b + 3 if case.batch_idx else b))
        if case.batch_idx:
            source.shuffle(rows)
        return [[row] for row in rows[:b]], len(rows)
    columns = case.capacity // case.page
    if case.table == "random":
        pages = max(columns, 4)
        return [[source.randrange(pages) for _ in range(columns)] for _ in range(b)], pages
    free = list(range(b * columns + 3))
    source.shuffle(free)
    full = min((cached // case.page for _, cached in case.lengths), default=0)
    shared = full if case.table == "shared" else 0
    common = [free.pop() for _ in range(shared)]
    table = []
    for n in range(b):
        used = -(-(case.lengths[n][1] + case.kept(n)) // case.page)
        own = [free.pop() for _ in range(used - shared)]
        table.append([*common, *own, *[case.unused] * (columns - used)])
    return table, b * columns + 3


def _queries(case, device, draw):
    h, d = case.heads[0], case.d
    gain = 3.0 if case.softcap > 0 else 1.0
    if case.packed:
        starts = [0, *accumulate(sq for sq, _ in case.lengths)]
        q = query_buffer(case.strides, 1, starts[-1] + case.tail, h, d, case.dtype, device)[0]
        of_q = once(q)[: starts[-1]]
        of_q.copy_((draw(*of_q.shape) * gain).to(case.dtype))
        return q, list(pairwise(starts))
    sq = case.lengths[0][0] if case.lengths else 3
    assert all(length == sq for length, _ in case.lengths), "a dense batch has one query length"
    q = query_buffer(case.strides, len(case.lengths), sq, h, d, case.dtype, device)
    of_q = once(q)
    of_q.copy_((draw(*of_q.shape) * gain).to(case.dtype))
    return q, [(0, sq)] * len(case.lengths)


def _cache_options(case, device, cache, rows):
    lengths = [cached for _, cached in case.lengths]
    options = {"num_splits": case.splits, "split_size": case.split_size}
    if case.one_length:
        assert len(set(lengths)) == 1, "one length for all"
        options["cache_seqlens"] = lengths[0]
    else:
        options["cache_seqlens"] = ints(lengths, device)
    if case.page:
        # At the end of its allocation, behind numbers that lead far out of the pool.
        table = ints(cache.table, device).view(len(cache.table), case.capacity // case.page)
        behind = torch.full((64 + table.numel(),), 2**31 - 1, dtype=torch.int32, device=device)
        behind[64:] = table.flatten()
        options["block_table"] = behind[64:].view_as(table)
    if case.batch_idx:
        options["cache_batch_idx"] = ints([row for (row,) in cache.table], device)
    if case.leftpad is not None:
        options["cache_leftpad"] = ints(case.leftpad, device)
    if case.packed:
        options["cu_seqlens_q"] = ints([0, *(end for _, end in rows)], device)
        options["max_seqlen_q"] = max((sq for sq, _ in case.lengths), default=0) + case.slack
    return options


def _append(case, device, draw, call):
    """Puts the new tokens into the options and, where they belong, into `expected`. Returns a
    function: sequence -> its new keys and values as they end up in the cache."""
    shape = (len(case.lengths), case.new, case.heads[1], case.d)
    if not case.new:
        empty = torch.empty(shape[1:], dtype=case.dtype, device=device)
        return lambda n: (empty, empty)
    k_new, v_new = (draw(*shape).to(case.dtype) for _ in range(2))
    call.options |= {"k_new": k_new, "v_new": v_new}
    if case.rotary_dim:
        queries = max((sq for sq, _ in case.lengths), default=0)  # may stand behind all keys
        positions = case.capacity + max(case.new, queries) + 1
        angles = draw(positions, case.rotary_dim // 2) * 3
        tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        call.options |= {name: table.to(case.dtype) for name, table in tables.items()}
        call.options["rotary_interleaved"] = case.interleaved

    def new(n):
        kept, cached = case.kept(n), case.lengths[n][1]
        k = k_new[n, :kept]
        if case.rotary_dim:
            k = _rotate(call, k, range(cached, cached + kept)).to(case.dtype)
        return k, v_new[n, :kept]

    for n, (_, cached) in enumerate(case.lengths):
        places = call.cache.where(n, cached, cached + case.kept(n))
        for view, buffer, rows in zip((call.k, call.v), call.expected, new(n), strict=True):
            twin = buffer.as_strided(view.shape, view.stride(), view.storage_offset())
            twin[places] = rows
    return new


def _rotate(call, x, positions):
    o = call.options
    positions = torch.tensor(list(positions), dtype=torch.int64, device=x.device)
    return rotate(x, positions, o["rotary_cos"], o["rotary_sin"], o["rotary_interleaved"])


def _turn(case, call, n, q):
    """The queries of sequence n as they meet the keys."""
    if not case.rotary_dim:
        return q
    is_local = case.causal or case.window != (-1, -1)
    first = case.lengths[n][1]
    positions = [first + (i if is_local else 0) for i in range(len(q))]
    return _rotate(call, q, positions).to(case.dtype)


def dense_cache(sq, *cached, **fields):
    return CacheCase(tuple((sq, n) for n in cached), **fields)


def packed_cache(*lengths, **fields):
    return CacheCase(lengths, packed=True, **fields)
