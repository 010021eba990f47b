"""The program table (the records of every admitted request, by slot and point) and the capture layout.

A slot is a request's index while it is admitted; slot 0 is reserved for requests without a program. Slot s has records
`records[first[s, p] : first[s, p + 1]]` at point p, in program order; a record applies to positions start … stop−1. The
tables have a fixed size and change only when a request arrives or ends, so a device copy stays valid in between.

A record is made from a bound op at one point and position range. All kinds share a 48-byte layout with kind-specific
fields: `FIELDS` names them, `named` reads them by name, and `_write` writes an action's fields.

A capture range holds a request's rows of consecutive positions, at several points, for one position range of a capture
op. Capture ranges with the same points and dtype, such as ranges of requests with the same program, form a point group.
A group has one region of the step's capture buffer per point; a region holds the rows of the group's ranges
consecutively. Steps are planned by ranges and regions, since records (one per range and point) are far more numerous.

    C capture ranges · G point groups · A regions · P points · Q position ranges per op
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from patchclamp.language.values import DTYPES
from patchclamp.plan.bound import (
    ADD_NORMED,
    ALL,
    APPLY,
    BLEND,
    CAPTURE,
    LATCH,
    LATCHES,
    LINEAR,
    LOW_RANK,
    MATCH,
    NEVER,
    NOISE,
    PROJECT,
    REMOVE,
    ROTATE,
    SPAN,
    STORE,
    TEST,
    WHEN,
    Action,
    All,
    Attended,
    Blend,
    BoundOp,
    Compare,
    Encoded,
    Factored,
    Guard,
    Keep,
    Latch,
    Linear,
    Noisy,
    NormedAdd,
    Projection,
    RemoveKeys,
    Rotation,
    RunCode,
    Span,
    Store,
    only_removes_keys,
)
from patchclamp.store.tensors import PROBE

READING = 32  # work of a feature or attention capture, in records
READINGS = 1 << 24  # number of reading ids: the integers that are exact in a record's fp32 field


class CaptureLayout(msgspec.Struct, dict=True, eq=False):
    """An immutable snapshot of all capture ranges and regions.

    Capture ranges [C], grouped by point group, and if pooled also by slot and op:
    range_number: the range's id in records
    slot: the request's slot
    op: the op's index in its program
    start, stop: positions start … stop−1
    group: the range's point group, 0 … G−1
    sampled: True if the range's rows are sampled rows

    Regions [A], ascending by `point`:
    region_number: the region's id in records
    region_group: the region's point group
    dtype: an index into `DTYPES`
    products: the number of values kept per row; 0: all

    groups: G
    pool [G]: the pooling of the op's rows in a step, as in `Keep.pool`; larger values are the number of the reading
        (features or attention) that encodes the rows; 0: neither
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
    pool: np.ndarray

    def __len__(self) -> int:
        """Return the number of capture ranges."""
        return len(self.range_number)

    @functools.cached_property
    def reduced(self) -> np.ndarray:
        """The regions pooled or encoded in the step, by index."""
        return np.flatnonzero(self.pool[self.region_group])

    @functools.cached_property
    def any_sampled(self) -> bool:
        """True if any range keeps sampled rows."""
        return bool(np.count_nonzero(self.sampled))

    @functools.cached_property
    def range_of_number(self) -> np.ndarray:
        """Each range's index, by id; −1 for unused ids."""
        return _inverse(self.range_number)

    @functools.cached_property
    def region_of_number(self) -> np.ndarray:
        """Each region's index, by id; −1 for unused ids."""
        return _inverse(self.region_number)

    def pairs(self, ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pair each range with every region of its group. Returns ranges and regions, by index."""
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
    """A pool of ids, reused lowest first. All ids in use are below `end`."""

    def __init__(self) -> None:
        self._returned = np.zeros(0, np.int64)
        self._unsorted: list[np.ndarray] = []  # ids returned since the last `take`
        self.end = 0

    def take(self, count: int) -> np.ndarray:
        if self._unsorted:
            self._returned, self._unsorted = np.sort(np.concatenate([self._returned, *self._unsorted])), []
        reused, self._returned = self._returned[:count], self._returned[count:]
        first, self.end = self.end, self.end + count - len(reused)
        return np.concatenate([reused, np.arange(first, self.end)])

    def give(self, numbers: np.ndarray) -> None:
        self._unsorted.append(numbers)


class _PointGroup(msgspec.Struct):
    """A point group. `regions`: the ids of its regions; `ranges`: the number of its ranges."""

    number: int
    points: np.ndarray
    dtype: int
    products: int
    pool: int
    regions: np.ndarray
    ranges: int = 0


class CaptureRanges:
    """The current capture ranges of all slots. `sampled` [P]: True for points of sampled rows."""

    def __init__(self, sampled: np.ndarray) -> None:
        self._sampled = sampled
        self._columns = np.zeros((5, 64), np.int64)  # slot, op, start, stop, group id; by range id
        self._range_numbers, self._region_numbers, self._group_numbers = _NumberPool(), _NumberPool(), _NumberPool()
        # by slot: its ranges' ids, and the count of its ranges in each group
        self._of_slot: dict[int, tuple[np.ndarray, list[tuple[_PointGroup, int]]]] = {}
        self._groups: dict[tuple[bytes, int, int, int], _PointGroup] = {}  # by points, dtype, products and pool
        self._layout: CaptureLayout | None = None

    def __len__(self) -> int:
        """Return the number of capture ranges."""
        return sum(group.ranges for group in self._groups.values())

    def add(
        self, slots: np.ndarray, op: np.ndarray, start: np.ndarray, stop: np.ndarray, dtype: np.ndarray,
        point: np.ndarray, products: np.ndarray, pool: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Add the ranges of N programs with K capture records each, sorted by point. Programs differ only in `slots`
        [N], `start` and `stop` [N, K]. Returns the range ids [N, K] and region ids [K]."""
        range_number, region_number = np.zeros(start.shape, np.int64), np.zeros(len(op), np.int64)
        kept_as = dtype + len(DTYPES) * (pool + READINGS * products)
        grids = self._grids(op, start, stop, kept_as, point)
        first_records = np.concatenate([np.zeros(0, np.int64), *(grid[0] for grid in grids)])  # one id per range
        numbers = self._range_numbers.take(len(slots) * len(first_records)).reshape(len(slots), -1)
        self._reserve(self._range_numbers.end)
        group_number, begin, group_counts = np.zeros(len(first_records), np.int64), 0, []
        for grid in grids:
            first, mine = grid[0, 0], slice(begin, begin + grid.shape[1])
            group = self._group(point[grid[:, 0]], int(dtype[first]), int(products[first]), int(pool[first]))
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
        """Remove a slot's ranges."""
        if slot not in self._of_slot:
            return
        numbers, group_counts = self._of_slot.pop(slot)
        self._columns[0, numbers] = 0
        self._range_numbers.give(numbers)
        for group, count in group_counts:
            group.ranges -= count
            if group.ranges == 0:
                del self._groups[group.points.tobytes(), group.dtype, group.products, group.pool]
                self._region_numbers.give(group.regions)
                self._group_numbers.give(np.array([group.number]))
        self._layout = None

    def layout(self) -> CaptureLayout:
        """Return the current layout, cached until a program arrives or ends."""
        if self._layout is None:
            self._layout = self._make_layout()
        return self._layout

    def _make_layout(self) -> CaptureLayout:
        groups, empty = list(self._groups.values()), np.zeros(0, np.int64)
        index_of_group = np.zeros(self._group_numbers.end, np.int64)
        index_of_group[[group.number for group in groups]] = np.arange(len(groups))
        number = np.flatnonzero(self._columns[0, : self._range_numbers.end])
        if any(group.pool for group in groups):
            number = number[np.lexsort((*self._columns[1::-1, number], index_of_group[self._columns[4, number]]))]
        elif len(groups) > 1:
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
            len(groups), np.array([g.pool for g in groups], np.int64),
        )  # fmt: skip

    def _reserve(self, ranges: int) -> None:
        if ranges > self._columns.shape[1]:
            wider = np.zeros((5, 2 * ranges), np.int64)
            wider[:, : self._columns.shape[1]] = self._columns
            self._columns = wider

    def _grids(
        self, op: np.ndarray, start: np.ndarray, stop: np.ndarray, kept_as: np.ndarray, point: np.ndarray
    ) -> list[np.ndarray]:
        """Arrange the records in grids [points, ranges]: one grid per op whose points all keep the same ranges; for
        other records, one grid per point and `kept_as` (dtype, pool and products in one integer)."""
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
        """Arrange one op's records as a grid [points, ranges]; None if its points do not all keep the same ranges."""
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

    def _group(self, points: np.ndarray, dtype: int, products: int, pool: int) -> _PointGroup:
        key = points.tobytes(), dtype, products, pool
        if key not in self._groups:
            number = int(self._group_numbers.take(1)[0])
            regions = self._region_numbers.take(len(points))
            self._groups[key] = _PointGroup(number, points, dtype, products, pool, regions)
        return self._groups[key]


RECORD = np.dtype(
    [
        ("start", "<i4"), ("stop", "<i4"),   # positions
        ("kind", "<i4"), ("step", "<i4"),    # step 1: one row of the value per position, 0: one for all
        ("value", "<i8"),                    # offset of the value in the bank
        ("x", "<f4"), ("y", "<f4"),
        ("other", "<i8"),
        ("factor", "<f4"),                   # written by the kernel for rows that take several passes: y·r or p′ − p
        ("columns", "<i4"),                  # the edited columns: first | end << 16; 0: the whole row
    ]
)  # fmt: skip
# Field names by kind, besides start, stop, kind and columns. A capture's region is the op's index until the record
# is installed in a table; with 0 products the row itself is kept.
FIELDS: dict[int, dict[str, str]] = {
    CAPTURE: {"range": "step", "region": "value", "dtype": "x", "products": "y", "matrix": "other", "pool": "factor"},
    LINEAR: {"row_step": "step", "vector": "value", "h_scale": "x", "v_scale": "y"},
    BLEND: {"row_step": "step", "vector": "value", "alpha": "y", "mask": "other"},
    PROJECT: {"row_step": "step", "vector": "value", "low": "x", "high": "y"},
    NOISE: {"relative": "step", "stream": "value", "first_column": "x", "std": "y", "seed": "other"},
    MATCH: {"count": "step", "ids": "value", "expected": "x"},
    APPLY: {"code": "value"},
    STORE: {"row_step": "step", "vector": "value"},
    TEST: {"row_step": "step", "vector": "value", "threshold": "x", "bit": "other"},
    ALL: {"mask": "value", "negated": "x", "wanted": "other", "bit": "step"},
    LATCH: {"latch": "value", "bit": "step", "last": "x"},
    WHEN: {"latch": "value", "bit": "step"},  # latch −1: the bit
    LOW_RANK: {"row_step": "step", "vector": "value", "toward": "x", "rank": "y", "factors": "other"},
    ADD_NORMED: {"row_step": "step", "vector": "value", "scale": "y"},
    ROTATE: {"row_step": "step", "vector": "value", "cos": "x", "sin": "y", "relative": "other"},
    SPAN: {"latch": "value", "bit": "step", "opening": "x", "closing": "y", "inside": "other"},
    REMOVE: {"first": "step", "end": "value"},
}


def _layout(kind: int) -> np.dtype:
    """Return `RECORD` with a kind's field names."""
    assert RECORD.fields is not None
    names = {field: field for field in ("start", "stop", "kind", "columns")}
    names |= {field: name for name, field in FIELDS[kind].items()}
    columns = [(names[field], dtype, offset) for field, (dtype, offset, *_) in RECORD.fields.items() if field in names]
    own_names, dtypes, offsets = zip(*columns, strict=True)
    return np.dtype({"names": own_names, "formats": dtypes, "offsets": offsets, "itemsize": RECORD.itemsize})


LAYOUTS = {kind: _layout(kind) for kind in FIELDS}


def named(records: np.ndarray, kind: int) -> np.ndarray:
    """View records of one kind with that kind's field names."""
    return records.view(LAYOUTS[kind])


PRODUCTS = 256  # products that count as one record of work
Addresses = Mapping[str, tuple[int, int]]  # by bank key: the offset of its rows, in elements, and the row width
Several = Sequence[Addresses]  # one per program
Number = int | np.ndarray


def records_of(ops: Sequence[BoundOp], addresses: Addresses, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Make a bound program's records, sorted by point, then in program order. Also returns counts per point, [P]."""
    records, counts = records_of_alike([ops], [addresses], points)
    return records[0], counts[0]


def shape_of(ops: Sequence[BoundOp]) -> Hashable:
    """Return a key that is equal for programs whose records can be made together: vectors, scales, positions and points
    may differ. Actions of one kind may have different fields (`APPLY`), so their class is part of the key."""
    return tuple([
        (type(op.action), len(op.points), len(op.ranges), len(op.values), op.condition is None, op.guard is None)
        for op in ops
    ])  # fmt: skip


def records_of_alike(
    programs: Sequence[Sequence[BoundOp]], addresses: Sequence[Addresses], points: int, first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Make the records of programs of one shape, [N, R], sorted by point, then in program order. Also returns their
    count per point, [N, P]. Each program has its own addresses. `first`: the index of each program's first op."""
    of_ops = [op_records(ops, ordinal, addresses) for ordinal, ops in enumerate(zip(*programs, strict=True), first)]
    number = np.arange(len(programs))[:, None]
    if not of_ops:
        return np.zeros((len(programs), 0), RECORD), np.zeros((len(programs), points), np.int64)
    records, point = (np.concatenate(parts, axis=1) for parts in zip(*of_ops, strict=True))
    counts = np.bincount((number * points + point).ravel(), minlength=len(programs) * points)
    return records[number, np.argsort(point, axis=1, kind="stable")], counts.reshape(-1, points)


def record_count(ops: Sequence[BoundOp]) -> int:
    """Return the maximum number of records of a bound program, on a worker with all points. An attention edit has
    records both at its queries and at the result, or one for each range of removed keys."""
    removes = only_removes_keys(ops)
    return sum(
        len(op.points) * len(op.ranges)
        * (max(2, len(op.action.keys) * removes) if isinstance(op.action, Attended)
           else 1 + (op.condition is not None) + (op.guard is not None))
        for op in ops
    )  # fmt: skip


def record_work(ops: Sequence[BoundOp]) -> int:
    """Return a bound program's work, in records. A matrix counts once per `PRODUCTS` rows, since a step computes a
    row's products one by one. Each feature or attention capture adds `READING`."""
    ranks = {Keep: "products", Factored: "rank"}
    products = ((getattr(op.action, ranks.get(type(op.action), ""), 0), op) for op in ops)
    read = sum(isinstance(op.action, Keep) and op.action.reader is not None for op in ops)
    return (
        record_count(ops)
        + sum((rows - 1) // PRODUCTS * record_count([op]) for rows, op in products if rows)
        + READING * read
    )


def op_records(ops: Sequence[BoundOp], ordinal: int, addresses: Sequence[Addresses]) -> tuple[np.ndarray, np.ndarray]:
    """Make one op's records in N programs of one shape, [N, ·], one per range and point. Also returns their points."""
    first, flat = ops[0], itertools.chain.from_iterable
    ranges = _numbers(flat(flat(op.ranges for op in ops))).reshape(len(ops), 1, len(first.ranges), 4)
    points = _numbers(flat(op.points for op in ops)).reshape(len(ops), len(first.points))
    records_NPQ = np.zeros((len(ops), len(first.points), len(first.ranges)), RECORD)
    records_NPQ["start"], records_NPQ["stop"] = ranges[..., 0], ranges[..., 1]
    records_NPQ["step"], records_NPQ["kind"] = ranges[..., 3], first.kind
    records_NPQ["columns"] = _column([op.columns for op in ops]).astype(np.int32)
    if first.values:
        places = _numbers(flat(known[key] for op, known in zip(ops, addresses, strict=True) for key in op.values))
        begin, width = np.moveaxis(places.reshape(len(ops), -1, 1, 2), 3, 0)
        records_NPQ["value"] = begin + ranges[..., 2] * width
    if first.points:
        _write(first.action, named(records_NPQ, first.kind), [op.action for op in ops], addresses, ordinal)
    records, point = records_NPQ.reshape(len(ops), -1), np.repeat(points, len(first.ranges), axis=1)
    before = []  # records that make the next record conditional
    if first.condition is not None:
        conditions = [op.condition for op in ops if op.condition is not None]
        ids = np.array([known[each.ids] for each, known in zip(conditions, addresses, strict=True)])
        expected = np.array([[not each.others] for each in conditions])
        before.append(match_records(records, ids[:, :1], ids[:, 1:], expected))
    if first.guard is not None:
        before.append(_when_records(records, [op.guard for op in ops if op.guard is not None]))
    several = np.stack([*before, records], 2).reshape(len(ops), -1)
    return several, np.repeat(point, 1 + len(before), axis=1)


def _numbers(numbers: Iterable[int]) -> np.ndarray:
    return np.fromiter(numbers, np.int64)


def _column(of_programs: Sequence[float]) -> np.ndarray:
    """Return an array of one value per program, shaped to broadcast over records [N, P, Q]."""
    return np.array(of_programs)[:, None, None]


def match_records(records: np.ndarray, ids: Number, count: Number, expected: bool | np.ndarray) -> np.ndarray:
    """Make the `MATCH` record that precedes each record. The record then acts only if the token's id is among the given
    ids or, if `expected` is False, is not. The bank holds the `count` ids, ascending, starting at offset `ids`."""
    conditions = np.zeros_like(records)
    conditions["start"], conditions["stop"], conditions["kind"] = records["start"], records["stop"], MATCH
    fields = named(conditions, MATCH)
    fields["ids"], fields["count"], fields["expected"] = ids, count, expected
    return conditions


def _when_records(records: np.ndarray, guards: Sequence[Guard]) -> np.ndarray:
    """Make the `WHEN` record that precedes each record, from each op's guard."""
    whens = np.zeros_like(records)
    whens["start"], whens["stop"], whens["kind"] = records["start"], records["stop"], WHEN
    whens["value"], whens["step"] = ([[getattr(guard, name)] for guard in guards] for name in ("latch", "bit"))
    return whens


@functools.singledispatch
def _write(first: Action, fields: np.ndarray, actions: Sequence[Action], addresses: Several, ordinal: int) -> None:
    """Write the fields of the programs' actions, all of `first`'s kind, to records [N, P, Q] viewed with that kind's
    field names. `ordinal`: the op's index."""
    raise NotImplementedError(f"{type(first).__name__} has no records")


@_write.register
def _capture(first: Keep, fields: np.ndarray, actions: Sequence[Keep], addresses: Several, ordinal: int) -> None:
    matrices = [known[a.matrix][0] if a.matrix else 0 for a, known in zip(actions, addresses, strict=True)]
    fields["dtype"] = _column([action.dtype for action in actions])
    fields["region"] = _column([ordinal + (PROBE if action.is_private else 0) for action in actions])
    fields["products"], fields["matrix"] = _column([action.products for action in actions]), _column(matrices)
    fields["pool"] = _column([action.pool * action.in_step for action in actions])


@_write.register
def _store(first: Store, fields: np.ndarray, actions: Sequence[Store], addresses: Several, ordinal: int) -> None:
    pass  # nothing to write: rows are stored at `value`, which all kinds share


@_write.register
def _test(first: Compare, fields: np.ndarray, actions: Sequence[Compare], addresses: Several, ordinal: int) -> None:
    fields["threshold"], fields["bit"] = (_column([getattr(a, name) for a in actions]) for name in ("threshold", "bit"))


@_write.register
def _all(first: All, fields: np.ndarray, actions: Sequence[All], addresses: Several, ordinal: int) -> None:
    for name in ("mask", "wanted", "negated", "bit"):
        fields[name] = _column([getattr(action, name) for action in actions])


@_write.register
def _latch(first: Latch, fields: np.ndarray, actions: Sequence[Latch], addresses: Several, ordinal: int) -> None:
    for name in ("latch", "bit", "last"):
        fields[name] = _column([getattr(action, name) for action in actions])


@_write.register
def _span(first: Span, fields: np.ndarray, actions: Sequence[Span], addresses: Several, ordinal: int) -> None:
    for name in ("latch", "bit", "opening", "closing", "inside"):
        fields[name] = _column([getattr(action, name) for action in actions])


@_write.register
def _linear(first: Linear, fields: np.ndarray, actions: Sequence[Linear], addresses: Several, ordinal: int) -> None:
    fields["h_scale"] = _column([action.h_scale for action in actions])
    fields["v_scale"] = _column([action.v_scale for action in actions])


@_write.register
def _blend(first: Blend, fields: np.ndarray, actions: Sequence[Blend], addresses: Several, ordinal: int) -> None:
    masks = [known[action.mask][0] for action, known in zip(actions, addresses, strict=True)]
    fields["alpha"], fields["mask"] = _column([action.alpha for action in actions]), _column(masks)


@_write.register
def _project(
    first: Projection, fields: np.ndarray, actions: Sequence[Projection], addresses: Several, ordinal: int
) -> None:
    fields["low"], fields["high"] = _column([action.low for action in actions]), _column([a.high for a in actions])


@_write.register
def _low_rank(
    first: Factored, fields: np.ndarray, actions: Sequence[Factored], addresses: Several, ordinal: int
) -> None:
    factors = [known[action.factors][0] for action, known in zip(actions, addresses, strict=True)]
    fields["toward"], fields["rank"] = (_column([getattr(a, name) for a in actions]) for name in ("toward", "rank"))
    fields["factors"] = _column(factors)


@_write.register
def _add_normed(
    first: NormedAdd, fields: np.ndarray, actions: Sequence[NormedAdd], addresses: Several, ordinal: int
) -> None:
    fields["scale"] = _column([action.scale for action in actions])


@_write.register
def _rotate(first: Rotation, fields: np.ndarray, actions: Sequence[Rotation], addresses: Several, ordinal: int) -> None:
    for name in ("cos", "sin", "relative"):
        fields[name] = _column([getattr(action, name) for action in actions])


@_write.register
def _noise(first: Noisy, fields: np.ndarray, actions: Sequence[Noisy], addresses: Several, ordinal: int) -> None:
    fields["std"] = _column([action.std for action in actions])
    fields["seed"] = _column([action.seed for action in actions])
    fields["relative"] = _column([action.relative for action in actions])
    fields["first_column"] = _column([action.first_column for action in actions])
    fields["stream"] = np.array([action.streams for action in actions], np.int64)[..., None]


@_write.register
def _code(first: RunCode, fields: np.ndarray, actions: Sequence[RunCode], addresses: Several, ordinal: int) -> None:
    fields["code"] = _column([action.code for action in actions])


@_write.register
def _encoded(first: Encoded, fields: np.ndarray, actions: Sequence[Encoded], addresses: Several, ordinal: int) -> None:
    """Write nothing: a worker runs the action as code, and cuts need only its points and positions."""


@_write.register
def _attended(
    first: Attended, fields: np.ndarray, actions: Sequence[Attended], addresses: Several, ordinal: int
) -> None:
    """Write nothing, as for `Encoded`."""


@_write.register
def _remove_keys(
    first: RemoveKeys, fields: np.ndarray, actions: Sequence[RemoveKeys], addresses: Several, ordinal: int
) -> None:
    for name in ("first", "end"):
        fields[name] = _column([getattr(action, name) for action in actions])


def columns_of(record: np.void) -> slice:
    """Return the columns of the row that a record edits."""
    word = int(record["columns"]) & 0xFFFFFFFF
    return slice(word & 0xFFFF, word >> 16) if word else slice(None)


class ProgramTable:
    """The records of up to `slots` requests at `points` points, with room for `records` in total.

    first [slots + 1, points + 1]: int32, the first record of each slot at each point
    generation [slots + 1]: int32, the number of programs each slot has held
    records [records]: the records, of dtype `RECORD`
    version: the number of changes to the table
    changed: the slots, and the (begin, end) of records, written since the last update of the device copy
    sampled [points]: True if a point has only sampled rows; default: no point
    coded: slots with `APPLY` records
    scripted: the coded slots with code other than attention edits (whose code numbers are negative)
    deciding: slots with `TEST` or `SPAN` records
    removing: slots with `REMOVE` records
    latches [slots + 1, LATCHES]: int32, each slot's latch positions, written by host kernels
    drafted [slots + 1]: int32, the first position of each slot's last step if that step had draft tokens, else NEVER
    """

    def __init__(self, slots: int, points: int, records: int, sampled: np.ndarray | None = None) -> None:
        self.first: np.ndarray = np.zeros((slots + 1, points + 1), np.int32)
        self.generation: np.ndarray = np.zeros(slots + 1, np.int32)
        self._acts = np.zeros((slots + 1, points), bool)  # True if a slot has records at a point
        self._acting = np.zeros(points, np.int64)  # the number of slots with records at a point
        self.records: np.ndarray = np.zeros(records, RECORD)
        self.version: int = 0
        self.changed: tuple[set[int], list[tuple[int, int]]] = (set(), [])
        self.sampled: np.ndarray = np.zeros(points, bool) if sampled is None else sampled
        self.captures: CaptureRanges = CaptureRanges(self.sampled)
        self.coded: set[int] = set()
        self.scripted: set[int] = set()
        self.deciding: set[int] = set()
        self.removing: set[int] = set()
        self.latches: np.ndarray = np.full((slots + 1, LATCHES), NEVER, np.int32)
        self.drafted: np.ndarray = np.full(slots + 1, NEVER, np.int32)
        self._installed: set[int] = set()

    def install(self, records: np.ndarray, counts: np.ndarray, slot: int, begin: int) -> None:
        """Write a request's records, sorted by point, `counts` [points] at each. The free `slot`, and the records
        starting at `begin`, are allocated by `plan.room`."""
        self.install_alike(records[None], counts[None], np.array([slot]), np.array([begin]))

    def install_alike(self, records: np.ndarray, counts: np.ndarray, slots: np.ndarray, begins: np.ndarray) -> None:
        """Install requests with the same number of records, [N, R]; counts [N, points], slots [N], begins [N]."""
        places = begins[:, None] + np.arange(records.shape[1])
        self.generation[slots] = self.generation[slots] % (1 << 30) + 1
        self.records[places] = records
        self.first[slots, 0] = begins
        self.first[slots, 1:] = begins[:, None] + np.cumsum(counts, axis=1)
        self._acts[slots] = counts > 0
        self._acting += np.count_nonzero(counts, axis=0)
        self._add_captures(slots, places, records, counts)
        is_code = records["kind"] == APPLY
        self.coded.update(slots[is_code.any(axis=1)].tolist())
        self.scripted.update(slots[(is_code & (records["value"] >= 0)).any(axis=1)].tolist())
        self.deciding.update(slots[np.isin(records["kind"], (TEST, SPAN)).any(axis=1)].tolist())
        self.removing.update(slots[(records["kind"] == REMOVE).any(axis=1)].tolist())
        self.latches[slots] = self.drafted[slots, None] = NEVER
        for slot, begin in zip(slots.tolist(), begins.tolist(), strict=True):
            self._mark_changed(slot, begin, begin + records.shape[1])
            self._installed.add(slot)

    def drop(self, slot: int) -> None:
        """Free a slot and its records."""
        self._installed.remove(slot)
        self._acting -= self._acts[slot]
        self.first[slot] = self._acts[slot] = 0
        self.captures.drop(slot)
        self.coded.discard(slot)
        self.scripted.discard(slot)
        self.deciding.discard(slot)
        self.removing.discard(slot)
        self._mark_changed(slot, 0, 0)

    def drop_all(self, slots: Sequence[int]) -> None:
        """Free slots without captures or code, and their records."""
        if len(slots):
            self._installed.difference_update(slots)
            self.deciding.difference_update(slots)
            self.removing.difference_update(slots)
            index = np.array(slots)
            self._acting -= self._acts[index].sum(0)
            self.first[index] = self._acts[index] = 0
            self.version += 1
            self.changed[0].update(slots)

    def active(self, slots: np.ndarray) -> np.ndarray:
        """Mark the points where any of the slots has records, bool [points]. Slots other than 0 must be unique."""
        if np.count_nonzero(slots) == len(self):
            return self._acting > 0
        return np.logical_or.reduce(self._acts[slots], axis=0)

    def acting_at(self, point: int, slots: np.ndarray) -> list[int]:
        """Return the slots in `slots` with records at a point."""
        return slots[self._acts[slots, point]].tolist()

    def unsettled(self, slot: np.ndarray, position: np.ndarray, samples: np.ndarray | None) -> np.ndarray:
        """Begin a planned step; the arguments are fields of its `Batch`. Returns, by slot, the position from which
        latches are cleared, [slots + 1]; NEVER: none are cleared.

        Only draft tokens of the slot's last step can have been rejected, and this step computes from the first rejected
        position onward. After a preemption it also recomputes earlier positions, but keeps their decisions.
        """
        since = np.full(len(self.drafted), NEVER, np.int32)
        since[slot] = np.maximum(self.drafted[slot], position)
        self.drafted[slot] = NEVER if samples is None else np.where(samples > 1, position, NEVER)
        return since

    def __len__(self) -> int:
        """Return the number of admitted requests."""
        return len(self._installed)

    def _mark_changed(self, slot: int, begin: int, end: int) -> None:
        self.version += 1
        slots, records = self.changed
        slots.add(slot)
        if end > begin:
            records.append((begin, end))

    def take_changed(self) -> tuple[set[int], list[tuple[int, int]]]:
        """Return `changed` and reset it."""
        changed, self.changed = self.changed, (set(), [])
        return changed

    def _add_captures(self, slots: np.ndarray, places: np.ndarray, records: np.ndarray, counts: np.ndarray) -> None:
        """Add the captures among installed records [N, R], in one call if requests differ only in positions."""
        captures = records["kind"] == CAPTURE
        if not captures.any():
            return
        kept = np.flatnonzero(captures[0])
        fields = named(records[:, kept], CAPTURE)
        same = captures, counts, *(fields[name] for name in ("region", "dtype", "products", "pool"))
        if len(slots) > 1 and not all((each == each[0]).all() for each in same):
            for i in range(len(slots)):
                self._add_captures(slots[i : i + 1], places[i : i + 1], records[i : i + 1], counts[i : i + 1])
            return
        names = ("region", "dtype", "products", "pool", "start", "stop")
        op, dtype, products, pool, start, stop = (fields[name].astype(np.int64) for name in names)
        point = np.repeat(np.arange(counts.shape[1]), counts[0])[kept]
        in_table, index = named(self.records, CAPTURE), places[:, kept]
        numbers = self.captures.add(slots, op[0], start, stop, dtype[0], point, products[0], pool[0])
        in_table["range"][index], in_table["region"][index] = numbers
