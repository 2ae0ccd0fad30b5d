"""What tests of `python -m flashattn_ext.bench` share: arguments, small shapes, small roofs."""

import pytest
import torch

from flashattn_ext.bench import grids, options, roof

SUITES = grids.SUITES
SHAPES = {
    "prefill": "--batch 2 --heads 4 --kv-heads 2 --head-dim 32 --seqlen 32 --kv-len 48",
    "decode": "--batch 3 --heads 4 --kv-heads 2 --head-dim 32 --kv-len 37",
    "mixed": "--heads 4 --kv-heads 2 --head-dim 32 --lengths 5:40,2x1:33,7:7",
    "combine": "--batch 2 --heads 3 --head-dim 32 --seqlen 5 --parts 2,3",
    "overhead": "--batch 1 --heads 4 --kv-heads 4 --head-dim 32",
    "cpu": "--batch 1 --heads 4 --kv-heads 2 --head-dim 32 --seqlen 16 --kv-len 16",
    "options": "--batch 2 --heads 4 --kv-heads 4 --head-dim 32 --seqlen 64 --kv-len 64",
    "growth": "--heads 4 --kv-heads 4 --head-dim 32 --batch 1,2 --seqlen 48 --kv-len 48",
}


def parse(*words):
    return options.parser().parse_args(words)


def cases(suite, *words, device="cuda"):
    arguments = parse(suite, *words)
    device = "cpu" if suite == "cpu" else device
    return SUITES[suite].cases(device, options.given_shape(arguments), arguments.case)


@pytest.fixture
def quick(monkeypatch):
    """Small roofs, one thread."""
    monkeypatch.setattr(roof, "CPU_BYTES", 2**16)
    monkeypatch.setattr(roof, "CPU_SIDE", 32)
    monkeypatch.setattr(roof, "SECONDS", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
