"""Checks of the plain numbers of a call: scale, mask, cap, bounds."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeGuard

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

# A call that leaves window_size alone passes this very object.
OPEN_WINDOW = (-1, -1)

MAX_ROWS = 2**30  # so that positions and their differences fit 32 bits
NO_BOUND = -1


LARGEST_FLOAT32 = 3.4028234663852886e38
SMALLEST_FLOAT32 = 2.0**-126  # with all its bits; the reciprocal of a smaller one is infinite


def check_score(
    softmax_scale: float | None, causal: bool, window_size: Sequence[int], softcap: float
) -> tuple[float | None, int, int, float]:
    """Returns (scale, left, right, softcap) as the operators take them."""
    if softmax_scale is not None:
        softmax_scale = finite("softmax_scale", softmax_scale)
    left = right = -1
    # torch 2.10's dynamo cannot trace `is not` of tuples.
    if is_dynamo_compiling() or window_size is not OPEN_WINDOW:
        left, right = check_window(window_size)
    if causal is not False:
        if causal is not True:
            check_flag("causal", causal)
        right = 0
    if type(softcap) is not float or softcap != 0.0:
        softcap = check_softcap(softcap)
    return softmax_scale, left, right, softcap


def check_flag(name: str, value: object) -> None:
    if value is not True and value is not False:
        raise ValueError(f"{name}: expected True or False, got {value!r}")


def check_window(window_size: Sequence[int]) -> tuple[int, int]:
    try:
        left, right = window_size
        good = type(left) is type(right) is int and left >= -1 and right >= -1
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(
            "window_size: expected two ints (left, right), each >= -1 (-1: no limit on that side), "
            f"got {window_size!r}"
        )
    # A side longer than any sequence limits nothing.
    return (left if left <= MAX_ROWS else -1), (right if right <= MAX_ROWS else -1)


def check_softcap(softcap: float) -> float:
    value = finite("softcap", softcap)
    if value < 0 or 0 < value < SMALLEST_FLOAT32:
        raise ValueError(
            f"softcap: expected 0 (off) or a positive number from {SMALLEST_FLOAT32:.3g} on, "
            f"got {value}"
        )
    return value


def finite(name: str, value: object) -> float:
    if isinstance(value, (Real, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool):
        value = float(value)
        # dynamo cannot trace isfinite of a symbolic float
        if -LARGEST_FLOAT32 <= value <= LARGEST_FLOAT32:
            return value
    got = "a tensor" if isinstance(value, Tensor) else repr(value)
    raise ValueError(f"{name}: expected a number that float32 holds as a finite one, got {got}")


def is_int(value: object) -> TypeGuard[int]:
    """An int of Python or numpy, or a symbol of one; True and False are none."""
    if type(value) is int:
        return True
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def is_plain_bound(value: object) -> bool:
    """Whether an operator takes it as it is."""
    return type(value) is int and 0 <= value <= MAX_ROWS


def check_bound(name: str, value: object) -> int:
    if not is_int(value):
        got = f"a tensor on {value.device}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{name}: expected an int, an upper bound of the lengths of the packed sequences that "
            f"the host knows (reading a tensor would wait for the device), got {got}"
        )
    if isinstance(value, torch.SymInt):
        return NO_BOUND
    if value < 0:
        raise ValueError(f"{name}: expected an int >= 0, got {value}")
    if is_dynamo_compiling():
        # The operators' ints are no symbols: a bound would be baked into the graph. 1 is there
        # anyway: dynamo has no symbol that could be 1.
        return 1 if value == 1 else NO_BOUND
    return min(int(value), MAX_ROWS)
