"""Lengths, prefix sums, cache rows and page ids on the device that are out of range: clamped, so
that the call is that of the nearest value in range; in checked mode refused by row and value."""

import pytest
import torch
from good_calls import CALLS
from test_memory import CANARY

LOWEST, HIGHEST = -(2**31), 2**31 - 1
NEW_TOKENS = ("k_new", "v_new", "rotary_cos", "rotary_sin", "rotary_interleaved")
# call, argument, row (and column), bad values, and the same call with a value in range.
CLAMPED = [
    ("dense", "seqused_k", 1, (-1, LOWEST), {"seqused_k": 0}),
    ("dense", "seqused_k", 0, (9, HIGHEST), {"seqused_k": 8}),
    ("append", "cache_seqlens", 1, (-1, LOWEST), {"cache_seqlens": 0}),
    ("append", "cache_seqlens", 0, (33, HIGHEST), {"cache_seqlens": 32}),
    ("append", "cache_leftpad", 0, (-1, LOWEST), {"cache_leftpad": 0}),
    ("cache", "cache_leftpad", 1, (10, HIGHEST), {"cache_leftpad": 9}),
    ("cache", "cache_batch_idx", 1, (-1, 3, LOWEST, HIGHEST), {"cache_seqlens": 0}),
    ("pages", "cache_seqlens", 1, (-1, LOWEST), {"cache_seqlens": 0}),
    ("pages", "cache_seqlens", 0, (33, HIGHEST), {"cache_seqlens": 32}),
    ("pages", "block_table", (0, 1), (-1, 5, LOWEST, HIGHEST), {"cache_seqlens": 16}),
]
# What comes out is not specified; nothing else is touched.
UNSPECIFIED = [
    ("packed", "cu_seqlens_q", 0, (-1, 1, LOWEST, HIGHEST)),
    ("packed", "cu_seqlens_q", 1, (-1, 10, LOWEST, HIGHEST)),
    ("packed", "cu_seqlens_k", 1, (-1, 13, LOWEST, HIGHEST)),
    ("packed", "cu_seqlens_k", 2, (7, 13, LOWEST, HIGHEST)),
    ("pages", "cu_seqlens_q", 1, (-1, 10, LOWEST, HIGHEST)),
    ("pages", "cu_seqlens_q", 2, (2, 10, LOWEST, HIGHEST)),
]


def call_of(kind, device):
    """(function, arguments) of a good call."""
    situations = {"dense": "flash_fwd", "packed": "flash_fwd, packed"}
    situations["pages"] = "flash_fwd_splitkv, pages"
    function, make = CALLS[situations.get(kind, "flash_fwd_splitkv")]
    given = make(device)
    for name in NEW_TOKENS if kind == "cache" else ():
        del given[name]
    if kind == "pages":
        given["cache_seqlens"] = torch.tensor([20, 20], dtype=torch.int32).to(device)
    return function, {**given, "return_lse": True}


def results(kind, device, changes, row):
    """out between canaries, the lse, and the caches after the call."""
    function, given = call_of(kind, device)
    for name, value in changes.items():
        given[name][row] = value
    count = given["out"].numel()
    memory = torch.full((count + 1024,), CANARY, dtype=torch.bfloat16, device=device)
    given["out"] = memory[512:-512].view_as(given["out"])
    _, lse = function(**given)
    return [memory, lse, *(given[name] for name in ("k_cache", "v_cache") if name in given)]


def row_of(place):
    return place[0] if isinstance(place, tuple) else place


@pytest.mark.parametrize(("kind", "name", "place", "values", "nearest"), CLAMPED)
def test_clamped(kind, name, place, values, nearest, device, monkeypatch):
    monkeypatch.delenv("FLASHATTN_EXT_CHECK", raising=False)
    expected = results(kind, device, nearest, row_of(place))
    for value in values:
        for got, same in zip(results(kind, device, {name: value}, place), expected, strict=True):
            assert torch.equal(got, same), value


@pytest.mark.parametrize(("kind", "name", "place", "values"), UNSPECIFIED)
def test_nothing_else_is_touched(kind, name, place, values, device, monkeypatch):
    monkeypatch.delenv("FLASHATTN_EXT_CHECK", raising=False)
    _, *caches = results(kind, device, {}, place)[1:]
    for value in values:
        memory, _, *same = results(kind, device, {name: value}, place)
        assert (memory[:512] == CANARY).all() and (memory[-512:] == CANARY).all(), value
        assert all(torch.equal(a, b) for a, b in zip(same, caches, strict=True)), value


@pytest.mark.parametrize(
    ("kind", "name", "place", "values"), [*(row[:4] for row in CLAMPED), *UNSPECIFIED]
)
def test_checked_mode_names_row_and_value(kind, name, place, values, device, monkeypatch):
    monkeypatch.setenv("FLASHATTN_EXT_CHECK", "1")
    results(kind, device, {}, place)
    for value in values:
        function, given = call_of(kind, device)
        given[name][place] = value
        before = {n: t.clone() for n, t in given.items() if torch.is_tensor(t)}
        index = ", ".join(map(str, place if isinstance(place, tuple) else (place,)))
        with pytest.raises(ValueError) as refused:
            function(**given)
        assert str(refused.value).startswith(f"{name}[{index}]: expected"), refused.value
        assert f"got {value}" in str(refused.value)
        assert all(torch.equal(given[n], t) for n, t in before.items()), "something was written"
