"""The suites: which cases each measures, on what, and beside which other kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .cases import Case, Combine, Decode, Lengths, Mixed, Prefill
from .lengths import log_normal, read_lengths

GPU_PEERS = ("ours", "sdpa-flash", "sdpa-cudnn", "fa3", "triton")

# Prefill on a GPU: 16384 tokens in all, 2048 = heads * head_dim; on a CPU one sequence, 512.
GPU_SIZE = {"width": 2048, "tokens": 16384}
CPU_SIZE = {"width": 512, "tokens": 0}


@dataclass(frozen=True)
class Suite:
    """``templates(device)`` gives the default cases; ``device`` is "cuda", "cpu", or "any"."""

    about: str
    templates: Callable[[str], Iterable[Case]]
    device: str = "cuda"
    backends: tuple[str, ...] = GPU_PEERS
    size: dict[str, int] | None = None
    clock: str = ""  # "host": the time that a call keeps its caller; otherwise the device's time
    seconds: float = 0.3  # spent on each number at least
    grouped: bool = False  # by the first part of the cases' names

    def cases(self, device: str, given: dict[str, Any], name: str | None = None) -> list[Case]:
        """The default cases, each with every combination of the `given` lists instead of its own
        values; equal ones once. `name` keeps those of one name, or of one group.

        Raises ValueError for an option that a case does not have, and for an unknown name.
        """
        templates = list(self.templates(device))
        if name is not None:
            names = dict.fromkeys(case.name for case in templates)
            chosen = [c for c in templates if c.name == name or c.name.startswith(f"{name}/")]
            if not chosen:
                raise ValueError(f"--case: expected one of {', '.join(names)}, got {name}")
            templates = chosen
        varied = (case for template in templates for case in _vary(template, given))
        cases = dict.fromkeys(case.settled(**self._size(case)) for case in varied)
        for case in cases:
            if device == "cuda" and case.CALL != "flash_combine" and case.dtype == "float32":
                raise ValueError("--dtype: float32 is for the CPU (and for the parts of combine)")
        return list(cases)

    def _size(self, case: Case) -> dict[str, int]:
        return (self.size or GPU_SIZE) if isinstance(case, Prefill) else {}


def _vary(case: Case, given: dict[str, Any]) -> Iterator[Case]:
    for option in given:
        if option not in case.OPTIONS:
            raise ValueError(
                f"--{option.replace('_', '-')}: {case.name} has no such dimension; it has "
                + " ".join(f"--{name.replace('_', '-')}" for name in case.OPTIONS)
            )
    if "lengths" in given:
        case = replace(case, name="custom")
    for values in product(*given.values()):
        yield replace(case, **dict(zip(given, values, strict=True)))


def _prefill(device: str) -> Iterator[Case]:
    for head_dim, causal, seqlen in product((64, 128, 256), (False, True), (1024, 4096, 16384)):
        yield Prefill(head_dim=head_dim, causal=causal, seqlen=seqlen)


# (batch, heads, kv_heads, head_dim, cached tokens)
_DECODE = (
    (1, 32, 8, 128, 8192), (1, 32, 8, 128, 131072), (8, 32, 8, 128, 8192), (64, 32, 8, 128, 2048),
    (64, 32, 8, 128, 8192), (64, 64, 8, 128, 8192), (128, 32, 32, 128, 1024),
    (16, 32, 1, 128, 16384), (256, 9, 3, 64, 2048), (32, 16, 8, 256, 4096),
)  # fmt: skip


def _decode(device: str) -> Iterator[Case]:
    for (batch, heads, kv_heads, head_dim, tokens), page in product(_DECODE, (0, 16)):
        yield Decode(
            batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kv_len=tokens,
            page_size=page,
        )  # fmt: skip


def _mixed(device: str) -> Iterator[Case]:
    def ones(lengths: Iterable[int]) -> Lengths:
        return tuple((1, n) for n in lengths)

    yield Mixed("three", read_lengths("1:1328,5:18,129:463"))
    yield Mixed("chunk-and-decodes", ((2048, 8192), *ones(log_normal(63, 65536, 1))))
    yield Mixed("log-normal-decodes", ones(log_normal(128, 131072, 2)))
    yield Mixed("few-queries", read_lengths("64x4:4096"))


def _combine(device: str) -> Iterator[Case]:
    for parts in (2, 8, 32, 128):
        yield Combine(parts=parts)
    for parts in (2, 8):
        yield Combine(parts=parts, batch=1, seqlen=4096, dtype="bfloat16")


def _overhead(device: str) -> Iterator[Case]:
    # On a CPU the caller computes, so a batch of 0 leaves its preparations alone.
    small: dict[str, Any] = {
        "batch": 1 if device == "cuda" else 0,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 64,
    }
    yield Prefill("flash_fwd", seqlen=16, causal=True, **small)
    yield Prefill("flash_fwd-packed", seqlen=16, causal=True, packed=True, **small)
    yield Decode("splitkv", kv_len=64, **small)
    yield Decode("splitkv-pages", kv_len=64, page_size=16, **small)


def _cpu(device: str) -> Iterator[Case]:
    dtypes, head_dims = ("bfloat16", "float32"), (64, 128)
    for dtype, head_dim, causal, seqlen in product(
        dtypes, head_dims, (False, True), (1024, 2048, 4096)
    ):
        yield Prefill("cpu", head_dim=head_dim, causal=causal, seqlen=seqlen, dtype=dtype)


def _options(device: str) -> Iterator[Case]:
    """Groups, whose first case is what the others are compared with. ``group/variant`` names what
    no option of the command line sets."""
    for head_dim, causal in product((64, 128, 256), (False, True)):
        for dtype in ("bfloat16", "float16"):
            name = f"dtype-{head_dim}-{_mask(causal)}"
            yield Prefill(name, head_dim=head_dim, causal=causal, dtype=dtype)
    for causal, head_dim in product((False, True), (32, 96, 160, 192, 224)):
        yield Prefill(f"head-dim-{_mask(causal)}", head_dim=head_dim, causal=causal)
    for seqlen in (1024, 4096):
        yield Prefill(f"packed-{seqlen}/dense", seqlen=seqlen, causal=True)
        yield Prefill(f"packed-{seqlen}/packed", seqlen=seqlen, causal=True, packed=True)
    yield Prefill("window/full", seqlen=16384, causal=True)
    yield Prefill("window/1024", seqlen=16384, causal=True, window=(1024, 0))
    for causal in (False, True):
        name = f"score-{_mask(causal)}"
        yield Prefill(f"{name}/plain", causal=causal)
        yield Prefill(f"{name}/softcap", causal=causal, softcap=30.0)
        yield Prefill(f"{name}/alibi", causal=causal, alibi=True)
    for batch, tokens in ((1, 8192), (1, 131072), (8, 8192), (64, 8192)):
        for size in (None, 256, 1024, 4096):
            name = f"split-size-{batch}x{tokens}/{size or 'automatic'}"
            yield Decode(name, batch=batch, kv_len=tokens, page_size=16, split_size=size)
    yield Decode("capacity/64", kv_len=64, capacity=64)
    yield Decode("capacity/131072", kv_len=64, capacity=131072)


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


def _growth(device: str) -> Iterator[Case]:
    """A group for each option of the command line that grows, the other ones fixed."""
    for seqlen in (1024, 2048, 4096, 8192, 16384, 32768):
        yield Prefill("seqlen", batch=1, seqlen=seqlen, causal=True)
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        yield Decode("batch", batch=batch, kv_len=4096, page_size=16)
    for tokens in (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072):
        yield Decode("kv-len", batch=8, kv_len=tokens, page_size=16)


SUITES = {
    "prefill": Suite("flash_fwd: 16384 tokens in all, 2048 = heads * head_dim", _prefill),
    "decode": Suite("flash_fwd_splitkv: one query per sequence", _decode, seconds=0.1),
    "mixed": Suite(
        "flash_fwd_splitkv: prompts and decodes in one batch", _mixed, seconds=0.1,
        backends=("ours", "fa3", "triton"),
    ),
    "combine": Suite(
        "flash_combine: merging partial results", _combine, seconds=0.1,
        backends=("ours", "torch"),
    ),
    "overhead": Suite(
        "the time that an eager call keeps the host", _overhead, device="any", clock="host"
    ),
    "cpu": Suite(
        "flash_fwd on the CPU: one sequence, 512 = heads * head_dim", _cpu, device="cpu",
        backends=("ours", "sdpa-flash"), size=CPU_SIZE, seconds=3.0,
    ),
    "options": Suite(
        "what options cost: each beside the first of its group", _options, grouped=True
    ),
    "growth": Suite("time against seqlen, batch and cache length", _growth, grouped=True),
}  # fmt: skip
