"""The Python examples: the paged cache against plain attention, and generate.py as a program."""

import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from reference import Rule, Sequence, attend

EXAMPLES = Path(__file__).parents[2] / "examples"
LAYERS, HEADS, HEADS_KV, HEAD_DIM, SCALE = 2, 6, 2, 32, 0.3


@pytest.fixture
def paged(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import paged_cache

    return paged_cache


class Traffic:
    """Sequences that come, grow and go, and all their keys and values in plain lists."""

    def __init__(self, paged, pages, page, device):
        self.paged, self.device = paged, device
        self.dtype = torch.float32 if device == "cpu" else torch.float16
        self.cache = paged.PagedCache(LAYERS, pages, HEADS_KV, HEAD_DIM, self.dtype, device, page)
        self.cache.k.fill_(torch.nan)
        self.cache.v.fill_(torch.nan)
        self.seen = {}  # (sequence, layer) -> [(k, v) of each step]

    def prefill(self, lengths):
        prompts = {sequence: list(range(length)) for sequence, length in lengths.items()}
        step = self.paged.Prefill(self.cache, prompts)
        assert step.input_ids.tolist() == step.position_ids.tolist()
        ends = torch.tensor(list(lengths.values())).cumsum(0)
        assert step.last.tolist() == (ends - 1).tolist()
        self.check(step, 1, sum(lengths.values()), list(lengths.values()))

    def decode(self, sequences):
        before = [[self.cache.lengths[sequence]] for sequence in sequences]
        step = self.paged.Decode(self.cache, {sequence: 7 for sequence in sequences})
        assert step.position_ids.tolist() == before
        self.check(step, len(sequences), 1, [1] * len(sequences))

    def release(self, sequence):
        self.cache.release(sequence)
        for layer in range(LAYERS):
            del self.seen[sequence, layer]

    def check(self, step, rows, width, lengths):
        for layer in range(LAYERS):
            q, k, v = (
                torch.randn(rows, heads, width, HEAD_DIM, device=self.device)
                .to(self.dtype)
                .transpose(1, 2)  # as a model hands them over
                for heads in (HEADS, HEADS_KV, HEADS_KV)
            )
            out = step.attend(layer, q, k, v, SCALE)
            assert out.shape == q.shape
            parts = zip(*(x.flatten(0, 1).split(lengths) for x in (q, k, v, out)), strict=True)
            for sequence, (q_n, k_n, v_n, out_n) in zip(step.sequences, parts, strict=True):
                seen = self.seen.setdefault((sequence, layer), [])
                seen.append((k_n, v_n))
                keys, values = (torch.cat(pieces) for pieces in zip(*seen, strict=True))
                rule = Rule(SCALE, window=(-1, 0))
                expected, _ = attend(Sequence(q_n, keys, values), rule)
                tolerance = 1e-5 if self.dtype == torch.float32 else 4e-3
                torch.testing.assert_close(out_n.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("page", [16, 5, 1])
def test_paged_cache(paged, page, device):
    """New sequences take over the pages of ended ones, in whatever order these came back."""
    torch.manual_seed(page)
    pages = 200 // page
    traffic = Traffic(paged, pages, page, device)
    cache = traffic.cache
    traffic.prefill({"a": 15, "b": 1, "c": 40})
    for _ in range(3):  # a starts its second page of 16 in the second step
        traffic.decode(["a", "b", "c"])
    traffic.release("b")
    traffic.decode(["c", "a"])
    traffic.release("c")
    traffic.prefill({"d": 33, "b": 16})
    for _ in range(2):
        traffic.decode(["b", "a", "d"])
    owned = sum(cache.tables.values(), [])
    assert sorted(owned + cache.free) == list(range(pages))
    assert all(len(cache.tables[s]) == -(-cache.lengths[s] // page) for s in "abd")
    for sequence in "abd":
        traffic.release(sequence)
    assert sorted(cache.free) == list(range(pages)) and not cache.tables and not cache.lengths


def test_paged_cache_random_traffic(paged, device):
    torch.manual_seed(0)
    draw = random.Random(0)
    traffic = Traffic(paged, 24, 4, device)
    lengths = traffic.cache.lengths
    for number in range(12):
        traffic.prefill({number: draw.randint(1, 20)})
        running = draw.sample(sorted(lengths), draw.randint(1, len(lengths)))
        traffic.decode(running)
        while len(traffic.cache.free) < 8:
            traffic.release(draw.choice(sorted(lengths)))
    assert traffic.cache.most_used > 16


def test_full_paged_cache(paged):
    cache = paged.PagedCache(LAYERS, 3, HEADS_KV, HEAD_DIM, torch.float32, "cpu")
    cache.extend("a", 32)
    with pytest.raises(MemoryError, match="sequence b: 2 more pages wanted for 17 tokens, 1 are"):
        cache.extend("b", 17)
    cache.release("a")
    cache.extend("b", 17)
    assert cache.most_used == 2


SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip
BROKEN = "paged_cache.PagedCache.block_table = lambda self, sequences: self.tensor([[0] * 8] * 4)"


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(
    ("change", "device"),
    [("", "cpu"), (BROKEN, "cpu"), pytest.param("", "cuda", marks=pytest.mark.gpu)],
    ids=["as it is", "broken", "gpu"],
)
def test_generate(change, device):
    """The whole program on a small model; it says so when the cache returns other keys."""
    program = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import generate, paged_cache, smollm; "
        f"smollm.SHAPE |= {SMALL}; {change or 'pass'}; sys.exit(generate.main())"
    )
    options = ["--random", "--tokens", "6", "--device", device]
    run = subprocess.run(
        [sys.executable, "-c", program, *options], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == (1 if change else 0), run.stdout + run.stderr
    assert "pages: two tokens run fwd × 2, fwd_splitkv_append × 2" in run.stdout
    if not change:
        assert "MORE THAN ROUNDING" not in run.stdout
        assert "Texts: 5 equal" in run.stdout or device == "cuda"  # float16 may have ties
        # 12, 21, 30 and 39 tokens of prompt, and 5 of the 6 written ones.
        assert "10 pages of 16 tokens at most" in run.stdout and "10 of 10 free" in run.stdout
