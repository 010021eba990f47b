"""Curves as one self-contained page: charts with hover, and every number in a table. It is some tens of kilobytes, for
its own script draws it.

Texts are hostile until shown otherwise, for labels may come from prompts. They enter the page through `html.escape` or
as JSON without `<`, `>` and `&`, and a content policy lets nothing run but the one script whose hash it names, nothing
load at all.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from patchclamp.plots.curves import Chart, Curves, Line, tick
from patchclamp.plots.page import as_json, filled, hashed, part
from patchclamp.plots.palette import INK, LINES, MUTED, RULE
from patchclamp.plots.target import page
from patchclamp.plots.words import number
from patchclamp.version import __version__


def curves_html(curves: Curves, path: str | Path) -> Path:
    """Writes the curves' page.

    Raises: `UnknownName` for a file that is not .html or .htm.
    """
    target = page(path)
    target.write_text(curves_page(curves), encoding="utf-8")
    return target


def curves_page(curves: Curves) -> str:
    """The page as text."""
    script = part("curves_page.js")
    parts = {
        "script_hash": hashed(script),
        "ink": INK, "muted": MUTED, "rule": RULE,
        "title": escape(curves.title),
        "ran_on": escape(curves.provenance),
        "notes": "".join(f"<p>{escape(note)}</p>" for note in curves.notes),
        "charts": "".join(_chart(curves, i, chart) for i, chart in enumerate(curves.charts)),
        "data": as_json(_data(curves)),
        "draw": script,
        "version": escape(__version__),
    }  # fmt: skip
    return filled(part("curves_page.html"), parts)


def _data(curves: Curves) -> dict[str, Any]:
    return {
        "x_label": curves.x_label,
        "places": [curves.place(x) for x in curves.numbers],
        "x_texts": [tick(x) for x in curves.numbers],
        "ticks": curves.ticks(),
        "gap": curves.gap,
        "charts": [_chart_data(curves, chart) for chart in curves.charts],
    }


def _chart_data(curves: Curves, chart: Chart) -> dict[str, Any]:
    return {
        "title": chart.title, "y_label": chart.y_label, "y_log": chart.y_log, "span": chart.span,
        "level": chart.level,
        "lines": [
            {"label": line.label, "colour": LINES[i % len(LINES)], "x": [curves.place(float(x)) for x in line.x],
             "y": _finite(line.y), "low": _finite(line.low), "high": _finite(line.high),
             "texts": [_spread(line, n) for n in range(len(line.x))]}
            for i, line in enumerate(chart.lines)
        ],
    }  # fmt: skip


def _finite(values: np.ndarray | None) -> list[float | None] | None:
    if values is None:
        return None
    return [float(value) if np.isfinite(value) else None for value in values]


def _spread(line: Line, n: int) -> str:
    """`0.52 (0.41 to 0.60)`."""
    if not np.isfinite(line.y[n]):
        return "–"
    text = number(float(line.y[n]))
    if line.low is None or line.high is None:
        return text
    return f"{text} ({number(float(line.low[n]))} to {number(float(line.high[n]))})"


def _chart(curves: Curves, number_: int, chart: Chart) -> str:
    """A chart's place, its legend, its note, and its numbers."""
    keys = "".join(
        f'<span class="key"><i style="background:{LINES[i % len(LINES)]}"></i>{escape(line.label)}</span>'
        for i, line in enumerate(chart.lines)
    )
    if chart.level is not None:
        keys += f'<span class="key level"><i></i>{escape(chart.level_label)}, {escape(number(chart.level))}</span>'
    head = "".join(f'<th class="number">{escape(line.label)}</th>' for line in chart.lines)
    rows = "".join(
        f'<tr><td class="number">{escape(tick(x))}</td>'
        + "".join(f'<td class="number">{escape(_at(line, x))}</td>' for line in chart.lines) + "</tr>"
        for x in curves.numbers
    )  # fmt: skip
    return (
        f'<section><h2>{escape(chart.title)}</h2><div class="keys">{keys}</div>'
        f'<div class="chart" id="chart-{number_}" role="img" aria-label="{escape(chart.title)}"></div>'
        f'<p class="note">{escape(chart.note)}</p><details><summary>numbers</summary><div class="wide"><table>'
        f'<thead><tr><th class="number">{escape(curves.x_label)}</th>{head}</tr></thead><tbody>{rows}</tbody>'
        "</table></div></details></section>"
    )


def _at(line: Line, x: float) -> str:
    places = np.flatnonzero(np.asarray(line.x, np.float64) == x)
    return _spread(line, int(places[0])) if len(places) else ""
