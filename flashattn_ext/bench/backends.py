"""Who computes: flashattn_ext and the kernels beside it, each behind the same three questions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import flashattn_ext

from . import peers, sdpa
from .backend import Backend, Call
from .cases import Case, Combine, Decode
from .problems import CombineProblem, PrefillProblem, Problem


class Ours(Backend):
    name, title = "ours", "ours"

    def call(self, problem: Problem) -> Call:
        if isinstance(problem, CombineProblem):
            return Call(flashattn_ext.flash_combine, problem.rotation, lambda result: result[0])
        if isinstance(problem, PrefillProblem):
            return self._prefill(problem)
        case = problem.case
        options: dict[str, Any] = {} if problem.table is None else {"block_table": problem.table}
        if case.split_size:
            options["split_size"] = case.split_size
        q = problem.q
        if isinstance(case, Decode):  # as many queries of each sequence
            q = q.view(case.batch, case.seqlen, case.heads, case.head_dim)
        else:
            options |= {"cu_seqlens_q": problem.starts, "max_seqlen_q": problem.longest_query}

        def run(k: Tensor, v: Tensor) -> Any:
            return flashattn_ext.flash_fwd_splitkv(
                q, k, v, cache_seqlens=problem.used, causal=case.causal, **options
            )

        return Call(run, problem.rotation, lambda out: out.view(problem.q.shape))

    def _prefill(self, problem: PrefillProblem) -> Call:
        case = problem.case
        options: dict[str, Any] = {"causal": case.causal, **problem.scores}
        operands = (problem.q, problem.k, problem.v)
        if case.packed:
            operands = problem.packed()
            options |= {
                "cu_seqlens_q": problem.starts(case.seqlen), "max_seqlen_q": case.seqlen,
                "cu_seqlens_k": problem.starts(case.kv_len), "max_seqlen_k": case.kv_len,
            }  # fmt: skip

        def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flashattn_ext.flash_fwd(q, k, v, **options)

        return Call(run, [operands], lambda out: out.view(problem.q.shape))


class Formula(Backend):
    """`flash_combine` as one would write it in PyTorch."""

    name, title = "torch", "torch"

    def refuses(self, case: Case) -> str:
        return "" if isinstance(case, Combine) else "only writes out the formula of combine"

    def call(self, problem: Problem) -> Call:
        assert isinstance(problem, CombineProblem)  # the others are refused

        def run(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
            lse = lse_partial.logsumexp(0)
            weights = (lse_partial - lse).exp().transpose(2, 3).unsqueeze(-1)
            return (weights * out_partial).sum(0).to(out_partial.dtype), lse

        return Call(run, problem.rotation, lambda result: result[0])


def by_name() -> dict[str, Backend]:
    """All backends, in the order in which results show them."""
    backends = [Ours(), sdpa.Flash(), sdpa.Cudnn(), peers.Fa3(), peers.Triton(), Formula()]
    return {backend.name: backend for backend in backends}
