"""The cases of each suite, and the command line that changes them."""

import shlex

import pytest
from bench_calls import SUITES, cases, parse

from flashattn_ext.bench import lengths, options, run
from flashattn_ext.bench.cases import Combine, Decode, Mixed, Prefill


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
