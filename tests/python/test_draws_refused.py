"""Drawn calls, each with one argument spoilt: `supports` and the call agree, and what is refused is
refused by an argument's name, with all memory as it was."""

import random
import re

import draws
import drawn_calls
import pytest
import torch
from bad_inputs import spoils

from flashattn_ext import flash_fwd, flash_fwd_splitkv, supports

CALLS = 1000
OURS = {
    "flash_fwd": (flash_fwd, "k", "v"),
    "flash_fwd_splitkv": (flash_fwd_splitkv, "k_cache", "v_cache"),
}


def spoilt(n, device):
    """(function, arguments, what was spoilt) of drawn call `n`; None where it is not ours."""
    point = draws.kind_of("attention", device).point(n)
    if point["entry"] not in OURS:
        return None
    function, k_name, v_name = OURS[point["entry"]]
    call = drawn_calls.build(point, n, device)
    options = {name: value for name, value in call.options.items() if value is not None}
    given = {"q": call.q, k_name: call.k, v_name: call.v, **options, "out": call.nan_out()}
    source = random.Random(n)
    name = source.choice(list(given))
    kinds = spoils(name, given)
    kind = source.choice(list(kinds))
    try:
        given[name] = kinds[kind]()
    except (IndexError, RuntimeError):  # of a tensor without elements there is no first one
        return None
    return function, given, f"{name}, {kind}"


def refusal(function, given):
    """The message of a call that is refused, or None."""
    tensors = [t for t in given.values() if torch.is_tensor(t) and t.layout is torch.strided]
    before = [t.clone() for t in tensors if not t.is_meta]
    try:
        function(**given)
    except (ValueError, NotImplementedError) as error:
        after = [t for t in tensors if not t.is_meta]
        for tensor, copy in zip(after, before, strict=True):
            assert torch.equal(tensor.isnan(), copy.isnan())
            assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())
        return str(error)
    return None


@pytest.mark.parametrize("chunk", range(2))
def test_spoilt_calls(chunk, device, record_property):
    refused = served = 0
    for n in range(chunk, CALLS, 2):
        made = spoilt(n, device)
        if made is None:
            continue
        function, given, what = made
        message = refusal(function, given)
        if function is flash_fwd:
            assert supports(**given) == (message is None, message or ""), f"call {n}: {what}"
        if message is None:
            served += 1
            continue
        refused += 1
        names = re.match(r"[a-z_, ]+(?=: )", message)
        assert names and set(names.group().split(", ")) <= set(given), f"{n}: {what}: {message}"
    assert refused > 2 * served > 0
    record_property(f"spoilt calls refused on {device}", refused)


def test_supports_says_yes_to_drawn_calls(device):
    kind = draws.kind_of("attention", device)
    for n in range(CALLS):
        point = kind.point(n)
        if point["entry"] == "flash_fwd":
            call = drawn_calls.build(point, n, device)
            assert supports(call.q, call.k, call.v, **call.options) == (True, "")
