"""The space of merges: partial results of every type and layout, some of them empty, through
`flash_combine`, `merge_attention_states` and `flash_attn_combine`; compared with the oracle."""

import random

import torch
from cases import SHORT_NAMES, TILE_EDGES
from reference import merge
from spaces import Rule, Space
from strided import as_bits

import flashattn_ext
from flashattn_ext.flash_attn_interface import flash_attn_combine

DTYPES = {name: dtype for dtype, name in SHORT_NAMES.items()}
MOST_ELEMENTS = 300_000  # of all parts together, more only where 31 rows take them
MERGE = "merge_attention_states"
AXES = {
    "entry": ("flash_combine", MERGE, "flash_attn_combine"),
    "layout": ("dense", "packed"),
    "parts": (2, 0, 1, 3, 33, 70),
    "batch": (1, 0, 2),
    "rows": ("few", "0", "1", "edge"),
    "heads": (1, 3, 5),
    "d": (64, 1, 8, 36, 128, 256, 512),
    "dtype": ("fp32", "bf16", "fp16"),
    "other_dtype": ("", "fp32", "bf16", "fp16"),  # out_dtype, or that of out_b
    "empty": ("none", "-inf", "inf", "both", "all"),  # which lse some parts of some rows have
    "spread": (3.0, 0.0, 1e4),  # of the lse
    "strides": ("plain", "padded", "heads_first", "parts_inside", "one_part"),
    "lse_strides": ("plain", "rows_first", "one_part"),
    "out": ("new", "given", "strided"),
}
RULES = (
    Rule(("entry", "parts"), lambda entry, parts: entry == MERGE and parts != 2),
    Rule(("entry", "out"), lambda entry, out: entry == MERGE and out != "new"),
    Rule(("entry", "strides"), lambda entry, how: entry == MERGE and "part" in how),
    Rule(("entry", "lse_strides"), lambda entry, how: entry == MERGE and how == "one_part"),
    Rule(("layout", "batch"), lambda layout, batch: layout == "packed" and batch != 1),
    Rule(("parts", "strides"), lambda parts, how: parts == 0 and how == "one_part"),
    Rule(("parts", "lse_strides"), lambda parts, how: parts == 0 and how == "one_part"),
    # Of one part in many copies, all are empty or none.
    Rule(
        ("empty", "lse_strides"),
        lambda empty, how: how == "one_part" and empty not in ("none", "all"),
    ),
)
SPACE = Space(AXES, RULES, always_drawn=("entry", "layout", "parts", "batch", "rows", "heads", "d"))


def check(point, n, device):
    """Raises AssertionError where the result is not the oracle's, or where anything was written
    beside it."""
    out_partial, lse_partial = _parts(point, n, device)
    before = out_partial.clone(), lse_partial.clone()
    expected, expected_lse = _expected(out_partial, lse_partial)
    out, memory = _out(point, expected)
    result, lse = _make(point, out_partial, lse_partial, out)
    dtype = _result_dtype(point)
    assert result.dtype == dtype and result.shape == expected.shape
    assert lse.dtype == torch.float32 and lse.shape == expected_lse.shape
    eps = torch.finfo(dtype).eps
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(result.double(), expected, rtol=eps, atol=eps * largest + 1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-7, atol=1e-5)
    if out is not None:
        assert result is out, "the given out was not returned"
        out.fill_(torch.nan)
        assert memory.isnan().all(), "something between the rows of out was written"
    for tensor, copy in zip((out_partial, lse_partial), before, strict=True):
        assert torch.equal(as_bits(tensor), as_bits(copy)), "an input has changed"


def _parts(point, n, device):
    """out_partial (S, b, rows, h, d) and lse_partial (S, b, h, rows); packed: without the b."""
    source, random_bits = random.Random(n), torch.Generator(device).manual_seed(n)
    parts, heads = point["parts"], point["heads"]
    outer = (parts,) if point["layout"] == "packed" else (parts, point["batch"])
    largest = max(31, MOST_ELEMENTS // max(1, parts * point["batch"] * heads * point["d"]))
    edge = source.choice([n for n in TILE_EDGES if 31 <= n <= largest])
    rows = {"0": 0, "1": 1, "edge": edge, "few": source.randint(2, 17)}[point["rows"]]

    def draw(*shape):
        return torch.randn(*outer, *shape, generator=random_bits, device=device)

    out, lse = draw(rows, heads, point["d"]), draw(heads, rows) * point["spread"]
    empty = draw(heads, rows) > (-torch.inf if point["empty"] == "all" else 0.5)
    if point["empty"] != "none":
        infinity = torch.full_like(lse, torch.inf if point["empty"] == "inf" else -torch.inf)
        if point["empty"] == "both":
            infinity[::2] = torch.inf
        lse = torch.where(empty, infinity, lse)
        if point["strides"] != "one_part":  # nothing is looked at
            out.masked_fill_(empty.transpose(-1, -2)[..., None], torch.nan)
    out = out.to(DTYPES[point["dtype"]])
    if point["entry"] == MERGE and point["other_dtype"]:  # both types hold the second part
        out[1] = out[1].to(DTYPES[point["other_dtype"]])
    return _laid_out(out, point["strides"]), _laid_out(lse, point["lse_strides"])


def _laid_out(values, how):
    if how == "one_part":
        return values[:1].expand_as(values)
    if how == "heads_first":
        return values.transpose(-3, -2).contiguous().transpose(-3, -2)
    if how == "rows_first":
        return values.mT.contiguous().mT
    if how == "parts_inside":
        return values.movedim(0, -2).contiguous().movedim(-2, 0)
    return padded(values)[0] if how == "padded" else values


def padded(values):
    """The values in rows with gaps between them, and the memory that they lie in."""
    *outer, rows, heads, d = values.shape
    memory = values.new_full((*outer, rows + 1, heads + 1, d + 8), torch.nan)
    view = memory[..., :rows, :heads, :d]
    return view.copy_(values), memory


def _expected(out_partial, lse_partial):
    rows_first = lse_partial.mT
    if len(out_partial) == 0:
        out, lse = out_partial.sum(dim=0), torch.full_like(rows_first.sum(dim=0), -torch.inf)
    else:
        out, lse = merge(out_partial, rows_first)
    return out.double(), lse.double().mT


def _result_dtype(point):
    is_of_result = point["other_dtype"] and point["entry"] != MERGE
    return DTYPES[point["other_dtype"] if is_of_result else point["dtype"]]


def _out(point, expected):
    """A tensor of NaN to be written, and the memory that it lies in."""
    if point["out"] == "new":
        return None, None
    plain = torch.full_like(expected, torch.nan, dtype=_result_dtype(point))
    return (plain, plain) if point["out"] == "given" else padded(plain)


def _make(point, out_partial, lse_partial, out):
    other = DTYPES.get(point["other_dtype"])
    if point["entry"] == MERGE:
        second = out_partial[1] if other is None else out_partial[1].to(other)
        return flashattn_ext.merge_attention_states(
            out_partial[0], lse_partial[0], second, lse_partial[1]
        )
    if point["entry"] == "flash_combine":
        return flashattn_ext.flash_combine(out_partial, lse_partial, out=out, out_dtype=other)
    result, lse = flash_attn_combine(out_partial, lse_partial.mT, out=out, out_dtype=other)
    return result, lse.mT
