"""torch.nn.attention.varlen on our functions: windows, used keys, pages, beside float64."""

import inspect

import pytest
import sdpa_cases
import torch
from reference import Rule, Sequence, attend
from sdpa_cases import TYPES, assert_as_good

import flashattn_ext

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

torchs_own_kernels, served = sdpa_cases.torchs_own_kernels, sdpa_cases.served


def varlen_options(window=(-1, -1), **options):
    """As this torch spells them; skips what it does not have."""
    if varlen_attn is None:
        pytest.skip("this torch has no varlen_attn")
    names = inspect.signature(varlen_attn).parameters
    if window == (-1, 0) and "window_size" not in names:
        options["is_causal"] = True
    elif window != (-1, -1):
        options["window_size"] = window
    missing = [name for name in options if name not in names]
    if missing:
        pytest.skip(f"varlen_attn of this torch has no {missing[0]}")
    return options


LENGTHS = (17, 1, 40)


def make_packed(device, dtype, heads=(4, 4), d=64):
    torch.manual_seed(0)
    starts = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    total = sum(LENGTHS)
    q, k, v = (
        torch.randn(total, h, d, dtype=dtype, device=device) for h in (heads[0], heads[1], heads[1])
    )
    return q, k, v, starts


def assert_each_sequence(out, q, k, v, starts, used=LENGTHS, window=(-1, -1)):
    for start, length, keys in zip(starts.tolist(), LENGTHS, used, strict=False):
        rows, key_rows = slice(start, start + length), slice(start, start + keys)
        sequence = Sequence(q[rows], k[key_rows], v[key_rows])
        rule = Rule(q.shape[-1] ** -0.5, window)
        best, rounded = attend(sequence, rule)[0], attend(sequence, rule, q.dtype)[0]
        assert_as_good(out[rows], rounded, best)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (5, 2)], ids=str)
def test_varlen(window, heads, dtype, device, served):
    gqa = {"enable_gqa": True} if heads[0] != heads[1] else {}
    options = varlen_options(window, **gqa)
    q, k, v, starts = make_packed(device, dtype, heads)
    with flashattn_ext.activate_sdpa():
        out = varlen_attn(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), **options)
    assert served == ["flash_fwd"]
    assert_each_sequence(out, q, k, v, starts, window=window)


def test_varlen_compiled(device, served):
    options = varlen_options((-1, 0))
    q, k, v, starts = make_packed(device, torch.bfloat16)

    def function(q, k, v, starts):
        return varlen_attn(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), **options)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with flashattn_ext.activate_sdpa():
        out = compiled(q, k, v, starts)
    assert served == ["flash_fwd"]
    assert_each_sequence(out, q, k, v, starts, window=(-1, 0))


@pytest.mark.parametrize("num_splits", [None, 1])
def test_varlen_with_used_keys(num_splits, device, served):
    used = (9, 1, 40)
    lengths = torch.tensor(used, dtype=torch.int32, device=device)
    options = varlen_options(seqused_k=lengths, **({"num_splits": 1} if num_splits else {}))
    q, k, v, starts = make_packed(device, torch.bfloat16)
    with flashattn_ext.activate_sdpa():
        out = varlen_attn(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), **options)
    assert served == ["flash_fwd"]
    assert_each_sequence(out, q, k, v, starts, used)


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_varlen_over_pages(num_splits, device, served):
    page, columns = 256, 2  # torch's own kernel takes pages of multiples of 256 only
    q, k, v, starts = make_packed(device, torch.bfloat16)
    table = torch.tensor([[4, 0], [1, 5], [3, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    options = varlen_options(block_table=table, seqused_k=lengths, num_splits=num_splits)
    pools = [torch.full((6, page, 4, 64), torch.nan, dtype=q.dtype, device=device) for _ in "kv"]
    for pool, source in zip(pools, (k, v), strict=True):
        for n, length in enumerate(LENGTHS):
            pool[table[n, 0], :length] = source[starts[n] : starts[n] + length]
    with flashattn_ext.activate_sdpa():
        out = varlen_attn(q, *pools, starts, None, max(LENGTHS), page * columns, **options)
    assert served == ["flash_fwd_splitkv"]
    assert_each_sequence(out, q, k, v, starts)


def test_varlen_into_a_given_tensor(device, served):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this torch has no varlen_attn_out")
    q, k, v, starts = make_packed(device, torch.bfloat16)
    out = torch.full_like(q, torch.nan)
    with flashattn_ext.activate_sdpa():
        varlen.varlen_attn_out(out, q, k, v, starts, starts, max(LENGTHS), max(LENGTHS))
    assert served == ["flash_fwd"]
    assert_each_sequence(out, q, k, v, starts)


def test_varlen_gradients_stay_with_torch(device, served):
    varlen_options()
    q, k, v, starts = make_packed(device, torch.bfloat16)
    arguments = (q.requires_grad_(), k, v, starts, starts, max(LENGTHS), max(LENGTHS))
    with flashattn_ext.activate_sdpa():
        if device == "cpu":  # where torch has nothing
            with pytest.raises(NotImplementedError, match="gradients"):
                varlen_attn(*arguments)
        else:
            varlen_attn(*arguments).float().sum().backward()
            assert q.grad.isfinite().all()
    assert served == []


def test_varlen_on_the_cpu_ends_with_restore():
    varlen_options()
    q, k, v, starts = make_packed("cpu", torch.bfloat16)
    arguments = (q, k, v, starts, starts, max(LENGTHS), max(LENGTHS))
    with flashattn_ext.activate_sdpa():
        varlen_attn(*arguments)
    with pytest.raises(NotImplementedError):
        varlen_attn(*arguments)
