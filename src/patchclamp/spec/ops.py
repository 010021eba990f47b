"""Ops: what to do at a site. h is a row of the site in fp32; ops act in program order and round once at the end.

Each op is placed `at` a site (an object or its text form) on a selection of `tokens` (all, unless given).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, unknown
from patchclamp.spec.site import At, site
from patchclamp.spec.tokens import every
from patchclamp.spec.tokens import tokens as as_tokens
from patchclamp.spec.values import value as as_value

LARGEST = (2 - 2**-23) * 2.0**127  # of fp32
DTYPES = ("float32", "bfloat16", "float16")


class Op(msgspec.Struct, frozen=True, tag=str.lower):
    """Base of all ops; its fields are read from objects or text, and an error names the field."""

    def _place(self) -> None:
        at = self.at  # type: ignore[attr-defined]
        if isinstance(at, At):
            if self.tokens != every:  # type: ignore[attr-defined]
                raise ProgramError(f"the tokens are given twice: {at} and tokens={self.tokens}", "tokens")  # type: ignore[attr-defined]
            msgspec.structs.force_setattr(self, "tokens", at.tokens)
            at = at.site
        self._read("at", site, at)
        self._read("tokens", as_tokens)

    def _read(self, field: str, read: Callable[[Any], Any], *given: Any) -> None:
        try:
            msgspec.structs.force_setattr(self, field, read(given[0] if given else getattr(self, field)))
        except PatchclampError as error:
            raise error.under(field) from None


class Capture(Op, frozen=True, forbid_unknown_fields=True):
    """Keep h as it is at this place in the program's order, in `dtype`: float32, bfloat16 or float16."""

    at: Any
    tokens: Any = every
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        self._place()
        self._read("dtype", _dtype)


class Add(Op, frozen=True, forbid_unknown_fields=True):
    """h + scale · v, for v [D], [n, D] for the n selected positions in order, or `From`.

    Source: steering vectors; Turner et al. 2023 (arXiv:2308.10248), Rimsky et al. 2023 (arXiv:2312.06681).
    """

    value: Any
    at: Any
    tokens: Any = every
    scale: Any = 1.0

    def __post_init__(self) -> None:
        self._place()
        self._read("value", as_value)
        self._read("scale", _number)


class Replace(Op, frozen=True, forbid_unknown_fields=True):
    """(1 − alpha) · h + alpha · v; with `From` an activation patch, with alpha 1 exactly v.

    Source: interchange interventions; Vig et al. 2020 (arXiv:2004.12265), causal tracing; Meng et al. 2022
    (arXiv:2202.05262).
    """

    value: Any
    at: Any
    tokens: Any = every
    alpha: Any = 1.0

    def __post_init__(self) -> None:
        self._place()
        self._read("value", as_value)
        self._read("alpha", _number)


class Zero(Op, frozen=True, forbid_unknown_fields=True):
    """0: zero ablation."""

    at: Any
    tokens: Any = every

    def __post_init__(self) -> None:
        self._place()


OPS: dict[str, type[Op]] = {kind.__name__.lower(): kind for kind in (Capture, Add, Replace, Zero)}


def _number(given: Any) -> float:
    try:
        number = float(given)
    except (TypeError, ValueError, OverflowError):
        raise ProgramError(f"a number is needed, not {given!r}") from None
    if not math.isfinite(number):
        raise ProgramError(f"a finite number is needed, not {number}")
    if abs(number) > LARGEST:
        raise ProgramError(f"a number of fp32 is needed, at most {LARGEST:.2e}, not {number}")
    return number


def _dtype(given: Any) -> str:
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("capture dtype", name, DTYPES)
    return name


def capture(given: Any) -> Capture:
    """A capture from what `capture=` takes: a site, `site @ tokens`, the text of either, or a `Capture`."""
    if isinstance(given, Capture):
        return given
    if isinstance(given, str) and "@" in given:
        at, tokens = given.split("@", 1)
        return Capture(at, tokens)
    return Capture(given)
