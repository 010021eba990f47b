"""Records: the rows of the device's tables, made from bound ops.

All kinds share one layout of 48 bytes; what its fields hold depends on the kind. `FIELDS` gives each kind's own names
of the fields, `named` reads records by these names, and `_write` writes the fields of an action.

    P points · Q position ranges of an op
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from patchclamp.plan.bound import (
    APPLY,
    BLEND,
    CAPTURE,
    LINEAR,
    MATCH,
    NOISE,
    PROJECT,
    STORE,
    Action,
    Blend,
    BoundOp,
    Keep,
    Linear,
    Noisy,
    Project,
    RunCode,
    Store,
)  # fmt: skip

RECORD = np.dtype(
    [
        ("start", "<i4"), ("stop", "<i4"),   # positions
        ("kind", "<i4"), ("step", "<i4"),    # 1: a row of the value for each position, 0: one for all
        ("value", "<i8"),                    # the value's first number in the bank
        ("x", "<f4"), ("y", "<f4"),
        ("other", "<i8"),
        ("factor", "<f4"),                   # written by the kernel, for rows that it takes in passes: y·r or p′ − p
        ("columns", "<i4"),                  # those that are changed: the first, and the end << 16; 0: all of the row
    ]
)  # fmt: skip
# by kind: its own names of the fields, beside start, stop, kind and columns. A capture's region is the op's number
# until it is installed in a table; with 0 products the row itself is kept
FIELDS: dict[int, dict[str, str]] = {
    CAPTURE: {"range": "step", "region": "value", "dtype": "x", "products": "y", "matrix": "other"},
    LINEAR: {"row_step": "step", "vector": "value", "h_scale": "x", "v_scale": "y"},
    BLEND: {"row_step": "step", "vector": "value", "alpha": "y", "mask": "other"},
    PROJECT: {"row_step": "step", "vector": "value", "low": "x", "high": "y"},
    NOISE: {"relative": "step", "stream": "value", "first_column": "x", "std": "y", "seed": "other"},
    MATCH: {"count": "step", "ids": "value", "expected": "x"},
    APPLY: {"code": "value"},
    STORE: {"row_step": "step", "vector": "value"},
}


def _layout(kind: int) -> np.dtype:
    """`RECORD` with a kind's own names of the fields."""
    assert RECORD.fields is not None
    names = {field: field for field in ("start", "stop", "kind", "columns")}
    names |= {field: name for name, field in FIELDS[kind].items()}
    columns = [(names[field], dtype, offset) for field, (dtype, offset, *_) in RECORD.fields.items() if field in names]
    own_names, dtypes, offsets = zip(*columns, strict=True)
    return np.dtype({"names": own_names, "formats": dtypes, "offsets": offsets, "itemsize": RECORD.itemsize})


LAYOUTS = {kind: _layout(kind) for kind in FIELDS}


def named(records: np.ndarray, kind: int) -> np.ndarray:
    """Records of one kind by that kind's own names: a view."""
    return records.view(LAYOUTS[kind])


Addresses = Mapping[str, tuple[int, int]]  # by bank key: the number its rows begin at, and their width
Several = Sequence[Addresses]  # of each program
Number = int | np.ndarray


def records_of(ops: Sequence[BoundOp], addresses: Addresses, points: int) -> tuple[np.ndarray, np.ndarray]:
    """A bound program's records sorted by point (program order within), and how many each point has, [P]."""
    records, counts = records_of_alike([ops], [addresses], points)
    return records[0], counts[0]


def shape_of(ops: Sequence[BoundOp]) -> Hashable:
    """What programs have in common whose records can be made together. They differ in numbers alone: vectors, scales,
    positions, and which points."""
    return tuple([(op.kind, len(op.points), len(op.ranges), len(op.values), op.condition is None) for op in ops])


def records_of_alike(
    programs: Sequence[Sequence[BoundOp]], addresses: Sequence[Addresses], points: int
) -> tuple[np.ndarray, np.ndarray]:
    """The records of programs of one shape, [N, R], sorted by point (program order within), and how many each point
    has, [N, P]. Each program has its own addresses."""
    of_ops = [_records(ops, ordinal, addresses) for ordinal, ops in enumerate(zip(*programs, strict=True))]
    number = np.arange(len(programs))[:, None]
    if not of_ops:
        return np.zeros((len(programs), 0), RECORD), np.zeros((len(programs), points), np.int64)
    records, point = (np.concatenate(parts, axis=1) for parts in zip(*of_ops, strict=True))
    counts = np.bincount((number * points + point).ravel(), minlength=len(programs) * points)
    return records[number, np.argsort(point, axis=1, kind="stable")], counts.reshape(-1, points)


def record_count(ops: Sequence[BoundOp]) -> int:
    """How many records a bound program has, on a worker that has all points."""
    return sum(len(op.points) * len(op.ranges) * (2 if op.condition else 1) for op in ops)


def _records(ops: Sequence[BoundOp], ordinal: int, addresses: Sequence[Addresses]) -> tuple[np.ndarray, np.ndarray]:
    """The records of the op that N programs of one shape have in the same place, [N, ·], every range at every point,
    and the point of each."""
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
    if first.condition is None:
        return records, point
    conditions = [op.condition for op in ops if op.condition is not None]
    ids = np.array([known[each.ids] for each, known in zip(conditions, addresses, strict=True)])
    expected = np.array([[not each.others] for each in conditions])
    matches = match_records(records, ids[:, :1], ids[:, 1:], expected)
    return np.stack([matches, records], 2).reshape(len(ops), -1), np.repeat(point, 2, axis=1)


def _numbers(numbers: Iterable[int]) -> np.ndarray:
    return np.fromiter(numbers, np.int64)


def _column(of_programs: Sequence[float]) -> np.ndarray:
    """A number of each program, to stand in all its records [N, P, Q]."""
    return np.array(of_programs)[:, None, None]


def match_records(records: np.ndarray, ids: Number, count: Number, expected: bool | np.ndarray) -> np.ndarray:
    """The `MATCH` record that stands before each record: it acts only where the token's id is one of some ids, or if
    not `expected` is none of them. The `count` ids lie in the bank, ascending, from number `ids` on."""
    conditions = np.zeros_like(records)
    conditions["start"], conditions["stop"], conditions["kind"] = records["start"], records["stop"], MATCH
    fields = named(conditions, MATCH)
    fields["ids"], fields["count"], fields["expected"] = ids, count, expected
    return conditions


@functools.singledispatch
def _write(first: Action, fields: np.ndarray, actions: Sequence[Action], addresses: Several, ordinal: int) -> None:
    """Writes the fields of the programs' actions, all of the kind of the `first`, in records [N, P, Q] by the names of
    that kind. `ordinal`: the op's number."""
    raise NotImplementedError(f"no record for {type(first).__name__}")


@_write.register
def _capture(first: Keep, fields: np.ndarray, actions: Sequence[Keep], addresses: Several, ordinal: int) -> None:
    matrices = [known[a.matrix][0] if a.matrix else 0 for a, known in zip(actions, addresses, strict=True)]
    fields["dtype"], fields["region"] = _column([action.dtype for action in actions]), ordinal
    fields["products"], fields["matrix"] = _column([action.products for action in actions]), _column(matrices)


@_write.register
def _store(first: Store, fields: np.ndarray, actions: Sequence[Store], addresses: Several, ordinal: int) -> None:
    pass  # where its rows go is what values have in common


@_write.register
def _linear(first: Linear, fields: np.ndarray, actions: Sequence[Linear], addresses: Several, ordinal: int) -> None:
    fields["h_scale"] = _column([action.h_scale for action in actions])
    fields["v_scale"] = _column([action.v_scale for action in actions])


@_write.register
def _blend(first: Blend, fields: np.ndarray, actions: Sequence[Blend], addresses: Several, ordinal: int) -> None:
    masks = [known[action.mask][0] for action, known in zip(actions, addresses, strict=True)]
    fields["alpha"], fields["mask"] = _column([action.alpha for action in actions]), _column(masks)


@_write.register
def _project(first: Project, fields: np.ndarray, actions: Sequence[Project], addresses: Several, ordinal: int) -> None:
    fields["low"], fields["high"] = _column([action.low for action in actions]), _column([a.high for a in actions])


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


def columns_of(record: np.void) -> slice:
    """The columns that a record changes."""
    word = int(record["columns"]) & 0xFFFFFFFF
    return slice(word & 0xFFFF, word >> 16) if word else slice(None)
