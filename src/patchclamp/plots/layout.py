"""The places of everything in a heatmap's picture, in inches, computed from its labels before anything is drawn.

P columns
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from patchclamp.plots.heatmap import Heatmap, Panel
from patchclamp.plots.passage import Passage, passage
from patchclamp.plots.sheet import Ruler
from patchclamp.plots.words import best, shorten, unbroken, visible

MARGIN, GAP = 0.4, 0.3
NARROWEST, WIDEST = 8.4, 17.0
TITLE, TITLE_LINE = 13, 0.27  # points, inches
LABEL, LONGEST_LABEL = 8.5, 22  # points, characters
LAYERS = 0.62  # left of a panel: its layer numbers and their name
HEADING = 0.3  # above a panel: its name
KEY = 0.72  # the colour bar with what is written above and below it
BAR_WIDTH, BAR_HEIGHT, BESIDE_BAR, BOX = 3.4, 0.14, 4.05, 0.26
SLANT = math.sqrt(0.5)


class Layout(msgspec.Struct, frozen=True, eq=False):
    """`rows` are the panels' numbers, a tuple for each row of panels; `angle` turns the column labels, in degrees.

    `key` is what is written beside the colour bar, about the best cell.
    """

    width: float
    height: float
    title: tuple[str, ...]
    passages: tuple[Passage, ...]
    indent: float
    key: str
    footer: tuple[str, ...]
    panels: tuple[Panel, ...]
    labels: tuple[str, ...]
    cell_width: float
    cell_height: float
    angle: int
    label_height: float
    gutter: float
    rows: tuple[tuple[int, ...], ...]

    @property
    def panel_width(self) -> float:
        return self.cell_width * len(self.labels)

    @property
    def label_every(self) -> int:
        """Columns from one label to the next: 1, unless columns are narrower than a line of text."""
        return math.ceil(0.14 / self.cell_width)

    def panel_height(self, panel: Panel) -> float:
        """A panel's only row is never thinner than a line of text."""
        rows = len(panel.rows)
        return max(self.cell_height * rows, 0.3)

    def row_height(self, row: Sequence[int]) -> float:
        return max(self.panel_height(self.panels[i]) for i in row)


def plan(heatmap: Heatmap, footer: Sequence[str], ruler: Ruler) -> Layout:
    """Lays a heatmap's picture out; `footer` is wrapped to its width."""
    shown, labels = heatmap.panels, [shorten(visible(column.label), LONGEST_LABEL) for column in heatmap.columns]
    cell_width, cell_height = _cell(len(shown), max(len(panel.rows) for panel in shown), len(labels))
    widest = ruler.widest(labels, LABEL)
    angle = _angle(widest, cell_width, len(labels))
    gutter = max(LAYERS, widest * SLANT - cell_width / 2 + 0.1 if angle == 45 else 0.0)
    rows = _rows(shown, LAYERS + cell_width * len(labels))
    key = _key(heatmap)
    width = max(
        2 * MARGIN + gutter + _across(max(map(len, rows)), cell_width * len(labels)),
        2 * MARGIN + BESIDE_BAR + BOX + ruler.width(key, LABEL),
        NARROWEST,
    )
    text_width, indent = width - 2 * MARGIN, 0.72
    unmeasured = Layout(
        width=width, height=0.0, indent=indent, key=key, panels=shown, labels=tuple(labels), rows=rows,
        title=tuple(ruler.wrap(unbroken(heatmap.title), text_width, TITLE, weight="bold")),
        passages=tuple(passage(strip, ruler, text_width - indent) for strip in heatmap.strips),
        footer=tuple(line for text in footer for line in ruler.wrap(text, text_width, LABEL)),
        cell_width=cell_width, cell_height=cell_height, angle=angle, gutter=gutter,
        label_height={0: 0.24, 45: widest * SLANT + 0.2, 90: widest + 0.14}[angle],
    )  # fmt: skip
    return msgspec.structs.replace(unmeasured, height=_height(unmeasured))


def _cell(panels: int, rows: int, columns: int) -> tuple[float, float]:
    """A cell's width and height: large in a small grid, never too small to be seen in a large one."""
    wide, broadest = (6.0, 1.0) if panels == 1 else (4.0, 0.75)
    narrowest = min(0.26, max(16.0 / columns, 0.06))
    return min(max(wide / columns, narrowest), broadest), min(max(5.6 / rows, 0.09), 0.42)


def _angle(widest: float, cell_width: float, columns: int) -> int:
    if widest + 0.08 <= cell_width:
        return 0
    return 45 if columns <= 24 else 90


def _rows(shown: Sequence[Panel], panel_width: float) -> tuple[tuple[int, ...], ...]:
    """As few rows of panels as the widest picture allows, about equally long; single-row panels share rows."""
    fit = max(1, int((WIDEST - 2 * MARGIN + GAP) // (panel_width + GAP)))
    rows: list[tuple[int, ...]] = []
    for layered in (True, False):
        numbers = [i for i, panel in enumerate(shown) if (panel.rows[0] is not None) == layered]
        lines = math.ceil(len(numbers) / fit)
        per_row = math.ceil(len(numbers) / max(lines, 1))
        rows += [tuple(numbers[i * per_row : (i + 1) * per_row]) for i in range(lines)]
    return tuple(rows)


def _across(count: int, panel_width: float) -> float:
    """The width of `count` panels side by side, from the first one's left edge."""
    return count * panel_width + (count - 1) * (LAYERS + GAP)


def _key(heatmap: Heatmap) -> str:
    """What is written beside the outline."""
    spots = heatmap.ranked(1)
    return f"best: {best(heatmap, spots[0], LONGEST_LABEL)}" if spots else ""


def _height(plan: Layout) -> float:
    header = TITLE_LINE * len(plan.title) + sum(p.height for p in plan.passages) + 0.15
    body = sum(HEADING + plan.row_height(row) + plan.label_height + 0.2 for row in plan.rows)
    return MARGIN + header + KEY + body + GAP * (len(plan.rows) - 1) + 0.2 * len(plan.footer) + 0.3
