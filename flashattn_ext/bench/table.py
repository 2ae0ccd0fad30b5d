"""Records as a table of at most 100 columns: a line per case, a few columns per backend."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections import Counter

from .backend import Backend
from .measure import Record

WIDTH = 100
MEDIAN, SPREAD, RATE, ROOF, OTHER, RATIO = 9, 6, 8, 6, 7, 6


class Table:
    """Full figures for the first of `backends`, the rate alone (or the time) for the others.

    Labels are the texts of all cases to come. With `grouped` there is a column that divides by the
    time of the first case of the same group.
    """

    def __init__(self, backends: list[Backend], labels: list[str], unit: str, grouped: bool):
        self.lead, *self.others = backends
        self.unit, self.grouped = unit, grouped
        figures = MEDIAN + SPREAD + (RATE + ROOF if unit else 0)
        figures += RATIO * grouped + OTHER * len(self.others)
        self.case = min(max(map(len, [*labels, "case"])), WIDTH - figures)
        self.firsts: dict[str, float] = {}

    def header(self) -> str:
        cells = f"{'us':>{MEDIAN}}{'+-%':>{SPREAD}}"
        if self.unit:
            cells += f"{self.unit:>{RATE}}{'roof':>{ROOF}}"
        if self.grouped:
            cells += f"{'x':>{RATIO}}"
        cells += "".join(f"{other.title:>{OTHER}}" for other in self.others)
        return f"{'case':{self.case}}{cells}"

    def legend(self) -> str:
        text = f"us: median of {self.lead.title}; +-%: half of what lies between p10 and p90"
        if self.unit:
            text += "; roof: share of the machine's"
        if self.grouped:
            text += "; x: time by that of the first of the group"
        if self.others:
            text += f"; other columns: {self.unit or 'us'}"
        return text

    def line(self, label: str, records: dict[str, Record]) -> str:
        """`records` by the name of the backend."""
        lead = records[self.lead.name]
        cells = f"{cut(label, self.case):{self.case}}{self._lead(lead)}"
        return cells + "".join(self._other(records[other.name]) for other in self.others)

    def _lead(self, record: Record) -> str:
        width = MEDIAN + SPREAD + (RATE + ROOF if self.unit else 0) + RATIO * self.grouped
        first = self.firsts.setdefault(group(record), record.median_us)
        if record.status != "measured":
            return f"{record.status:>{width}}"
        half = (record.p90_us - record.p10_us) / 2 / record.median_us
        cells = f"{figure(record.median_us):>{MEDIAN}}{100 * half:{SPREAD}.1f}"
        if self.unit:
            cells += f"{figure(record.rate):>{RATE}}{f'{record.roof_fraction:.0%}':>{ROOF}}"
        if self.grouped:
            cells += f"{record.median_us / first:{RATIO}.2f}" if first else f"{'-':>{RATIO}}"
        return cells

    def _other(self, record: Record) -> str:
        if record.status == "measured":
            return f"{figure(record.rate if self.unit else record.median_us):>{OTHER}}"
        return f"{record.status if record.status in ('failed', 'wrong') else '-':>{OTHER}}"


def figure(value: float) -> str:
    """Four digits or so: 0.0123, 1.234, 12.34, 123.4, 12345."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = 3 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(4, max(0, decimals))}f}"


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def group(record: Record) -> str:
    return record.case.partition("/")[0]


def notes(records: list[Record], titles: dict[str, str]) -> list[str]:
    """What was not measured and why, each reason once."""
    counts = Counter(
        (record.backend, record.status, record.reason)
        for record in records
        if record.status != "measured"
    )
    lines = []
    for (backend, status, reason), count in counts.items():
        cases = "" if status == "absent" else f" {count} case{'s' if count > 1 else ''}"
        lines += wrap(f"{titles[backend]}: {status}{cases}: {reason}")
    return lines


def comparison(records: list[Record], titles: dict[str, str]) -> list[str]:
    """The speed of the first backend over each other one, in geometric mean."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        if record.status == "measured":
            times.setdefault((record.case, record.label), {})[record.backend] = record.median_us
    lead, *others = dict.fromkeys(record.backend for record in records)
    lines = []
    for other in others:
        ratios = [t[other] / t[lead] for t in times.values() if lead in t and other in t]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            cases = f"{len(ratios)} case{'s' if len(ratios) > 1 else ''}"
            lines.append(f"{titles[lead]} : {titles[other]} = {mean:.2f} in speed, {cases}")
    return lines


def wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")
