"""How the fields of ops are read from what people write: numbers, vectors, dtypes. Each raises `ProgramError`."""

from __future__ import annotations

import math
from typing import SupportsFloat, SupportsIndex

from patchclamp.errors import ProgramError, ShapeError, unknown
from patchclamp.language.ranges import as_integer
from patchclamp.language.values import BYTES, Named, ValueLike, Vector, as_value, check_dense

MAX_FP32 = (2 - 2**-23) * 2.0**127
DTYPES = ("float32", "bfloat16", "float16")  # of captures
MAX_PROJECTED = 256  # rows of the matrix of a projected capture


def as_number(value: SupportsFloat) -> float:
    """A number of Python, NumPy or torch as a float. Text and True are none."""
    if hasattr(value, "detach"):
        check_dense(value)
    try:
        if isinstance(value, (*BYTES, bool)) or getattr(value, "shape", ()) != () or hasattr(value, "mask"):
            raise TypeError
        if any(word in str(getattr(value, "dtype", "")) for word in ("bool", "complex", "time")):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ProgramError(f"expected a number, got {type(value).__name__} {value!r:.200}") from None
    if not math.isfinite(number):
        raise ProgramError(f"a finite number is needed, not {number}")
    if abs(number) > MAX_FP32:
        raise ProgramError(f"a number of fp32 is needed, at most {MAX_FP32:.2e}, not {number}")
    return number


def as_strength(value: SupportsFloat) -> float:
    number = as_number(value)
    if number < 0:
        raise ProgramError(f"a number of at least 0 is needed, not {number}")
    return number


def as_seed(value: SupportsIndex) -> int:
    try:
        seed = as_integer(value)
    except ProgramError:
        raise ProgramError(f"a seed is a whole number, not {value!r:.200}") from None
    if not 0 <= seed < 1 << 63:
        raise ProgramError(f"a seed is at least 0 and below 2**63, not {seed}")
    return seed


def as_flag(value: bool, path: str | None = None) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # NumPy's, too
        raise ProgramError(f"expected True or False, got {value!r:.200}", path)
    return bool(value)


def as_dtype(value: object, path: str | None = None) -> str:
    """The name of one of `DTYPES`, from its name or from torch's dtype."""
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("capture dtype", name, DTYPES, path)
    return name


def as_numbers(value: ValueLike) -> Vector | Named:
    vector = as_value(value)
    if not isinstance(vector, (Vector, Named)):
        raise ProgramError(f"numbers are needed here, not a row still to be read: give run[site][i] for {value}")
    return vector


def as_row(value: ValueLike) -> Vector | Named:
    """Numbers [D]."""
    if isinstance(vector := as_numbers(value), Vector) and len(vector.shape) != 1:
        raise ShapeError(f"one row [D] is needed; this is {list(vector.shape)}")
    return vector


def as_mask(value: ValueLike) -> Vector | Named:
    """Numbers [D], or booleans [D] as 0 and 1."""
    if isinstance(value, (list, tuple)):
        flags = ("bool", "bool_")  # NumPy's, too
        return as_row([float(one) if type(one).__name__ in flags else one for one in value])  # type: ignore[arg-type]
    if "bool" in str(getattr(value, "dtype", "")):
        return as_row(value * 1.0)  # type: ignore[operator]
    return as_row(value)


def as_matrix(value: ValueLike) -> Vector | Named:
    """Numbers [D] or [k, D], of at most `MAX_PROJECTED` rows."""
    if isinstance(vector := as_numbers(value), Vector):
        check_matrix(vector)
    return vector


def check_matrix(matrix: Vector) -> None:
    """Raises `ShapeError` for a matrix that no capture takes."""
    rows = len(matrix.rows())
    if rows > MAX_PROJECTED:
        raise ShapeError(f"a matrix of at most {MAX_PROJECTED} rows is needed; this is {list(matrix.shape)}")


def as_directions(value: ValueLike) -> Vector | Named:
    """Numbers [D] or [k, D], no row all zeros."""
    if isinstance(vector := as_numbers(value), Vector) and not vector.array().any(axis=-1).all():
        raise ShapeError("a direction is all zeros")
    return vector


def as_direction(value: ValueLike) -> Vector | Named:
    """Numbers [D], not all zeros."""
    return as_row(as_directions(value))
