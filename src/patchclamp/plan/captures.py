"""The capturing part of the program table: spans and areas, numbered for the device, as programs come and go."""

from __future__ import annotations

import msgspec
import numpy as np

from patchclamp.language.ops import DTYPES
from patchclamp.store.spans import Spans

_DTYPES = len(DTYPES)


class _Numbers:
    """Numbers to be taken and given back, low ones first."""

    def __init__(self) -> None:
        self._back = np.zeros(0, np.int64)
        self.end = 0  # all numbers in use are below

    def take(self, count: int) -> np.ndarray:
        found, self._back = self._back[:count], self._back[count:]
        first, self.end = self.end, self.end + count - len(found)
        return np.concatenate([found, np.arange(first, self.end)])

    def give(self, numbers: np.ndarray) -> None:
        self._back = np.sort(np.concatenate([self._back, numbers]))


class _Spread(msgspec.Struct):
    """Points at which, and the dtype in which, `holders` spans are kept; the numbers of its areas."""

    number: int
    points: np.ndarray
    dtype: int
    areas: np.ndarray
    holders: int = 0


class Captures:
    """The spans of all slots. `sampled` [P]: points whose rows are the sampled ones."""

    def __init__(self, sampled: np.ndarray) -> None:
        self._sampled = sampled
        self._columns = np.zeros((5, 64), np.int64)  # slot, op, start, stop, spread
        self._spans, self._areas, self._numbers = _Numbers(), _Numbers(), _Numbers()
        # by slot: its spans, and how many of them each spread has
        self._of: dict[int, tuple[np.ndarray, list[tuple[_Spread, int]]]] = {}
        self._spreads: dict[tuple[bytes, int], _Spread] = {}
        self._now: Spans | None = None

    def __len__(self) -> int:
        """Spans."""
        return sum(spread.holders for spread in self._spreads.values())

    def add(
        self, slot: int, op: np.ndarray, start: np.ndarray, stop: np.ndarray, dtype: np.ndarray, point: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Takes a program's capture records, sorted by point; returns the number of each one's span and area."""
        span, area = np.zeros((2, len(op)), np.int64)
        grids, alone = self._grids(op, start, stop, dtype, point)
        firsts = np.concatenate([alone, *(grid[0] for grid in grids)])  # a record of each span
        numbers = self._spans.take(len(firsts))
        if self._spans.end > self._columns.shape[1]:
            wider = np.zeros((5, 2 * self._spans.end), np.int64)
            wider[:, : self._columns.shape[1]] = self._columns
            self._columns = wider
        held: list[tuple[_Spread, int]] = []
        spread_of, at = np.zeros(len(firsts), np.int64), len(alone)
        for grid in grids:
            spread, mine = self._spread(point[grid[:, 0]], int(dtype[grid[0, 0]])), slice(at, at + grid.shape[1])
            span[grid], area[grid], spread_of[mine] = numbers[mine], spread.areas[:, None], spread.number
            held.append((spread, grid.shape[1]))
            at += grid.shape[1]
        keys, which = np.unique(point[alone] * _DTYPES + dtype[alone], return_inverse=True)
        made = [self._spread(np.array([key // _DTYPES]), key % _DTYPES) for key in keys.tolist()]
        held += zip(made, np.bincount(which, minlength=len(made)).tolist(), strict=True)
        span[alone] = numbers[: len(alone)]
        area[alone] = np.array([spread.areas[0] for spread in made], np.int64)[which]
        spread_of[: len(alone)] = np.array([spread.number for spread in made], np.int64)[which]
        self._columns[:, numbers] = (np.full(len(firsts), slot), op[firsts], start[firsts], stop[firsts], spread_of)
        for spread, count in held:
            spread.holders += count
        self._of[slot] = numbers, held
        self._now = None
        return span, area

    def drop(self, slot: int) -> None:
        """Forgets a slot's spans."""
        numbers, held = self._of.pop(slot, (None, []))
        if numbers is None:
            return
        self._columns[0, numbers] = 0
        self._spans.give(numbers)
        for spread, count in held:
            spread.holders -= count
            if spread.holders == 0:
                del self._spreads[spread.points.tobytes(), spread.dtype]
                self._areas.give(spread.areas)
                self._numbers.give(np.array([spread.number]))
        self._now = None

    def now(self) -> Spans:
        """All spans, those of a spread side by side."""
        if self._now is None:
            self._now = self._gathered()
        return self._now

    def _gathered(self) -> Spans:
        spreads = list(self._spreads.values())
        dense = np.zeros(self._numbers.end, np.int64)
        dense[[spread.number for spread in spreads]] = np.arange(len(spreads))
        number = np.flatnonzero(self._columns[0, : self._spans.end])
        if len(spreads) > 1:
            number = number[np.argsort(dense[self._columns[4, number]], kind="stable")]
        slot, op, start, stop, spread = self._columns[:, number]
        none = np.zeros(0, np.int64)
        point = np.concatenate([none, *(s.points for s in spreads)])
        order = np.argsort(point, kind="stable")
        many = [len(s.points) for s in spreads]
        owner = np.repeat(np.arange(len(spreads)), many)
        dtype = np.repeat(np.array([s.dtype for s in spreads], np.int64), many)
        area = np.concatenate([none, *(s.areas for s in spreads)])
        sampled = np.array([bool(self._sampled[s.points[0]]) for s in spreads], bool)
        spread = dense[spread]
        return Spans(number, slot, op, start, stop, spread, sampled[spread], area[order], owner[order],
                     point[order], dtype[order], len(spreads))  # fmt: skip

    def _grids(self, op: np.ndarray, *columns: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Records as grids [points, spans], all of an op's pieces at all of its points, and those that are alone."""
        order, grids = np.argsort(op, kind="stable"), []
        begins = np.concatenate([[0], np.flatnonzero(np.diff(op[order])) + 1, [len(op)]])
        alone = [order[begins[:-1][np.diff(begins) == 1]]]
        for i in np.flatnonzero(np.diff(begins) > 1).tolist():
            mine = order[begins[i] : begins[i + 1]]
            start, stop, dtype, point = (column[mine] for column in columns)
            points = 1 + int(np.count_nonzero(np.diff(point)))
            if len(mine) % points == 0:
                start, stop, point = (column.reshape(points, -1) for column in (start, stop, point))
                alike = (start == start[0]).all() and (stop == stop[0]).all() and (point == point[:, :1]).all()
                sampled = self._sampled[point[:, 0]]
                if alike and (dtype == dtype[0]).all() and (sampled == sampled[0]).all():
                    grids.append(mine.reshape(points, -1))
                    continue
            alone.append(mine)
        return grids, np.concatenate(alone)

    def _spread(self, points: np.ndarray, dtype: int) -> _Spread:
        key = points.tobytes(), dtype
        if key not in self._spreads:
            number = int(self._numbers.take(1)[0])
            self._spreads[key] = _Spread(number, points, dtype, self._areas.take(len(points)))
        return self._spreads[key]
