"""`TokenGrid`: panels of cells that have a colour and a text each, and every text of their picture, whatever study they
came from: what layers say at positions, or how much heads contribute.

R rows, the first at the bottom · C columns
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from patchclamp.plots.palette import DIVERGING, INK, SEQUENTIAL

Texts = tuple[tuple[str, ...], ...]


class Shades(msgspec.Struct, frozen=True):
    """A colour scale from `low` to `high`: colours evenly spread over it."""

    low: float
    high: float
    colours: tuple[str, ...]

    def share(self, value: float) -> float:
        """Where on the scale a value is, 0 to 1."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def ink(self, value: float) -> str:
        """The colour of what is written on a cell of a value."""
        return "white" if self._darkness(self.share(value)) > 0.45 else INK

    def _darkness(self, share: float) -> float:
        place = share * (len(self.colours) - 1)
        below = min(int(place), len(self.colours) - 2)
        first, second = (_darkness(self.colours[i]) for i in (below, below + 1))
        return first + (second - first) * (place - below)


def _darkness(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 1 - (0.299 * red + 0.587 * green + 0.114 * blue) / 255


class GridPanel(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """`values` [R, C], NaN where there is none, as colours; `texts` [R][C] are written into the cells, `notes` [R][C]
    shown by a page for the cell that is pointed at.

    name: what the values are
    row_name, column_name: of the axes
    centre: the value that is white, with a colour to either side; None for one hue
    strong: of one hue, which end is dark
    reaches: the ends of the scale, None for the values' own
    outlined: cells that stand out, (row, column)
    """

    name: str
    row_name: str
    column_name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: np.ndarray
    texts: Texts | None = None
    notes: Texts | None = None
    centre: float | None = None
    strong: Literal["high", "low"] = "high"
    reaches: tuple[float | None, float | None] = (None, None)
    outlined: tuple[tuple[int, int], ...] = ()

    @property
    def shades(self) -> Shades:
        """Its colour scale. Around a centre both sides reach equally far."""
        seen = self.values[np.isfinite(self.values)]
        least, most = (float(seen.min()), float(seen.max())) if seen.size else (0.0, 1.0)
        if self.centre is not None:
            half = max(most - self.centre, self.centre - least) or 1.0
            return Shades(self.centre - half, self.centre + half, DIVERGING)
        low, high = (own if own is not None else end for own, end in zip(self.reaches, (least, most), strict=True))
        return Shades(low, high if high > low else low + 1.0, SEQUENTIAL if self.strong == "high" else SEQUENTIAL[::-1])


class TokenGrid(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """`explained`: what a cell is, in a sentence or two; `provenance`: what it was made on; `prompt`: its tokens, if
    the picture should show them; `table`: rows of a table below the panels, the first its heads."""

    title: str
    explained: str
    provenance: str
    panels: tuple[GridPanel, ...]
    prompt: tuple[str, ...] = ()
    table: Texts = ()
