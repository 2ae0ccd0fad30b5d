"""torch's attention on our forward where gradients are needed, and in compiled graphs."""

import pytest
import sdpa_cases
import torch
from sdpa_cases import TYPES, assert_as_good, make
from torch.nn.functional import scaled_dot_product_attention

import flashattn_ext

torchs_own_kernels, served = sdpa_cases.torchs_own_kernels, sdpa_cases.served


def gradients(function, tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype)
    out.backward(weights.view(out.shape))
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("leaf", [0, 1, 2], ids="qkv")
def test_one_gradient_is_enough_to_stay_with_torch(leaf, device, served):
    tensors = make(device, torch.bfloat16)
    tensors[leaf].requires_grad_()
    with flashattn_ext.activate_sdpa():
        assert scaled_dot_product_attention(*tensors).requires_grad
        assert served == []
        with torch.no_grad():
            scaled_dot_product_attention(*tensors)
        assert served == ["flash_fwd"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_eager_gradients_are_torchs(causal, dtype, device, served):
    tensors = make(device, dtype)

    def function(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    torchs = gradients(function, tensors)
    with flashattn_ext.activate_sdpa():
        ours = gradients(function, tensors)
    assert served == []
    for mine, theirs in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_compiled_gradients(causal, heads, dtype, device, served, backend="aot_eager"):
    """Our forward in the graph, torch's backward from our log-sum-exp."""
    tensors = make(device, dtype, 70, 70, heads)
    gqa = heads[0] != heads[1]
    torch._dynamo.reset()

    def function(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

    reference = gradients(function, [t.double() for t in tensors])
    torchs = gradients(function, tensors)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with flashattn_ext.activate_sdpa():
        ours = gradients(compiled, tensors)
    assert served == ["flash_fwd"]
    for mine, theirs, best in zip(ours, torchs, reference, strict=True):
        assert_as_good(mine, theirs, best)


def test_inductor_gradients(device, served):
    test_compiled_gradients(True, (6, 2), torch.bfloat16, device, served, backend="inductor")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs_follow_without_recompiling(backend, device, served):
    q, k, v = make(device, torch.bfloat16)

    def function(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    torchs = compiled(q, k, v)
    with torch._dynamo.config.patch(error_on_recompile=True):
        with flashattn_ext.activate_sdpa():
            ours = compiled(q, k, v)
            assert served == ["flash_fwd"]
            assert torch.equal(ours, function(q, k, v))
        assert torch.equal(compiled(q, k, v), torchs)
    assert served == ["flash_fwd"] * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_every_length(backend, device, served):
    torch._dynamo.reset()
    compiled = torch.compile(
        scaled_dot_product_attention, backend=backend, fullgraph=True, dynamic=True
    )
    lengths = (33, 40), (20, 70), (50, 17)
    with flashattn_ext.activate_sdpa():
        compiled(*make(device, torch.bfloat16, 9, 10))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for sizes in lengths:
                tensors = make(device, torch.bfloat16, *sizes)
                expected = scaled_dot_product_attention(*tensors)
                assert torch.equal(compiled(*tensors), expected)
    assert served == ["flash_fwd"] * 7
