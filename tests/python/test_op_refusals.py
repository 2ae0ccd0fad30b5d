"""The operators called directly, past the checks in Python: what memory safety rests on then. Each
argument that does not fit is refused by its name, and results that were given stay as they were."""

import pytest
import torch
from cases import ints

from flashattn_ext import _ops

B, S, H, HK, D, CAPACITY, NEW = 2, 3, 4, 2, 64, 8, 2
OPEN = {"softmax_scale": 0.125, "window_left": -1, "window_right": -1, "softcap": 0.0}
ABSENT = {"alibi_slopes": None, "sinks": None}


def bf16(device, *shape):
    return torch.ones(shape, dtype=torch.bfloat16, device=device)


def fwd(device):
    k = bf16(device, B, CAPACITY, HK, D)
    lengths = {"cu_seqlens_q": None, "cu_seqlens_k": None, "seqused_k": None}
    bounds = {"max_seqlen_q": -1, "max_seqlen_k": -1}
    q = bf16(device, B, S, H, D)
    return {"q": q, "k": k, "v": k.clone(), **lengths, **bounds, **OPEN, **ABSENT}


def packed(device):
    starts = {"cu_seqlens_q": ints([0, S, 2 * S], device), "cu_seqlens_k": ints([0, 8, 16], device)}
    operands = {name: fwd(device)[name].flatten(0, 1) for name in "qkv"}
    return {**fwd(device), **operands, **starts, "max_seqlen_q": S, "max_seqlen_k": CAPACITY}


def splitkv(device):
    cache = bf16(device, B, CAPACITY, HK, D)
    return {
        "q": bf16(device, B, S, H, D), "k_cache": cache, "v_cache": cache.clone(),
        "cache_seqlens": ints([4, 5], device), "cache_seqlen": 0, "block_table": None,
        "cu_seqlens_q": None, "max_seqlen_q": -1, "cache_batch_idx": None, "cache_leftpad": None,
        **OPEN, **ABSENT, "num_splits": 1, "split_size": 0,
    }  # fmt: skip


def paged(device):
    return {**splitkv(device), "block_table": ints([[0, 1], [1, 0]], device)}


def append(device):
    tokens = {"k_new": bf16(device, B, NEW, HK, D), "v_new": bf16(device, B, NEW, HK, D)}
    tables = {name: bf16(device, 32, 16) for name in ("rotary_cos", "rotary_sin")}
    return {**splitkv(device), **tokens, **tables, "rotary_interleaved": False}


def combine(device):
    return {
        "out_partial": torch.ones(3, B, S, H, D, device=device),
        "lse_partial": torch.zeros(3, B, H, S, device=device),
    }


# The operator that writes into given results, and its good arguments.
CALLS = {
    "fwd": ("fwd_out", fwd),
    "packed": ("fwd_out", packed),
    "splitkv": ("fwd_splitkv_out", splitkv),
    "paged": ("fwd_splitkv_out", paged),
    "append": ("fwd_splitkv_append_out", append),
    "combine": ("combine_out", combine),
}


class Call:
    def __init__(self, kind, device):
        name, arguments = CALLS[kind]
        self.operator, self.names = getattr(_ops, name), _ops._ARGUMENTS[name]
        self.arguments = arguments(device)
        q = self.arguments.get("q")
        shape = (B, S, H, D) if q is None else q.shape
        lse = (H, B * S) if len(shape) == 3 else (B, H, S)
        self.out = torch.full(shape, 7.0, dtype=torch.bfloat16, device=device)
        self.lse = torch.full(lse, 7.0, device=device)
        self.arguments |= {"out": self.out, "lse": self.lse}

    def run(self):
        self.operator(*(self.arguments[name] for name in self.names))

    def written(self):
        return bool((self.out != 7).any() or (self.lse != 7).any())


def on_device(tensor, device):
    """With its strides, which `to` would replace."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)


def shorter(dim):
    return lambda tensor: tensor.narrow(dim, 0, tensor.shape[dim] - 1)


def other_type(tensor):
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def strided(tensor):
    """The same shape with stride 2 in the last dim."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)
    return wide[..., 0].copy_(tensor)


def without_rows(tensor):
    return tensor[:0]


def constant(value):
    return lambda _tensor: value


TOO_LONG = 2**31
# kind of call: argument, what is made of it, what the message begins with, its name as given here
# unless it says another one
SPOILT = {
    "fwd": [
        ("q", torch.Tensor.flatten, "expected 4 dims"),
        ("q", other_type, "k: expected the dtype of q"),
        ("q", strided, "expected stride 1"),
        ("k", shorter(0), "expected q's head dim and batch"),
        ("k", shorter(3), "expected q's head dim"),
        ("k", other_type, "expected the dtype of q"),
        ("k", strided, "expected stride 1"),
        ("v", shorter(1), "expected shape"),
        ("v", other_type, "expected the dtype of q"),
        ("cu_seqlens_q", lambda _: ints([0], "cpu"), "cu_seqlens_q, cu_seqlens_k: expected both"),
        ("seqused_k", lambda _: ints([1], "cpu"), "expected shape"),
        ("window_left", constant(-TOO_LONG - 1), "expected a number of 32 bits"),
        ("window_left", constant(-2), "window.left: expected -1"),
        ("softmax_scale", constant(float("inf")), "scale: expected a finite number"),
        ("alibi_slopes", lambda _: torch.zeros(H, dtype=torch.float64), "expected dtype float32"),
        ("alibi_slopes", lambda _: torch.zeros(H + 1), "expected shape"),
        ("alibi_slopes", lambda _: torch.zeros(B, H + 1), "expected shape"),
        ("alibi_slopes", lambda _: torch.zeros(2 * H)[::2], "expected stride 1"),
        ("sinks", lambda _: torch.zeros(H, dtype=torch.float16), "expected dtype float32 or that"),
        ("sinks", lambda _: torch.zeros(H, dtype=torch.int32), "expected dtype"),
        ("sinks", lambda _: torch.zeros(1, H), "expected shape"),
    ],
    "packed": [
        ("q", lambda tensor: tensor[None], "expected 3 dims"),
        ("k", lambda tensor: tensor[None], "expected q's head dim"),
        ("cu_seqlens_q", without_rows, r"cu_seqlens_q: expected batch \+ 1"),
        ("cu_seqlens_q", other_type, "expected dtype int32"),
        ("cu_seqlens_k", shorter(0), "expected shape"),
        ("cu_seqlens_k", constant(None), "cu_seqlens_q, cu_seqlens_k: expected both"),
    ],
    "splitkv": [
        ("q", lambda tensor: tensor[0], "expected 4 dims"),
        ("q", strided, "expected stride 1"),
        ("k_cache", lambda tensor: tensor[0], "expected 4 dims"),
        ("k_cache", shorter(3), "expected 4 dims with q's head dim"),
        ("k_cache", shorter(0), "v_cache: expected shape"),
        ("cache_seqlens", without_rows, "expected shape"),
        ("v_cache", shorter(1), "expected shape"),
        ("v_cache", other_type, "expected the dtype of q"),
        ("cache_seqlens", other_type, "expected dtype int32"),
        ("cache_seqlens", lambda tensor: tensor[:, None], "expected shape"),
        ("cache_batch_idx", lambda _: ints([0, 1, 1], "cpu"), "expected shape"),
        ("cache_leftpad", lambda _: ints([0], "cpu"), "expected shape"),
        ("cu_seqlens_q", lambda _: ints([0, 1], "cpu"), "q: expected 3 dims"),
        ("num_splits", constant(TOO_LONG), "expected a number of 32 bits"),
        ("num_splits", constant(257), "split.num_splits: expected 0"),
        ("split_size", constant(TOO_LONG), "expected a number of 32 bits"),
        ("split_size", constant(65), "split.split_size: expected a multiple of 64"),
    ],
    "paged": [
        ("block_table", other_type, "expected dtype int32"),
        ("block_table", torch.Tensor.flatten, "expected 2 dims"),
        ("block_table", shorter(0), "expected shape"),
        ("block_table", strided, "expected stride 1"),
        ("cache_batch_idx", lambda _: ints([0, 1], "cpu"), "only without block_table"),
    ],
    "append": [
        ("k_new", lambda tensor: tensor[0], "expected 4 dims"),
        ("k_new", shorter(0), "expected shape"),
        ("k_new", other_type, "expected the dtype of q"),
        ("k_new", strided, "expected stride 1"),
        ("v_new", shorter(1), "expected shape"),
        ("rotary_cos", constant(None), "rotary_cos, rotary_sin: expected both"),
        ("rotary_cos", torch.Tensor.flatten, "expected 2 dims"),
        ("rotary_cos", lambda tensor: tensor[:, :0], "rotary_sin: expected shape"),
        ("rotary_sin", shorter(0), "expected shape"),
        ("rotary_sin", lambda tensor: tensor.t().contiguous().t(), "expected stride 1"),
        ("rotary_sin", other_type, "expected the dtype of q"),
    ],
    "combine": [
        ("out_partial", torch.Tensor.flatten, "expected 4 or 5 dims"),
        ("out_partial", other_type, "expected dtype float16"),
        ("out_partial", strided, "expected stride 1"),
        ("lse_partial", other_type, "expected dtype float32"),
        ("lse_partial", shorter(0), "expected shape"),
    ],
}  # fmt: skip
RESULTS = [
    ("out", shorter(0), "expected shape"),
    ("out", other_type, "expected (the dtype of q|dtype float16)"),
    ("out", strided, "expected stride 1"),
    ("lse", other_type, "expected dtype float32"),
    ("lse", shorter(0), "expected shape"),
    ("lse", strided, "expected a contiguous tensor"),
]


@pytest.mark.parametrize("kind", CALLS)
def test_good_calls(kind, device):
    call = Call(kind, device)
    call.run()
    assert call.written()


@pytest.mark.parametrize("kind", CALLS)
def test_operators_refuse_what_does_not_fit(kind, device):
    for argument, spoil, words in SPOILT[kind] + RESULTS:
        call = Call(kind, device)
        spoilt = spoil(call.arguments[argument])
        if isinstance(spoilt, torch.Tensor) and spoilt.device.type != device:
            spoilt = on_device(spoilt, device)
        call.arguments[argument] = spoilt
        message = words if ": " in words else f"{argument}: {words}"
        with pytest.raises(ValueError, match=f"^{message}"):
            call.run()
        assert not call.written(), argument


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CALLS)
def test_operators_refuse_tensors_of_the_host(kind):
    for name, value in Call(kind, "cuda").arguments.items():
        if isinstance(value, torch.Tensor) and name not in ("q", "out_partial"):
            call = Call(kind, "cuda")
            call.arguments[name] = value.cpu()
            with pytest.raises(ValueError, match="expected the device of q"):
                call.run()
            assert not call.written(), name
