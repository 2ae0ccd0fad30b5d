"""torch's own kernels, through scaled_dot_product_attention."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .backend import Backend, Call
from .cases import OPEN_WINDOW, Case, Combine, Decode, Mixed, Prefill
from .problems import CombineProblem, PrefillProblem, Problem


class _Sdpa(Backend):
    kernel: SDPBackend

    def refuses(self, case: Case) -> str:
        if isinstance(case, Prefill):
            if case.window != OPEN_WINDOW or case.softcap or case.alibi:
                return "has no window, softcap or ALiBi"
            if case.packed:
                return "takes sequences of one length, not packed ones"
        elif isinstance(case, Mixed):
            return "takes sequences of one length"
        elif isinstance(case, Decode):
            if case.page_size:
                return "reads no pages"
            if case.capacity not in (None, case.kv_len):
                return "reads whole caches only"
            if case.split_size:
                return "has no split size"
        else:
            return "merges no partial results"
        if case.causal and case.seqlen not in (1, case.kv_len):
            return "aligns its causal mask to the first key"
        return ""

    def has_no_kernel(self, error: Exception) -> bool:
        return any(words in str(error) for words in ("No available kernel", "No viable backend"))

    def call(self, problem: Problem) -> Call:
        case = problem.case
        assert not isinstance(problem, CombineProblem)  # refused, as the next ones
        assert not isinstance(case, (Mixed, Combine))
        # One query is the last one, which sees all keys.
        options: dict[str, Any] = {"is_causal": case.causal and case.seqlen > 1}
        if case.heads != case.kv_heads:
            options["enable_gqa"] = True

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, **options)

        # (b, h, s, d), as views
        if isinstance(problem, PrefillProblem):
            operands = tuple(t.transpose(1, 2) for t in (problem.q, problem.k, problem.v))
            return Call(run, [operands], lambda out: out.transpose(1, 2))
        shape = (case.batch, case.seqlen, case.heads, case.head_dim)
        q = problem.q.view(shape).transpose(1, 2)
        rotation = [(q, k.transpose(1, 2), v.transpose(1, 2)) for k, v in problem.rotation]
        return Call(run, rotation, lambda out: out.transpose(1, 2).reshape(problem.q.shape))

    def context(self) -> AbstractContextManager[None]:
        return sdpa_kernel(self.kernel)


class Flash(_Sdpa):
    """FlashAttention-2 on a GPU, and on a CPU what torch has under the same name."""

    name, title = "sdpa-flash", "flash"
    kernel = SDPBackend.FLASH_ATTENTION


class Cudnn(_Sdpa):
    name, title = "sdpa-cudnn", "cuDNN"
    kernel = SDPBackend.CUDNN_ATTENTION

    def missing(self, device: str) -> str:
        if device != "cuda":
            return "needs a GPU"
        return "" if torch.backends.cudnn.is_available() else "torch finds no cuDNN"
