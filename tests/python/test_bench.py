"""`python -m flashattn_ext.bench`: what it measures, counts, prints, writes and refuses."""

import csv
import json
import math
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import flashattn_ext
from flashattn_ext.bench import (
    backends,
    devices,
    grids,
    lengths,
    machine,
    measure,
    options,
    peers,
    problems,
    progress,
    reference,
    roof,
    run,
    table,
    timing,
)
from flashattn_ext.bench.cases import Combine, Decode, Mixed, Prefill

SUITES = grids.SUITES


def parse(*words):
    return options.parser().parse_args(words)


def cases(suite, *words, device="cuda"):
    arguments = parse(suite, *words)
    device = "cpu" if suite == "cpu" else device
    return SUITES[suite].cases(device, options.given_shape(arguments), arguments.case)


@pytest.fixture
def quick(monkeypatch):
    """Small roofs, one thread."""
    monkeypatch.setattr(roof, "CPU_BYTES", 2**16)
    monkeypatch.setattr(roof, "CPU_SIDE", 32)
    monkeypatch.setattr(roof, "SECONDS", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The grids


def test_prefill_grid():
    grid = cases("prefill")
    assert len(grid) == 18 and all(c.batch * c.seqlen == 16384 for c in grid)
    assert all(c.heads * c.head_dim == 2048 and c.kv_heads == c.heads for c in grid)
    assert {(c.head_dim, c.causal, c.seqlen) for c in grid} == {
        (d, causal, s) for d in (64, 128, 256) for causal in (0, 1) for s in (1024, 4096, 16384)
    }


def test_decode_and_mixed_grids():
    grid = cases("decode")
    assert len(grid) == 20 and {c.page_size for c in grid} == {0, 16}
    assert Decode(batch=256, heads=9, kv_heads=3, head_dim=64, kv_len=2048, page_size=16) in grid
    mixed = {c.name: c for c in cases("mixed")}
    assert mixed["three"].lengths == ((1, 1328), (5, 18), (129, 463))
    assert mixed["few-queries"].lengths == ((4, 4096),) * 64
    chunk = mixed["chunk-and-decodes"].lengths
    assert len(chunk) == 64 and chunk[0] == (2048, 8192) and max(k for _, k in chunk) == 65536
    assert cases("mixed") == cases("mixed")


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_of_a_suite_are_distinct_and_can_be_told_apart(suite, device):
    grid = cases(suite, device=device)
    rows = {(c.name, c.label()) for c in grid}
    assert len(set(grid)) == len(rows) == len(grid) > 3


def test_groups_begin_with_what_the_others_are_compared_with():
    firsts = {}
    for case in cases("options"):
        firsts.setdefault(case.name.split("/")[0], case)
    assert firsts["split-size-1x8192"].split_size is None and firsts["window"].window == (-1, -1)
    assert firsts["capacity"].capacity == 64 and not firsts["packed-1024"].packed
    assert firsts["score-causal"].softcap == 0 and not firsts["score-causal"].alibi
    assert {c.head_dim for c in cases("options", "--case", "head-dim-full")} == {
        32, 96, 160, 192, 224,
    }  # fmt: skip
    assert {c.dtype for c in cases("options", "--case", "dtype-128-causal")} == {
        "bfloat16", "float16",
    }  # fmt: skip
    for name in ("seqlen", "batch", "kv-len"):
        group = cases("growth", "--case", name)
        sizes = [getattr(c, name.replace("-", "_")) for c in group]
        assert sizes == sorted(set(sizes)) and len(sizes) > 5
    assert sizes[0] == 1024 and sizes[-1] == 131072


# The command line


def test_an_option_replaces_a_dimension_everywhere():
    assert cases("prefill", "--seqlen", "512", "--head-dim", "96", "--causal") == [
        Prefill("prefill", 32, 21, 21, 96, 512, 512, True)
    ]
    shape = "--batch 2 --heads 6 --kv-heads 2 --head-dim 32 --seqlen 5,7 --kv-len 9 --page-size 4"
    decode = cases("decode", *shape.split(), "--dtype", "float16", "--causal", "no")
    assert decode == [Decode("decode", 2, 6, 2, 32, n, 9, 4, False, "float16") for n in (5, 7)]
    mixed = cases("mixed", "--lengths", "2x3:40,1:7", "--page-size", "8")
    assert mixed == [Mixed("custom", ((3, 40), (3, 40), (1, 7)), page_size=8)]
    combine = cases("combine", "--parts", "3", "--batch", "2", "--seqlen", "4", "--dtype=float16")
    assert combine == [Combine("combine", 3, 2, 32, 128, 4, "float16")]


@pytest.mark.parametrize("option", options.SHAPE)
def test_every_shape_option_has_an_effect_or_is_refused_by_name(option):
    given = {
        "batch": 3, "heads": 8, "kv_heads": 1, "head_dim": 40, "seqlen": 17, "kv_len": 51,
        "page_size": 7, "causal": "no", "dtype": "float16", "parts": 5, "lengths": "1:9",
    }  # fmt: skip
    word = f"--{option.replace('_', '-')}"
    served = 0
    for suite in SUITES:
        try:
            changed = cases(suite, word, str(given[option]))
        except ValueError as error:
            assert word in str(error)
            continue
        served += 1
        value = False if option == "causal" else given[option]
        value = ((1, 9),) if option == "lengths" else value
        assert changed and all(getattr(c, option) == value for c in changed)
    assert served


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("suite", SUITES)
def test_repro_measures_exactly_this_case(suite, device):
    arguments = parse(suite, "--refcheck", "--seconds", "0.5", "--backends", "ours")
    for case in cases(suite, device=device):
        words = shlex.split(options.repro(suite, case, arguments))
        assert words[:3] == ["python", "-m", "flashattn_ext.bench"]
        again = parse(*words[3:])
        assert cases(*words[3:], device=device) == [case] and again.suites == [suite]
        assert again.refcheck and again.seconds == 0.5 and again.backends == ["ours"]


def test_repro_of_given_shapes():
    for words in (("mixed", "--lengths", "2x3:40,1:7"), ("decode", "--batch", "1", "--kv-len=5")):
        case = cases(*words)[0]
        line = options.repro(words[0], case, parse(*words))
        assert cases(*shlex.split(line)[3:]) == [case]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prefill", "--page-size", "16"], "--page-size: prefill has no such dimension"),
        (["mixed", "--batch", "3"], "--batch: three has no such dimension"),
        (["combine", "--causal"], "--causal: combine has no such dimension"),
        (["decode", "--heads", "6", "--kv-heads", "4"], "--heads: expected a multiple of the 4"),
        (["prefill", "--seqlen", "0"], "expected numbers from 1 on, got 0"),
        (["prefill", "--seqlen", "many"], "invalid number value: 'many'"),
        (["prefill", "--causal", "maybe"], "expected yes or no, got maybe"),
        (["prefill", "--dtype", "int8"], "expected bfloat16 or float16 or float32, got int8"),
        (["prefill", "--dtype", "float32"], "--dtype: float32 is for the CPU"),
        (["mixed", "--lengths", "5"], "expected QUERIES:TOKENS"),
        (["mixed", "--lengths", "0:5"], "expected numbers from 1 on"),
        (["options", "--case", "colour"], "--case: expected one of dtype-64-full, "),
        (["options", "--case", "capacity", "--kv-len", "100"], "--kv-len: 100 is beyond"),
        (["combine", "--backends", "fa3"], "--backends: combine has ours, torch; it has no fa3"),
        (["cpu", "--seconds", "-1"], "expected seconds from 0 to 3600"),
        (["cpu", "--list", "--json", "x"], "--json: --list measures nothing"),
        (["cpu", "--csv", "/no/such/folder/x"], "--csv: there is no folder /no/such/folder"),
        (["nothing"], "invalid choice"),
        ([], "SUITE"),
    ],
)
def test_what_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(words)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_lengths_are_read_back():
    for text in ("1:1328,5:18,129:463", "64x4:4096", "2048:8192,63x1:77"):
        assert lengths.write_lengths(lengths.read_lengths(text)) == text


# Operations and bytes


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
    assert result == pytest.approx((50.0, 50.0, 50.0, 10)) and cuda.slept == 10
    slow = timing.event_times(lambda *arguments: setattr(cuda, "now", cuda.now + 1), rotation, 0.0)
    assert slow.median == pytest.approx(1000.0) and cuda.slept == 10

    cuda.captured.clear()
    assert timing.host_times(cuda.work, rotation, seconds=0.0).samples == 15
    assert cuda.captured == [(1, 2)] * 1800


# The comparison


def test_the_reference_is_attention():
    """Against torch's, which has masks but no alignment, windows or caps: one head at a time."""
    torch.manual_seed(0)
    case = Prefill(batch=1, heads=2, kv_heads=1, head_dim=8, seqlen=5, kv_len=7, causal=True,
                   dtype="float32", window=(3, 0), softcap=2.0, alibi=True)  # fmt: skip
    problem = problems.build(case, "cpu", copies=False)
    expected = reference.expected(problem)
    q, k, v = (t.double() for t in (problem.q[0], problem.k[0, :, 0], problem.v[0, :, 0]))
    for head in range(2):
        for row in range(5):
            last = row + 2
            seen = range(max(0, last - 3), last + 1)
            scores = torch.stack([q[row, head] @ k[j] / math.sqrt(8) for j in seen])
            scores = 2.0 * torch.tanh(scores / 2.0)
            scores -= problem.slopes[head].double() * (last - torch.tensor(list(seen))).abs()
            want = scores.softmax(0) @ v[list(seen)]
            torch.testing.assert_close(expected[0, row, head], want)


def test_a_wrong_row_is_seen():
    good = torch.randn(2, 1000, 3, 16)
    assert reference.difference(good.bfloat16(), good.double()) < 0.01
    bad = good.clone()
    bad[1, 77, 2] = good[1, 78, 2]
    assert reference.difference(bad, good) > 0.5
    bad[1, 77, 2, 3] = torch.nan
    assert not reference.difference(bad, good) <= 1e9
    with pytest.raises(ValueError, match="shape"):
        reference.difference(good[:1], good)


def fa3(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, block_table=None, softmax_scale=None, causal=False, window=(-1, -1),
        softcap=0.0, num_splits=1, **unused):  # fmt: skip
    """The peer's signature over our calls."""
    assert not unused and softmax_scale is None
    common = {"causal": causal, "window_size": window, "softcap": softcap, "return_lse": True}
    if seqused_k is None:
        return flashattn_ext.flash_fwd(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **common,
        )  # fmt: skip
    assert num_splits == 0 and max_seqlen_k == seqused_k.max()
    return flashattn_ext.flash_fwd_splitkv(
        q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, cache_seqlens=seqused_k,
        block_table=block_table, **common,
    )  # fmt: skip


def unified_attention(q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, block_table,
                      window=(-1, -1), softcap=0.0, alibi_slopes=None):  # fmt: skip
    assert max_seqlen_k == seqused_k.max()
    return flashattn_ext.flash_fwd_splitkv(
        q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, cache_seqlens=seqused_k,
        block_table=block_table, causal=True, window_size=window, softcap=softcap,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip


SHAPES = {
    "prefill": "--batch 2 --heads 4 --kv-heads 2 --head-dim 32 --seqlen 32 --kv-len 48",
    "decode": "--batch 3 --heads 4 --kv-heads 2 --head-dim 32 --kv-len 37",
    "mixed": "--heads 4 --kv-heads 2 --head-dim 32 --lengths 5:40,2x1:33,7:7",
    "combine": "--batch 2 --heads 3 --head-dim 32 --seqlen 5 --parts 2,3",
    "overhead": "--batch 1 --heads 4 --kv-heads 4 --head-dim 32",
    "cpu": "--batch 1 --heads 4 --kv-heads 2 --head-dim 32 --seqlen 16 --kv-len 16",
    "options": "--batch 2 --heads 4 --kv-heads 4 --head-dim 32 --seqlen 64 --kv-len 64",
    "growth": "--heads 4 --kv-heads 4 --head-dim 32 --batch 1,2 --seqlen 48 --kv-len 48",
}


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_and_backend_agrees_on_small_shapes(suite, monkeypatch, quick, capsys):
    """What a GPU would run, with the peers' signatures over our calls, on the CPU."""
    monkeypatch.setitem(SUITES, suite, replace(SUITES[suite], device="cpu"))
    monkeypatch.setattr(
        peers, "_load", lambda: (SimpleNamespace(fa3=fa3, unified_attention=unified_attention), "")
    )
    for backend in (peers.Fa3(), peers.Triton()):
        monkeypatch.setattr(type(backend), "missing", lambda self, device: "")
    plan = []
    monkeypatch.setattr(run.Run, "_write", lambda self, *rest: plan.extend(self.records))
    words = [suite, *SHAPES[suite].split()]
    assert run.main([*words, "--refcheck", "--seconds", "0"]) == 0
    measured = {r.backend for r in plan if r.status == "measured"}
    assert measured == set(SUITES[suite].backends) - {"sdpa-cudnn"}
    for record in plan:
        if record.backend == "sdpa-cudnn":
            assert record.status == "absent" and record.reason == "needs a GPU"
        elif record.status == "measured":
            assert 0 <= record.difference < 0.02 and record.median_us > 0
        else:
            assert record.status == "refuses" and record.reason
    assert max(map(len, capsys.readouterr().out.split("\n"))) <= 100


def test_a_wrong_backend_is_not_timed(monkeypatch, quick, capsys, tmp_path):
    wrong = SimpleNamespace(fa3=lambda q, k, v, **rest: (q * 0, None), unified_attention=None)
    monkeypatch.setattr(peers, "_load", lambda: (wrong, ""))
    monkeypatch.setattr(peers.Fa3, "missing", lambda self, device: "")
    monkeypatch.setitem(SUITES, "prefill", replace(SUITES["prefill"], device="cpu"))
    words = ["prefill", *SHAPES["prefill"].split(), "--backends", "ours,fa3", "--seconds", "0"]
    assert run.main([*words, "--refcheck"]) == 1
    out = capsys.readouterr().out
    assert "FA3: wrong 2 cases: a row is off by 1 of its norm, 0.03 is allowed" in out
    assert run.main(words) == 0 and "wrong" not in capsys.readouterr().out
    wrong.fa3 = lambda q, k, v, **rest: (q * torch.nan, None)
    assert run.main([*words, "--refcheck", "--json", str(tmp_path / "run.json")]) == 1
    assert "a row is off by nan" in capsys.readouterr().out
    result = (tmp_path / "run.json").read_text()
    assert (
        "NaN" not in result and [r["difference"] for r in json.loads(result)["records"]][1] is None
    )


def test_a_backend_that_raises_does_not_end_the_run(monkeypatch, quick, capsys):
    def fail(*arguments, **options):
        raise RuntimeError("no such tile\nand more")

    monkeypatch.setattr(flashattn_ext, "flash_fwd", fail)
    words = ["cpu", *SHAPES["cpu"].split(), "--seconds", "0", "--causal", "no"]
    assert run.main(words) == 1
    out = capsys.readouterr().out
    assert "ours: failed 2 cases: RuntimeError: no such tile\n" in out


# What is printed and written


@pytest.fixture
def written(tmp_path, quick, capsys):
    """Two suites on this machine's CPU, as JSON, CSV and text."""
    words = ["cpu", "overhead", "--heads=4", "--kv-heads=4", "--head-dim=32", "--batch=0,1"]
    words += ["--seqlen=16", "--kv-len=16", "--dtype=bfloat16", "--refcheck", "--seconds=0"]
    where = tmp_path / "run.json", tmp_path / "run.csv"
    words += ["--repro", "--json", str(where[0]), "--csv", str(where[1])]
    suites = {name: replace(suite, device="cpu") for name, suite in SUITES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SUITES", suites)
        patch.setattr(devices, "SUITES", suites)
        assert run.main(words) == 0
    rows = list(csv.DictReader(where[1].open()))
    return SimpleNamespace(
        json=json.loads(where[0].read_text()), csv=rows, text=capsys.readouterr()
    )


def test_json_says_what_was_measured(written):
    assert written.json["machine"]["torch"] == torch.__version__
    assert written.json["machine"]["date"][:2] == "20" and written.json["machine"]["cpu"]
    assert written.json["roofs"]["cpu"]["tflops"]["bfloat16"] > 0
    records = written.json["records"]
    assert {r["suite"] for r in records} == {"cpu", "overhead"}
    for r in records:
        if r["status"] == "measured":
            assert r["p10_us"] <= r["median_us"] <= r["p90_us"] and r["samples"] >= 10
            assert (r["tflops"] is None) == (r["suite"] == "overhead") == (r["roof"] is None)
        else:
            assert r["median_us"] is None and r["reason"]


def test_absent_backends_are_marked(written):
    absent = [r for r in written.json["records"] if r["backend"] in ("fa3", "triton")]
    assert absent and all(r["status"] == "absent" and r["reason"] == "needs a GPU" for r in absent)
    assert "FA3: absent: needs a GPU" in written.text.out
    header = [line for line in written.text.out.split("\n") if line.startswith("case")][-1]
    assert header.split() == ["case", "us", "+-%", "flash"]


def test_csv_and_json_agree(written):
    assert len(written.csv) == len(written.json["records"])
    for row, record in zip(written.csv, written.json["records"], strict=True):
        shape = record.pop("shape")
        window = ":".join(map(str, shape.pop("window"))) if "window" in shape else ""
        expected = {**record, **shape}
        assert row.pop("window") == window
        for name, text in row.items():
            value = expected.get(name)
            assert text == ("" if value is None else str(value)), name


def test_repro_lines_stand_below_their_rows(written):
    lines = [x for x in written.text.out.split("\n") if x.startswith("  python -m flashattn_ext")]
    reproduced = dict.fromkeys(r["repro"] for r in written.json["records"])
    assert [line.strip() for line in lines] == list(reproduced)


def test_what_the_driver_says(monkeypatch):
    asked = []

    def nvidia_smi(command, **options):
        asked.append(command[-1])
        lines = "1980, 1980, 3201, 3201, 31, [N/A], 700.00\n"
        broken = "--id=GPU-1-2" in command
        return SimpleNamespace(returncode=broken, stdout="" if broken else lines)

    monkeypatch.setattr(machine.subprocess, "run", nvidia_smi)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for uuid in ("3-4", "1-2"):
        gpu = SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, gpu=gpu: gpu)
        now = machine.clocks()
        assert now["sm_mhz"] == 1980 and now["power_w"] is None and now["power_limit_w"] == 700
    assert asked == ["--id=GPU-3-4", "--id=GPU-1-2", "--format=csv,noheader,nounits"]
    text = machine.describe_clocks(now)
    assert "SM 1980 of 1980 MHz, memory 3201 of 3201 MHz; 31 C, ? of 700 W" in text
    monkeypatch.setattr(machine, "_nvidia_smi", lambda arguments: [])
    assert set(machine.clocks().values()) == {None}


def fake_records(names, status="measured"):
    for backend in names:
        yield measure.Record(
            "options", "group/first", "", "", {}, backend, "cuda", "graph", status, "a reason",
            123456.7, 120000.0, 130000.0, 15, "TFLOP/s", 1234.5, None, 2000.0, 0.617,
        )  # fmt: skip


def test_the_table_fits_100_columns():
    known = list(backends.by_name().values())
    label = "a label that is much longer than what can stand in a line beside so many figures" * 2
    for unit in ("TFLOP/s", ""):
        for grouped in (False, True):
            result = table.Table(known, [label], unit, grouped)
            for status in ("measured", "failed", "wrong", "refuses", "absent"):
                records = {r.backend: r for r in fake_records([b.name for b in known], status)}
                line = result.line(label, records)
                assert len(line) == len(result.header()) == 100, line
                assert (status in line) or status == "measured"
    labels = [case.label() for suite in ("prefill", "decode", "combine") for case in cases(suite)]
    assert table.Table(known[:5], labels, "TB/s", False).case >= max(map(len, labels))


def test_notes_and_comparison():
    records = [*fake_records(["ours"]), *fake_records(["fa3"]), *fake_records(["triton"], "absent")]
    records[1].median_us *= 2
    titles = {name: backend.title for name, backend in backends.by_name().items()}
    assert table.notes(records, titles) == ["Triton: absent: a reason"]
    assert table.comparison(records, titles) == ["ours : FA3 = 2.00 in speed, 1 case"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.23456, "1.235"), (12.3456, "12.35"), (123456.7, "123457")],
)
def test_figures(value, text):
    assert table.figure(value) == text


def test_plots(tmp_path, monkeypatch, quick, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(SUITES, "growth", replace(SUITES["growth"], device="cpu"))
    words = ["growth", "--case", "seqlen", "--heads=2", "--kv-heads=2", "--head-dim=32"]
    words += ["--seqlen=16,32", "--seconds=0", "--backends=ours,sdpa-flash"]
    assert run.main([*words, "--plots", str(tmp_path / "new")]) == 0
    words = ["cpu", *SHAPES["cpu"].split(), "--seconds=0", "--plots", str(tmp_path)]
    assert run.main(words) == 0
    out = capsys.readouterr().out
    for path in (tmp_path / "new/growth.png", tmp_path / "cpu.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and f"wrote {path}" in out


# The program


def program(*words, without=""):
    """Runs it as a user would, optionally where a package cannot be imported."""
    hide = f"import sys; sys.modules[{without!r}] = None; " if without else "import sys; "
    start = f"{hide}sys.argv[1:] = {list(words)!r}; import runpy; "
    start += "runpy.run_module('flashattn_ext.bench', run_name='__main__', alter_sys=True)"
    return subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=300
    )


SMALL = ("cpu", "--heads=1", "--head-dim=32", "--seqlen=16", "--dtype=bfloat16", "--seconds=0")


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_without_optional_packages(package, tmp_path):
    result = program(*SMALL, "--plots", str(tmp_path), without=package)
    assert result.returncode == 0 and "b 1 s 16 h 1 d 32 causal bf16" in result.stdout
    if package == "matplotlib":
        assert result.stderr.startswith("bench: no plots:") and result.stderr.count("\n") == 1
        assert not list(tmp_path.iterdir())


def test_without_torch():
    result = program("cpu", without="torch")
    assert result.returncode == 1 and "needs PyTorch" in result.stderr
    assert "Traceback" not in result.stderr


def test_importing_the_package_does_not_import_the_benchmarks():
    code = "import sys, flashattn_ext; sys.exit(any('bench' in m for m in sys.modules if "
    code += "m.startswith('flashattn_ext')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert run.main(["decode", "growth"]) == 2
    result = capsys.readouterr()
    assert not result.out and result.err == (
        "bench: decode, growth need a GPU, but torch sees no CUDA device; overhead and cpu run "
        "without one.\n"
    )
    assert run.main(["decode", "--list"]) == 0


def test_the_bar_counts_every_step(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with progress.progress(3) as began:
        for n in range(3):
            began(f"step {n}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "_rich", lambda: None)
        with progress.progress(1) as began:
            began("a step without a bar")


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_on_a_gpu(suite, tmp_path, monkeypatch, capsys):
    """Every clock, every backend that is there, compared first."""
    for name in ("GPU_BYTES", "CPU_BYTES"):
        monkeypatch.setattr(roof, name, 2**22)
    for name in ("GPU_SIDE", "CPU_SIDE"):
        monkeypatch.setattr(roof, name, 256)
    words = [suite, *SHAPES[suite].split(), "--refcheck", "--seconds=0"]
    words += ["--json", str(tmp_path / "run.json"), "--csv", str(tmp_path / "run.csv")]
    code = run.main(words)
    result = json.loads((tmp_path / "run.json").read_text())
    assert code == 0, [r["reason"] for r in result["records"] if r["status"] in ("failed", "wrong")]
    ours = [r for r in result["records"] if r["backend"] == "ours"]
    assert ours and all(r["status"] == "measured" and r["median_us"] > 0 for r in ours)
    clocks = {"overhead": {"host"}, "cpu": {"cpu"}, "prefill": {"events"}}
    clocks |= {"options": {"events", "graph"}, "growth": {"events", "graph"}}
    assert {r["clock"] for r in ours} == clocks.get(suite, {"graph"})
    if suite != "cpu":
        assert result["machine"]["gpu"] == torch.cuda.get_device_name()
        assert result["machine"]["driver"] and result["clocks"]["after"]["sm_mhz"] > 0
        assert {r["device"] for r in ours} == {"cuda"}
    # What torch has on every GPU that these kernels cover.
    flash = [r for r in result["records"] if r["backend"] == "sdpa-flash"]
    assert not flash or any(r["status"] == "measured" for r in flash)
    assert max(map(len, capsys.readouterr().out.split("\n"))) <= 100
