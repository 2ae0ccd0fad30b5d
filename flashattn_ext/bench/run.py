"""A run: what is asked for, on which device, and what is printed and written of it."""

from __future__ import annotations

import argparse
import sys
from itertools import groupby

from . import machine, plots, table
from .backend import Backend
from .backends import by_name
from .cases import Case
from .devices import device_of, refuse
from .files import write_csv, write_json
from .grids import SUITES
from .machine import Clocks
from .measure import Measurement, Record
from .options import given_shape, parser, repro, unwritable
from .progress import progress
from .table import Table


def main(argv: list[str] | None = None) -> int:
    reader = parser()
    arguments = reader.parse_args(argv)
    devices = {name: device_of(SUITES[name]) for name in arguments.suites}
    try:
        plan = {name: _cases(name, devices[name], arguments) for name in devices}
        backends = {name: _backends(name, arguments) for name in devices}
    except ValueError as error:
        reader.error(str(error))
    if problem := unwritable(arguments):
        reader.error(problem)
    if arguments.list:
        for name, cases in plan.items():
            for case in cases:
                print(repro(name, case, arguments) if arguments.repro else _listed(name, case))
        return 0
    if refusal := refuse(devices):
        print(f"bench: {refusal}", file=sys.stderr)
        return 2
    if arguments.plots and (reason := plots.missing()):
        print(f"bench: {reason}", file=sys.stderr)
        arguments.plots = None
    return Run(arguments, devices, backends).measure(plan)


def _cases(name: str, device: str, arguments: argparse.Namespace) -> list[Case]:
    return SUITES[name].cases(device, given_shape(arguments), arguments.case)


def _backends(name: str, arguments: argparse.Namespace) -> list[Backend]:
    known = SUITES[name].backends
    wanted = known if arguments.backends is None else arguments.backends
    if unknown := [backend for backend in wanted if backend not in known]:
        raise ValueError(
            f"--backends: {name} has {', '.join(known)}; it has no {', '.join(unknown)}"
        )
    return [backend for key, backend in by_name().items() if key in wanted]


def _listed(suite: str, case: Case) -> str:
    name = "" if case.name == suite else f"{case.name:28} "
    return f"{suite:9} {name}{case.label()}"


class Run:
    """Measures suite by suite, prints as it goes, and writes the files at the end."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        devices: dict[str, str],
        backends: dict[str, list[Backend]],
    ):
        self.arguments, self.devices, self.backends = arguments, devices, backends
        self.titles = {name: backend.title for name, backend in by_name().items()}
        self.records: list[Record] = []
        self.measurements = {
            device: Measurement(device, arguments.refcheck, arguments.seconds)
            for device in devices.values()
        }
        self.facts = machine.facts("cuda" if "cuda" in devices.values() else "cpu")

    def measure(self, plan: dict[str, list[Case]]) -> int:
        before = self._clocks()
        self._say(machine.describe(self.facts, before))
        interrupted = False
        steps = sum(len(cases) * len(self.backends[name]) for name, cases in plan.items())
        with progress(steps) as began:
            for measurement in self.measurements.values():
                measurement.began = began
            try:
                for name, cases in plan.items():
                    self._suite(name, cases)
            except KeyboardInterrupt:
                interrupted = True
                print("\ninterrupted: the rest was not measured")
        self._write({"before": before, "after": self._clocks()}, interrupted)
        if interrupted:
            return 130
        bad = [r for r in self.records if r.status == "wrong" or _ours_failed(r)]
        return 1 if bad else 0

    def _suite(self, name: str, cases: list[Case]) -> None:
        suite, device = SUITES[name], self.devices[name]
        print(f"\n{name}: {suite.about}")
        self._say([_method(cases, device)] if suite.clock else [])
        records: list[Record] = []
        for unit, part in groupby(cases, key=lambda case: "" if suite.clock else case.UNIT):
            self._table(name, unit, list(part), records)
        self._say(table.notes(records, self.titles))
        self._say(table.comparison(records, self.titles))

    def _table(self, name: str, unit: str, cases: list[Case], records: list[Record]) -> None:
        """One table of cases whose rates have one unit; appends to `records`."""
        measurement = self.measurements[self.devices[name]]
        if unit:
            self._say([self._roof(unit, cases, measurement)])
        backends = self.backends[name]
        present = [b for b in backends if not b.missing(self.devices[name])] or backends
        labels = [_row_label(name, case) for case in cases]
        result = Table(present, labels, unit, SUITES[name].grouped)
        self._say([result.legend()])
        print(f"\n{result.header()}", flush=True)
        group = None
        for case, label in zip(cases, labels, strict=True):
            row = list(measurement.of(name, SUITES[name], case, backends))
            for record in row:
                record.repro = repro(name, case, self.arguments)
            records += row
            self.records += row
            if SUITES[name].grouped and (heading := table.group(row[0])) != group:
                group = heading
                print(f"{group}:")
            print(result.line(label, {record.backend: record for record in row}), flush=True)
            if self.arguments.repro:
                print(f"  {row[0].repro}", flush=True)

    @staticmethod
    def _roof(unit: str, cases: list[Case], measurement: Measurement) -> str:
        """Measures the roof before what stands below it."""
        roofs = measurement.roofs
        if unit == "TB/s":
            parts = [f"{name} {value:.3g}" for name, value in roofs.bandwidth.items()]
            return f"roof, TB/s of memory: {', '.join(parts)}"
        dtypes = dict.fromkeys(case.dtype for case in cases)
        parts = [f"{dtype} {roofs.product(dtype):.3g}" for dtype in dtypes]
        return f"roof, TFLOP/s of a matrix product: {', '.join(parts)}"

    def _write(self, clocks: dict[str, Clocks | None], interrupted: bool) -> None:
        arguments = self.arguments
        if now := clocks["after"]:
            self._say(["", machine.describe_clocks(now)])
        if arguments.json:
            about = {
                "machine": self.facts,
                "clocks": clocks,
                "roofs": {device: m.roofs.measured() for device, m in self.measurements.items()},
                "suites": list(self.devices),
                "refcheck": arguments.refcheck,
                "interrupted": interrupted,
            }
            write_json(arguments.json, about, self.records)
            print(f"wrote {arguments.json}")
        if arguments.csv:
            write_csv(arguments.csv, self.records)
            print(f"wrote {arguments.csv}")
        if arguments.plots:
            where = self.facts["gpu"] or self.facts["cpu"]
            for path in plots.write_plots(arguments.plots, self.records, self.titles, where):
                print(f"wrote {path}")

    def _clocks(self) -> Clocks | None:
        return machine.clocks() if self.facts["gpu"] else None

    @staticmethod
    def _say(lines: list[str]) -> None:
        for line in lines:
            print("\n".join(table.wrap(line)), flush=True)


def _row_label(suite: str, case: Case) -> str:
    """In a table with headings a group's name stands there, elsewhere with its case."""
    if SUITES[suite].grouped:
        variant = case.name.partition("/")[2]
        return f"  {variant}{' ' * bool(variant)}{case.label()}"
    return case.label() if case.name == suite else f"{case.name} {case.label()}"


def _method(cases: list[Case], device: str) -> str:
    text = (
        "Time of the host for an eager call: the mean over 100 calls in a row that nothing waits "
    )
    if device == "cuda":
        return text + "for. The shapes are small enough for the GPU to keep up with the host."
    if all(getattr(case, "batch", None) == 0 for case in cases):
        return text + "for. With a batch of 0 a call prepares everything and computes nothing."
    return text + "for. On a CPU that includes what a call computes."


def _ours_failed(record: Record) -> bool:
    return record.backend == "ours" and record.status == "failed"
