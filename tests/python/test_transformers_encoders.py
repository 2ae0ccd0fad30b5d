"""Encoders and encoder-decoders on the transformers adapter: both directions, cross-attention."""

import pytest
import tiny_models
import torch
from tiny_models import (
    BATCH,
    LENGTH,
    NAME,
    PADDINGS,
    VOCABULARY,
    assert_best,
    assert_close,
    hf,
    padding_mask,
    set_attention,
    token_ids,
    trio,
    with_random_weights,
)

sdpa, setting = tiny_models.sdpa, tiny_models.setting
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "attn_implementation": "eager",
}  # fmt: skip


def bert():
    return hf.BertModel(hf.BertConfig(**SHAPE, **TOKENS), add_pooling_layer=False)


def modernbert():
    """A layer that sees everything and one that sees 3 tokens to each side."""
    layers = ["full_attention", "sliding_attention"]
    config = hf.ModernBertConfig(**SHAPE, **TOKENS, local_attention=6, layer_types=layers)
    return hf.ModernBertModel(config)


def bart():
    config = hf.BartConfig(
        d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
        decoder_start_token_id=1, forced_eos_token_id=None, attn_implementation="eager", **TOKENS,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config)


def t5gemma():
    """Windows in both directions (encoder) and backwards, softcap, cross-attention."""
    part = SHAPE | TOKENS | {
        "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 3,
        "attn_logit_softcapping": 5.0, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    config = hf.T5GemmaConfig(
        encoder=part, decoder=part, vocab_size=VOCABULARY, attn_implementation="eager"
    )
    return hf.T5GemmaForConditionalGeneration(config)


ENCODERS = {"bert": bert, "modernbert": modernbert}
BOTH = {"bart": bart, "t5gemma": t5gemma}


@torch.no_grad()
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", ENCODERS)
def test_states(family, padding, device, sdpa):
    batch = {"input_ids": token_ids(device), "attention_mask": padding_mask(padding, device)}
    models = trio(with_random_weights(ENCODERS[family](), device))
    results = [model(**batch).last_hidden_state for model in models]
    assert_close(results, batch["attention_mask"].bool())
    assert not sdpa


@torch.no_grad()
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("family", ENCODERS)
def test_padding_changes_the_states(family, padding):
    """What the other tests compare would not agree if padding were ignored."""
    model = set_attention(with_random_weights(ENCODERS[family](), "cpu"), NAME)
    used = padding_mask(padding)
    states = [
        model(token_ids(), attention_mask=mask).last_hidden_state[used.bool()]
        for mask in (used, torch.ones_like(used))
    ]
    assert (states[0] - states[1]).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("length", [5, LENGTH])
@pytest.mark.parametrize("family", BOTH)
def test_logits_of_encoder_decoders(family, length, padding, device, sdpa):
    """Also with as many tokens in the decoder as in the encoder, whose padding is not theirs."""
    models = trio(with_random_weights(BOTH[family](), device))
    ids = token_ids(device)
    batch = {"input_ids": ids, "attention_mask": padding_mask(padding, device)}
    batch["decoder_input_ids"] = ids.flip(-1)[:, :length]
    assert_close([model(**batch, use_cache=False).logits for model in models])
    assert not sdpa


@torch.no_grad()
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", BOTH)
def test_generate(family, cache, device, sdpa):
    batch = {"input_ids": token_ids(device), "attention_mask": padding_mask("right", device)}
    exact, lowprec, ours = trio(with_random_weights(BOTH[family](), device))
    options = {"max_new_tokens": 10, "cache_implementation": cache, "disable_compile": True}
    texts = ours.generate(**batch, do_sample=False, **options)
    assert texts.shape == (BATCH, 11)
    logits = [model(**batch, decoder_input_ids=texts[:, :-1]).logits for model in (exact, lowprec)]
    assert_best(*logits, texts[:, 1:])
    assert not sdpa
