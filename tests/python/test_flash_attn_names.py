"""flash-attn's names over dense and packed tensors: each argument against the float64 oracle."""

import inspect

import pytest
import torch
from cases import HALF_DTYPES, dense
from flash_attn_calls import (
    CASES,
    GROUPED,
    OPTIONS,
    SCORE,
    arguments_of,
    run,
    same,
    score_of,
)

import flashattn_ext.flash_attn_interface as flash_attn


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_attention(name, option, device):
    call = CASES[name].but(**OPTIONS[option]).build(device)
    out, lse, s_dmask = run(name, call, return_attn_probs=True)
    call.compare_sequences(out, lse)
    assert s_dmask.shape == (0,) and s_dmask.dtype == out.dtype and s_dmask.device == out.device
    alone = run(name, call)
    assert isinstance(alone, torch.Tensor) and same(call, alone, out)


@pytest.mark.parametrize("name", CASES)
def test_float32_on_the_cpu(name):
    call = CASES[name].but(dtype=torch.float32).build("cpu")
    call.compare_sequences(*run(name, call, return_attn_probs=True)[:2])


@pytest.mark.parametrize("name", CASES)
def test_positions_of_the_arguments(name, device):
    """All arguments in flash-attn's order give what they give by keyword."""
    call = CASES[name].but(causal=True, softcap=15.0, scale=0.3, window=(20, -1)).build(device)
    expected = run(name, call, return_attn_probs=True)
    values = score_of(call) | {"dropout_p": 0.0, "deterministic": True, "return_attn_probs": True}
    ordered = [values[key] for key in SCORE]
    got = getattr(flash_attn, name)(*arguments_of(name, call), *ordered)
    assert same(call, got[0], expected[0]) and got[2].shape == (0,)
    call.compare_sequences(*got[:2])


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
    call.compare_sequences(out, lse)
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
