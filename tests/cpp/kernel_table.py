"""The kernels as they are known: registers, stack, instructions, against a checked-in table.

    python kernel_table.py LIBRARY --compiler 13.0.88           compares with kernel_table.csv
    python kernel_table.py LIBRARY --compiler 13.0.88 --write   puts LIBRARY's kernels into it

A kernel that takes more registers, more stack or more instructions than the table says has become
slower in a way that no test of results shows, often far from the line that was changed. When the
change is meant, measure it, and write the table anew. Exits with 77 (skipped) without cuobjdump,
without kernels, or where another compiler made them, which counts differently. Kernels that the
table does not have are named in number and are no fault.
"""

import argparse
import csv
import re
import subprocess
import sys
from pathlib import Path

import kernel_budget

TABLE = Path(__file__).with_name("kernel_table.csv")
# Of tensor cores, of asynchronous copies to shared memory, of fragments from there.
COUNTED = ("HMMA", "LDGSTS", "LDSM")
FIELDS = ("compiler", "arch", "kernel", "registers", "frame", "instructions", *COUNTED)
# How much more is still the same: the compiler moves a little when other code changes.
SLACK = {"registers": 8, "frame": 16}
INSTRUCTION_SLACK = 1.05

ARCH = re.compile(r"^\s*arch = sm_(\d+)", re.MULTILINE)
FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)")


def counts(sass):
    """{(architecture, mangled name): {"instructions": n, "HMMA": n, ...}} of what -sass prints."""
    found = {}
    parts = ARCH.split(sass)
    for arch, part in zip(parts[1::2], parts[2::2], strict=True):
        functions = FUNCTION.split(part)
        for name, body in zip(functions[1::2], functions[2::2], strict=True):
            operations = INSTRUCTION.findall(body)
            operations = [op for op in operations if op != "NOP"]
            found[int(arch), name] = {"instructions": len(operations)} | {
                op: operations.count(op) for op in COUNTED
            }
    return found


def rows_of(library, compiler, cuobjdump):
    def listing(option):
        command = [cuobjdump, option, library]
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        if "does not contain device code" in run.stdout + run.stderr:
            return ""
        run.check_returncode()
        return run.stdout

    resources = kernel_budget.kernels(listing("-res-usage"))
    rows = []
    sass = counts(listing("-sass"))
    names = kernel_budget.readable(sorted({name for _, name in sass}))
    for (arch, name), operations in sorted(sass.items()):
        registers, frame = resources[arch][name]
        row = {"compiler": compiler, "arch": arch, "kernel": names[name]}
        rows.append(row | {"registers": registers, "frame": frame} | operations)
    return rows


def key(row):
    return row["compiler"], int(row["arch"]), row["kernel"]


def known():
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="") as file:
        return {key(row): row for row in csv.DictReader(file)}


def faults_of(row, expected):
    for field, slack in SLACK.items():
        if row[field] > int(expected[field]) + slack:
            yield f"{field} {expected[field]} -> {row[field]}"
    for field in ("instructions", "LDGSTS", "LDSM"):
        if row[field] > int(expected[field]) * INSTRUCTION_SLACK:
            yield f"{field} {expected[field]} -> {row[field]}"
    if row["HMMA"] != int(expected["HMMA"]):
        yield f"HMMA {expected['HMMA']} -> {row['HMMA']}"


def compare(rows, table):
    common = [row for row in rows if key(row) in table]
    if not common:
        print("skipped: the table has none of these kernels, or they are of another compiler")
        return kernel_budget.SKIPPED
    faulty = 0
    for row in common:
        faults = ", ".join(faults_of(row, table[key(row)]))
        if faults:
            faulty += 1
            print(f"sm_{row['arch']} {row['kernel']}: {faults}")
    unknown = len(rows) - len(common)
    print(f"{len(common)} kernels compared, {faulty} worse; {unknown} are not in the table")
    return 1 if faulty else 0


def write(rows, table):
    """Rows of the same compiler replace those of before; other architectures and dims stay."""
    compilers = {row["compiler"] for row in rows}
    kept = {k: row for k, row in table.items() if k[0] in compilers}
    kept |= {key(row): row for row in rows}
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept[k] for k in sorted(kept))
    print(f"{TABLE.name}: {len(kept)} kernels")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("library")
    parser.add_argument("--compiler", required=True, help="version of nvcc")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    cuobjdump = kernel_budget.find_cuobjdump()
    if cuobjdump is None:
        print("skipped: cuobjdump is neither in the CUDA toolkit nor in triton")
        return kernel_budget.SKIPPED
    rows = rows_of(arguments.library, arguments.compiler, cuobjdump)
    if not rows:
        print(f"skipped: {arguments.library} has no CUDA kernels")
        return kernel_budget.SKIPPED
    return (write if arguments.write else compare)(rows, known())


if __name__ == "__main__":
    sys.exit(main())
