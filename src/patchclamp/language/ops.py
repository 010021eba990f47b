"""Ops: what to do at a site. h is a row of the site in fp32; ops act in program order and round once at the end.

Each op is placed `at` a site (an object or its text form) on a selection of `tokens` (all, unless given).
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, unknown
from patchclamp.language.site import At, site
from patchclamp.language.tokens import every
from patchclamp.language.tokens import tokens as as_tokens
from patchclamp.language.values import Named, Vector, check_name
from patchclamp.language.values import value as as_value

MAX_FP32 = (2 - 2**-23) * 2.0**127  # of fp32
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
    """(1 − a) · h + a · v, where a is `alpha`, times the `mask` [D] if there is one; with `From` an activation patch,
    where a is 1 exactly v.

    Source: interchange interventions; Vig et al. 2020 (arXiv:2004.12265), causal tracing; Meng et al. 2022
    (arXiv:2202.05262).
    """

    value: Any
    at: Any
    tokens: Any = every
    alpha: Any = 1.0
    mask: Any = None

    def __post_init__(self) -> None:
        self._place()
        self._read("value", as_value)
        self._read("alpha", _number)
        if self.mask is not None:
            self._read("mask", _row)


class Zero(Op, frozen=True, forbid_unknown_fields=True):
    """0: zero ablation."""

    at: Any
    tokens: Any = every

    def __post_init__(self) -> None:
        self._place()


class Mean(Op, frozen=True, forbid_unknown_fields=True):
    """v, in h's place: mean ablation, where `value` is the name of means in the bank (`lm.bank.mean`).

    Source: Wang et al. 2022 (arXiv:2211.00593).
    """

    value: Any
    at: Any
    tokens: Any = every

    def __post_init__(self) -> None:
        self._place()
        self._read("value", as_value)


class Use(Op, frozen=True, forbid_unknown_fields=True):
    """The edits of a program in the bank, in its place; each vector added, and each noise, `scale` times as strong.

    `tokens`, if given, stand for the tokens of every one of them. A steering module, for example: `lm.bank["happy"] =
    [pc.Add(...), pc.Add(...)]`, and then `pc.Use("happy", scale=2.0)`.
    """

    name: Any
    scale: Any = 1.0
    tokens: Any = None

    def __post_init__(self) -> None:
        self._read("name", check_name)
        self._read("scale", _number)
        if self.tokens is not None:
            self._read("tokens", as_tokens)

    def scaled(self, op: Op) -> Op:
        """An op of the program as it is used. Raises `ProgramError` for one that has no strength to be scaled."""
        changed: dict[str, Any] = {} if self.tokens is None else {"tokens": self.tokens}
        strength = {Add: "scale", Noise: "std", Use: "scale"}.get(type(op))
        if self.scale != 1.0:
            if strength is None or (isinstance(op, Noise) and self.scale < 0):
                raise ProgramError(f"{type(op).__name__} cannot be scaled by {self.scale}: Add and Noise can", "scale")
            changed[strength] = self.scale * getattr(op, strength)
        return msgspec.structs.replace(op, **changed)


class Scale(Op, frozen=True, forbid_unknown_fields=True):
    """factor · h."""

    factor: Any
    at: Any
    tokens: Any = every

    def __post_init__(self) -> None:
        self._place()
        self._read("factor", _number)


class Ablate(Op, frozen=True, forbid_unknown_fields=True):
    """h − Σ (h · u) u over an orthonormal basis u of `directions`, [D] or [k, D]: h without what lies in their span.

    The basis is made once, in fp64, by Gram and Schmidt's way; directions that add nothing to the span are left out.
    Source: directional ablation; Arditi et al. 2024 (arXiv:2406.11717).
    """

    directions: Any
    at: Any
    tokens: Any = every

    def __post_init__(self) -> None:
        self._place()
        self._read("directions", _span)


class Clamp(Op, frozen=True, forbid_unknown_fields=True):
    """h with its projection on a `direction` [D], h · d / |d|, at least `low` and at most `high` (None: no bound).

    Source: clamping a feature; Templeton et al. 2024, "Scaling monosemanticity", with a direction in its place.
    """

    direction: Any
    at: Any
    tokens: Any = every
    low: Any = None
    high: Any = None

    def __post_init__(self) -> None:
        self._place()
        self._read("direction", _span)
        if isinstance(self.direction, Vector):
            self._read("direction", _row)
        for bound in ("low", "high"):
            if getattr(self, bound) is not None:
                self._read(bound, _number)
        if self.low is None and self.high is None:
            raise ProgramError("a bound is needed: low, high or both", "low")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ProgramError(f"low ({self.low}) is above high ({self.high})", "low")


class Noise(Op, frozen=True, forbid_unknown_fields=True):
    """h + std · ε; `relative`: std times the root mean square of the row.

    ε is standard normal and depends on nothing but `seed`, the token's position, the site and the index in the row
    (`kernels.noise`): the same on every engine, in every batch.
    Source: fuzzing; Roger 2025 (LessWrong, "Fuzzing LLMs sometimes makes them reveal their secrets").
    """

    std: Any
    at: Any
    tokens: Any = every
    seed: Any = 0
    relative: Any = False

    def __post_init__(self) -> None:
        self._place()
        self._read("std", _size)
        self._read("seed", _seed)
        self._read("relative", _flag)


class Apply(Op, frozen=True, forbid_unknown_fields=True):
    """fn(h): any Python on the rows, [n, D] fp32 on the model's device, that gives as many of the same shape.

    It is told more where it has parameters for that, by these names and without a default: `positions`, the rows' own
    in their request, ascending, int64 [n] on the same device, and `site`, the text of the one at hand, such as
    "resid_post[3]": `def fn(h, positions, site)`.

    It is called on the engine's thread with rows of one request and place, as few or many as come together: of one run
    of consecutive positions, in one step of the engine; so a row's result must depend on that row alone. The rows are
    its own to keep or change. What it raises is its run's error, and it is not called again. It may not wait for an
    engine. Only where `pc.LM(..., allow_code=True)` says so, on engines in this process; its steps run without CUDA
    graphs, and a program with it cannot be written down or sent. On a GPU rows are rounded to the model's dtype where
    code begins.
    """

    fn: Any
    at: Any
    tokens: Any = every

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ProgramError(f"a function of rows is needed, not {self.fn!r}", "fn")
        self.wanted_arguments()
        self._place()

    def wanted_arguments(self) -> tuple[str, ...]:
        """What `fn` is told beside the rows. Raises `ProgramError` if it needs anything else."""
        try:
            taken = list(inspect.signature(self.fn).parameters.values())
        except (ValueError, TypeError):  # what it takes is not known, as of functions in C: the rows
            return ()
        by_place = [each for each in taken if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        rows = by_place[:1] or [each for each in taken if each.kind is each.VAR_POSITIONAL]
        needed = [each for each in taken if each not in rows and each.default is each.empty
                  and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]  # fmt: skip
        wrong = [each.name for each in needed if each.name not in APPLY_ARGUMENTS or each.kind is each.POSITIONAL_ONLY]
        if wrong or not rows:
            raise ProgramError(
                f"a function of rows is needed, and of {' and '.join(APPLY_ARGUMENTS)}, by these names, if it is to know them; "
                f"this one takes {', '.join(map(str, taken)) or 'nothing'}: give any other a default", "fn"
            )  # fmt: skip
        return tuple(each.name for each in needed)


APPLY_ARGUMENTS = ("positions", "site")  # what `Apply` tells a function that asks for it
OPS: dict[str, type[Op]] = {  # those that can be written down
    kind.__name__.lower(): kind for kind in (Capture, Add, Replace, Zero, Mean, Scale, Ablate, Clamp, Noise, Use)
}


def _number(given: Any) -> float:
    try:
        number = float(given)
    except (TypeError, ValueError, OverflowError):
        raise ProgramError(f"a number is needed, not {given!r}") from None
    if not math.isfinite(number):
        raise ProgramError(f"a finite number is needed, not {number}")
    if abs(number) > MAX_FP32:
        raise ProgramError(f"a number of fp32 is needed, at most {MAX_FP32:.2e}, not {number}")
    return number


def _size(given: Any) -> float:
    number = _number(given)
    if number < 0:
        raise ProgramError(f"a number of at least 0 is needed, not {number}")
    return number


def _seed(given: Any) -> int:
    try:
        seed = operator.index(given)
    except TypeError:
        raise ProgramError(f"a seed is a whole number, not {given!r}") from None
    if not 0 <= seed < 1 << 63:
        raise ProgramError(f"a seed is at least 0 and below 2**63, not {seed}")
    return seed


def _flag(given: Any) -> bool:
    if type(given).__name__ not in ("bool", "bool_"):  # NumPy's, too
        raise ProgramError(f"True or False is needed, not {given!r}")
    return bool(given)


def _row(given: Any) -> Vector | Named:
    vector = _known(given)
    if isinstance(vector, Vector) and len(vector.shape) != 1:
        raise ShapeError(f"one row [D] is needed; this is {list(vector.shape)}")
    return vector


def _known(given: Any) -> Vector | Named:
    vector = as_value(given)
    if not isinstance(vector, (Vector, Named)):
        raise ProgramError(f"numbers are needed here, not a row still to be read: give run[site][i] for {given}")
    return vector


def _span(given: Any) -> Vector | Named:
    vector = _known(given)
    if isinstance(vector, Vector) and not vector.array().any(axis=-1).all():
        raise ShapeError("a direction is all zeros")
    return vector


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
