"""Plots of results. A `Heatmap`, a `TokenGrid`, `AttentionMaps`, `Curves` or a `Scatter` holds the numbers; matplotlib
draws it into files and plotly makes it interactive. Plots do not depend on the study they come from."""

from patchclamp.plots.attention_view import AttentionMaps
from patchclamp.plots.curves import Chart, Curve, Curves
from patchclamp.plots.heatmap import Anchor, Heatmap, HeatmapColumn, Mark, Panel, Strip
from patchclamp.plots.scatter import Scatter
from patchclamp.plots.style import Picture, check_targets, save_page, save_picture
from patchclamp.plots.token_grid import GridPanel, TokenGrid

__all__ = [
    "Anchor", "AttentionMaps", "Chart", "Curve", "Curves", "GridPanel", "Heatmap", "HeatmapColumn", "Mark", "Panel",
    "Picture", "Scatter", "Strip", "TokenGrid", "check_targets", "save_page", "save_picture",
]  # fmt: skip
