"""The command line of `plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ._plan_gpus import gpu_names
from .planning import plan

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_SHOWN = ("picture", "text", "sequences", "show_heads")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code, or raises SystemExit where argparse does."""
    options = _parser()
    arguments = vars(options.parse_args(argv))
    picture, text, sequences, heads = (arguments.pop(name) for name in _SHOWN)
    shown = False
    try:
        made = plan(**_complete(arguments))
        print(f"{made}\n", flush=True)
        shown = True
        made.show(picture, text=text, sequences=sequences, heads=heads)
    except (ValueError, NotImplementedError, RuntimeError, OSError) as error:
        words = str(error)
        if shown and words.startswith("heads:"):  # those of show, not those of the call
            words = f"--show-{words}"
        options.exit(2, f"{options.prog}: {words}\n")
    return 0


def _complete(arguments: dict[str, Any]) -> dict[str, Any]:
    """As `plan` takes them: one length for each sequence, or one for all."""
    lists = [x for x in (arguments["seqlen_q"], arguments["seqlen_k"]) if isinstance(x, list)]
    if arguments["batch"] is None:
        arguments["batch"] = len(lists[0]) if lists else 1
    arguments["dtype"] = _DTYPES[arguments["dtype"]]
    return arguments


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m flashattn_ext.plan",
        description="How a call will run on a GPU, and a map of its tiles. Needs no GPU.",
        epilog="The options are the arguments of flashattn_ext.plan, which says more of them.",
        allow_abbrev=False,
    )
    call = result.add_argument_group("the call")
    call.add_argument("--batch", type=int, metavar="N", help="sequences (default: as many as "
                      "there are lengths, else 1)")  # fmt: skip
    call.add_argument("--heads", type=int, default=32, metavar="N", help="query heads (32)")
    call.add_argument(
        "--kv-heads", dest="heads_kv", type=int, metavar="N", help="key/value heads (as many)"
    )
    call.add_argument("--head-dim", type=int, default=128, metavar="N", help="(128)")
    call.add_argument(
        "--seqlen-q", type=_lengths, required=True, metavar="N|N,N,…",
        help="queries of each sequence; a list: packed",
    )  # fmt: skip
    call.add_argument(
        "--kv-len", dest="seqlen_k", type=_lengths, required=True, metavar="N|N,N,…",
        help="keys of each sequence",
    )  # fmt: skip
    call.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="(bfloat16)")
    call.add_argument("--causal", action="store_true")
    call.add_argument(
        "--window", dest="window_size", type=_window, default=(-1, -1), metavar="LEFT,RIGHT",
        help="-1: no limit",
    )  # fmt: skip
    call.add_argument("--max-seqlen-q", type=int, metavar="N", help="packed: the bound")
    call.add_argument(
        "--cache", type=_cache, metavar="contiguous|PAGE", help="keys lie in a cache (no)"
    )
    call.add_argument("--capacity", type=int, metavar="N", help="tokens of a sequence's cache")
    call.add_argument("--new-tokens", type=int, default=0, metavar="N")
    call.add_argument("--rotary-dim", type=int, default=0, metavar="N")
    call.add_argument("--num-splits", type=int, default=0, metavar="N", help="0: automatic (0)")
    call.add_argument("--split-size", type=int, metavar="N")
    call.add_argument(
        "--gpu", metavar="NAME", help=f"{', '.join(gpu_names())} (this one, or an H200)"
    )
    shown = result.add_argument_group("the map: a window, or text where there can be none")
    shown.add_argument("--picture", type=Path, metavar="FILE", help="PNG, SVG or PDF instead")
    shown.add_argument("--text", action="store_true", help="text in any case")
    shown.add_argument("--sequences", type=_numbers, metavar="N,N,…", help="of the batch")
    shown.add_argument("--show-heads", type=_numbers, metavar="N,N,…", help="query heads")
    return result


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _lengths(text: str) -> int | list[int]:
    numbers = _numbers(text)
    return numbers if "," in text else numbers[0]


def _window(text: str) -> tuple[int, int]:
    left, right = _numbers(text)
    return left, right


def _cache(text: str) -> str | int:
    return text if text == "contiguous" else int(text)


# argparse shows their names for what they do not read.
for _read in (_numbers, _lengths, _window, _cache):
    _read.__name__ = _read.__name__.lstrip("_")
