"""Curves as one picture: charts beside each other, lines with their spread, what they mean below.

Lines differ in colour, in marker and in dash, so the picture also reads in grey.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from patchclamp.plots.curves import Chart, Curves, Line, tick
from patchclamp.plots.palette import INK, LINES, MUTED, RULE
from patchclamp.plots.sheet import Ruler, Sheet, lettering
from patchclamp.plots.target import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARGIN, LABEL, TITLE, TITLE_LINE = 0.4, 8.5, 13, 0.27  # inches, points, points, inches
CHART_WIDTH, CHART_HEIGHT, BESIDE, BELOW, HEADING, NOTE_LINE = 3.5, 2.3, 0.75, 0.62, 0.32, 0.19
ACROSS = 3  # charts in a row at most
MARKERS, DASHES = "os^Dv", ("-", "--", "-.", ":")


def curves_png(curves: Curves, path: str | Path) -> Path:
    """Draws curves into a file; its ending says the format (png, pdf, svg and what else matplotlib writes).

    Raises: `PatchclampError` without matplotlib, `UnknownName` for a format it does not write.
    """
    target, ending = picture(path)
    curves_figure(curves).savefig(target, format=ending, dpi="figure", facecolor="white")
    return target


def curves_figure(curves: Curves) -> Figure:
    """The picture as a matplotlib figure."""
    count, ruler = len(curves.charts), Ruler()
    across = min(count, ACROSS) if count != 4 else 2
    chart_width = CHART_WIDTH if count > 1 else 5.4
    width = 2 * MARGIN + across * (chart_width + BESIDE)
    text_width = width - 2 * MARGIN
    title = ruler.wrap(curves.title, text_width, TITLE, weight="bold")
    footer = [line for text in (*curves.notes, f"Ran on {curves.provenance}.") for line in
              ruler.wrap(text, text_width, LABEL)]  # fmt: skip
    notes = [ruler.wrap(chart.note, chart_width, LABEL - 0.5) if chart.note else [] for chart in curves.charts]
    rows = [range(i, min(i + across, count)) for i in range(0, count, across)]
    heights = [HEADING + CHART_HEIGHT + BELOW + NOTE_LINE * max(len(notes[i]) for i in row) for row in rows]
    height = MARGIN + TITLE_LINE * len(title) + sum(heights) + 0.2 * len(footer) + 0.35
    sheet = Sheet(width, height)
    y = MARGIN + 0.1
    for line in title:
        sheet.text(MARGIN, y, line, TITLE, weight="bold")
        y += TITLE_LINE
    for row, row_height in zip(rows, heights, strict=True):
        for column, i in enumerate(row):
            x = MARGIN + BESIDE + column * (chart_width + BESIDE) - 0.1
            _chart(sheet.axes(x, y + HEADING, chart_width, CHART_HEIGHT), curves, curves.charts[i])
            below = y + HEADING + CHART_HEIGHT + BELOW
            for n, line in enumerate(notes[i]):
                sheet.text(x, below + NOTE_LINE * n, line, LABEL - 0.5, color=MUTED)
        y += row_height
    for n, line in enumerate(footer):
        sheet.text(MARGIN, y + 0.2 + 0.2 * n, line, LABEL, color=MUTED)
    return sheet.figure


def _chart(axes: Axes, curves: Curves, chart: Chart) -> None:
    axes.set_title(chart.title, loc="left", pad=6, **lettering(10.5, weight="bold"))
    axes.set_xlabel(curves.x_label, **lettering(LABEL, color=MUTED))
    axes.set_ylabel(chart.y_label, **lettering(LABEL, color=MUTED))
    for i, line in enumerate(chart.lines):
        _line(axes, curves, line, i)
    if chart.level is not None:
        axes.axhline(chart.level, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1, label=chart.level_label)
    if chart.y_log:
        axes.set_yscale("log")
    axes.set_ylim(*chart.span)
    _frame(axes, curves, chart)
    if len(chart.lines) > 1 or chart.level is not None:
        legend = axes.legend(frameon=True, facecolor="white", edgecolor="none", framealpha=0.85, fontsize=LABEL)
        for text in legend.get_texts():
            text.set(**lettering(LABEL))


def _line(axes: Axes, curves: Curves, line: Line, number: int) -> None:
    x, colour = np.array([curves.place(float(value)) for value in line.x]), LINES[number % len(LINES)]
    if line.low is not None and line.high is not None:
        axes.fill_between(x, line.low, line.high, color=colour, alpha=0.16, linewidth=0, zorder=2)
    axes.plot(
        x, line.y, color=colour, linewidth=1.7, linestyle=DASHES[number % len(DASHES)], label=line.label, zorder=3,
        marker=MARKERS[number % len(MARKERS)], markersize=4, markeredgecolor="white", markeredgewidth=0.5,
        clip_on=False,
    )  # fmt: skip


def _frame(axes: Axes, curves: Curves, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    places = [curves.place(x) for x in curves.numbers]
    margin = 0.03 * (places[-1] - places[0]) or 0.5
    axes.set_xlim(places[0] - margin, places[-1] + margin)
    ticks = curves.ticks()
    turned = sum(len(text) for _, text in ticks) > 44
    axes.set_xticks([place for place, _ in ticks])
    axes.set_xticklabels([text for _, text in ticks], rotation=45 if turned else 0, **lettering(LABEL))
    if chart.y_log:
        decades = math.log10(chart.span[1] / chart.span[0])
        axes.yaxis.set_major_locator(LogLocator(subs=(1,) if decades > 2 else (1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.grid(True, axis="y", color=RULE, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=2.5, width=0.6, color=MUTED, labelcolor=INK, labelsize=LABEL)
    for text in axes.get_yticklabels():
        text.set(**lettering(LABEL))
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set(color=MUTED, linewidth=0.8)
    _break(axes, curves.gap)


def _break(axes: Axes, gap: float | None) -> None:
    """Marks on the axis where it is broken."""
    if gap is not None:
        axes.annotate(
            "//", (gap, 0), xycoords=("data", "axes fraction"), zorder=6,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            **lettering(LABEL, color=MUTED, ha="center", va="center"),
        )  # fmt: skip
