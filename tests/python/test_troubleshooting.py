"""docs/troubleshooting.md has every message that the sources can raise, and no other."""

import pytest
import torch
from messages import all_messages, covers, missing, own_words, page_entries

import flashattn_ext

MESSAGES = all_messages()
ENTRIES = page_entries()

# Who puts messages together out of their callers' words.
BUILDERS = {
    ("build_support/__main__.py", "error: …"),
    ("build_support/backend.py", "error: …"),
    ("csrc/dispatch.cpp", "…: …"),
    ("csrc/kernels/launch_kernel.h", "…: …: …"),
    ("csrc/torch/tensor_checks.h", "…"),
    ("csrc/checks.h", "…: expected …, got …"),
    ("flashattn_ext/bench/options.py", "expected …, got …"),
}


def test_every_message_is_on_the_page():
    worded = [message for message in MESSAGES if own_words(message.text)]
    assert len(worded) > 250
    lacking = [f"{m.where}: {m.text}" for m in missing(worded, ENTRIES)]
    assert not lacking, "\n".join(lacking)


def test_no_message_without_words_but_those_of_the_builders():
    """A new function that builds messages has to be made known to messages.py."""
    wordless = {(m.where.rpartition(":")[0], m.text) for m in MESSAGES if not own_words(m.text)}
    assert wordless == BUILDERS


def test_every_entry_says_something_and_is_raised_somewhere():
    assert len(ENTRIES) > 150
    for entry in ENTRIES:
        assert len(own_words(entry)) >= 3, entry
        matched = [message for message in MESSAGES if covers(entry, message.text)]
        # The C++ library's ranges are one row; nothing else may stand for so much.
        most = 40 if entry == "…: expected … ... …, got …" else 10
        assert 0 < len(matched) <= most, f"{entry}: raised in {len(matched)} places"


def of(*shape, **options):
    return torch.zeros(shape, **options)


def fwd(*tensors, **options):
    flashattn_ext.flash_fwd(*tensors, **options)


X = of(1, 8, 2, 32)
CALLS = {
    "shape": lambda: fwd(X, X, of(1, 8, 2, 40)),
    "window": lambda: fwd(X, X, X, window_size=(-2, 0)),
    "no tensor": lambda: fwd(X, None, X),
    "strides": lambda: fwd(X, of(1, 8, 32, 2).transpose(2, 3), X),
    "gradient": lambda: fwd(X.clone().requires_grad_(), X, X),
    "capacity": lambda: flashattn_ext.flash_fwd_splitkv(X[:, :1], X, X, cache_seqlens=9),
    "parts": lambda: flashattn_ext.flash_combine(of(2, 1, 4, 1, 8), of(2, 1, 4, 1)),
    "operator": lambda: flashattn_ext._ops.combine(of(8), of(8), torch.float32),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_raised_is_on_the_page(call):
    """The page against reality, where the tests above compare it with the sources."""
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        CALLS[call]()
    assert any(covers(entry, str(raised.value)) for entry in ENTRIES)
