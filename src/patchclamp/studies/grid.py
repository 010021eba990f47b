"""Filling a grid: cells of several unpatched runs, patched one at a time, with the mean over the runs and its spread.

Every sweep gives its unpatched runs (`Unit`) and the places that are patched in them (`Place`). What is written there
is the units' writers' business (`sources`), how it is run that of `cells`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from patchclamp.call import is_token_id
from patchclamp.errors import ProgramError
from patchclamp.language import Op
from patchclamp.lm import LM
from patchclamp.studies.cells import BASELINES, Cells, Round, Trial
from patchclamp.studies.columns import Column
from patchclamp.studies.journal import Resumable
from patchclamp.studies.metric import Graded
from patchclamp.studies.progress import progress
from patchclamp.studies.resuming import keeping
from patchclamp.studies.rows import Row
from patchclamp.studies.sources import Writer
from patchclamp.studies.spread import spread
from patchclamp.studies.sweep_result import Cell, Side

MIN_RERUNS = 2


class Listener(Protocol):
    """Hears of a sweep as it goes, on threads of the sweep's. What it raises stops the sweep."""

    def begin(self, sweep: Any, cells: int) -> None:
        """The sweep begins: its result so far, whose values are NaN, and how many cells there will be; of a
        zoom, at most."""
        ...

    def cells(self, cells: list[Cell]) -> None:
        """Cells that have finished, in all pairs of prompts."""
        ...


class Unit(NamedTuple):
    """One unpatched run.

    before: edits that every run of it has, before a cell's
    written: the side of a column whose positions are patched; the other's are read
    base: its metric; offset, factor: the grid has (metric − offset) · factor
    writer: opens what cells are patched with, when it is first needed
    number: of the pair of prompts among all
    """

    prompt: Sequence[int]
    before: tuple[Op, ...]
    graded: Graded
    written: Side
    base: float
    offset: float
    factor: float
    writer: Callable[[], Writer]
    number: int


class Place(NamedTuple):
    """What is patched together: a row, and for each unit a column of its prompts. `at`: the numbers of row and column
    in the grid; of several cells those of the first."""

    row: Row
    columns: Sequence[Column]
    at: tuple[int, int]


class Filled(NamedTuple):
    """Values [N, C] of units and places, and their noise floor."""

    values: np.ndarray
    floor: float


class Finished:
    """Gathers the values of `count` places until all `parts` of one are there, and tells its mean."""

    def __init__(self, count: int, parts: int, tell: Callable[[list[int], np.ndarray], None] | None) -> None:
        self._sum, self._left, self._parts, self._tell = np.zeros(count), np.full(count, parts), parts, tell

    def add(self, places: np.ndarray, values: np.ndarray) -> None:
        """Values of some places, of a unit and draw each."""
        np.add.at(self._sum, places, values)
        np.subtract.at(self._left, places, 1)
        done = np.unique(places)[self._left[np.unique(places)] == 0]
        if self._tell is not None and len(done):
            self._tell(done.tolist(), self._sum[done] / self._parts)


def fill(cells: Cells, units: Sequence[Unit], places: Sequence[Place], draws: int, finished: Finished) -> Filled:
    """Patches every place in every unit. `draws`: how many runs a cell takes, whose mean counts."""

    def rounds() -> list[Round]:
        return [_round(unit, places, n) for n, unit in enumerate(units)]

    def tell(number: int, which: np.ndarray, values: np.ndarray) -> None:
        unit = units[number]
        finished.add(which // draws, (values - unit.offset) * unit.factor)

    counts = [len(places) * draws] * len(units)
    found = cells.run(counts, rounds, tell, reruns_for(len(units)))
    values = [
        (of.trials.reshape(-1, draws).mean(1) - unit.offset) * unit.factor
        for unit, of in zip(units, found, strict=True)
    ]
    floors = [
        np.max(np.abs(of.baselines - unit.base)) * abs(unit.factor) for unit, of in zip(units, found, strict=True)
    ]
    return Filled(np.array(values).reshape(len(units), len(places)), float(max(floors)))


def reruns_for(units: int) -> int:
    """About how often a baseline is repeated, when so many units have one each."""
    return max(BASELINES // units, MIN_RERUNS)


def _round(unit: Unit, places: Sequence[Place], number: int) -> Round:
    writer = unit.writer()
    trials = [
        Trial(unit.prompt, [*unit.before, *edits], unit.graded)
        for place in places
        for edits in writer.edits(place.row, *_sides(unit, place.columns[number]), (unit.number, *place.at))
    ]
    return Round(trials, Trial(unit.prompt, unit.before, unit.graded))


def _sides(unit: Unit, column: Column) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The positions that are read, and those that are written."""
    return (column.clean, column.corrupt) if unit.written == "corrupt" else (column.corrupt, column.clean)


@contextmanager
def carrying(
    lm: LM, what: str, total: int, question: Mapping[str, Any], batch: int, show: bool | None, resume: Resumable | None
) -> Iterator[Cells]:
    """`Cells` with a progress bar and, if the study is to be resumed from a file, its journal. `question` is all that
    decides the values, as plain data."""
    with keeping(lm, question, resume) as journal, progress(what, total, show) as advance:
        yield Cells(lm, batch, journal, advance)


def with_values(
    sweep: Any, filled: Filled, bases: Sequence[float], computed: str, seed: int, seeds: int = 1
) -> Any:  # fmt: skip
    """A sweep with the values of its units [N, R, P], their mean, and the mean's spread where there are several.

    bases: the unpatched metric of every unit; computed: how much of the runs was; seed: of the spread's draws
    seeds: so many units in a row are of one prompt, whose mean counts once: seeds are no prompts. Of a single prompt
        the interval is over its seeds, and there are no p-values
    """
    each, base = filled.values.reshape(sweep.each.shape), np.asarray(bases, np.float64)
    changed: dict[str, Any] = {
        "each": each, "values": each.mean(0), "effect": (each - base[:, None, None]).mean(0),
        "noise_floor": filled.floor, "computed": computed,
    }  # fmt: skip
    run = ~np.isnan(changed["values"])
    one_prompt = len(each) == seeds
    if not one_prompt:
        each, base = each.reshape(-1, seeds, *run.shape).mean(1), base.reshape(-1, seeds).mean(1)
    if len(each) > 1 and run.any():
        found = spread(each[:, run], base, seed)
        for name in found._fields[:4] if one_prompt else found._fields:
            changed[name] = np.full(run.shape, np.nan)
            changed[name][run] = getattr(found, name)
    return msgspec.structs.replace(sweep, **changed)


def teller(
    listener: Listener, rows: Sequence[Row], columns: Sequence[Column]
) -> Callable[[list[int], np.ndarray], None]:
    """Tells a listener of places by their number, row by row."""

    def tell(which: list[int], values: np.ndarray) -> None:
        places = [(rows[i // len(columns)], columns[i % len(columns)]) for i in which]
        listener.cells([
            Cell(row.site, row.layer, column, value, row.index)
            for (row, column), value in zip(places, values.tolist(), strict=True)
        ])  # fmt: skip

    return tell


def check_seed(seed: Any) -> int:
    if not is_token_id(seed) or seed < 0:
        raise ProgramError(f"a seed is a whole number from 0 on, not {seed!r}", "seed")
    return int(seed)
