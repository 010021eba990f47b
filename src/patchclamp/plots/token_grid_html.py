"""A token grid as one self-contained page: its panels as tables, with a note on the cell that is pointed at.

Prompts are hostile until shown otherwise: their text is escaped, or written by the page's script as text alone.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from patchclamp.plots import words
from patchclamp.plots.page import filled, hashed, packed, part
from patchclamp.plots.palette import BLANK
from patchclamp.plots.target import page
from patchclamp.plots.token_grid import GridPanel, Texts, TokenGrid
from patchclamp.version import __version__


def token_grid_html(grid: TokenGrid, path: str | Path) -> Path:
    """Writes a token grid's page. Raises `UnknownName` for a file that is not .html or .htm."""
    target = page(path)
    target.write_text(token_grid_page(grid), encoding="utf-8")
    return target


def token_grid_page(grid: TokenGrid) -> str:
    """The page as text."""
    draw = part("token_grid_page.js")
    return filled(part("token_grid_page.html"), {
        "script_hashes": hashed(draw), "draw": draw, "data": packed(_data(grid)), "blank": BLANK,
        "title": escape(words.unbroken(grid.title)), "explained": escape(grid.explained),
        "ran_on": escape(grid.provenance), "version": __version__, "prompt": _prompt(grid.prompt),
        "table": _table(grid.table),
    })  # fmt: skip


class _Strings:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}

    def of(self, texts: Texts | None) -> list[list[int]] | None:
        return None if texts is None else [[self.number.setdefault(t, len(self.number)) for t in row] for row in texts]


def _data(grid: TokenGrid) -> dict[str, Any]:
    strings = _Strings()
    panels = [_panel(panel, strings) for panel in grid.panels]
    return {"panels": panels, "strings": list(strings.number)}


def _panel(panel: GridPanel, strings: _Strings) -> dict[str, Any]:
    shades = panel.shades
    return {
        "name": panel.name, "row_name": panel.row_name, "column_name": panel.column_name, "rows": panel.rows,
        "columns": panel.columns, "texts": strings.of(panel.texts), "notes": strings.of(panel.notes),
        "values": [[float(f"{value:.4g}") if np.isfinite(value) else None for value in row] for row in panel.values],
        "low": shades.low, "high": shades.high, "colours": shades.colours, "outlined": panel.outlined,
        "ends": [words.number(shades.low), words.number(shades.high)],
    }  # fmt: skip


def _prompt(tokens: tuple[str, ...]) -> str:
    chips = "".join(
        f'<span class="token" id="token-{position}">{escape(words.visible(token))}<sub>{position}</sub></span>'
        for position, token in enumerate(tokens)
    )
    return f'<section><h2>The prompt</h2><div class="tokens">{chips}</div></section>' if tokens else ""


def _table(table: Texts) -> str:
    if not table:
        return ""
    heads = "".join(f"<th>{escape(text)}</th>" for text in table[0])
    rows = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in table[1:])
    inner = f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>"
    return f'<section class="wide"><table class="list">{inner}</table></section>'
