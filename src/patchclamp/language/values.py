"""Values: the vectors an op writes. A `Vector` carries its numbers; `Named` and `From` say where they are: in the bank,
or in what another run captured."""

from __future__ import annotations

import hashlib
import math
import re
from typing import TYPE_CHECKING, Any

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, ShapeError
from patchclamp.language.site import Site, site
from patchclamp.language.tokens import Tokens
from patchclamp.language.tokens import tokens as as_tokens

if TYPE_CHECKING:
    import numpy as np


class Vector(msgspec.Struct, frozen=True, tag="vector"):
    """Numbers: one row [D] for every selected position, or [n, D] for the n selected positions in order; one row
    of heads may be [H, E].

    `data` is little-endian fp32, row by row.
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
        import numpy as np

        if "complex" in str(getattr(numbers, "dtype", "")):
            raise ShapeError("a vector is of real numbers")
        if hasattr(numbers, "detach"):
            numbers = numbers.detach().cpu().float().numpy()
        try:
            with np.errstate(over="ignore"):
                array = np.ascontiguousarray(numbers, dtype="<f4")
        except (TypeError, ValueError, OverflowError) as error:
            kind = type(numbers).__name__
            raise ShapeError(f"a vector is a tensor or a list of numbers, not {kind}: {error}") from None
        return cls(tuple(array.shape), array.tobytes())

    def array(self) -> np.ndarray:
        """The numbers, fp32 [D] or [n, D], read-only."""
        import numpy as np

        return np.frombuffer(self.data, "<f4").reshape(self.shape)

    def rows(self) -> np.ndarray:
        """The numbers as [n, D]; n is 1 for a vector given as [D]."""
        return self.array().reshape(-1, self.shape[-1])

    @property
    def content(self) -> str:
        """SHA-256 of shape and numbers, in hex: the vector's name in the bank."""
        return hashlib.sha256(repr(self.shape).encode() + self.data).hexdigest()

    def __repr__(self) -> str:
        return f"Vector({'x'.join(map(str, self.shape))} {self.content[:8]})"


def orthonormal(given: Vector) -> Vector:
    """An orthonormal basis, [k, D], of the span of some rows, in their order; a row that adds less than a millionth of
    its length to the span is left out."""
    import numpy as np

    basis: list[np.ndarray] = []
    for row in given.rows().astype(np.float64):
        rest, length = row, np.linalg.norm(row)
        for _ in range(2):  # twice is enough (Kahan; Parlett, The symmetric eigenvalue problem, 6.9)
            for unit in basis:
                rest = rest - (rest @ unit) * unit
        if np.linalg.norm(rest) > 1e-6 * length:
            basis.append(rest / np.linalg.norm(rest))
    return Vector.of(np.stack(basis))


class From(msgspec.Struct, frozen=True, tag="from", dict=True):
    """The row that `run` captured at `site` and `position`; without them, at the place being written.

    `run` is a `Run`, which is then kept until this value is dropped, its name in the bank, or its key.  A selection of
    one position gives that row to every written position; one of n gives n written positions a row each, in order.
    """

    run: Any
    site: Any = None
    position: Any = None

    def __post_init__(self) -> None:
        set_field = msgspec.structs.force_setattr
        if not isinstance(self.run, str):
            key = getattr(self.run, "key", None)
            if not isinstance(key, str):
                raise ProgramError(f"From takes a Run (what lm.run returned), not {type(self.run).__name__}", "run")
            self.__dict__["owner"] = self.run  # type: ignore[index]
            set_field(self, "run", key)
        for field, read in (("site", site), ("position", _position)):
            try:
                given = getattr(self, field)
                set_field(self, field, None if given is None else read(given))
            except PatchclampError as error:
                raise error.under(field) from None


def _position(value: Any) -> Tokens:
    if isinstance(value, int) and value < 0:
        raise ProgramError(f"position {value} counts from an end that depends on the run; write pc.prompt[{value}]")
    return as_tokens(value)


def check_name(name: Any) -> str:
    """A name in the bank, or `ProgramError`: text that a file can hold, of at most 200 characters."""
    if not isinstance(name, str) or not name or len(name) > 200:
        raise ProgramError(f"a name is text, not empty and of at most 200 characters: not {name!r:.300}")
    if name == "__metadata__" or re.search("[\ud800-\udfff]", name):
        raise ProgramError(f"{name!r} cannot be written to a file: choose another name")
    return name


class Named(msgspec.Struct, frozen=True, tag="named"):
    """What the bank has under a name when the request is made: a vector, or means, of which the row of the place that
    is written."""

    name: str

    def __post_init__(self) -> None:
        check_name(self.name)


Value = Vector | From | Named


def value(given: Any) -> Value:
    """A value from a vector's numbers, a name in the bank, or a value itself."""
    if isinstance(given, (Vector, From, Named)):
        return given
    if isinstance(given, str):
        return Named(given)
    if isinstance(given, Site):
        raise ProgramError(f"a value is a vector, its name in the bank, or pc.From(run, site), not {given!r}")
    return Vector.of(given)
