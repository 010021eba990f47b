"""From coarse to fine: blocks of layers and positions are patched at once, and the best are cut into smaller ones.

A block's value is not the sum of its cells': what is patched in one layer is overwritten by the next one's patch, and
opposite effects cancel out.  So a zoom finds strong cells with a tenth of the runs, and proves of no other cell that
it is weak.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.studies.grid import Filled
from patchclamp.studies.rows import Row, panels_of
from patchclamp.studies.sweep_result import Block

COARSEST = 8  # layers and positions of the first blocks
LEVELS = 3  # how often they are halved


class Zoom:
    """The blocks of a grid: `possible` [R, P] are its cells, `keep` blocks of each size are looked into."""

    def __init__(self, possible: np.ndarray, rows: Sequence[Row], columns: int, keep: int) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ProgramError(f"at least one block is looked into, not {keep!r}", "zoom")
        self.possible, self.keep = possible, min(keep, possible.size)
        panels = [[i for i, row in enumerate(rows) if row.panel == name] for name in panels_of(rows)]
        across = list(range(columns))
        self.first = self._whole(
            _Span(tuple(some), tuple(part)) for panel in panels for some in _cut(panel, COARSEST)
            for part in _cut(across, COARSEST)
        )  # fmt: skip

    def _whole(self, spans: object) -> list[_Span]:
        """Those whose cells all exist; of others the single cells that do."""
        whole: list[_Span] = []
        for span in spans:  # pyright: ignore[reportGeneralTypeIssues]
            some = self.possible[np.ix_(span.rows, span.columns)]
            if some.all():
                whole.append(span)
            else:
                whole += [_Span((r,), (p,)) for r in span.rows for p in span.columns if self.possible[r, p]]
        return whole

    def parts(self, span: _Span) -> list[_Span]:
        """A block cut in half both ways."""
        return [_Span(tuple(rows), tuple(columns)) for rows in _halves(span.rows) for columns in _halves(span.columns)]

    @property
    def most_single(self) -> int:
        """At most so many cells are patched alone."""
        return min(int(self.possible.sum()), 4 * self.keep * LEVELS + sum(span.single for span in self.first))

    @property
    def most(self) -> int:
        """At most so many runs are made of a pair."""
        return len(self.first) + 4 * self.keep * LEVELS


class _Span(NamedTuple):
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def single(self) -> bool:
        return len(self.rows) == len(self.columns) == 1


Patch = Callable[[Sequence[_Span], bool], Filled]
"""Patches blocks, and says whether listeners are told."""


def zoom_in(zoom: Zoom, patch: Patch, baseline: float) -> tuple[list[tuple[int, int]], Filled, list[Block]]:
    """Single cells (row, column) with their values [N, C], and the blocks on the way."""
    singles: list[tuple[int, int]] = []
    values: list[np.ndarray] = []
    blocks: list[Block] = []
    floor = 0.0
    spans = zoom.first
    while spans:
        larger = []
        alone = [span for span in spans if span.single]
        joint = [span for span in spans if not span.single]
        for some, single in ((joint, False), (alone, True)):
            if not some:
                continue
            filled = patch(some, single)
            floor = max(floor, filled.floor)
            means = filled.values.mean(0)
            if single:
                singles += [(span.rows[0], span.columns[0]) for span in some]
                values.append(filled.values)
            else:
                blocks += [Block(*span, float(value)) for span, value in zip(some, means, strict=True)]
                best = np.argsort(-np.abs(means - baseline), kind="stable")[: zoom.keep]
                larger = [part for i in sorted(best.tolist()) for part in zoom.parts(some[i])]
        spans = larger
    return singles, Filled(np.concatenate(values, axis=1), floor), blocks


def _cut(items: Sequence[int], size: int) -> list[Sequence[int]]:
    """Even parts of `size` items at most."""
    count = -(-len(items) // size)
    ends = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


def _halves(items: Sequence[int]) -> list[Sequence[int]]:
    middle = (len(items) + 1) // 2
    return [part for part in (items[:middle], items[middle:]) if len(part)]
