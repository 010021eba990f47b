"""A heatmap as one picture: its panels beside each other, corrupt-prompt tokens across, layers up.

White is the corrupt baseline, full blue the clean one, so style blue a cell is says style far it comes back.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchclamp.plots import layout, words
from patchclamp.plots.heatmap import Heatmap, Panel, Scale, Spot
from patchclamp.plots.layout import LABEL, MARGIN, Layout
from patchclamp.plots.palette import BLANK, CLEAN, CORRUPT, DIVERGING, INK, MUTED
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
    sheet, colours = Sheet(plan.width, plan.height), _Colours(heatmap.scale)
    best = heatmap.ranked(1)
    y = _header(sheet, plan)
    _key(sheet, y, plan, heatmap, colours)
    y += layout.KEY
    for row in plan.rows:
        y += layout.HEADING + plan.row_height(row)
        for column, number in enumerate(row):
            x = MARGIN + plan.gutter + column * (plan.panel_width + layout.LAYERS + layout.GAP)
            axes = sheet.axes(x, y - (h := plan.panel_height(plan.panels[number])), plan.panel_width, h)
            _panel(axes, plan, plan.panels[number], colours, [s for s in best if s.panel == number])
        y += plan.label_height + 0.2 + layout.GAP
    for i, line in enumerate(plan.footer):
        sheet.text(MARGIN, y + 0.2 * i, line, LABEL, color=MUTED)
    return sheet.figure


class _Colours:
    """The shared colour map, turned so that clean is its blue end."""

    def __init__(self, reach: Scale) -> None:
        from matplotlib.colors import LinearSegmentedColormap, Normalize

        self.reach = reach
        ends = DIVERGING if reach.towards > 0 else DIVERGING[::-1]
        self.map = LinearSegmentedColormap.from_list("patchclamp", ends)
        self.norm = Normalize(reach.low, reach.high)

    def on(self, value: float) -> str:
        """The colour of a number written on a cell."""
        return "white" if abs(value - self.reach.centre) > 0.62 * self.reach.half else INK


def _footer(heatmap: Heatmap) -> list[str]:
    noise = words.noise(heatmap)
    line = f"{noise[0].upper()}{noise[1:]}.  Ran on {heatmap.provenance}."
    skipped = "Dotted underline: tokens without a partner in the other prompt, not patched."
    return [line, skipped] if heatmap.skipped else [line]


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
    """The colour bar with both baselines on it, and beside it the meaning of outline and hatching."""
    from matplotlib.patches import Rectangle

    _bar(sheet.axes(MARGIN + 0.1, y + 0.2, layout.BAR_WIDTH, layout.BAR_HEIGHT), heatmap, colours)
    notes: list[tuple[str, dict[str, Any]]] = []
    if plan.key:
        notes.append((plan.key, {"facecolor": "white", "edgecolor": "black", "linewidth": 1.8}))
    if any(np.isnan(panel.values).any() for panel in plan.panels):
        notes.append(("not run", _hatching() | {"linewidth": 0.5}))
    x = MARGIN + layout.BESIDE_BAR
    for i, (text, look) in enumerate(notes):
        base = y + 0.32 + i * 0.22
        corner = (x / sheet.width, 1 - base / sheet.height)
        sheet.figure.add_artist(Rectangle(corner, 0.16 / sheet.width, 0.11 / sheet.height, **look))
        sheet.text(x + layout.BOX, base, text, LABEL)


def _hatching() -> dict[str, Any]:
    """How a cell looks that was not run."""
    return {"facecolor": BLANK, "edgecolor": "#c3cad3", "hatch": "//////", "linewidth": 0}


def _bar(axes: Axes, heatmap: Heatmap, colours: _Colours) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    reach = colours.reach
    extend = {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[
        bool(np.nanmin(heatmap.values) < reach.low), bool(np.nanmax(heatmap.values) > reach.high)
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
    """Both unpatched runs on the colour bar; where they lie close together their names keep apart."""
    close = abs(heatmap.clean - heatmap.corrupt) < 0.7 * reach.half
    sides = ("left", "right") if heatmap.clean >= heatmap.corrupt else ("right", "left")
    for name, value, color, side in (
        ("corrupt", heatmap.corrupt, CORRUPT, sides[1]),
        ("clean", heatmap.clean, CLEAN, sides[0]),
    ):
        axes.axvline(value, ymin=0, ymax=1.35, color=color, linewidth=1.6, clip_on=False)
        axes.annotate(
            f"{name} {words.number(value)}", (value, 1.35), xycoords=("data", "axes fraction"),
            xytext=((4 if side == "left" else -4) if close else 0, 2), textcoords="offset points",
            **lettering(LABEL, color=color, weight="bold", ha=side if close else "center"),
        )  # fmt: skip


def _panel(axes: Axes, plan: Layout, panel: Panel, colours: _Colours, best: list[Spot]) -> None:
    columns, rows = len(plan.labels), len(panel.rows)
    axes.patch.set(**_hatching())
    axes.pcolormesh(
        np.arange(columns + 1), np.arange(rows + 1), np.ma.masked_invalid(panel.values),
        cmap=colours.map, norm=colours.norm, edgecolors="white",
        linewidth=0.5 if min(plan.cell_height, plan.cell_width) > 0.14 else 0,
    )  # fmt: skip
    axes.set_title(panel.name, loc="left", pad=5, **lettering(10.5, weight="bold"))
    axes.set_xlabel("token of the corrupt prompt", **lettering(LABEL, color=MUTED))
    _tokens(axes, plan)
    _layers(axes, plan, panel)
    _ticks(axes)
    _numbers(axes, plan, panel, colours)
    for spot in best:
        _outline(axes, spot)


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


def _numbers(axes: Axes, plan: Layout, panel: Panel, colours: _Colours) -> None:
    """The values themselves, where cells have room for them."""
    if plan.cell_width < 0.48 or plan.cell_height < 0.25:
        return
    decimals = 2 if colours.reach.half >= 0.5 else 3
    for (row, column), value in np.ndenumerate(panel.values):
        if not np.isnan(value):
            style = lettering(8, ha="center", va="center", color=colours.on(value))
            axes.text(column + 0.5, row + 0.5, f"{value:.{decimals}f}".replace("-", "−"), **style)


def _outline(axes: Axes, spot: Spot) -> None:
    from matplotlib.patches import Rectangle

    for color, width in (("white", 4.0), ("black", 2.0)):
        corner = (spot.column, spot.row)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=color, linewidth=width, clip_on=False, zorder=5))
