"""FlashAttention-3 and vLLM's Triton kernel, out of a module `peers` if one can be imported.

benchmarks/README.md says which two functions it must have.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .backend import Backend, Call
from .cases import Case, Combine, Prefill
from .problems import CACHE_PAGE, CacheProblem, CombineProblem, PrefillProblem, Problem


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    """The module, or why there is none."""
    try:
        return importlib.import_module("peers"), ""
    except ModuleNotFoundError as error:
        if error.name == "peers":
            return None, "no module `peers` (benchmarks/README.md)"
        return None, f"`peers` does not import: {error}"
    except Exception as error:  # a library of another torch raises all sorts of things
        return None, f"`peers` does not import: {error}".split("\n")[0]


class _Peer(Backend):
    function: str

    def attend(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(_load()[0], self.function)
        return function

    def call(self, problem: Problem) -> Call:
        assert not isinstance(problem, CombineProblem)  # refused
        if isinstance(problem, PrefillProblem):
            return self._prefill(problem)
        return self._over_cache(problem)

    def _prefill(self, problem: PrefillProblem) -> Call:
        raise NotImplementedError

    def _over_cache(self, problem: CacheProblem) -> Call:
        raise NotImplementedError

    def missing(self, device: str) -> str:
        if device != "cuda":
            return "needs a GPU"
        module, reason = _load()
        if module is not None and not hasattr(module, self.function):
            return f"`peers` has no {self.function}"
        return reason

    def refuses(self, case: Case) -> str:
        if isinstance(case, Combine):
            return "merges no partial results"
        if getattr(case, "split_size", None):
            return "chooses its splits itself"
        return ""


class Fa3(_Peer):
    """FlashAttention-3 on packed input: what vLLM builds of it takes no other."""

    name = "fa3"
    title = "FA3"
    function = "fa3"

    def missing(self, device: str) -> str:
        reason = super().missing(device)
        if not reason and torch.cuda.get_device_capability()[0] != 9:
            reason = "needs a Hopper GPU (sm_90)"
        return reason

    def refuses(self, case: Case) -> str:
        if isinstance(case, Prefill) and case.alibi:
            return "has no ALiBi"
        return super().refuses(case)

    def _prefill(self, problem: PrefillProblem) -> Call:
        case, attend = problem.case, self.attend()
        options = {
            "cu_seqlens_q": problem.starts(case.seqlen), "max_seqlen_q": case.seqlen,
            "cu_seqlens_k": problem.starts(case.kv_len), "max_seqlen_k": case.kv_len,
            "causal": case.causal, "window": case.window, "softcap": case.softcap,
        }  # fmt: skip

        def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return attend(q, k, v, **options)

        shape = problem.q.shape
        return Call(run, [problem.packed()], lambda result: result[0].view(shape))

    def _over_cache(self, problem: CacheProblem) -> Call:
        attend = self.attend()
        options = {} if problem.table is None else {"block_table": problem.table}

        def run(k: Tensor, v: Tensor) -> Any:
            return attend(
                problem.q, k, v, cu_seqlens_q=problem.starts, seqused_k=problem.used,
                max_seqlen_q=problem.longest_query, max_seqlen_k=problem.longest,
                causal=problem.case.causal, num_splits=0, **options,
            )  # fmt: skip

        return Call(run, problem.rotation, lambda result: result[0])


class Triton(_Peer):
    """vLLM's `unified_attention`: causal, over pages."""

    name = "triton"
    title = "Triton"
    function = "unified_attention"

    def refuses(self, case: Case) -> str:
        if not isinstance(case, Combine):
            if not case.causal and getattr(case, "seqlen", None) != 1:
                return "is causal only"
            if isinstance(case, Prefill) and case.kv_len % CACHE_PAGE:
                return f"reads pages of {CACHE_PAGE} tokens"
            if not isinstance(case, Prefill) and not case.page_size:
                return "reads pages only"
        return super().refuses(case)

    def _prefill(self, problem: PrefillProblem) -> Call:
        """The keys and values as they lie, seen as pages in order."""
        case = problem.case
        q = problem.q.flatten(0, 1)
        pages = case.kv_len // CACHE_PAGE
        k, v = (
            t.view(case.batch * pages, CACHE_PAGE, case.kv_heads, case.head_dim)
            for t in (problem.k, problem.v)
        )
        table = torch.arange(case.batch * pages, dtype=torch.int32, device=q.device)
        options = {
            "cu_seqlens_q": problem.starts(case.seqlen), "max_seqlen_q": case.seqlen,
            "seqused_k": problem.ints([case.kv_len] * case.batch), "max_seqlen_k": case.kv_len,
            "block_table": table.view(case.batch, pages),
            "window": case.window, "softcap": case.softcap, "alibi_slopes": problem.slopes,
        }  # fmt: skip
        attend = self.attend()

        def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return attend(q, k, v, **options)

        return Call(run, [(q, k, v)], lambda out: out.view(problem.q.shape))

    def _over_cache(self, problem: CacheProblem) -> Call:
        attend = self.attend()

        def run(k: Tensor, v: Tensor) -> Any:
            return attend(
                problem.q, k, v, cu_seqlens_q=problem.starts, seqused_k=problem.used,
                max_seqlen_q=problem.longest_query, max_seqlen_k=problem.longest,
                block_table=problem.table,
            )  # fmt: skip

        return Call(run, problem.rotation, lambda out: out)
