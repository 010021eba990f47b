"""`Heatmap`: a grid of metric values from any study, compared with a baseline run, as a picture and as a page.

White is no effect; blue is towards the clean run's value, orange towards the corrupt run's. Dots or grey numbers mark
effects within the noise floor; an outline marks the best cell, and hatching marks cells that were not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from patchclamp.plots import style
from patchclamp.plots.style import LABEL, number, percent, quoted, shorten, signed, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from plotly.graph_objects import Figure as Interactive

EFFECT_FROM, EFFECT_TO, P_FAMILY = "effect from", "effect to", "p among all cells"  # details that are drawn
BEST = 10  # cells in a page's table, and cells with drawn intervals
LONGEST_LABEL = 22  # characters
WIDEST = 15.0  # inches

Mark = Literal["same", "differs", "skipped"]
Side = Literal["clean", "corrupt"]


class Panel(msgspec.Struct, frozen=True, eq=False):
    """A part of the grid: `values` [R, P], NaN for cells that were not run. A panel without layers has one row, None.

    coarse: values of blocks of cells, [R, P], shown paler in cells that were not run alone
    details: further values of each cell, by name: [R, P] each
    part_of: the site and the cells' label, for a panel whose columns are heads or other parts of a site
    """

    name: str
    rows: tuple[int | None, ...]
    values: np.ndarray
    coarse: np.ndarray | None = None
    details: tuple[tuple[str, np.ndarray], ...] = ()
    part_of: tuple[str, str] | None = None

    def row_name(self, row: int) -> str:
        """Return a row's name: `resid_pre[8]`, `z[8, 3]` in the panel `z[:, 3]`, or `embed`."""
        layer = self.rows[row]
        if layer is None:
            return self.name
        site, of_part, part = self.name.partition("[:, ")
        return f"{site}[{layer}, {part}" if of_part else f"{site}[{layer}]"

    def cell_name(self, row: int, column: HeatmapColumn) -> tuple[str, str]:
        """Return the site and the label of a cell: (`resid_pre[8]`, ` Tower`)."""
        if self.part_of is not None:
            return f"{self.part_of[0]}[{self.rows[row]}, {column.label}]", self.part_of[1]
        return self.row_name(row), column.label

    @property
    def shown(self) -> np.ndarray:
        """All values that have a colour, as a flat array."""
        return np.concatenate([of.ravel() for of in (self.values, self.coarse) if of is not None])


class HeatmapColumn(msgspec.Struct, frozen=True):
    """A column shared by all panels, with its label and its positions in both prompts."""

    label: str
    clean: tuple[int, ...]
    corrupt: tuple[int, ...]

    @property
    def positions(self) -> str:
        """The clean and corrupt positions, as in `3 → 4`, or the positions in a single prompt."""
        return " → ".join(style.positions(of) for of in (self.clean, self.corrupt) if of)


class Strip(msgspec.Struct, frozen=True):
    """The tokens of a prompt, each compared with its counterpart in the other prompt; "skipped" tokens have none."""

    side: Side
    tokens: tuple[str, ...]
    marks: tuple[Mark, ...]
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or self.side

    @property
    def skipped(self) -> list[tuple[int, str]]:
        """The position and text of every token without a counterpart."""
        marked = enumerate(zip(self.tokens, self.marks, strict=True))
        return [(position, token) for position, (token, mark) in marked if mark == "skipped"]


class Anchor(msgspec.Struct, frozen=True):
    """An unpatched run: its name, its side and its value."""

    name: str
    side: Side
    value: float


class ColourRange(msgspec.Struct, frozen=True):
    """The colour scale of all panels: `centre` means no effect; the strong end is `half` away in direction `towards`.

    to_goal: True if the strong end is the goal, False if it is the largest effect
    blue_above: True if blue, the colour of clean, is above the centre
    """

    centre: float
    half: float
    towards: float
    to_goal: bool
    blue_above: bool = True

    @property
    def low(self) -> float:
        return self.centre - self.half

    @property
    def high(self) -> float:
        return self.centre + self.half

    @property
    def colours(self) -> tuple[str, ...]:
        return style.DIVERGING if self.blue_above else style.DIVERGING[::-1]


class HeatmapCell(msgspec.Struct, frozen=True):
    """A cell: its panel, row and column, and its value."""

    panel: int
    row: int
    column: int
    value: float


class Interval(msgspec.Struct, frozen=True):
    """A cell's effect, with the bounds of its confidence interval."""

    name: str
    effect: float
    low: float
    high: float


class Heatmap(msgspec.Struct, frozen=True, eq=False):
    """A grid of `panels` with one value per cell. `baseline` is the unpatched value; `goal`, if any, the value that
    patches approach.

    Effects up to `noise_floor` are noise. `metric` is the name of the value, `explained` a sentence about it and
    `formula` its definition. `cell` describes a cell, and `axis` the columns; `note` is free text.
    """

    title: str
    metric: str
    formula: str
    explained: str
    provenance: str
    panels: tuple[Panel, ...]
    columns: tuple[HeatmapColumn, ...]
    baseline: Anchor
    goal: Anchor | None
    noise_floor: float
    strips: tuple[Strip, ...]
    cell: str
    axis: str
    note: str = ""

    @property
    def scale(self) -> ColourRange:
        """The colour scale: white is the baseline; the strong end is the goal or, if None, the largest effect."""
        centre, goal = self.baseline.value, self.goal
        shown = np.concatenate([panel.shown for panel in self.panels])
        largest = float(np.nanmax(np.abs(shown - centre), initial=0.0))
        half = 0.0 if goal is None else abs(goal.value - centre)
        to_goal = half > self.noise_floor
        blue_above = (self.towards > 0) == (goal is None or goal.side == "clean")
        return ColourRange(centre, half if to_goal else largest or half or 1.0, self.towards, to_goal, blue_above)

    @property
    def clipped(self) -> tuple[bool, bool]:
        """(low, high): True if cells lie beyond that end of the colour scale and are clipped to its colour."""
        scale, shown = self.scale, np.concatenate([panel.shown for panel in self.panels])
        slack = max(self.noise_floor, 1e-3 * scale.half)
        return bool((shown < scale.low - slack).any()), bool((shown > scale.high + slack).any())

    @property
    def reach(self) -> tuple[float, float]:
        """The part of the colour scale that cells and unpatched runs span; all of it if that part is short."""
        scale, anchors = self.scale, [anchor.value for anchor in self.anchors]
        values = np.concatenate([anchors, *(panel.shown for panel in self.panels)])
        low, high = max(scale.low, float(np.nanmin(values))), min(scale.high, float(np.nanmax(values)))
        return (low, high) if high - low > 0.2 * scale.half else (scale.low, scale.high)

    @property
    def anchors(self) -> list[Anchor]:
        """The baseline, and the goal if the heatmap has one."""
        return [anchor for anchor in (self.baseline, self.goal) if anchor is not None]

    @property
    def intervals(self) -> list[Interval]:
        """The best cells' effects with 95 % confidence intervals, best first; empty if the study has no intervals."""
        found = []
        for spot in self.ranked(BEST):
            of = {name: float(values[spot.row, spot.column]) for name, values in self.panels[spot.panel].details}
            if EFFECT_FROM not in of:
                return []
            place, label = self.cell_name(spot)
            p = of.get(P_FAMILY)
            name = f"{place} @ {shorten(visible(label), LONGEST_LABEL)}" + ("" if p is None else f", p {number(p)}")
            found.append(Interval(name, self.effect(spot.value), of[EFFECT_FROM], of[EFFECT_TO]))
        return found

    @property
    def intervals_title(self) -> str:
        tested = P_FAMILY in dict(self.panels[0].details)
        return "Best cells: effects with 95 % intervals" + (f", and {P_FAMILY}" if tested else "")

    @property
    def towards(self) -> float:
        """−1 if the goal is below the baseline, else 1."""
        return -1.0 if self.goal is not None and self.goal.value < self.baseline.value else 1.0

    @property
    def skipped(self) -> list[tuple[Side, int, str]]:
        """The side, position and text of every token without a counterpart in the other prompt."""
        return [(strip.side, position, token) for strip in self.strips for position, token in strip.skipped]

    @property
    def noise(self) -> str:
        """A description of the noise floor."""
        if self.noise_floor == 0:
            return f"noise floor 0: reruns of the {self.baseline.name} prompt agree exactly"
        return f"noise floor {number(self.noise_floor)}: smaller effects mean nothing"

    def effect(self, value: float) -> float:
        """Return the difference between a value and the baseline."""
        return value - self.baseline.value

    def faint(self, values: np.ndarray) -> np.ndarray:
        """Return a mask of effects within the noise floor; False for NaN."""
        return np.abs(values - self.baseline.value) <= self.noise_floor

    def share(self, value: float) -> float | None:
        """Return (value − baseline) / (goal − baseline); None without a goal, or if the two are equal."""
        way = 0.0 if self.goal is None else self.effect(self.goal.value)
        return None if way == 0 else self.effect(value) / way

    def ranked(self, count: int) -> list[HeatmapCell]:
        """Return the `count` cells nearest the goal or, without a goal, with the largest effects, best first."""
        spots = [
            HeatmapCell(i, int(row), int(column), float(panel.values[row, column]))
            for i, panel in enumerate(self.panels)
            for row, column in np.argwhere(~np.isnan(panel.values))
        ]
        if self.goal is None:
            return sorted(spots, key=lambda spot: -abs(self.effect(spot.value)))[:count]
        return sorted(spots, key=lambda spot: -self.towards * spot.value)[:count]

    @property
    def outlined(self) -> list[HeatmapCell]:
        """The best cell, unless its effect is within the noise floor."""
        return [spot for spot in self.ranked(1) if not self.faint(np.array(spot.value))]

    def cell_name(self, spot: HeatmapCell) -> tuple[str, str]:
        """Return the site and the label of a cell."""
        return self.panels[spot.panel].cell_name(spot.row, self.columns[spot.column])

    def _notes(self, numbers: bool) -> list[str]:
        """Return the sentences below the picture. `numbers`: True if cells have room for their values."""
        notes = []
        for best in self.outlined:
            (row, label), part = self.cell_name(best), self.share(best.value)
            name = "Largest effect" if self.goal is None else "Best"
            effect = f"effect {signed(self.effect(best.value))}" if part is None or self.goal is None else (
                f"{percent(part)} of the way to {self.goal.name}")  # fmt: skip
            place = f"{row} @ {shorten(visible(label), LONGEST_LABEL)}"
            notes.append(f"{name} (outlined): {place}, {number(best.value)} ({effect}).")
        missing = any(np.isnan(panel.values).any() and panel.coarse is None for panel in self.panels)
        if any(panel.coarse is not None for panel in self.panels):
            notes.append("Paler cells were patched together with their block.")
        if any(self.faint(panel.values).any() for panel in self.panels):
            notes.append(f"{'Grey numbers' if numbers else 'Dots'}: not above the noise floor.")
        notes += ["Hatched: not run."] if missing else []
        if self.skipped:
            listed = ", ".join(f"{quoted(token)} ({side} {position})" for side, position, token in self.skipped)
            notes.append(f"Without a partner in the other prompt, so not patched: {shorten(listed, 200)}.")
        prompts = [f"{strip.title}: {shorten(''.join(map(style.plain, strip.tokens)), 300)}" for strip in self.strips]
        made = f"{self.noise[0].upper()}{self.noise[1:]}. Ran on {self.provenance}."
        return [*prompts, " ".join(notes), *([self.note] if self.note else []), made]

    # -- matplotlib

    def draw(self) -> Figure:
        """Draw the panels side by side, with layers on the vertical axis and tokens (or heads) on the horizontal."""
        labels = [shorten(visible(column.label), LONGEST_LABEL) for column in self.columns]
        rows = max(len(panel.rows) for panel in self.panels)
        widest = 6.0 if len(self.panels) == 1 else 4.0
        cell_width = min(max(widest / len(labels), min(0.26, max(12.0 / len(labels), 0.06))), 0.9)
        cell_height = min(max(5.6 / rows, 0.09), 0.42)
        across = max(1, min(len(self.panels), int(WIDEST // (cell_width * len(labels) + 0.9))))
        lines = [self.panels[i : i + across] for i in range(0, len(self.panels), across)]
        heights = [max(max(cell_height * len(panel.rows) for panel in line), 0.3) for line in lines]
        turned = max(map(len, labels)) * 0.075 + 0.1 > cell_width
        height = sum(heights) + len(lines) * (1.0 + (min(max(map(len, labels)) * 0.06, 1.2) if turned else 0)) + 0.8
        width = max(across * (cell_width * len(labels) + 0.9) + 0.4, 8.4)
        intervals = self.intervals
        tall = 0.17 * len(intervals) + 0.5
        figure = style.new_figure(
            self.title, self._notes(_has_room(cell_width, cell_height)), width, height + (tall if intervals else 0)
        )
        places = figure.add_gridspec(len(lines) + bool(intervals), across,
                                     height_ratios=[*heights, tall] if intervals else heights)  # fmt: skip
        grid = np.array([[figure.add_subplot(places[i, j]) for j in range(across)] for i in range(len(lines))])
        if intervals:
            self._draw_intervals(figure.add_subplot(places[len(lines), :]), intervals)
        best = self.outlined
        for i, axes in enumerate(grid.flat):
            if i >= len(self.panels):
                axes.set_axis_off()
                continue
            self._draw_panel(axes, self.panels[i], labels, cell_width, cell_height)
            if best and best[0].panel == i:
                style.outline(axes, best[0].row, best[0].column)
        self._draw_bar(figure, grid)
        return figure

    def _draw_panel(self, axes: Axes, panel: Panel, labels: list[str], width: float, height: float) -> None:
        scale, colours = self.scale, style.colour_map(self.scale.colours, "none")
        style.bare(axes, panel.name, self.axis, "" if panel.rows[0] is None else "layer")
        axes.patch.set(facecolor=style.BLANK, edgecolor="#c3cad3", hatch="//////", linewidth=0)
        layers = [(panel.coarse, style.PALE)] if panel.coarse is not None else []
        for values, alpha in (*layers, (panel.values, 1.0)):
            axes.pcolormesh(
                np.arange(values.shape[1] + 1) - 0.5, np.arange(values.shape[0] + 1) - 0.5,
                np.ma.masked_invalid(values), cmap=colours, vmin=scale.low, vmax=scale.high, alpha=alpha,
                edgecolors="white", linewidth=0.5 if min(width, height) > 0.14 else 0,
            )  # fmt: skip
        style.label_columns(axes, labels, width)
        style.label_rows(axes, [str(layer) for layer in panel.rows] if panel.rows[0] is not None else [], height)
        faint = self.faint(panel.values)
        if _has_room(width, height):
            decimals = next((n for n in (2, 3) if scale.half >= 5 * 0.1**n), None)
            for (row, column), value in np.ndenumerate(panel.values):
                if not np.isnan(value):
                    strong = abs(value - scale.centre) > 0.62 * scale.half
                    colour = style.FAINT if faint[row, column] else "white" if strong else style.INK
                    text = number(value) if decimals is None else f"{value:.{decimals}f}".replace("-", "−")
                    axes.text(column, row, text, ha="center", va="center", fontsize=LABEL - 0.5, color=colour)
        else:
            y, x = np.nonzero(faint)
            size = min(max(10 * min(width, height), 0.8), 2.2)
            axes.plot(x, y, linestyle="none", marker="o", markersize=size, color=style.FAINT, markeredgewidth=0)

    def _draw_intervals(self, axes: Axes, intervals: list[Interval]) -> None:
        style.bare(axes, self.intervals_title, f"effect on {self.metric}", "")
        places, effects = range(len(intervals)), [of.effect for of in intervals]
        axes.hlines(places, [of.low for of in intervals], [of.high for of in intervals], color=style.INK, linewidth=1.4)
        axes.plot(effects, places, linestyle="none", marker="o", markersize=4, color=style.INK)
        axes.axvline(0, color=style.RULE, linewidth=1, zorder=0)
        axes.set_yticks(places, [of.name for of in intervals])
        axes.set_ylim(len(intervals) - 0.5, -0.5)

    def _draw_bar(self, figure: Figure, grid: np.ndarray) -> None:
        """Draw the colour bar above the panels, with the unpatched runs marked on it."""
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        scale = self.scale
        shades = ScalarMappable(Normalize(scale.low, scale.high), style.colour_map(self.scale.colours, "none"))
        extend = {(True, False): "min", (False, True): "max", (True, True): "both"}.get(self.clipped, "neither")
        bar = figure.colorbar(shades, ax=list(grid.flat), location="top", shrink=0.5, aspect=32, anchor=(0.0, 0.0),
                              extend=extend)  # fmt: skip
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        ticks = {anchor.value: anchor for anchor in reversed(self.anchors)}
        shown = [value for value in ticks if scale.low - 1e-9 <= value <= scale.high + 1e-9]
        bar.ax.set_xlim(*self.reach)
        apart = len(shown) < 2 or abs(shown[0] - shown[1]) > 0.45 * scale.half
        shown = shown if apart else [self.baseline.value]
        bar.set_ticks(shown, labels=[f"{ticks[value].name} {number(value)}" for value in shown])
        for label, value in zip(bar.ax.get_xticklabels(), shown, strict=True):
            label.set(
                color=style.CLEAN if ticks[value].side == "clean" else style.CORRUPT, weight="bold", fontsize=LABEL
            )
        ends = sorted({end for end in self.reach if all(abs(end - v) > 0.3 * scale.half for v in shown)})
        bar.set_ticks(ends, labels=[number(end) for end in ends], minor=True, fontsize=LABEL - 1, color=style.MUTED)
        bar.set_label(self.metric, fontsize=LABEL, color=style.MUTED)

    # -- plotly

    def figure(self) -> Interactive:
        """Return the panels as a plotly figure, with every cell's values on hover."""
        graphs, subplots = style.need("plotly.graph_objects"), style.need("plotly.subplots")
        labels = [style.html_text(shorten(visible(column.label), LONGEST_LABEL)) for column in self.columns]
        across = max(1, min(len(self.panels), 1200 // (20 * len(labels) + 80)))
        down = math.ceil(len(self.panels) / across)
        tall = [max(len(panel.rows) for panel in self.panels[i * across : (i + 1) * across]) for i in range(down)]
        intervals = self.intervals
        tall += [len(intervals)] if intervals else []
        height = sum(max(20 * rows, 40) + 140 for rows in tall) + 40
        titles = [style.html_text(panel.name) for panel in self.panels]
        specs = [[{} if i * across + j < len(titles) else None for j in range(across)] for i in range(down)]
        if intervals:
            titles.append(self.intervals_title)
            specs.append([{"colspan": across}, *[None] * (across - 1)])
        figure = subplots.make_subplots(
            len(specs), across, specs=specs, subplot_titles=titles, row_heights=[max(rows, 2) for rows in tall],
            horizontal_spacing=min(0.06, 0.8 / across), vertical_spacing=130 / height,
        )  # fmt: skip
        best, scale = self.outlined, self.scale
        for i, panel in enumerate(self.panels):
            at = {"row": i // across + 1, "col": i % across + 1}
            if panel.coarse is not None:
                figure.add_trace(graphs.Heatmap(z=panel.coarse, coloraxis="coloraxis", opacity=style.PALE,
                                                hoverinfo="skip"), **at)  # fmt: skip
            hover = [[self._hover(panel, r, c) for c in range(len(labels))] for r in range(len(panel.rows))]
            rows = [] if panel.rows[0] is None else [str(layer) for layer in panel.rows]
            style.add_cells(figure, panel.values, hover, (labels, rows), (self.axis, "layer" if rows else None), at,
                            coloraxis="coloraxis")  # fmt: skip
            y, x = np.nonzero(self.faint(panel.values))
            figure.add_trace(graphs.Scatter(x=x, y=y, mode="markers", marker={"size": 3, "color": style.FAINT},
                                            hoverinfo="skip", showlegend=False), **at)  # fmt: skip
            figure.update_xaxes(range=(-0.5, len(labels) - 0.5), tickangle=-45 if len(labels) > 4 else 0, **at)
            figure.update_yaxes(range=(-0.5, len(panel.rows) - 0.5), **at)
            if best and best[0].panel == i:
                figure.add_shape(**style.frame(best[0].row, best[0].column, i + 1))
        if intervals:
            at = {"row": len(specs), "col": 1}
            figure.add_trace(graphs.Scatter(
                x=[of.effect for of in intervals], y=[style.html_text(of.name) for of in intervals], mode="markers",
                marker={"color": style.INK}, showlegend=False,
                error_x={"type": "data", "array": [of.high - of.effect for of in intervals],
                         "arrayminus": [of.effect - of.low for of in intervals], "color": style.INK},
            ), **at)  # fmt: skip
            figure.update_yaxes(autorange="reversed", **at)
            figure.add_shape(type="rect", xref="x domain", yref="y domain", x0=0, x1=1, y0=0, y1=1, fillcolor="white",
                             line_width=0, layer="below", **at)  # fmt: skip
            figure.update_xaxes(title_text=f"effect on {self.metric}", zeroline=True, **at)
        ticks = {anchor.value: f"{anchor.name} {number(anchor.value)}" for anchor in reversed(self.anchors)}
        for end, sign, clipped in zip(self.reach, "≤≥", self.clipped, strict=True):
            near = next((value for value in ticks if abs(value - end) < 0.1 * scale.half), end)
            prefix = f"{sign} " if clipped else ""  # plotly's colour bars have no pointed ends
            ticks[near] = prefix + ticks.get(near, number(end))
        low, high = self.reach
        shares = (np.linspace(low, high, 101) - scale.low) / (2 * scale.half)
        shades = style.need("plotly.colors").sample_colorscale(list(scale.colours), np.clip(shares, 0, 1).tolist())
        figure.update_layout(
            coloraxis={"colorscale": shades, "cmin": low, "cmax": high,
                       "colorbar": {"title": {"text": self.metric, "side": "right"}, "y": 1, "yanchor": "top",
                                    "lenmode": "pixels", "len": min(height - 60, 420),
                                    "tickvals": list(ticks), "ticktext": list(ticks.values())}},
        )  # fmt: skip
        return style.lay_out(figure, height)

    def _hover(self, panel: Panel, row: int, column: int) -> str:
        value = panel.values[row, column]
        if np.isnan(value):
            return ""
        place, label = panel.cell_name(row, self.columns[column])
        where = self.columns[column].positions
        lines = [f"{place} @ {visible(label)}" + (f" (position {where})" if where else ""),
                 f"{self.metric} {number(value)}, effect {signed(self.effect(value))}"]  # fmt: skip
        if self.goal is not None:
            lines.append(f"{percent(self.share(value))} of the way to {self.goal.name}")
        lines += [f"{name} {number(of[row, column])}" for name, of in panel.details if not np.isnan(of[row, column])]
        if self.faint(np.array(value)):
            lines.append("not above the noise floor")
        return style.html_text("\n".join(lines))

    def sections(self) -> Iterator[tuple[str, str]]:
        """Yield the prompts, the metric with its baselines, and the best cells."""
        prompts = "".join(
            f'<div class="{strip.side}"><b>{escape(strip.title)}</b>{style.chips(strip.tokens, strip.marks)}</div>'
            for strip in self.strips
        )
        if len(self.strips) == 2:
            paired = [f"{len(of.tokens) - len(of.skipped)} of {len(of.tokens)} {of.side}" for of in self.strips]
            prompts += (f"<p>{' and '.join(paired)} positions are paired. "
                        "Coloured tokens differ; dashed ones have no partner and are not patched.</p>")  # fmt: skip
        yield "Prompts", prompts
        runs = [(f"{anchor.name} run", number(anchor.value)) for anchor in self.anchors]
        about = escape(f"{self.explained} A cell is {self.cell}. {self.note}")
        floor = self.noise.removeprefix("noise floor ")
        yield "Metric", f"<p>{about}</p>" + style.table(
            [(self.metric, self.formula), *runs, ("noise floor", floor)], ("", ""))  # fmt: skip
        rows = []
        for spot in self.ranked(BEST):
            place, label = self.cell_name(spot)
            share = [percent(self.share(spot.value))] if self.goal is not None else []
            rows.append((place, visible(label), self.columns[spot.column].positions, number(spot.value),
                         signed(self.effect(spot.value)), *share))  # fmt: skip
        goal = [f"share of the way to {self.goal.name}"] if self.goal is not None else []
        yield "Best cells", style.table(rows, ("site", self.axis, "position", self.metric, "effect", *goal))


def _has_room(width: float, height: float) -> bool:
    """True if cells of this size in inches have room for their values."""
    return width >= 0.48 and height >= 0.25
