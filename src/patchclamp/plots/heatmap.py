"""`Heatmap`: a grid of numbers over a baseline run, and every text of its picture, whatever study it came from.

R rows of a panel (its layers, or one) · P columns
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

NEAR = 0.35  # of the way to the goal: if no effect is as large, the colours end at the largest effect

Mark = Literal["same", "differs", "skipped"]
Side = Literal["clean", "corrupt"]


class Panel(msgspec.Struct, frozen=True, eq=False):
    """One part of the grid: `values` [R, P], NaN where nothing was run. A panel without layers has the one row None.

    coarse: [R, P], values of cells that were changed together with others, shown paler where a cell has none of its own
    details: more numbers of each cell, by name: [R, P] each
    part_of: of a panel whose columns are parts of a site (heads, …): the site, and what its cells' label is in their
        place
    """

    name: str
    rows: tuple[int | None, ...]
    values: np.ndarray
    coarse: np.ndarray | None = None
    details: tuple[tuple[str, np.ndarray], ...] = ()
    part_of: tuple[str, str] | None = None

    def row_name(self, row: int) -> str:
        """`resid_pre[8]`, `z[8, 3]` of the panel `z[:, 3]`, or `embed`."""
        layer = self.rows[row]
        if layer is None:
            return self.name
        site, of_part, part = self.name.partition("[:, ")
        return f"{site}[{layer}, {part}" if of_part else f"{site}[{layer}]"

    def cell_name(self, row: int, column: Column) -> tuple[str, str]:
        """Where a cell is, and its label: (`resid_pre[8]`, ` Tower`)."""
        if self.part_of is not None:
            return f"{self.part_of[0]}[{self.rows[row]}, {column.label}]", self.part_of[1]
        return self.row_name(row), column.label

    @property
    def shown(self) -> np.ndarray:
        """Every number that is drawn, flat."""
        return np.concatenate([of.ravel() for of in (self.values, self.coarse) if of is not None])


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
    name: str = ""

    @property
    def title(self) -> str:
        """What it is called: its side, unless it has a name."""
        return self.name or self.side

    @property
    def skipped(self) -> list[tuple[int, str]]:
        """Position and text of every token that has no partner."""
        marked = enumerate(zip(self.tokens, self.marks, strict=True))
        return [(position, token) for position, (token, mark) in marked if mark == "skipped"]


class Anchor(msgspec.Struct, frozen=True):
    """A run without a change: what it is called, the colour of its side, and its value."""

    name: str
    side: Side
    value: float


class Scale(msgspec.Struct, frozen=True):
    """The panels' colour scale: `centre` is no effect, its strong end lies `half` away on the side of `towards`.

    to_goal: whether the strong end is the goal; else it is the largest effect
    blue_above: whether blue, the colour of clean, lies above the centre; orange, that of corrupt, is on the other side
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


class Spot(msgspec.Struct, frozen=True):
    """A cell of a panel, by number, and its value."""

    panel: int
    row: int
    column: int
    value: float


class Heatmap(msgspec.Struct, frozen=True, eq=False):
    """`panels` of one value a cell. `baseline` is the value without a change; `goal`, if there is one, that towards
    which changes are expected to move it.

    Effects that are not larger than `noise_floor` mean nothing. `metric` is the value's name, `explained` a sentence
    about it, `formula` how it is computed; `provenance` says what the runs were made on; `cell` says what a cell is,
    `axis` what its columns are, and `note` what else is to be known.
    """

    title: str
    metric: str
    formula: str
    explained: str
    provenance: str
    panels: tuple[Panel, ...]
    columns: tuple[Column, ...]
    baseline: Anchor
    goal: Anchor | None
    noise_floor: float
    strips: tuple[Strip, ...]
    cell: str
    axis: str
    note: str = ""

    @property
    def values(self) -> np.ndarray:
        """The cells of all panels, flat."""
        return np.concatenate([panel.values.ravel() for panel in self.panels])

    @property
    def scale(self) -> Scale:
        """The goal at the strong end; the largest effect, where no cell comes near the goal."""
        centre, goal = self.baseline.value, self.goal
        shown = np.concatenate([panel.shown for panel in self.panels])
        largest = float(np.nanmax(np.abs(shown - centre), initial=0.0))
        half = 0.0 if goal is None else abs(goal.value - centre)
        to_goal = half > self.noise_floor and largest >= NEAR * half
        blue_above = (self.towards > 0) == (goal is None or goal.side == "clean")
        return Scale(centre, half if to_goal else largest or half or 1.0, self.towards, to_goal, blue_above)

    @property
    def towards(self) -> float:
        """1 where the goal lies above the baseline or there is none, else −1."""
        return -1.0 if self.goal is not None and self.goal.value < self.baseline.value else 1.0

    @property
    def skipped(self) -> list[tuple[Side, int, str]]:
        """Side, position and text of every token that has no partner in the other prompt."""
        return [(strip.side, position, token) for strip in self.strips for position, token in strip.skipped]

    def effect(self, value: float) -> float:
        """How far a value is above the baseline."""
        return value - self.baseline.value

    def faint(self, values: np.ndarray) -> np.ndarray:
        """Which effects are not above the noise floor; NaN is none."""
        return np.abs(values - self.baseline.value) <= self.noise_floor

    def share(self, value: float) -> float | None:
        """The part of the way from the baseline to the goal that a value has come; None where there is no way."""
        way = 0.0 if self.goal is None else self.effect(self.goal.value)
        return None if way == 0 else self.effect(value) / way

    def ranked(self, count: int) -> list[Spot]:
        """The `count` spots furthest from the baseline towards the goal, or either way where there is none, best first;
        ties in the panels' order."""
        spots = [
            Spot(number, int(row), int(column), float(panel.values[row, column]))
            for number, panel in enumerate(self.panels)
            for row, column in np.argwhere(~np.isnan(panel.values))
        ]
        if self.goal is None:
            return sorted(spots, key=lambda spot: -abs(self.effect(spot.value)))[:count]
        return sorted(spots, key=lambda spot: -self.towards * spot.value)[:count]
