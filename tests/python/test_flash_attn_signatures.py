"""flash-attn's names: their signatures, and where they are."""

import inspect
import re
from pathlib import Path

import pytest
from flash_attn_calls import SCORE, VARLEN

import flashattn_ext.flash_attn_interface as flash_attn

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
# Source: flash_attn/flash_attn_interface.py of flash-attn 2.8.3, and
# hopper/flash_attn_interface.py for what FlashAttention-3 adds.
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


def test_switching_by_import():
    from flashattn_ext.flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

    assert flash_attn_func is flash_attn.flash_attn_func
    assert flash_attn_with_kvcache is flash_attn.flash_attn_with_kvcache


def test_is_part_of_the_wheel():
    packages = re.search(r"^packages = \[(.*?)\]$", PYPROJECT.read_text(), re.MULTILINE | re.DOTALL)
    assert '"flashattn_ext.flash_attn_interface"' in packages[1]
