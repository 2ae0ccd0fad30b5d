"""Which operator a call runs, and what it hands on: only what is not a default, and all of that."""

import pytest
import torch
from cases import ints
from test_op_refusals import B, CAPACITY, HK, D, S, bf16
from test_plain_calls import dense, pages

import flashattn_ext
from flashattn_ext import _ops


def handed_on(monkeypatch, function, *operands, **options):
    """The operator that a call runs, and the arguments that it gets, by name."""
    calls = []
    with monkeypatch.context() as patch:
        for name, arguments in _ops._ARGUMENTS.items():
            results = (operands[0],) * 2 if name.endswith("lse") else operands[0]

            def note(*values, _name=name, _arguments=arguments, _results=results):
                calls.append((_name, dict(zip(_arguments, values, strict=False))))
                return _results

            patch.setattr(_ops, name, note)
        function(*operands, **options)
    (call,) = calls
    return call


def defaults_of(name):
    schema = getattr(torch.ops.flashattn_ext, name).default._schema
    return {a.name: a.default_value for a in schema.arguments if a.has_default_value()}


def test_operators_get_few_arguments(monkeypatch):
    """Each costs time, and so does an lse that nobody asked for."""
    function, operands, options = dense("cpu")
    name, given = handed_on(monkeypatch, function, *operands)
    assert name == "fwd" and list(given) == ["q", "k", "v"]
    name, given = handed_on(monkeypatch, function, *operands, causal=True, return_lse=True)
    assert name == "fwd_lse" and list(given)[3:] == ["window_right"]
    function, operands, options = pages("cpu")
    basic = ["cache_seqlens", "block_table", "window_right"]
    for causal in (False, True):
        name, given = handed_on(monkeypatch, function, *operands, **options, causal=causal)
        assert name == "fwd_splitkv_basic" and list(given)[3:] == basic
        assert given["window_right"] == (0 if causal else -1)
    q, ends = operands[0].flatten(0, 1), ints([0, S, 2 * S], "cpu")
    packed = {"cu_seqlens_q": ends, "max_seqlen_q": S}
    name, given = handed_on(monkeypatch, function, q, *operands[1:], **options, **packed)
    assert name == "fwd_splitkv_basic"
    assert list(given)[3:] == [*basic, *packed] and given["max_seqlen_q"] == S
    for others in ({"num_splits": 2}, {"softcap": 1.0}, {"window_size": (3, -1)}):
        name, given = handed_on(monkeypatch, function, *operands, **options, **others)
        assert name == "fwd_splitkv" and list(given)[3:5] == basic[:2]


def lengths(*values):
    return ints(values, "cpu")


ROWS = {"cu_seqlens_q": lengths(0, 3, 6), "max_seqlen_q": 3}
KEYS = {"cu_seqlens_k": lengths(0, 8, 16), "max_seqlen_k": 8}
COMMON = [
    {"softmax_scale": 0.5}, {"causal": True}, {"window_size": (5, -1)}, {"softcap": 2.0},
    {"alibi_slopes": torch.ones(4)}, {"sinks": torch.ones(4)},
]  # fmt: skip
OF_CACHES = [
    {"cache_seqlens": 3}, {"cache_seqlens": lengths(1, 2)}, ROWS, {"num_splits": 3},
    {"split_size": 64}, {"cache_batch_idx": lengths(1, 0)}, {"cache_leftpad": lengths(0, 1)},
]  # fmt: skip


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("out", [False, True])
def test_no_option_gets_lost(out, return_lse, append, monkeypatch):
    """Given alone, each option reaches the operator; all others are the operator's defaults."""
    cpu = "cpu"
    k = bf16(cpu, B, CAPACITY, HK, D)
    new = {name: bf16(cpu, B, 1, HK, D) for name in ("k_new", "v_new")} if append else {}
    dense_calls = [*COMMON, {"seqused_k": lengths(3, 4)}, {**ROWS, **KEYS}]
    calls = [(flashattn_ext.flash_fwd, {}, option) for option in dense_calls if not append]
    for cached in ({"cache_seqlens": 0, **new}, {"cache_seqlens": lengths(2, 1), **new}):
        calls += [(flashattn_ext.flash_fwd_splitkv, cached, o) for o in [*COMMON, *OF_CACHES]]
    for function, options, option in calls:
        q = bf16(cpu, B, S, 4, D)
        q = q.flatten(0, 1) if "cu_seqlens_q" in option else q
        keys = k.flatten(0, 1) if "cu_seqlens_k" in option else k
        result = torch.empty_like(q) if out else None
        name, given = handed_on(
            monkeypatch, function, q, keys, keys.clone(), **{**options, **option},
            out=result, return_lse=return_lse,
        )  # fmt: skip
        assert name.endswith("_out") is out and name.endswith("_lse") is (return_lse and not out)
        expected = dict(option)
        if expected.pop("causal", False):
            expected["window_right"] = 0
        if "window_size" in expected:
            expected["window_left"] = expected.pop("window_size")[0]
        if isinstance(expected.get("cache_seqlens"), int):
            expected["cache_seqlen"] = expected.pop("cache_seqlens")
        for argument, default in defaults_of(name).items():
            value = given.get(argument, default)
            wanted = expected.pop(argument, default)
            assert value is wanted or value == wanted, (option, argument)
        assert all(given[argument] is value for argument, value in expected.items())
