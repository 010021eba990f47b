"""`Curves`: line charts on a shared x axis, with an optional band per line.

A logarithmic axis may include 0, drawn at the left after a gap. A line has N points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.plots import style
from patchclamp.plots.style import LABEL, LINES, MUTED, RULE, number, tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from plotly.graph_objects import Figure as Interactive

ZERO_GAP = 1.5  # gap between 0 and the smallest positive number of a logarithmic axis, in mean steps between numbers
DASHES = ("solid", "dashed", "dashdot", "dotted")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LONG = 5  # numbers of this many characters are not labels
CHART = (4.6, 2.7)  # inches


class Curve(msgspec.Struct, frozen=True, eq=False):
    """A line: `y` [N], NaN for missing values, at ascending `x` [N]. `low` and `high` [N]: an optional band."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ProgramError("expected both low and high, got one", self.label)
        shapes = {np.shape(values) for values in (self.x, self.y, self.low, self.high) if values is not None}
        if len(shapes) > 1 or np.ndim(self.x) != 1 or not np.size(self.x):
            raise ProgramError(f"expected 1-D x, y, low and high of equal length > 0, got {sorted(shapes)}", self.label)
        if not np.all(np.diff(self.x) > 0):
            raise ProgramError("expected x in ascending order", self.label)

    def text(self, n: int) -> str:
        """Return the value at index `n` and the band's limits as text: `0.52 (0.41 to 0.60)`."""
        if not np.isfinite(self.y[n]):
            return "–"
        text = number(float(self.y[n]))
        if self.low is None or self.high is None:
            return text
        return f"{text} ({number(float(self.low[n]))} to {number(float(self.high[n]))})"

    def band(self, x: Sequence[float]) -> tuple[list[float | None], list[float | None]]:
        """Return the band's outline for plotly to fill: one polygon per run of non-NaN points, separated by None."""
        assert self.low is not None
        assert self.high is not None
        known = np.flatnonzero(np.isfinite(self.low) & np.isfinite(self.high))
        across, up = list[float | None](), list[float | None]()
        for stretch in np.split(known, np.flatnonzero(np.diff(known) > 1) + 1):
            there, back = stretch.tolist(), stretch[::-1].tolist()
            across += [*(x[n] for n in (*there, *back)), None]
            up += [*self.high[there].tolist(), *self.low[back].tolist(), None]
        return across, up


class Chart(msgspec.Struct, frozen=True, eq=False):
    """Lines on one vertical axis. `y_range`: the axis limits, by default fitted to the lines; `note`: a remark on the
    method; `level`: a value to mark with a dashed line; `x_label`: the label of a separate, linear horizontal axis."""

    title: str
    y_label: str
    lines: tuple[Curve, ...]
    y_log: bool = False
    y_range: tuple[float, float] | None = None
    note: str = ""
    level: float | None = None
    level_label: str = ""
    x_label: str = ""

    @property
    def span(self) -> tuple[float, float]:
        """The limits of the vertical axis, with a margin around the lines."""
        if self.y_range is not None:
            return self.y_range
        sides = [side for line in self.lines for side in (line.y, line.low, line.high) if side is not None]
        values = np.concatenate([*sides, *([] if self.level is None else [np.array([self.level])])])
        values = values[np.isfinite(values) & ((values > 0) | (not self.y_log))]
        if not len(values):
            return (0.1, 1.0) if self.y_log else (0.0, 1.0)
        low, high = float(values.min()), float(values.max())
        if self.y_log:
            margin = max((high / low) ** 0.06, 1.05)
            return low / margin, high * margin
        margin = 0.06 * (high - low) or 0.5
        return low - margin, high + margin

    @property
    def log_ticks(self) -> list[float] | None:
        """The ticks of a logarithmic axis: 1, 2 and 5 times each power of ten, or only the powers; otherwise None."""
        if not self.y_log:
            return None
        low, high = self.span
        factors = (1, 2, 5) if high / low < 1000 else (1,)
        powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        found = [n * 10.0**power for power in powers for n in factors if low <= n * 10.0**power <= high]
        return found if len(found) > 1 else [low, high]


class Curves(msgspec.Struct, frozen=True, eq=False):
    """Charts on a shared horizontal axis (a chart with an `x_label` has a separate axis), and notes below them."""

    title: str
    x_label: str
    charts: tuple[Chart, ...]
    provenance: str
    x_log: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.charts or not all(chart.lines for chart in self.charts):
            raise ProgramError("expected at least one chart, each with at least one line", "charts")
        if self.x_log and self.numbers and self.numbers[0] < 0:
            raise ProgramError(f"expected x of at least 0 on a logarithmic axis, got {self.numbers[0]}", "x_log")

    @property
    def numbers(self) -> list[float]:
        """The x values of all lines on the shared axis, ascending."""
        return sorted({float(x) for chart in self.charts if not chart.x_label for line in chart.lines for x in line.x})

    def axis_of(self, chart: Chart) -> Curves:
        """Return the `Curves` on a chart's horizontal axis: this one, or only the chart if its axis is separate."""
        if not chart.x_label:
            return self
        own = msgspec.structs.replace(chart, x_label="")
        return msgspec.structs.replace(self, charts=(own,), x_label=chart.x_label, x_log=False)

    def place(self, x: float) -> float:
        """Return the coordinate of an x value on the horizontal axis."""
        if not self.x_log or x > 0:
            return math.log10(x) if self.x_log else x
        positive = [math.log10(number) for number in self.numbers if number > 0]
        if not positive:
            return 0.0
        step = (positive[-1] - positive[0]) / (len(positive) - 1) if len(positive) > 1 else 0.5
        return positive[0] - ZERO_GAP * step

    @property
    def gap(self) -> float | None:
        """The coordinate of the gap between 0 and the rest of a logarithmic axis; None without a gap."""
        positive = [x for x in self.numbers if x > 0]
        if not self.x_log or len(positive) in (0, len(self.numbers)):
            return None
        return (self.place(0.0) + self.place(positive[0])) / 2

    def ticks(self, most: int = 12) -> list[tuple[float, str]]:
        """Return the horizontal ticks (coordinate, label): all x values or, if too many, a subset or round numbers."""
        numbers = self.numbers
        if len(numbers) > most and self.x_log:
            every = math.ceil(len(numbers) / most)
            numbers = [x for i, x in enumerate(numbers) if (len(numbers) - 1 - i) % every == 0 or x == 0]
        elif len(numbers) > most or max(len(tick(x)) for x in numbers) > LONG:
            step = _round_step((numbers[-1] - numbers[0]) / most)
            numbers = [n * step for n in range(math.ceil(numbers[0] / step), math.floor(numbers[-1] / step) + 1)]
        return [(self.place(x), tick(x)) for x in numbers]

    def draw(self) -> Figure:
        """Draw the charts side by side, two per row."""
        across = min(len(self.charts), 2)
        down = math.ceil(len(self.charts) / across)
        notes = [f"{chart.title}: {chart.note}" for chart in self.charts if chart.note]
        notes += [*self.notes, f"Ran on {self.provenance}."]
        figure = style.new_figure(self.title, notes, max(CHART[0] * across, 6.4), CHART[1] * down)
        grid = figure.subplots(down, across, squeeze=False)
        for i, axes in enumerate(grid.flat):
            if i < len(self.charts):
                self._draw_chart(axes, self.charts[i])
            else:
                axes.set_axis_off()
        return figure

    def _draw_chart(self, axes: Axes, chart: Chart) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

        axis = self.axis_of(chart)
        style.bare(axes, chart.title, axis.x_label, chart.y_label)
        for i, line in enumerate(chart.lines):
            x, colour = [axis.place(float(value)) for value in line.x], LINES[i % len(LINES)]
            if line.low is not None and line.high is not None:
                axes.fill_between(x, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(x, line.y, color=colour, linewidth=1.7, linestyle=DASHES[i % len(DASHES)], label=line.label,
                      marker=MARKERS[i % len(MARKERS)], markersize=4, markeredgecolor="white", markeredgewidth=0.5,
                      clip_on=False)  # fmt: skip
        if chart.level is not None:
            axes.axhline(chart.level, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=chart.level_label)
        if (powers := chart.log_ticks) is not None:
            axes.set_yscale("log")
            axes.set_yticks(powers)
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.set_ylim(*chart.span)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
        ticks = axis.ticks()
        turned = sum(len(text) for _, text in ticks) > 44
        axes.set_xticks([place for place, _ in ticks], [text for _, text in ticks], rotation=45 if turned else 0)
        axes.grid(True, axis="y", color=RULE, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines["bottom"].set_visible(True)
        axes.spines["bottom"].set(color=MUTED, linewidth=0.8)
        if axis.gap is not None:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
            at = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "center"}
            axes.annotate("//", (axis.gap, 0), color=MUTED, fontsize=LABEL, bbox=box, **at)
        if len(chart.lines) > 1 or chart.level is not None:
            axes.legend(frameon=True, facecolor="white", edgecolor="none", framealpha=0.85, fontsize=LABEL)

    def figure(self) -> Interactive:
        """Return a plotly figure of the charts, stacked vertically, with each value and its band on hover."""
        graphs, subplots = style.need("plotly.graph_objects"), style.need("plotly.subplots")
        titles = [style.html_text(chart.title) for chart in self.charts]
        figure = subplots.make_subplots(len(titles), 1, subplot_titles=titles,
                                        vertical_spacing=90 / (330 * len(titles) + 60))  # fmt: skip
        for row, chart in enumerate(self.charts, 1):
            at, legend = {"row": row, "col": 1}, "legend" if row == 1 else f"legend{row}"
            axis = self.axis_of(chart)
            for i, line in enumerate(chart.lines):
                x, colour = [axis.place(float(value)) for value in line.x], LINES[i % len(LINES)]
                if line.low is not None:
                    band_x, band_y = line.band(x)
                    figure.add_trace(graphs.Scatter(
                        x=band_x, y=band_y, fill="toself", fillcolor=colour, opacity=0.16, line={"width": 0},
                        mode="lines", hoverinfo="skip", showlegend=False,
                    ), **at)  # fmt: skip
                hover = [style.html_text(f"{line.label} at {tick(float(value))}: {line.text(n)}")
                         for n, value in enumerate(line.x)]  # fmt: skip
                figure.add_trace(graphs.Scatter(
                    x=x, y=line.y, mode="lines+markers", name=style.html_text(line.label), line={"color": colour},
                    legend=legend, customdata=hover,
                    hovertemplate="%{customdata}<extra></extra>",
                ), **at)  # fmt: skip
            if chart.level is not None:
                ends = [axis.place(x) for x in (axis.numbers[0], axis.numbers[-1])]
                figure.add_trace(graphs.Scatter(
                    x=ends, y=[chart.level] * 2, mode="lines", line={"color": MUTED, "dash": "dash", "width": 1},
                    name=style.html_text(chart.level_label), legend=legend,
                    hoverinfo="skip",
                ), **at)  # fmt: skip
            low, high = chart.span
            span = [math.log10(low), math.log10(high)] if chart.y_log else [low, high]
            figure.update_yaxes(type="log" if chart.y_log else "linear", range=span, gridcolor=RULE,
                                tickvals=chart.log_ticks, title_text=style.html_text(chart.y_label), **at)  # fmt: skip
            top = figure.get_subplot(row, 1).yaxis.domain[1]
            figure.update_layout({legend: {"y": top, "yanchor": "top"}})
            places, texts = zip(*axis.ticks(), strict=True)
            figure.update_xaxes(tickvals=places, ticktext=texts, zeroline=False, showgrid=False,
                                title_text=style.html_text(axis.x_label), **at)  # fmt: skip
        figure.update_layout(height=330 * len(titles) + 60, plot_bgcolor="white", margin={"t": 50},
                             font={"family": style.PAGE_FONT, "color": style.INK})  # fmt: skip
        return figure

    def sections(self) -> Iterator[tuple[str, str]]:
        """Yield the charts' notes and all numbers."""
        for chart in self.charts:
            axis = self.axis_of(chart)
            texts = [{float(x): line.text(n) for n, x in enumerate(line.x)} for line in chart.lines]
            rows = [(tick(x), *(of.get(x, "") for of in texts)) for x in axis.numbers]
            note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
            yield chart.title, note + style.table(rows, (axis.x_label, *(line.label for line in chart.lines)))
        if self.notes:
            yield "Notes", "".join(f"<p>{escape(note)}</p>" for note in self.notes)


def _round_step(least: float) -> float:
    """Return the smallest number from `least` up that is 1, 2 or 5 times a power of ten."""
    unit = 10.0 ** math.floor(math.log10(least))
    return next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= least)
