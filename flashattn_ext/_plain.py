"""Which calls go to the operator without checks in Python.

The operator refuses all that the checks refuse, before anything is written, but in fewer words
(tests/python/test_plain_calls.py). So it gets a plain call at once, and the checks run when it has
refused, to say what is wrong. A call is not plain where an operator cannot see what they do.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from . import _lengths
from ._operand_checks import forward_ad_active


def is_plain(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> bool:
    """Whether neither gradients, tracing, a subclass nor the checked mode can play a part.
    ``others`` are those of the call that may require a gradient too."""
    if is_dynamo_compiling() or _lengths.asked_for() or forward_ad_active():
        return False
    if not type(q) is type(k) is type(v) is Tensor:
        return False
    if is_grad_enabled():
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return False
        for tensor in others:
            if tensor is not None and getattr(tensor, "requires_grad", True):
                return False
    return True


def entry(operator: Callable[..., Any]) -> Callable[..., Any]:
    """What torch's Python function around an operator calls; a plain call need not pay for it."""
    try:
        function: Callable[..., Any] = operator._op  # type: ignore[attr-defined]
    except AttributeError:  # a profiler's range
        return operator
    return function


def explain(check: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises what ``check`` has to say of a call that the operator has refused, if anything. What
    it takes is in ``given``, by name."""
    arguments = {name: given[name] for name in signature(check).parameters}
    try:
        check(**arguments)
    except (ValueError, NotImplementedError) as reason:
        raise reason from None
    except RuntimeError:
        pass  # of a tensor that the checks cannot look into either
