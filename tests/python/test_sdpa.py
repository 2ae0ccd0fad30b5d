"""scaled_dot_product_attention on our forward, beside torch's own and float64."""

import pytest
import sdpa_cases
import torch
from flashattn_ext.integrations import _sdpa_kernels as kernels
from sdpa_cases import CPU_OPERATOR, TYPES, assert_as_good, exact, make
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

import flashattn_ext

torchs_own_kernels, served = sdpa_cases.torchs_own_kernels, sdpa_cases.served


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("d", [64, 36, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("sizes", [(33, 33), (7, 40), (130, 130)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_as_good_as_torch(causal, sizes, heads, d, dtype, device, served):
    q, k, v = make(device, dtype, *sizes, heads, d)
    options = {"is_causal": causal, "enable_gqa": heads[0] != heads[1]}
    torchs = scaled_dot_product_attention(q, k, v, **options)
    assert served == []
    with flashattn_ext.activate_sdpa():
        ours = scaled_dot_product_attention(q, k, v, **options)
    # torch's causal mask is not ours where the lengths differ: that one stays torch's.
    assert served == ([] if causal and sizes[0] != sizes[1] else ["flash_fwd"])
    assert_as_good(ours, torchs, exact(q, k, v, **options))


def test_scale(device, served):
    q, k, v = make(device, torch.bfloat16)
    torchs = scaled_dot_product_attention(q, k, v, scale=0.5)
    with flashattn_ext.activate_sdpa():
        ours = scaled_dot_product_attention(q, k, v, scale=0.5)
    assert served == ["flash_fwd"]
    assert_as_good(ours, torchs, exact(q, k, v, scale=0.5))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_attn_mask_stays_with_torch(kind, device, served):
    q, k, v = make(device, torch.bfloat16)
    mask = torch.ones(33, 33, dtype=torch.bool, device=device).tril(-1)
    mask[0, 0] = True
    if kind == "float":
        mask = torch.zeros(33, 33, dtype=q.dtype, device=device).masked_fill(~mask, -1e4)
    torchs = scaled_dot_product_attention(q, k, v, mask)
    with flashattn_ext.activate_sdpa():
        assert torch.equal(scaled_dot_product_attention(q, k, v, mask), torchs)
    assert served == []


def test_dropout_stays_with_torch(device, served):
    q, k, v = make(device, torch.bfloat16)
    torch.manual_seed(1)
    torchs = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    with flashattn_ext.activate_sdpa():
        torch.manual_seed(1)
        assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5), torchs)
    assert served == []


def test_float64_stays_with_torch(served):
    q, k, v = make("cpu", torch.float64)
    torchs = scaled_dot_product_attention(q, k, v)
    with flashattn_ext.activate_sdpa():
        assert torch.equal(scaled_dot_product_attention(q, k, v), torchs)
    assert served == []


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "expanded", "padded"])
def test_strides_are_those_that_graphs_count_on(layout, served):
    q, k, v = make("cpu", torch.bfloat16)
    if layout == "bshd":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "expanded":
        q = q[:, :1].expand(-1, 4, -1, -1)
    elif layout == "padded":
        q = torch.nn.functional.pad(q, (0, 8))[..., :64]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        promised = CPU_OPERATOR(*map(mode.from_tensor, (q, k, v)))
    with flashattn_ext.activate_sdpa():
        results = CPU_OPERATOR(q, k, v)
    assert served == ["flash_fwd"]
    for result, promise in zip(results, promised, strict=True):
        assert result.stride() == promise.stride() and result.dtype == promise.dtype


def test_log_sum_exp_is_torchs(served):
    q, k, v = make("cpu", torch.float32)
    torchs = CPU_OPERATOR(q, k, v, 0.0, True)
    with flashattn_ext.activate_sdpa():
        ours = CPU_OPERATOR(q, k, v, 0.0, True)
    assert served == ["flash_fwd"]
    torch.testing.assert_close(ours[1], torchs[1])


def test_results_of_the_cuda_operator():
    """Its nine results, of a kernel that here gets tensors of the CPU."""
    q, k, v = make("cpu", torch.bfloat16, 7, 40, heads=(4, 2))
    results = kernels.dense_cuda(None)(None, q, k, v)
    out, lse, starts_q, starts_k, max_q, max_k, state, offset, mask = results
    expected = flashattn_ext.flash_fwd(*(t.transpose(1, 2) for t in (q, k, v)), return_lse=True)
    assert torch.equal(out, expected[0].transpose(1, 2)) and out.stride() == q.stride()
    assert torch.equal(lse, expected[1]) and lse.is_contiguous()
    assert (starts_q, starts_k, max_q, max_k) == (None, None, 7, 40)
    assert (state.shape, offset.shape, mask.shape) == ((2,), (), (0,))
    assert state.dtype == offset.dtype == torch.uint64


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_results_of_the_cuda_operator_are_like_torchs(layout, served):
    """Strides, which compiled graphs count on, and the log-sum-exp that torch's backward takes."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    q, k, v = make("cuda", torch.bfloat16)
    if layout == "bshd":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    torchs = operator(q, k, v, 0.0, True)
    with flashattn_ext.activate_sdpa():
        ours = operator(q, k, v, 0.0, True)
    assert served == ["flash_fwd"] and len(ours) == len(torchs)
    for mine, theirs in zip(ours[:2], torchs[:2], strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (
            theirs.shape, theirs.stride(), theirs.dtype,
        )  # fmt: skip
    torch.testing.assert_close(ours[1], torchs[1], atol=1e-4, rtol=1e-4)
    assert ours[4:6] == torchs[4:6]


def test_the_cuda_kernel_leaves_debug_masks_to_torch():
    q, k, v = make("cpu", torch.bfloat16)
    calls = []
    kernel = kernels.dense_cuda(lambda *arguments, **options: calls.append((arguments, options)))
    assert kernel("keys", q, k, v, 0.0, True, True, scale=0.5) is None
    assert calls == [(("keys", q, k, v, 0.0, True, True), {"scale": 0.5})]
