"""Curves in a terminal: one table a picture, its lines as columns; a fuzz sweep's answers; where the files are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchclamp.plots import Curve, Curves
from patchclamp.plots.style import number, plain, shorten, tick

if TYPE_CHECKING:
    from patchclamp.studies import FuzzSweepResult


def show_curves(console: Console, curves: Curves) -> None:
    """What was done, on what, and the middle of every line at every number."""
    console.print()
    console.print(Text(curves.title, style="bold"), soft_wrap=True)
    console.print(Text(curves.provenance, style="dim"), soft_wrap=True)
    for note in curves.notes:
        console.print(Text(note), soft_wrap=True)
    console.print()
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(curves.x_label, justify="right", no_wrap=True)
    lines = [line for chart in curves.charts for line in chart.lines]
    for line in lines:
        table.add_column(line.label, justify="right")
    for x in curves.numbers:
        table.add_row(tick(x), *(_at(line, x) for line in lines))
    console.print(table)


def _at(line: Curve, x: float) -> str:
    here = line.y[np.asarray(line.x) == x]
    return number(float(here[0])) if len(here) and np.isfinite(here[0]) else "–"


def show_answers(console: Console, sweep: FuzzSweepResult) -> None:
    """The answers to the first prompt, by strength, of the first seed."""
    console.print()
    console.print(Text.assemble("the first prompt: ", (shorten(plain(sweep.prompts[0]), 90), "bold")), soft_wrap=True)
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("unfuzzed", Text(plain(sweep.unfuzzed[0][0].text)))
    for strength, row in zip(sweep.strengths, sweep.answers[0], strict=True):
        table.add_row(tick(strength), Text(plain(row[0].text)))
    console.print(table)


def show_kept(
    console: Console, result: Any, save: Path | None, png: Path | None = None, html: Path | None = None
) -> None:
    """Writes what was asked for and says where it is."""
    for write, path in ((result.save, save), (result.plot, png), (result.to_html, html)):
        if path is not None:
            show_written(console, write(path))


def show_written(console: Console, path: Path) -> None:
    console.print(Text.assemble("wrote ", (str(path), "bold")), soft_wrap=True)
