"""The oracle: attention in plain PyTorch, one sequence at a time.

Knows nothing of csrc/ or of flashattn_ext. Runs where its tensors are: what is on a GPU is computed
in float64 there, because on two CPU cores one 4096 x 4096 reference takes longer than the rest of
the suite. Rows are taken in chunks, so that no score matrix is larger than 1 GiB.
"""

from dataclasses import dataclass

import torch

MAX_SCORES = 2**27
LSE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Sequence:
    """Exactly the rows that count: q and out (sq, h, d); k and v (sk, hk, d); lse (h, sq)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slopes: torch.Tensor | None = None  # (h,)
    sinks: torch.Tensor | None = None  # (h,)


@dataclass(frozen=True)
class Rule:
    """What one call says about its scores. window[1] is already 0 when the call is causal."""

    scale: float
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0


def visible(i, j, sq, sk, left, right):
    diagonal = i + sk - sq
    not_too_old = (left < 0) | (j >= diagonal - left)
    return (j < sk) & not_too_old & ((right < 0) | (j <= diagonal + right))


def attend(seq, rule, dtype=torch.float64, rows=None):
    """(out, lse) of `rows` (a range; all when None), every step in `dtype`."""
    (sq, heads, d), sk = seq.q.shape, seq.k.shape[0]
    rows = range(sq) if rows is None else rows
    out = torch.empty(len(rows), heads, d, dtype=dtype, device=seq.q.device)
    lse = torch.empty(heads, len(rows), dtype=dtype, device=seq.q.device)
    step = max(1, MAX_SCORES // max(1, heads * sk))
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        out_part, lse_part = _attend_rows(seq, rule, dtype, part)
        out[begin : begin + step] = out_part.transpose(0, 1)
        lse[:, begin : begin + step] = lse_part
    return out, lse


def _attend_rows(seq, rule, dtype, rows):
    sq, sk, group = seq.q.shape[0], seq.k.shape[0], seq.q.shape[1] // seq.k.shape[1]
    i = torch.arange(rows.start, rows.stop, device=seq.q.device)[:, None]
    j = torch.arange(sk, device=seq.q.device)[None, :]
    q = seq.q[rows.start : rows.stop].transpose(0, 1).to(dtype)  # (h, rows, d)
    k = seq.k.to(dtype).repeat_interleave(group, dim=1).permute(1, 2, 0)  # (h, d, sk)
    v = seq.v.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1)  # (h, sk, d)

    s = q @ k * rule.scale
    if rule.softcap > 0:
        s = torch.tanh(s / rule.softcap) * rule.softcap
    if seq.slopes is not None:
        s = s - seq.slopes.to(dtype)[:, None, None] * (i + sk - sq - j).abs().to(dtype)
    s = torch.where(visible(i, j, sq, sk, *rule.window), s, -torch.inf)
    if seq.sinks is not None:  # one more logit, whose value row is zero
        sink = seq.sinks.to(dtype)[:, None, None].expand(-1, len(rows), 1)
        s = torch.cat([s, sink], dim=-1)
        v = torch.cat([v, v.new_zeros(v.shape[0], 1, v.shape[2])], dim=1)
    if s.shape[-1] == 0:
        return torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)

    top = s.amax(dim=-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    p = torch.exp(s - top)
    total = p.sum(dim=-1, keepdim=True)
    out = torch.where(total > 0, p @ v / total, 0)
    return out, (top + torch.log(total)).squeeze(-1)


@dataclass(frozen=True)
class Cache:
    """Token j of sequence n is slot j % page of page table[n][j // page]. A contiguous cache is one
    page per sequence."""

    k: torch.Tensor  # (pages, page, hk, d)
    v: torch.Tensor
    table: list[list[int]]

    def where(self, n, begin, end):
        """Pages and slots of the tokens [begin, end) of sequence n."""
        page = self.k.shape[1]
        pages = [self.table[n][token // page] for token in range(begin, end)]
        slots = [token % page for token in range(begin, end)]
        return tuple(
            torch.tensor(places, dtype=torch.int64, device=self.k.device)
            for places in (pages, slots)
        )

    def gather(self, n, begin, end):
        places = self.where(n, begin, end)
        return self.k[places], self.v[places]


def rotate(x, positions, cos, sin, interleaved):
    """x (rows, heads, d) in float64, row r by the angles of table row positions[r]. Pairs are dims
    (2t, 2t + 1) or (t, t + rotary_dim / 2); dims from rotary_dim on stay."""
    half = cos.shape[1]
    x = x.double()
    cos, sin = (table.double()[positions][:, None] for table in (cos, sin))
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    rotated = x.clone()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., first] * sin + x[..., second] * cos
    return rotated


def merge(outs, lses):
    """(out, lse) of results over disjoint keys, (S, ..., d) and (S, ...), in float64."""
    lses = torch.where(lses == torch.inf, -torch.inf, lses.double())
    top = lses.amax(dim=0)
    top = torch.where(top == -torch.inf, 0, top)
    weights = torch.exp(lses - top)
    total = weights.sum(dim=0)
    kept = torch.where(weights[..., None] > 0, outs.double(), 0)
    out = (weights[..., None] * kept).sum(dim=0) / torch.where(total > 0, total, 1)[..., None]
    return out, top + torch.log(total)


def assert_close_to_reference(out, lse, seq, rule, rows=None, lse_tolerance=LSE_TOLERANCE):
    """`out` and `lse` of one sequence against float64, with the tolerance of the semantics.

    A factor of 2 (softcap: 3) times the error of the same mathematics in the input type, plus the
    noise of the output's magnitude, which is never zero: one rounding to its type, and that of
    scores that are float32 sums over d (which counts for float32 outputs only). Taken per sequence:
    a short one, whose outputs are large, does not loosen the bound of a long one in the batch.
    """
    expected, expected_lse = attend(seq, rule, rows=rows)
    assert out.shape == expected.shape and lse.shape == expected_lse.shape, (out.shape, lse.shape)
    if expected.numel() == 0:
        return
    lowprec = attend(seq, rule, out.dtype, rows)[0].double()
    magnitude = expected.abs().max().clamp_min(1e-3)
    factor = 3 if rule.softcap > 0 else 2
    noise = torch.finfo(out.dtype).eps + torch.finfo(torch.float32).eps * out.shape[-1] ** 0.5
    tolerance = factor * (lowprec - expected).abs().max() + noise * magnitude
    # A bound that a zero or a foreign result would pass tests nothing.
    assert tolerance < magnitude / 2, f"useless bound {tolerance:.3g} at magnitude {magnitude:.3g}"

    assert not out.isnan().any(), f"out: NaN in {_places(out.isnan())}"
    error = (out.double() - expected).abs()
    assert error.max() <= tolerance, (
        f"out: error {error.max():.3g} > {tolerance:.3g} in {_places(error > tolerance)}"
    )
    empty = (expected == 0).all(dim=-1)
    assert (out[empty] == 0).all(), "out: rows without a visible key are not exactly 0"
    _assert_lse(lse, expected_lse, lse_tolerance)


def _assert_lse(lse, expected, tolerance):
    assert lse.dtype == torch.float32, f"lse: {lse.dtype}"
    assert not lse.isnan().any(), f"lse: NaN in {_places(lse.isnan())}"
    empty = expected == -torch.inf
    assert (lse[empty] == -torch.inf).all(), "lse: rows without a visible key are not -inf"
    error = torch.where(empty, 0, (lse.double() - expected).abs())
    assert error.max() <= tolerance, f"lse: error {error.max():.3g} in {_places(error > tolerance)}"


def _places(mask):
    where = mask.nonzero()
    return f"{len(where)} of {mask.numel()} elements, first {tuple(where[0].tolist())}"
