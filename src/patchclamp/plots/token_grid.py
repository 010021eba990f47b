"""`TokenGrid`: panels of cells, each with a colour and a text: layers' predictions or heads' contributions.

R rows, the first at the bottom · C columns
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from patchclamp.plots import style
from patchclamp.plots.style import DIVERGING, INK, LABEL, SEQUENTIAL, number, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from plotly.graph_objects import Figure as Interactive

Texts = tuple[tuple[str, ...], ...]
LONGEST_ROW, LONGEST_LABEL, LONGEST_TEXT = 24, 18, 12  # characters
WIDEST, CELL_TEXT = 15.0, 0.075  # inches, of a figure and of a character in a cell


class Shades(msgspec.Struct, frozen=True):
    """A scale of colours, evenly spaced from `low` to `high`."""

    low: float
    high: float
    colours: tuple[str, ...]

    def ink(self, value: float) -> str:
        """Return the text colour for a cell with this value: white on dark cells."""
        share = min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)
        colour = self.colours[round(share * (len(self.colours) - 1))]
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else INK


class GridPanel(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A panel: `values` [R, C] set colours (NaN: none), `texts` [R][C] fill cells, `notes` [R][C] show on hover.

    name: name of the values · row_name, column_name: names of the axes
    centre: the value shown in white, between two hues; None for a scale of one hue, dark at its `strong` end
    reaches: the limits of the colour scale; None: the smallest and largest value
    outlined: (row, column) of each framed cell
    """

    name: str
    row_name: str
    column_name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: np.ndarray
    texts: Texts | None = None
    notes: Texts | None = None
    centre: float | None = None
    strong: Literal["high", "low"] = "high"
    reaches: tuple[float | None, float | None] = (None, None)
    outlined: tuple[tuple[int, int], ...] = ()

    @property
    def shades(self) -> Shades:
        """The colour scale, symmetric around its centre if it has one."""
        seen = self.values[np.isfinite(self.values)]
        least, most = (float(seen.min()), float(seen.max())) if seen.size else (0.0, 1.0)
        if self.centre is not None:
            half = max(most - self.centre, self.centre - least) or 1.0
            return Shades(self.centre - half, self.centre + half, DIVERGING)
        low, high = (own if own is not None else end for own, end in zip(self.reaches, (least, most), strict=True))
        colours = SEQUENTIAL if self.strong == "high" else SEQUENTIAL[::-1]
        return Shades(low, high if high > low else low + 1.0, colours)

    @property
    def longest_text(self) -> int:
        """The maximum number of characters in a cell. Panels of one or two columns have room for sentences."""
        return LONGEST_TEXT if len(self.columns) > 2 else 4 * LONGEST_TEXT

    @property
    def cell(self) -> tuple[float, float]:
        """The width and height of a cell in inches, with room for its text unless the picture would be too wide."""
        longest = max((len(shorten(t, self.longest_text)) for row in self.texts or () for t in row), default=0)
        wide = max(CELL_TEXT * longest + 0.1, 0.42) if longest else min(max(3.6 / len(self.columns), 0.13), 0.45)
        if longest and len(self.columns) <= 8:
            wide = max(wide, CELL_TEXT * max(len(shorten(c, LONGEST_LABEL)) for c in self.columns) + 0.1)
        room = (WIDEST - 1.5) / len(self.columns)
        width = min(wide, room) if room >= 0.4 else max(min(room, 0.26), 0.05)
        text = longest and width >= 0.4
        return width, max(min(9.0 / len(self.rows), 0.24), 0.17 if text else 0.06)


class TokenGrid(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A grid of panels. `explained`: the meaning of a cell; `prompt`: tokens; `table`: rows of text, header first."""

    title: str
    explained: str
    provenance: str
    panels: tuple[GridPanel, ...]
    prompt: tuple[str, ...] = ()
    table: Texts = ()

    @property
    def lines(self) -> list[list[GridPanel]]:
        """The panels stacked, or side by side if they have the same rows and fit."""
        lines: list[list[GridPanel]] = []
        for panel in self.panels:
            width = _width(panel)
            if lines and lines[-1][0].rows == panel.rows and sum(map(_width, lines[-1])) + width <= WIDEST:
                lines[-1].append(panel)
            else:
                lines.append([panel])
        return lines

    def draw(self) -> Figure:
        """Draw the panels, with text in every cell that has room."""
        lines = self.lines
        heights = [max(len(panel.rows) * panel.cell[1] for panel in line) + 1.1 for line in lines]
        width = max(6.4, *(sum(map(_width, line)) for line in lines))
        notes = [self.explained, f"Ran on {self.provenance}."]
        figure = style.new_figure(self.title, notes, width, sum(heights))
        parts = figure.subfigures(len(lines), 1, squeeze=False, height_ratios=heights)
        for part, line in zip(parts.flat, lines, strict=True):
            widths = [_width(panel) for panel in line]
            if len(line) < max(map(len, lines)) and width - sum(widths) > 1:  # keeps panels as wide as in other lines
                widths.append(width - sum(widths))
            grid = part.subplots(1, len(widths), squeeze=False, width_ratios=widths)
            for axes, panel in zip(grid.flat, line, strict=False):
                _draw(axes, panel)
            for axes in grid.flat[len(line) :]:
                axes.set_axis_off()
        return figure

    def figure(self) -> Interactive:
        """Return the panels as a plotly figure, with each cell's notes on hover."""
        subplots = style.need("plotly.subplots")
        lines = self.lines
        across = max(map(len, lines))
        rows = [max(len(line[0].rows), 2) for line in lines]
        turned = [max(map(len, line[0].columns)) if len(line[0].columns) > 40 / len(line) else 0 for line in lines]
        gap = 110 + 6 * min(max(turned), LONGEST_LABEL)  # plotly turns labels that are wider than their columns
        height = 120 + sum(24 * count + gap for count in rows)
        figure = subplots.make_subplots(
            len(rows), across, subplot_titles=[style.html_text(panel.name) for panel in self.panels], row_heights=rows,
            vertical_spacing=(gap - 15) / height, horizontal_spacing=0.3 / across if across > 1 else None,
            specs=[[{}] * (len(line) - 1) + [{"colspan": across - len(line) + 1}] + [None] * (across - len(line))
                   for line in lines],
        )  # fmt: skip
        places = [(row, column) for row, line in enumerate(lines, 1) for column in range(1, len(line) + 1)]
        for i, (panel, (row, column)) in enumerate(zip(self.panels, places, strict=True), 1):
            at = {"row": row, "col": column}
            shades, axis = panel.shades, f"coloraxis{'' if i == 1 else i}"
            texts = [[style.html_text(shorten(t, panel.longest_text)) for t in row] for row in panel.texts or ()]
            hover = [[_note(panel, r, c) for c in range(len(panel.columns))] for r in range(len(panel.rows))]
            labels = [[style.html_text(shorten(name, LONGEST_LABEL)) for name in panel.columns],
                      [style.html_text(shorten(name, LONGEST_ROW)) for name in panel.rows]]  # fmt: skip
            if column > 1 and max(map(len, panel.rows)) > 5:  # the panels of a line have the same rows
                labels[1] = [""] * len(panel.rows)
            style.add_cells(
                figure, panel.values, hover, labels, (panel.column_name, panel.row_name), at, coloraxis=axis,
                text=texts or None, texttemplate="%{text}" if texts and len(panel.columns) <= 40 else None,
            )  # fmt: skip
            for cell in panel.outlined:
                figure.add_shape(**style.frame(*cell, i))
            part = figure.get_subplot(row, column)
            low, high = part.yaxis.domain
            figure.update_layout({axis: {
                "colorscale": shades.colours, "cmin": shades.low, "cmax": shades.high,
                "colorbar": {"y": (low + high) / 2, "len": max(high - low, 110 / height), "x": part.xaxis.domain[1],
                             "thickness": 12},
            }})  # fmt: skip
        return style.lay_out(figure, height)

    def sections(self) -> Iterator[tuple[str, str]]:
        """Yield the meaning of a cell, the prompt, and the table."""
        yield "Cells", f"<p>{escape(self.explained)}</p>"
        if self.prompt:
            yield "Prompt", style.chips(self.prompt, ["same"] * len(self.prompt))
        if self.table:
            yield "Table", style.table(self.table[1:], self.table[0])


def _width(panel: GridPanel) -> float:
    labels = CELL_TEXT * max(len(shorten(name, LONGEST_ROW)) for name in panel.rows)
    return max(panel.cell[0] * len(panel.columns), 0.095 * len(panel.name)) + max(1.3, labels + 0.95)


def _note(panel: GridPanel, row: int, column: int) -> str:
    value = panel.values[row, column]
    place = f"{panel.row_name} {panel.rows[row]}, {panel.column_name} {panel.columns[column]}".strip(", ")
    note = panel.notes[row][column] if panel.notes is not None else panel.texts[row][column] if panel.texts else ""
    return style.html_text(f"{place}: {number(value) if np.isfinite(value) else '–'}\n{note}")


def _draw(axes: Axes, panel: GridPanel) -> None:
    shades, (width, height) = panel.shades, panel.cell
    style.bare(axes, panel.name, panel.column_name, panel.row_name)
    image = axes.imshow(
        np.ma.masked_invalid(panel.values), origin="lower", aspect="auto", interpolation="nearest",
        cmap=style.colour_map(shades.colours, style.BLANK), vmin=shades.low, vmax=shades.high,
    )  # fmt: skip
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=30, fraction=0.04, ticks=[shades.low, shades.high])
    bar.ax.set_yticklabels([number(shades.low), number(shades.high)], fontsize=LABEL - 1)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    if len(panel.columns) <= 80:
        axes.set_xticks(np.arange(len(panel.columns) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(panel.rows) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
    for row, column in panel.outlined:
        style.outline(axes, row, column)
    if panel.texts is not None and width >= 0.4:
        limit = min(panel.longest_text, int((width - 0.06) / CELL_TEXT))
        for row, texts in enumerate(panel.texts):
            for column, text in enumerate(texts):
                if text and np.isfinite(value := panel.values[row, column]):
                    axes.text(column, row, shorten(text, limit), fontsize=LABEL - 1, color=shades.ink(value),
                              ha="center", va="center")  # fmt: skip
    style.label_columns(axes, [shorten(column, LONGEST_LABEL) for column in panel.columns], width)
    style.label_rows(axes, [shorten(row, LONGEST_ROW) for row in panel.rows], height)
    axes.tick_params(which="both", length=0)
