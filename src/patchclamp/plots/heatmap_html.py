"""A heatmap as one self-contained page: its panels with hover, both prompts, the metric and its baselines.

Prompts are hostile until shown otherwise. Text enters the page only through `html.escape`, data only as JSON without
`<`, `>` and `&`, and a content policy lets nothing run but the two scripts whose hashes it names, nothing load at all.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from patchclamp import __version__
from patchclamp.plots import words
from patchclamp.plots.heatmap import Column, Heatmap, Panel, Spot, Strip
from patchclamp.plots.palette import BLANK, CLEAN, CORRUPT, DIVERGING
from patchclamp.plots.target import need, page

BEST = 10
COLUMN_WIDTH = 26  # pixels a column asks for before panels are put below each other


def heatmap_html(heatmap: Heatmap, path: str | Path) -> Path:
    """Writes a heatmap's page.

    Raises: `PatchclampError` without plotly, `UnknownName` for a file that is not .html or .htm.
    """
    target = page(path)
    target.write_text(heatmap_page(heatmap), encoding="utf-8")
    return target


def heatmap_page(heatmap: Heatmap) -> str:
    """The page as text."""
    scripts = {"plotly": need("plotly.offline").get_plotlyjs(), "draw": _part("heatmap_page.js")}
    parts = {
        **scripts,
        "script_hashes": " ".join(map(_hashed, scripts.values())),
        "data": _json(_data(heatmap)),
        **{name: escape(text) for name, text in _texts(heatmap).items()},
        **_look(heatmap),
        "prompts": "".join(map(_prompt, heatmap.strips)),
        "legend": _legend(heatmap),
        "stats": _stats(heatmap),
        "grid_note": _grid_note(heatmap),
        "best_rows": _best_rows(heatmap),
        "alignment": _alignment(heatmap),
    }
    return re.sub(r"@@(\w+)@@", lambda name: parts[name[1]], _part("heatmap_page.html"))


def _part(name: str) -> str:
    return importlib.resources.files("patchclamp.plots").joinpath(name).read_text(encoding="utf-8")


def _hashed(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _json(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# -- data


def _data(heatmap: Heatmap) -> dict[str, Any]:
    reach, best = heatmap.scale, heatmap.ranked(1)
    colours = DIVERGING if reach.towards > 0 else DIVERGING[::-1]
    stops = [[i / (len(colours) - 1), colour] for i, colour in enumerate(colours)]
    return {
        "metric": heatmap.metric,
        "clean": heatmap.clean,
        "corrupt": heatmap.corrupt,
        "scale": {"low": reach.low, "high": reach.high, "colours": stops, "blank": BLANK},
        "columns": [_column(column) for column in heatmap.columns],
        "panels": [_panel(panel) for panel in heatmap.panels],
        "best": {"panel": best[0].panel, "row": best[0].row, "column": best[0].column} if best else None,
    }


def _column(column: Column) -> dict[str, Any]:
    return {
        "label": words.visible(column.label),
        "clean": column.clean,
        "corrupt": column.corrupt,
        "clean_text": words.positions(column.clean),
        "corrupt_text": words.positions(column.corrupt),
    }


def _panel(panel: Panel) -> dict[str, Any]:
    values = [[None if np.isnan(value) else float(value) for value in row] for row in panel.values]
    return {
        "site": panel.name,
        "rows": panel.rows,
        "names": [panel.row_name(row) for row in range(len(panel.rows))],
        "values": values,
    }


# -- text


def _texts(heatmap: Heatmap) -> dict[str, str]:
    """What goes into the page as plain text; escaped by the caller."""
    to_clean = heatmap.scale.half == abs(heatmap.clean - heatmap.corrupt)
    return {
        "title": words.unbroken(heatmap.title),
        "ran_on": heatmap.provenance,
        "metric": heatmap.metric,
        "explained": heatmap.explained,
        "formula": heatmap.formula,
        "corrupt": words.number(heatmap.corrupt),
        "strong_end": f"clean {words.number(heatmap.clean)}" if to_clean else "largest effect",
        "best_count": str(len(heatmap.ranked(BEST))),
        "version": __version__,
    }


def _look(heatmap: Heatmap) -> dict[str, str]:
    """Colours and sizes."""
    return {
        "clean_colour": CLEAN,
        "corrupt_colour": CORRUPT,
        "blank_colour": BLANK,
        "gradient": ", ".join(DIVERGING),
        "panel_width": str(min(max(COLUMN_WIDTH * len(heatmap.columns) + 60, 330), 1200)),
    }


def _prompt(strip: Strip) -> str:
    side = strip.side
    chips = "".join(
        f'<span class="token {mark}" id="{side}-{position}">{escape(words.visible(token))}<sub>{position}</sub></span>'
        for position, (token, mark) in enumerate(zip(strip.tokens, strip.marks, strict=True))
    )
    return f'<div class="prompt {side}"><b>{side}</b><div class="tokens">{chips}</div></div>'


def _legend(heatmap: Heatmap) -> str:
    parts = [
        '<span class="clean"><span class="token differs">token</span></span>'
        '<span class="corrupt"><span class="token differs">token</span></span> differ between the prompts'
    ]
    if heatmap.skipped:
        parts.append('<span class="token skipped">token</span> has no partner in the other prompt and is not patched')
    return "; ".join(parts) + ". · is a space, ↵ a line break; the small number is the position."


def _stats(heatmap: Heatmap) -> str:
    way = heatmap.clean - heatmap.corrupt
    noise = "reruns of the corrupt prompt agree exactly" if heatmap.noise_floor == 0 else "smaller effects mean nothing"
    return "".join(
        (
            _stat("clean run", words.number(heatmap.clean), "unpatched", "clean"),
            _stat("corrupt run", words.number(heatmap.corrupt), "unpatched: the baseline of every cell", "corrupt"),
            _stat("clean − corrupt", words.number(way), "what a patch can bring back"),
            _stat("noise floor", words.number(heatmap.noise_floor) if heatmap.noise_floor else "0", noise),
        )
    )


def _stat(name: str, value: str, note: str, kind: str = "") -> str:
    return f'<div class="{kind}"><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>'


def _grid_note(heatmap: Heatmap) -> str:
    note = "Point at a cell for its numbers; its tokens light up above. The best cell is outlined."
    if any(np.isnan(panel.values).any() for panel in heatmap.panels):
        note += ' <span class="blank">×</span> was not run.'
    return note


def _best_rows(heatmap: Heatmap) -> str:
    return "".join(_best_row(heatmap, spot, rank) for rank, spot in enumerate(heatmap.ranked(BEST), 1))


def _best_row(heatmap: Heatmap, spot: Spot, rank: int) -> str:
    column, part = heatmap.columns[spot.column], heatmap.share(spot.value)
    bar = f'<i style="width:{60 * min(max(part or 0, 0), 1):.0f}%"></i>'
    return _row(
        ("", str(rank)),
        ("place", heatmap.panels[spot.panel].row_name(spot.row)),
        ("place", words.visible(column.label)),
        ("", f"{words.positions(column.clean)} → {words.positions(column.corrupt)}"),
        ("number", words.number(spot.value)),
        ("number", words.signed(heatmap.effect(spot.value))),
        last=f'<td class="share"><span>{words.percent(part)}</span>{bar}</td>',
    )


def _row(*cells: tuple[str, str], last: str) -> str:
    return "<tr>" + "".join(f'<td class="{kind}">{escape(text)}</td>' for kind, text in cells) + last + "</tr>"


def _alignment(heatmap: Heatmap) -> str:
    clean, corrupt = heatmap.strips
    count = len(clean.tokens) - len(clean.skipped)
    paired = (
        f"<p>{count} of {len(clean.tokens)} clean and {count} of {len(corrupt.tokens)} corrupt positions "
        "are paired, one with one; what is patched is always a pair.</p>"
    )
    if not heatmap.skipped:
        return paired + "<p>No position was skipped.</p>"
    items = "".join(f"<li>{strip.side}: {_skipped(strip.skipped)}</li>" for strip in heatmap.strips if strip.skipped)
    return (
        paired + "<p>The prompts differ in length where these stand, so they have no partner and were not patched. "
        f"An effect that lives there is not in the grid.</p><ul>{items}</ul>"
    )


def _skipped(tokens: Iterable[tuple[int, str]]) -> str:
    return ", ".join(f"<code>{escape(words.visible(token))}</code> ({position})" for position, token in tokens)
