"""FlashAttention-3's flash_attn_combine."""

import pytest
import torch
from cases import dense
from reference import Rule, attend, merge

import flashattn_ext.flash_attn_interface as flash_attn


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
