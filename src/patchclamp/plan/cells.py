"""Cells: many programs on one prompt, as arrays rather than one object per program.

A cell's records are `plan.table` records without addresses: `value` is a row index of a bank key, and `key` and
`beside` identify the keys. `place` turns them into records for a worker's table. Cells with the same number of records
form a group. Groups are made from bound programs (`cells_of`), or for a whole grid at once (`patched_cells`).

    N cells per group · R records per cell · K bank keys · P points
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.plan.bound import LINEAR, LOW_RANK, MATCH, NOISE, BoundOp, BoundProgram, PositionRange
from patchclamp.plan.table import RECORD, named, op_records, shape_of


class CellGroup(msgspec.Struct):
    """Cells with R records each, sorted by point.

    number [N]: the cells' indices among all cells
    records [N, R]: `RECORD`s whose `value` is a row index of the key
    point [N, R]: the records' points
    key [N, R]: the index of the bank key for `value`; −1: none
    beside [N, R]: the index of the bank key for `other` (a mask, a matrix or factors); −1: none
    """

    number: np.ndarray
    records: np.ndarray
    point: np.ndarray
    key: np.ndarray
    beside: np.ndarray

    def take(self, which: np.ndarray) -> CellGroup:
        """Select cells by index."""
        return CellGroup(
            self.number[which], self.records[which], self.point[which], self.key[which], self.beside[which]
        )


_Array = tuple[tuple[int, ...], bytes]
_Encoded = tuple[int, list[tuple[_Array, _Array, _Array, _Array, _Array]], list[str]]


class CellRecords(msgspec.Struct):
    """`count` cells of a prompt; a cell may have no records. `keys`: the bank keys that the cells read."""

    count: int
    groups: list[CellGroup]
    keys: list[str]

    def take(self, which: Sequence[int | None]) -> CellRecords:
        """Select cells by index, in this order, with the keys they read; None adds a cell without a program. Cells with
        the same number of records form one group."""
        number = np.array([-1 if i is None else i for i in which])
        place, groups = np.full(self.count + 1, -1), list[CellGroup]()
        for group in self.groups:
            place[:] = -1
            place[group.number] = np.arange(len(group.number))
            there = np.flatnonzero(place[number] >= 0)
            if len(there):
                groups.append(msgspec.structs.replace(group.take(place[number[there]]), number=there))
        groups = _merged(groups)
        indices = [index for group in groups for index in (group.key, group.beside)]
        used = np.unique(np.concatenate([[-1], *map(np.ravel, indices)]))[1:]
        again = np.full(len(self.keys) + 1, -1)  # maps −1 to −1
        again[used] = np.arange(len(used))
        for group in groups:
            group.key, group.beside = again[group.key], again[group.beside]
        return CellRecords(len(number), groups, [self.keys[i] for i in used.tolist()])

    def splits(self, sizes: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
        """Yield spans (begin, end) of consecutive cells whose keys have a total size of at most `most`; a cell that
        exceeds it gets its own span. `sizes` [K]: each key's size."""
        if sizes.sum() <= most:
            yield from [(0, self.count)] if self.count else []
            return
        pairs = [np.stack(np.broadcast_arrays(group.number[:, None], index), -1).reshape(-1, 2)
                 for group in self.groups for index in (group.key, group.beside)]  # fmt: skip
        joint = np.concatenate([np.zeros((0, 2), np.int64), *pairs])
        joint = joint[joint[:, 1] >= 0]
        number, key = joint[np.argsort(joint[:, 0], kind="stable")].T
        begin = 0
        while begin < self.count:
            rest = np.searchsorted(number, begin)
            keys, at = np.unique(key[rest:], return_index=True)  # the first cell that reads each key
            order = np.argsort(at)
            beyond = np.searchsorted(np.cumsum(sizes[keys[order]]), most, "right")
            end = self.count if beyond == len(keys) else int(number[rest + at[order][beyond]])
            yield begin, max(end, begin + 1)
            begin = max(end, begin + 1)

    def until(self, stop: int) -> CellRecords:
        """Restrict cells to positions below `stop`. The cells' programs must edit every token."""
        groups = []
        for group in self.groups:
            records = group.records.copy()
            records["stop"] = stop
            groups.append(msgspec.structs.replace(group, records=records))
        return CellRecords(self.count, groups, self.keys)

    def after(self, first: CellRecords) -> CellRecords:
        """Prepend the records of the single cell `first` to each cell's records."""
        keys = {key: i for i, key in enumerate(self.keys)}
        [before] = first.groups or [None]
        if before is None:
            return self
        numbers = np.array([*(keys.setdefault(key, len(keys)) for key in first.keys), -1])
        alone = CellGroup(np.zeros(1, np.int64), before.records, before.point, numbers[before.key],
                          numbers[before.beside])  # fmt: skip
        groups, rest = [], np.ones(self.count, bool)
        for group in self.groups:
            rest[group.number] = False
            both = [np.concatenate([np.broadcast_to(a, (len(b), a.shape[1])), b], 1) for a, b in (
                (alone.records, group.records), (alone.point, group.point), (alone.key, group.key),
                (alone.beside, group.beside))]  # fmt: skip
            order = np.argsort(both[1], axis=1, kind="stable")
            groups.append(CellGroup(group.number, *[np.take_along_axis(each, order, 1) for each in both]))
        without = np.flatnonzero(rest)
        if len(without):
            groups.append(msgspec.structs.replace(alone.take(np.zeros(len(without), np.int64)), number=without))
        return CellRecords(self.count, groups, list(keys))

    def to_bytes(self) -> bytes:
        """Serialize as msgpack."""
        groups = [[(each.shape, np.ascontiguousarray(each).tobytes()) for each in msgspec.structs.astuple(group)]
                  for group in self.groups]  # fmt: skip
        return msgspec.msgpack.encode((self.count, groups, self.keys))

    @classmethod
    def of_bytes(cls, data: bytes) -> CellRecords:
        """Deserialize. Raises `ValueError` for invalid bytes. Contents are not verified (`plan.verify`)."""
        count, groups, keys = msgspec.msgpack.decode(data, type=_Encoded)
        dtypes = np.int64, RECORD, np.int64, np.int64, np.int64

        def array(part: _Array, dtype: Any) -> np.ndarray:
            return np.frombuffer(part[1], dtype).reshape(part[0])

        return cls(count, [CellGroup(*map(array, group, dtypes)) for group in groups], keys)


def _merged(groups: Iterable[CellGroup]) -> list[CellGroup]:
    """Merge groups whose cells have the same number of records."""
    by_size: dict[int, list[CellGroup]] = {}
    for group in groups:
        by_size.setdefault(group.records.shape[1], []).append(group)
    return [CellGroup(*map(np.concatenate, zip(*map(msgspec.structs.astuple, of), strict=True)))
            for of in by_size.values()]  # fmt: skip


def cells_of(programs: Sequence[BoundProgram | None]) -> CellRecords:
    """Make the cells of bound programs; None is a cell without a program."""
    keys: dict[str, int] = {}
    by_shape: dict[object, list[int]] = {}
    for number, bound in enumerate(programs):
        if bound is not None and bound.ops:
            by_shape.setdefault(shape_of(bound.ops), []).append(number)
    groups = []
    for numbers in by_shape.values():
        of_shape = [programs[number] for number in numbers]
        groups.append(_group(numbers, [bound.ops for bound in of_shape if bound is not None], keys))
    return CellRecords(len(programs), [group for group in groups if group.records.shape[1]], list(keys))


class _Unplaced(dict[str, tuple[int, int]]):
    """Placeholder addresses for unplaced rows: a row's index is its offset."""

    def __missing__(self, key: str) -> tuple[int, int]:
        return 0, 1


def _group(numbers: list[int], programs: Sequence[Sequence[BoundOp]], keys: dict[str, int]) -> CellGroup:
    """Make a group from bound programs of one shape. `keys`: each bank key's index; new keys are added."""
    parts = []
    for ordinal, ops in enumerate(zip(*programs, strict=True)):
        first = ops[0]
        records, point = op_records(ops, ordinal, [_Unplaced()] * len(ops))
        shape = len(ops), len(first.points), len(first.ranges)
        key, beside = np.full(shape, -1), np.full(shape, -1)
        if first.values:
            key[:] = _numbers((op.values for op in ops), keys)[:, :, None]
        for row, op in zip(beside, ops, strict=True):  # a capture's matrix and a pattern's rows are optional
            for name in op.keys[len(op.values) : len(op.keys) - (op.condition is not None)]:
                row[:] = keys.setdefault(name, len(keys))
        key, beside = key.reshape(len(ops), -1), beside.reshape(len(ops), -1)
        before = []  # the keys of each record's preceding `MATCH` and `WHEN` records
        if first.condition is not None:
            before.append(_numbers(([op.condition.ids] for op in ops if op.condition), keys))
        if first.guard is not None:
            before.append(np.full((len(ops), 1), -1))
        key = np.stack([*(np.broadcast_to(of, key.shape) for of in before), key], 2).reshape(len(ops), -1)
        beside = np.stack([*[np.full_like(beside, -1)] * len(before), beside], 2).reshape(len(ops), -1)
        parts.append((records, point, key, beside))
    columns = [np.concatenate(each, axis=1) for each in zip(*parts, strict=True)]
    if (np.diff(columns[1], axis=1) >= 0).all():  # the usual case
        return CellGroup(np.array(numbers), *columns)
    order = np.argsort(columns[1], axis=1, kind="stable")
    return CellGroup(np.array(numbers), *(np.take_along_axis(column, order, 1) for column in columns))


def _numbers(names: Iterable[Sequence[str]], keys: dict[str, int]) -> np.ndarray:
    return np.array([[keys.setdefault(name, len(keys)) for name in of_op] for of_op in names], np.int64)


class Placed(msgspec.Struct):
    """Addresses of cells' keys on one worker, and the worker's shard of each point.

    begin, width [W, K]: the bank offset and width of each key's rows, for each of W ways to read the rows: whole, or
        the worker's columns of a point
    way [P]: each point's way · first, end [P]: the worker's columns of the point
    """

    begin: np.ndarray
    width: np.ndarray
    way: np.ndarray
    first: np.ndarray
    end: np.ndarray


def place(group: CellGroup, placed: Placed) -> tuple[np.ndarray, np.ndarray]:
    """Make the records of a group's cells for a worker's table, [N, R], and their count per point, [N, P]."""
    records, point, points = group.records.copy(), group.point, len(placed.way)
    match = records["kind"] == MATCH
    way = np.where(match, 0, placed.way[point])
    gated = (records["kind"] == LOW_RANK) & (records["x"] == 0)
    # a condition's ids and a gate's coefficients are whole on every worker
    for index, field, way_of in ((group.key, "value", np.where(gated, 0, way)), (group.beside, "other", way)):
        if placed.begin.shape[1]:
            row = records["value"] * placed.width[way_of, index] if field == "value" else 0
            records[field] = np.where(index >= 0, placed.begin[way_of, index] + row, records[field])
    if match.any():
        records["step"] = np.where(match, placed.width[0, group.key], records["step"])
    if way.any():
        _shard(records, placed.first[point], placed.end[point], way > 0)
    counts = np.bincount((np.arange(len(records))[:, None] * points + point).ravel(), minlength=len(records) * points)
    return records, counts.reshape(-1, points)


def _shard(records: np.ndarray, first: np.ndarray, end: np.ndarray, sharded: np.ndarray) -> None:
    """Restrict records to the worker's columns first … end − 1, as `runtime.shard_op` does for ops."""
    packed = records["columns"].astype(np.int64) & 0xFFFFFFFF
    low = np.maximum(np.where(packed > 0, packed & 0xFFFF, first), first) - first
    high = np.minimum(np.where(packed > 0, packed >> 16, end), end) - first
    columns = np.where((low == 0) & (high == end - first), 0, low | high << 16)
    elsewhere = sharded & (low >= high)
    records["columns"] = np.where(sharded & ~elsewhere, columns, records["columns"]).astype(np.int32)
    records["stop"] = np.where(elsewhere, records["start"], records["stop"])
    noise = sharded & (records["kind"] == NOISE)
    records["x"] = np.where(noise, first, records["x"])


def joined(several: Sequence[CellRecords]) -> CellRecords:
    """Join several prompts' cells, numbered consecutively across prompts."""
    if len(several) == 1:
        return several[0]
    keys: dict[str, int] = {}
    groups, count = [], 0
    for cells in several:
        numbers = np.array([*(keys.setdefault(key, len(keys)) for key in cells.keys), -1])  # maps −1 to −1
        for group in cells.groups:
            key, beside = numbers[group.key], numbers[group.beside]
            groups.append(CellGroup(group.number + count, group.records, group.point, key, beside))
        count += cells.count
    return CellRecords(count, _merged(groups), list(keys))


class PatchedPart(NamedTuple):
    """A point that a cell edits: the point's number, the columns (`pack_columns`; 0: all), and the bank key of the rows
    that it reads (None: no rows)."""

    point: int
    columns: int
    key: str | None


def patched_cells(
    scales: tuple[float, float], parts: Sequence[Sequence[PatchedPart]], ranges: Sequence[Sequence[PositionRange]],
    part_of: np.ndarray, range_of: np.ndarray,
) -> CellRecords:  # fmt: skip
    """Make the cells of a grid: h_scale · h + v_scale · v at a grid row's points and a grid column's positions.

    scales: (h_scale, v_scale)
    parts, ranges: each grid row's parts, and each grid column's ranges
    part_of, range_of [N]: each cell's grid row and column
    """
    keys: dict[str, int] = {}
    groups = []
    sizes_of_part, sizes_of_range = np.array([*map(len, parts)]), np.array([*map(len, ranges)])
    sizes = sizes_of_part[part_of] * (1 + int(sizes_of_range.max(initial=0))) + sizes_of_range[range_of]
    for size in np.unique(sizes):
        number = np.flatnonzero(sizes == size)
        chosen, columns = (np.unique(of[number], return_inverse=True) for of in (part_of, range_of))
        of_row = [sorted(parts[i]) for i in chosen[0]]
        index = [[-1 if part.key is None else keys.setdefault(part.key, len(keys)) for part in row] for row in of_row]
        point, packed = (np.array([[part[i] for part in row] for row in of_row])[chosen[1]] for i in (0, 1))
        key_NS = np.array(index)[chosen[1]]
        ranges_NQ4 = np.array([ranges[i] for i in columns[0]])[columns[1]]
        records = np.zeros((len(number), point.shape[1], ranges_NQ4.shape[1]), RECORD)
        fields = named(records, LINEAR)
        fields["kind"], fields["h_scale"], fields["v_scale"] = LINEAR, *scales
        fields["columns"] = packed[:, :, None]
        for i, field in enumerate(("start", "stop", "vector", "row_step")):
            fields[field] = ranges_NQ4[:, None, :, i]
        shape, count = records.shape, len(number)
        point, key = (np.broadcast_to(of[:, :, None], shape).reshape(count, -1) for of in (point, key_NS))
        groups.append(CellGroup(number, records.reshape(count, -1), point, key, np.full_like(key, -1)))
    return CellRecords(len(part_of), groups, list(keys))
