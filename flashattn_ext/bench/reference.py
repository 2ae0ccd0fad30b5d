"""What every backend must compute, in plain PyTorch, and how far a result is from it.

Shares no code with the kernels. float64 on the CPU; float32 on a GPU, where float64 can be sixty
times slower and 16-bit results are judged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .problems import CacheProblem, CombineProblem, Problem

# Of the norm of a row: a few roundings of the type. An output of 0 is off by 1.
TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 0.005, torch.float32: 1e-4}
MOST_SCORES = 2**28  # held at a time


def expected(problem: Problem) -> Tensor:
    """The result for the first copy: ``(batch, seqlen, heads, head_dim)``, over a cache packed."""
    if isinstance(problem, CombineProblem):
        return _combined(*problem.rotation[0])
    if isinstance(problem, CacheProblem):
        return _over_cache(problem)
    case, scores = problem.case, problem.scores
    rows = [
        _attend(problem.q[n], problem.k[n], problem.v[n], case.causal, **scores)
        for n in range(case.batch)
    ]
    return torch.stack(rows) if rows else torch.empty_like(problem.q)


def difference(out: Tensor, reference: Tensor) -> float:
    """The largest of ``|out - reference| / |reference|`` over the rows, as vectors; nan stays.

    Raises ValueError for a result of another shape.
    """
    if out.shape != reference.shape:
        raise ValueError(f"a result of shape {tuple(out.shape)}, not {tuple(reference.shape)}")
    if not reference.numel():
        return 0.0
    distance = (out.to(reference.dtype) - reference).norm(dim=-1)
    relative = distance / reference.norm(dim=-1).clamp_min(1e-3)
    return float(relative.max())


def tolerance(problem: Problem) -> float:
    return TOLERANCES[problem.dtype]


def _exact(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.float32


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One sequence: ``q (sq, h, d)`` over ``k``, ``v (sk, hk, d)``, some rows at a time."""
    exact = _exact(q.device)
    (rows, heads, head_dim), (keys, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    left, right = window_size
    right = 0 if causal else right
    key, value = (t.to(exact).transpose(0, 1) for t in (k, v))  # (hk, sk, d)
    columns = torch.arange(keys, device=q.device)
    out = torch.empty(rows, heads, head_dim, dtype=exact, device=q.device)
    step = max(1, MOST_SCORES // max(1, keys * heads))
    for first in range(0, rows, step):
        chunk = q[first : first + step].to(exact).transpose(0, 1)  # (h, step, d)
        count = chunk.shape[1]
        scores = chunk.reshape(kv_heads, group * count, head_dim) @ key.transpose(1, 2)
        scores = scores.view(heads, count, keys) * head_dim**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        diagonal = torch.arange(first, first + count, device=q.device) + keys - rows
        distance = columns - diagonal[:, None]
        if alibi_slopes is not None:
            scores -= alibi_slopes[:, None, None].to(exact) * distance.abs()
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if right >= 0:
            hidden |= distance > right
        if left >= 0:
            hidden |= distance < -left
        scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a row that sees no key
        result = weights.view(kv_heads, group * count, keys) @ value
        out[first : first + step] = result.view(heads, count, head_dim).transpose(0, 1)
    return out


def _over_cache(problem: CacheProblem) -> Tensor:
    k_cache, v_cache = problem.rotation[0]
    results, start = [], 0
    for n, (queries, keys) in enumerate(problem.case.lengths):
        if problem.table is None:
            k, v = k_cache[n, :keys], v_cache[n, :keys]
        else:
            pages = problem.table[n, : -(-keys // problem.case.page_size)].long()
            k, v = (cache[pages].flatten(0, 1)[:keys] for cache in (k_cache, v_cache))
        q = problem.q[start : start + queries]
        results.append(_attend(q, k, v, problem.case.causal))
        start += queries
    return torch.cat(results) if results else torch.empty_like(problem.q)


def _combined(out_partial: Tensor, lse_partial: Tensor) -> Tensor:
    exact = _exact(out_partial.device)
    weights = torch.softmax(lse_partial.to(exact), dim=0).transpose(2, 3)
    return (weights.unsqueeze(-1) * out_partial.to(exact)).sum(0)
