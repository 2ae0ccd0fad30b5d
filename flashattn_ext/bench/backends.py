"""Who computes: flashattn_ext and the kernels beside it, each behind the same three questions.

A backend says why it is not on this machine (`missing`), why it does not take a case (`refuses`),
and otherwise hands over a `Call`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor

import flashattn_ext

from .cases import Case, Combine
from .problems import CombineProblem, PrefillProblem, Problem


class Call(NamedTuple):
    """``run(*arguments)`` for arguments out of `rotation`; ``tidy`` brings what it returns into the
    shape of `reference.expected` and is not part of what is measured."""

    run: Callable
    rotation: list[tuple]
    tidy: Callable[..., Tensor]


class Backend:
    """What the others inherit: here, taking everything."""

    name = title = ""

    def missing(self, device: str) -> str:
        """Why this backend cannot run on `device`, or ""."""
        return ""

    def refuses(self, case: Case) -> str:
        """Why it does not take `case`, or ""."""
        return ""

    def has_no_kernel(self, error: Exception) -> bool:
        """Whether `error` says no more than that the case is none of this backend's."""
        return False

    def call(self, problem: Problem) -> Call:
        raise NotImplementedError

    def context(self) -> AbstractContextManager:
        """What surrounds all calls, and is not part of what is measured."""
        return nullcontext()


class Ours(Backend):
    name, title = "ours", "ours"

    def call(self, problem: Problem) -> Call:
        if isinstance(problem, CombineProblem):
            return Call(flashattn_ext.flash_combine, problem.rotation, lambda result: result[0])
        if isinstance(problem, PrefillProblem):
            return self._prefill(problem)
        case = problem.case
        options = {} if problem.table is None else {"block_table": problem.table}
        if case.split_size:
            options["split_size"] = case.split_size

        def run(k: Tensor, v: Tensor) -> Tensor:
            return flashattn_ext.flash_fwd_splitkv(
                problem.q, k, v, cache_seqlens=problem.used, cu_seqlens_q=problem.starts,
                max_seqlen_q=problem.longest_query, causal=case.causal, **options,
            )  # fmt: skip

        return Call(run, problem.rotation, lambda out: out)

    def _prefill(self, problem: PrefillProblem) -> Call:
        case = problem.case
        options = {"causal": case.causal, **problem.scores}
        operands = (problem.q, problem.k, problem.v)
        if case.packed:
            operands = problem.packed()
            options |= {
                "cu_seqlens_q": problem.starts(case.seqlen), "max_seqlen_q": case.seqlen,
                "cu_seqlens_k": problem.starts(case.kv_len), "max_seqlen_k": case.kv_len,
            }  # fmt: skip

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flashattn_ext.flash_fwd(q, k, v, **options)

        return Call(run, [operands], lambda out: out.view(problem.q.shape))


class Formula(Backend):
    """`flash_combine` as one would write it in PyTorch."""

    name, title = "torch", "torch"

    def refuses(self, case: Case) -> str:
        return "" if isinstance(case, Combine) else "only writes out the formula of combine"

    def call(self, problem: CombineProblem) -> Call:
        def run(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
            lse = lse_partial.logsumexp(0)
            weights = (lse_partial - lse).exp().transpose(2, 3).unsqueeze(-1)
            return (weights * out_partial).sum(0).to(out_partial.dtype), lse

        return Call(run, problem.rotation, lambda result: result[0])


def by_name() -> dict[str, Backend]:
    """All backends, in the order in which results show them."""
    from . import peers, sdpa

    backends = [Ours(), sdpa.Flash(), sdpa.Cudnn(), peers.Fa3(), peers.Triton(), Formula()]
    return {backend.name: backend for backend in backends}
