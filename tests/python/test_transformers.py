"""Causal language models on the transformers adapter: padding, caches, windows, softcap, sinks."""

import inspect

import pytest
import tiny_models
import torch
from tiny_models import (
    BATCH,
    FAMILIES,
    LENGTH,
    NAME,
    PADDINGS,
    assert_close,
    hf,
    inputs,
    make_model,
    set_attention,
    trio,
)

sdpa, setting = tiny_models.sdpa, tiny_models.setting
# The name of a model's cache, as argument and in its output. Versions before the renaming ignore
# the new name without a word.
_ARGUMENTS = inspect.signature(hf.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _ARGUMENTS else "past_key_values"


@torch.no_grad()
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family, padding, device, sdpa):
    models = trio(make_model(family, device))
    batch = inputs(padding, device)
    results = [model(**batch, use_cache=False).logits for model in models]
    assert_close(results, batch["attention_mask"].bool())
    assert not sdpa


@torch.no_grad()
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_changes_the_logits(padding):
    """What the other tests compare would not agree if padding were ignored."""
    model = set_attention(make_model("llama"), NAME)
    batch = inputs(padding)
    real = batch["attention_mask"].bool()
    with_mask = model(**batch).logits[real]
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    difference = (model(**batch).logits[real] - with_mask).abs().max()
    # On the right, padding is behind every real query: causal attention alone hides it.
    assert difference > 0.1 if padding == "left" else difference < 1e-4


def make_cache(kind, config, capacity):
    if kind == "dynamic":
        return hf.DynamicCache(config=config)
    return hf.StaticCache(config=config, max_cache_len=capacity)


@torch.no_grad()
@pytest.mark.parametrize("masked", ["none", "left", "without mask"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_in_steps(family, cache, masked, device, sdpa):
    """A prompt in two pieces, then single tokens: the queries are the last of the keys."""
    models = trio(make_model(family, device))
    batch = inputs("left" if masked == "left" else "none", device)
    caches = [make_cache(cache, model.config, LENGTH + 4) for model in models]
    for begin, end in ((0, 4), (4, 9), (9, 10), (10, 11), (11, 12)):
        step = {name: tensor[:, begin:end] for name, tensor in batch.items()}
        real = step["attention_mask"].bool()
        step["attention_mask"] = batch["attention_mask"][:, :end]
        if masked == "without mask":
            del step["attention_mask"]
        results = [
            model(**step, **{CACHE: c}).logits for model, c in zip(models, caches, strict=True)
        ]
        assert [int(c.get_seq_length()) for c in caches] == [end] * 3
        if real.any():
            assert_close(results, real)
    assert not sdpa


@torch.no_grad()
def test_gaps_are_left_to_sdpa(sdpa):
    """A right-padded prompt that is continued: padding between a sequence's tokens."""
    model = make_model("llama")
    prompt = inputs("right")
    step = {name: tensor[:, :1] for name, tensor in inputs("none").items()}
    step["position_ids"] = prompt["attention_mask"].sum(-1, keepdim=True)
    step["attention_mask"] = torch.nn.functional.pad(prompt["attention_mask"], (0, 1), value=1)
    logits = []
    for name in ("eager", NAME):
        cache = {CACHE: set_attention(model, name)(**prompt)[CACHE]}
        assert not sdpa
        logits.append(model(**step, **cache).logits)
    assert_close([logits[0], *logits])
    assert len(sdpa) == 2


@torch.no_grad()
def test_gaps_with_softcap_raise():
    model = set_attention(make_model("gemma2"), NAME)
    batch = inputs("none")
    batch["attention_mask"][1, 4:6] = 0
    with pytest.raises(NotImplementedError, match="softcap"):
        model(**batch)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_callers_mask_is_left_to_sdpa(kind, sdpa):
    model = make_model("llama")
    ids = inputs("none")["input_ids"]
    mask = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.5
    mask |= torch.eye(LENGTH, dtype=torch.bool)
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    exact = model(input_ids=ids, attention_mask=additive).logits
    set_attention(model, NAME)
    ours = model(input_ids=ids, attention_mask=mask if kind == "bool" else additive).logits
    assert_close([exact, exact, ours])
    assert len(sdpa) == 2


PACKED = [("cu_seq_lens", family) for family in FAMILIES]
# GPT-OSS does not tell its masks of the positions.
PACKED += [("position_ids", family) for family in FAMILIES if family != "gpt-oss"]


@torch.no_grad()
@pytest.mark.parametrize(("given", "family"), PACKED)
def test_packed_sequences(family, given, device, sdpa):
    """Each sequence as if it were alone."""
    models = trio(make_model(family, device))
    ids = inputs("none", device)["input_ids"][:1]
    lengths = (7, 1, 4)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    packing = {"position_ids": positions, "use_cache": False}
    if given == "cu_seq_lens":
        starts = torch.tensor([0, 7, 8, 12], device=device)
        packing.update(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=7, max_length_k=7)
    ours = models[2](input_ids=ids, **packing).logits
    for begin, end in ((0, 7), (7, 8), (8, 12)):
        alone = [model(input_ids=ids[:, begin:end]).logits for model in models[:2]]
        assert_close([*alone, ours[:, begin:end]])
    assert not sdpa


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_compiled_without_graph_breaks(family, monkeypatch):
    monkeypatch.delenv("FLASHATTN_EXT_CHECK")
    model = set_attention(make_model(family), NAME)
    batch = inputs("none")
    del batch["attention_mask"]
    expected = model(**batch, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close([expected, expected, compiled(**batch, use_cache=False).logits])


def test_gradients_are_refused():
    model = set_attention(make_model("llama"), NAME)
    with pytest.raises(NotImplementedError, match="gradient"):
        model(**inputs("left"))
