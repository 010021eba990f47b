"""A heatmap as one self-contained page: its panels with hover, both prompts, the metric and its baselines.

Prompts are hostile until shown otherwise. Text enters the page only through `html.escape`, data only as JSON without
`<`, `>` and `&`, and a content policy lets nothing run but the script whose hash it names, nothing load at all. The
script
draws on canvases by itself: a page is the size of its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from patchclamp.plots import words
from patchclamp.plots.heatmap import Column, Heatmap, Panel, Spot, Strip
from patchclamp.plots.page import as_json, filled, hashed, part
from patchclamp.plots.palette import BLANK, CLEAN, CORRUPT, DIVERGING, FAINT, PALE
from patchclamp.plots.target import page
from patchclamp.version import __version__

BEST = 10
COLUMN_WIDTH = 26  # pixels a column asks for before panels are put below each other


def heatmap_html(heatmap: Heatmap, path: str | Path) -> Path:
    """Writes a heatmap's page.

    Raises: `UnknownName` for a file that is not .html or .htm.
    """
    target = page(path)
    target.write_text(heatmap_page(heatmap), encoding="utf-8")
    return target


def heatmap_page(heatmap: Heatmap) -> str:
    """The page as text."""
    draw = part("heatmap_page.js")
    parts = {
        "draw": draw,
        "script_hash": hashed(draw),
        "data": as_json(_data(heatmap)),
        **{name: escape(text) for name, text in _texts(heatmap).items()},
        **_look(heatmap),
        "prompts": "".join(map(_prompt, heatmap.strips)),
        "note": f'<p class="legend">{escape(heatmap.note)}</p>' if heatmap.note else "",
        "legend": _legend(heatmap),
        "stats": _stats(heatmap),
        "grid_note": _grid_note(heatmap),
        "best_rows": _best_rows(heatmap),
        "alignment": _alignment(heatmap),
    }
    return filled(part("heatmap_page.html"), parts)


# -- data


def _data(heatmap: Heatmap) -> dict[str, Any]:
    reach, best, goal = heatmap.scale, heatmap.ranked(1), heatmap.goal
    colours = DIVERGING if reach.blue_above else DIVERGING[::-1]
    return {
        "metric": heatmap.metric,
        "baseline": heatmap.baseline.value,
        "goal": None if goal is None else {"name": goal.name, "value": goal.value},
        "scale": {
            "low": reach.low,
            "high": reach.high,
            "colours": colours,
            "blank": BLANK,
            "faint": FAINT,
            "pale": PALE,
        },
        "axis": heatmap.axis,
        "columns": [_column(column) for column in heatmap.columns],
        "panels": [_panel(heatmap, panel) for panel in heatmap.panels],
        "best": {"panel": best[0].panel, "row": best[0].row, "column": best[0].column} if best else None,
    }


def _column(column: Column) -> dict[str, Any]:
    return {
        "label": words.visible(column.label),
        "clean": column.clean,
        "corrupt": column.corrupt,
        "positions": _positions(column),
    }


def _positions(column: Column) -> str:
    clean, corrupt = map(words.positions, (column.clean, column.corrupt))
    if not clean and not corrupt:
        return ""
    return (
        f"clean position {clean} → corrupt position {corrupt}" if clean and corrupt else f"position {clean or corrupt}"
    )


def _panel(heatmap: Heatmap, panel: Panel) -> dict[str, Any]:
    return {
        "site": panel.name,
        "rows": panel.rows,
        "names": [panel.row_name(row) for row in range(len(panel.rows))],
        "part_of": None if panel.part_of is None else [panel.part_of[0], words.visible(panel.part_of[1])],
        "values": _numbers(panel.values),
        "faint": [np.flatnonzero(row).tolist() for row in heatmap.faint(panel.values)],
        "coarse": None if panel.coarse is None else _numbers(panel.coarse),
        "details": [[name, _numbers(of, 4)] for name, of in panel.details],
    }


def _numbers(values: np.ndarray, digits: int = 7) -> list[list[float | None]]:
    """Rows of numbers, as exact as fp32 is unless fewer digits are enough; null where there is none."""
    return [[None if np.isnan(value) else float(f"{value:.{digits}g}") for value in row] for row in values]


# -- text


def _texts(heatmap: Heatmap) -> dict[str, str]:
    """What goes into the page as plain text; escaped by the caller."""
    reach, goal = heatmap.scale, heatmap.goal
    return {
        "title": words.unbroken(heatmap.title),
        "ran_on": heatmap.provenance,
        "metric": heatmap.metric,
        "explained": heatmap.explained,
        "formula": heatmap.formula,
        "cell": heatmap.cell,
        "prompts_name": "The two prompts" if len(heatmap.strips) == 2 else "The prompt",
        "baseline": f"{heatmap.baseline.name} {words.number(heatmap.baseline.value)}",
        "weak_end": "the other way" if goal is None else f"further from {goal.name}",
        "strong_end": _strong_end(heatmap, reach.to_goal),
        "share_of": "" if goal is None else f"share of the way to {goal.name}",
        "best_count": str(len(heatmap.ranked(BEST))),
        "version": __version__,
    }


def _strong_end(heatmap: Heatmap, to_goal: bool) -> str:
    if to_goal and heatmap.goal is not None:
        return f"{heatmap.goal.name} {words.number(heatmap.goal.value)}"
    return f"largest effect {words.number(heatmap.scale.half)}"


def _look(heatmap: Heatmap) -> dict[str, str]:
    """Colours and sizes. The bar has the strong end at its right."""
    reach = heatmap.scale
    return {
        "clean_colour": CLEAN,
        "corrupt_colour": CORRUPT,
        "baseline_side": heatmap.baseline.side,
        "strong_side": heatmap.goal.side if heatmap.goal is not None and heatmap.scale.to_goal else "strong",
        "blank_colour": BLANK,
        "gradient": ", ".join(DIVERGING if reach.blue_above == (reach.towards > 0) else DIVERGING[::-1]),
        "panel_width": str(min(max(COLUMN_WIDTH * len(heatmap.columns) + 60, 330), 1200)),
    }


def _prompt(strip: Strip) -> str:
    side = strip.side
    chips = "".join(
        f'<span class="token {mark}" id="{side}-{position}">{escape(words.visible(token))}<sub>{position}</sub></span>'
        for position, (token, mark) in enumerate(zip(strip.tokens, strip.marks, strict=True))
    )
    return f'<div class="prompt {side}"><b>{escape(strip.title)}</b><div class="tokens">{chips}</div></div>'


def _legend(heatmap: Heatmap) -> str:
    parts = []
    if any("differs" in strip.marks for strip in heatmap.strips):
        chips = "".join(f'<span class="{strip.side}"><span class="token differs">token</span></span>'
                        for strip in heatmap.strips)  # fmt: skip
        parts.append(f"{chips} differ between the prompts" if len(heatmap.strips) == 2 else f"{chips} is the subject")
    if heatmap.skipped:
        parts.append('<span class="token skipped">token</span> has no partner in the other prompt and is not patched')
    return "".join(f"{part}. " for part in parts) + "· is a space, ↵ a line break; the small number is the position."


def _stats(heatmap: Heatmap) -> str:
    base, goal = heatmap.baseline, heatmap.goal
    floor = heatmap.noise_floor
    noise = f"reruns of the {base.name} prompt agree exactly" if floor == 0 else "smaller effects mean nothing"
    stats = [_stat(f"{base.name} run", words.number(base.value), "unpatched: the baseline of every cell", base.side)]
    if goal is not None:
        stats.append(_stat(f"{goal.name} run", words.number(goal.value), "unpatched", goal.side))
        way = words.number(heatmap.effect(goal.value))
        stats.append(_stat(f"{goal.name} − {base.name}", way, "what a cell can bring about"))
    stats.append(_stat("noise floor", words.number(floor) if floor else "0", noise))
    return "".join(stats)


def _stat(name: str, value: str, note: str, kind: str = "") -> str:
    return f'<div class="{kind}"><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>'


def _grid_note(heatmap: Heatmap) -> str:
    note = "Point at a cell for its numbers; its tokens light up above. The best cell is outlined."
    if any(np.isnan(panel.values).any() and panel.coarse is None for panel in heatmap.panels):
        note += ' <span class="blank">×</span> was not run.'
    if any(panel.coarse is not None for panel in heatmap.panels):
        note += " Paler cells were patched together with their block."
    if any(heatmap.faint(panel.values).any() for panel in heatmap.panels):
        note += " A dot marks an effect that is not above the noise floor."
    return note


def _best_rows(heatmap: Heatmap) -> str:
    return "".join(_best_row(heatmap, spot, rank) for rank, spot in enumerate(heatmap.ranked(BEST), 1))


def _best_row(heatmap: Heatmap, spot: Spot, rank: int) -> str:
    column, part = heatmap.columns[spot.column], heatmap.share(spot.value)
    place, label = heatmap.panels[spot.panel].cell_name(spot.row, column)
    bar = f'<i style="width:{60 * min(max(part or 0, 0), 1):.0f}%"></i>' if part is not None else ""
    return _row(
        ("", str(rank)),
        ("place", place),
        ("place", words.visible(label)),
        ("", words.both(column)),
        ("number", words.number(spot.value)),
        ("number", words.signed(heatmap.effect(spot.value))),
        last=f'<td class="share"><span>{words.percent(part)}</span>{bar}</td>',
    )


def _row(*cells: tuple[str, str], last: str) -> str:
    return "<tr>" + "".join(f'<td class="{kind}">{escape(text)}</td>' for kind, text in cells) + last + "</tr>"


def _alignment(heatmap: Heatmap) -> str:
    if len(heatmap.strips) < 2:
        return ""
    clean, corrupt = heatmap.strips
    count = len(clean.tokens) - len(clean.skipped)
    paired = (
        f"<p>{count} of {len(clean.tokens)} clean and {count} of {len(corrupt.tokens)} corrupt positions "
        "are paired, one with one; what is patched is always a pair.</p>"
    )
    if not heatmap.skipped:
        return _section("Alignment", paired + "<p>No position was skipped.</p>")
    items = "".join(f"<li>{strip.side}: {_skipped(strip.skipped)}</li>" for strip in heatmap.strips if strip.skipped)
    return _section(
        "Alignment",
        paired + "<p>The prompts differ in length where these stand, so they have no partner and were not patched. "
        f"An effect that lives there is not in the grid.</p><ul>{items}</ul>",
    )


def _section(name: str, body: str) -> str:
    return f"<section>\n<h2>{name}</h2>\n{body}\n</section>"


def _skipped(tokens: Iterable[tuple[int, str]]) -> str:
    return ", ".join(f"<code>{escape(words.visible(token))}</code> ({position})" for position, token in tokens)
