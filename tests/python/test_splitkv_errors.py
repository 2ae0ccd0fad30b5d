"""Refused calls of flash_fwd_splitkv: they name the argument, what it got and what is allowed, the
same on cpu, meta and cuda."""

import re

import pytest
import torch
from test_errors import BF16, FP16, Arguments, elsewhere, metadata, option, tensor, without

from flashattn_ext import flash_fwd_splitkv

F32 = torch.float32


class CacheArguments(Arguments):
    """A good call to be spoilt: 2 sequences of 4 queries, a cache of 32 tokens or of 10 pages."""

    def __init__(self, device, kind="dense"):
        super().__init__(device)
        self.kind = kind
        packed, paged = "packed" in kind, "paged" in kind
        self.q = self.empty(*((8,) if packed else (2, 4)), 4, 64)
        shape = (10, 16, 2, 64) if paged else (2, 32, 2, 64)
        self.k, self.v = self.empty(*shape), self.empty(*shape)
        self.options = {"cache_seqlens": self.ints([20, 9])}
        if packed:
            self.options |= {"cu_seqlens_q": self.ints([0, 3, 8]), "max_seqlen_q": 5}
        if paged:
            self.options["block_table"] = self.ints([[7, 3], [1, -1]])
        if "append" in kind:
            self.options |= {name: self.empty(2, 3, 2, 64) for name in ("k_new", "v_new")}
            self.options |= {n: self.empty(32, 16) for n in ("rotary_cos", "rotary_sin")}

    def call(self, function=flash_fwd_splitkv):
        return super().call(function)


def caches(*shape, **kwargs):
    return lambda a: a.set(k=a.empty(*shape, **kwargs), v=a.empty(*shape, **kwargs))


def head_dim(d):
    return lambda a: a.set(q=a.empty(2, 4, 4, d), k=a.empty(2, 32, 2, d), v=a.empty(2, 32, 2, d))


def all_of(dtype):
    return lambda a: a.set(q=a.q.to(dtype), k=a.k.to(dtype), v=a.v.to(dtype))


def by_columns(name):
    def spoil(a):
        t = getattr(a, name)
        a.set(**{name: t.transpose(1, 3).contiguous().transpose(1, 3)})

    return spoil


def at_offset(name, elements):
    def spoil(a):
        shape = getattr(a, name).shape
        flat = a.empty(shape.numel() + 8)
        a.set(**{name: flat[elements : elements + shape.numel()].view(shape)})

    return spoil


def both(*spoils):
    return lambda a: [spoil(a) for spoil in spoils]


DENSE = [
    ("q", tensor("q", 4, 64), "(4, 64)"),
    ("q", tensor("q", 8, 4, 64), "(8, 4, 64)"),  # packed needs cu_seqlens_q
    ("q", option("q", None), "None"),
    ("k_cache", option("k", [1]), "list"),
    ("k_cache", tensor("k", 2, 32, 2, 128), "(2, 32, 2, 128)"),
    ("k_cache", caches(1, 32, 2, 64), "(1, 32, 2, 64)"),  # no row for the second sequence
    ("k_cache", caches(64, 2, 64), "(64, 2, 64)"),
    ("v_cache", tensor("v", 2, 31, 2, 64), "(2, 31, 2, 64)"),
    ("v_cache", tensor("v", 2, 32, 2, 64, dtype=FP16), "float16"),
    ("k_cache", tensor("k", 2, 32, 2, 64, dtype=FP16), "float16"),
    ("q", all_of(torch.float64), "float64"),
    ("k_cache", caches(2, 32, 3, 64), "3"),  # C85
    ("k_cache", caches(2, 32, 8, 64), "8"),
    ("k_cache", caches(2, 32, 0, 64), "0"),
    ("q", head_dim(264), "264"),
    ("q", head_dim(36), "36"),  # C83: a cache is not padded
    ("q", head_dim(100), "100"),
    ("q", by_columns("q"), "stride"),  # C78
    ("k_cache", by_columns("k"), "stride"),
    ("v_cache", by_columns("v"), "stride"),
    ("q", at_offset("q", 1), "2 bytes"),  # C82
    ("k_cache", at_offset("k", 2), "4 bytes"),
    ("v_cache", at_offset("v", 3), "6 bytes"),
    ("cache_seqlens", metadata("cache_seqlens", [20, 9], torch.int64), "int64"),  # C86
    ("cache_seqlens", metadata("cache_seqlens", [20, 9, 1]), "3"),
    ("cache_seqlens", metadata("cache_seqlens", [[20], [9]]), "(2, 1)"),
    ("cache_seqlens", elsewhere("cache_seqlens", [20, 9]), "device"),
    ("cache_seqlens", option("cache_seqlens", 33), "33"),
    ("cache_seqlens", option("cache_seqlens", -1), "-1"),
    ("cache_seqlens", option("cache_seqlens", 2.5), "2.5"),
    ("cache_seqlens", option("cache_seqlens", None), "None"),
    ("cache_seqlens", option("cache_seqlens", True), "True"),
    ("cache_batch_idx", metadata("cache_batch_idx", [0, 1], torch.int64), "int64"),
    ("cache_batch_idx", metadata("cache_batch_idx", [0, 1, 1]), "3"),
    ("cache_batch_idx", elsewhere("cache_batch_idx", [0, 1]), "device"),
    ("cache_leftpad", metadata("cache_leftpad", [0, 1], torch.int16), "int16"),
    ("cache_leftpad", metadata("cache_leftpad", [0]), "1"),
    ("cache_leftpad", elsewhere("cache_leftpad", [0, 1]), "device"),
    ("max_seqlen_q", option("max_seqlen_q", 4), "cu_seqlens_q"),
    ("num_splits", option("num_splits", -1), "-1"),
    ("num_splits", option("num_splits", 257), "257"),
    ("num_splits", option("num_splits", 1.5), "1.5"),
    ("num_splits", option("num_splits", True), "True"),
    ("split_size", option("split_size", 100), "100"),
    ("split_size", option("split_size", 0), "0"),
    ("split_size", option("split_size", -64), "-64"),
    ("split_size", lambda a: a.set(split_size=64, num_splits=2), "num_splits"),
    ("window_size", option("window_size", (-1, -3)), "-3"),  # C68
    ("softcap", option("softcap", -1.0), "-1"),
    ("softmax_scale", option("softmax_scale", float("nan")), "nan"),
    ("causal", option("causal", "yes"), "'yes'"),
    ("return_lse", option("return_lse", "no"), "'no'"),
    ("alibi_slopes", tensor("alibi_slopes", 2, dtype=F32), "(2,)"),  # C75
    ("alibi_slopes", tensor("alibi_slopes", 3, 4, dtype=F32), "(3, 4)"),
    ("sinks", tensor("sinks", 2), "(2,)"),
    ("sinks", tensor("sinks", 4, dtype=FP16), "float16"),
    ("out", tensor("out", 2, 5, 4, 64), "(2, 5, 4, 64)"),
    ("out", tensor("out", 2, 4, 4, 64, dtype=FP16), "float16"),
    ("k_new", lambda a: a.set(v_new=a.empty(2, 1, 2, 64)), "None"),
    ("v_new", lambda a: a.set(k_new=a.empty(2, 1, 2, 64)), "None"),
    ("rotary_cos", tensor("rotary_cos", 32, 16), "new"),  # only with new tokens
    ("rotary_sin", tensor("rotary_sin", 32, 16), "new"),
    ("rotary_interleaved", option("rotary_interleaved", False), "False"),
]
PACKED = [
    ("q", without("cu_seqlens_q"), "(8, 4, 64)"),
    ("max_seqlen_q", without("max_seqlen_q"), "None"),
    ("max_seqlen_q", option("max_seqlen_q", -1), "-1"),
    ("max_seqlen_q", lambda a: a.set(max_seqlen_q=a.ints(5)), "tensor"),
    ("cu_seqlens_q", metadata("cu_seqlens_q", [0, 3, 8], torch.int64), "int64"),
    ("cu_seqlens_q", metadata("cu_seqlens_q", []), "none"),
    ("cu_seqlens_q", elsewhere("cu_seqlens_q", [0, 3, 8]), "device"),
    ("cache_seqlens", metadata("cu_seqlens_q", [0, 8]), "1"),
    ("q", tensor("q", 1, 8, 4, 64), "(1, 8, 4, 64)"),
]
PAGED = [
    ("block_table", metadata("block_table", [[7, 3], [1, -1]], torch.int64), "int64"),
    ("block_table", metadata("block_table", [7, 3]), "(2,)"),
    ("block_table", metadata("block_table", [[7, 3]]), "(1, 2)"),
    ("block_table", elsewhere("block_table", [[7, 3], [1, -1]]), "device"),
    ("block_table", lambda a: a.set(block_table=a.ints([[7, 0, 3, 0], [1, 0, 2, 0]])[:, ::2]),
     "stride"),
    ("block_table", option("block_table", [[7, 3], [1, -1]]), "list"),
    ("cache_seqlens", option("cache_seqlens", 33), "33"),  # C50: 2 columns of 16 tokens
    ("cache_batch_idx", metadata("cache_batch_idx", [0, 1]), "block_table"),  # C59
    ("k_cache", caches(10, 0, 2, 64), "(10, 0, 2, 64)"),
]  # fmt: skip
APPEND = [
    ("k_new", tensor("k_new", 2, 3, 4, 64), "(2, 3, 4, 64)"),
    ("k_new", tensor("k_new", 1, 3, 2, 64), "(1, 3, 2, 64)"),
    ("v_new", tensor("v_new", 2, 2, 2, 64), "(2, 2, 2, 64)"),
    ("k_new", tensor("k_new", 2, 3, 2, 64, dtype=FP16), "float16"),
    ("k_new", option("k_new", None), "None"),
    ("v_new", option("v_new", None), "None"),
    ("cache_seqlens", option("cache_seqlens", 30), "30"),  # C61
    ("rotary_cos", option("rotary_cos", None), "None"),
    ("rotary_sin", option("rotary_sin", None), "None"),
    ("rotary_sin", tensor("rotary_sin", 31, 16), "(31, 16)"),
    ("rotary_cos", tensor("rotary_cos", 32, 12), "(32, 12)"),
    ("rotary_cos", tensor("rotary_cos", 32, 40), "(32, 40)"),
    ("rotary_cos", tensor("rotary_cos", 32, 16, dtype=FP16), "float16"),
    ("rotary_cos", tensor("rotary_cos", 32), "(32,)"),
    ("rotary_interleaved", option("rotary_interleaved", 1), "1"),
    ("k_cache", lambda a: a.set(k=a.empty(2, 1, 2, 64).expand(2, 32, 2, 64)), "stride"),
    ("rotary_cos", both(tensor("rotary_cos", 20, 16), tensor("rotary_sin", 20, 16),
                        option("cache_seqlens", 18)), "20"),  # D02
    ("rotary_cos", both(tensor("rotary_cos", 23, 16), tensor("rotary_sin", 23, 16),
                        option("cache_seqlens", 20), option("causal", True)), "4 queries"),
    ("softmax_scale", option("softmax_scale", 1e39), "1e+39"),
    ("softcap", option("softcap", 1e39), "1e+39"),
]  # fmt: skip
MATRIX = [
    (kind, *row)
    for kind, rows in (
        ("dense", DENSE),
        ("packed", PACKED),
        ("paged", PAGED),
        ("dense append", APPEND),
    )
    for row in rows
]
IDS = [f"{row[0].replace(' ', '_')}-{row[1]}-{row[3]}" for row in MATRIX]


@pytest.mark.parametrize(("kind", "name", "spoil", "got"), MATRIX, ids=IDS)
def test_c106_refused_everywhere(kind, name, spoil, got, anywhere):
    arguments = CacheArguments(anywhere, kind)
    spoil(arguments)
    with pytest.raises((ValueError, NotImplementedError)) as error:
        arguments.call()
    message = str(error.value)
    assert re.search(rf"\b{name}\b", message) and got in message and len(message) > len(got) + 20


KINDS = ("dense", "packed", "paged", "paged packed", "dense append", "paged packed append")


@pytest.mark.parametrize("kind", KINDS)
def test_the_good_call_is_good(kind, anywhere):
    arguments = CacheArguments(anywhere, kind)
    out = arguments.call()
    assert out.shape == arguments.q.shape and out.dtype == BF16 and out.device.type == anywhere
    arguments.set(return_lse=True)
    _, lse = arguments.call()
    assert lse.shape == ((4, 8) if "packed" in kind else (2, 4, 4)) and lse.dtype == F32


def test_c59_keys_have_one_description(anywhere):
    """The lengths of the keys are cache_seqlens: nothing that could disagree is taken."""
    for name in ("cu_seqlens_k", "seqused_k", "max_seqlen_k"):
        arguments = CacheArguments(anywhere, "paged packed")
        arguments.set(**{name: None})
        with pytest.raises(TypeError, match=name):
            arguments.call()


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "k_new", "rotary_cos"])
def test_c88_gradients_are_refused_with_the_remedy(name, anywhere):
    arguments = CacheArguments(anywhere, "dense append")
    arguments.set(sinks=arguments.empty(4))
    given = arguments.options.get(name, getattr(arguments, name, None))
    given.requires_grad_()
    with pytest.raises(NotImplementedError, match="no_grad"):
        arguments.call()
    with torch.no_grad():
        assert not arguments.call().requires_grad


def test_out_that_overlaps_an_input(device):
    arguments = CacheArguments(device)
    arguments.set(out=arguments.q)
    with pytest.raises(ValueError, match=r"out.*\bq\b"):
        arguments.call()


def test_one_cache_for_keys_and_values_cannot_be_appended_to(device):
    arguments = CacheArguments(device, "dense append")
    arguments.set(v=arguments.k)
    with pytest.raises(ValueError, match="k_cache.*v_cache"):
        arguments.call()
    arguments = CacheArguments(device)
    arguments.set(v=arguments.k)  # but it can be read
    assert arguments.call().isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v", "k_new", "rotary_cos", "alibi_slopes", "out"])
def test_c86_tensors_on_the_cpu_in_a_cuda_call(name):
    arguments = CacheArguments("cuda", "dense append")
    shapes = {"k_new": (2, 3, 2, 64), "rotary_cos": (32, 16), "alibi_slopes": (4,)}
    shape = shapes.get(name, (2, 4, 4, 64) if name == "out" else (2, 32, 2, 64))
    dtype = F32 if name == "alibi_slopes" else BF16
    arguments.set(**{name: torch.zeros(shape, dtype=dtype)})
    with pytest.raises(ValueError, match=rf"{name}.*cuda.*cpu"):
        arguments.call()
    assert CacheArguments("cuda").call().isfinite().all(), "the CUDA context must survive"
