"""Sites: the named tensors inside a model, as words.

`resid_post[12]` is one layer, `resid_post[8:12]` four, `resid_post` all of them; `z[5, 3]` is head 3 of layer 5.
Layers and indices are 0-based, half-open, and may count from the end.  What a word means on a model is in `sites`.
"""

from __future__ import annotations

import re

import msgspec

from patchclamp.errors import ProgramError, UnsupportedSite, unknown
from patchclamp.language.aliases import edited_elsewhere, elsewhere, hook
from patchclamp.language.ranges import Index, IndexLike, as_index, parse_index
from patchclamp.language.registry import NNTERP, SITES
from patchclamp.language.tokens import Selection, TokensLike, parse_tokens


class Site(msgspec.Struct, frozen=True):
    """A named tensor: its word, its layers (None: all), and an index within its row (None: the whole row)."""

    name: str
    layers: Index | None = None
    index: Index | None = None

    def __post_init__(self) -> None:
        spec = SITES.get(self.name) if isinstance(self.name, str) else None
        if spec is None:
            raise unknown("site", self.name, SITES)
        for field in ("layers", "index"):
            msgspec.structs.force_setattr(self, field, as_index(getattr(self, field)))
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
        if any(key is None for key in keys):
            raise ProgramError(f"expected a layer or a range, got None; {self.name} without brackets is all layers")
        return Site(self.name, *map(as_index, keys))

    def __matmul__(self, tokens: Selection | str) -> At:
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


def parse_edited_site(text: Site | str) -> Site:
    """`parse_site`, for a site that is edited. Raises `UnsupportedSite` for a name of TransformerLens whose edit there
    reaches other readers of the tensor than an edit of our site does."""
    site = parse_site(text)
    if isinstance(text, str) and (reason := edited_elsewhere(text.strip())):
        raise UnsupportedSite(reason)
    return site


_BRACKETS = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]*)\s*(?:\[(?P<keys>[^\]]*)\])?\s*")


MAX_TEXT = 1 << 12  # characters of a site's text form


def parse_site(text: Site | str) -> Site:
    """A site from its text form or its name in TransformerLens or nnterp; a site is returned as it is.

    Raises: `UnknownName` for a word that is no site (for a name of TransformerLens or nnterp it says what to use
    instead), `UnsupportedSite` for attention weights, `ProgramError` for malformed text.
    """
    if isinstance(text, Site):
        return text
    if not isinstance(text, str):
        raise ProgramError(f"a site is pc.resid_post[12] or 'resid_post[12]', not {type(text).__name__} {text!r}")
    if len(text) > MAX_TEXT:
        raise ProgramError(f"a site of at most {MAX_TEXT} characters is needed, not {len(text)}")
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
