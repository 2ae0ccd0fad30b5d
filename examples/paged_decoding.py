"""Greedy text from a transformers model whose keys and values live in a PagedCache."""

from __future__ import annotations

import torch
from paged_cache import Decode, Prefill
from transformers import AttentionInterface

NAME = "fa_ext_pages"


def attention_forward(module, query, key, value, attention_mask, scaling, step, **_):
    """What every layer calls. The model has rotated query and key; both are (b, heads, s, d)."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return step.attend(module.layer_idx, q, k, v, scaling), None


# No mask function goes with it: transformers then makes no mask, and none is needed.
AttentionInterface.register(NAME, attention_forward)


@torch.no_grad()
def greedy(model, cache, prompts, tokens, end=None):
    """Yields for each of at most `tokens` steps {prompt's number: (token, logits)}.

    A prompt whose token was `end` leaves the batch, and its pages are free at once.
    """
    model.set_attn_implementation(NAME)
    step = Prefill(cache, dict(enumerate(prompts)))
    for count in range(tokens):
        # transformers keeps no cache, and hands `step` on to the attention function.
        result = model(
            input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False,
            logits_to_keep=step.last, step=step,
        )  # fmt: skip
        logits = result.logits.flatten(0, 1)
        chosen = logits.argmax(-1).tolist()
        yield dict(zip(step.sequences, zip(chosen, logits, strict=True), strict=True))

        running = dict(zip(step.sequences, chosen, strict=True))
        for sequence in step.sequences:
            if running[sequence] == end or count + 1 == tokens:
                cache.release(sequence)
                del running[sequence]
        if not running:
            return
        step = Decode(cache, running)
