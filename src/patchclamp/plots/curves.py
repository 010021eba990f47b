"""`Curves`: lines against one quantity, each with its spread, in one or more charts; with every text of the picture.

The quantity may be on a logarithmic axis that has 0 too: it stands at the left, apart from the rest.

N points of a line
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.plots.words import number

ZERO_GAP = 1.5  # from 0 to the smallest positive number on a logarithmic axis, in the usual steps between numbers


class Line(msgspec.Struct, frozen=True, eq=False):
    """`y` [N] at `x` [N], ascending; NaN where there is nothing. `low` and `high` [N] are its spread, if it has one."""

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ProgramError("a spread has two sides: low and high", self.label)
        shapes = {np.shape(values) for values in (self.x, self.y, self.low, self.high) if values is not None}
        if len(shapes) > 1 or np.ndim(self.x) != 1 or not np.size(self.x):
            raise ProgramError(f"x, y, low and high are of one length, at least 1, not {sorted(shapes)}", self.label)
        if not np.all(np.diff(self.x) > 0):
            raise ProgramError("x ascends", self.label)


class Chart(msgspec.Struct, frozen=True, eq=False):
    """Lines that share a vertical axis. `y_range` are its ends, None: those of the lines; `note` says how lines and
    spread were made; `level` is a value that a dashed line marks, called `level_label`."""

    title: str
    y_label: str
    lines: tuple[Line, ...]
    y_log: bool = False
    y_range: tuple[float, float] | None = None
    note: str = ""
    level: float | None = None
    level_label: str = ""

    @property
    def span(self) -> tuple[float, float]:
        """The ends of the vertical axis, with a margin where they are those of the lines."""
        if self.y_range is not None:
            return self.y_range
        sides = [side for line in self.lines for side in (line.y, line.low, line.high) if side is not None]
        values = np.concatenate([*sides, *([] if self.level is None else [np.array([self.level])])])
        values = values[np.isfinite(values) & ((values > 0) | (not self.y_log))]
        if not len(values):
            return (0.1, 1.0) if self.y_log else (0.0, 1.0)
        low, high = float(values.min()), float(values.max())
        if self.y_log:
            margin = max((high / low) ** 0.06, 1.05)
            return low / margin, high * margin
        margin = 0.06 * (high - low) or 0.5
        return low - margin, high + margin


class Curves(msgspec.Struct, frozen=True, eq=False):
    """`charts` over one horizontal axis. `notes` are sentences below the picture; `provenance` says what it was made
    on."""

    title: str
    x_label: str
    charts: tuple[Chart, ...]
    provenance: str
    x_log: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.charts or not all(chart.lines for chart in self.charts):
            raise ProgramError("at least one chart is needed, and a line in each", "charts")
        if self.x_log and self.numbers[0] < 0:
            raise ProgramError(f"a logarithmic axis has no number below 0: {self.numbers[0]}", "x_log")

    @property
    def numbers(self) -> list[float]:
        """Every x of any line, ascending, once."""
        return sorted({float(x) for chart in self.charts for line in chart.lines for x in line.x})

    def place(self, x: float) -> float:
        """Where a number stands on the horizontal axis."""
        if not self.x_log:
            return x
        return math.log10(x) if x > 0 else self._zero

    @property
    def _zero(self) -> float:
        positive = [math.log10(x) for x in self.numbers if x > 0]
        if not positive:
            return 0.0
        step = (positive[-1] - positive[0]) / (len(positive) - 1) if len(positive) > 1 else 0.5
        return positive[0] - ZERO_GAP * step

    @property
    def gap(self) -> float | None:
        """Where the axis is broken, between 0 and the rest of a logarithmic one."""
        positive = [x for x in self.numbers if x > 0]
        if not self.x_log or len(positive) in (0, len(self.numbers)):
            return None
        return (self.place(0.0) + self.place(positive[0])) / 2

    def ticks(self, most: int = 12) -> list[tuple[float, str]]:
        """Place and text of the labels on the horizontal axis: every number, or if these are more than `most`, round
        numbers on a linear axis, and 0 and every so many from the last on a logarithmic one."""
        numbers = self.numbers
        if len(numbers) > most and self.x_log:
            every = math.ceil(len(numbers) / most)
            numbers = [x for i, x in enumerate(numbers) if (len(numbers) - 1 - i) % every == 0 or x == 0]
        elif len(numbers) > most:
            step = _round_step((numbers[-1] - numbers[0]) / most)
            numbers = [n * step for n in range(math.ceil(numbers[0] / step), math.floor(numbers[-1] / step) + 1)]
        return [(self.place(x), tick(x)) for x in numbers]


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    unit = 10.0 ** math.floor(math.log10(least))
    return next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= least)


def tick(value: float) -> str:
    """A number on an axis: as short as it is exact to four digits."""
    text = f"{value:.4g}"
    return number(value) if "e" in text else text.replace("-", "−")
