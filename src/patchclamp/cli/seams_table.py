"""The seams that a vLLM's source has or lacks, as a table for people and as JSON for programs."""

from __future__ import annotations

import json

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchclamp.engines.vllm.versions import SourceReport

MARKS = {"there": ("✓", "green"), "moved": ("→", "bold yellow"), "gone": ("✗", "bold red")}


def show_seams(console: Console, report: SourceReport) -> None:
    """A row a seam, with what became of it; then how many are where they are expected."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for seam in report.seams:
        mark, style = MARKS[seam.status]
        detail = Text(seam.place)
        if seam.status != "there":
            checked = " and ".join(seam.checked)
            detail.append(f"\n{seam.detail} (needed to {seam.why}; checked on {checked})", style=style)
        table.add_row(Text(mark, style=style), seam.name, Text(seam.status, style=style), detail)
    console.print(table)
    counts = {status: sum(seam.status == status for seam in report.seams) for status in MARKS}
    summary = f"\nvLLM {report.version}: {counts['there']} seams there, {counts['moved']} moved, {counts['gone']} gone"
    console.print(Text(summary, style=MARKS["there" if report.all_there else "gone"][1]))


def show_seams_json(console: Console, report: SourceReport) -> None:
    """An object: whether all seams are there, the version, and every seam in order."""
    answer = {"ok": report.all_there, **msgspec.to_builtins(report)}
    console.file.write(json.dumps(answer, indent=2, ensure_ascii=False) + "\n")
