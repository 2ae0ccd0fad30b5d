"""Four ways to take the time of a call, each with its own meaning; all times in microseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WARM_UPS = 3
LEAST_SAMPLES, MOST_SAMPLES = 15, 200
HOST_WINDOW = 100  # calls; a GPU queues some thousand launches before it makes its host wait
DELAY_CYCLES = 600_000  # some 300 us of a GPU's clock, in which any eager call is launched


class Spread(NamedTuple):
    """Median, 10th and 90th percentile of `samples` times in microseconds."""

    median: float
    p10: float
    p90: float
    samples: int


def spread(times: list[float]) -> Spread:
    if len(times) == 1:
        return Spread(times[0], times[0], times[0], 1)
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return Spread(statistics.median(times), tenths[0], tenths[-1], len(times))


def repeat(sample: Callable[[], float], seconds: float, least: int = LEAST_SAMPLES) -> Spread:
    """Samples for `seconds`, but `least` to 200 of them."""
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < deadline and len(times) < MOST_SAMPLES):
        times.append(sample())
    return spread(times)


def cpu_times(
    run: Callable[..., object], rotation: Sequence[tuple[Tensor, ...]], seconds: float
) -> Spread:
    """From call to return, where the result is there on return."""

    def sample() -> float:
        start = time.perf_counter()
        run(*rotation[0])
        return (time.perf_counter() - start) * 1e6

    for _ in range(WARM_UPS):
        sample()
    return repeat(sample, seconds, least=10)


def host_times(
    run: Callable[..., object], rotation: Sequence[tuple[Tensor, ...]], seconds: float
) -> Spread:
    """What an eager call keeps its caller: the mean over 100 calls that nobody waits for. The
    device is idle when they begin, and its queue has room for all of them."""
    arguments = rotation[0]

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def sample() -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(HOST_WINDOW):
            run(*arguments)
        return (time.perf_counter() - start) * 1e6 / HOST_WINDOW

    for _ in range(WARM_UPS):
        sample()
    result = repeat(sample, seconds)
    synchronize()
    return result


def event_times(
    run: Callable[..., object], rotation: Sequence[tuple[Tensor, ...]], seconds: float
) -> Spread:
    """Between two events around an eager call. The device is kept busy before, so that launching
    is over when the first event happens: what the host does is `host_times`' matter."""
    arguments = rotation[0]

    def sample() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(DELAY_CYCLES)
        start.record()
        run(*arguments)
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds * 1e3

    for _ in range(WARM_UPS):
        sample()
    return repeat(sample, seconds, least=10)


def graph_times(
    run: Callable[..., object], rotation: Sequence[tuple[Tensor, ...]], seconds: float
) -> Spread:
    """One CUDA graph with a call for each copy of its tensors, replayed: the time of a replay by
    the number of copies. Launching costs nothing, and memory is read, not the L2 cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*rotation[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [run(*arguments) for arguments in rotation]

        def sample() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            milliseconds: float = start.elapsed_time(end)
            return milliseconds * 1e3 / len(rotation)

        for _ in range(WARM_UPS):
            sample()
        result = repeat(sample, seconds)
    del kept
    return result
