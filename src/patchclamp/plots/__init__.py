"""SHOW: one function a form of picture. Pictures know a `Heatmap`, a `TokenGrid` or `Curves`, and nothing of the study
they came from.

`heatmap` has the numbers of a picture, `words` its text and `palette` its colours, so that every form of it agrees.
"""

from patchclamp.plots.curves import Chart, Curves, Line
from patchclamp.plots.curves_html import curves_html
from patchclamp.plots.curves_png import curves_png
from patchclamp.plots.heatmap import Anchor, Column, Heatmap, Mark, Panel, Strip
from patchclamp.plots.heatmap_html import heatmap_html
from patchclamp.plots.heatmap_png import heatmap_png
from patchclamp.plots.target import check_targets
from patchclamp.plots.token_grid import GridPanel, TokenGrid
from patchclamp.plots.token_grid_html import token_grid_html
from patchclamp.plots.token_grid_png import token_grid_png

__all__ = [
    "Anchor", "Chart", "Column", "Curves", "GridPanel", "Heatmap", "Line", "Mark", "Panel", "Strip", "TokenGrid",
    "check_targets", "curves_html", "curves_png", "heatmap_html", "heatmap_png", "token_grid_html",
    "token_grid_png",
]  # fmt: skip
