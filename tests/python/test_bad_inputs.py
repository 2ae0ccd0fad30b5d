"""Each argument of each public function, spoilt in every way: refused with the documented exception
by its name, by `supports` too, and nothing was written. The table is bad_inputs.py."""

import inspect
import re

import pytest
import torch
from bad_inputs import SERVED, outcome, spoils
from good_calls import CALLS

import flashattn_ext
from flashattn_ext.flash_attn_interface import flash_attn_with_kvcache

CASES = [(situation, name) for situation, (_, make) in CALLS.items() for name in make("cpu")]


def tensors_of(arguments):
    tensors = (t for t in arguments.values() if torch.is_tensor(t))
    return [t for t in tensors if t.layout is torch.strided and not t.is_meta]


def problem(situation, name, kind, arguments):
    """What a spoilt call does that it should not, or None."""
    function, expected = CALLS[situation][0], outcome(situation, name, kind)
    arguments[name] = spoils(name, arguments)[kind]()
    given = tensors_of(arguments)
    before = [t.clone() for t in given]
    try:
        function(**arguments)
    except Exception as error:
        if expected is SERVED or type(error) is not expected[0]:
            return f"{kind}: expected {expected}, got {error!r}"
        if not re.match(rf"({expected[1]}): \w", str(error)):
            return f"{kind}: expected a message of {expected[1]}, got {error!r}"
        if not all(torch.equal(t, copy) for t, copy in zip(given, before, strict=True)):
            return f"{kind}: an argument has changed"
        said = _what_supports_says(function, arguments)
        return None if said in (None, (False, str(error))) else f"{kind}: supports says {said}"
    return None if expected is SERVED else f"{kind}: expected {expected}, got a result"


def _what_supports_says(function, arguments):
    return flashattn_ext.supports(**arguments) if function is flashattn_ext.flash_fwd else None


@pytest.mark.parametrize(("situation", "name"), CASES)
def test_refused_by_name(situation, name, anywhere, record_property):
    function, make = CALLS[situation]
    kinds = spoils(name, make(anywhere))
    found = [problem(situation, name, kind, make(anywhere)) for kind in kinds]
    found = [text for text in found if text]
    assert not found, "\n".join(found)
    function(**make(anywhere))
    refused = sum(outcome(situation, name, kind) is not SERVED for kind in kinds)
    record_property(f"bad inputs refused on {anywhere}", refused)


# What is not served (test_flash_attn_names_kvcache.py), and the other name of page_table.
LEFT_OUT = {
    "qv", "cu_seqlens_k_new", "rotary_seqlens", "q_descale", "k_descale", "v_descale",
    "attention_chunk", "scheduler_metadata", "pack_gqa", "sm_margin", "block_table",
}  # fmt: skip


@pytest.mark.parametrize("function", {f: None for f, _ in CALLS.values()}, ids=lambda f: f.__name__)
def test_every_argument_is_spoilt(function):
    names = set(inspect.signature(function).parameters)
    spoilt = set().union(*(make("cpu") for f, make in CALLS.values() if f is function))
    left_out = LEFT_OUT if function is flash_attn_with_kvcache else set()
    assert names - left_out == spoilt
