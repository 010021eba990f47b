"""`Heatmap`: a grid of numbers between two runs, and every text of its picture, whatever study it came from.

R rows of a panel (its layers, or one) · P columns
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

Mark = Literal["same", "differs", "skipped"]
Side = Literal["clean", "corrupt"]


class Panel(msgspec.Struct, frozen=True, eq=False):
    """One part of the grid: `values` [R, P], NaN where nothing was run. A panel without layers has the one row None."""

    name: str
    rows: tuple[int | None, ...]
    values: np.ndarray

    def row_name(self, row: int) -> str:
        """`resid_pre[8]`, or `embed`."""
        layer = self.rows[row]
        return self.name if layer is None else f"{self.name}[{layer}]"


class Column(msgspec.Struct, frozen=True):
    """A column of every panel: its label, and the tokens of both strips that it stands for, by position."""

    label: str
    clean: tuple[int, ...]
    corrupt: tuple[int, ...]


class Strip(msgspec.Struct, frozen=True):
    """A prompt's tokens. A mark says how each is to its partner in the other prompt: "skipped" has no partner."""

    side: Side
    tokens: tuple[str, ...]
    marks: tuple[Mark, ...]

    @property
    def skipped(self) -> list[tuple[int, str]]:
        """Position and text of every token that has no partner."""
        marked = enumerate(zip(self.tokens, self.marks, strict=True))
        return [(position, token) for position, (token, mark) in marked if mark == "skipped"]


class Scale(msgspec.Struct, frozen=True):
    """The panels' colour scale: `centre` is the corrupt baseline, clean lies `half` away on the side of `towards`."""

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
    """A cell of a panel, by number, and its value."""

    panel: int
    row: int
    column: int
    value: float


class Heatmap(msgspec.Struct, frozen=True, eq=False):
    """`panels` of one value a cell; `clean` and `corrupt` are that value in the two runs it lies between.

    Effects smaller than `noise_floor` mean nothing. `metric` is the value's name, `explained` a sentence about it,
    `formula` how it is computed; `provenance` says what the runs were made on.
    """

    title: str
    metric: str
    formula: str
    explained: str
    provenance: str
    panels: tuple[Panel, ...]
    columns: tuple[Column, ...]
    clean: float
    corrupt: float
    noise_floor: float
    strips: tuple[Strip, Strip]

    @property
    def values(self) -> np.ndarray:
        """The cells of all panels, flat."""
        return np.concatenate([panel.values.ravel() for panel in self.panels])

    @property
    def scale(self) -> Scale:
        """Clean at the strong end. Where clean and corrupt cannot be told apart, the largest effect is."""
        half = abs(self.clean - self.corrupt)
        if half <= self.noise_floor:
            half = float(np.nanmax(np.abs(self.values - self.corrupt), initial=0.0)) or 1.0
        return Scale(self.corrupt, half, 1.0 if self.clean >= self.corrupt else -1.0)

    @property
    def skipped(self) -> list[tuple[Side, int, str]]:
        """Side, position and text of every token that has no partner in the other prompt."""
        return [(strip.side, position, token) for strip in self.strips for position, token in strip.skipped]

    def effect(self, value: float) -> float:
        """How far a value is above the corrupt baseline."""
        return value - self.corrupt

    def share(self, value: float) -> float | None:
        """The part of the way from corrupt to clean that a value has come; None where the two are one."""
        way = self.clean - self.corrupt
        return None if way == 0 else (value - self.corrupt) / way

    def ranked(self, count: int) -> list[Spot]:
        """The `count` spots furthest from the corrupt baseline towards clean, best first; ties in the panels' order."""
        spots = [
            Spot(number, int(row), int(column), float(panel.values[row, column]))
            for number, panel in enumerate(self.panels)
            for row, column in np.argwhere(~np.isnan(panel.values))
        ]
        towards = self.scale.towards
        return sorted(spots, key=lambda spot: -towards * spot.value)[:count]
