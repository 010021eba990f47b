"""The capture layout: which positions programs capture, and where their rows lie in a step's capture buffer.

A capture range is what one position range of a capture op keeps of one request: rows of consecutive positions, at
several points.  Capture ranges at the same points and in the same dtype form a point group; requests with the same
program have such.  A group has one region of the buffer for each of its points, and in each region the rows of the
group's ranges lie one after the other.  So a step is planned by ranges and regions, and not by records, of which there
is one for every range and point.

    C capture ranges · G point groups · A regions · P points
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from patchclamp.language.values import DTYPES


class CaptureLayout(msgspec.Struct, dict=True, eq=False):
    """All capture ranges and regions at one time. It never changes.

    Capture ranges [C], those of a group side by side:
    range_number: what records call the range
    slot: of its request
    op: the number of its op in the program
    start, stop: its positions, start … stop−1
    group: its point group, 0 … G−1
    sampled: whether its rows are the sampled ones

    Regions [A], in order of points:
    region_number: what records call the region
    region_group: its point group
    point: its point
    dtype: an index into `DTYPES`
    products: how many numbers it keeps of a row; 0: all

    groups: G
    """

    range_number: np.ndarray
    slot: np.ndarray
    op: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    group: np.ndarray
    sampled: np.ndarray
    region_number: np.ndarray
    region_group: np.ndarray
    point: np.ndarray
    dtype: np.ndarray
    products: np.ndarray
    groups: int

    def __len__(self) -> int:
        """Capture ranges."""
        return len(self.range_number)

    @functools.cached_property
    def any_sampled(self) -> bool:
        """Whether any range is of sampled rows."""
        return bool(np.count_nonzero(self.sampled))

    @functools.cached_property
    def range_of_number(self) -> np.ndarray:
        """The index of each range by its number; −1 for numbers that nobody has."""
        return _inverse(self.range_number)

    @functools.cached_property
    def region_of_number(self) -> np.ndarray:
        """The index of each region by its number; −1 for numbers that nobody has."""
        return _inverse(self.region_number)

    def pairs(self, ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs each of some ranges with every region of its group. Returns the ranges and the regions, by index."""
        by_group = np.argsort(self.region_group, kind="stable")
        regions_of_group = np.bincount(self.region_group, minlength=self.groups)
        first_of_group = np.cumsum(regions_of_group) - regions_of_group
        counts = regions_of_group[self.group[ranges]]
        nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(ranges, counts), by_group[np.repeat(first_of_group[self.group[ranges]], counts) + nth]


def _inverse(numbers: np.ndarray) -> np.ndarray:
    index = np.full(int(numbers.max(initial=-1)) + 1, -1, np.int64)
    index[numbers] = np.arange(len(numbers))
    return index


class _NumberPool:
    """Numbers that are taken, low ones first, and given back. All that are in use are below `end`."""

    def __init__(self) -> None:
        self._returned = np.zeros(0, np.int64)
        self.end = 0

    def take(self, count: int) -> np.ndarray:
        reused, self._returned = self._returned[:count], self._returned[count:]
        first, self.end = self.end, self.end + count - len(reused)
        return np.concatenate([reused, np.arange(first, self.end)])

    def give(self, numbers: np.ndarray) -> None:
        self._returned = np.sort(np.concatenate([self._returned, numbers]))


class _PointGroup(msgspec.Struct):
    """A group's number, its points, its dtype and products, the numbers of its regions, and how many ranges it has."""

    number: int
    points: np.ndarray
    dtype: int
    products: int
    regions: np.ndarray
    ranges: int = 0


class CaptureRanges:
    """The capture ranges of all slots, as programs come and go. `sampled` [P]: points of sampled rows."""

    def __init__(self, sampled: np.ndarray) -> None:
        self._sampled = sampled
        self._columns = np.zeros((5, 64), np.int64)  # slot, op, start, stop, group's number; by number of the range
        self._range_numbers, self._region_numbers, self._group_numbers = _NumberPool(), _NumberPool(), _NumberPool()
        # by slot: the numbers of its ranges, and how many of them each group has
        self._of_slot: dict[int, tuple[np.ndarray, list[tuple[_PointGroup, int]]]] = {}
        self._groups: dict[tuple[bytes, int, int], _PointGroup] = {}  # by points, dtype and products
        self._layout: CaptureLayout | None = None

    def __len__(self) -> int:
        """Capture ranges."""
        return sum(group.ranges for group in self._groups.values())

    def add(
        self, slots: np.ndarray, op: np.ndarray, start: np.ndarray, stop: np.ndarray, dtype: np.ndarray,
        point: np.ndarray, products: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Adds the ranges of programs' capture records, K each and sorted by point. The programs differ in their slots
        [N] and in `start` and `stop` [N, K] alone. Returns the numbers of their ranges [N, K] and regions [K]."""
        range_number, region_number = np.zeros(start.shape, np.int64), np.zeros(len(op), np.int64)
        kept_as = dtype + len(DTYPES) * products
        grids = self._grids(op, start, stop, kept_as, point)
        first_records = np.concatenate([np.zeros(0, np.int64), *(grid[0] for grid in grids)])  # one of each range
        numbers = self._range_numbers.take(len(slots) * len(first_records)).reshape(len(slots), -1)
        self._reserve(self._range_numbers.end)
        group_number, begin, group_counts = np.zeros(len(first_records), np.int64), 0, []
        for grid in grids:
            first, mine = grid[0, 0], slice(begin, begin + grid.shape[1])
            group = self._group(point[grid[:, 0]], int(dtype[first]), int(products[first]))
            range_number[:, grid], region_number[grid] = numbers[:, None, mine], group.regions[:, None]
            group_number[mine] = group.number
            group.ranges += len(slots) * grid.shape[1]
            group_counts.append((group, grid.shape[1]))
            begin += grid.shape[1]
        slot, op = slots[:, None], op[first_records]
        columns = slot, op, start[:, first_records], stop[:, first_records], group_number
        for column, entries in zip(self._columns, columns, strict=True):
            column[numbers] = entries
        self._of_slot.update((each, (mine, group_counts)) for each, mine in zip(slots.tolist(), numbers, strict=True))
        self._layout = None
        return range_number, region_number

    def drop(self, slot: int) -> None:
        """Forgets a slot's ranges."""
        if slot not in self._of_slot:
            return
        numbers, group_counts = self._of_slot.pop(slot)
        self._columns[0, numbers] = 0
        self._range_numbers.give(numbers)
        for group, count in group_counts:
            group.ranges -= count
            if group.ranges == 0:
                del self._groups[group.points.tobytes(), group.dtype, group.products]
                self._region_numbers.give(group.regions)
                self._group_numbers.give(np.array([group.number]))
        self._layout = None

    def layout(self) -> CaptureLayout:
        """The present layout, made anew when a program has come or gone."""
        if self._layout is None:
            self._layout = self._make_layout()
        return self._layout

    def _make_layout(self) -> CaptureLayout:
        groups, empty = list(self._groups.values()), np.zeros(0, np.int64)
        index_of_group = np.zeros(self._group_numbers.end, np.int64)
        index_of_group[[group.number for group in groups]] = np.arange(len(groups))
        number = np.flatnonzero(self._columns[0, : self._range_numbers.end])
        if len(groups) > 1:
            number = number[np.argsort(index_of_group[self._columns[4, number]], kind="stable")]
        slot, op, start, stop, group_number = self._columns[:, number]
        group = index_of_group[group_number]
        point = np.concatenate([empty, *(g.points for g in groups)])
        by_point = np.argsort(point, kind="stable")
        sizes = [len(g.points) for g in groups]
        region_group = np.repeat(np.arange(len(groups)), sizes)
        dtype, products = (
            np.repeat(np.array([getattr(g, name) for g in groups], np.int64), sizes) for name in ("dtype", "products")
        )
        region_number = np.concatenate([empty, *(g.regions for g in groups)])
        sampled = np.array([bool(self._sampled[g.points[0]]) for g in groups], bool)
        return CaptureLayout(
            number, slot, op, start, stop, group, sampled[group],
            region_number[by_point], region_group[by_point], point[by_point], dtype[by_point], products[by_point],
            len(groups),
        )  # fmt: skip

    def _reserve(self, ranges: int) -> None:
        if ranges > self._columns.shape[1]:
            wider = np.zeros((5, 2 * ranges), np.int64)
            wider[:, : self._columns.shape[1]] = self._columns
            self._columns = wider

    def _grids(
        self, op: np.ndarray, start: np.ndarray, stop: np.ndarray, kept_as: np.ndarray, point: np.ndarray
    ) -> list[np.ndarray]:
        """The records in grids [points, ranges]. An op whose points all keep the same ranges has one grid; all other
        records have one for each point and `kept_as`, a number for dtype and products."""
        order, grids, ungrouped = np.argsort(op, kind="stable"), [], [np.zeros(0, np.int64)]
        for records in np.split(order, np.flatnonzero(np.diff(op[order])) + 1):
            grid = self._grid(records, start, stop, kept_as, point) if len(records) > 1 else None
            if grid is None:
                ungrouped.append(records)
            else:
                grids.append(grid)
        records = np.concatenate(ungrouped)
        key = point[records] * (1 + int(kept_as.max(initial=0))) + kept_as[records]
        order = np.argsort(key, kind="stable")
        by_key = np.split(records[order], np.flatnonzero(np.diff(key[order])) + 1)
        return grids + [group[None] for group in by_key if len(group)]

    def _grid(
        self, records: np.ndarray, start: np.ndarray, stop: np.ndarray, kept_as: np.ndarray, point: np.ndarray
    ) -> np.ndarray | None:
        """One op's records as a grid [points, ranges]; None if its points do not all keep the same ranges."""
        point, kept_as = point[records], kept_as[records]
        points = 1 + int(np.count_nonzero(np.diff(point)))
        if len(records) % points:
            return None
        point, sampled = point.reshape(points, -1), self._sampled[point]
        starts, stops = (column[:, records].reshape(len(column), points, -1) for column in (start, stop))
        same_ranges = (
            (starts == starts[:, :1]).all() and (stops == stops[:, :1]).all() and (point == point[:, :1]).all()
        )
        alike = same_ranges and (kept_as == kept_as[0]).all() and (sampled == sampled[0]).all()
        return records.reshape(points, -1) if alike else None

    def _group(self, points: np.ndarray, dtype: int, products: int) -> _PointGroup:
        key = points.tobytes(), dtype, products
        if key not in self._groups:
            number = int(self._group_numbers.take(1)[0])
            self._groups[key] = _PointGroup(number, points, dtype, products, self._region_numbers.take(len(points)))
        return self._groups[key]
