"""Calls drawn by number from everything that the library serves, each compared with the oracle.

    python tests/python/draws.py attention 17                  call 17, as the tests make it
    python tests/python/draws.py attention 17 "{'page': 16}"   an axis that is not said: first value
    python tests/python/draws.py merge 0:5000 --device cuda    many

A call that fails is made simpler as long as it fails; printed is the command that makes it again.
"""

import argparse
import ast
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import call_space
import drawn_calls
import parts_space
from cases import LARGEST_CUDA_HEAD_DIM
from spaces import Space

MOST_FAILURES = 3
MOST_STEPS = 300  # of making a call simpler


@dataclass(frozen=True)
class Kind:
    """Calls to draw. `check(point, number, device)` raises where one is wrong."""

    name: str
    space: Space
    check: Callable
    shorter: Callable = lambda point, n: ()

    def point(self, n, changes=None):
        if changes is None:
            return self.space.point(n)
        return {axis: values[0] for axis, values in self.space.axes.items()} | changes

    def error(self, point, n, device):
        """What is wrong with a call, or None."""
        try:
            self.check(point, n, device)
        except Exception as error:  # no call of a space should raise anything
            return error
        return None

    def simplest(self, point, n, device):
        """The point that has as few axes in use and as short sequences as the error takes."""
        kind, candidates = type(self.error(point, n, device)), self._simpler(point, n)
        for _ in range(MOST_STEPS):
            candidate = next(candidates, None)
            if candidate is None:
                break
            if type(self.error(candidate, n, device)) is kind:
                point, candidates = candidate, self._simpler(candidate, n)
        return point

    def _simpler(self, point, n):
        if "lengths" not in point:  # which may not go together with other values of the axes
            yield from self.space.simpler(point)
        yield from self.shorter(point, n)

    def command(self, point, n, device):
        first = {axis: values[0] for axis, values in self.space.axes.items()}
        used = {axis: value for axis, value in point.items() if value != first.get(axis)}
        return f'python tests/python/draws.py {self.name} {n} "{used}" --device {device}'

    def failure(self, point, n, device):
        """Why a call fails and how to make it again, or an empty string."""
        if self.error(point, n, device) is None:
            return ""
        point = self.simplest(point, n, device)
        return f"{self.command(point, n, device)}\n    {self.error(point, n, device)!r}"


@cache
def kind_of(name, device):
    if name == "merge":
        return Kind(name, parts_space.SPACE, parts_space.check)
    on_gpu = device == "cuda"  # no float32 there
    space = call_space.gpu_space(LARGEST_CUDA_HEAD_DIM) if on_gpu else call_space.SPACE
    return Kind(name, space, drawn_calls.check, call_space.shorter)


def failures(name, numbers, device):
    """Of the calls with these numbers, the first few that fail: how to make them again."""
    kind, found = kind_of(name, device), []
    for n in numbers:
        failure = kind.failure(kind.point(n), n, device)
        found += [failure] if failure else []
        if len(found) == MOST_FAILURES:
            break
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("kind", choices=("attention", "merge"))
    parser.add_argument("number", help="or first:last:step, as of a range")
    parser.add_argument("axes", nargs="?", help="a dict; without it the axes are drawn")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    start = time.monotonic()
    if ":" in given.number:
        numbers = range(*map(int, given.number.split(":")))
        found = failures(given.kind, numbers, given.device)
    else:
        numbers = (int(given.number),)
        kind = kind_of(given.kind, given.device)
        point = kind.point(*numbers, given.axes and ast.literal_eval(given.axes))
        found = [failure for failure in [kind.failure(point, *numbers, given.device)] if failure]
    for failure in found:
        print(failure)
    print(f"{len(found)} of {len(numbers)} calls failed in {time.monotonic() - start:.1f} s")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
