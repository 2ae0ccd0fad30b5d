"""Guards against arguments that would lead out of memory or end the process (D cases and guard
layers of docs/cases.md): every size, tensor and value that a caller can get wrong."""

import re
from pathlib import Path

import pytest
import torch
from caches import CacheCase, dense_cache, packed_cache
from cases import ints
from test_cases_splitkv import run_between_canaries
from test_errors import Arguments
from test_memory import POISON
from test_splitkv_errors import CacheArguments

import flashattn_ext
from flashattn_ext import _ops, flash_combine, flash_fwd, flash_fwd_splitkv

TREE = Path(__file__).parents[2]
STARTS = {  # of 3 sequences with 10, 20 and 10 queries: what is wrong with them
    r"cu_seqlens_q\[0\].*7": [7, 10, 30, 40],
    r"cu_seqlens_q\[0\].*-1": [-1, 10, 30, 40],
    r"cu_seqlens_q\[2\].*5": [0, 10, 5, 40],
    r"cu_seqlens_q\[3\].*41": [0, 10, 30, 41],
    r"cu_seqlens_q\[3\].*2147483647": [0, 10, 30, 2**31 - 1],
}


@pytest.mark.parametrize("message", STARTS)
def test_d04_starts_begin_at_0_ascend_and_end_within_the_rows(message, device, monkeypatch):
    monkeypatch.delenv("FLASHATTN_EXT_CHECK", raising=False)
    call = packed_cache((10, 20), (20, 10), (10, 40), page=16, tail=0, slack=40).build(device)
    starts = ints(STARTS[message], device)
    good = call.options["cu_seqlens_q"]
    for splits in (0, 1, 3):
        call.options |= {"cu_seqlens_q": starts, "num_splits": splits}
        run_between_canaries(call)
        call.compare_cache()
    monkeypatch.setenv("FLASHATTN_EXT_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        call.run()
    call.compare(*call.run(cu_seqlens_q=good))


def bf16(device, *shape):
    return torch.zeros(shape, dtype=torch.bfloat16, device=device)


# heads, key/value heads, head dim, (rows or pages, tokens), columns of the table or None
ZERO_SIZES = {
    "heads": (0, 2, 64, (2, 8), None),
    "head_dim": (4, 2, 0, (2, 8), None),
    "key/value heads": (4, 0, 64, (2, 8), None),
    "all heads": (0, 0, 64, (2, 8), None),
    "capacity": (4, 2, 64, (2, 0), None),
    "page": (4, 2, 64, (5, 0), 1),
    "pages": (4, 2, 64, (0, 16), 1),
    "columns": (4, 2, 64, (5, 16), 0),
    "rows": (4, 2, 64, (0, 8), None),
}
REFUSED_ZEROS = {"head_dim": "q", "rows": "k_cache", "page": "k_cache"}
REFUSED_ZEROS |= {"key/value heads": "k_cache", "all heads": "k_cache"}


@pytest.mark.parametrize("split", [{}, {"num_splits": 4}, {"split_size": 64}], ids=str)
@pytest.mark.parametrize("zero", ZERO_SIZES)
def test_d09_no_division_by_a_size_of_zero(zero, split, anywhere):
    heads, heads_kv, d, outer, columns = ZERO_SIZES[zero]
    q = bf16(anywhere, 2, 3, heads, d)
    k, v = (bf16(anywhere, *outer, heads_kv, d) for _ in range(2))
    options = {"cache_seqlens": ints([3, 2], anywhere), "causal": True, "return_lse": True, **split}
    if columns is not None:
        options["block_table"] = ints([[0] * columns] * 2, anywhere).view(2, columns)
    if zero in REFUSED_ZEROS:
        with pytest.raises(ValueError, match=rf"^{REFUSED_ZEROS[zero]}: expected"):
            flash_fwd_splitkv(q, k, v, **options)
        return
    out, lse = flash_fwd_splitkv(q, k, v, **options)
    assert out.shape == q.shape and lse.shape == (2, heads, 3)
    if anywhere != "meta":
        assert (out == 0).all() and (lse == -torch.inf).all()


def test_d09_parts_of_no_size(anywhere):
    def merge(splits, b, s, h, d):
        out, lse = torch.zeros(splits, b, s, h, d), torch.zeros(splits, b, h, s)
        return flash_combine(out.to(anywhere), lse.to(anywhere))

    for shape in ((0, 2, 3, 4, 64), (3, 0, 3, 4, 64), (3, 2, 0, 4, 64), (3, 2, 3, 0, 64)):
        out, lse = merge(*shape)
        assert out.shape == shape[1:] and lse.shape == (shape[1], shape[3], shape[2])
    with pytest.raises(ValueError, match="out_partial"):
        merge(3, 2, 3, 4, 0)


@pytest.mark.parametrize("outer", [2**31, 2**40], ids=["2_31", "2_40"])
@pytest.mark.parametrize("what", ["sequences", "dense sequences", "rows", "pages", "tokens"])
def test_guard_1_sizes_of_more_than_32_bits(what, outer, anywhere):
    """Expanded tensors: nothing is allocated, and no product of sizes may wrap."""
    cache = bf16(anywhere, 1, 8, 2, 64)
    many = cache.expand(outer, 8, 2, 64)
    name, function, options = "k_cache", flash_fwd_splitkv, {"cache_seqlens": 3}
    q, k = bf16(anywhere, 1, 1, 4, 64), many
    if what == "sequences":
        q, name = bf16(anywhere, outer, 0, 4, 64), "batch|q|k_cache"
    elif what == "dense sequences":
        q, name, function, options = bf16(anywhere, outer, 0, 4, 64), "batch|q|k", flash_fwd, {}
    elif what == "pages":
        options["block_table"] = ints([[0]], anywhere)
    elif what == "tokens":
        k = cache[:, :1].expand(1, outer, 2, 64)
    with pytest.raises(ValueError, match=rf"^({name}): expected.*{outer}"):
        function(q, k, k, **options)


def elsewhere(tensor):
    """Zeros of that shape on another kind of device."""
    other = {"cpu": "meta", "meta": "cpu", "cuda": "cpu"}
    return torch.zeros_like(tensor, device=other[tensor.device.type])


OPTIONAL = {
    "alibi_slopes": ("dense append", (4,), torch.float32),
    "sinks": ("dense append", (4,), torch.float32),
    "out": ("dense append", (2, 4, 4, 64), torch.bfloat16),
    "cache_batch_idx": ("dense append", (2,), torch.int32),
    "cache_leftpad": ("dense append", (2,), torch.int32),
    "block_table": ("paged append", (2, 2), torch.int32),
    "cu_seqlens_q": ("paged packed append", (3,), torch.int32),
    "cache_seqlens": ("dense append", (2,), torch.int32),
    "k_new": ("dense append", (2, 3, 2, 64), torch.bfloat16),
    "v_new": ("dense append", (2, 3, 2, 64), torch.bfloat16),
    "rotary_cos": ("dense append", (32, 16), torch.bfloat16),
    "rotary_sin": ("dense append", (32, 16), torch.bfloat16),
}


@pytest.mark.parametrize("name", ["k", "v", *OPTIONAL])
def test_d12_every_tensor_is_on_the_device_of_q(name, anywhere):
    kind, shape, dtype = OPTIONAL.get(name, ("dense append", (2, 32, 2, 64), torch.bfloat16))
    arguments = CacheArguments(anywhere, kind)
    assert arguments.call().device.type == anywhere
    arguments.set(**{name: elsewhere(torch.zeros(shape, dtype=dtype, device=anywhere))})
    with pytest.raises(ValueError, match=rf"^{name}.*device") as error:
        arguments.call()
    assert anywhere in str(error.value)


@pytest.mark.parametrize("name", ["out_partial", "lse_partial", "out"])
def test_d12_every_part_is_on_one_device(name, anywhere):
    given = {
        "out_partial": torch.zeros(3, 2, 5, 4, 64, device=anywhere),
        "lse_partial": torch.zeros(3, 2, 4, 5, device=anywhere),
        "out": torch.zeros(2, 5, 4, 64, device=anywhere),
    }
    given[name] = elsewhere(given[name])
    with pytest.raises(ValueError, match=r"(lse_partial|out).*device"):
        flash_combine(given.pop("out_partial"), given.pop("lse_partial"), **given)


def shifted(tensor, elements):
    """The same numbers, so many elements behind an aligned address."""
    flat = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device=tensor.device)
    return flat[elements : elements + tensor.numel()].view(tensor.shape).copy_(tensor)


def wide_rows(tensor):
    """The same numbers in rows that are one element too long to be aligned."""
    *outer, d = tensor.shape
    wide = torch.zeros(*outer, d + 1, dtype=tensor.dtype, device=tensor.device)
    return wide[..., :d].copy_(tensor)


@pytest.mark.parametrize("spoil", [lambda t: shifted(t, 1), lambda t: shifted(t, 3), wide_rows],
                         ids=["1", "3", "rows"])  # fmt: skip
@pytest.mark.parametrize(
    "name", ["q", "k", "v", "k_new", "v_new", "rotary_cos", "rotary_sin", "alibi_slopes", "sinks"]
)
def test_d13_no_misaligned_address(name, spoil, device):
    """Refused by name, or right; on a GPU a misaligned access would end the process."""
    options = {"new": 3, "rotary": 1.0, "alibi": "h", "sinks": "fp32", "causal": True}
    call = dense_cache(3, 100, 70, page=16, **options).build(device)
    if name in ("q", "k", "v"):
        setattr(call, name, spoil(getattr(call, name)))
        with pytest.raises(ValueError, match=rf"^{name}(_cache)?: .*16 bytes"):
            call.run()
        call = dense_cache(3, 100, 70, page=16, **options).build(device)
    else:
        changed = spoil(call.options[name])
        try:
            result = call.run(**{name: changed})
        except ValueError as error:
            assert re.match(rf"{name}: .*(16 bytes|contiguous|stride)", str(error))
        else:
            call.compare(*result)
            return
    call.compare(*call.run())


@pytest.mark.parametrize("value", POISON[:3], ids=str)
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_d17_nan_never_becomes_an_address(splits, value, device):
    """One sequence holds nothing but NaN or infinity. Its neighbours are right, what lies around
    the results is as it was, and a following call is right."""
    for is_packed in (False, True):
        lengths = ((5, 200), (5, 130), (5, 70))
        options = {"page": 16, "causal": True, "alibi": "h", "splits": splits, "tail": 0}
        case = CacheCase(lengths, is_packed, **options)
        call = case.build(device)
        places = call.cache.where(1, *call.case.span(1))
        call.k[places], call.v[places] = value, value
        (call.q[slice(*call.rows[1])] if is_packed else call.q[1]).fill_(value)
        results = list(call.per_sequence(*run_between_canaries(call)))
        clean = case.build(device)
        for n, result in enumerate(clean.per_sequence(*clean.run(num_splits=splits or 1))):
            if n != 1:
                for a, b in zip(results[n], result, strict=True):
                    torch.testing.assert_close(a, b, rtol=2**-6, atol=4e-3)
        clean.compare(*clean.run())


def test_guard_1_grids_of_every_kernel(device):
    """More heads than a side of a grid holds are refused, and so are splits beyond their limit."""
    for changes, message in (
        ({"q": bf16(device, 2, 4, 65536, 8), "k": bf16(device, 2, 32, 1, 8),
          "v": bf16(device, 2, 32, 1, 8)}, r"^q: .*65535.*65536"),
        ({"num_splits": 257}, r"^num_splits: .*256.*257"),
    ):  # fmt: skip
        arguments = CacheArguments(device)
        arguments.set(**changes)
        with pytest.raises(ValueError, match=message):
            arguments.call()
    assert Arguments(device).call().isfinite().all()


def test_guard_4_and_d11_every_kernel_is_launched_where_errors_are_checked():
    """launch_kernel.h checks each launch; no source launches in another way."""
    way_in = "csrc/kernels/launch_kernel.h"
    sources = [p for p in (TREE / "csrc").rglob("*") if p.suffix in (".cu", ".h", ".cpp", ".cuh")]
    launching = {}
    for path in sources:
        found = re.findall(r"<<<|cudaLaunchKernel\w*|cuLaunchKernel\w*", path.read_text())
        if found:
            launching[path.relative_to(TREE).as_posix()] = found
    assert list(launching) == [way_in] and len(launching[way_in]) == 1
    checked = r"check_cuda\(function, cudaLaunchKernelEx\("
    assert re.search(checked, (TREE / way_in).read_text())
    kernels = [p for p in sources if "__global__" in p.read_text()]
    assert kernels and all('"kernels/launch_kernel.h"' in p.read_text() for p in kernels)


def test_d15_a_library_of_another_version_says_so(monkeypatch):
    """Python code and library compare the arguments of every operator when they meet."""
    assert _ops._load() == ""
    names = [*_ops._ARGUMENTS["fwd"], "argument_of_tomorrow"]
    for name, arguments in (("fwd", names), ("op_of_tomorrow", [])):
        with monkeypatch.context() as patch:
            patch.setitem(_ops._ARGUMENTS, name, arguments)
            assert "belongs to another version of flashattn_ext's Python code" in _ops._load()
    assert _ops._load() == ""


def test_d10_supports_says_what_the_call_would(device):
    """A caller can ask first and fall back, and what is not served raises."""
    q = bf16(device, 2, 3, 4, 264)
    good, reason = flashattn_ext.supports(q, q, q)
    assert not good and "264" in reason
    with pytest.raises((ValueError, NotImplementedError), match="264"):
        flash_fwd(q, q, q)
