"""SHOW: one function a result. Pictures know what a study found and nothing of how it was run.

`reading` has the numbers of a picture, `words` its text and `palette` its colours, so that every form of it agrees.
"""

from patchclamp.plots.sweep_html import sweep_html
from patchclamp.plots.sweep_png import sweep_png
from patchclamp.plots.target import check_targets

__all__ = ["check_targets", "sweep_html", "sweep_png"]
