"""What a backend is.

A backend says why it is not on this machine (`missing`), why it does not take a case (`refuses`),
and otherwise hands over a `Call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from .cases import Case
from .problems import Problem


class Call(NamedTuple):
    """``run(*arguments)`` for arguments out of `rotation`; ``tidy`` brings what it returns into the
    shape of `reference.expected` and is not part of what is measured."""

    run: Callable[..., Any]
    rotation: Sequence[tuple[Tensor, ...]]
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

    def context(self) -> AbstractContextManager[None]:
        """What surrounds all calls, and is not part of what is measured."""
        return nullcontext()
