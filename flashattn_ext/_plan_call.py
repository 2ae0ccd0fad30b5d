"""The module `_host`, and the call that it plans."""

from __future__ import annotations

from typing import Any

from ._plan_problem import Problem
from ._score_checks import MAX_ROWS


def load_host() -> Any:
    try:
        from . import _host
    except ImportError as error:
        raise RuntimeError(
            "plan needs flashattn_ext._host, which is built for one version of Python and does not "
            f"import here ({error}): install flashattn_ext with this Python"
        ) from error
    return _host


def _bound_q(p: Problem) -> int:
    """No sequence is longer than all rows together, whatever the caller's bound."""
    return min(p.max_seqlen_q, p.rows) if p.packed else p.max_seqlen_q


def planned_call(host: Any, p: Problem) -> Any:
    starts = [0]
    for length in p.queries if p.packed else ():
        starts.append(starts[-1] + length)
    cached = [length - p.new_tokens for length in p.keys] if p.cache is not None else []
    return host.PlannedCall(
        batch=p.batch,
        heads=p.heads,
        heads_kv=p.heads_kv,
        head_dim=p.padded_head_dim,
        seqlen_q=_bound_q(p),
        seqlen_k=p.capacity,
        cu_seqlens_q=starts if p.packed else [],
        cache_seqlens=cached,
        seqused_k=list(p.keys) if p.cache is None else [],
        left=p.window[0],
        right=p.window[1],
        new_tokens=p.new_tokens,
        rotary_dim=p.rotary_dim,
        num_splits=p.num_splits,
        split_size=min(p.split_size or 0, MAX_ROWS),
    )
