"""Sites: the named tensors inside a model, as words.

`resid_post[12]` is one layer, `resid_post[8:12]` four, `resid_post` all of them; `z[5, 3]` is head 3 of layer 5.
Layers and indices are 0-based, half-open, and may count from the end.  What a word means on a model is in `sites`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, SupportsIndex

import msgspec

from patchclamp.errors import ProgramError, unknown
from patchclamp.language.aliases import elsewhere, hook
from patchclamp.language.registry import NNTERP, SITES

if TYPE_CHECKING:
    from patchclamp.language.tokens import Selection, TokensLike


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


class Site(msgspec.Struct, frozen=True):
    """A named tensor: its word, its layers (None: all), and an index within its row (None: the whole row)."""

    name: str
    layers: Index | None = None
    index: Index | None = None

    def __post_init__(self) -> None:
        spec = SITES.get(self.name)
        if spec is None:
            raise unknown("site", self.name, SITES)
        for field in ("layers", "index"):
            msgspec.structs.force_setattr(self, field, _index(getattr(self, field)))
        if self.layers is not None and not spec.layered:
            raise ProgramError(f"{self.name} has no layers: write {self.name!r} without brackets")
        if self.index is not None and not spec.index:
            raise ProgramError(f"{self.name} takes a layer only; it has no second index")

    def __getitem__(self, key: IndexLike | tuple[IndexLike, ...]) -> Site:
        if self.layers is not None or self.index is not None:
            raise ProgramError(f"{self} is already indexed")
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > 2:
            raise ProgramError(f"a site takes a layer and at most one index, not {len(keys)}")
        return Site(self.name, *map(_index, keys))

    def __matmul__(self, tokens: Selection | str) -> At:
        from patchclamp.language.tokens import parse_tokens

        return At(self, parse_tokens(tokens))

    def __str__(self) -> str:
        if self.layers is None and self.index is None:
            return self.name
        layers = ":" if self.layers is None else str(self.layers)
        return f"{self.name}[{layers}]" if self.index is None else f"{self.name}[{layers}, {self.index}]"

    def __repr__(self) -> str:
        return f"pc.{self}"


class At(msgspec.Struct, frozen=True):
    """A site at a selection of tokens: what `capture=` takes. Prints as `z[5, 3] @ prompt[-1]`.

    `@` binds tighter than `|`, `&` and `-`; in `pc.embed @ pc.generated & pc.token(13)`, `&` joins the selections.
    """

    site: Site
    tokens: Selection

    def __or__(self, other: TokensLike) -> At:
        return At(self.site, self.tokens | other)

    def __and__(self, other: TokensLike) -> At:
        return At(self.site, self.tokens & other)

    def __sub__(self, other: TokensLike) -> At:
        return At(self.site, self.tokens - other)

    def __str__(self) -> str:
        return f"{self.site} @ {self.tokens}"


def as_integer(value: SupportsIndex) -> int:
    """A whole number of Python, NumPy or torch as an int. Raises `ProgramError` for all else, 1.0 and True included."""
    try:
        if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):  # a mask is no list of numbers
            raise AttributeError
        return int(value.__index__())
    except AttributeError:
        raise ProgramError(f"an index is a whole number, not {value!r}") from None


def _index(key: IndexLike) -> Index | None:
    """An index from what stands in brackets; None for all, as in `[:]`."""
    if isinstance(key, slice):
        key = Range.of(key)
    if key is None or isinstance(key, Range):
        return None if key == Range() else key
    return as_integer(key)


_BRACKETS = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]*)\s*(?:\[(?P<keys>[^\]]*)\])?\s*")
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


def parse_site(text: Site | str) -> Site:
    """A site from its text form or its name in TransformerLens or nnterp; a site is returned as it is.

    Raises: `UnknownName` for a word that is no site (for a name of TransformerLens or nnterp it says what to use
    instead), `UnsupportedSite` for attention weights, `ProgramError` for malformed text.
    """
    if isinstance(text, Site):
        return text
    if not isinstance(text, str):
        raise ProgramError(f"a site is pc.resid_post[12] or 'resid_post[12]', not {type(text).__name__} {text!r}")
    if hooked := hook(text.strip()):
        return Site(*hooked)
    if reason := elsewhere(text.strip()):
        raise reason
    words = _BRACKETS.fullmatch(text)
    if words is None:
        raise ProgramError(f"{text!r} is not a site; write it as 'resid_post[12]' or 'z[5, 3]'")
    name = NNTERP.get(words["name"], words["name"])
    if name not in SITES:
        raise unknown("site", name, SITES)
    keys = [] if words["keys"] is None else words["keys"].split(",")
    if len(keys) > 2:
        raise ProgramError(f"{text!r}: a site takes a layer and at most one index")
    return Site(name, *(parse_index(key) for key in keys))
