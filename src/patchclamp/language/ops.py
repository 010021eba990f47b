"""Ops: what to do at a site. h is a row of the site in fp32; ops act in program order and round once at the end.

Each op is placed `at` a site (an object or its text form) on a selection of `tokens` (all, unless given).
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, unknown
from patchclamp.language.site import At, Site, parse_site
from patchclamp.language.tokens import Tokens, every, parse_tokens
from patchclamp.language.values import Named, ValueLike, Vector, as_value, check_name

MAX_FP32 = (2 - 2**-23) * 2.0**127  # of fp32
SiteLike = Site | At | str
TokensLike = Tokens | str | int | slice | range | Sequence[int]
DTYPES = ("float32", "bfloat16", "float16")


class Op(msgspec.Struct, frozen=True, tag=str.lower):
    """Base of all ops. Fields are read from objects or text when an op is made; an error names the field."""

    def _read(self, field: str, read: Callable[[Any], Any]) -> None:
        try:
            msgspec.structs.force_setattr(self, field, read(getattr(self, field)))
        except PatchclampError as error:
            raise error.under(field) from None


class SiteOp(Op, frozen=True):
    """Base of the ops that act `at` a site on a selection of `tokens`: all of them but `Use`.

    `at` and `tokens` are given as objects or text; `site` and `selection` are what was read.
    """

    @property
    def site(self) -> Site:
        return self.at  # pyright: ignore[reportAttributeAccessIssue]  every subclass has it, in a place of its own

    @property
    def selection(self) -> Tokens:
        return self.tokens  # pyright: ignore[reportAttributeAccessIssue]

    def _read_place(self) -> None:
        """Reads `at` and `tokens`, which may both stand in `at`: `pc.z[5] @ pc.prompt[-1]`."""
        place: Any = self.site
        if isinstance(place, At):
            if self.selection != every:
                raise ProgramError(f"the tokens are given twice: {place} and tokens={self.selection}", "tokens")
            msgspec.structs.force_setattr(self, "at", place.site)
            msgspec.structs.force_setattr(self, "tokens", place.tokens)
        self._read("at", parse_site)
        self._read("tokens", parse_tokens)


class Capture(SiteOp, frozen=True, forbid_unknown_fields=True):
    """Keep h as it is at this place in the program's order, in `dtype`: float32, bfloat16 or float16."""

    at: SiteLike
    tokens: TokensLike = every
    dtype: str = "float32"

    def __post_init__(self) -> None:
        self._read_place()
        self._read("dtype", _dtype)


class Add(SiteOp, frozen=True, forbid_unknown_fields=True):
    """h + scale · v, for v [D], [n, D] for the n selected positions in order, or `From`.

    Source: steering vectors; Turner et al. 2023 (arXiv:2308.10248), Rimsky et al. 2023 (arXiv:2312.06681).
    """

    value: ValueLike
    at: SiteLike
    tokens: TokensLike = every
    scale: float = 1.0

    def __post_init__(self) -> None:
        self._read_place()
        self._read("value", as_value)
        self._read("scale", _number)


class Replace(SiteOp, frozen=True, forbid_unknown_fields=True):
    """(1 − a) · h + a · v, where a is `alpha`, times the `mask` [D] if there is one; with `From` an activation patch,
    where a is 1 exactly v.

    Source: interchange interventions; Vig et al. 2020 (arXiv:2004.12265), causal tracing; Meng et al. 2022
    (arXiv:2202.05262).
    """

    value: ValueLike
    at: SiteLike
    tokens: TokensLike = every
    alpha: float = 1.0
    mask: ValueLike | None = None

    def __post_init__(self) -> None:
        self._read_place()
        self._read("value", as_value)
        self._read("alpha", _number)
        if self.mask is not None:
            self._read("mask", _row)


class Zero(SiteOp, frozen=True, forbid_unknown_fields=True):
    """0: zero ablation."""

    at: SiteLike
    tokens: TokensLike = every

    def __post_init__(self) -> None:
        self._read_place()


class Mean(SiteOp, frozen=True, forbid_unknown_fields=True):
    """v, in h's place: mean ablation, where `value` is the name of means in the bank (`lm.bank.mean`).

    Source: Wang et al. 2022 (arXiv:2211.00593).
    """

    value: ValueLike
    at: SiteLike
    tokens: TokensLike = every

    def __post_init__(self) -> None:
        self._read_place()
        self._read("value", as_value)


class Use(Op, frozen=True, forbid_unknown_fields=True):
    """The edits of a program in the bank, in its place; each vector added, and each noise, `scale` times as strong.

    `tokens`, if given, stand for the tokens of every one of them. A steering module, for example: `lm.bank["happy"] =
    [pc.Add(...), pc.Add(...)]`, and then `pc.Use("happy", scale=2.0)`.
    """

    name: str
    scale: float = 1.0
    tokens: TokensLike | None = None

    def __post_init__(self) -> None:
        self._read("name", check_name)
        self._read("scale", _number)
        if self.tokens is not None:
            self._read("tokens", parse_tokens)

    def scaled(self, op: Op) -> Op:
        """An op of the program as it is used. Raises `ProgramError` for one that has no strength to be scaled."""
        changed: dict[str, Any] = {} if self.tokens is None else {"tokens": self.tokens}
        strength = {Add: "scale", Noise: "std", Use: "scale"}.get(type(op))
        if self.scale != 1.0:
            if strength is None or (isinstance(op, Noise) and self.scale < 0):
                raise ProgramError(f"{type(op).__name__} cannot be scaled by {self.scale}: Add and Noise can", "scale")
            changed[strength] = self.scale * getattr(op, strength)
        return msgspec.structs.replace(op, **changed)


class Scale(SiteOp, frozen=True, forbid_unknown_fields=True):
    """factor · h."""

    factor: float
    at: SiteLike
    tokens: TokensLike = every

    def __post_init__(self) -> None:
        self._read_place()
        self._read("factor", _number)


class Ablate(SiteOp, frozen=True, forbid_unknown_fields=True):
    """h − Σ (h · u) u over an orthonormal basis u of `directions`, [D] or [k, D]: h without what lies in their span.

    The basis is made once, in fp64, by Gram and Schmidt's way; directions that add nothing to the span are left out.
    Source: directional ablation; Arditi et al. 2024 (arXiv:2406.11717).
    """

    directions: ValueLike
    at: SiteLike
    tokens: TokensLike = every

    def __post_init__(self) -> None:
        self._read_place()
        self._read("directions", _directions)


class Clamp(SiteOp, frozen=True, forbid_unknown_fields=True):
    """h with its projection on a `direction` [D], h · d / |d|, at least `low` and at most `high` (None: no bound).

    Source: clamping a feature; Templeton et al. 2024, "Scaling monosemanticity", with a direction in its place.
    """

    direction: ValueLike
    at: SiteLike
    tokens: TokensLike = every
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        self._read_place()
        self._read("direction", _directions)
        if isinstance(self.direction, Vector):
            self._read("direction", _row)
        for bound in ("low", "high"):
            if getattr(self, bound) is not None:
                self._read(bound, _number)
        if self.low is None and self.high is None:
            raise ProgramError("a bound is needed: low, high or both", "low")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ProgramError(f"low ({self.low}) is above high ({self.high})", "low")


class Noise(SiteOp, frozen=True, forbid_unknown_fields=True):
    """h + std · ε; `relative`: std times the root mean square of the row.

    ε is standard normal and depends on nothing but `seed`, the token's position, the site and the index in the row
    (`kernels.noise`): the same on every engine, in every batch.
    Source: fuzzing; Roger 2025 (LessWrong, "Fuzzing LLMs sometimes makes them reveal their secrets").
    """

    std: float
    at: SiteLike
    tokens: TokensLike = every
    seed: int = 0
    relative: bool = False

    def __post_init__(self) -> None:
        self._read_place()
        self._read("std", _strength)
        self._read("seed", _seed)
        self._read("relative", _flag)


class Apply(SiteOp, frozen=True, forbid_unknown_fields=True):
    """fn(h): any Python on the rows, [n, D] fp32 on the model's device, that gives as many of the same shape.

    `fn` may have two more parameters, by these names and without a default, as in `def fn(h, positions, site)`:
    `positions`, those of the rows in their request, ascending, int64 [n] on the same device, and `site`, the text of
    the site, such as "resid_post[3]".

    `fn` runs on the engine's thread. One call has rows of one request at one site, consecutive positions of one step;
    how many depends on how the engine runs the request, so a row's result must depend on that row alone. `fn` may keep
    and change the rows. What it raises becomes its run's error, and it is not called again. It must not wait for an
    engine. Programs with code need `pc.LM(..., allow_code=True)` and an engine in this process, run without CUDA
    graphs, and cannot be saved or sent. On a GPU rows are rounded to the model's dtype before `fn`.
    """

    fn: Callable[..., Any]
    at: SiteLike
    tokens: TokensLike = every

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ProgramError(f"a function of rows is needed, not {self.fn!r}", "fn")
        self.wanted_arguments()
        self._read_place()

    def wanted_arguments(self) -> tuple[str, ...]:
        """The arguments that `fn` takes beside the rows. Raises `ProgramError` if it needs anything else."""
        try:
            parameters = list(inspect.signature(self.fn).parameters.values())
        except (ValueError, TypeError):  # what it takes is not known, as of functions in C: the rows
            return ()
        by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        rows = by_place[:1] or [p for p in parameters if p.kind is p.VAR_POSITIONAL]
        needed = [p for p in parameters if p not in rows and p.default is p.empty
                  and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]  # fmt: skip
        wrong = [p.name for p in needed if p.name not in APPLY_ARGUMENTS or p.kind is p.POSITIONAL_ONLY]
        if wrong or not rows:
            raise ProgramError(
                f"a function of rows is needed, and of {' and '.join(APPLY_ARGUMENTS)}, by these names, if it is to "
                f"know them; this one takes {', '.join(map(str, parameters)) or 'nothing'}: give any other a default",
                "fn",
            )
        return tuple(p.name for p in needed)


APPLY_ARGUMENTS = ("positions", "site")  # what a function of `Apply` may ask for beside the rows
OPS: dict[str, type[Op]] = {  # those that can be written down
    kind.__name__.lower(): kind for kind in (Capture, Add, Replace, Zero, Mean, Scale, Ablate, Clamp, Noise, Use)
}


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ProgramError(f"a number is needed, not {value!r}") from None
    if not math.isfinite(number):
        raise ProgramError(f"a finite number is needed, not {number}")
    if abs(number) > MAX_FP32:
        raise ProgramError(f"a number of fp32 is needed, at most {MAX_FP32:.2e}, not {number}")
    return number


def _strength(value: Any) -> float:
    number = _number(value)
    if number < 0:
        raise ProgramError(f"a number of at least 0 is needed, not {number}")
    return number


def _seed(value: Any) -> int:
    try:
        seed = operator.index(value)
    except TypeError:
        raise ProgramError(f"a seed is a whole number, not {value!r}") from None
    if not 0 <= seed < 1 << 63:
        raise ProgramError(f"a seed is at least 0 and below 2**63, not {seed}")
    return seed


def _flag(value: Any) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # NumPy's, too
        raise ProgramError(f"True or False is needed, not {value!r}")
    return bool(value)


def _row(value: Any) -> Vector | Named:
    vector = _numbers(value)
    if isinstance(vector, Vector) and len(vector.shape) != 1:
        raise ShapeError(f"one row [D] is needed; this is {list(vector.shape)}")
    return vector


def _numbers(value: Any) -> Vector | Named:
    vector = as_value(value)
    if not isinstance(vector, (Vector, Named)):
        raise ProgramError(f"numbers are needed here, not a row still to be read: give run[site][i] for {value}")
    return vector


def _directions(value: Any) -> Vector | Named:
    vector = _numbers(value)
    if isinstance(vector, Vector) and not vector.array().any(axis=-1).all():
        raise ShapeError("a direction is all zeros")
    return vector


def _dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("capture dtype", name, DTYPES)
    return name


def as_capture(value: Any) -> Capture:
    """A capture from what `capture=` takes: a site, `site @ tokens`, the text of either, or a `Capture`."""
    if isinstance(value, Capture):
        return value
    if isinstance(value, str) and "@" in value:
        at, tokens = value.split("@", 1)
        return Capture(at, tokens)
    return Capture(value)
