"""Sites: the named tensors inside a model, as words.

`resid_post[12]` is one layer, `resid_post[8:12]` four, `resid_post` all of them; `z[5, 3]` is head 3 of layer 5.
Layers and indices are 0-based, half-open, and may count from the end.  What a word means on a model is in `sites`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from patchclamp.errors import ProgramError, UnknownName, UnsupportedSite, unknown
from patchclamp.language.aliases import NNTERP, elsewhere, hook

if TYPE_CHECKING:
    from patchclamp.language.tokens import Tokens


class Kind(msgspec.Struct, frozen=True):
    """What a site's brackets may hold: a layer or not, and what its second index counts (None: it takes none)."""

    layered: bool
    index: str | None = None


SITES: dict[str, Kind] = {
    "embed": Kind(layered=False),
    "resid_pre": Kind(layered=True),
    "resid_mid": Kind(layered=True),
    "resid_post": Kind(layered=True),
    "attn_in": Kind(layered=True),
    "attn_out": Kind(layered=True),
    "mlp_in": Kind(layered=True),
    "mlp_out": Kind(layered=True),
    "q": Kind(layered=True, index="head"),
    "k": Kind(layered=True, index="key/value head"),
    "v": Kind(layered=True, index="key/value head"),
    "z": Kind(layered=True, index="head"),
    "neurons": Kind(layered=True, index="neuron"),
    "router": Kind(layered=True, index="expert"),
    "final_norm": Kind(layered=False),
    "logits": Kind(layered=False),
}


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
        return cls(*(whole(end) if end is not None else None for end in (key.start, key.stop, key.step)))

    def indices(self, length: int) -> range:
        """The indices within 0 … length−1, with slice semantics."""
        return range(*slice(self.start, self.stop, self.step).indices(length))

    def __str__(self) -> str:
        ends = ("" if end is None else str(end) for end in (self.start, self.stop))
        return ":".join(ends) + ("" if self.step is None else f":{self.step}")


Index = int | Range


class Site(msgspec.Struct, frozen=True):
    """A named tensor: `name`, its layers (None: all), and an index within it (None: the whole width)."""

    name: str
    layers: Index | None = None
    index: Index | None = None

    def __post_init__(self) -> None:
        kind = SITES.get(self.name)
        if kind is None:
            raise unknown("site", self.name, SITES)
        for field in ("layers", "index"):
            msgspec.structs.force_setattr(self, field, _index(getattr(self, field)))
        if self.layers is not None and not kind.layered:
            raise ProgramError(f"{self.name} has no layers: write {self.name!r} without brackets")
        if self.index is not None and kind.index is None:
            raise ProgramError(f"{self.name} takes a layer only; it has no second index")

    def __getitem__(self, key: Any) -> Site:
        if self.layers is not None or self.index is not None:
            raise ProgramError(f"{self} is already indexed")
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > 2:
            raise ProgramError(f"a site takes a layer and at most one index, not {len(keys)}")
        return Site(self.name, *(_index(k) for k in keys))

    def __matmul__(self, tokens: Tokens | str) -> At:
        from patchclamp.language.tokens import tokens as as_tokens

        return At(self, as_tokens(tokens))

    def __str__(self) -> str:
        if self.layers is None and self.index is None:
            return self.name
        layers = ":" if self.layers is None else str(self.layers)
        return f"{self.name}[{layers}]" if self.index is None else f"{self.name}[{layers}, {self.index}]"

    def __repr__(self) -> str:
        return f"pc.{self}"


class At(msgspec.Struct, frozen=True):
    """A site at a selection of tokens: what `capture=` takes. Prints as `z[5, 3] @ prompt[-1]`."""

    site: Site
    tokens: Any

    def __or__(self, other: Any) -> At:
        return At(self.site, self.tokens | other)

    def __sub__(self, other: Any) -> At:
        return At(self.site, self.tokens - other)

    def __str__(self) -> str:
        return f"{self.site} @ {self.tokens}"


def whole(value: Any) -> int:
    """A number that counts, or `ProgramError`: 1.0 is not one."""
    try:
        if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):  # a mask is no list of numbers
            raise AttributeError
        return int(value.__index__())
    except AttributeError:
        raise ProgramError(f"an index is a whole number, not {value!r}") from None


def _index(key: Any) -> Index | None:
    if key is None or isinstance(key, Range):
        return None if key == Range() else key
    if isinstance(key, slice):
        made = Range.of(key)
        return None if made == Range() else made
    return whole(key)


_BRACKETS = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]*)\s*(?:\[(?P<keys>[^\]]*)\])?\s*")
_NUMBER = r"\s*(-?\d{1,9})\s*"
_SLICE = re.compile(r"\s*(-?\d{1,9})?\s*:\s*(-?\d{1,9})?\s*(?::\s*(-?\d{1,9})?\s*)?")


def parse_index(text: str) -> Index | None:
    """`12` → 12, `8:12` → Range(8, 12), `:` → None."""
    if found := re.fullmatch(_NUMBER, text):
        return int(found[1])
    if found := _SLICE.fullmatch(text):
        made = Range(*(None if end is None else int(end) for end in found.groups()))
        return None if made == Range() else made
    raise ProgramError(f"{text.strip()!r} is neither a number nor a range such as 8:12")


def site(text: Site | str) -> Site:
    """A site from its text form, from its name in TransformerLens or nnterp (`language.aliases`), or a site itself.

    Raises `UnknownName`, which of a name of theirs that is no site of ours says what to use instead, and
    `UnsupportedSite` for attention weights.
    """
    if isinstance(text, Site):
        return text
    if not isinstance(text, str):
        raise ProgramError(f"a site is pc.resid_post[12] or 'resid_post[12]', not {type(text).__name__} {text!r}")
    if hooked := hook(text.strip()):
        return Site(*hooked)
    if other := elsewhere(text.strip()):
        why, never = other
        raise (UnsupportedSite if never else UnknownName)(why)
    found = _BRACKETS.fullmatch(text)
    if found is None:
        raise ProgramError(f"{text!r} is not a site; write it as 'resid_post[12]' or 'z[5, 3]'")
    name = NNTERP.get(found["name"], found["name"])
    if name not in SITES:
        raise unknown("site", name, SITES)
    keys = [] if found["keys"] is None else found["keys"].split(",")
    if len(keys) > 2:
        raise ProgramError(f"{text!r}: a site takes a layer and at most one index")
    return Site(name, *(parse_index(key) for key in keys))


__all__ = ["SITES", "At", "Index", "Kind", "Range", "Site", "UnknownName", "parse_index", "site", "whole"]
