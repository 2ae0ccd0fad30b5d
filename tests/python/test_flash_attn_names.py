"""flash-attn's names: their signatures, and each of their arguments against the float64 oracle."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from caches import packed_cache
from cases import HALF_DTYPES, dense, ints, packed
from reference import Rule, assert_close_to_reference, attend, merge

import flashattn_ext.flash_attn_interface as flash_attn

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

# Signatures, as data. Source: flash_attn/flash_attn_interface.py of flash-attn 2.8.3, and
# hopper/flash_attn_interface.py for what FlashAttention-3 adds.

SCORE = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {
    "flash_attn_func": (("q", "k", "v"), SCORE),
    "flash_attn_kvpacked_func": (("q", "kv"), SCORE),
    "flash_attn_qkvpacked_func": (("qkv",), SCORE),
    "flash_attn_varlen_func": (("q", "k", "v", *VARLEN), SCORE | {"block_table": None}),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *VARLEN), SCORE),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), SCORE),
    "flash_attn_with_kvcache": (
        ("q", "k_cache", "v_cache"),
        {
            "k": None,
            "v": None,
            "rotary_cos": None,
            "rotary_sin": None,
            "cache_seqlens": None,
            "cache_batch_idx": None,
            "cache_leftpad": None,
            "block_table": None,
            "softmax_scale": None,
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
        },
    ),
    "flash_attn_combine": (("out_partial", "lse_partial"), {"out": None, "out_dtype": None}),
}
KVCACHE_3 = {
    "k": None,
    "v": None,
    "qv": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "page_table": None,
    "cu_seqlens_q": None,
    "cu_seqlens_k_new": None,
    "max_seqlen_q": None,
    "rotary_seqlens": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "softcap": 0.0,
    "rotary_interleaved": True,
    "scheduler_metadata": None,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
    "return_softmax_lse": False,
}


def parameters(name, *kinds):
    signature = inspect.signature(getattr(flash_attn, name))
    return {p.name: p.default for p in signature.parameters.values() if p.kind in kinds}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    required, optional = SIGNATURES[name]
    expected = dict.fromkeys(required, inspect.Parameter.empty) | optional
    got = parameters(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert list(got.items()) == list(expected.items())


def test_keywords_of_flash_attention_3():
    """flash_attn_with_kvcache takes every name of version 3, with its default, and no others."""
    optional = SIGNATURES["flash_attn_with_kvcache"][1]
    added = parameters("flash_attn_with_kvcache", inspect.Parameter.KEYWORD_ONLY)
    assert added == {n: default for n, default in KVCACHE_3.items() if n not in optional}
    shared = optional.keys() & KVCACHE_3.keys()
    assert {n: optional[n] for n in shared} == {n: KVCACHE_3[n] for n in shared}
    for name in SIGNATURES.keys() - {"flash_attn_with_kvcache"}:
        assert not parameters(name, inspect.Parameter.KEYWORD_ONLY), name


def test_every_name_is_public_and_says_what_differs():
    assert sorted(flash_attn.__all__) == sorted(SIGNATURES)
    for name in SIGNATURES:
        text = " ".join(getattr(flash_attn, name).__doc__.split())
        assert "ifferences from" in text, name
        assert "-inf" in text, name
        for parameter in inspect.signature(getattr(flash_attn, name)).parameters:
            assert parameter in text or "The others" in text, (name, parameter)


# Calls: cases.py and caches.py draw the inputs, the function under test runs on them


def score_of(call):
    options, case = call.options, call.case
    return {
        "softmax_scale": case.scale,
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "alibi_slopes": options.get("alibi_slopes"),
    }


def arguments_of(name, call):
    """The positional arguments of a function, out of a case that says the same."""
    o = call.options
    lengths = [o.get(key) for key in VARLEN] if call.case.packed else []
    if "qkvpacked" in name:
        return [torch.stack([call.q, call.k, call.v], dim=-3), *lengths[::2]]
    if "kvpacked" in name:
        return [call.q, torch.stack([call.k, call.v], dim=-3), *lengths]
    return [call.q, call.k, call.v, *lengths]


def run(name, call, **changes):
    function = getattr(flash_attn, name)
    return function(*arguments_of(name, call), **score_of(call) | changes)


def compare(call, out, lse):
    """Without the rows past the last sequence, which are unspecified here."""
    assert out.shape == call.q.shape and out.dtype == call.q.dtype
    assert lse.shape == call.nan_lse().shape and lse.is_contiguous()
    rule = call.case.rule()
    for seq, (out_n, lse_n) in zip(call.sequences, call.per_sequence(out, lse), strict=True):
        assert_close_to_reference(out_n, lse_n, seq, rule, lse_tolerance=call.lse_tolerance)


def same(call, left, right):
    """Bit by bit, in the rows of the sequences."""
    pairs = zip(call.per_sequence(left, left), call.per_sequence(right, right), strict=True)
    return all(torch.equal(a, b) for (a, _), (b, _) in pairs)


DENSE = dense(2, 33, 33, heads=(4, 4))
GROUPED = dense(2, 21, 50, heads=(4, 2))
PACKED = packed((33, 33), (7, 7), (0, 0), heads=(4, 4), tail=0)
PACKED_GROUPED = packed((33, 50), (1, 70), (9, 3), (0, 5), heads=(6, 2))
CASES = {
    "flash_attn_func": GROUPED,
    "flash_attn_kvpacked_func": GROUPED,
    "flash_attn_qkvpacked_func": DENSE,
    "flash_attn_varlen_func": PACKED_GROUPED,
    "flash_attn_varlen_kvpacked_func": PACKED_GROUPED,
    "flash_attn_varlen_qkvpacked_func": PACKED,
}
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3)},
    "causal-window": {"causal": True, "window": (9, -1)},
    "softcap": {"softcap": 15.0},
    "scale": {"scale": 0.3},
    "alibi-h": {"alibi": "h", "causal": True},
    "alibi-bh": {"alibi": "bh"},
    "fp16": {"dtype": torch.float16},
    "d-20": {"d": 20},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_attention(name, option, device):
    call = CASES[name].but(**OPTIONS[option]).build(device)
    out, lse, s_dmask = run(name, call, return_attn_probs=True)
    compare(call, out, lse)
    assert s_dmask.shape == (0,) and s_dmask.dtype == out.dtype and s_dmask.device == out.device
    alone = run(name, call)
    assert isinstance(alone, torch.Tensor) and same(call, alone, out)


@pytest.mark.parametrize("name", CASES)
def test_float32_on_the_cpu(name):
    call = CASES[name].but(dtype=torch.float32).build("cpu")
    compare(call, *run(name, call, return_attn_probs=True)[:2])


@pytest.mark.parametrize("name", CASES)
def test_positions_of_the_arguments(name, device):
    """All arguments in flash-attn's order give what they give by keyword."""
    call = CASES[name].but(causal=True, softcap=15.0, scale=0.3, window=(20, -1)).build(device)
    expected = run(name, call, return_attn_probs=True)
    values = score_of(call) | {"dropout_p": 0.0, "deterministic": True, "return_attn_probs": True}
    ordered = [values[key] for key in SCORE]
    got = getattr(flash_attn, name)(*arguments_of(name, call), *ordered)
    assert same(call, got[0], expected[0]) and got[2].shape == (0,)
    compare(call, *got[:2])


@pytest.mark.parametrize("name", CASES)
def test_deterministic_is_true_already(name, device):
    call = CASES[name].build(device)
    first, *others = (run(name, call, deterministic=flag) for flag in (False, True, True))
    assert all(same(call, first, other) for other in others)


@pytest.mark.parametrize("name", CASES)
def test_dropout_is_refused(name, device):
    call = CASES[name].build(device)
    run(name, call, dropout_p=0)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: only 0\.0 is served, got 0\.1$"):
        run(name, call, dropout_p=0.1)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_refused(name, device):
    call = CASES[name].build(device)
    positional = arguments_of(name, call)
    positional[0].requires_grad_()
    function = getattr(flash_attn, name)
    with pytest.raises(NotImplementedError, match="requires a gradient.*no_grad"):
        function(*positional)
    with torch.no_grad():
        assert not function(*positional).requires_grad


def test_rows_without_a_key(device):
    """Four keys, nine queries, causal: five rows see nothing."""
    call = dense(1, 9, 4, heads=(2, 1), causal=True).build(device)
    out, lse, _ = run("flash_attn_func", call, return_attn_probs=True)
    compare(call, out, lse)
    assert (lse[0, :, :5] == -torch.inf).all() and lse[0, :, 5:].isfinite().all()
    assert (out[0, :5] == 0).all()


def test_other_strides_in_the_last_dim_are_copied(device):
    call = GROUPED.build(device)
    expected = run("flash_attn_func", call)
    for t in ("q", "k", "v"):
        turned = getattr(call, t).transpose(-1, -2).contiguous().transpose(-1, -2)
        assert turned.stride(-1) != 1
        setattr(call, t, turned)
    assert torch.equal(run("flash_attn_func", call), expected)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_packed_tensors_are_not_copied(dtype, device, monkeypatch):
    """The views of qkv reach flash_fwd as they are."""
    seen = []
    dense_module = inspect.getmodule(flash_attn.flash_attn_func)
    flash_fwd = dense_module.flash_fwd
    monkeypatch.setattr(
        dense_module, "flash_fwd", lambda *qkv, **o: seen.extend(qkv) or flash_fwd(*qkv, **o)
    )
    qkv = torch.randn(2, 9, 3, 2, 32, device=device).to(dtype)
    flash_attn.flash_attn_qkvpacked_func(qkv)
    assert [t.data_ptr() for t in seen] == [qkv[:, :, part].data_ptr() for part in range(3)]


BAD_PACKED = {
    "flash_attn_qkvpacked_func": ("qkv", (2, 9, 2, 2, 32), r"\(b, s, 3, heads, d\)"),
    "flash_attn_kvpacked_func": ("kv", (2, 9, 3, 2, 32), r"\(b, sk, 2, heads, d\)"),
    "flash_attn_varlen_qkvpacked_func": ("qkv", (9, 2, 32), r"\(total, 3, heads, d\)"),
    "flash_attn_varlen_kvpacked_func": ("kv", (2, 9, 2, 2, 32), r"\(total_k, 2, heads, d\)"),
}


@pytest.mark.parametrize("name", BAD_PACKED)
def test_packed_tensors_of_other_shapes(name, device):
    argument, shape, expected = BAD_PACKED[name]
    call = CASES[name].build(device)
    positional = arguments_of(name, call)
    place = list(inspect.signature(getattr(flash_attn, name)).parameters).index(argument)
    for wrong in (torch.zeros(shape, device=device), None, [1]):
        positional[place] = wrong
        word = expected if isinstance(wrong, torch.Tensor) else "a torch.Tensor"
        with pytest.raises(ValueError, match=rf"^{argument}: expected {word}"):
            getattr(flash_attn, name)(*positional)


# flash_attn_varlen_func over pages

PAGED = packed_cache((33, 50), (1, 70), (9, 3), (0, 5), heads=(6, 2), page=16)


def run_pages(call, **changes):
    o = call.options
    starts = torch.nn.functional.pad(o["cache_seqlens"].cumsum(0), (1, 0)).int()
    given = {"block_table": o["block_table"]} | score_of(call) | changes
    return flash_attn.flash_attn_varlen_func(
        call.q, call.k, call.v, o["cu_seqlens_q"], given.pop("cu_seqlens_k", starts),
        o["max_seqlen_q"], given.pop("max_seqlen_k", 70), **given,
    )  # fmt: skip


@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "d-20"])
@pytest.mark.parametrize("page", [16, 7, 256])
def test_varlen_over_pages(page, option, device):
    call = PAGED.but(page=page, **OPTIONS[option]).build(device)
    out, lse, s_dmask = run_pages(call, return_attn_probs=True)
    compare(call, out, lse)
    assert s_dmask.shape == (0,)
    assert same(call, run_pages(call), out)


def test_varlen_over_pages_refuses(device):
    call = PAGED.build(device)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        run_pages(call, dropout_p=0.5)
    with pytest.raises(ValueError, match=r"cu_seqlens_k: expected shape \(5,\), got \(4,\)"):
        run_pages(call, cu_seqlens_k=ints([0, 1, 2, 3], device))
    with pytest.raises(ValueError, match="cu_seqlens_k: expected a 1-D int32"):
        run_pages(call, cu_seqlens_k=ints([0, 1, 2, 3, 4], device).long())
    with pytest.raises(ValueError, match="max_seqlen_k: expected an int"):
        run_pages(call, max_seqlen_k=None)
    with pytest.raises(ValueError, match="block_table: expected int32"):
        run_pages(call, block_table=call.options["block_table"].long())


def test_block_table_of_other_strides(device):
    call = PAGED.build(device)
    table = call.options["block_table"].t().contiguous().t()
    assert table.stride(-1) != 1
    out, lse, _ = run_pages(call, block_table=table, return_attn_probs=True)
    compare(call, out, lse)


# flash_attn_combine


def parts(device, packed_rows, dtype=torch.float32):
    """Three results over disjoint keys, one of them empty, as FlashAttention-3 has them."""
    torch.manual_seed(0)
    shape = (3, 7, 4, 64) if packed_rows else (3, 2, 7, 4, 64)
    out = torch.randn(shape, device=device).to(dtype)
    lse = torch.randn(shape[:-1], device=device) * 3
    lse[1] = -torch.inf
    out[1] = torch.nan
    return out, lse


@pytest.mark.parametrize("packed_rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_combine(dtype, packed_rows, device):
    out_partial, lse_partial = parts(device, packed_rows)
    expected, expected_lse = merge(out_partial, lse_partial)
    out, lse = flash_attn.flash_attn_combine(out_partial, lse_partial)
    assert out.dtype == torch.float32 and lse.shape == lse_partial.shape[1:]
    assert lse.transpose(-1, -2).is_contiguous()  # as FlashAttention-3 allocates it
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)

    rounded, _ = flash_attn.flash_attn_combine(out_partial, lse_partial, None, dtype)
    assert torch.equal(rounded, out.to(dtype))
    given = torch.empty_like(out, dtype=dtype)
    result, _ = flash_attn.flash_attn_combine(out_partial, lse_partial, given)
    assert result is given and torch.equal(given, rounded)

    lowered = out_partial.to(dtype)
    low, _ = flash_attn.flash_attn_combine(lowered, lse_partial, out_dtype=torch.float32)
    expected, _ = merge(lowered, lse_partial)
    torch.testing.assert_close(low.double(), expected, atol=1e-5, rtol=1e-5)


def test_combine_of_flash_attn_func(device):
    """softmax_lse of the other functions, heads first, is passed with its last dims swapped."""
    call = dense(2, 9, 60, heads=(4, 2)).build(device)
    halves = [
        flash_attn.flash_attn_func(call.q, call.k[:, s], call.v[:, s], return_attn_probs=True)
        for s in (slice(0, 25), slice(25, 60))
    ]
    outs, lses, _ = zip(*halves, strict=True)
    out, lse = flash_attn.flash_attn_combine(
        torch.stack(outs), torch.stack(lses).transpose(-1, -2), out_dtype=torch.float32
    )
    for n, seq in enumerate(call.sequences):
        expected, expected_lse = attend(seq, Rule(64**-0.5))
        torch.testing.assert_close(out[n].double(), expected, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse[n].t().double(), expected_lse, atol=1e-4, rtol=0)


def test_combine_refuses_heads_before_rows(device):
    out_partial, lse_partial = parts(device, False)
    with pytest.raises(
        ValueError, match=r"^lse_partial: expected shape \(3, 2, 7, 4\), heads last"
    ):
        flash_attn.flash_attn_combine(out_partial, lse_partial.transpose(-1, -2))
    with pytest.raises(ValueError, match="^out_dtype: expected"):
        flash_attn.flash_attn_combine(out_partial, lse_partial, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="^lse_partial: expected a torch.Tensor"):
        flash_attn.flash_attn_combine(out_partial, None)


# Tools around the calls


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_qkvpacked_func"])
def test_compiles_whole(name, device):
    call = CASES[name].build(device)
    positional = arguments_of(name, call)
    function = getattr(flash_attn, name)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    with torch.no_grad():
        got = compiled(*positional, causal=True, return_attn_probs=True)
        expected = function(*positional, causal=True, return_attn_probs=True)
    assert same(call, got[0], expected[0])


def test_switching_by_import():
    from flashattn_ext.flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

    assert flash_attn_func is flash_attn.flash_attn_func
    assert flash_attn_with_kvcache is flash_attn.flash_attn_with_kvcache


def test_is_part_of_the_wheel():
    packages = re.search(r"^packages = \[(.*?)\]$", PYPROJECT.read_text(), re.MULTILINE | re.DOTALL)
    assert '"flashattn_ext.flash_attn_interface"' in packages[1]
