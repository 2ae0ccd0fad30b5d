"""A good call of every public function, or two, which together name all of its arguments. The tests
of bad input (bad_inputs.py) spoil one argument at a time."""

import torch

import flashattn_ext
from flashattn_ext import flash_attn_interface as theirs

BF16, F32 = torch.bfloat16, torch.float32
CACHES = ("k_cache", "v_cache")


def _floats(device, *shape, dtype=BF16):
    return torch.linspace(-1, 1, torch.Size(shape).numel(), device=device).view(shape).to(dtype)


def _ints(device, values):
    return torch.tensor(values, dtype=torch.int32).to(device)


def _score(device, heads=4):
    return {
        "softmax_scale": 0.1,
        "causal": True,
        "window_size": (5, 0),
        "softcap": 5.0,
        "alibi_slopes": _floats(device, heads, dtype=F32),
    }


def _operands(device, q, kv, names=("k", "v")):
    """Queries, keys and values of these shapes, and an out of zeros."""
    tensors = {"q": _floats(device, *q), "out": torch.zeros(q, dtype=BF16, device=device)}
    return tensors | {name: _floats(device, *kv) for name in names}


def _dense(device):
    return {
        **_operands(device, (2, 6, 4, 64), (2, 8, 2, 64)),
        "seqused_k": _ints(device, [8, 3]),
        **_score(device),
        "sinks": _floats(device, 4),
        "return_lse": True,
    }


def _packed(device):
    return {
        **_operands(device, (9, 4, 64), (12, 2, 64)),
        "cu_seqlens_q": _ints(device, [0, 3, 9]),
        "cu_seqlens_k": _ints(device, [0, 8, 12]),
        "max_seqlen_q": 6,
        "max_seqlen_k": 8,
    }


def _new_tokens(device):
    return {
        "k_new": _floats(device, 2, 2, 2, 64),
        "v_new": _floats(device, 2, 2, 2, 64),
        "rotary_cos": _floats(device, 40, 16),
        "rotary_sin": _floats(device, 40, 16),
        "rotary_interleaved": False,
    }


def _cache(device):
    return {
        **_operands(device, (2, 3, 4, 64), (3, 32, 2, 64), CACHES),
        "cache_seqlens": _ints(device, [20, 9]),
        **_new_tokens(device),
        "cache_batch_idx": _ints(device, [2, 0]),
        "cache_leftpad": _ints(device, [0, 4]),
        **_score(device),
        "sinks": _floats(device, 4),
        "num_splits": 2,
        "return_lse": True,
    }


def _pages(device):
    return {
        **_operands(device, (9, 4, 64), (5, 16, 2, 64), CACHES),
        "cache_seqlens": 20,
        "block_table": _ints(device, [[4, 1], [0, 3]]),
        "cu_seqlens_q": _ints(device, [0, 3, 9]),
        "max_seqlen_q": 6,
        "split_size": 64,
    }


def _parts(device):
    return {
        "out_partial": _floats(device, 3, 2, 6, 4, 64, dtype=F32),
        "lse_partial": _floats(device, 3, 2, 4, 6, dtype=F32),
        "out": torch.zeros(2, 6, 4, 64, dtype=BF16, device=device),
        "out_dtype": BF16,
    }


def _two_states(device):
    return {
        "out_a": _floats(device, 2, 6, 4, 64),
        "lse_a": _floats(device, 2, 4, 6, dtype=F32),
        "out_b": _floats(device, 2, 6, 4, 64),
        "lse_b": _floats(device, 2, 4, 6, dtype=F32),
    }


def _problem(device):
    del device  # none is needed
    return {
        "batch": 2,
        "heads": 4,
        "heads_kv": 2,
        "head_dim": 64,
        "seqlen_q": [3, 6],
        "seqlen_k": [8, 20],
        "dtype": BF16,
        "causal": True,
        "window_size": (5, 0),
        "max_seqlen_q": 6,
        "cache": 16,
        "capacity": 32,
        "new_tokens": 2,
        "rotary_dim": 32,
        "num_splits": 2,
        "gpu": "H200",
    }


def _problem_of_fixed_splits(device):
    call = {**_problem(device), "num_splits": 0, "split_size": 64}
    del call["max_seqlen_q"]
    return call


def _flash_attn(call, **changes):
    """A good call under flash-attn's names: what None stands for, it does not have."""
    return {name: value for name, value in {**call, **changes}.items() if value is not None}


ONLY_OURS = {"seqused_k": None, "sinks": None, "out": None, "return_lse": None}
ITS_OWN = {"dropout_p": 0.0, "deterministic": False, "return_attn_probs": True}


def _flash_attn_dense(device):
    return _flash_attn(_dense(device), **ONLY_OURS, **ITS_OWN)


def _flash_attn_kvpacked(device):
    kv = _floats(device, 2, 8, 2, 2, 64)
    return _flash_attn(_flash_attn_dense(device), k=None, v=None, kv=kv)


def _flash_attn_qkvpacked(device):
    qkv = _floats(device, 2, 6, 3, 4, 64)
    return _flash_attn(_flash_attn_dense(device), q=None, k=None, v=None, qkv=qkv)


def _flash_attn_varlen(device):
    return _flash_attn({**_packed(device), **_score(device)}, **ONLY_OURS, **ITS_OWN)


def _flash_attn_varlen_pages(device):
    k, v = (_floats(device, 5, 16, 2, 64) for _ in range(2))
    table = _ints(device, [[4, 1], [0, 3]])
    return _flash_attn(_flash_attn_varlen(device), k=k, v=v, block_table=table)


def _flash_attn_varlen_kvpacked(device):
    kv = _floats(device, 12, 2, 2, 64)
    return _flash_attn(_flash_attn_varlen(device), k=None, v=None, kv=kv)


def _flash_attn_varlen_qkvpacked(device):
    call = _flash_attn_varlen(device)
    lengths = {"cu_seqlens": call["cu_seqlens_q"], "max_seqlen": 6, "cu_seqlens_q": None}
    lengths |= {"cu_seqlens_k": None, "max_seqlen_q": None, "max_seqlen_k": None}
    qkv = _floats(device, 9, 3, 4, 64)
    return _flash_attn(call, q=None, k=None, v=None, qkv=qkv, **lengths)


def _flash_attn_kvcache(device):
    call = _cache(device)
    new = {"k": call["k_new"], "v": call["v_new"], "k_new": None, "v_new": None}
    return _flash_attn(call, **ONLY_OURS, **new, return_softmax_lse=True)


def _flash_attn_kvcache_pages(device):
    call = _pages(device)
    return _flash_attn(
        call, out=None, split_size=None, block_table=None, page_table=call["block_table"]
    )


def _flash_attn_parts(device):
    call = _parts(device)
    return {**call, "lse_partial": call["lse_partial"].mT.contiguous()}


# situation -> (function, good arguments on a device)
CALLS = {
    "flash_fwd": (flashattn_ext.flash_fwd, _dense),
    "flash_fwd, packed": (flashattn_ext.flash_fwd, _packed),
    "flash_fwd_splitkv": (flashattn_ext.flash_fwd_splitkv, _cache),
    "flash_fwd_splitkv, pages": (flashattn_ext.flash_fwd_splitkv, _pages),
    "flash_combine": (flashattn_ext.flash_combine, _parts),
    "merge_attention_states": (flashattn_ext.merge_attention_states, _two_states),
    "plan": (flashattn_ext.plan, _problem),
    "plan, fixed splits": (flashattn_ext.plan, _problem_of_fixed_splits),
    "flash_attn_func": (theirs.flash_attn_func, _flash_attn_dense),
    "flash_attn_kvpacked_func": (theirs.flash_attn_kvpacked_func, _flash_attn_kvpacked),
    "flash_attn_qkvpacked_func": (theirs.flash_attn_qkvpacked_func, _flash_attn_qkvpacked),
    "flash_attn_varlen_func": (theirs.flash_attn_varlen_func, _flash_attn_varlen),
    "flash_attn_varlen_func, pages": (theirs.flash_attn_varlen_func, _flash_attn_varlen_pages),
    "flash_attn_varlen_kvpacked_func": (
        theirs.flash_attn_varlen_kvpacked_func,
        _flash_attn_varlen_kvpacked,
    ),
    "flash_attn_varlen_qkvpacked_func": (
        theirs.flash_attn_varlen_qkvpacked_func,
        _flash_attn_varlen_qkvpacked,
    ),
    "flash_attn_with_kvcache": (theirs.flash_attn_with_kvcache, _flash_attn_kvcache),
    "flash_attn_with_kvcache, pages": (theirs.flash_attn_with_kvcache, _flash_attn_kvcache_pages),
    "flash_attn_combine": (theirs.flash_attn_combine, _flash_attn_parts),
}
