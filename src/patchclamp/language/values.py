"""Values: the vectors an op writes, and struct fields that convert user input to one type.

A `Vector` holds its numbers; other values are references: `Named` to the bank, `From` to another run's captures,
`SameRun` to an earlier layer of the same run.

`at: Site = field(converter=as_site)` accepts `"resid_post[3]"` and stores a `Site`, for type checkers too (the typing
specification's dataclass transforms). The `as_*` converters raise `ProgramError` or `ShapeError`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    Protocol,
    SupportsFloat,
    SupportsIndex,
    TypeVar,
    dataclass_transform,
    overload,
)

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, UnknownName, near, unknown
from patchclamp.language.site import Site, parse_site
from patchclamp.language.structs import PublicMeta, PublicStruct
from patchclamp.language.tokens import Tokens, TokensLike, as_integer, parse_tokens

if TYPE_CHECKING:
    import numpy as np

Written = TypeVar("Written")
Read = TypeVar("Read")


class _Field(NamedTuple):
    converter: Callable[[Any], Any]
    default: Any


@overload
def field(*, converter: Callable[[Written], Read]) -> Read: ...
@overload
def field(*, converter: Callable[[Written], Read], default: Written) -> Read: ...
def field(*, converter: Callable[[Any], Any], default: Any = msgspec.NODEFAULT) -> Any:
    """Declare a struct field whose value is passed through `converter`. Without a default, the field is required."""
    return _Field(converter, default)


class _Converting(PublicMeta):
    """Metaclass that collects the fields' converters in the class attribute `converters`."""

    converters: dict[str, Callable[[Any], Any]]

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any) -> Any:
        fields = {word: value for word, value in namespace.items() if isinstance(value, _Field)}
        namespace |= {word: msgspec.field(default=field.default) for word, field in fields.items()}
        namespace["converters"] = {word: field.converter for word, field in fields.items()}
        return super().__new__(cls, name, bases, namespace, **config)

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError as error:
            if missing := re.fullmatch("Missing required argument '(.*)'", str(error)):
                raise ProgramError(f"{cls.__name__} needs {missing[1]}=", missing[1]) from None
            names = cls.__struct_fields__
            if unknown := re.fullmatch("Unexpected keyword argument '(.*)'", str(error)):
                words = f"{cls.__name__} has no argument {unknown[1]!r}{near(unknown[1], names)}"
                raise UnknownName(f"{words}; available: {', '.join(names)}", unknown[1]) from None
            if twice := re.fullmatch("Argument '(.*)' given by name and position", str(error)):
                raise ProgramError(f"{cls.__name__} got {twice[1]} both by position and by name", twice[1]) from None
            if str(error) == "Extra positional arguments provided":
                raise ProgramError(f"{cls.__name__} takes {', '.join(names)}, got {len(args)} arguments") from None
            raise


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Converted(msgspec.Struct, metaclass=_Converting, frozen=True):
    """Base class of structs with converted fields. Errors name the field."""

    def __post_init__(self) -> None:
        for name, converter in type(self).converters.items():
            try:
                msgspec.structs.force_setattr(self, name, converter(getattr(self, name)))
            except PatchclampError as error:
                raise error.under(name) from None


def optional(converter: Callable[[Written], Read]) -> Callable[[Written | None], Read | None]:
    """Wrap a converter so that None stays None."""
    return lambda value: None if value is None else converter(value)


BYTES = (str, bytes, bytearray, memoryview)


def check_dense(tensor: Any, path: str | None = None) -> None:
    """Raise `ShapeError` for a torch tensor without dense data: sparse, quantised, nested or meta."""
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_nested:
        raise ShapeError("expected numbers in a dense tensor: call .to_dense() or .dequantize() first", path)
    if tensor.is_meta:
        raise ShapeError("expected numbers, got a meta tensor, which has no data", path)


def as_plain(value: Any, path: str | None = None) -> Any:
    """Convert a tensor or array to nested lists of Python numbers; return anything else unchanged."""
    if hasattr(value, "detach"):
        check_dense(value, path)
    if hasattr(value, "mask") and hasattr(value, "filled"):
        raise ShapeError("expected numbers, got a masked array: fill it first", path)
    return value.tolist() if hasattr(value, "tolist") else value


def as_items(items: Any, path: str) -> list[Any]:
    """Make a list of items; a set of numbers is sorted. Raises `ProgramError` for text, bytes, mappings and tables
    (iteration would give characters, keys or column names), and for other sets (they are unordered)."""
    items = as_plain(items, path)
    if isinstance(items, (set, frozenset)) and all(isinstance(one, Real) for one in items):
        return sorted(items)
    unordered = (*BYTES, Mapping, set, frozenset)
    if isinstance(items, unordered) or hasattr(items, "columns") or not isinstance(items, Iterable):
        raise ProgramError(f"expected a list, got {type(items).__name__} {items!r:.100}", path)
    return list(items)


def as_kept(value: Any) -> Any:
    """Copy a list or an iterator, which its owner may change or the first use would use up; return others unchanged."""
    return list(value) if isinstance(value, (list, Iterator)) else value


def as_file(path: Any, name: str | None = None) -> Any:
    """Return a path unchanged. Raises `ProgramError`, with the argument's `name`, if it is not a valid path."""
    try:
        text = os.fspath(path)
        names = os.fsencode(text).split(b"/")
        if isinstance(text, str) and text and b"\0" not in b"".join(names) and max(map(len, names)) < 256:  # Linux's
            return path
    except (TypeError, UnicodeError):
        pass
    raise ProgramError(f"expected a path, got {type(path).__name__} {path!r:.100}", name)


def as_array(numbers: Any, path: str | None = None) -> np.ndarray:
    """Convert real numbers in a torch tensor, a NumPy array or nested lists to a contiguous little-endian fp32 array.

    Raises `ShapeError` for anything else: text, booleans, complex numbers, dates, masked arrays, non-dense tensors.
    """
    import numpy as np

    kind = type(numbers).__name__
    try:
        if isinstance(numbers, np.ma.MaskedArray):
            raise ShapeError("expected numbers, got a masked array: fill it first", path)
        if hasattr(numbers, "detach"):
            if not numbers.is_floating_point() and "int" not in str(numbers.dtype):
                raise ShapeError(f"expected real numbers, got a tensor of {numbers.dtype}", path)
            check_dense(numbers, path)
            numbers = numbers.detach().cpu().float().numpy()
        if isinstance(numbers, (*BYTES, Mapping)):
            raise TypeError("not numbers")
        if isinstance(numbers, Sequence):  # NumPy would convert text, or bools among floats
            numbers = read_elements(numbers, path)
        array = np.asarray(numbers)
        if array.dtype.kind not in "iuf" and array.dtype.name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            raise TypeError(f"dtype {array.dtype}")
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array, dtype="<f4")
    except (TypeError, ValueError, OverflowError, RuntimeError, RecursionError) as error:
        raise ShapeError(f"expected a tensor or a list of numbers, got {kind}: {error}", path) from None


def read_elements(numbers: Sequence[Any], path: str | None = None) -> list[Any]:
    """Convert arrays in nested lists to fp32. Raises `TypeError` for text, bytes, booleans and dates."""
    return [one if type(one) in (float, int) else _element(one, path) for one in numbers]


def _element(one: Any, path: str | None) -> Any:
    if isinstance(one, (*BYTES, bool)) or getattr(getattr(one, "dtype", None), "kind", "f") in "bmM":
        raise TypeError(f"{one!r:.100} is not a number")
    if isinstance(one, Sequence):
        return read_elements(one, path)
    has_axes = len(getattr(one, "shape", ())) > 0
    masked = hasattr(one, "mask") and hasattr(one, "filled")
    return as_array(one, path).reshape(one.shape) if has_axes or masked or hasattr(one, "detach") else one


class Vector(PublicStruct, frozen=True, tag="vector", dict=True):
    """One row [D] for all selected positions, or [n, D] for the n selected positions in order. A row of heads may be
    [H, E].

    data: little-endian fp32, row-major
    """

    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.shape) not in (1, 2) or min(self.shape) < 1:
            raise ShapeError(f"expected a non-empty vector [D] or [n, D], got {list(self.shape)}")
        import numpy as np

        if len(self.data) != 4 * math.prod(self.shape):
            raise ShapeError(f"expected fp32 numbers of shape {list(self.shape)}, got {len(self.data)} bytes")
        if not np.isfinite(self.array()).all():
            raise ShapeError("expected finite numbers, got NaN or infinity")

    @classmethod
    def of(cls, numbers: Any) -> Vector:
        """Make a vector from a torch tensor, a NumPy array or nested lists."""
        array = as_array(numbers)
        return cls(tuple(array.shape), array.tobytes())

    def array(self) -> np.ndarray:
        """Return a read-only fp32 array, [D] or [n, D]."""
        import numpy as np

        return np.frombuffer(self.data, "<f4").reshape(self.shape)

    def rows(self) -> np.ndarray:
        """Return the rows [n, D]; n is 1 for a vector [D]."""
        return self.array().reshape(-1, self.shape[-1])

    @functools.cached_property
    def content(self) -> str:
        """SHA-256 of shape and data, in hex: the vector's name in the bank. Cached."""
        return hashlib.sha256(repr(self.shape).encode() + self.data).hexdigest()

    def __repr__(self) -> str:
        return f"Vector({'x'.join(map(str, self.shape))} {self.content[:8]})"


@functools.lru_cache(256)
def orthonormal(directions: Vector) -> Vector:
    """Return an orthonormal basis [k, D] of the rows' span, in order. A row is dropped if at most a millionth of its
    length is outside the span of its predecessors.

    Source: Gram-Schmidt, applied twice (Kahan; Parlett, The Symmetric Eigenvalue Problem, 6.9).
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
    """The part of a `Run` that `From` uses."""

    key: str


def _run_key(run: RunLike | str) -> str:
    key = run if isinstance(run, str) else getattr(run, "key", None)
    if not isinstance(key, str):
        raise ProgramError(f"expected a Run (a result of lm.run), got {type(run).__name__}")
    return key


def _position(value: TokensLike) -> Tokens:
    if isinstance(value, int) and value < 0:
        raise ProgramError(f"position {value} depends on the run's length; use pc.prompt[{value}]")
    return parse_tokens(value)


class From(Converted, frozen=True, tag="from", dict=True):
    """Rows that another run captured.

    run: a `Run`, its name in the bank, or its key. Stored as text; this value keeps a `Run` alive
    site: the site where the rows were captured; None: the op's site
    position: the captured positions; None: the op's positions. A single row is written to every position; n rows are
        written to n positions, in order
    """

    run: str = field(converter=_run_key)
    site: Site | None = field(converter=optional(parse_site), default=None)
    position: Tokens | None = field(converter=optional(_position), default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.run, str):
            vars(self)["owner"] = self.run
        super().__post_init__()


class SameRun(Converted, frozen=True, tag="same_run"):
    """Rows of an earlier layer of the same run, after the edits that precede this one in the program.

    site: a site of one layer, or of as many layers as the op's site
    position: the source positions, each no later than its target; None: the op's positions. A single row is written
        to every position; n rows are written to n positions, in order
    """

    site: Site = field(converter=parse_site)
    position: Tokens | None = field(converter=optional(_position), default=None)


def check_name(name: object) -> str:
    """Check a name in the bank: 1 to 200 characters that safetensors can store. Raises `ProgramError`."""
    if not isinstance(name, str) or not name or len(name) > 200:
        raise ProgramError(f"expected a name of 1 to 200 characters, got {name!r:.300}")
    if name == "__metadata__" or re.search("[\ud800-\udfff]", name):
        raise ProgramError(f"{name!r} cannot be written to a file: choose another name")
    return name


class Named(PublicStruct, frozen=True, tag="named"):
    """The name of a bank entry, looked up when the request is made: a vector, or means that include the op's site."""

    name: str

    def __post_init__(self) -> None:
        check_name(self.name)


Value = Vector | From | Named | SameRun


class Array(Protocol):
    """Anything NumPy can convert, such as its own arrays and torch tensors."""

    def __array__(self) -> np.ndarray: ...


ValueLike = Value | str | Array | Sequence[float] | Sequence[Sequence[float]]


def as_value(value: ValueLike) -> Value:
    """Make a value from numbers or a bank name; return a value unchanged."""
    if isinstance(value, (Vector, From, Named, SameRun)):
        return value
    if isinstance(value, str):
        return Named(value)
    if isinstance(value, Site):
        raise ProgramError(f"expected a vector, its bank name, pc.From(run, site) or pc.SameRun(site), got {value!r}")
    return Vector.of(value)


MAX_FP32 = (2 - 2**-23) * 2.0**127
DTYPES = ("float32", "bfloat16", "float16")  # dtypes of captures
POOLS = ("mean", "max", "last")  # reductions of captures


def as_number(value: SupportsFloat) -> float:
    """Convert a Python, NumPy or torch number to a finite float. Raises `ProgramError` for anything else."""
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
        raise ProgramError(f"expected a finite number, got {number}")
    if abs(number) > MAX_FP32:
        raise ProgramError(f"expected a number in the range of fp32 (at most {MAX_FP32:.2e}), got {number}")
    return number


def as_strength(value: SupportsFloat) -> float:
    number = as_number(value)
    if number < 0:
        raise ProgramError(f"expected a number of at least 0, got {number}")
    return number


def as_seed(value: SupportsIndex) -> int:
    try:
        seed = as_integer(value)
    except ProgramError:
        raise ProgramError(f"expected an integer seed, got {value!r:.200}") from None
    if not 0 <= seed < 1 << 63:
        raise ProgramError(f"expected a seed of at least 0 and below 2**63, got {seed}")
    return seed


def as_flag(value: bool, path: str | None = None) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # NumPy's bool is `bool_` or `bool`, by version
        raise ProgramError(f"expected True or False, got {value!r:.200}", path)
    return bool(value)


def as_dtype(value: object, path: str | None = None) -> str:
    """Return a name in `DTYPES`, from a name or a torch dtype."""
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("capture dtype", name, DTYPES, path)
    return name


def one_of(what: str, words: Sequence[str]) -> Callable[[str], str]:
    """Return a converter that accepts one of `words`; `what` describes them in the error."""

    def check(value: str) -> str:
        if not isinstance(value, str) or value not in words:
            raise unknown(what, str(value), words)
        return value

    return check


def as_numbers(value: ValueLike) -> Vector | Named:
    vector = as_value(value)
    if not isinstance(vector, (Vector, Named)):
        raise ProgramError(f"expected numbers, got a reference to a row; use run[site][i] for {value}")
    return vector


def as_row(value: ValueLike) -> Vector | Named:
    """Convert to a vector [D]."""
    if isinstance(vector := as_numbers(value), Vector) and len(vector.shape) != 1:
        raise ShapeError(f"expected one row [D], got {list(vector.shape)}")
    return vector


def as_mask(value: ValueLike) -> Vector | Named:
    """Convert to a vector [D]; booleans become 0 and 1."""
    if isinstance(value, (list, tuple)):
        flags = ("bool", "bool_")
        return as_row([float(one) if type(one).__name__ in flags else one for one in value])  # type: ignore[arg-type]
    if "bool" in str(getattr(value, "dtype", "")):
        return as_row(value * 1.0)  # type: ignore[operator]
    return as_row(value)


def as_directions(value: ValueLike) -> Vector | Named:
    """Convert to a vector [D] or [k, D]. Raises `ShapeError` for a row of zeros."""
    if isinstance(vector := as_numbers(value), Vector) and not vector.array().any(axis=-1).all():
        raise ShapeError("expected nonzero directions, got a row of zeros")
    return vector


def check_plane(vector: Vector, field: str = "") -> Vector:
    """Raise `ShapeError` unless the vector has two linearly independent rows, [2, D]."""
    if vector.shape[:-1] != (2,) or not vector.array().any(axis=-1).all() or len(orthonormal(vector).rows()) != 2:
        raise ShapeError(f"expected two linearly independent rows [2, D], got {list(vector.shape)}", field)
    return vector


def as_plane(value: ValueLike) -> Vector | Named:
    """Convert to a vector [2, D]. Raises `ShapeError` for rows that do not span a plane."""
    vector = as_numbers(value)
    return check_plane(vector) if isinstance(vector, Vector) else vector


def as_direction(value: ValueLike) -> Vector | Named:
    """Convert to a vector [D]. Raises `ShapeError` for zeros."""
    return as_row(as_directions(value))
