"""One case measured with all backends: a record for each of them, whatever becomes of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import reference, timing
from .backend import Backend, Call
from .cases import Case, Prefill
from .grids import Suite
from .lengths import write_lengths
from .problems import Problem, build
from .roof import Roofs

_NOT_MEASURED: Any = None  # where `status` tells that there is no number

CLOCKS = {
    "host": timing.host_times,
    "cpu": timing.cpu_times,
    "events": timing.event_times,
    "graph": timing.graph_times,
}


@dataclass
class Record:
    """What one backend did with one case.

    `status` is "measured", "absent" (not on this machine), "refuses" (does not take such a case),
    "failed" (raised), or "wrong" (compared and not timed); `reason` says why. Times are in
    microseconds. `unit` says which rate counts, and `roof` is in that unit. `difference` is that of
    the comparison, None without one and where it is not finite; so are the other numbers without a
    measurement.
    """

    suite: str
    case: str
    label: str
    call: str
    shape: dict[str, Any]
    backend: str
    device: str
    clock: str
    status: str = "measured"
    reason: str = ""
    median_us: float = _NOT_MEASURED
    p10_us: float = _NOT_MEASURED
    p90_us: float = _NOT_MEASURED
    samples: int = _NOT_MEASURED
    unit: str = ""
    tflops: float = _NOT_MEASURED
    tb_per_s: float = _NOT_MEASURED
    roof: float = _NOT_MEASURED
    roof_fraction: float = _NOT_MEASURED
    difference: float | None = None
    repro: str = ""

    @property
    def rate(self) -> float:
        return self.tflops if self.unit == "TFLOP/s" else self.tb_per_s


@dataclass
class Measurement:
    """How to measure: the same for all cases of a run."""

    device: str
    refcheck: bool
    seconds: float | None = None  # None: what the suite says
    began: Callable[[str], None] = field(default=lambda text: None)

    def __post_init__(self) -> None:
        self.roofs = Roofs(self.device)

    def of(
        self, suite_name: str, suite: Suite, case: Case, backends: list[Backend]
    ) -> Iterator[Record]:
        """Yields a `Record` for each of `backends`, in their order."""
        clock = clock_of(suite, case, self.device)
        shape = shape_of(case)
        seconds = suite.seconds if self.seconds is None else self.seconds
        bench = _Bench(case, self.device, clock, self.refcheck, seconds)
        for backend in backends:
            record = Record(
                suite_name, case.name, case.label(), case.CALL, shape, backend.name, self.device,
                clock,
            )  # fmt: skip
            self.began(f"{suite_name}: {backend.title}, {record.label}")
            bench.fill(record, backend)
            if record.status == "measured" and clock != "host":
                self._rate(record, case)
            yield record
        bench.close()

    def _rate(self, record: Record, case: Case) -> None:
        record.unit = case.UNIT
        rate = case.work() / record.median_us / 1e6
        if case.UNIT == "TFLOP/s":
            record.tflops = rate
        else:
            record.tb_per_s = rate
        record.roof = self.roofs.of(case.UNIT, case.dtype)
        record.roof_fraction = rate / record.roof


class _Bench:
    """The tensors of one case, made when the first backend needs them, and what is done to them."""

    def __init__(self, case: Case, device: str, clock: str, refcheck: bool, seconds: float):
        self.case, self.device, self.clock = case, device, clock
        self.refcheck, self.seconds = refcheck, seconds
        self.problem: Problem | None = None
        self.expected: Tensor | None = None

    def fill(self, record: Record, backend: Backend) -> None:
        """Compares if asked, then times; what goes wrong is written into the record."""
        if reason := backend.missing(self.device):
            record.status, record.reason = "absent", reason
        elif reason := backend.refuses(self.case):
            record.status, record.reason = "refuses", reason
        else:
            try:
                self._run(record, backend)
            except Exception as error:  # other people's kernels raise all sorts of things
                if backend.has_no_kernel(error):
                    record.status, record.reason = "refuses", "has no kernel for this"
                else:
                    first_line = f"{type(error).__name__}: {error}".split("\n")[0]
                    record.status, record.reason = "failed", first_line[:200]

    def _run(self, record: Record, backend: Backend) -> None:
        if self.problem is None:
            self.problem = build(self.case, self.device, copies=self.clock == "graph")
        call = backend.call(self.problem)
        with torch.no_grad(), backend.context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says on the way why it has no such kernel
            if self.refcheck:
                difference = self._difference(self.problem, call)
                allowed = reference.tolerance(self.problem)
                record.difference = difference if math.isfinite(difference) else None
                if not difference <= allowed:
                    record.status = "wrong"
                    record.reason = (
                        f"a row is off by {difference:.2g} of its norm, {allowed} is allowed"
                    )
                    return
            times = CLOCKS[self.clock](call.run, call.rotation, self.seconds)
        record.median_us, record.p10_us, record.p90_us, record.samples = times

    def _difference(self, problem: Problem, call: Call) -> float:
        if self.expected is None:
            self.expected = reference.expected(problem)
        return reference.difference(call.tidy(call.run(*call.rotation[0])), self.expected)

    def close(self) -> None:
        self.problem = self.expected = None
        if self.device == "cuda":
            torch.cuda.empty_cache()


def clock_of(suite: Suite, case: Case, device: str) -> str:
    if suite.clock:
        return suite.clock
    if device == "cpu":
        return "cpu"
    return "events" if isinstance(case, Prefill) else "graph"


def shape_of(case: Case) -> dict[str, Any]:
    """The fields of a case, without its name; lengths as `read_lengths` reads them."""
    shape = asdict(case)
    del shape["name"]
    if "lengths" in shape:
        shape["lengths"] = write_lengths(shape["lengths"])
    if "window" in shape:
        shape["window"] = list(shape["window"])
    return shape
