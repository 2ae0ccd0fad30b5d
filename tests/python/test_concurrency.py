"""Many host threads at once, and children forked after use: the bits of a process that is alone."""

import os
import random
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import draws
import drawn_calls
import pytest
import torch
from cases import dense
from strided import as_bits

THREADS = 8


def bits(call, results):
    """Of the rows that count."""
    return [as_bits(t).clone() for pair in call.per_sequence(*results) for t in pair]


def drawn(count, device, may_append=False):
    """Functions that make drawn calls and return bits. Calls that append write their caches."""
    kind, functions, n = draws.kind_of("attention", device), [], 0
    while len(functions) < count:
        point = {**kind.point(n), "out": "new", "lse": True}
        if point["batch"] and (may_append or not point["new"]):
            call = drawn_calls.build(point, n, device)
            made = (call, point)
            functions.append(lambda made=made: bits(made[0], drawn_calls.make(*made)))
        n += 1
    return functions


def large(device):
    """Work for several helper threads."""
    call = dense(2, 400, 400, heads=(4, 2), d=128).build(device)
    return lambda: bits(call, call.run())


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def run_all(jobs):
    """Each job in a thread of its own, all at once."""
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_many_threads(device):
    """Each makes all calls in an order of its own, on a GPU on a stream of its own."""
    functions = [*drawn(40, device), large(device)]
    expected = [function() for function in functions]
    wrong = []

    def work(seed):
        source, on_gpu = random.Random(seed), device == "cuda"
        with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
            for _ in range(3):
                for n in source.sample(range(len(functions)), len(functions)):
                    if not same(functions[n](), expected[n]):
                        wrong.append((seed, n))

    if device == "cuda":
        torch.cuda.synchronize()
    run_all([lambda seed=seed: work(seed) for seed in range(THREADS)])
    assert not wrong


def test_large_and_small_calls_at_once():
    """On the CPU helper threads serve both."""
    small = dense(1, 3, 40).build("cpu")
    jobs = [(large("cpu"), 4)] * 2 + [(lambda: bits(small, small.run()), 300)] * 4
    wrong = []

    def work(function, expected, rounds):
        wrong.extend(not same(function(), expected) for _ in range(rounds))

    expected = [function() for function, _ in jobs]
    run_all(
        [
            lambda job=job, e=e: work(job[0], e, job[1])
            for job, e in zip(jobs, expected, strict=True)
        ]
    )
    assert len(wrong) == 2 * 4 + 4 * 300 and not any(wrong)


def run_script(code, *arguments):
    """In a Python of its own. torch's OpenMP does not survive a fork: it gets one thread."""
    threads = {"OMP_NUM_THREADS": "1", "FLASHATTN_EXT_NUM_THREADS": "4"}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    run = subprocess.run(
        command, cwd=Path(__file__).parent, env={**os.environ, **threads}, timeout=300,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


FORK = """
import os, sys, threading
from test_concurrency import drawn, large, same

functions = [*drawn(12, "cpu"), large("cpu")]
expected = [function() for function in functions]
all_right = lambda: all(same(f(), e) for f, e in zip(functions, expected, strict=True))
stop = threading.Event()
def work():
    while not stop.is_set():
        functions[-1]()
threads = [threading.Thread(target=work) for _ in range(int(sys.argv[1]))]
for thread in threads:
    thread.start()
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        os._exit(0 if all_right() else 1)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
parent = all_right()
stop.set()
for thread in threads:
    thread.join()
sys.exit(0 if parent and not any(codes) else f"children {codes}, parent {parent}")
"""


@pytest.mark.parametrize("threads_at_work", [0, 2])
def test_fork_after_use(threads_at_work):
    """Children have helper threads of their own, also where the parent's were at work."""
    run_script(FORK, str(threads_at_work))


FIRST_CALLS = """
import os, sys, threading
import torch
from test_concurrency import first_call

children = []
for seed in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        os._exit(0 if first_call(sys.argv[1], seed) else 1)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(0 if not any(codes) else f"{codes}")
"""


def first_call(device, seed):
    """The first calls of a process, from 4 threads at once."""
    calls = [dense(2, 40 + n, 130, seed=seed + n).build(device) for n in range(4)]
    start, right = threading.Barrier(4), []

    def work(call):
        start.wait()
        results = call.run()
        call.compare(*results)
        right.append(call)

    run_all([lambda call=call: work(call) for call in calls])
    return len(right) == 4


def test_c110_first_calls_of_fresh_processes(device):
    """Forked before the library was used: a child costs less than an import of torch."""
    run_script(FIRST_CALLS, device, {"cpu": "60", "cuda": "8"}[device])
