"""`Scatter`: trials as points, with the non-dominated trials joined into a front.

N points
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from patchclamp.plots import style
from patchclamp.plots.style import LABEL, LINES, MUTED, RULE, tick

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from plotly.graph_objects import Figure as Interactive

SIZE = (6.4, 4.2)  # inches


class Scatter(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A scatter plot of `points` (x, y), [N, 2], NaN for points to leave out. Each point has a label.

    front: indices of the points on the front, ordered by x · is_line: True to join them
    reference: a point (x, y) to compare with, drawn as a horizontal line at y if x is None
    table: the header and rows of the page's table
    """

    title: str
    provenance: str
    x_label: str
    y_label: str
    points: np.ndarray
    labels: tuple[str, ...]
    front: tuple[int, ...]
    front_label: str
    reference: tuple[float | None, float]
    reference_label: str
    is_line: bool = True
    notes: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()

    def draw(self) -> Figure:
        """Draw the points, the front as a line, and the reference."""
        figure = style.new_figure(self.title, [*self.notes, f"Ran on {self.provenance}."], *SIZE)
        axes = figure.subplots()
        style.bare(axes, "", self.x_label, self.y_label)
        x, y = self.points.T
        axes.scatter(x, y, s=18, color=MUTED, alpha=0.5, linewidths=0, clip_on=False)
        at = list(self.front)
        axes.plot(x[at], y[at], color=LINES[0], marker="o", markersize=5, linewidth=1.5 * self.is_line,
                  label=self.front_label)  # fmt: skip
        level, value = self.reference
        if level is None:
            axes.axhline(value, color=LINES[1], linewidth=1, linestyle=(0, (4, 3)), label=self.reference_label)
        else:
            axes.plot(level, value, color=LINES[1], marker="D", markersize=6, linestyle="", label=self.reference_label)
        axes.grid(True, color=RULE, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter(lambda number, _: tick(number))
        axes.yaxis.set_major_formatter(lambda number, _: tick(number))
        axes.legend(frameon=True, facecolor="white", edgecolor="none", framealpha=0.85, fontsize=LABEL)
        return figure

    def figure(self) -> Interactive:
        """Return the same plot as a plotly figure, with each point's label on hover."""
        graphs = style.need("plotly.graph_objects")
        figure, at, hover = graphs.Figure(), list(self.front), [style.html_text(label) for label in self.labels]

        def add(points: np.ndarray, name: str, texts: list[str], **how: object) -> None:
            x, y = points.T
            where = f"{self.x_label} %{{x:.4g}}, {self.y_label} %{{y:.4g}}"
            template = f"{where}<br>%{{customdata}}<extra></extra>"
            figure.add_trace(graphs.Scatter(x=x, y=y, name=name, customdata=texts, hovertemplate=template, **how))

        add(self.points, "trials", hover, mode="markers", marker={"color": MUTED, "opacity": 0.5})
        add(self.points[at], self.front_label, [hover[i] for i in at],
            mode="lines+markers" if self.is_line else "markers", marker={"size": 9, "color": LINES[0]})  # fmt: skip
        level, value = self.reference
        if level is None:
            figure.add_hline(value, line={"color": LINES[1], "dash": "dash", "width": 1},
                             annotation_text=self.reference_label)  # fmt: skip
        else:
            add(np.array([[level, value]]), self.reference_label, [self.reference_label], mode="markers",
                marker={"color": LINES[1], "symbol": "diamond", "size": 10})  # fmt: skip
        for update, name in ((figure.update_xaxes, self.x_label), (figure.update_yaxes, self.y_label)):
            update(title_text=style.html_text(name), gridcolor=RULE, zeroline=False)
        figure.update_layout(height=480, plot_bgcolor="white", margin={"t": 30},
                             font={"family": style.PAGE_FONT, "color": style.INK})  # fmt: skip
        return figure

    def sections(self) -> Iterator[tuple[str, str]]:
        """Yield the notes, and the points of the front."""
        heads, *rows = self.table
        yield self.front_label, "".join(f"<p>{escape(note)}</p>" for note in self.notes) + style.table(rows, heads)
