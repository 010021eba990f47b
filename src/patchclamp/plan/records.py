"""Records: the rows of the device's tables, made from bound ops.

All kinds share one layout of 48 bytes; what its fields hold depends on the kind. `FIELDS` gives each kind's own names
of the fields, `named` reads records by these names, and `_write` writes the fields of an action.

    P points · Q position ranges of an op
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from patchclamp.plan.bound import (
    APPLY,
    BLEND,
    CAPTURE,
    LINEAR,
    MATCH,
    NOISE,
    PROJECT,
    Action,
    Blend,
    BoundOp,
    Keep,
    Linear,
    Noisy,
    Project,
    RunCode,
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
FIELDS: dict[int, dict[str, str]] = {  # by kind: its own names of the fields, beside start, stop, kind and columns
    CAPTURE: {"range": "step", "region": "value", "dtype": "x"},  # region: the op's number, until a table admits it
    LINEAR: {"row_step": "step", "vector": "value", "h_scale": "x", "v_scale": "y"},
    BLEND: {"row_step": "step", "vector": "value", "alpha": "y", "mask": "other"},
    PROJECT: {"row_step": "step", "vector": "value", "low": "x", "high": "y"},
    NOISE: {"relative": "step", "stream": "value", "first_column": "x", "std": "y", "seed": "other"},
    MATCH: {"count": "step", "ids": "value", "expected": "x"},
    APPLY: {"code": "value"},
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


def records_of(ops: Sequence[BoundOp], addresses: Addresses, points: int) -> tuple[np.ndarray, np.ndarray]:
    """A bound program's records sorted by point (program order within), and how many each point has, [P]."""
    of_ops = [_records(op, ordinal, addresses) for ordinal, op in enumerate(ops)]
    if not of_ops:
        return np.zeros(0, RECORD), np.zeros(points, np.int64)
    records, point = (np.concatenate(parts) for parts in zip(*of_ops, strict=True))
    order = np.argsort(point, kind="stable")
    return records[order], np.bincount(point, minlength=points)


def record_count(ops: Sequence[BoundOp]) -> int:
    """How many records a bound program has, on a worker that has all points."""
    return sum(len(op.points) * len(op.ranges) * (2 if op.condition else 1) for op in ops)


def _records(op: BoundOp, ordinal: int, addresses: Addresses) -> tuple[np.ndarray, np.ndarray]:
    """One op's records, every range at every point, and the point of each."""
    ranges, points = np.array(op.ranges, np.int64).reshape(-1, 4), np.array(op.points, np.int64)
    records_PQ = np.zeros((len(points), len(ranges)), RECORD)
    records_PQ["start"], records_PQ["stop"], records_PQ["step"] = ranges[:, 0], ranges[:, 1], ranges[:, 3]
    records_PQ["kind"], records_PQ["columns"] = op.kind, np.array(op.columns, np.int64).astype(np.int32)
    if op.values:
        begin, width = np.array([addresses[key] for key in op.values], np.int64).T
        records_PQ["value"] = begin[:, None] + ranges[:, 2] * width[:, None]
    if op.points:
        _write(op.action, named(records_PQ, op.kind), addresses, ordinal)
    records, point = records_PQ.reshape(-1), np.repeat(points, len(ranges))
    if op.condition is None:
        return records, point
    conditions = match_records(records, *addresses[op.condition.ids], expected=not op.condition.others)
    return np.stack([conditions, records], 1).reshape(-1), np.repeat(point, 2)


def match_records(records: np.ndarray, ids: int, count: int, expected: bool) -> np.ndarray:
    """The `MATCH` record that stands before each record: it acts only where the token's id is one of some ids, or if
    not `expected` is none of them. The `count` ids lie in the bank, ascending, from number `ids` on."""
    conditions = np.zeros_like(records)
    conditions["start"], conditions["stop"], conditions["kind"] = records["start"], records["stop"], MATCH
    fields = named(conditions, MATCH)
    fields["ids"], fields["count"], fields["expected"] = ids, count, expected
    return conditions


@functools.singledispatch
def _write(action: Action, fields: np.ndarray, addresses: Addresses, ordinal: int) -> None:
    """Writes the fields of an action, in records [P, Q] by the names of its kind. `ordinal`: the op's number."""
    raise NotImplementedError(f"no record for {type(action).__name__}")


@_write.register
def _capture(action: Keep, fields: np.ndarray, addresses: Addresses, ordinal: int) -> None:
    fields["dtype"], fields["region"] = action.dtype, ordinal


@_write.register
def _linear(action: Linear, fields: np.ndarray, addresses: Addresses, ordinal: int) -> None:
    fields["h_scale"], fields["v_scale"] = action.h_scale, action.v_scale


@_write.register
def _blend(action: Blend, fields: np.ndarray, addresses: Addresses, ordinal: int) -> None:
    fields["alpha"], fields["mask"] = action.alpha, addresses[action.mask][0]


@_write.register
def _project(action: Project, fields: np.ndarray, addresses: Addresses, ordinal: int) -> None:
    fields["low"], fields["high"] = action.low, action.high


@_write.register
def _noise(action: Noisy, fields: np.ndarray, addresses: Addresses, ordinal: int) -> None:
    fields["std"], fields["seed"], fields["relative"] = action.std, action.seed, action.relative
    fields["stream"], fields["first_column"] = np.array(action.streams, np.int64)[:, None], action.first_column


@_write.register
def _code(action: RunCode, fields: np.ndarray, addresses: Addresses, ordinal: int) -> None:
    fields["code"] = action.code


def columns_of(record: np.void) -> slice:
    """The columns that a record changes."""
    word = int(record["columns"]) & 0xFFFFFFFF
    return slice(word & 0xFFFF, word >> 16) if word else slice(None)
