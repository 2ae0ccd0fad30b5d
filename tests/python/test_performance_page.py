"""docs/performance.md and "Speed" of both READMEs: their tables, means and lowest ratios are those
of the kept results, rounded."""

import json
import re
from functools import cache
from statistics import geometric_mean

import pytest
from pages import ROOT, Page

PAGE, README, CHINESE = map(Page, ("docs/performance.md", "README.md", "README.zh-CN.md"))
RESULT = "results/2026-11-30-h200-{}.json"
NONE = "–"
HEAD_DIMS = (64, 128, 256)  # that the tables have
OTHER_HEAD_DIMS = (32, 96, 160, 192, 224)
OVERHEAD = {
    "flash_fwd": "`flash_fwd`",
    "flash_fwd-packed": "`flash_fwd`, packed",
    "splitkv": "`flash_fwd_splitkv`, contiguous",
    "splitkv-pages": "`flash_fwd_splitkv`, pages",
}
MIXED = {
    "three": "(1, 1328) (5, 18) (129, 463) query and key lengths, page 16",
    "chunk-and-decodes": "2048-token chunk at 8k + 63 decodes to 64k, page 16",
    "log-normal-decodes": "128 decodes, log-normal lengths to 128k, page 16",
    "few-queries": "64 × 4 query tokens at 4k, page 16",
}


@cache
def cases(name, suite):
    """Of a kept run, in its order: the records of each case, by backend."""
    found = {}
    path = ROOT / "benchmarks" / RESULT.format(name)
    for record in json.loads(path.read_text(encoding="utf-8"))["records"]:
        if record["suite"] == suite:
            found.setdefault((record["case"], record["label"]), {})[record["backend"]] = record
    return list(found.values())


def shape(case):
    return case["ours"]["shape"]


def prefill(dtype="bfloat16", head_dims=HEAD_DIMS):
    found = [case for case in cases("prefill", "prefill") if shape(case)["dtype"] == dtype]
    return [case for case in found if shape(case)["head_dim"] in head_dims]


def rows(page, head):
    """The cells of the table that begins with `head`, line by line."""
    lines = page.text.split("\n")
    (first,) = (n for n, line in enumerate(lines) if line.startswith(head))
    found = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return found
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def prose(page):
    return " ".join(page.text.split())


def us(case, backend="ours"):
    """The median as a number; None where the backend has no such call."""
    record = case[backend]
    assert record["status"] == ("refuses" if record["median_us"] is None else "measured")
    return record["median_us"]


def three_digits(number):
    return NONE if number is None else f"{number:.{int(number < 100)}f}"


def whole(number):
    return NONE if number is None else f"{number:.0f}"


def spread(record):
    return f"{record['p10_us']:.0f} to {record['p90_us']:.0f} µs"


def speeds(found, other):
    """Our speed over theirs, of each case that both have."""
    return [us(case, other) / us(case) for case in found if us(case, other) is not None]


def speed(case, other):
    return NONE if us(case, other) is None else f"{speeds([case], other)[0]:.2f}"


def mean(found, other):
    return f"{geometric_mean(speeds(found, other)):.2f}"


def lowest(found, other):
    return f"{min(speeds(found, other)):.2f}"


# docs/performance.md


@pytest.mark.parametrize("name", ["prefill", "decode", "combine", "options", "overhead", "growth"])
def test_the_page_links_to_what_it_quotes(name):
    assert f"](../benchmarks/{RESULT.format(name)})" in PAGE.text


def test_prefill():
    def row(case):
        ours, theirs = case["ours"], case["sdpa-flash"]
        rates = [f"{record['tflops']:.0f}" for record in (ours, theirs)]
        return [ours["label"], whole(us(case)), *rates, speed(case, "sdpa-flash")]

    assert rows(PAGE, "| prefill |") == [row(case) for case in prefill()]


@pytest.mark.parametrize("suite", ["decode", "mixed"])
def test_over_a_cache(suite):
    def row(case):
        ours = case["ours"]
        cells = [ours["label"], three_digits(us(case)), f"{ours['tb_per_s']:.2f}"]
        for other in ("fa3", "triton"):
            cells += [three_digits(us(case, other)), speed(case, other)]
        return cells

    assert rows(PAGE, f"| {suite} |") == [row(case) for case in cases("decode", suite)]


def test_combine():
    """The first cell names what has changed from the row above."""
    found = rows(PAGE, "| parts, shape")
    for cells, case in zip(found, cases("combine", "combine"), strict=True):
        parts, _, sizes = case["ours"]["label"].partition(" parts ")
        assert cells[0] in (parts, f"{parts}, {sizes}")
        rate = f"{case['ours']['tb_per_s']:.2f}"
        assert cells[1:] == [three_digits(us(case)), rate, three_digits(us(case, "torch"))]


def test_overhead():
    def row(case):
        times = [us(case, who) for who in ("ours", "sdpa-flash", "sdpa-cudnn", "fa3", "triton")]
        cells = [NONE if time is None else f"{time:.1f}" for time in times]
        return [OVERHEAD[case["ours"]["case"]], *cells]

    assert rows(PAGE, "| | ours |") == [row(case) for case in cases("overhead", "overhead")]


def costs():
    """{name of a case of the options: its time by that of the first of its group}. Where cases
    differ in their type alone and have one name, it is that of the last, fp16."""
    first, found = {}, {}
    for case in cases("options", "options"):
        name = case["ours"]["case"]
        found[name] = us(case) / first.setdefault(name.partition("/")[0], us(case))
    return found


def test_options():
    cost = costs()

    def two(first, second):
        return f"{cost[first]:.2f}, {cost[second]:.2f}"

    fp16 = max(value for name, value in cost.items() if name.startswith("dtype-"))
    assert [cell for _, cell in rows(PAGE, "| | time by that without |")] == [
        two("score-full/softcap", "score-causal/softcap"),
        two("score-full/alibi", "score-causal/alibi"),
        two("packed-1024/packed", "packed-4096/packed"),
        f"{fp16:.2f} or less",
        f"{cost['window/1024']:.3f}",
        f"{cost['capacity/131072']:.2f}",
    ]


def test_times_beside_the_options():
    found = {case["ours"]["case"]: case for case in cases("options", "options")}
    text = prose(PAGE)
    both = (f"{us(found[f'capacity/{tokens}']):.1f}" for tokens in (131072, 64))
    assert "against capacity 64: {} and {} µs".format(*both) in text
    disturbed = cases("options", "options")[0]["ours"]
    assert f"head dim 64 full, was disturbed: {spread(disturbed)}" in text


def test_split_sizes():
    cost, calls = costs(), ("1x8192", "1x131072", "8x8192", "64x8192")
    assert rows(PAGE, "| `split_size`, time") == [
        [size, *(f"{cost[f'split-size-{call}/{size}']:.2f}" for call in calls)]
        for size in ("256", "1024", "4096")
    ]


def test_means_of_prefill():
    def both(found):
        means = mean(found, "sdpa-flash"), lowest(found, "sdpa-flash")
        return "geometric mean {}, lowest {}".format(*means)

    text, others = prose(PAGE), prefill(head_dims=OTHER_HEAD_DIMS)
    assert f"our speed over theirs; {both(prefill())}" in text
    assert f"fp16, the same shapes: {both(prefill('float16'))} (b 16, s 1024, head dim 64," in text
    assert f"{spread(prefill('float16')[0]['ours'])} from its 10th to its 90th percentile" in text
    means = [f"{d}: {mean(prefill(head_dims=[d]), 'sdpa-flash')}" for d in OTHER_HEAD_DIMS]
    assert f"Other head dims, bf16: {both(others)} ({', '.join(means)})" in text


def test_means_over_a_cache():
    decode, mixed = cases("decode", "decode"), cases("decode", "mixed")
    of_fa3 = f"over FlashAttention-3: {mean(decode, 'fa3')}, lowest {lowest(decode, 'fa3')};"
    of_triton = f"over vLLM's Triton kernel (pages): {mean(decode, 'triton')}."
    assert f"{of_fa3} {of_triton}" in prose(PAGE)
    of_mixed = [mean(mixed, other) for other in ("fa3", "triton")]
    assert "over FlashAttention-3: {}; over Triton: {}.".format(*of_mixed) in prose(PAGE)


def test_times_of_the_host():
    record = cases("overhead", "overhead")[0]["ours"]
    tenth, median = record["p10_us"], record["median_us"]
    phrase = f"{tenth:.1f} µs or less in a tenth of the samples and {median:.1f} in the median"
    assert f"`{record['case']}` took {phrase}" in prose(PAGE)
    runs = ("overhead-before", "overhead-with-lse", "overhead")
    before, with_lse, now = (us(cases(name, "overhead")[-1]) for name in runs)  # over pages
    to_before, to_with_lse = (rf"\[[^]]*\]\([^)]*-{name}\.json\)" for name in runs[:2])
    phrase = (
        rf"in pages took {before:.0f} µs {to_before}, {with_lse:.0f} {to_with_lse}, and {now:.1f}"
    )
    assert re.search(phrase, prose(PAGE))


# README.md and README.zh-CN.md


def of_lengths(head_dim, causal):
    """The cells of a row: TFLOP/s at each length, ours and theirs."""
    found = [case for case in prefill(head_dims=[head_dim]) if shape(case)["causal"] == causal]
    assert [shape(case)["seqlen"] for case in found] == [1024, 4096, 16384]
    return [
        " / ".join(f"{case[who]['tflops']:.0f}" for case in found) for who in ("ours", "sdpa-flash")
    ]


@pytest.mark.parametrize(
    "page, full, causal", [(README, ", full", ", causal"), (CHINESE, "，无掩码", "，因果")]
)
def test_prefill_of_a_readme(page, full, causal):
    assert rows(page, "| prefill |") == [
        [f"d {head_dim}{mask}", *of_lengths(head_dim, mask == causal)]
        for head_dim in HEAD_DIMS
        for mask in (full, causal)
    ]


def over_a_cache():
    """{first cell: the others} of every case, of which README.md has some."""
    found = {}
    for case in (*cases("decode", "decode"), *cases("decode", "mixed")):
        name, sizes = case["ours"]["case"], shape(case)
        if name == "decode":
            place = f"page {sizes['page_size']}" if sizes["page_size"] else "contiguous"
            name = "b {batch}, {heads}/{kv_heads}, d {head_dim}, {kv_len}, ".format(**sizes) + place
        found[MIXED.get(name, name)] = [whole(us(case, who)) for who in ("ours", "fa3", "triton")]
    return found


def test_decode_of_the_readmes():
    """Names are translated, which test_translations.py compares."""
    english, found = rows(README, "| case |"), over_a_cache()
    assert english == [[name, *found[name]] for name, *_ in english]
    assert {name for name, *_ in english} >= set(MIXED.values()) and len(english) > len(MIXED)
    chinese = rows(CHINESE, "| 情形 |")
    assert [cells[1:] for cells in chinese] == [cells[1:] for cells in english]


def test_means_of_the_readme():
    def span(found):
        return f"{lowest(found, 'sdpa-flash')} to {max(speeds(found, 'sdpa-flash')):.2f}"

    short = [case for case in prefill() if shape(case)["seqlen"] == 1024]
    long = [case for case in prefill() if case not in short]
    both = mean(prefill(), "sdpa-flash")
    assert both == mean(prefill("float16"), "sdpa-flash"), "the page says: fp16 too"
    others = mean(prefill(head_dims=OTHER_HEAD_DIMS), "sdpa-flash")
    for phrase in (
        f"In geometric mean {both} of FlashAttention-2 (fp16 too;",
        f"192 and 224: {others}), from {span(long)} at lengths of 4096 and more",
        f"and from {span(short)} at 1024.",
    ):
        assert phrase in prose(README)


def test_means_over_a_cache_of_the_readme():
    decode, mixed = cases("decode", "decode"), cases("decode", "mixed")
    means = [mean(found, other) for found in (decode, mixed) for other in ("fa3", "triton")]
    phrase = "{} of FlashAttention-3, {} of Triton; over four mixed batches: {} and {})"
    assert phrase.format(*means) in prose(README)
