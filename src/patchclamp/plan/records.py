"""Records: the rows of the device's tables, made from bound ops.

All kinds share one layout of 48 bytes; what its fields hold depends on the kind. `FIELDS` gives each kind's own names,
`named` reads records by them, and the constructors below write them.

    O ops · P points · Q position ranges of an op
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from patchclamp.plan.bound import (
    APPLY,
    BLEND,
    CAPTURE,
    LINEAR,
    MATCH,
    NOISE,
    PROJECT,
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
    CAPTURE: {"range": "step", "region": "value", "dtype": "x"},  # until a table has them, region is the op's ordinal
    LINEAR: {"row_step": "step", "vector": "value", "h_scale": "x", "v_scale": "y"},
    BLEND: {"row_step": "step", "vector": "value", "alpha": "y", "mask": "other"},
    PROJECT: {"row_step": "step", "vector": "value", "low": "x", "high": "y"},
    NOISE: {"relative": "step", "stream": "value", "first_column": "x", "std": "y", "seed": "other"},
    MATCH: {"count": "step", "ids": "value", "expected": "x"},
    APPLY: {"code": "value"},
}


def _layout(kind: int) -> np.dtype:
    names = {name: name for name in ("start", "stop", "kind", "columns")} | FIELDS[kind]
    dtype, offset = zip(*(RECORD.fields[field][:2] for field in names.values()), strict=True)  # type: ignore[index]
    return np.dtype({"names": list(names), "formats": dtype, "offsets": offset, "itemsize": RECORD.itemsize})


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
        _WRITERS[type(op.action)](named(records_PQ, op.kind), op.action, addresses, ordinal)
    records, owner = records_PQ.reshape(-1), np.repeat(points, len(ranges))
    if op.condition is None:
        return records, owner
    conditions = match_records(records, *addresses[op.condition.ids], expected=not op.condition.others)
    return np.stack([conditions, records], 1).reshape(-1), np.repeat(owner, 2)


def match_records(records: np.ndarray, ids: int, count: int, expected: bool) -> np.ndarray:
    """The condition before each record: that the token's id is (`expected`), or is not, one of the `count` ids that lie
    from number `ids` of the bank on, ascending."""
    conditions = np.zeros_like(records)
    conditions["start"], conditions["stop"], conditions["kind"] = records["start"], records["stop"], MATCH
    fields = named(conditions, MATCH)
    fields["ids"], fields["count"], fields["expected"] = ids, count, expected
    return conditions


def _write_capture(fields: np.ndarray, action: Keep, addresses: Addresses, ordinal: int) -> None:
    fields["dtype"], fields["region"] = action.dtype, ordinal


def _write_linear(fields: np.ndarray, action: Linear, addresses: Addresses, ordinal: int) -> None:
    fields["h_scale"], fields["v_scale"] = action.h_scale, action.v_scale


def _write_blend(fields: np.ndarray, action: Blend, addresses: Addresses, ordinal: int) -> None:
    fields["alpha"], fields["mask"] = action.alpha, addresses[action.mask][0]


def _write_project(fields: np.ndarray, action: Project, addresses: Addresses, ordinal: int) -> None:
    fields["low"], fields["high"] = action.low, action.high


def _write_noise(fields: np.ndarray, action: Noisy, addresses: Addresses, ordinal: int) -> None:
    fields["std"], fields["seed"], fields["relative"] = action.std, action.seed, action.relative
    fields["stream"], fields["first_column"] = np.array(action.streams, np.int64)[:, None], action.first_column


def _write_code(fields: np.ndarray, action: RunCode, addresses: Addresses, ordinal: int) -> None:
    fields["code"] = action.code


_WRITERS: dict[type, Any] = {
    Keep: _write_capture, Linear: _write_linear, Blend: _write_blend, Project: _write_project, Noisy: _write_noise,
    RunCode: _write_code,
}  # fmt: skip


def columns_of(record: np.void) -> slice:
    """The columns that a record changes."""
    word = int(record["columns"]) & 0xFFFFFFFF
    return slice(word & 0xFFFF, word >> 16) if word else slice(None)
