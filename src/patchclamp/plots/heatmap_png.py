"""A heatmap as one picture: its panels beside each other, tokens (or heads) across, layers up.

White is no effect, blue is the way to the clean run's value and orange that to the corrupt one's: the deeper the
colour, the further a cell goes. A dot marks a cell whose effect is not above the noise floor.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchclamp.plots import layout, words
from patchclamp.plots.heatmap import Heatmap, Panel, Scale, Spot
from patchclamp.plots.layout import LABEL, MARGIN, Layout
from patchclamp.plots.palette import BLANK, CLEAN, CORRUPT, DIVERGING, FAINT, INK, MUTED, PALE
from patchclamp.plots.sheet import Ruler, Sheet, lettering
from patchclamp.plots.target import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def heatmap_png(heatmap: Heatmap, path: str | Path) -> Path:
    """Draws a heatmap into a file; its ending says the format (png, pdf, svg and what else matplotlib writes).

    Raises: `PatchclampError` without matplotlib, `UnknownName` for a format it does not write.
    """
    target, ending = picture(path)
    heatmap_figure(heatmap).savefig(target, format=ending, dpi="figure", facecolor="white")
    return target


def heatmap_figure(heatmap: Heatmap) -> Figure:
    """The picture as a matplotlib figure."""
    plan = layout.plan(heatmap, _footer(heatmap), Ruler())
    sheet, colours = Sheet(plan.width, plan.height), _Colours(heatmap)
    best = heatmap.ranked(1)
    y = _header(sheet, plan)
    _key(sheet, y, plan, heatmap, colours)
    y += layout.KEY
    for row in plan.rows:
        y += layout.HEADING + plan.row_height(row)
        for column, number in enumerate(row):
            x = MARGIN + plan.gutter + column * (plan.panel_width + layout.LAYERS + layout.GAP)
            axes = sheet.axes(x, y - (h := plan.panel_height(plan.panels[number])), plan.panel_width, h)
            _panel(axes, plan, heatmap, plan.panels[number], colours)
            for spot in best:
                if spot.panel == number:
                    _outline(axes, spot)
        y += plan.label_height + 0.2 + layout.GAP
    for i, line in enumerate(plan.footer):
        sheet.text(MARGIN, y + 0.2 * i, line, LABEL, color=MUTED)
    return sheet.figure


class _Colours:
    """The shared colour map, turned so that clean is on its blue side."""

    def __init__(self, heatmap: Heatmap) -> None:
        from matplotlib.colors import LinearSegmentedColormap, Normalize

        self.reach = reach = heatmap.scale
        ends = DIVERGING if reach.blue_above else DIVERGING[::-1]
        self.map = LinearSegmentedColormap.from_list("patchclamp", ends)
        self.norm = Normalize(reach.low, reach.high)

    def on(self, value: float) -> str:
        """The colour of a number written on a cell."""
        return "white" if abs(value - self.reach.centre) > 0.62 * self.reach.half else INK


def _footer(heatmap: Heatmap) -> list[str]:
    noise = words.noise(heatmap)
    lines = [f"{noise[0].upper()}{noise[1:]}.  Ran on {heatmap.provenance}."]
    if heatmap.note:
        lines.append(heatmap.note)
    if heatmap.skipped:
        lines.append("Dotted underline: tokens without a partner in the other prompt, not patched.")
    return lines


def _header(sheet: Sheet, plan: Layout) -> float:
    """Title and prompts; returns where they end."""
    y = MARGIN + 0.1
    for line in plan.title:
        sheet.text(MARGIN, y, line, layout.TITLE, weight="bold")
        y += layout.TITLE_LINE
    y += 0.02
    for passage in plan.passages:
        passage.draw(sheet, MARGIN, y, plan.indent)
        y += passage.height
    return y


def _key(sheet: Sheet, y: float, plan: Layout, heatmap: Heatmap, colours: _Colours) -> None:
    """The colour bar with the baselines on it, and beside it what outline, hatching, paleness and dots mean: the first
    note above, the others beside each other."""
    from matplotlib.patches import Rectangle

    _bar(sheet.axes(MARGIN + 0.1, y + 0.2, layout.BAR_WIDTH, layout.BAR_HEIGHT), heatmap, colours)
    ruler, x = Ruler(), MARGIN + layout.BESIDE_BAR
    for i, (text, look) in enumerate(_notes(plan, heatmap, colours)):
        base = y + (0.32 if i == 0 else 0.54)
        if look is None:
            _dot(sheet, x + 0.08, base - 0.055)
        else:
            corner = (x / sheet.width, 1 - base / sheet.height)
            sheet.figure.add_artist(Rectangle(corner, 0.16 / sheet.width, 0.11 / sheet.height, **look))
        sheet.text(x + layout.BOX, base, text, LABEL)
        x += layout.BOX + ruler.width(text, LABEL) + 0.2 if i > 0 else 0.0


def _notes(plan: Layout, heatmap: Heatmap, colours: _Colours) -> list[tuple[str, dict[str, Any] | None]]:
    """Texts, and how a box beside each looks; None for a dot."""
    notes: list[tuple[str, dict[str, Any] | None]] = []
    if plan.key:
        notes.append((plan.key, {"facecolor": "white", "edgecolor": "black", "linewidth": 1.8}))
    if any(np.isnan(panel.values).any() and panel.coarse is None for panel in plan.panels):
        notes.append(("not run", _hatching() | {"linewidth": 0.5}))
    if any(panel.coarse is not None for panel in plan.panels):
        notes.append(("paler: its whole block", {"facecolor": colours.map(0.85), "alpha": PALE}))
    if any(heatmap.faint(panel.values).any() for panel in plan.panels):
        grey = {"facecolor": FAINT, "linewidth": 0}
        notes.append(("not above the noise floor", grey if _numbered(plan) else None))
    return notes


def _dot(sheet: Sheet, x: float, y: float) -> None:
    from matplotlib.lines import Line2D

    look = {"marker": "o", "markersize": 2.2, "color": FAINT, "markeredgewidth": 0}
    sheet.figure.add_artist(Line2D([x / sheet.width], [1 - y / sheet.height], linestyle="none", **look))


def _hatching() -> dict[str, Any]:
    """How a cell looks that was not run."""
    return {"facecolor": BLANK, "edgecolor": "#c3cad3", "hatch": "//////", "linewidth": 0}


def _bar(axes: Axes, heatmap: Heatmap, colours: _Colours) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    reach = colours.reach
    extend = {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[
        bool(np.nanmin(heatmap.values, initial=np.inf) < reach.low),
        bool(np.nanmax(heatmap.values, initial=-np.inf) > reach.high),
    ]
    shades = ScalarMappable(colours.norm, colours.map)
    bar = axes.figure.colorbar(shades, cax=axes, orientation="horizontal", extend=extend)
    bar.set_ticks([t for t in MaxNLocator(5).tick_values(reach.low, reach.high) if reach.low <= t <= reach.high])
    axes.set_xlim(reach.low, reach.high)
    bar.outline.set_visible(False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    _ticks(axes)
    _baselines(axes, heatmap, reach)


def _baselines(axes: Axes, heatmap: Heatmap, reach: Scale) -> None:
    """The unpatched runs on the colour bar; where they lie close together their names keep apart."""
    goal = heatmap.goal
    if goal is not None and abs(heatmap.effect(goal.value)) > reach.half * (1 + 1e-9):
        goal = None  # beyond the bar
    close = goal is not None and abs(heatmap.effect(goal.value)) < 0.7 * reach.half
    sides = ("left", "right") if heatmap.towards < 0 else ("right", "left")
    at_left = goal is not None and goal.value < reach.centre - 0.7 * reach.half
    for anchor, side in ((heatmap.baseline, sides[0]), (goal, sides[1])):
        if anchor is None:
            continue
        color = CLEAN if anchor.side == "clean" else CORRUPT
        where = "left" if at_left and anchor is goal else "center"
        axes.axvline(anchor.value, ymin=0, ymax=1.35, color=color, linewidth=1.6, clip_on=False)
        axes.annotate(
            f"{anchor.name} {words.number(anchor.value)}", (anchor.value, 1.35), xycoords=("data", "axes fraction"),
            xytext=((4 if side == "left" else -4) if close else 0, 2), textcoords="offset points",
            **lettering(LABEL, color=color, weight="bold", ha=side if close else where),
        )  # fmt: skip


def _panel(axes: Axes, plan: Layout, heatmap: Heatmap, panel: Panel, colours: _Colours) -> None:
    axes.patch.set(**_hatching())
    if panel.coarse is not None:
        axes.patch.set(hatch=None, facecolor="white")
        _mesh(axes, plan, panel.coarse, colours, alpha=PALE)
    _mesh(axes, plan, panel.values, colours)
    axes.set_title(panel.name, loc="left", pad=5, **lettering(10.5, weight="bold"))
    axes.set_xlabel(heatmap.axis, **lettering(LABEL, color=MUTED))
    _tokens(axes, plan)
    _layers(axes, plan, panel)
    _ticks(axes)
    if _numbered(plan):
        _numbers(axes, panel, colours, heatmap.faint(panel.values))
    else:
        _dots(axes, plan, heatmap.faint(panel.values))


def _mesh(axes: Axes, plan: Layout, values: np.ndarray, colours: _Colours, **look: Any) -> None:
    rows, columns = values.shape
    axes.pcolormesh(
        np.arange(columns + 1), np.arange(rows + 1), np.ma.masked_invalid(values),
        cmap=colours.map, norm=colours.norm, edgecolors="white",
        linewidth=0.5 if min(plan.cell_height, plan.cell_width) > 0.14 else 0, **look,
    )  # fmt: skip


def _dots(axes: Axes, plan: Layout, faint: np.ndarray) -> None:
    """A dot in every cell whose effect is not above the noise floor."""
    rows, columns = np.nonzero(faint)
    size = min(max(10 * min(plan.cell_height, plan.cell_width), 0.8), 2.2)  # points
    axes.plot(columns + 0.5, rows + 0.5, linestyle="none", marker="o", markersize=size, color=FAINT, markeredgewidth=0)


def _tokens(axes: Axes, plan: Layout) -> None:
    every = plan.label_every
    turned = {0: {"ha": "center"}, 45: {"ha": "right"}, 90: {"ha": "right", "va": "center"}}[plan.angle]
    axes.set_xticks(np.arange(0, len(plan.labels), every) + 0.5)
    style = lettering(LABEL, **turned)
    axes.set_xticklabels(plan.labels[::every], rotation=plan.angle, rotation_mode="anchor", **style)


def _layers(axes: Axes, plan: Layout, panel: Panel) -> None:
    if panel.rows[0] is None:
        axes.set_yticks([])
        return
    rows = len(panel.rows)
    every = next((n for n in (1, 2, 4, 5, 10) if n * plan.cell_height >= 0.17), 20)
    axes.set_yticks(np.arange(0, rows, every) + 0.5)
    axes.set_yticklabels([str(layer) for layer in panel.rows[::every]], **lettering(LABEL))
    axes.set_ylabel("layer", **lettering(LABEL, color=MUTED))


def _ticks(axes: Axes) -> None:
    axes.grid(False)
    axes.tick_params(length=2.5, width=0.6, color=MUTED, labelcolor=INK, labelsize=LABEL)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _numbered(plan: Layout) -> bool:
    """Whether cells have room for their values."""
    return plan.cell_width >= 0.48 and plan.cell_height >= 0.25


def _numbers(axes: Axes, panel: Panel, colours: _Colours, faint: np.ndarray) -> None:
    """The values themselves, grey where the effect is not above the noise floor."""
    decimals = 2 if colours.reach.half >= 0.5 else 3
    for (row, column), value in np.ndenumerate(panel.values):
        if not np.isnan(value):
            color = FAINT if faint[row, column] else colours.on(value)
            style = lettering(8, ha="center", va="center", color=color)
            axes.text(column + 0.5, row + 0.5, f"{value:.{decimals}f}".replace("-", "−"), **style)


def _outline(axes: Axes, spot: Spot) -> None:
    from matplotlib.patches import Rectangle

    for color, width in (("white", 4.0), ("black", 2.0)):
        corner = (spot.column, spot.row)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=color, linewidth=width, clip_on=False, zorder=5))
