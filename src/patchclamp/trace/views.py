"""Views: proxies of the model's tensors. A view is read where it is saved, cloned, computed with or written elsewhere,
and written by `=`, `+=`, `-=`, `*=`, `/=` and by its methods, one for each op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, ShapeError
from patchclamp.language import Ablate, Add, Apply, Clamp, From, Noise, Replace, Scale, SiteOp, Vector, Zero
from patchclamp.trace.arithmetic import (
    READS,
    Arithmetic,
    Expression,
    Number,
    Term,
    as_expression,
    as_number,
    reciprocal,
    refuse,
    refuse_attribute,
)  # fmt: skip
from patchclamp.trace.recording import Entry, Recording
from patchclamp.trace.spots import Spot

OPS = ("ablate", "apply", "clamp_along", "noise", "replace")
TO_COME = From("a read of this trace")  # stands for a read whose run is not known yet


class View(Arithmetic):
    """A tensor of the model at some tokens. See `Spot` for its axes."""

    _recording: Recording
    _spot: Spot

    def __init__(self, recording: Recording, spot: Spot) -> None:
        object.__setattr__(self, "_recording", recording)
        object.__setattr__(self, "_spot", spot)

    def __getitem__(self, key: Any) -> View:
        spot = self._spot[key]
        self._recording.lm.sites.resolve(spot.site)  # a head that is not there is said at this line
        return View(self._recording, spot)

    def __setitem__(self, key: Any, value: Any) -> None:
        assign(self[key], value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise ProgramError(f"{self._spot} has no {name!r} to be set: it is written as a whole, or [...] = value")

    # -- read

    def expression(self) -> Expression:
        return Expression((Term(self._recording.read(self._spot), 1.0),))

    def save(self) -> Any:
        """The value here, as a tensor that is there after the trace."""
        return self.expression().save()

    def clone(self) -> Any:
        """The value here, whatever is written at this place later. It can be changed in place and written back.

        It is a value of the same run, so a write at an earlier layer changes it, wherever its line stands.
        """
        from patchclamp.trace.drafts import Draft

        return Draft(self)

    cpu = float = clone

    def detach(self) -> View:
        return self  # as in torch, what is written there is written here

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, where it is known how many tokens there are. Raises `ProgramError` elsewhere."""
        return shape_of(self._recording, self._spot)

    # -- written

    def __iadd__(self, other: Any) -> View:
        write(self, as_expression(other, "+="), 1.0)
        return self

    def __isub__(self, other: Any) -> View:
        write(self, as_expression(other, "-=").times(-1.0), 1.0)
        return self

    def __imul__(self, other: Any) -> View:
        if isinstance(other, Arithmetic):
            refuse("one value of the trace times another")
        write(self, Expression(), as_number(other, "*="))
        return self

    def __itruediv__(self, other: Any) -> View:
        return self.__imul__(reciprocal(other))

    def replace(self, value: Any, alpha: float = 1.0, mask: Any = None) -> None:
        """`pc.Replace`: (1 − a) · h + a · value, with a = alpha · mask, for numbers or a value of the trace."""
        if isinstance(value, Arithmetic):
            expression = value.expression()
            if not expression.is_one_read:
                refuse("a value that is computed, blended in,")
            self._record(Replace, source=expression.terms[0].read, alpha=alpha, mask=mask)
        else:
            vector = as_vector(self, as_number(value, "as a value:"))
            self._record(Replace, vector, alpha=alpha, mask=mask)

    def ablate(self, directions: Any) -> None:
        """`pc.Ablate`: takes the span of some directions out."""
        self._record(Ablate, directions)

    def clamp_along(self, direction: Any, low: float | None = None, high: float | None = None) -> None:
        """`pc.Clamp`: bounds the projection on a direction."""
        self._record(Clamp, direction, low=low, high=high)

    def noise(self, std: float, seed: int = 0, relative: bool = False) -> None:
        """`pc.Noise`: adds seeded noise."""
        self._record(Noise, std, seed=seed, relative=relative)

    def apply(self, fn: Callable[..., Any]) -> None:
        """`pc.Apply`: any Python on the rows, where `allow_code=True`."""
        if self._recording.lm.engine.remote:
            raise ProgramError(
                "a server runs no code of its clients: save the rows, compute, and write them in a second trace, or "
                "run the model in this process, pc.LM(model, allow_code=True)"
            )
        self._record(Apply, fn)

    def _record(self, op: Callable[..., SiteOp], *values: Any, source: Entry | None = None, **fields: Any) -> None:
        """Records an op here, of some values, or of the rows that a read will have."""
        values = values if source is None else (TO_COME,)
        spot = self._spot
        self._recording.write(op(*values, at=spot.site, tokens=spot.tokens, **fields), spot, source)

    def __getattr__(self, name: str) -> NoReturn:
        if self._recording.state != "open" and not name.startswith("__"):
            raise ProgramError(f"{self._spot} was not saved: .save() it inside the trace")
        refuse_attribute(name, ("save", "shape", *READS, *OPS))

    def __repr__(self) -> str:
        return f"<{self._spot}>"


def assign(view: View, value: Any) -> None:
    """`view = value`."""
    if isinstance(value, View) and value._recording is view._recording and value._spot == view._spot:
        view._recording.check_open()
        view._recording.check(Zero(view._spot.site, view._spot.tokens))
        return  # `x += v` assigns what it has written; `x = x` changes nothing
    if isinstance(value, Arithmetic) and value.is_changed:
        value.write_into(view)
        return
    write(view, value.expression() if isinstance(value, Arithmetic) else Expression(constant=as_number(value, "=")))


def write(view: View, expression: Expression, own: Number | None = None) -> None:
    """Records ops after which the view has its own value times `own` (None: nothing of it), plus an expression."""
    with all_or_nothing(view._recording):
        _write(view, expression, own)


@contextlib.contextmanager
def all_or_nothing(recording: Recording) -> Iterator[None]:
    """Takes back what is recorded in it where an error leaves it."""
    count = len(recording.entries)
    try:
        yield
    except PatchclampError:
        del recording.entries[count:]
        raise


def _write(view: View, expression: Expression, own: Number | None) -> None:
    others: list[Term] = []
    for term in expression.terms:
        if is_as_it_stands(view, term.read):
            own = term.factor if own is None else own + term.factor
        elif np.ndim(term.factor):
            refuse("a read of another place times a vector")
        else:
            others.append(Term(term.read, float(term.factor)))
    constant = expression.constant
    if own is not None:
        if np.ndim(own) or own != 1.0 or not (others or np.ndim(constant) or constant):
            _scale(view, own)  # a write without effect is recorded too, for that is what checks it
    elif others:
        first = others.pop(0)
        view._record(Replace, source=first.read)
        if first.factor != 1.0:
            _scale(view, first.factor)
    else:
        _replace(view, constant)
        return
    for term in others:
        view._record(Add, source=term.read, scale=term.factor)
    if np.ndim(constant) or constant:
        vector = as_vector(view, constant)
        view._record(Add, vector)


def _replace(view: View, constant: Number) -> None:
    """Writes numbers in the place of rows."""
    if np.ndim(constant) == 0 and constant == 0:
        view._record(Zero)
        return
    vector = as_vector(view, constant)
    view._record(Replace, vector)


def is_as_it_stands(view: View, read: Entry) -> bool:
    """Whether a read is of this very view, and nothing was written there since."""
    recording, spot = view._recording, view._spot
    same = read.recording is recording and read.spot.site == spot.site and read.spot.tokens == spot.tokens
    return same and not any(not e.is_read and e.points & read.points for e in recording.entries[read.number :])


def _scale(view: View, factor: Number) -> None:
    """Multiplies rows by a number, or by one for each column: (1 − a) · h + a · 0 for a = 1 − factor."""
    if np.ndim(factor) == 0:
        view._record(Scale, float(factor))
        return
    row = as_vector(view, factor)
    mask = np.float32(1) - row.array()
    if len(row.shape) > 1 or not np.array_equal(np.float32(1) - mask, row.array()):
        raise ProgramError(
            "rows are multiplied by a number, or by one vector that is a mask (of 0 and 1, say): a program has no "
            "other product; write it with .apply(fn), Python on the rows, on a local engine"
        )
    view._record(Replace, np.zeros_like(mask), mask=mask)


def as_vector(view: View, number: Number) -> Vector:
    """A number, or numbers in the shape of the view, as the rows that an op takes."""
    recording, spot = view._recording, view._spot
    width, parts = recording.width(spot), recording.lm.sites.parts(spot.site.name)
    array = np.asarray(number, np.float32)
    if array.ndim == 0:
        return Vector.of(np.full(width, array, np.float32))
    if spot.batched and array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    if parts is not None and array.shape[-1] == parts[1] and array.ndim > 1 and array.shape[-2] * parts[1] == width:
        array = array.reshape(*array.shape[:-2], width)  # heads side by side
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim > 2 or array.shape[-1] != width:
        raise ShapeError(f"{spot} is {width} wide; what is written there is {list(np.shape(number))}")
    return Vector.of(array)


def shape_of(recording: Recording, spot: Spot) -> tuple[int, ...]:
    """The shape of a read's value, where it is known how many tokens it has."""
    entry = recording.read(spot)
    recording.check_prompt()
    if recording.has_generated(entry) and not spot.single:
        raise ProgramError(f"how many tokens {spot} has is known once they are generated")
    width, parts = recording.width(spot), recording.lm.sites.parts(spot.site.name)
    row = [width]
    if parts is not None:
        row = [parts[1]] if isinstance(spot.site.index, int) else [width // parts[1], parts[1]]
        row = row[:-1] if parts[1] == 1 else row
    return (*[1] * spot.batched, *([] if spot.single else [len(recording.positions(entry))]), *row)
