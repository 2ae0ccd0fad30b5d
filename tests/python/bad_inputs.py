"""Bad values for every argument of every public function, as data: how a good value is spoilt, and
what the call then does. The good calls are in good_calls.py."""

import torch

SERVED = "served"
UNSERVED = NotImplementedError


def _elsewhere(tensor):
    other = {"cpu": "meta", "meta": "cpu", "cuda": "cpu"}[tensor.device.type]
    return torch.zeros_like(tensor, device=other)


def _on_another_gpu(tensor):
    return tensor.to(f"cuda:{(tensor.get_device() + 1) % torch.cuda.device_count()}")


def _at_odd_address(tensor):
    flat = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype, device=tensor.device)
    return flat[1 : tensor.numel() + 1].view(tensor.shape).copy_(tensor)


def _of_other_size(tensor):
    return tensor.to(torch.int64 if tensor.dtype == torch.int32 else torch.float64)


TENSOR = {
    "None": lambda t: None,
    "list": lambda t: [1, 2],
    "rank + 1": lambda t: t[None],
    "rank - 1": lambda t: t[0],
    "rank 0": lambda t: t.flatten()[0],
    "first dim": lambda t: torch.cat([t, t[:1]]),
    "last dim": lambda t: torch.cat([t, t[..., :1]], -1),
    "empty": lambda t: t[:0],
    "dtype": _of_other_size,
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.to(torch.bool),
    "device": _elsewhere,
    "stride 2": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "stride 0": lambda t: t[..., :1].expand(t.shape),
    "alignment": _at_odd_address,
}
FLOATS = {
    "half": lambda t: t.to(torch.float16),
    "gradient": lambda t: t.clone().requires_grad_(),
}
HEADS = {"heads": lambda t: torch.cat([t, t[..., :1, :]], -2)}
ANYTHING = {"None": None, "text": "3", "list": [3, 4, 5], "tensor": torch.tensor(3), "3j": 3j}
NUMBER = {**ANYTHING, "bool": True, "nan": float("nan"), "inf": float("inf"), "2.5": 2.5, "-3": -3}
NUMBER |= {"2^31": 2**31, "2^70": 2**70, "-2^70": -(2**70), "1e39": 1e39, "dtype": torch.float64}
PAIR = {"(1,)": (1,), "(-2, 0)": (-2, 0), "(1.5, 0)": (1.5, 0), "(2^70, 1)": (2**70, 1)}
TRUTH = {**ANYTHING, "1": 1}


def spoils(name, arguments):
    """kind -> function that makes the bad value of an argument of a good call."""
    value = arguments[name]
    if not torch.is_tensor(value):
        kinds = TRUTH if isinstance(value, bool) else NUMBER
        kinds = {**kinds, **PAIR} if isinstance(value, (tuple, list)) else kinds
        return {kind: lambda bad=bad: bad for kind, bad in kinds.items()}
    kinds = {**TENSOR, **(FLOATS if value.is_floating_point() else {})}
    kinds |= HEADS if value.dim() > 2 else {}
    if not value.is_meta:
        kinds["sparse"] = lambda t: t.to_sparse()
    if value.is_cuda and torch.cuda.device_count() > 1:
        kinds["another GPU"] = _on_another_gpu
    made = {kind: lambda spoil=spoil: spoil(value) for kind, spoil in kinds.items()}
    if name == "out" and not value.is_meta:
        made |= {
            f"on {other}": _on(arguments, other)
            for other in arguments
            if other != "out" and torch.is_tensor(arguments[other])
        }
    return made


def _on(arguments, other):
    """An `out` that begins in the memory of another argument, which it moves there."""

    def make():
        out, tensor = arguments["out"], arguments[other]
        sizes = out.nbytes, tensor.nbytes
        memory = torch.zeros(sum(sizes) + 16, dtype=torch.uint8, device=out.device)
        moved = memory[: sizes[1]].view(tensor.dtype).view(tensor.shape)
        arguments[other] = moved.copy_(tensor)
        begin = sizes[1] // 32 * 16  # aligned, and before the other's end
        return memory[begin : begin + sizes[0]].view(out.dtype).view(out.shape)

    return make


# Under which name a message speaks of an argument, where that is another one (documented there).
OTHER_NAMES = {
    "flash_attn_kvpacked_func": {"kv": "kv|k"},
    "flash_attn_qkvpacked_func": {"qkv": "qkv|q"},
    "flash_attn_varlen_func, pages": {"k": "k_cache", "v": "v_cache"},
    "flash_attn_varlen_kvpacked_func": {"kv": "kv|k"},
    "flash_attn_varlen_qkvpacked_func": {
        "qkv": "qkv|q", "cu_seqlens": "cu_seqlens_q", "max_seqlen": "max_seqlen_q",
    },
    "flash_attn_with_kvcache": {"k": "k_new", "v": "v_new"},
    "flash_attn_with_kvcache, pages": {"page_table": "page_table|block_table"},
}  # fmt: skip
# Where two arguments do not fit each other, a message may begin with the other one.
RELATIONS = {"None", "rank - 1", "first dim", "last dim", "heads", "empty", "half", "device"}
RELATIONS |= {"another GPU"}
PARTNERS = {
    "q": "k|k_cache|cache_seqlens|cu_seqlens_q|alibi_slopes|out",
    "k": "v",
    "k_cache": "v_cache",
    "cu_seqlens_q": "q|cu_seqlens_q, cu_seqlens_k|cu_seqlens_k|block_table",
    "cu_seqlens_k": "cu_seqlens_q, cu_seqlens_k",
    "block_table": "k|cache_seqlens",
    "rotary_cos": "rotary_sin",
    "out_partial": "lse_partial|out",
    "out_a": "out_b",
    "cache": "capacity",
}
OPTIONAL = (
    "seqused_k softmax_scale alibi_slopes sinks out cache_batch_idx cache_leftpad split_size "
    "out_dtype heads_kv capacity gpu plan/max_seqlen_q"
)
SWITCHES = "return_attn_probs return_softmax_lse deterministic"
METADATA = (
    "seqused_k cu_seqlens_q cu_seqlens_k cu_seqlens cache_seqlens block_table page_table "
    "cache_batch_idx cache_leftpad"
)
MERGED = "lse_partial out_a lse_a out_b lse_b"
COPIED = (  # as flash-attn does
    "kv qkv flash_attn_func/q flash_attn_func/k flash_attn_func/v flash_attn_varlen_func/q "
    "flash_attn_varlen_func/k flash_attn_varlen_func/v flash_attn_varlen_func,pages/q "
    "flash_attn_varlen_func,pages/block_table flash_attn_kvpacked_func/q "
    "flash_attn_varlen_kvpacked_func/q flash_attn_with_kvcache/q flash_attn_with_kvcache/k "
    "flash_attn_with_kvcache/v flash_attn_with_kvcache/cache_batch_idx "
    "flash_attn_with_kvcache,pages/q page_table"
)
PACKED_Q = (
    "flash_attn_varlen_func/q flash_attn_varlen_func,pages/q flash_attn_varlen_kvpacked_func/q "
    "flash_attn_with_kvcache,pages/q"
)
TYPED = "q qkv out_partial out_a out_b"
# kinds, arguments (or situation/argument), outcome; what is not here raises a ValueError.
OUTCOMES = (
    ("None", f"{OPTIONAL} flash_attn_with_kvcache,pages/cache_seqlens", SERVED),
    ("None|text|list|tensor|3j|1", SWITCHES, SERVED),  # their truth counts
    ("alignment", f"{METADATA} alibi_slopes sinks rotary_cos rotary_sin {MERGED}", SERVED),
    ("alignment", "out_partial flash_combine/out flash_attn_combine/out", SERVED),
    ("stride 2|stride 0", f"{MERGED} {COPIED}", SERVED),
    ("2.5|-3|2^31|2^70|-2^70", "softmax_scale", SERVED),
    ("2.5|2^31|2^70", "softcap", SERVED),
    ("2^31|2^70", "max_seqlen_q max_seqlen_k max_seqlen split_size", SERVED),
    ("2^31|2^70", "plan/max_seqlen_q", ValueError),
    ("(2^70, 1)", "window_size", SERVED),
    ("last dim", "block_table page_table qkv cu_seqlens", SERVED),
    ("first dim|empty", f"{PACKED_Q} flash_attn_varlen_kvpacked_func/kv qkv", SERVED),
    ("first dim", "cu_seqlens", SERVED),
    ("half", "qkv out_partial out_a out_b", SERVED),
    ("dtype|complex|bool", TYPED, UNSERVED),
    ("dtype", "dtype", UNSERVED),
    ("last dim", "flash_fwd_splitkv/q flash_fwd_splitkv,pages/q", UNSERVED),
    ("last dim", "flash_attn_with_kvcache/q flash_attn_with_kvcache,pages/q", UNSERVED),
    ("last dim", "flash_attn_varlen_func,pages/q", UNSERVED),
    ("|".join(NUMBER), "dropout_p", UNSERVED),
)
TABLE = {
    (name, kind): result
    for kinds, names, result in OUTCOMES
    for kind in kinds.split("|")
    for name in names.split()
}


def outcome(situation, name, kind):
    """(exception, what the message may begin with), or SERVED."""
    here = f"{situation.replace(' ', '')}/{name}"
    result = TABLE.get((here, kind), TABLE.get((name, kind), ValueError))
    if kind == "gradient":
        result = UNSERVED
    if result is SERVED:
        return SERVED
    names = OTHER_NAMES.get(situation, {}).get(name, name)
    if kind in RELATIONS:
        partners = (PARTNERS.get(one) for one in names.split("|"))
        names = "|".join([names, *filter(None, partners)])
    return result, names
