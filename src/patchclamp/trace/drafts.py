"""Copies of views, as `.clone()` makes them: changed in place like a tensor, and written back into the model."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, TokensError
from patchclamp.language.site import Site
from patchclamp.language.tokens import Positions, Range, Selection, Tokens, every, prompt
from patchclamp.trace.arithmetic import READS, Arithmetic, Expression, Number, as_number, refuse_attribute
from patchclamp.trace.recording import Recording
from patchclamp.trace.spots import Spot
from patchclamp.trace.views import View, all_or_nothing, assign, is_as_it_stands, write

CHANGES = {"=": assign, "+=": View.__iadd__, "-=": View.__isub__, "*=": View.__imul__, "/=": View.__itruediv__}


class Change(NamedTuple):
    """What was done to a part of a copy, a spot among those of the copy, by a sign of `CHANGES`."""

    part: Spot
    sign: str
    value: Expression | Number

    def act_on(self, view: View) -> None:
        CHANGES[self.sign](view, self.value)


class Draft(Arithmetic):
    """A copy of a view. Writing into it changes the copy alone, until it is written back. Its rows are numbered from 0,
    as those of any tensor."""

    def __init__(self, view: View, read: Expression | None = None, changes: tuple[Change, ...] = ()) -> None:
        self._view, self._read = view, view.expression() if read is None else read
        self._changes = list(changes)

    @property
    def is_changed(self) -> bool:
        return bool(self._changes)

    def expression(self) -> Expression:
        if self._changes:
            raise ProgramError("a clone that was changed in place can be written into the model, and no more")
        return self._read

    def save(self) -> Any:
        return self.expression().save()

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    def clone(self) -> Draft:
        return Draft(self._view, self._read, tuple(self._changes))

    cpu = float = clone

    def detach(self) -> Draft:
        return self

    # -- changed

    def __getitem__(self, key: Any) -> Part:
        return Part(self, self._part(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.change(self._part(key), "=", value)

    def __iadd__(self, other: Any) -> Draft:
        return self.change(self._view._spot, "+=", other)

    def __isub__(self, other: Any) -> Draft:
        return self.change(self._view._spot, "-=", other)

    def __imul__(self, other: Any) -> Draft:
        return self.change(self._view._spot, "*=", other)

    def __itruediv__(self, other: Any) -> Draft:
        return self.change(self._view._spot, "/=", other)

    def change(self, part: Spot, sign: str, value: Any) -> Draft:
        """Notes a change of a part. Raises, at its line, what is wrong with it."""
        if isinstance(value, Part) and value.is_part(self, part):
            return self  # `draft[-1] += v` assigns what it has changed
        value = value.expression() if isinstance(value, Arithmetic) else as_number(value, sign)
        recording = self._view._recording
        recording.check_open()
        for term in value.terms if isinstance(value, Expression) else ():
            recording.check_width(part, term.read)
        numbers = Expression(constant=value.constant) if isinstance(value, Expression) else value
        Change(part, sign, numbers).act_on(View(recording.rehearsal(), part))
        self._changes.append(Change(part, sign, value))
        return self

    def _part(self, key: Any) -> Spot:
        """What brackets choose of the copy."""
        own = self._view._spot
        if own.single:
            return own[key]
        rows = own.tokens if own.whole else prompt  # as if the rows of the copy were a prompt
        chosen = msgspec.structs.replace(own, tokens=rows, whole=True, named=False)[key]
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(one, (Selection, str)) for one in keys):
            return msgspec.structs.replace(chosen, tokens=self._among(chosen.tokens))
        if chosen.tokens == rows:
            return msgspec.structs.replace(chosen, tokens=own.tokens, whole=own.whole)
        return chosen if own.whole else msgspec.structs.replace(chosen, tokens=self._numbered(chosen.tokens))

    def _among(self, tokens: Tokens) -> Tokens:
        """A selection within the copy."""
        own, recording = self._view._spot, self._view._recording
        if own.tokens == every or recording.prompt is None:
            return tokens
        try:
            inside = np.isin(recording.known_positions(own, tokens), recording.known_positions(own)).all()
        except ShapeError:
            inside = False
        return tokens if inside else own.tokens & tokens

    def _numbered(self, rows: Tokens) -> Tokens:
        """The tokens of some rows, which are a prompt's."""
        own, positions = self._view._spot, self._view._recording.known_positions(self._view._spot)
        assert isinstance(rows, Positions)
        try:
            chosen = positions[list(rows.select(len(positions), len(positions)))]
        except TokensError:
            raise TokensError(f"{own} has {len(positions)} rows, 0 to {len(positions) - 1}, not {rows.index}") from None
        if not len(chosen):
            raise TokensError(f"{own} has {len(positions)} rows, and none of them is in [{rows.index}]")
        return numbered(chosen, isinstance(rows.index, int))

    # -- written

    def write_into(self, target: View) -> None:
        """Writes the copy to where a view is: what was changed, and all else as it was when it was cloned."""
        with all_or_nothing(target._recording):
            if not is_as_it_stands(target, self._read.terms[0].read):
                write(target, self._read)
            for change in self._changes:
                change.act_on(View(target._recording, self._onto(target, change.part)))

    def _onto(self, target: View, part: Spot) -> Spot:
        """The part of a target that a part of the copy is written to."""
        own, spot = self._view._spot, target._spot
        site, single, tokens = spot.site, part.single, part.tokens
        if part.site.index != own.site.index:
            if spot.parted:
                raise ShapeError(f"{part.site} was changed in a clone of {own.site}, and {spot.site} has no such parts")
            site = Site(site.name, site.layers, part.site.index)
        if part.tokens == own.tokens:
            single, tokens = spot.single, spot.tokens
        elif spot.tokens != own.tokens or target._recording is not self._view._recording:
            tokens = self._rows_of(target, part)
        return msgspec.structs.replace(part, site=site, tokens=tokens, single=single, whole=False)

    def _rows_of(self, target: View, part: Spot) -> Tokens:
        """The tokens of a target that stand where those of a part stand in the copy."""
        recording: Recording = self._view._recording
        mine, theirs = recording.known_positions(self._view._spot), target._recording.known_positions(target._spot)
        if len(mine) == 1:
            return target._spot.tokens
        if len(mine) != len(theirs):
            raise ShapeError(f"the clone of {self._view._spot} has {len(mine)} rows, and {target._spot} {len(theirs)}")
        row = {position: number for number, position in enumerate(mine.tolist())}
        rows = [row[position] for position in recording.known_positions(part).tolist()]
        return numbered(theirs[rows], part.single)

    def __getattr__(self, name: str) -> NoReturn:
        refuse_attribute(name, ("save", "shape", *READS))

    def __repr__(self) -> str:
        return f"<a clone of {self._view._spot}>"


class Part(Arithmetic):
    """A part of a `Draft`, as in `draft[-1] += v`."""

    def __init__(self, draft: Draft, spot: Spot) -> None:
        self._draft, self._spot, self._written = draft, spot, False

    def is_part(self, draft: Draft, spot: Spot) -> bool:
        """Whether it is this part of a draft, and is written."""
        return self._written and self._draft is draft and self._spot == spot

    def expression(self) -> Expression:
        draft = self._draft
        if draft.is_changed or not is_as_it_stands(draft._view, draft._read.terms[0].read):
            raise ProgramError("the model or the clone was changed since: index first, and clone then")
        return View(draft._view._recording, self._spot).expression()

    def __getitem__(self, key: Any) -> Part:
        """The tokens of a head: `clone[3][-1]`."""
        if self._spot.site == self._draft._view._spot.site or not self._draft._view._spot.whole:
            raise ProgramError(f"{self._spot} is a part of a clone: choose all of it in one pair of brackets")
        try:
            return Part(self._draft, self._spot[key])
        except PatchclampError as error:
            raise type(error)(f"{error.message}; of a clone, choose in one pair of brackets") from None

    def __setitem__(self, key: Any, value: Any) -> None:
        self._draft.change(self[key]._spot, "=", value)

    def _change(self, sign: str, other: Any) -> Part:
        self._draft.change(self._spot, sign, other)
        self._written = True
        return self

    def __iadd__(self, other: Any) -> Part:
        return self._change("+=", other)

    def __isub__(self, other: Any) -> Part:
        return self._change("-=", other)

    def __imul__(self, other: Any) -> Part:
        return self._change("*=", other)

    def __itruediv__(self, other: Any) -> Part:
        return self._change("/=", other)

    def clone(self) -> Expression:
        return self.expression()

    detach = cpu = float = clone

    def save(self) -> Any:
        return self.expression().save()

    def __getattr__(self, name: str) -> NoReturn:
        refuse_attribute(name, ("save", *READS))


def numbered(positions: np.ndarray, single: bool) -> Tokens:
    """A selection of positions, in their order."""
    numbers = positions.tolist()
    if single:
        return every[numbers[0]]
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return Positions("every", Range(numbers[0], numbers[-1] + 1))
    return every[numbers]
