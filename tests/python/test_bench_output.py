"""What the benchmarks print and write."""

import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import bench_calls
import pytest
import torch
from bench_calls import SHAPES, SUITES, cases

from flashattn_ext.bench import backends, devices, machine, measure, plots, run, table

quick = bench_calls.quick


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


def test_growth_names_what_it_draws():
    """A backend without a line in a panel is not in its legend. It has one colour in the others."""
    pytest.importorskip("matplotlib")
    titles = {name: backend.title for name, backend in backends.by_name().items()}
    records = [
        replace(record, case=f"{case}/{n}", shape={case: n})
        for case, names in (("seqlen", ["ours", "sdpa-flash", "fa3"]), ("pages", ["ours", "fa3"]))
        for n in (16, 32)
        for record in fake_records(names)
    ]
    colours = {}
    for axes, count in zip(plots._growth(records, titles).axes, (3, 2), strict=True):
        lines = [line for line in axes.lines if len(line.get_xdata())]
        legend = [text.get_text() for text in axes.get_legend().get_texts()]
        assert len(lines) == count and legend == [line.get_label() for line in lines]
        for line in lines:
            assert colours.setdefault(line.get_label(), line.get_color()) == line.get_color()


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
