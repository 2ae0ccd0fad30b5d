"""Refused calls: ValueError or NotImplementedError that names the argument, what it got and what is
allowed, the same on cpu, meta and cuda, from flash_fwd and from supports()."""

import re

import pytest
import torch

import flashattn_ext

BF16, FP16 = torch.bfloat16, torch.float16
I32 = torch.int32


class Arguments:
    """A good call, dense (2, 16, 4, 64) x (2, 32, 2, 64) or packed, to be spoilt."""

    def __init__(self, device, packed=False):
        self.device, self.packed = device, packed
        outer = () if packed else (2,)
        self.q = self.empty(*outer, 16, 4, 64)
        self.k = self.empty(*outer, 32, 2, 64)
        self.v = self.empty(*outer, 32, 2, 64)
        self.options = {}
        if packed:
            self.options = {
                "cu_seqlens_q": self.ints([0, 6, 16]),
                "cu_seqlens_k": self.ints([0, 12, 32]),
                "max_seqlen_q": 10,
                "max_seqlen_k": 20,
            }

    def empty(self, *shape, dtype=BF16, device=None):
        return torch.zeros(shape, dtype=dtype, device=device or self.device)

    def ints(self, values, dtype=I32):
        return torch.tensor(values, dtype=dtype, device="cpu").to(self.device)

    def set(self, **changes):
        for name, value in changes.items():
            if name in ("q", "k", "v"):
                setattr(self, name, value)
            else:
                self.options[name] = value

    def call(self, function=flashattn_ext.flash_fwd):
        return function(self.q, self.k, self.v, **self.options)


def option(name, value):
    return lambda a: a.set(**{name: value})


def tensor(name, *shape, **kwargs):
    return lambda a: a.set(**{name: a.empty(*shape, **kwargs)})


def metadata(name, values, dtype=I32):
    return lambda a: a.set(**{name: a.ints(values, dtype)})


def heads(h, hk):
    return lambda a: a.set(
        q=a.empty(2, 16, h, 64), k=a.empty(2, 32, hk, 64), v=a.empty(2, 32, hk, 64)
    )


def head_dim(d):
    return lambda a: a.set(q=a.empty(2, 16, 4, d), k=a.empty(2, 32, 2, d), v=a.empty(2, 32, 2, d))


def all_of(dtype):
    return lambda a: a.set(q=a.q.to(dtype), k=a.k.to(dtype), v=a.v.to(dtype))


def without(name):
    return lambda a: a.options.pop(name)


def elsewhere(name, values):
    """The lengths on another kind of device than q."""
    other = {"cpu": "meta", "meta": "cpu", "cuda": "cpu"}
    return lambda a: a.set(**{name: torch.tensor(values, dtype=I32).to(other[a.device])})


def by_columns(name):
    def spoil(a):
        t = getattr(a, name)
        a.set(**{name: t.transpose(1, 3).contiguous().transpose(1, 3)})

    return spoil


def out_of(**kwargs):
    shape = kwargs.pop("shape", (2, 16, 4, 64))
    return tensor("out", *shape, **kwargs)


# (what is wrong, how, what the message must hold besides the argument's name)
OPERANDS = [
    ("q", tensor("q", 16, 64), "(16, 64)"),
    ("q", tensor("q", 1, 2, 16, 4, 64), "(1, 2, 16, 4, 64)"),
    ("q", tensor("q", 16, 4, 64), "(16, 4, 64)"),  # packed needs cu_seqlens
    ("q", option("q", [[1.0]]), "list"),
    ("k", option("k", None), "None"),
    ("k", tensor("k", 3, 32, 2, 64), "(3, 32, 2, 64)"),
    ("k", tensor("k", 2, 32, 2, 128), "(2, 32, 2, 128)"),
    ("k", tensor("k", 2, 32, 64), "(2, 32, 64)"),
    ("v", tensor("v", 2, 32, 2, 128), "(2, 32, 2, 128)"),
    ("v", tensor("v", 2, 31, 2, 64), "(2, 31, 2, 64)"),
    ("v", tensor("v", 2, 32, 4, 64), "(2, 32, 4, 64)"),
    ("q", all_of(torch.float64), "float64"),
    ("q", all_of(torch.int8), "int8"),
    ("q", all_of(torch.complex64), "complex64"),
    ("k", tensor("k", 2, 32, 2, 64, dtype=FP16), "float16"),
    ("v", tensor("v", 2, 32, 2, 64, dtype=FP16), "float16"),
    ("k", heads(3, 2), "2"),
    ("k", heads(33, 2), "33"),
    ("k", heads(2, 4), "4"),
    ("k", heads(4, 0), "0"),
    ("q", head_dim(264), "264"),
    ("q", head_dim(512), "512"),
    ("q", head_dim(0), "0"),
    ("q", by_columns("q"), "stride"),
    ("k", by_columns("k"), "stride"),
    ("v", by_columns("v"), "stride"),
]
OPTIONS = [
    ("window_size", option("window_size", (-1, -3)), "-3"),
    ("window_size", option("window_size", (-5, 5)), "-5"),
    ("window_size", option("window_size", (3,)), "(3,)"),
    ("window_size", option("window_size", 7), "7"),
    ("window_size", option("window_size", (1.5, 2)), "1.5"),
    ("window_size", option("window_size", None), "None"),
    ("softcap", option("softcap", -1.0), "-1"),
    ("softcap", option("softcap", float("nan")), "nan"),
    ("softcap", option("softcap", float("inf")), "inf"),
    ("softcap", option("softcap", "5"), "'5'"),
    ("softmax_scale", option("softmax_scale", float("nan")), "nan"),
    ("softmax_scale", option("softmax_scale", float("inf")), "inf"),
    ("softmax_scale", option("softmax_scale", "1"), "'1'"),
    ("causal", option("causal", "yes"), "'yes'"),
    ("return_lse", option("return_lse", "no"), "'no'"),
    ("alibi_slopes", tensor("alibi_slopes", 2, dtype=torch.float32), "(2,)"),  # C75: (b,) or (hk,)
    ("alibi_slopes", tensor("alibi_slopes", 3, 4, dtype=torch.float32), "(3, 4)"),
    ("alibi_slopes", tensor("alibi_slopes", 2, 4, 1, dtype=torch.float32), "(2, 4, 1)"),
    ("alibi_slopes", tensor("alibi_slopes", 4, dtype=BF16), "bfloat16"),
    ("alibi_slopes", option("alibi_slopes", 0.5), "float"),
    ("sinks", tensor("sinks", 2), "(2,)"),
    ("sinks", tensor("sinks", 2, 4), "(2, 4)"),
    ("sinks", tensor("sinks", 4, dtype=FP16), "float16"),
    ("sinks", tensor("sinks", 4, dtype=torch.float64), "float64"),
    ("seqused_k", metadata("seqused_k", [1, 2], torch.int64), "int64"),
    ("seqused_k", metadata("seqused_k", [1, 2, 3]), "3"),
    ("seqused_k", metadata("seqused_k", [[1], [2]]), "(2, 1)"),
    ("seqused_k", elsewhere("seqused_k", [1, 2]), "device"),
    ("max_seqlen_q", option("max_seqlen_q", 16), "cu_seqlens"),
    ("max_seqlen_k", option("max_seqlen_k", 32), "cu_seqlens"),
    ("out", out_of(shape=(2, 16, 4, 32)), "(2, 16, 4, 32)"),
    ("out", out_of(shape=(2, 32, 4, 64)), "(2, 32, 4, 64)"),
    ("out", out_of(dtype=FP16), "float16"),
    ("out", lambda a: a.set(out=a.empty(2, 64, 4, 16).transpose(1, 3)), "stride"),
    ("out", lambda a: a.set(out=a.empty(2, 16, 1, 64).expand(2, 16, 4, 64)), "stride"),
]
PACKED = [
    ("cu_seqlens_q", without("cu_seqlens_q"), "None"),
    ("cu_seqlens_k", without("cu_seqlens_k"), "None"),
    ("max_seqlen_q", without("max_seqlen_q"), "None"),
    ("max_seqlen_k", without("max_seqlen_k"), "None"),
    ("max_seqlen_q", option("max_seqlen_q", -1), "-1"),
    ("max_seqlen_k", option("max_seqlen_k", 2.5), "2.5"),
    ("max_seqlen_k", option("max_seqlen_k", True), "True"),
    ("max_seqlen_q", lambda a: a.set(max_seqlen_q=a.ints(10)), "tensor"),
    ("cu_seqlens_q", metadata("cu_seqlens_q", [0, 6, 16], torch.int64), "int64"),
    ("cu_seqlens_k", metadata("cu_seqlens_k", [0, 12, 32], torch.int64), "int64"),
    ("cu_seqlens_q", metadata("cu_seqlens_q", [[0, 6, 16]]), "(1, 3)"),
    ("cu_seqlens_k", metadata("cu_seqlens_k", [0, 32]), "2"),
    ("cu_seqlens_q", metadata("cu_seqlens_q", []), "0"),
    ("cu_seqlens_q", lambda a: a.set(cu_seqlens_q=a.ints([0, 0, 6, 6, 16, 16])[::2]), "stride"),
    ("cu_seqlens_q", elsewhere("cu_seqlens_q", [0, 6, 16]), "device"),
    ("cu_seqlens_k", elsewhere("cu_seqlens_k", [0, 12, 32]), "device"),
    ("seqused_k", metadata("seqused_k", [1, 2, 3]), "3"),
    ("alibi_slopes", tensor("alibi_slopes", 16, 4, dtype=torch.float32), "(16, 4)"),
    ("q", tensor("q", 1, 16, 4, 64), "(1, 16, 4, 64)"),
    ("k", tensor("k", 1, 32, 2, 64), "(1, 32, 2, 64)"),
    ("v", tensor("v", 33, 2, 64), "(33, 2, 64)"),
]
MATRIX = [
    *((False, *row) for row in OPERANDS + OPTIONS),
    *((True, *row) for row in PACKED),
]
IDS = [f"{'packed' if row[0] else 'dense'}-{row[1]}-{row[3]}" for row in MATRIX]


@pytest.mark.parametrize(("is_packed", "name", "spoil", "got"), MATRIX, ids=IDS)
def test_c106_refused_everywhere(is_packed, name, spoil, got, anywhere):
    arguments = Arguments(anywhere, is_packed)
    spoil(arguments)
    with pytest.raises((ValueError, NotImplementedError)) as error:
        arguments.call()
    message = str(error.value)
    assert re.search(rf"\b{name}\b", message) and got in message and len(message) > len(got) + 20
    assert arguments.call(flashattn_ext.supports) == (False, message)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_the_good_call_is_good(is_packed, anywhere):
    """Or else the matrix above would prove nothing."""
    arguments = Arguments(anywhere, is_packed)
    out = arguments.call()
    assert out.shape == arguments.q.shape and out.dtype == BF16 and out.device.type == anywhere
    assert arguments.call(flashattn_ext.supports) == (True, "")
    arguments.set(return_lse=True)
    _, lse = arguments.call()
    assert lse.shape == ((4, 16) if is_packed else (2, 4, 16)) and lse.dtype == torch.float32


def test_c68_negative_windows_with_causal(anywhere):
    for window in ((-1, -3), (-5, 5), (-2, 0), (0, -2)):
        for causal in (False, True):
            arguments = Arguments(anywhere)
            arguments.set(window_size=window, causal=causal)
            with pytest.raises(ValueError, match="window_size.*-1"):
                arguments.call()


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("pair", [(3, 2), (33, 2), (2, 4), (4, 0), (9, 6)], ids=str)
def test_c85_d14_query_heads_not_a_multiple(pair, is_packed, anywhere):
    arguments = Arguments(anywhere, is_packed)
    outer = () if is_packed else (2,)
    k = arguments.empty(*outer, 32, pair[1], 64)
    arguments.set(q=arguments.empty(*outer, 16, pair[0], 64), k=k, v=k)
    with pytest.raises(ValueError, match=rf"k.*{pair[0]}.*{pair[1]}"):
        arguments.call()


@pytest.mark.parametrize("name", ["k", "v"])
def test_c87_mixed_types(name, anywhere):
    for dtype in (FP16, torch.float32):
        arguments = Arguments(anywhere)
        arguments.set(**{name: getattr(arguments, name).to(dtype)})
        with pytest.raises(ValueError, match=rf"{name}.*bfloat16.*float"):
            arguments.call()


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_c88_gradients_are_refused_with_the_remedy(name, anywhere):
    arguments = Arguments(anywhere)
    arguments.set(sinks=arguments.empty(4))
    tensor = arguments.options["sinks"] if name == "sinks" else getattr(arguments, name)
    tensor.requires_grad_()
    with pytest.raises(NotImplementedError, match="no_grad"):
        arguments.call()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not arguments.call().requires_grad


def test_c96_heads_and_rows_swapped(anywhere):
    """(1, 3, 71280, 128): 71280 rows, handed over as heads."""
    wrong = torch.zeros(128, dtype=BF16, device=anywhere).expand(1, 3, 71280, 128)
    with pytest.raises(ValueError, match=r"q.*71280.*transpose"):
        flashattn_ext.flash_fwd(wrong, wrong, wrong)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_overlapping_out_is_refused(name, device):
    arguments = Arguments(device)
    arguments.set(k=arguments.empty(2, 16, 4, 64), v=arguments.empty(2, 16, 4, 64))
    arguments.set(out=getattr(arguments, name))
    with pytest.raises(ValueError, match=rf"out.*\b{name}\b"):
        arguments.call()


@pytest.mark.gpu
def test_c87_float32_on_a_gpu():
    arguments = Arguments("cuda")
    all_of(torch.float32)(arguments)
    with pytest.raises(NotImplementedError, match="q.*float16.*bfloat16.*float32"):
        arguments.call()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v", "alibi_slopes", "sinks", "out"])
def test_c86_tensors_on_the_cpu_in_a_cuda_call(name):
    arguments = Arguments("cuda")
    shapes = {"alibi_slopes": (4,), "sinks": (4,), "out": (2, 16, 4, 64)}
    dtype = torch.float32 if name == "alibi_slopes" else BF16
    shape = shapes.get(name, (2, 32, 2, 64))
    arguments.set(**{name: torch.zeros(shape, dtype=dtype)})
    with pytest.raises(ValueError, match=rf"{name}.*cuda.*cpu"):
        arguments.call()
    assert Arguments("cuda").call().isfinite().all(), "the CUDA context must survive"
