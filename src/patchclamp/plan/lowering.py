"""Lowering: what each op is in numbers, one function an op.

A new op of an existing kind (`plan.bound`) is its struct in `language.ops` and one function here. The function gets
what it needs of the prompt, the model and the bank from its `Context`.
"""

from __future__ import annotations

import functools
from typing import Protocol

import msgspec
import numpy as np

from patchclamp.errors import ShapeError, UnsupportedSite
from patchclamp.language import SiteOp, Vector, ops
from patchclamp.language.values import DTYPES, MAX_FP32, Value, ValueLike, as_value, check_matrix, orthonormal
from patchclamp.plan.bound import Action, Blend, Keep, Linear, Noisy, Project, RunCode, noise_stream


class Context(Protocol):
    """One op's site and selection in one prompt."""

    conditional: bool

    def value(self, value: Value) -> tuple[tuple[str, ...], np.ndarray | None]:
        """Bank keys of a value (one for each point, or one for all), and the row that each selected position reads
        (None: row 0). Errors have the path `value`."""
        ...

    def vector(self, value: ValueLike, field: str) -> Vector:
        """The one vector that a field names for all points, as wide as the site."""
        ...

    def put(self, vector: Vector) -> str:
        """The bank key of a vector."""
        ...

    def needs_whole_rows(self, op: SiteOp) -> None:
        """Raises `UnsupportedSite` where no worker has a whole row, which the op sums over."""
        ...

    def points(self) -> list[tuple[str, int | None]]:
        """Kind and layer of each point."""
        ...

    def code(self, op: ops.Apply) -> int:
        """The number of an op's code. Raises `ProgramError` where code is not allowed."""
        ...


class Lowered(msgspec.Struct, frozen=True):
    """An op in numbers, before it is placed.

    values: bank keys
    rows: the value's row that each selected position reads; None: row 0
    repeats: how often the action is carried out at every position, with row 0, 1, … of the value
    """

    action: Action
    values: tuple[str, ...] = ()
    rows: np.ndarray | None = None
    repeats: int = 1


@functools.singledispatch
def lower(op: SiteOp, context: Context) -> Lowered:
    """An op in numbers. Errors have the field's name as their path."""
    raise NotImplementedError(f"no lowering of {type(op).__name__}")


@lower.register
def _capture(op: ops.Capture, context: Context) -> Lowered:
    dtype = DTYPES.index(op.dtype)
    if op.project is None:
        return Lowered(Keep(dtype, context.conditional))
    if any(kind == "logits" for kind, _ in context.points()):
        raise UnsupportedSite("logits are not projected: capture final_norm, by W times the unembedding", "at")
    context.needs_whole_rows(op)
    matrix = context.vector(op.project, "project")
    try:
        check_matrix(matrix)
    except ShapeError as error:
        raise error.under("project") from None
    return Lowered(Keep(dtype, context.conditional, context.put(matrix), len(matrix.rows())))


@lower.register
def _add(op: ops.Add, context: Context) -> Lowered:
    return Lowered(Linear(1.0, op.scale), *context.value(as_value(op.value)))


@lower.register
def _replace(op: ops.Replace, context: Context) -> Lowered:
    values, rows = context.value(as_value(op.value))
    if op.mask is None:
        return Lowered(Linear(1.0 - op.alpha, op.alpha), values, rows)
    return Lowered(Blend(op.alpha, context.put(_one_row(context.vector(op.mask, "mask"), "mask"))), values, rows)


@lower.register
def _zero(op: ops.Zero, context: Context) -> Lowered:
    return Lowered(Linear(0.0, 0.0))


@lower.register
def _mean(op: ops.Mean, context: Context) -> Lowered:
    return Lowered(Linear(0.0, 1.0), *context.value(as_value(op.value)))


@lower.register
def _scale(op: ops.Scale, context: Context) -> Lowered:
    return Lowered(Linear(op.factor, 0.0))


@lower.register
def _ablate(op: ops.Ablate, context: Context) -> Lowered:
    context.needs_whole_rows(op)
    basis = orthonormal(_directions(context, op.directions, "directions"))
    return Lowered(Project(0.0, 0.0), (context.put(basis),), repeats=basis.shape[0])


@lower.register
def _clamp(op: ops.Clamp, context: Context) -> Lowered:
    context.needs_whole_rows(op)
    unit = orthonormal(_one_row(_directions(context, op.direction, "direction"), "direction"))
    bounds = -MAX_FP32 if op.low is None else op.low, MAX_FP32 if op.high is None else op.high
    return Lowered(Project(*bounds), (context.put(unit),))


@lower.register
def _noise(op: ops.Noise, context: Context) -> Lowered:
    if op.relative:
        context.needs_whole_rows(op)
    streams = tuple(noise_stream(kind, layer) for kind, layer in context.points())
    return Lowered(Noisy(op.std, op.seed, op.relative, streams), repeats=1 if op.std else 0)


@lower.register
def _apply(op: ops.Apply, context: Context) -> Lowered:
    return Lowered(RunCode(context.code(op)))


def _directions(context: Context, value: ValueLike, field: str) -> Vector:
    directions = context.vector(value, field)
    if not directions.array().any(axis=-1).all():
        raise ShapeError("a direction is all zeros", field)
    return directions


def _one_row(vector: Vector, field: str) -> Vector:
    if len(vector.shape) != 1:
        raise ShapeError(f"one row [D] is needed; this is {list(vector.shape)}", field)
    return vector
