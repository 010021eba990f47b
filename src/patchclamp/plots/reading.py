"""How a sweep is read, in numbers: what every picture of it shows, whatever draws it.

S sites · R rows of a panel (its layers, or one) · P columns
"""

from __future__ import annotations

import msgspec
import numpy as np

from patchclamp.language.registry import SITES
from patchclamp.studies.sweep_result import PatchSweep


class Panel(msgspec.Struct, frozen=True, eq=False):
    """One site's part of the grid: `values` [R, P], NaN where nothing was run. An unlayered site has the row None."""

    site: str
    rows: tuple[int | None, ...]
    values: np.ndarray

    def name(self, row: int) -> str:
        """`resid_pre[8]`, or `embed`."""
        layer = self.rows[row]
        return self.site if layer is None else f"{self.site}[{layer}]"


class Scale(msgspec.Struct, frozen=True):
    """The shared colour scale: `centre` is the corrupt baseline, clean lies `half` away on the side of `towards`."""

    centre: float
    half: float
    towards: float

    @property
    def low(self) -> float:
        return self.centre - self.half

    @property
    def high(self) -> float:
        return self.centre + self.half


class Spot(msgspec.Struct, frozen=True):
    """A cell of a panel, by number, and the metric there."""

    panel: int
    row: int
    column: int
    value: float


def panels(sweep: PatchSweep) -> list[Panel]:
    """One panel a site, in the sweep's order, those without layers last."""
    found = [_panel(sweep, s, site) for s, site in enumerate(sweep.sites)]
    return sorted(found, key=lambda panel: panel.rows == (None,))


def _panel(sweep: PatchSweep, number: int, site: str) -> Panel:
    if site in SITES and not SITES[site].layered:
        return Panel(site, (None,), sweep.grid[number, :1])
    return Panel(site, sweep.layers, sweep.grid[number])


def effect(sweep: PatchSweep, value: float) -> float:
    """How far a value is above the corrupt baseline."""
    return value - sweep.corrupt


def share(sweep: PatchSweep, value: float) -> float | None:
    """The part of the way from corrupt to clean that a value has come; None where the two are one."""
    way = sweep.clean - sweep.corrupt
    return None if way == 0 else (value - sweep.corrupt) / way


def scale(sweep: PatchSweep) -> Scale:
    """Clean at the strong end. Where clean and corrupt cannot be told apart, the largest effect is."""
    half = abs(sweep.clean - sweep.corrupt)
    if half <= sweep.noise_floor:
        effects = np.abs(sweep.grid - sweep.corrupt)
        half = float(np.nanmax(effects, initial=0.0)) or 1.0
    return Scale(sweep.corrupt, half, _towards(sweep))


def ranked(sweep: PatchSweep, count: int) -> list[Spot]:
    """The `count` spots furthest from the corrupt baseline towards clean, best first; ties in the panels' order."""
    spots = [
        Spot(s, int(row), int(column), float(panel.values[row, column]))
        for s, panel in enumerate(panels(sweep))
        for row, column in np.argwhere(~np.isnan(panel.values))
    ]
    return sorted(spots, key=lambda spot: -_towards(sweep) * spot.value)[:count]


def _towards(sweep: PatchSweep) -> float:
    return 1.0 if sweep.clean >= sweep.corrupt else -1.0
