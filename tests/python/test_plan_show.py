"""`Plan.show` and ``python -m flashattn_ext.plan``: maps as text and as pictures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashattn_ext import _plan_gpus, _plan_options, _plan_picture
from flashattn_ext.planning import plan

pytest.importorskip("flashattn_ext._host")

PREFILL = dict(batch=1, heads=8, head_dim=128, seqlen_q=384, seqlen_k=384, causal=True)
DECODE = dict(batch=2, heads=8, heads_kv=2, head_dim=64, seqlen_q=1, seqlen_k=[900, 64], cache=16)
MIXED = DECODE | dict(seqlen_q=[1, 100], seqlen_k=[900, 300], causal=True)


@pytest.fixture(autouse=True)
def default_build(monkeypatch):
    monkeypatch.setattr(_plan_gpus, "BUILD", {})


def text_of(capsys, call, **options):
    plan(**call, gpu="H200").show(text=True, **options)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    return lines


def test_text_of_a_staircase(capsys):
    assert text_of(capsys, PREFILL) == [
        "flash_fwd_kernel, prefill: tiles of 128 rows x 64 keys",
        "# clean  + masked  . skipped",
        "sequence heads queries key blocks  thread block",
        "0        0     0-127   ++....      2",
        "0        0     128-255 ##++..      1",
        "0        0     256-383 ####++      0",
    ]


def test_text_of_shares(capsys):
    """Eight thread blocks for 15 key blocks of a head, two for each but the last, and as many
    between them for the other head: a team of two."""
    assert text_of(capsys, DECODE) == [
        "flash_fwd_splitkv_kernel, decode: tiles of 16 rows x 64 keys",
        "# clean  + masked  . skipped",
        "sequence heads queries key blocks       thread block",
        "0        0-3   0       ##############+  0-14 by 2",
        "                       0 2 4 6 8 10  14",
        "0        4-7   0       ##############+  1-15 by 2",
        "                       1 3 5 7 9 11  15",
        "1        0-3   0       #                16",
        "1        4-7   0       #                17",
    ]


def test_text_of_given_splits(capsys):
    lines = text_of(capsys, DECODE | {"num_splits": 2}, sequences=[0], heads=[4])
    assert lines[-2:] == [
        "0        4-7   0       ##############+  2, splits 0-1",
        "                       0       1",
    ]


def test_long_maps_are_drawn_with_fewer_characters(capsys):
    """Four tiles of 64 blocks of keys to a line, and 5 blocks to a character."""
    long = PREFILL | dict(seqlen_q=16384, seqlen_k=16384)
    lines = text_of(capsys, long)
    assert lines[1] == (
        "# clean  + masked  . skipped  % several; a character: 5 key blocks; a line: up to 4 tiles"
    )
    assert len(lines) == 3 + 32
    assert lines[3].split() == ["0", "0", "0-511", "%%" + 50 * ".", "124-127"]
    assert lines[-1].split() == ["0", "0", "15872-16383", 49 * "#" + "%%%", "0-3"]


def test_what_is_left_out_is_counted(capsys):
    many = DECODE | dict(batch=100, seqlen_k=64)
    lines = text_of(capsys, many)
    assert lines[-1] == "and 88 tiles more: choose with sequences, heads"  # 2 * 64 - 40
    assert text_of(capsys, many, sequences=[99])[-1].startswith("99       4-7 ")


def test_a_kernel_without_work(capsys):
    """Both are launched; of the sequences chosen, none is decoded."""
    lines = text_of(capsys, MIXED, sequences=[1])
    assert lines[1] == "has nothing to do for these sequences and heads"
    assert "chunk" in lines[3] and lines[6].startswith("1        0-3   0-15 ")


def colors(axes):
    """(color, number of key blocks) of the cells, and the frames."""
    from matplotlib.colors import to_hex

    cells, frames = {}, 0
    for collection in axes.collections:
        if collection.get_zorder() == _plan_picture._LINES:
            frames += 1
        elif len(collection.get_facecolor()):
            color = to_hex(collection.get_facecolor()[0])
            left, right = (f(collection.get_paths()[0].vertices[:, 0]) for f in (min, max))
            cells[color] = cells.get(color, 0) + (right - left) / 64
    return cells, frames


def texts(axes):
    return [text.get_text().strip() for text in axes.texts]


def drawn(call, **choice):
    figure_module = pytest.importorskip("matplotlib.figure")
    figure = figure_module.Figure()
    _plan_picture.draw(figure, plan(**call, gpu="H200").tile_maps(**choice))
    return figure


def test_picture_of_a_staircase():
    (axes,) = drawn(PREFILL, heads=[0]).axes
    cells, frames = colors(axes)
    clean, masked, skipped = (_plan_picture._COLORS[state] for state in _plan_picture._MEANINGS)
    # even thread blocks: tiles 0 and 2; odd: tile 1
    assert cells == {
        clean[0]: 4, clean[1]: 2, masked[0]: 4, masked[1]: 2, skipped[0]: 6,
    }  # fmt: skip
    assert frames == 3 and texts(axes) == ["2", "1", "0"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        f"seq 0, head 0, query {queries}" for queries in ("0-127", "128-255", "256-383")
    ]


def test_picture_of_a_mixed_batch():
    decode, chunk = drawn(MIXED).axes
    assert "decode" in decode.get_title("left") and "chunk" in chunk.get_title("left")
    numbers = texts(decode)
    assert numbers == ["0", "2", "4", "6", "1", "3", "5", "7"]
    assert colors(decode)[1] == len(numbers)
    assert {name.split(",")[1] for name in texts(chunk)} == {"0", "1", "2"}


def test_many_tiles_have_no_numbers():
    figure = drawn(DECODE | dict(batch=200, seqlen_k=64))
    (axes,) = figure.axes
    assert not texts(axes) and "144 tiles more" in axes.get_title("left")
    assert len(axes.get_yticks()) == 43 and figure.get_size_inches()[1] < 12  # 256 tiles, every 6th


@pytest.mark.parametrize(
    "suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_picture_files(tmp_path, capsys, suffix, start):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"map.{suffix}"
    plan(**PREFILL).show(path)
    assert path.read_bytes().startswith(start) and not capsys.readouterr().out


def test_window_where_there_is_one(monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    shown = []
    monkeypatch.setattr(
        pyplot, "show", lambda: shown.append(pyplot.gcf().axes[0].get_title("left"))
    )
    plan(**PREFILL).show()
    assert not shown and "thread block" in capsys.readouterr().out
    monkeypatch.setattr(pyplot, "get_backend", lambda: "QtAgg")
    plan(**PREFILL).show()
    pyplot.close("all")
    assert len(shown) == 1 and "prefill" in shown[0] and not capsys.readouterr().out


def test_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plan(**PREFILL).show()
    assert "####++" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"path: a picture needs matplotlib.*show\(text=True\)"):
        plan(**PREFILL).show(tmp_path / "map.png")
    assert not list(tmp_path.iterdir())


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="path: a picture, expected None with text=True"):
        plan(**PREFILL).show(tmp_path / "map.png", text=True)
    with pytest.raises(ValueError, match="show: nothing to draw"):
        plan(**PREFILL | {"seqlen_q": 0}).show(text=True)
    with pytest.raises(ValueError, match="sequences: expected ints from 0 to 0, got 1"):
        plan(**PREFILL).show(text=True, sequences=[1])


def command(*words):
    return _plan_options.main(["--gpu", "H200", *words])


def test_command_line(capsys):
    words = "--heads 8 --kv-heads 2 --head-dim 64 --seqlen-q 1,100 --kv-len 900,300 --cache 16"
    assert command(*words.split(), "--causal", "--text") == 0
    printed = capsys.readouterr().out
    made = plan(**MIXED, gpu="H200")
    made.show(text=True)
    assert printed == f"{made}\n\n" + capsys.readouterr().out


def test_every_option_of_the_command_line(monkeypatch):
    calls = []

    class Made:
        def show(self, path, **options):
            calls.append((path, options))

    monkeypatch.setattr(_plan_options, "plan", lambda **call: calls.append(call) or Made())
    words = (
        "--batch 3 --heads 6 --kv-heads 2 --head-dim 40 --seqlen-q 7 --kv-len 9,8,7 --causal "
        "--dtype float16 --window=-1,5 --max-seqlen-q 8 --cache contiguous --capacity 20 "
        "--new-tokens 2 --rotary-dim 16 --num-splits 4 --split-size 64 --picture a.png "
        "--sequences 0,2 --show-heads 3"
    )
    assert command(*words.split()) == 0
    assert calls == [
        dict(
            batch=3, heads=6, heads_kv=2, head_dim=40, seqlen_q=7, seqlen_k=[9, 8, 7],
            dtype=torch.float16, causal=True, window_size=(-1, 5), max_seqlen_q=8,
            cache="contiguous", capacity=20, new_tokens=2, rotary_dim=16, num_splits=4,
            split_size=64, gpu="H200",
        ),
        (Path("a.png"), {"text": False, "sequences": [0, 2], "heads": [3]}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words, message",
    [
        ("--kv-len 9", "--seqlen-q"),
        ("--seqlen-q 1 --kv-len x", "argument --kv-len: invalid lengths value: 'x'"),
        ("--seqlen-q 1 --kv-len 9 --window 5", "argument --window: invalid window value: '5'"),
        ("--seqlen-q 1,2 --kv-len 9,9,9", "seqlen_k: expected 2 lengths"),
        ("--seqlen-q 1 --kv-len 9 --head-dim 300", "q: expected a head dim from 1 to 256"),
        (
            "--seqlen-q 1 --kv-len 9 --text --show-heads 50",
            "plan: --show-heads: expected ints from 0 to 31, got 50",
        ),
        ("--seqlen-q 1 --kv-len 9 --gpu H300", "gpu: expected None"),
        ("--seqlen-q 1 --kv-len 9 --picture a.png --text", "path: a picture"),
    ],
)
def test_command_lines_that_cannot_be_served(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(*words.split())
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_picture_into_a_folder_that_is_none(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as stopped:
        command(*"--seqlen-q 1 --kv-len 9 --picture".split(), str(tmp_path / "none" / "a.png"))
    assert stopped.value.code == 2 and "No such file or directory" in capsys.readouterr().err


def run(*arguments):
    environment = os.environ | {"MPLBACKEND": "agg"}
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip


def test_as_a_program():
    done = run("-m", "flashattn_ext.plan", "--head-dim=64", "--seqlen-q=1", "--kv-len=200")
    assert done.returncode == 0, done.stderr
    assert not done.stderr and done.stdout.startswith("call       flash_fwd: 1 sequence of 1 x 200")
    assert "thread block" in done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import flashattn_ext.plan",
        "import flashattn_ext.plan as module; assert module is flashattn_ext.plan",
        "from flashattn_ext import plan; import flashattn_ext.plan",
        "import importlib; importlib.import_module('flashattn_ext.plan')",
        "import pickle, flashattn_ext.plan; pickle.loads(pickle.dumps(flashattn_ext.plan))",
    ],
)
def test_importing_the_program_leaves_the_function(code):
    done = run(
        "-c",
        "import flashattn_ext; before = flashattn_ext.plan\n"
        f"{code}\nassert flashattn_ext.plan is before\n"
        "from flashattn_ext import plan; assert plan is before\n"
        "print(plan(batch=1, heads=1, head_dim=64, seqlen_q=1, seqlen_k=1).function)",
    )
    assert done.stdout == "flash_fwd\n", done.stderr


def test_program_without_torch():
    done = run(
        "-c",
        "import runpy, sys; sys.modules['torch'] = None\n"
        "runpy.run_module('flashattn_ext.plan', run_name='__main__')",
    )
    assert done.returncode == 1
    assert done.stderr.startswith("flashattn_ext.plan needs PyTorch, which does not import here")


def test_command_of_the_readme(capsys):
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (words,) = re.findall(r"`python -m flashattn_ext\.plan ([^`]*)`", text)
    assert command(*words.split(), "--text") == 0
    assert "heads of 128, bfloat16, pages of 16 for 8192 tokens" in " ".join(
        capsys.readouterr().out.split()
    )
