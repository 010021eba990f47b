"""Spots: a tensor of the model at some tokens, as a proxy names it, and the meaning of brackets on it.

A spot has the module's shape without the batch axis: [T, W], or [T, H, E] for heads. The names of nnterp
(`layers_output[5]`) keep the batch axis, [1, T, W], when indexed and when saved. `logits` never has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.language.site import SITES, Site
from patchclamp.language.tokens import Positions, Range, Selection, Tokens, every, parse_tokens, prompt
from patchclamp.language.values import Vector, as_array, as_number, check_dense

WHOLE = slice(None)


class Spot(msgspec.Struct, frozen=True):
    """A site at a selection of tokens.

    whole: True if the selection is a whole group; brackets then count within it
    named: True if the caller named the group (`t.generated`); a selection in brackets is then restricted to it
    parted: True if heads, neurons or experts were already chosen, or the site has none; brackets then select tokens
    batched: True if there is a leading batch axis
    single: True if one token was chosen by number, which drops the token axis
    numbered: True if that was in brackets of this tensor; no further brackets are allowed
    """

    site: Site
    tokens: Tokens
    whole: bool = True
    named: bool = False
    parted: bool = True
    batched: bool = False
    single: bool = False
    numbered: bool = False

    @classmethod
    def of(cls, site: Site, group: Tokens, named: bool, single: bool = False, batched: bool = False) -> Spot:
        """A site at a group of tokens: `prompt` (for logits only its last token), `generated` or `every`."""
        has_parts = bool(SITES[site.name].index)
        whole = isinstance(group, Positions) and group.index is None
        tokens = group
        if site.name == "logits" and group == prompt:
            tokens = prompt[-1:]
        return cls(site, tokens, whole, named, not has_parts or site.index is not None, batched, single and not batched)

    def __getitem__(self, key: Any) -> Spot:
        keys = list(key) if isinstance(key, tuple) else [WHOLE if key is Ellipsis else key]
        if self.numbered:
            raise ProgramError(
                f"{self}: one token was chosen by its number, and this is its row. Tensors here are [T, D], one row a "
                "token, and no tuple as module.output is in nnsight, so [0] is the first token: write output[:] for "
                "every token, output[-1] for the last, and no brackets after that"
            )
        if any(one is None or one is Ellipsis for one in keys):
            raise ProgramError(f"{self}: brackets take numbers, ranges, lists and selections, not {key!r}")
        spot = self._without_batch(keys) if self.batched else self
        if not spot.parted:
            spot = spot._part(keys.pop(1 if len(keys) > 1 else 0)) if _is_part(keys) else spot
        if keys:
            spot = spot._select(keys.pop(0))
        if any(not _is_whole(one) for one in keys):
            raise ProgramError(
                f"{spot}: brackets choose tokens, and of heads, neurons and experts which of them; single numbers of a "
                "row cannot be read or written there: use .save() and index it after the trace, or a vector with zeros"
            )
        return spot

    def _without_batch(self, keys: list[Any]) -> Spot:
        """Consumes the batch index at the front of the brackets."""
        first = keys.pop(0)
        if _is_whole(first):
            return self
        if isinstance(first, Selection) or first not in (0, -1):
            raise ProgramError(
                f"{self} has a batch axis of 1 in front, as in nnterp: write [:, {written(first)}] or "
                f"[0, {written(first)}]"
            )
        return msgspec.structs.replace(self, batched=False)

    def _part(self, key: Any) -> Spot:
        """Selects heads, neurons or experts."""
        if isinstance(key, (Sequence, range)) or getattr(key, "ndim", 0):
            part, name = SITES[self.site.name].index, self.site.name
            raise ProgramError(
                f"{self.site}: a {part} is chosen by its number, or neighbours as a range, {name}[3] or {name}[2:5], "
                "not by a list or a mask: write a line for each"
            )
        site = self.site if _is_whole(key) else Site(self.site.name, self.site.layers, key)
        return msgspec.structs.replace(self, site=site, parted=True)

    def _select(self, key: Any) -> Spot:
        """Selects tokens of the group."""
        if _is_whole(key):
            return self
        if isinstance(key, (Selection, str)):
            chosen = parse_tokens(key)
            tokens = self.tokens & chosen if self.named and self.tokens != every else chosen
            return msgspec.structs.replace(self, tokens=tokens, whole=False)
        if not self.whole:
            raise ProgramError(f"{self}: its tokens are chosen already")
        if self.site.name == "logits" and self.tokens == prompt[-1:]:
            return self._sampled(key)
        group = self.tokens
        assert isinstance(group, Positions)
        if isinstance(key, slice):
            return msgspec.structs.replace(self, tokens=group[key], whole=False)
        if isinstance(key, (Sequence, range)) or hasattr(key, "tolist"):
            key = self._numbers(key)
        if isinstance(key, list):
            return msgspec.structs.replace(self, tokens=group[key], whole=False)
        return msgspec.structs.replace(self, tokens=group[key], whole=False, single=True, numbered=True)

    def _numbers(self, key: Any) -> Any:
        """A list of positions, or a single one, from a list, a tensor or an array."""
        key = key.tolist() if hasattr(key, "tolist") else list(key)
        if isinstance(key, list) and any(isinstance(one, (list, tuple)) for one in key):
            raise ProgramError(f"{self}: tokens are chosen by one list of numbers, not by an index of several axes")
        if any(isinstance(one, bool) for one in (key if isinstance(key, list) else [key])):
            raise ProgramError(
                f"{self}: tokens are chosen by their numbers, not by a mask: give mask.nonzero().flatten()"
            )
        return key

    def _sampled(self, key: Any) -> Spot:
        """Selects from a prompt's logits, which have one row: the last token's."""
        if key not in (0, -1):
            raise ProgramError(
                f"logits[{written(key)}]: logits exist only where a token is sampled, of the prompt at its last "
                "token: write logits[-1], or t.generated.logits for the tokens after it"
            )
        return msgspec.structs.replace(self, tokens=prompt[-1], whole=False, single=True, numbered=True)

    def __str__(self) -> str:
        return f"{self.site} @ {self.tokens}"


def _is_part(keys: list[Any]) -> bool:
    """True if brackets on a site with parts choose among them: alone, or after the tokens."""
    return len(keys) > 1 or (len(keys) == 1 and not isinstance(keys[0], (Selection, str)))


def _is_whole(key: Any) -> bool:
    return isinstance(key, slice) and key == WHOLE


def written(key: Any) -> str:
    """The source text of a key in brackets."""
    return str(Range.of(key)) if isinstance(key, slice) else str(key)


def positive(site: Site, layers: int) -> Site:
    """The site with a negative layer counted from the front instead."""
    if isinstance(site.layers, int) and -layers <= site.layers < 0:
        return Site(site.name, site.layers + layers, site.index)
    return site


def numbers(value: Any) -> float | np.ndarray | None:
    """A number, or an fp32 array [..., W], copied because the caller may change the original later; None for any other
    value. Raises `ProgramError` for values that `as_array` and `as_number` refuse."""
    if isinstance(value, Vector):
        return np.array(value.array())
    if isinstance(value, str):
        return None
    if hasattr(value, "detach"):
        check_dense(value)
    if isinstance(value, Sequence) or getattr(value, "shape", ()) != ():
        return np.array(as_array(value))
    if not hasattr(value, "__float__"):
        return None
    return as_number(value)
