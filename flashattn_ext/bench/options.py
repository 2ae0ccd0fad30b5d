"""The command line: reading it, and writing one that measures a given record again."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import ELEMENT_SIZES, Case
from .grids import SUITES
from .lengths import read_lengths, write_lengths

SHAPE = (
    "batch", "heads", "kv_heads", "head_dim", "seqlen", "kv_len", "page_size", "causal", "dtype",
    "parts", "lengths",
)  # fmt: skip
PROGRAM = "python -m flashattn_ext.bench"


def parser() -> argparse.ArgumentParser:
    suites = "\n".join(f"  {name:10}{suite.about}" for name, suite in SUITES.items())
    result = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Speed of flashattn_ext beside other attention kernels, in one run.",
        epilog=f"suites:\n{suites}\n\nA shape option takes one value or several, as in --seqlen "
        "1024,4096, and replaces\nthat dimension in all cases of the suites. "
        "benchmarks/README.md says what is measured.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("suites", nargs="+", choices=list(SUITES), metavar="SUITE", help="below")
    shape = result.add_argument_group("shape")
    shape.add_argument("--batch", type=_numbers(0), metavar="N", help="sequences")
    shape.add_argument("--heads", type=_numbers(1), metavar="N", help="query heads")
    shape.add_argument("--kv-heads", type=_numbers(1), metavar="N", help="key/value heads")
    shape.add_argument("--head-dim", type=_numbers(1), metavar="N")
    shape.add_argument("--seqlen", type=_numbers(1), metavar="N", help="queries per sequence")
    shape.add_argument("--kv-len", type=_numbers(1), metavar="N", help="keys per sequence")
    shape.add_argument(
        "--page-size", type=_numbers(0), metavar="N", help="tokens per page; 0: contiguous cache"
    )
    shape.add_argument(
        "--causal", type=_choices({"yes": True, "no": False}), nargs="?", const=[True],
        metavar="yes|no", help="without a value: yes",
    )  # fmt: skip
    shape.add_argument(
        "--dtype", type=_choices({name: name for name in ELEMENT_SIZES}),
        metavar="|".join(ELEMENT_SIZES),
    )  # fmt: skip
    shape.add_argument("--parts", type=_numbers(1), metavar="N", help="results to combine")
    shape.add_argument(
        "--lengths", type=_lengths, metavar="Q:K,NxQ:K", help="mixed: queries and cached tokens"
    )
    what = result.add_argument_group("what is measured")
    what.add_argument("--case", metavar="NAME", help="cases of this name, or of this group")
    what.add_argument("--backends", type=_names, metavar="A,B", help="of those of the suite")
    what.add_argument("--list", action="store_true", help="show the cases and measure nothing")
    what.add_argument("--refcheck", action="store_true", help="compare with plain PyTorch first")
    what.add_argument("--seconds", type=_seconds, metavar="S", help="for each number, at least")
    output = result.add_argument_group("output")
    output.add_argument("--repro", action="store_true", help="a command line for each case")
    output.add_argument("--json", type=Path, metavar="FILE")
    output.add_argument("--csv", type=Path, metavar="FILE")
    output.add_argument("--plots", type=Path, metavar="FOLDER", help="a PNG per suite")
    return result


def given_shape(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        name: getattr(arguments, name) for name in SHAPE if getattr(arguments, name) is not None
    }


def repro(suite: str, case: Case, arguments: argparse.Namespace) -> str:
    """The command line that measures exactly `case` with the backends of this run."""
    words = [suite]
    alone = case.name not in (suite, "custom")
    if alone:
        words += ["--case", case.name]
    for option in case.OPTIONS:
        value = getattr(case, option)
        if option == "lengths":
            if alone:
                continue  # the name stands for them, and there may be a hundred
            value = write_lengths(value)
        elif option == "causal":
            value = "yes" if value else "no"
        words += [f"--{option.replace('_', '-')}", str(value)]
    if arguments.backends is not None:
        words += ["--backends", ",".join(arguments.backends)]
    if arguments.refcheck:
        words.append("--refcheck")
    if arguments.seconds is not None:
        words += ["--seconds", str(arguments.seconds)]
    return f"{PROGRAM} {shlex.join(words)}"


def unwritable(arguments: argparse.Namespace) -> str:
    """Why the files cannot be written, or "": known before measuring for minutes, not after."""
    for option in ("json", "csv", "plots"):
        path = getattr(arguments, option)
        if path is not None and arguments.list:
            return f"--{option}: --list measures nothing that could be written"
        if path is not None and option != "plots" and not path.absolute().parent.is_dir():
            return f"--{option}: there is no folder {path.absolute().parent}"
    return ""


def _numbers(least: int) -> Callable[[str], list[int]]:
    def read(text: str) -> list[int]:
        numbers = [int(word) for word in text.split(",")]
        if min(numbers) < least:
            raise argparse.ArgumentTypeError(f"expected numbers from {least} on, got {text}")
        return numbers

    read.__name__ = "number"  # argparse shows it for what is none
    return read


def _choices(meanings: dict[str, Any]) -> Callable[[str], list[Any]]:
    def read(text: str) -> list[Any]:
        words = text.split(",")
        if unknown := [word for word in words if word not in meanings]:
            raise argparse.ArgumentTypeError(
                f"expected {' or '.join(meanings)}, got {', '.join(unknown)}"
            )
        return [meanings[word] for word in words]

    return read


def _lengths(text: str) -> list[tuple[tuple[int, int], ...]]:
    try:
        return [read_lengths(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(text.split(",")))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to 3600, got {text}")
    return seconds
