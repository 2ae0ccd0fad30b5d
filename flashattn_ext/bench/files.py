"""Records as files: JSON with everything, CSV with a line per record."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .measure import Record

SHAPE = (
    "batch", "heads", "kv_heads", "head_dim", "seqlen", "kv_len", "lengths", "parts", "page_size",
    "causal", "dtype", "window", "softcap", "alibi", "packed", "capacity", "split_size",
)  # fmt: skip


def write_json(path: Path, run: dict[str, Any], records: list[Record]) -> None:
    """`run` says what holds for all: machine, clocks, roofs, command."""
    result = {**run, "records": [asdict(record) for record in records]}
    path.write_text(json.dumps(result, indent=1) + "\n")


def write_csv(path: Path, records: list[Record]) -> None:
    """The shape in columns of its own, empty where a case has no such dimension."""
    own = [f.name for f in fields(Record) if f.name != "shape"]
    columns = [*own[:4], *SHAPE, *own[4:]]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for record in records:
            row = asdict(record)
            shape = row.pop("shape")
            if "window" in shape:
                shape["window"] = ":".join(map(str, shape["window"]))
            writer.writerow(row | shape)
