"""Refused calls of flash_combine and merge_attention_states, the same on cpu, meta and cuda."""

import re

import pytest
import torch
from test_errors import BF16, FP16

from flashattn_ext import flash_combine, merge_attention_states

F32 = torch.float32


def partial(*shape, dtype=F32):
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


GOOD = {"out_partial": partial(3, 2, 5, 4, 64), "lse_partial": partial(3, 2, 4, 5)}
COMBINE = [
    ("out_partial", {"out_partial": partial(3, 5, 64)}, "(3, 5, 64)"),
    ("out_partial", {"out_partial": partial(3, 2, 5, 4, 64, dtype=torch.float64)}, "float64"),
    ("out_partial", {"out_partial": lambda d: partial(3, 2, 5, 64, 4)(d).mT}, "stride"),
    ("out_partial", {"out_partial": lambda d: None}, "None"),
    ("lse_partial", {"lse_partial": partial(3, 2, 5, 4)}, "(3, 2, 5, 4)"),
    ("lse_partial", {"lse_partial": partial(2, 2, 4, 5)}, "(2, 2, 4, 5)"),
    ("lse_partial", {"lse_partial": partial(3, 2, 4, 5, dtype=BF16)}, "bfloat16"),
    ("out", {"out": partial(2, 5, 4, 32)}, "(2, 5, 4, 32)"),
    ("out", {"out": partial(2, 5, 4, 64, dtype=torch.float64)}, "float64"),
    ("out", {"out": lambda d: partial(2, 5, 1, 64)(d).expand(2, 5, 4, 64)}, "stride"),
    ("out_dtype", {"out_dtype": lambda d: torch.int32}, "int32"),
    ("out_dtype", {"out_dtype": lambda d: "bf16"}, "'bf16'"),
    ("out", {"out_dtype": lambda d: FP16, "out": partial(2, 5, 4, 64)}, "float32"),
]


@pytest.mark.parametrize(
    ("name", "changes", "got"), COMBINE, ids=[f"{n}-{g}" for n, _, g in COMBINE]
)
def test_combine_refuses(name, changes, got, anywhere):
    arguments = {key: make(anywhere) for key, make in (GOOD | changes).items()}
    with pytest.raises((ValueError, NotImplementedError)) as error:
        flash_combine(arguments.pop("out_partial"), arguments.pop("lse_partial"), **arguments)
    message = str(error.value)
    assert re.search(rf"\b{name}\b", message) and got in message
    good = {key: make(anywhere) for key, make in GOOD.items()}
    out, lse = flash_combine(*good.values())
    assert out.shape == (2, 5, 4, 64) and lse.shape == (2, 4, 5)


MERGE = [
    ("out_a", 0, partial(5, 64), "(5, 64)"),
    ("lse_a", 1, partial(2, 5, 4), "(2, 5, 4)"),
    ("out_b", 2, partial(2, 5, 4, 32), "(2, 5, 4, 32)"),
    ("lse_b", 3, partial(2, 4, 5, dtype=FP16), "float16"),
    ("out_a", 0, partial(2, 5, 4, 64, dtype=torch.int8), "int8"),
]


@pytest.mark.parametrize(
    ("name", "place", "make", "got"), MERGE, ids=[f"{m[0]}-{m[3]}" for m in MERGE]
)
def test_merge_refuses(name, place, make, got, anywhere):
    good = [partial(2, 5, 4, 64)(anywhere), partial(2, 4, 5)(anywhere)] * 2
    assert merge_attention_states(*good)[0].shape == (2, 5, 4, 64)
    good[place] = make(anywhere)
    with pytest.raises((ValueError, NotImplementedError)) as error:
        merge_attention_states(*good)
    assert re.search(rf"\b{name}\b", str(error.value)) and got in str(error.value)


def test_gradients_of_parts_are_refused(anywhere):
    out, lse = GOOD["out_partial"](anywhere).requires_grad_(), GOOD["lse_partial"](anywhere)
    with pytest.raises(NotImplementedError, match="no_grad"):
        flash_combine(out, lse)
    with torch.no_grad():
        assert not flash_combine(out, lse)[0].requires_grad
