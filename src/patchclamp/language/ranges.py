"""Indices and half-open ranges of layers, heads and positions: hashable, with text forms."""

from __future__ import annotations

import re
from typing import SupportsIndex

import msgspec

from patchclamp.errors import ProgramError


class Range(msgspec.Struct, frozen=True):
    """A half-open range with optional ends, as Python's slice but hashable; prints as `8:12` or `::2`."""

    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.step is not None and self.step < 1:
            raise ProgramError(f"a range counts upwards: step {self.step} is not at least 1")

    @classmethod
    def of(cls, key: slice) -> Range:
        return cls(*(as_integer(end) if end is not None else None for end in (key.start, key.stop, key.step)))

    @property
    def ends(self) -> tuple[int | None, int | None]:
        return self.start, self.stop

    def indices(self, length: int) -> range:
        """The indices within 0 … length−1, with slice semantics."""
        return range(*slice(self.start, self.stop, self.step).indices(length))

    def __str__(self) -> str:
        ends = ("" if end is None else str(end) for end in self.ends)
        return ":".join(ends) + ("" if self.step is None else f":{self.step}")


Index = int | Range
IndexLike = SupportsIndex | slice | Range | None


def as_integer(value: SupportsIndex) -> int:
    """A whole number of Python, NumPy or torch as an int. Raises `ProgramError` for all else, 1.0 and True included."""
    try:
        if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):  # a mask is no list of numbers
            raise AttributeError
        return int(value.__index__())
    except (AttributeError, TypeError, RuntimeError):  # a tensor of several numbers has the method
        raise ProgramError(f"an index is a whole number, not {value!r:.200}") from None


def as_index(key: IndexLike) -> Index | None:
    """An index from what stands in brackets; None for all, as in `[:]`."""
    if isinstance(key, slice):
        key = Range.of(key)
    if key is None or isinstance(key, Range):
        return None if key == Range() else key
    return as_integer(key)


_NUMBER = r"\s*(-?\d{1,9})\s*"
_SLICE = re.compile(r"\s*(-?\d{1,9})?\s*:\s*(-?\d{1,9})?\s*(?::\s*(-?\d{1,9})?\s*)?")


def parse_index(text: str) -> Index | None:
    """`12` → 12, `8:12` → Range(8, 12), `:` → None."""
    if number := re.fullmatch(_NUMBER, text):
        return int(number[1])
    if ends := _SLICE.fullmatch(text):
        index = Range(*(None if end is None else int(end) for end in ends.groups()))
        return None if index == Range() else index
    raise ProgramError(f"{text.strip()!r} is neither a number nor a range such as 8:12")
