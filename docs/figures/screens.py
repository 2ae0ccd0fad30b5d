"""Draws what the programs print as a terminal shows it: python docs/figures/screens.py [folder].

`info` is a text that was kept, screens/info.txt, since every machine has its own. `plan` runs here.
The table of `bench` is made again from the newest record of its decode suite on a GPU.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from flashattn_ext import _plan_gpus
from flashattn_ext._plan_options import main as run_plan
from flashattn_ext.bench.backends import by_name
from flashattn_ext.bench.measure import Record
from flashattn_ext.bench.table import Table, comparison

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
PLAN = "--seqlen-q 768 --kv-len 768 --kv-heads 8 --causal --gpu H200"
# rich's own has a font that is fetched; letters get the widths of any font from `textLength`.
SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}
<g class="{unique_id}-matrix" xml:space="preserve">
{matrix}
</g></g></svg>
"""


def info():
    return (HERE / "screens" / "info.txt").read_text(encoding="utf-8")


def plan():
    printed = io.StringIO()
    with mock.patch.object(_plan_gpus, "BUILD", {}), contextlib.redirect_stdout(printed):
        run_plan([*PLAN.split(), "--text"])
    return f"$ python -m flashattn_ext.plan {PLAN} --text\n{printed.getvalue()}"


def bench():
    """The cases over pages, beside the backends that take these."""
    run = json.loads(max(RESULTS.glob("*-h200-decode.json")).read_text())
    records = [Record(**r) for r in run["records"] if r["suite"] == "decode"]
    records = [record for record in records if record.shape["page_size"] == 16]
    known = by_name()
    backends = [known[name] for name in dict.fromkeys(record.backend for record in records)]
    cases = {}
    for record in records:
        cases.setdefault(record.label, {})[record.backend] = record
    table = Table(backends, list(cases), records[0].unit, grouped=False)
    titles = {backend.name: backend.title for backend in backends}
    lines = [
        f"$ python -m flashattn_ext.bench decode --page-size 16  # {run['machine']['gpu']}",
        table.header(),
        *(table.line(label, of_backends) for label, of_backends in cases.items()),
        "",
        *comparison(records, titles),
    ]
    return "\n".join(lines)


def screen(name, text):
    """The text in a window of its width, its first line (the command) in bold."""
    lines = text.rstrip().splitlines()
    width = max(map(len, lines))
    console = Console(record=True, width=width, file=io.StringIO(), color_system="truecolor")
    console.print(Text(lines[0], style="bold"))
    for line in lines[1:]:
        console.print(Text(line), soft_wrap=True)
    return console.export_svg(title=name, theme=MONOKAI, code_format=SVG, unique_id=name)


SCREENS = {"info": info, "plan": plan, "bench": bench}


def main(folder=HERE / "screens"):
    for name, text in SCREENS.items():
        (Path(folder) / f"{name}.svg").write_text(screen(name, text()), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:2])
