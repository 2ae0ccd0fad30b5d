"""The transformers adapter in tiny models of random weights, against transformers' eager attention.

Each model runs in float32 with eager attention (exact), eager in the tested type (float16 on a
GPU), and in the tested type on our attention. `sdpa` holds the calls left to torch SDPA.
"""

import copy
import inspect

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
import transformers as hf
from flashattn_ext.integrations import transformers as adapter
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = adapter.register()
# The name of a model's cache, as argument and in its output. Versions before the renaming ignore
# the new name without a word.
_ARGUMENTS = inspect.signature(hf.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _ARGUMENTS else "past_key_values"
BATCH, LENGTH, VOCABULARY = 3, 12, 97
PADDINGS = {"none": (0, 0, 0), "left": (0, 3, 11), "right": (0, -3, -11), "both": (5, 0, -4)}
FAMILIES = {
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
    "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": 5}),
    "gemma2": (
        hf.Gemma2Config,
        hf.Gemma2ForCausalLM,
        {"sliding_window": 5, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "gpt-oss": (
        hf.GptOssConfig,
        hf.GptOssForCausalLM,
        {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


def make_model(family, device="cpu"):
    config_class, model_class, extra = FAMILIES[family]
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, attn_implementation="eager", **extra,
    )  # fmt: skip
    config._experts_implementation = "eager"  # plain products, in any type
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        # Large enough that attention is far from uniform.
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.to(device)


@pytest.fixture
def sdpa(monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr(adapter, "sdpa_attention_forward", counted)
    return calls


@pytest.fixture(autouse=True)
def setting(monkeypatch):
    """Lengths that break flash_fwd's contract raise; these models are too small for threads."""
    monkeypatch.setenv("FLASHATTN_EXT_CHECK", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def padding_mask(kind, device="cpu"):
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long, device=device)
    for row, count in enumerate(PADDINGS[kind]):
        mask[row, : max(count, 0)] = 0
        mask[row, LENGTH + min(count, 0) :] = 0
    return mask


def inputs(kind, device="cpu"):
    torch.manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (BATCH, LENGTH)).to(device)
    mask = padding_mask(kind, device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def set_attention(model, name):
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == name
    return model


def trio(model):
    """(exact, lowprec, ours): the three models to compare."""
    exact, lowprec = copy.deepcopy(model), copy.deepcopy(model)
    ours = set_attention(copy.deepcopy(model), NAME)
    if next(model.parameters()).is_cuda:
        lowprec, ours = lowprec.half(), ours.half()
    return exact, lowprec, ours


def assert_close(results, rows=None):
    """`results`: of the exact, the low precision and our model."""
    exact, lowprec, ours = (r.float() if rows is None else r.float()[rows] for r in results)
    bound = 2 * (lowprec - exact).abs().max() + 2e-5 * exact.abs().max()
    assert not ours.isnan().any()
    error = (ours - exact).abs().max()
    assert error <= bound, f"error {error:.3g} > {bound:.3g}"


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


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(family, padding, cache, sdpa):
    model = make_model(family)
    batch = inputs(padding)
    del batch["position_ids"]
    texts = []
    for name in ("eager", NAME):
        set_attention(model, name)
        texts.append(
            model.generate(**batch, max_new_tokens=10, do_sample=False, cache_implementation=cache)
        )
    assert texts[0].shape == (BATCH, LENGTH + 10)
    assert torch.equal(*texts)
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


@torch.no_grad()
@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_sequences(family, given, device, sdpa):
    models = trio(make_model(family, device))
    ids = inputs("none", device)["input_ids"][:1]
    lengths = (7, 1, 4)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    packing = {"position_ids": positions, "use_cache": False}
    results = [model(input_ids=ids, **packing).logits for model in models[:2]]
    if given == "cu_seq_lens":
        starts = torch.tensor([0, 7, 8, 12], device=device)
        packing.update(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=7, max_length_k=7)
    ours = models[2](input_ids=ids, **packing).logits
    assert_close([*results, ours])
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
