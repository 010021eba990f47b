"""Bound programs: a program in numbers, for one prompt. Plain data: sent as msgpack, and hashed for the keys of
the prefix cache.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np

CAPTURE = 0  # keep the row
LINEAR = 1  # h_scale · h + v_scale · v; a scale of 0 leaves its term out altogether
BLEND = 2  # (1 − a) · h + a · v for a = alpha · m, m a number a column
PROJECT = 3  # h + (p′ − p) · v, for p = h · v and p′ the nearest to it of low … high
NOISE = 4  # h + std · ε; relative: std times the row's root mean square
MATCH = 5  # no edit: the next record acts only where the token's id is, or is not, one of some ids
APPLY = 6  # fn(h), any code


class PositionRange(NamedTuple):
    """Positions start … stop − 1. Position p reads row `row + (p − start) · step` of the op's value; step is 0 or 1."""

    start: int
    stop: int
    row: int = 0
    step: int = 0


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=CAPTURE):
    """Keep the row.

    dtype: an index into `DTYPES`
    conditional: whether some of the positions count only under conditions on generated tokens
    """

    kind: ClassVar[int] = CAPTURE
    dtype: int
    conditional: bool = False


class Linear(msgspec.Struct, frozen=True, array_like=True, tag=LINEAR):
    kind: ClassVar[int] = LINEAR
    h_scale: float
    v_scale: float


class Blend(msgspec.Struct, frozen=True, array_like=True, tag=BLEND):
    """mask: the bank key of m."""

    kind: ClassVar[int] = BLEND
    alpha: float
    mask: str


class Project(msgspec.Struct, frozen=True, array_like=True, tag=PROJECT):
    kind: ClassVar[int] = PROJECT
    low: float
    high: float


class Noisy(msgspec.Struct, frozen=True, array_like=True, tag=NOISE):
    """streams: for each point, the number that tells its noise from other sites'
    first_column: the number of a shard's first column
    """

    kind: ClassVar[int] = NOISE
    std: float
    seed: int
    relative: bool
    streams: tuple[int, ...]
    first_column: int = 0


class RunCode(msgspec.Struct, frozen=True, array_like=True, tag=APPLY):
    """code: its number among the code of all programs; never used twice."""

    kind: ClassVar[int] = APPLY
    code: int


Action = Keep | Linear | Blend | Project | Noisy | RunCode


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """An op acts only where the token's id is among those of the bank key `ids`, or with `others` not among them."""

    ids: str
    others: bool


class BoundOp(msgspec.Struct, frozen=True, array_like=True):
    """One op in numbers.

    path: of the op in its program, such as `edits[2]`
    action: what it does
    points: the points it acts at
    values: a bank key for each point, one for all, or none
    ranges: the positions it acts on, ascending
    reaches_cache: whether it can change keys and values that later tokens read
    columns: of a row, those it acts on (`pack_columns`); 0: all
    condition: on the token's id, if it has one
    """

    path: str
    action: Action
    points: tuple[int, ...]
    values: tuple[str, ...]
    ranges: tuple[PositionRange, ...]
    reaches_cache: bool = False
    columns: int = 0
    condition: Condition | None = None

    @property
    def kind(self) -> int:
        return self.action.kind

    @property
    def keys(self) -> tuple[str, ...]:
        """Every bank key that is read."""
        mask = (self.action.mask,) if isinstance(self.action, Blend) else ()
        return (*self.values, *mask, *((self.condition.ids,) if self.condition else ()))

    def reads(self) -> list[tuple[str, int]]:
        """Bank keys, each with a point where it is read."""
        if len(self.values) == len(self.points):
            reads = list(zip(self.values, self.points, strict=True))
        else:
            reads = [(key, point) for key in self.values for point in self.points]
        return reads + [(key, point) for key in self.keys[len(self.values) :] for point in self.points]

    def at(self, here: np.ndarray) -> BoundOp:
        """The op at the points that are `here`, bool [P]. One without points stays, so that ordinals do not change."""
        if here.all():
            return self
        local = [i for i, point in enumerate(self.points) if here[point]]
        if not local:
            return msgspec.structs.replace(self, action=NOTHING, points=(), values=(), condition=None)
        values = self.values if len(self.values) != len(self.points) else tuple(self.values[i] for i in local)
        action = self.action
        if isinstance(action, Noisy):
            action = msgspec.structs.replace(action, streams=tuple(action.streams[i] for i in local))
        return msgspec.structs.replace(self, action=action, points=tuple(self.points[i] for i in local), values=values)


NOTHING = Linear(1.0, 0.0)  # what an op without points does


class BoundProgram(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """A program bound to a prompt of `prompt` tokens, run under the key `run`.

    Edited blocks of the prefix cache are shared among programs of one `salt` only.
    """

    run: str
    prompt: int
    ops: tuple[BoundOp, ...]
    salt: str = ""

    @functools.cached_property
    def captured(self) -> dict[int, np.ndarray]:
        """The positions captured at each point, ascending, if the run generates `max_tokens`. Points with the same
        ranges share one array."""
        ranges: dict[int, list[PositionRange]] = collections.defaultdict(list)
        for op in self.ops:
            for point in op.points if op.kind == CAPTURE else ():
                ranges[point].extend(op.ranges)
        of_points = {point: tuple(some) for point, some in ranges.items()}
        positions = {some: position_array(some) for some in set(of_points.values())}
        return {point: positions[some] for point, some in of_points.items()}


def position_array(ranges: tuple[PositionRange, ...]) -> np.ndarray:
    """The positions of some ranges, ascending."""
    if not ranges:
        return np.zeros(0, np.int64)
    positions = [np.arange(start, stop) for start, stop, *_ in ranges]
    return positions[0] if len(positions) == 1 else np.unique(np.concatenate(positions))


def position_ranges(positions: np.ndarray, rows: np.ndarray | None) -> tuple[PositionRange, ...]:
    """The fewest ranges of distinct positions and the row each reads (None: row 0), ascending."""
    if len(positions) == 0:
        return ()
    order = np.argsort(positions)
    positions, rows = positions[order], np.zeros(len(positions), np.int64) if rows is None else rows[order]
    consecutive = np.diff(positions) == 1
    step = np.diff(rows)
    joined = consecutive & ((step == 0) | (step == 1))
    joined[1:] &= ~joined[:-1] | (step[1:] == step[:-1])
    edges = np.concatenate(([0], np.flatnonzero(~joined) + 1, [len(positions)]))
    return tuple(
        PositionRange(int(positions[a]), int(positions[b - 1]) + 1, int(rows[a]),
                      int(rows[a + 1] - rows[a]) if b - a > 1 else 0)
        for a, b in itertools.pairwise(edges)
    )  # fmt: skip


def pack_columns(columns: tuple[int, int]) -> int:
    """Columns first … end − 1 in one word of a record."""
    return columns[0] | columns[1] << 16


def run_key(run: str, point: int) -> str:
    """The bank key of what a run captured at a point."""
    return f"r:{run}:{point}"


def source_of(key: str) -> tuple[str, int] | None:
    """The run and the point that a bank key names; None for an inline vector's."""
    kind, _, rest = key.partition(":")
    run, _, point = rest.rpartition(":")
    return (run, int(point)) if kind == "r" else None


def noise_stream(kind: str, layer: int | None) -> int:
    """A point's number in the counter that noise is made from (`kernels.noise`): 31 bits of a hash of its name."""
    digest = hashlib.blake2s(f"{kind}[{layer}]".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
