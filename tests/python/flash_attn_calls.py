"""Calls under flash-attn's names: cases.py and caches.py draw the inputs, a function under test
runs on them. SCORE has the defaults of flash-attn 2.8.3."""

import torch
from cases import dense, packed

import flashattn_ext.flash_attn_interface as flash_attn

SCORE = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def score_of(call):
    options, case = call.options, call.case
    return {
        "softmax_scale": case.scale,
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "alibi_slopes": options.get("alibi_slopes"),
    }


def arguments_of(name, call):
    """The positional arguments of a function, out of a case that says the same."""
    o = call.options
    lengths = [o.get(key) for key in VARLEN] if call.case.packed else []
    if "qkvpacked" in name:
        return [torch.stack([call.q, call.k, call.v], dim=-3), *lengths[::2]]
    if "kvpacked" in name:
        return [call.q, torch.stack([call.k, call.v], dim=-3), *lengths]
    return [call.q, call.k, call.v, *lengths]


def run(name, call, **changes):
    function = getattr(flash_attn, name)
    return function(*arguments_of(name, call), **score_of(call) | changes)


def same(call, left, right):
    """Bit by bit, in the rows of the sequences."""
    pairs = zip(call.per_sequence(left, left), call.per_sequence(right, right), strict=True)
    return all(torch.equal(a, b) for (a, _), (b, _) in pairs)


DENSE = dense(2, 33, 33, heads=(4, 4))
GROUPED = dense(2, 21, 50, heads=(4, 2))
PACKED = packed((33, 33), (7, 7), (0, 0), heads=(4, 4), tail=0)
PACKED_GROUPED = packed((33, 50), (1, 70), (9, 3), (0, 5), heads=(6, 2))
CASES = {
    "flash_attn_func": GROUPED,
    "flash_attn_kvpacked_func": GROUPED,
    "flash_attn_qkvpacked_func": DENSE,
    "flash_attn_varlen_func": PACKED_GROUPED,
    "flash_attn_varlen_kvpacked_func": PACKED_GROUPED,
    "flash_attn_varlen_qkvpacked_func": PACKED,
}
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3)},
    "causal-window": {"causal": True, "window": (9, -1)},
    "softcap": {"softcap": 15.0},
    "scale": {"scale": 0.3},
    "alibi-h": {"alibi": "h", "causal": True},
    "alibi-bh": {"alibi": "bh"},
    "fp16": {"dtype": torch.float16},
    "d-20": {"d": 20},
}
