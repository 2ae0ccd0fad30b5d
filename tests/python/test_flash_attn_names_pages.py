"""flash-attn's flash_attn_varlen_func over pages."""

import pytest
import torch
from caches import packed_cache
from cases import ints
from flash_attn_calls import OPTIONS, same, score_of

import flashattn_ext.flash_attn_interface as flash_attn

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
    call.compare_sequences(out, lse)
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
    call.compare_sequences(out, lse)
