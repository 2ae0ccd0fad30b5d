"""`generate` on the transformers adapter: padded batches, caches, beams, compiled steps."""

import pytest
import tiny_models
import torch
from tiny_models import (
    BATCH,
    FAMILIES,
    LENGTH,
    NAME,
    assert_best,
    hf,
    inputs,
    make_model,
    positions_in,
    set_attention,
    trio,
)
from torch.nn.functional import pad

sdpa, setting = tiny_models.sdpa, tiny_models.setting
NEW = 10
CACHES = [None, "static"]


def prompts(kind, device="cpu"):
    """Ids and mask: padded as `kind` says, or of one token each."""
    batch = inputs("none" if kind == "one token" else kind, device)
    columns = slice(0, 1) if kind == "one token" else slice(None)
    return {name: batch[name][:, columns] for name in ("input_ids", "attention_mask")}


def generate(model, batch, **options):
    # On GPUs transformers compiles the steps of a static cache, if it is let.
    options = {"disable_compile": True, "max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(**batch, **options)


def assert_greedy(exact, lowprec, texts, batch):
    length = batch["input_ids"].shape[1]
    assert texts.shape == (BATCH, length + NEW)
    mask = pad(batch["attention_mask"], (0, NEW), value=1)
    whole = {"input_ids": texts, "attention_mask": mask, "position_ids": positions_in(mask)}
    logits = [model(**whole).logits[:, length - 1 : -1] for model in (exact, lowprec)]
    assert_best(*logits, texts[:, length:])


@torch.no_grad()
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", ["none", "left", "one token"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_is_the_best(family, kind, cache, device, sdpa):
    exact, lowprec, ours = trio(make_model(family, device))
    batch = prompts(kind, device)
    assert_greedy(exact, lowprec, generate(ours, batch, cache_implementation=cache), batch)
    assert not sdpa


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_eager_attention(family, cache, beams, sdpa):
    exact, _, ours = trio(make_model(family))
    options = {"cache_implementation": cache, "num_beams": beams}
    texts = [generate(model, prompts("left"), **options) for model in (exact, ours)]
    assert torch.equal(*texts)
    assert not sdpa


@torch.no_grad()
def test_compiled_steps(device, sdpa, monkeypatch):
    """With padding, a window and sinks: transformers makes the masks outside the graph."""
    monkeypatch.delenv("FLASHATTN_EXT_CHECK")
    exact, lowprec, ours = trio(make_model("gpt-oss", device))
    torch._dynamo.reset()
    how = hf.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    how._compile_all_devices = True
    batch = prompts("left", device)
    options = {"cache_implementation": "static", "disable_compile": False, "compile_config": how}
    assert_greedy(exact, lowprec, generate(ours, batch, **options), batch)
    assert not sdpa


def test_rows_of_a_batch_are_as_if_alone():
    model = set_attention(make_model("mistral"), NAME)
    batch = prompts("left")
    texts = generate(model, batch)
    for row in range(BATCH):
        prompt = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        alone = generate(model, {"input_ids": prompt[None]})
        assert torch.equal(alone[0, len(prompt) :], texts[row, LENGTH:])
