"""Tiny models of random weights, their inputs, and how close ours must come to eager attention.

Each runs in float32 with eager attention (exact), eager in the tested type (float16 on a GPU), and
in the tested type on our attention. Test files take the fixtures by name: ``sdpa`` holds the calls
left to torch SDPA, ``setting`` is for every test.
"""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
import transformers as hf
from flashattn_ext.integrations import transformers as adapter
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = adapter.register()
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
    # Both experts always: rounding would choose another one.
    "gpt-oss": (
        hf.GptOssConfig,
        hf.GptOssForCausalLM,
        {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
}


def make_model(family, device="cpu"):
    config_class, model_class, extra = FAMILIES[family]
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, attn_implementation="eager", **extra,
    )  # fmt: skip
    config._experts_implementation = "batched_mm"  # plain products, in any type and graph
    return with_random_weights(model_class(config), device)


def with_random_weights(model, device):
    torch.manual_seed(0)
    for parameter in model.parameters():
        # Large enough that attention is far from uniform.
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval().to(device)


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


def token_ids(device="cpu"):
    torch.manual_seed(1)
    return torch.randint(2, VOCABULARY, (BATCH, LENGTH)).to(device)


def inputs(kind, device="cpu"):
    ids, mask = token_ids(device), padding_mask(kind, device)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions_in(mask)}


def positions_in(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


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


def allowed(exact, lowprec):
    """Twice the error of the type, and the rounding of sums in float32."""
    return 2 * (lowprec - exact).abs().max() + 2e-5 * exact.abs().max()


def assert_close(results, rows=None):
    """`results`: of the exact, the low precision and our model."""
    exact, lowprec, ours = (r.float() if rows is None else r.float()[rows] for r in results)
    assert not ours.isnan().any()
    error, bound = (ours - exact).abs().max(), allowed(exact, lowprec)
    assert error <= bound, f"error {error:.3g} > {bound:.3g}"


def assert_best(exact, lowprec, tokens):
    """Each token has the largest of its exact logits, up to the error that a type may have."""
    exact, lowprec = exact.float(), lowprec.float()
    chosen = exact.gather(-1, tokens[..., None])[..., 0]
    assert (exact.amax(-1) - chosen).max() <= 2 * allowed(exact, lowprec)
