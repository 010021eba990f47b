"""SHOW: one function a form of picture. Pictures know a `Heatmap` and nothing of the study that it came from.

`heatmap` has the numbers of a picture, `words` its text and `palette` its colours, so that every form of it agrees.
"""

from patchclamp.plots.heatmap import Anchor, Column, Heatmap, Mark, Panel, Strip
from patchclamp.plots.heatmap_html import heatmap_html
from patchclamp.plots.heatmap_png import heatmap_png
from patchclamp.plots.target import check_targets

__all__ = ["Anchor", "Column", "Heatmap", "Mark", "Panel", "Strip", "check_targets", "heatmap_html", "heatmap_png"]
