"""A real language model on flashattn_ext: SmolLM2-135M-Instruct, greedily, next to torch SDPA.

    python examples/generate.py [--tokens 40] [--device cuda] [--random]

Four prompts of different lengths form one batch. Ours keeps its keys and values in pages: the
prompts run through `flash_fwd`, packed without padding, and each further token through
`flash_fwd_splitkv`. The cache is in paged_cache.py, the loop in paged_decoding.py. SDPA gets the
batch padded, in transformers' own loop and cache. A single prompt is then written in that loop by
both, ours as the attention that `flashattn_ext.integrations.transformers` registers.

Shows both texts of each prompt and the speeds, and ends with exit code 1 if a text differs. In
exact arithmetic greedy texts are equal. In floating point two tokens whose logits are closer than
the rounding noise may swap: a first difference whose logit gap, in both runs, is at most 1e-4
(float32) or 1e-2 (float16) of the largest logit is a tie. The model runs in float32 on the CPU,
where ties are then next to impossible, and in float16 on a GPU, whose kernels have no float32 (in
bfloat16, the logits of random weights were seen to move by 2e-2).

About the speeds: on a CPU a model of this size spends 98 % of a step outside of attention, mostly
in matrix products, so that on a busy machine the differences between two rows are noise.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from functools import partial

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"  # progress is shown below, in one voice
# Threads that wait without spinning: 5 to 12 times as fast on 2 busy cores (load 6).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

try:
    import transformers
except ImportError:
    sys.exit(
        "This example needs transformers 5.17 or newer, and gguf: pip install transformers gguf"
    )
import paged_decoding
from flashattn_ext._build import BUILD
from flashattn_ext.integrations.transformers import register
from paged_cache import PagedCache
from smollm import BATCH, SINGLE, encode, load
from terminal import COLUMN, Progress, side_by_side
from torch.utils._python_dispatch import TorchDispatchMode

ADAPTER, PAGES, SDPA = register(), paged_decoding.NAME, "sdpa"
LABELS = {ADAPTER: "flashattn_ext", PAGES: "flashattn_ext, pages", SDPA: "torch SDPA"}
PAGE = 16  # tokens
TIE = {torch.float32: 1e-4, torch.float16: 1e-2}  # of the largest logit


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

    def __call__(self, input_ids=None, scores=None):
        self.times.append(self.now())
        self.progress.show(f"{self.label}: token {len(self.times) - 1} of {self.tokens}")
        return scores


class Text:
    """What one attention made of one batch: for each prompt its tokens and their logits."""

    def __init__(self, tokens, logits, clock, pages=None):
        self.tokens, self.logits, self.pages = tokens, logits, pages
        begin, first, last = clock.times[0], clock.times[1], clock.times[-1]
        self.prefill, self.decode = first - begin, last - first  # seconds
        self.decoded = sum(len(row) - 1 for row in tokens)


def write(attention, model, batch, tokens, clock):
    """With the `generate` of transformers."""
    model.set_attn_implementation(attention)
    result = model.generate(
        **batch, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True,
        output_logits=True, logits_processor=[clock],
    )  # fmt: skip
    rows = result.sequences[:, batch["input_ids"].shape[1] :].tolist()
    end = model.generation_config.eos_token_id
    rows = [row[: row.index(end) + 1] if end in row else row for row in rows]
    return Text(rows, torch.stack(result.logits, 1).float().cpu(), clock)


def write_in_pages(model, batch, tokens, clock):
    padded = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    prompts = [ids[real].tolist() for ids, real in padded]
    stored = [len(prompt) + tokens - 1 for prompt in prompts]  # nobody attends to the last token
    config = model.config
    cache = PagedCache(
        config.num_hidden_layers, sum(-(-length // PAGE) for length in stored),
        config.num_key_value_heads, model.model.layers[0].self_attn.head_dim,
        model.dtype, model.device, PAGE,
    )  # fmt: skip
    end = model.generation_config.eos_token_id
    written, logits = ([[] for _ in prompts] for _ in range(2))
    for step in paged_decoding.greedy(model, cache, prompts, tokens, end):
        clock()
        for row, (token, row_logits) in step.items():
            written[row].append(token)
            logits[row].append(row_logits)
    padded_slots = len(prompts) * max(stored)
    pages = (
        f"{cache.most_used} pages of {PAGE} tokens at most ({cache.most_used * PAGE} slots; padded "
        f"to the longest: {padded_slots}), {len(cache.free)} of {cache.k.shape[1]} free at the end"
    )
    logits = [torch.stack(steps).float().cpu() for steps in logits]
    return Text(written, logits, clock, pages)


class Operators(TorchDispatchMode):
    """Counts the attention operators that run."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name()
        if name.startswith("flashattn_ext") or "scaled_dot_product" in name:
            self.count[name.partition("::")[2]] += 1
        return operator(*args, **(kwargs or {}))

    def __str__(self):
        return ", ".join(f"{name} × {count}" for name, count in self.count.items())


def compare(model, batch, tokens, ours, title, progress):
    """{attention: Text} of ours and of SDPA."""
    texts = {}
    for name in (ours, SDPA):
        label = f"{title}, {LABELS[name]}"
        run = write_in_pages if name == PAGES else partial(write, name)
        with Operators() as operators:  # and to warm up
            run(model, batch, min(tokens, 2), Clock(progress, f"{label}, first pass", 2))
        texts[name] = run(model, batch, tokens, Clock(progress, label, tokens))
        progress.done(f"{label}: two tokens run {operators}")
    return texts


def first_difference(ours, sdpa):
    """(step, gap relative to the largest logit) for each prompt; None where the texts are equal."""
    for row, (left, right) in enumerate(zip(ours.tokens, sdpa.tokens, strict=True)):
        if left == right:
            yield None
            continue
        step, a, b = next(
            (i, a, b) for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b
        )
        in_ours, in_sdpa = ours.logits[row][step], sdpa.logits[row][step]
        gap = max(in_ours[a] - in_ours[b], in_sdpa[b] - in_sdpa[a])
        yield step, float(gap / in_sdpa.abs().max())


def show_texts(model, tokenizer, prompts, ours, sdpa):
    """Prints both texts of each prompt; returns how many are (equal, tied, different)."""
    outcome = Counter()
    pairs = zip(ours.tokens, sdpa.tokens, strict=True)
    for prompt, pair, difference in zip(prompts, pairs, first_difference(ours, sdpa), strict=True):
        words = [
            " ".join(map(str, row)) if tokenizer is None
            else tokenizer.decode(row, skip_special_tokens=True)
            for row in pair
        ]  # fmt: skip
        print(f"\n▸ {prompt if tokenizer else 'random tokens'}")
        side_by_side("flashattn_ext", "torch SDPA")
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
    print(f"\n  {'tokens per second':<18}{'':<22}{'prefill':>12}{'decode':>12}")
    for title, prompts, batch, texts in rows:
        title = f"{title} ({len(prompts)})"
        prompt_tokens = int(batch["attention_mask"].sum())
        for name, text in texts.items():
            prefill = prompt_tokens / text.prefill
            decode = text.decoded / text.decode if text.decode else 0.0
            print(f"  {title:<18}{LABELS[name]:<22}{prefill:>12.1f}{decode:>12.1f}")
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

    rows, outcome = [], Counter()
    for title, prompts, ours in (("batch", BATCH, PAGES), ("one prompt", SINGLE, ADAPTER)):
        batch = encode(tokenizer, prompts, options.device)
        texts = compare(model, batch, options.tokens, ours, title, progress)
        rows.append((title, prompts, batch, texts))

    for _, prompts, _, texts in rows:
        outcome += show_texts(model, tokenizer, prompts, *texts.values())
    print(f"\n  {backend(options.device)} · {str(model.dtype).removeprefix('torch.')}")
    show_speed(rows)
    print(f"\n  Cache: {rows[0][-1][PAGES].pages}")
    seconds = time.perf_counter() - progress.start
    counts = ", ".join(f"{count} {kind}" for kind, count in outcome.items())
    print(f"\n  Texts: {counts} ({seconds:.0f} s)")
    return 1 if outcome["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
