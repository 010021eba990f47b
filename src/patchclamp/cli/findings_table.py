"""What the doctor found, as tables for people and as JSON for programs."""

from __future__ import annotations

import itertools
import json

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchclamp.doctor import Report

MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "problem": ("✗", "bold red")}


def show_tables(console: Console, report: Report) -> None:
    """One table a part; what is not as it should be with what to do about it."""
    for part, findings in itertools.groupby(report.findings, lambda finding: finding.part):
        console.print(Text(part, style="bold"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column()
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            mark, style = MARKS[finding.status]
            detail = Text(finding.detail)
            if finding.advice:
                detail.append(f"\n→ {finding.advice}", style=style)
            table.add_row(Text(mark, style=style), finding.name, detail)
        console.print(table)
        console.print()
    problems, notes = len(report.problems), sum(finding.status == "note" for finding in report.findings)
    summary = f"{problems} problem{'s' if problems != 1 else ''}, {notes} note{'s' if notes != 1 else ''}"
    console.print(Text(summary, style=MARKS["problem" if problems else "ok"][1]))


def show_json(console: Console, report: Report) -> None:
    """An object: whether there is no problem, and every finding in order."""
    rows = [msgspec.to_builtins(finding) for finding in report.findings]
    answer = {"ok": not report.problems, "findings": rows}
    console.file.write(json.dumps(answer, indent=2, ensure_ascii=False) + "\n")
