"""What every benchmark writes and shows: rows of ours beside the alternative, and the machine they were measured on.

    import report
    rows = [report.Row("one step", 0.101, 0.1, "s", 1.01, "<= 1.03x", True)]
    report.show(rows)
    report.write("step.json", "step", rows)

`all.py` collects the files that `write` makes and puts them on a page with `put_table`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import odcluster
from odcluster.training.devices import cpu_flags

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve")
"""Instruction sets that decide how fast products of matrices are."""
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
"""On the page, the lines between these two are written by `put_table`."""
HEAD = ("what", "ours", "alternative", "ratio", "target", "met", "command")


def check_checkout(imported: str | None = odcluster.__file__) -> None:
    """Refuse to measure another checkout's package: figures of the wrong code look like any others."""
    if imported is None or not Path(imported).resolve().is_relative_to(ROOT):
        raise SystemExit(
            f"these benchmarks belong to {ROOT}, but Python imports odcluster from {imported}; "
            f"set PYTHONPATH={ROOT}, or install this checkout"
        )


check_checkout()


@dataclass(frozen=True)
class Row:
    """One comparison. `ratio` is ours against the alternative, the way round that the target speaks of it."""

    what: str
    ours: float | None
    """None: not measured, and the note says why."""
    other: float | None
    unit: str
    ratio: float | None
    target: str
    met: bool | None
    """None: there is no target, or it could not be judged."""
    note: str = ""


def not_run(what: str, reason: str, target: str = "") -> Row:
    """A row for what could not be measured here: a gap must be seen, not missing from the table."""
    return Row(what, None, None, "", None, target, None, f"not run: {reason}")


def machine() -> dict[str, Any]:
    """Facts about this machine that a figure depends on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "architecture": platform.machine(),
        "flags": [flag for flag in FLAGS if flag in cpu_flags()],
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write(path: str | os.PathLike[str], name: str, rows: Sequence[Row]) -> None:
    """Write the rows of one benchmark, with the machine and the day."""
    entry = {
        "name": name,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    write_json(path, entry)


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Whole or not at all; numbers that JSON does not know are an error here, not for whoever reads it."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    temporary = f"{os.fspath(path)}.tmp-{os.getpid()}"
    Path(temporary).write_text(text)
    os.replace(temporary, path)


def number(value: float | None) -> str:
    """Three digits, and all of them before the point: 0.0123, 1.03, 56.1, 1,281."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits)}f}"


def cells(row: Row) -> list[str]:
    """The columns of `HEAD` but the last."""
    unit = f" {row.unit}" if row.unit else ""
    return [
        row.what,
        f"{number(row.ours)}{unit}" if row.ours is not None else "not run",
        f"{number(row.other)}{unit}" if row.other is not None else "",
        f"{number(row.ratio)}x" if row.ratio is not None else "",
        row.target,
        {True: "yes", False: "no", None: ""}[row.met],
    ]


def show(rows: Iterable[Row]) -> None:
    """Print the rows as a table for people."""
    rows = list(rows)
    table = [list(HEAD[:-1]), *map(cells, rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEAD) - 1)]
    for line, row in zip(table, [None, *rows], strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)
        if row is not None and row.note:
            print(f"    {row.note}", flush=True)


def markdown(entries: Iterable[dict[str, Any]]) -> str:
    """The table of all benchmarks; notes follow it, by number."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    notes: list[str] = []
    for entry in entries:
        for fields in entry["rows"]:
            row = Row(**fields)
            columns = cells(row)
            if row.note:
                if row.note not in notes:
                    notes.append(row.note)
                columns[0] += f" [{notes.index(row.note) + 1}]"
            columns.append(f"`{entry['command']}`")
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in columns)} |")
    lines += ["", *(f"{at}. {note}" for at, note in enumerate(notes, 1))]
    return "\n".join(lines).rstrip()


def machines(entries: Iterable[dict[str, Any]]) -> str:
    """One sentence per machine that the figures come from, usually one."""
    places: dict[str, list[str]] = {}
    for entry in entries:
        if not (facts := entry.get("machine")):
            continue
        about = (
            f"{facts['cores']} cores ({facts['architecture']}, {' '.join(facts['flags']) or 'flags unknown'}), "
            f"{facts['gpu'] or 'no GPU'}, torch {facts['torch']}, Python {facts['python']}"
        )
        places.setdefault(about, []).append(f"{entry['name']} ({entry['date']})")
    return "\n".join(f"Measured on {about}: {', '.join(names)}." for about, names in places.items())


def put_table(page: str | os.PathLike[str], entries: Sequence[dict[str, Any]]) -> None:
    """Rewrite what stands between the two marks of the page, and nothing else of it."""
    text = Path(page).read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for the table; put the lines {BEGIN} and {END} where it belongs")
    write_text(page, f"{before}{BEGIN}\n{machines(entries)}\n\n{markdown(entries)}\n{END}{after}")
