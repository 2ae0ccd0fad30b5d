"""Operations, bytes and clocks of the benchmarks."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from flashattn_ext.bench import measure, problems, timing
from flashattn_ext.bench.cases import Combine, Decode, Mixed, Prefill


@pytest.mark.parametrize(
    ("case", "flops"),
    [
        (Prefill(batch=2, heads=3, head_dim=8, seqlen=4), 4 * 2 * 3 * 8 * 16),
        (Prefill(batch=2, heads=3, head_dim=8, seqlen=4, causal=True), 4 * 2 * 3 * 8 * 8),
        (Prefill(batch=1, heads=1, head_dim=8, seqlen=2, kv_len=10), 4 * 8 * 20),
        # Two queries behind eight more keys see 9 and 10; a half of the corner is the custom.
        (Prefill(batch=1, heads=1, head_dim=8, seqlen=2, kv_len=10, causal=True), 4 * 8 * 18),
        (Prefill(batch=1, heads=1, head_dim=8, seqlen=10, kv_len=2, causal=True), 4 * 8 * 2),
        # Rows of 1, 2, 3, 3, 3 keys.
        (
            Prefill(batch=1, heads=1, head_dim=8, seqlen=5, causal=True, window=(2, 0)),
            4 * 8 * 12,
        ),
        # Rows of 2, 3, 3, 2 keys, one of them on each side of the diagonal.
        (Prefill(batch=1, heads=1, head_dim=8, seqlen=4, window=(1, 1)), 4 * 8 * 10),
    ],
)
def test_flops(case, flops):
    assert case.settled(width=8, tokens=1).work() == flops and case.UNIT == "TFLOP/s"


def test_bytes():
    # Keys and values, 2 bytes each.
    decode = Decode(batch=3, heads=8, kv_heads=2, head_dim=16, kv_len=100, page_size=16)
    assert decode.work() == 3 * 100 * 2 * 16 * 2 * 2
    assert Decode(kv_len=64, capacity=131072).work() == 64 * 8 * 128 * 2 * 2
    mixed = Mixed(lengths=((1, 10), (5, 20)), heads=2, kv_heads=1, head_dim=8)
    assert mixed.work() == 30 * 8 * 2 * 2
    # Three parts and a result: 8 elements of 2 bytes and an lse of 4 for each row.
    combine = Combine(parts=3, batch=2, heads=5, head_dim=8, seqlen=7, dtype="bfloat16")
    assert combine.work() == (3 + 1) * 2 * 5 * 7 * (8 * 2 + 4)
    assert combine.UNIT == decode.UNIT == mixed.UNIT == "TB/s"


def test_rates_are_per_second():
    record = measure.Record("prefill", "", "", "", {}, "ours", "cpu", "cpu", median_us=1000.0)
    measurement = measure.Measurement("cpu", refcheck=False)
    measurement.roofs = SimpleNamespace(of=lambda unit, dtype: 2e-6)
    case = Prefill(batch=1, heads=1, kv_heads=1, head_dim=8, seqlen=5, kv_len=5)
    measurement._rate(record, case)
    assert record.unit == "TFLOP/s" and record.rate == pytest.approx(4 * 8 * 25 / 1e-3 / 1e12)
    assert record.roof_fraction == pytest.approx(record.rate / 2e-6) and record.tb_per_s is None


def test_caches_are_larger_than_any_l2():
    for used in (2**18, 2**25, 2**29, 2**32):
        copies = problems.copies_of(used, used)
        assert copies * used > problems.ROTATED_BYTES or copies == problems.MOST_COPIES
        assert copies == 1 or copies * used <= problems.MOST_ALLOCATED
    assert problems.copies_of(2**18, 2**29) == 14


def test_spread():
    assert timing.spread([3.0, 1.0, 2.0]) == (2.0, 1.2, 2.8, 3)
    assert timing.spread([5.0]) == (5.0, 5.0, 5.0, 1)
    counted = iter(range(1000))
    assert timing.repeat(lambda: float(next(counted)), seconds=0.0).samples == 15
    assert timing.repeat(lambda: float(next(counted)), seconds=60.0).samples == 200


class FakeCuda:
    """As much of torch.cuda as the clocks use, with a clock that stands still but for `work`."""

    def __init__(self):
        self.now, self.slept, self.replayed = 0.0, 0, 0
        self.stream = self.graph = lambda *arguments, **options: nullcontext()
        self.Stream = lambda: SimpleNamespace(wait_stream=lambda other: None)
        self.current_stream = self.synchronize = lambda: None
        self.is_available = lambda: True
        self.captured = []

    def work(self, *arguments):
        self.now += 0.05
        self.captured.append(arguments)

    def _sleep(self, cycles):
        self.slept += 1
        self.now += 1.0

    def CUDAGraph(self):  # noqa: N802  torch's spelling
        def replay():
            self.replayed += 1
            self.now += 6.0

        return SimpleNamespace(replay=replay)

    def Event(self, enable_timing):  # noqa: N802
        event = SimpleNamespace(synchronize=lambda: None)
        event.record = lambda stream=None: setattr(event, "time", self.now)
        event.elapsed_time = lambda end: end.time - event.time
        return event


def test_clocks_of_a_gpu(monkeypatch):
    """What lies between the events, how often, and by what it is divided."""
    cuda = FakeCuda()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda))
    rotation = [(1, 2), (3, 4), (5, 6)]
    result = timing.graph_times(cuda.work, rotation, seconds=0.0)
    assert result == pytest.approx((2000.0, 2000.0, 2000.0, 15))
    assert cuda.captured == [(1, 2), *rotation] and cuda.replayed == 18

    result = timing.event_times(cuda.work, rotation, seconds=0.0)
    assert result == pytest.approx((50.0, 50.0, 50.0, 10)) and cuda.slept == 13
    slow = timing.event_times(lambda *arguments: setattr(cuda, "now", cuda.now + 1), rotation, 0.0)
    assert slow.median == pytest.approx(1000.0) and cuda.slept == 26

    cuda.captured.clear()
    assert timing.host_times(cuda.work, rotation, seconds=0.0).samples == 15
    assert cuda.captured == [(1, 2)] * 1800
