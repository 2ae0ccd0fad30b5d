"""How the examples show what they do: progress, and two texts next to each other."""

import sys
import textwrap
import time

COLUMN = 46  # two of them and their margins fit 100 columns


class Progress:
    """What is going on: a line that changes on a terminal, otherwise one every ten seconds."""

    def __init__(self):
        self.live = sys.stdout.isatty()
        self.start = self.shown = time.perf_counter()

    def show(self, text):
        now = time.perf_counter()
        if self.live:
            print(f"\r\033[K{now - self.start:6.1f} s  {text} …", end="", flush=True)
        elif now - self.shown > 10:
            print(f"{now - self.start:6.1f} s  {text} …", flush=True)
            self.shown = now

    def done(self, text):
        self.shown = time.perf_counter()
        clear = "\r\033[K" if self.live else ""
        print(f"{clear}{self.shown - self.start:6.1f} s  {text}", flush=True)


def side_by_side(left, right):
    def lines(text):
        paragraphs = text.strip().splitlines() or [""]
        return [line for p in paragraphs for line in textwrap.wrap(p, COLUMN) or [""]]

    left, right = lines(left), lines(right)
    for row in range(max(len(left), len(right))):
        pair = [side[row] if row < len(side) else "" for side in (left, right)]
        print(f"  {pair[0]:<{COLUMN}}  {pair[1]}".rstrip())
