"""A token grid as one picture: its panels below each other, rows up, columns across, texts in cells that hold them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from patchclamp.plots.palette import BLANK, MUTED
from patchclamp.plots.sheet import Ruler, Sheet, lettering
from patchclamp.plots.target import picture
from patchclamp.plots.token_grid import GridPanel, TokenGrid
from patchclamp.plots.words import number, shorten, unbroken

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARGIN, NARROWEST, WIDEST = 0.4, 6.4, 17.0  # inches
TITLE, LABEL, CELL = 13, 8.5, 7.5  # points
LINE, KEY, BELOW, GAP, BAR = 0.19, 0.62, 0.3, 0.35, 1.8
FEW = 8  # columns that are always as wide as their labels
LONGEST_LABEL, LONGEST_TEXT = 18, 12  # characters
TEXT_HEIGHT = 0.15  # of a cell that holds text


class Place(msgspec.Struct, frozen=True):
    """How large a panel's cells are, in inches, and how far right of its place they begin; `angle` turns its column
    labels, and with its name and colour bar it is `least` wide."""

    left: float
    cell_width: float
    cell_height: float
    labels: tuple[str, ...]
    label_height: float
    angle: int
    least: float

    def width(self, panel: GridPanel) -> float:
        return self.cell_width * len(panel.columns)

    def height(self, panel: GridPanel) -> float:
        return self.cell_height * len(panel.rows)


def token_grid_png(grid: TokenGrid, path: str | Path) -> Path:
    """Draws a token grid into a file; its ending says the format (png, pdf, svg and what else matplotlib writes).

    Raises: `PatchclampError` without matplotlib, `UnknownName` for a format it does not write.
    """
    target, ending = picture(path)
    token_grid_figure(grid).savefig(target, format=ending, dpi="figure", facecolor="white")
    return target


def token_grid_figure(grid: TokenGrid) -> Figure:
    """The picture as a matplotlib figure."""
    ruler = Ruler()
    lines = _lines([(panel, _place(panel, ruler)) for panel in grid.panels])
    width = max(NARROWEST, *(2 * MARGIN + sum(_across(placed) for placed in line) - GAP for line in lines))
    title = ruler.wrap(unbroken(grid.title), width - 2 * MARGIN, TITLE, weight="bold")
    about = ruler.wrap(grid.explained, width - 2 * MARGIN, LABEL)
    footer = ruler.wrap(f"Made on {grid.provenance}.", width - 2 * MARGIN, LABEL)
    heights = [max(KEY + at.height(panel) + at.label_height + BELOW for panel, at in line) for line in lines]
    header = MARGIN + 0.27 * len(title) + LINE * len(about)
    sheet = Sheet(width, header + sum(heights) + LINE * len(footer) + MARGIN)
    y = MARGIN + 0.05
    for texts, step, style in ((title, 0.27, {"size": TITLE, "weight": "bold"}), (about, LINE, {"color": MUTED})):
        for text in texts:
            sheet.text(MARGIN, y, text, **{"size": LABEL, **style})
            y += step
    for line, height in zip(lines, heights, strict=True):
        x = MARGIN
        for panel, at in line:
            _draw(sheet, x, y, panel, at, ruler)
            x += _across((panel, at))
        y += height
    for i, text in enumerate(footer):
        sheet.text(MARGIN, y + LINE * (i + 1), text, LABEL, color=MUTED)
    return sheet.figure


def _across(placed: tuple[GridPanel, Place]) -> float:
    """What a panel takes of a picture's width, with the gap behind it."""
    panel, at = placed
    return max(at.left + at.width(panel), at.least) + GAP


def _lines(placed: list[tuple[GridPanel, Place]]) -> list[list[tuple[GridPanel, Place]]]:
    """The panels in lines: beside each other where they fit and have the same rows."""
    lines: list[list[tuple[GridPanel, Place]]] = []
    for panel, at in placed:
        beside = lines[-1] if lines and lines[-1][0][0].rows == panel.rows else []
        if beside and sum(map(_across, beside)) + _across((panel, at)) <= WIDEST - 2 * MARGIN:
            beside.append((panel, at))
        else:
            lines.append([(panel, at)])
    return lines


def _place(panel: GridPanel, ruler: Ruler) -> Place:
    """A panel's cells are as wide as their texts, unless the picture would be too wide; then they hold none."""
    room = WIDEST - 2 * MARGIN - 1.0
    texts = {shorten(text, _longest_text(panel)) for row in panel.texts or () for text in row}
    wide = (
        max(ruler.widest(sorted(texts), CELL) + 0.1, 0.42) if texts else min(max(4.0 / len(panel.columns), 0.13), 0.6)
    )
    narrow = max(min(room / len(panel.columns), 0.26), 0.05)
    labels = tuple(shorten(column, LONGEST_LABEL) for column in panel.columns)
    widest = ruler.widest(list(labels), LABEL)
    if len(labels) <= FEW:
        wide = max(wide, widest + 0.1)
    fits = wide * len(panel.columns) <= room
    cell_width = wide if fits else max(room / len(panel.columns), 0.4) if room / len(panel.columns) > 0.4 else narrow
    cell_height = max(min(9.0 / len(panel.rows), 0.24), TEXT_HEIGHT + 0.02 if texts and cell_width >= 0.4 else 0.06)
    angle = 0 if widest + 0.06 <= cell_width else 45 if len(labels) <= 30 else 90
    height = {0: 0.22, 45: widest * math.sqrt(0.5) + 0.2, 90: widest + 0.14}[angle]
    lean = widest * math.sqrt(0.5) - cell_width / 2 if angle == 45 else 0.0
    left = max(ruler.widest(list(panel.rows), LABEL) + 0.38, lean)
    least = max(ruler.width(panel.name, LABEL + 1, weight="bold"), left + BAR + 0.5)
    return Place(left, cell_width, cell_height, labels, height, angle, least)


def _draw(sheet: Sheet, x: float, y: float, panel: GridPanel, at: Place, ruler: Ruler) -> None:
    """A panel with its name and colour bar above, from `x` to the right and
    `y` down."""
    sheet.text(x, y + 0.22, panel.name, LABEL + 1, weight="bold")
    _bar(sheet, x + at.left, y + 0.32, BAR, panel)
    axes = sheet.axes(x + at.left, y + KEY, at.width(panel), at.height(panel))
    _cells(axes, panel)
    if panel.texts is not None and at.cell_width >= 0.4 and at.cell_height >= TEXT_HEIGHT:
        _write(axes, panel, at, ruler)
    _axes_labels(axes, panel, at)


def _bar(sheet: Sheet, x: float, y: float, width: float, panel: GridPanel) -> None:
    shades = panel.shades
    axes = sheet.axes(x, y, width, 0.1)
    axes.imshow(np.linspace(0, 1, 256)[None], aspect="auto", cmap=_colour_map(panel), vmin=0, vmax=1)
    axes.set_axis_off()
    sheet.text(x - 0.06, y + 0.09, number(shades.low), LABEL - 1, ha="right")
    sheet.text(x + width + 0.06, y + 0.09, number(shades.high), LABEL - 1)


def _colour_map(panel: GridPanel) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("patchclamp", list(panel.shades.colours))
    return colours.with_extremes(bad=BLANK)


def _cells(axes: Axes, panel: GridPanel) -> None:
    from matplotlib.patches import Rectangle

    shades = panel.shades
    axes.imshow(
        np.ma.masked_invalid(panel.values), origin="lower", aspect="auto", interpolation="nearest",
        cmap=_colour_map(panel), vmin=shades.low, vmax=shades.high,
    )  # fmt: skip
    if len(panel.columns) <= 80:
        axes.set_xticks(np.arange(len(panel.columns) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(panel.rows) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
    for row, column in panel.outlined:
        for colour, line in (("white", 2.8), ("black", 1.4)):
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=colour, linewidth=line))


def _write(axes: Axes, panel: GridPanel, at: Place, ruler: Ruler) -> None:
    shades = panel.shades
    for r, row in enumerate(panel.texts or ()):
        for c, text in enumerate(row):
            value = panel.values[r, c]
            if text and np.isfinite(value):
                fitted = _fitted(shorten(text, _longest_text(panel)), at.cell_width - 0.06, ruler)
                style = lettering(CELL, color=shades.ink(value), ha="center", va="center")
                axes.text(c, r, fitted, **style)


def _longest_text(panel: GridPanel) -> int:
    """In characters: a column or two have room for sentences."""
    return LONGEST_TEXT if len(panel.columns) > 2 else 4 * LONGEST_TEXT


def _fitted(text: str, width: float, ruler: Ruler) -> str:
    """As much of a text as is no wider."""
    while len(text) > 1 and ruler.width(text, CELL) > width:
        text = shorten(text, len(text) - 1)
    return text


def _axes_labels(axes: Axes, panel: GridPanel, at: Place) -> None:
    every_column = math.ceil(0.14 / at.cell_width)
    every_row = math.ceil(0.13 / at.cell_height)
    axes.set_xticks(range(0, len(at.labels), every_column))
    axes.set_xticklabels(at.labels[::every_column], rotation=at.angle, **_ticks(at))
    axes.set_yticks(range(0, len(panel.rows), every_row))
    axes.set_yticklabels(panel.rows[::every_row], **lettering(LABEL))
    axes.set_ylabel(panel.row_name, **lettering(LABEL, color=MUTED))
    axes.set_xlabel(panel.column_name, **lettering(LABEL, color=MUTED))
    axes.tick_params(which="both", length=0, pad=3)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _ticks(at: Place) -> dict[str, Any]:
    turned = {"ha": "right", "rotation_mode": "anchor"} if at.angle == 45 else {}
    return lettering(LABEL) | turned
