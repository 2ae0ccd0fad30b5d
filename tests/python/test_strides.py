"""Memory layouts: only the last dim must be contiguous; K and V do not share their strides."""

import pytest
import torch
from cases import DTYPES, Case, dense, sample
from strided import VARIANTS

import flashattn_ext

LENGTHS = {False: ((129, 129), (129, 129)), True: ((129, 129), (40, 40), (1, 1))}


@pytest.mark.parametrize(
    "case",
    sample(
        4 * len(VARIANTS),
        seed=6,
        strides=VARIANTS,
        layout=[{"packed": kind, "lengths": lengths} for kind, lengths in LENGTHS.items()],
        d=(32, 64, 72, 128, 160, 256),
        heads=((4, 2), (3, 3), (6, 1)),
        causal=(False, True),
        dtype=DTYPES,
    ),
    ids=str,
)
def test_layouts(case, device):
    case.check(device)


@pytest.mark.parametrize("strides", ["k_transposed", "v_transposed", "k_padded", "v_padded"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_c80_key_and_value_strides_differ(is_packed, strides, device):
    for d in (64, 128):
        for heads in ((4, 4), (4, 2)):
            Case(LENGTHS[is_packed], is_packed, heads=heads, d=d, strides=strides).check(device)


@pytest.mark.parametrize("strides", VARIANTS)
def test_c83_padded_head_dim_over_strides(strides, device):
    dense(2, 33, 33, d=36, strides=strides).check(device)


@pytest.mark.parametrize("strides", ["bhsd", "padded"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("d", [64, 36, 128])
def test_strided_out(d, is_packed, strides, device):
    """`out` by stride too, and nothing is written between its rows."""
    call = Case(LENGTHS[is_packed], is_packed, d=d).build(device)
    *outer, rows, heads, d = call.q.shape
    outer = outer or [1]
    if strides == "bhsd":
        buffer = torch.full((*outer, heads, rows, d), torch.nan, dtype=call.q.dtype, device=device)
        out = buffer.transpose(1, 2)
    else:
        shape = (*outer, rows + 1, heads + 1, d + 8)
        buffer = torch.full(shape, torch.nan, dtype=call.q.dtype, device=device)
        out = buffer[:, :rows, :heads, :d]
    out = out[0] if is_packed else out
    returned, lse = call.run(out=out)
    assert returned is out
    call.compare(out, lse)
    if strides == "padded":
        gaps = buffer[:, rows:], buffer[:, :, heads:], buffer[..., d:]
        assert all(gap.isnan().all() for gap in gaps)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_c78_last_dim_not_contiguous(name, device):
    """Refused, never silently wrong."""
    call = dense(2, 64, 64).build(device)
    wrong = getattr(call, name).transpose(1, 3).contiguous().transpose(1, 3)
    assert wrong.stride(-1) != 1
    setattr(call, name, wrong)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        call.run()


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_c82_storage_offset(name, offset, device):
    """Views into a flat buffer at odd elements are refused; those at 16 bytes are read in place."""
    call = dense(1, 64, 64, dtype=torch.float16).build(device)
    tensor = getattr(call, name)
    flat = torch.empty(tensor.numel() + 8, dtype=tensor.dtype, device=device)
    view = flat[offset : offset + tensor.numel()].view_as(tensor)
    view.copy_(tensor)
    setattr(call, name, view)
    if offset % 8 == 0:
        call.compare(*call.run())
        return
    with pytest.raises(ValueError, match=rf"\b{name}\b.*16"):
        call.run()


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_row_stride_not_a_multiple_of_16_bytes(name, device):
    call = dense(2, 64, 64).build(device)
    tensor = call.nan_out() if name == "out" else getattr(call, name)
    wide = torch.zeros(*tensor.shape[:-1], 68, dtype=tensor.dtype, device=device)
    wide[..., :64] = tensor
    with pytest.raises(ValueError, match=rf"\b{name}\b.*16"):
        if name == "out":
            call.run(out=wide[..., :64])
        else:
            setattr(call, name, wide[..., :64])
            call.run()


def test_strides_of_dims_of_size_1_do_not_matter(device):
    """Torch leaves any number there (a slice of a wider batch, one head)."""
    call = dense(1, 33, 65, heads=(1, 1)).build(device)
    for name in ("q", "k", "v"):
        t = getattr(call, name)
        setattr(call, name, t.as_strided(t.shape, (3, t.stride(1), 5, 1)))
    call.compare(*call.run())


@pytest.mark.gpu
def test_strided_inputs_are_not_copied():
    """Expanded, interleaved and transposed inputs: the call allocates its results and no more."""
    k = torch.randn(1, 4096, 1, 64, device="cuda").bfloat16().expand(4, -1, 16, -1)
    q = torch.randn(4, 16, 512, 64, device="cuda").bfloat16().transpose(1, 2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flashattn_ext.flash_fwd(q, k, k, return_lse=True)
    results = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    assert torch.cuda.max_memory_allocated() - before <= results + 4096
