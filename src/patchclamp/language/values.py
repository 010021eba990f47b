"""Values: the vectors an op writes. A `Vector` carries its numbers; the others say where they are: `Named` in the bank,
`From` in what another run captured, `SameRun` at an earlier layer of the run itself."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from patchclamp.errors import ProgramError, ShapeError
from patchclamp.language.fields import Converted, field, optional
from patchclamp.language.site import Site, parse_site
from patchclamp.language.tokens import Tokens, TokensLike, parse_tokens

if TYPE_CHECKING:
    import numpy as np

BYTES = (str, bytes, bytearray, memoryview)


def check_dense(tensor: Any, path: str | None = None) -> None:
    """Raises `ShapeError` for a torch tensor whose numbers cannot be read: sparse, quantised, nested or meta."""
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_nested:
        raise ShapeError("expected numbers in a dense tensor: call .to_dense() or .dequantize() first", path)
    if tensor.is_meta:
        raise ShapeError("expected numbers, got a meta tensor, which has none", path)


def as_plain(value: Any, path: str | None = None) -> Any:
    """A tensor's or an array's numbers as Python's, in lists; anything else as it is."""
    if hasattr(value, "detach"):
        check_dense(value, path)
    if hasattr(value, "mask") and hasattr(value, "filled"):
        raise ShapeError("expected numbers, got a masked array: fill it first", path)
    return value.tolist() if hasattr(value, "tolist") else value


def as_items(items: Any, path: str) -> list[Any]:
    """A list of things; a set of numbers is sorted. Raises `ProgramError` for text, bytes, mappings and tables, whose
    characters, keys and column names are not meant, and for other sets, which have no order."""
    items = as_plain(items, path)
    if isinstance(items, (set, frozenset)) and all(isinstance(one, Real) for one in items):
        return sorted(items)
    unordered = (*BYTES, Mapping, set, frozenset)
    if isinstance(items, unordered) or hasattr(items, "columns") or not isinstance(items, Iterable):
        raise ProgramError(f"expected a list, got {type(items).__name__} {items!r:.100}", path)
    return list(items)


def as_file(path: Any, name: str | None = None) -> Any:
    """A path as it is. Raises `ProgramError` for what no file or folder can be called; `name`: of the argument."""
    try:
        text = os.fspath(path)
        if isinstance(text, str) and text and b"\0" not in os.fsencode(text):
            return path
    except (TypeError, UnicodeError):
        pass
    raise ProgramError(f"expected a path, got {type(path).__name__} {path!r:.100}", name)


def as_array(numbers: Any, path: str | None = None) -> np.ndarray:
    """Real numbers as a little-endian fp32 array, contiguous, from a torch tensor, a NumPy array or nested lists.

    Raises `ShapeError` for all else: text, booleans, complex numbers, dates, masked arrays, tensors without dense rows.
    """
    import numpy as np

    kind = type(numbers).__name__
    try:
        if isinstance(numbers, np.ma.MaskedArray):
            raise ShapeError("a masked array has no numbers where it is masked; expected numbers: fill it first", path)
        if hasattr(numbers, "detach"):
            if not numbers.is_floating_point() and "int" not in str(numbers.dtype):
                raise ShapeError(f"expected real numbers, got a tensor of {numbers.dtype}", path)
            check_dense(numbers, path)
            numbers = numbers.detach().cpu().float().numpy()
        if isinstance(numbers, (*BYTES, Mapping)):
            raise TypeError("not numbers")
        if isinstance(numbers, Sequence):  # a bool among floats, or text, would be converted
            numbers = read_elements(numbers, path)
        array = np.asarray(numbers)
        if array.dtype.kind not in "iuf" and array.dtype.name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            raise TypeError(f"dtype {array.dtype}")
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array, dtype="<f4")
    except (TypeError, ValueError, OverflowError, RuntimeError, RecursionError) as error:
        raise ShapeError(f"expected a tensor or a list of numbers, got {kind}: {error}", path) from None


def read_elements(numbers: Sequence[Any], path: str | None = None) -> list[Any]:
    """Nested lists, their tensors and arrays read by `as_array`. Raises `TypeError` for text, bytes, a boolean or a
    date, which NumPy would convert."""
    return [one if type(one) in (float, int) else _element(one, path) for one in numbers]


def _element(one: Any, path: str | None) -> Any:
    if isinstance(one, (*BYTES, bool)) or getattr(getattr(one, "dtype", None), "kind", "f") in "bmM":
        raise TypeError(f"{one!r:.100} is not a number")
    if isinstance(one, Sequence):
        return read_elements(one, path)
    has_axes = len(getattr(one, "shape", ())) > 0
    masked = hasattr(one, "mask") and hasattr(one, "filled")
    return as_array(one, path).reshape(one.shape) if has_axes or masked or hasattr(one, "detach") else one


class Vector(msgspec.Struct, frozen=True, tag="vector", dict=True):
    """Numbers: one row [D] for every selected position, or [n, D] for the n selected positions in order. One row of
    heads may be [H, E].

    shape: of the numbers
    data: little-endian fp32, row by row
    """

    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 2) or min(self.shape) < 1:
            raise ShapeError(f"a vector is [D] or [n, D] and not empty; this one is {list(self.shape)}")
        import numpy as np

        if len(self.data) != 4 * math.prod(self.shape):
            raise ShapeError(f"{len(self.data)} bytes are not {list(self.shape)} fp32 numbers")
        if not np.isfinite(self.array()).all():
            raise ShapeError("a vector's numbers must be finite; this one has NaN or infinity")

    @classmethod
    def of(cls, numbers: Any) -> Vector:
        """From a torch tensor, a NumPy array or nested lists."""
        array = as_array(numbers)
        return cls(tuple(array.shape), array.tobytes())

    def array(self) -> np.ndarray:
        """The numbers, fp32 [D] or [n, D], read-only."""
        import numpy as np

        return np.frombuffer(self.data, "<f4").reshape(self.shape)

    def rows(self) -> np.ndarray:
        """The numbers as [n, D]; n is 1 for a vector given as [D]."""
        return self.array().reshape(-1, self.shape[-1])

    @functools.cached_property
    def content(self) -> str:
        """SHA-256 of shape and numbers, in hex: the vector's name in the bank. Computed once."""
        return hashlib.sha256(repr(self.shape).encode() + self.data).hexdigest()

    def __repr__(self) -> str:
        return f"Vector({'x'.join(map(str, self.shape))} {self.content[:8]})"


@functools.lru_cache(256)
def orthonormal(directions: Vector) -> Vector:
    """An orthonormal basis [k, D] of the span of rows, in their order. A row that adds less than a millionth of its
    length to the span is left out.

    Source: Gram and Schmidt's way, twice (Kahan; Parlett, The Symmetric Eigenvalue Problem, 6.9).
    """
    import numpy as np

    basis: list[np.ndarray] = []
    for row in directions.rows().astype(np.float64):
        rest, length = row, np.linalg.norm(row)
        for _ in range(2):
            for unit in basis:
                rest = rest - (rest @ unit) * unit
        if np.linalg.norm(rest) > 1e-6 * length:
            basis.append(rest / np.linalg.norm(rest))
    return Vector.of(np.stack(basis))


class RunLike(Protocol):
    """What a value needs of a `Run`."""

    key: str


def _run_key(run: RunLike | str) -> str:
    key = run if isinstance(run, str) else getattr(run, "key", None)
    if not isinstance(key, str):
        raise ProgramError(f"From takes a Run (what lm.run returned), not {type(run).__name__}")
    return key


def _position(value: TokensLike) -> Tokens:
    if isinstance(value, int) and value < 0:
        raise ProgramError(f"position {value} counts from an end that depends on the run; write pc.prompt[{value}]")
    return parse_tokens(value)


class From(Converted, frozen=True, tag="from", dict=True):
    """Rows that another run captured.

    run: a `Run`, which is kept as long as this value, or its name in the bank, or its key (text once it is made)
    site: where the rows were captured; None: at the site that is written
    position: which positions; None: those that are written. The row of one position is written to every position; the
        rows of n to n positions, in order
    """

    run: str = field(converter=_run_key)
    site: Site | None = field(converter=optional(parse_site), default=None)
    position: Tokens | None = field(converter=optional(_position), default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.run, str):
            vars(self)["owner"] = self.run
        super().__post_init__()


class SameRun(Converted, frozen=True, tag="same_run"):
    """Rows of an earlier layer of the run itself, as they are after the edits that stand before in the program.

    site: of one layer, or of as many as are written
    position: which positions, none after the one that it is written to; None: those that are written. The row of one
        position is written to every position; the rows of n to n positions, in order
    """

    site: Site = field(converter=parse_site)
    position: Tokens | None = field(converter=optional(_position), default=None)


def check_name(name: object) -> str:
    """A name in the bank, or `ProgramError`: text that a file can hold, of at most 200 characters."""
    if not isinstance(name, str) or not name or len(name) > 200:
        raise ProgramError(f"a name is text, not empty and of at most 200 characters: not {name!r:.300}")
    if name == "__metadata__" or re.search("[\ud800-\udfff]", name):
        raise ProgramError(f"{name!r} cannot be written to a file: choose another name")
    return name


class Named(msgspec.Struct, frozen=True, tag="named"):
    """What the bank has under a name when the request is made: a vector, or means, of which the row of the site counts
    that is written."""

    name: str

    def __post_init__(self) -> None:
        check_name(self.name)


Value = Vector | From | Named | SameRun


class Array(Protocol):
    """What NumPy reads: its own arrays, and torch's tensors."""

    def __array__(self) -> np.ndarray: ...


ValueLike = Value | str | Array | Sequence[float] | Sequence[Sequence[float]]


def as_value(value: ValueLike) -> Value:
    """A value from a vector's numbers or a name in the bank; a value is returned as it is."""
    if isinstance(value, (Vector, From, Named, SameRun)):
        return value
    if isinstance(value, str):
        return Named(value)
    if isinstance(value, Site):
        raise ProgramError(
            f"a value is a vector, its name in the bank, pc.From(run, site) or pc.SameRun(site), not {value!r}"
        )
    return Vector.of(value)
