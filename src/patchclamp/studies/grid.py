"""Filling the grid of a sweep: cells of several unpatched runs are patched one at a time, and averaged over the runs.

A sweep supplies its unpatched runs (`Unit`) and the places to patch in them (`Place`). The units' writers decide what
is written there (`sources`). `Cells` runs graded trials in batches, two at a time, with reruns of the unpatched prompt
among them that measure the noise floor; it also drives the progress bar and the journal from which a study resumes.

`Zoom` goes from coarse to fine: it patches blocks of layers and positions at once, and splits the best into smaller
ones. A block's value is not the sum of its cells' values: a patch in one layer is overwritten by the next layer's, and
opposite effects cancel out. So a zoom finds strong cells with a tenth of the runs, but does not prove that the others
are weak.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from patchclamp.call import is_token_id
from patchclamp.errors import PatchclampError, ProgramError, TokensError
from patchclamp.language import Op
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.store.journal import Journal
from patchclamp.studies.inputs import Alignment, align, check_batch
from patchclamp.studies.metric import Graded, answer_tokens, grade, spread, text_of
from patchclamp.studies.sources import Writer
from patchclamp.studies.study import UNDER_WAY, Pace, Reporter, Resumable, Show, keeping, progress, run_batches
from patchclamp.studies.sweep_result import (
    Block,
    Cell,
    Column,
    Pair,
    Row,
    Side,
    Words,
    columns_of,
    listed,
    panels_of,
    words_of,
)


class Asked(NamedTuple):
    """A pair of prompts, its graded tokens, alignment and columns."""

    clean: Words
    corrupt: Words
    graded: Graded
    alignment: Alignment
    columns: tuple[Column, ...]

    def side(self, name: Side) -> Words:
        return self.clean if name == "clean" else self.corrupt


def graded_of(lm: LM, answers: Sequence[Any], foils: Sequence[Any], metric: str) -> list[Graded]:
    """The metric and the graded tokens of every prompt."""
    graded = []
    for i, (answer, foil) in enumerate(zip(answers, foils, strict=True)):
        where = f"[{i}]" if len(answers) > 1 else ""
        tokens = answer_tokens(lm, answer, f"answer{where}")
        graded.append(grade(metric, tokens, None if foil is None else answer_tokens(lm, foil, f"foil{where}")))
    return graded


def one_each(values: Any, count: int, name: str) -> list[Any]:
    """One value for each of `count` prompts, from a list of them or a single shared value."""
    if count > 1 and isinstance(values, (list, tuple)):
        if len(values) != count:
            raise ProgramError(f"{len(values)} for {count} prompts; give one, or one a prompt", name)
        return list(values)
    if count == 1 and isinstance(values, (list, tuple)) and len(values) == 1:
        return list(values)
    return [values] * count


def pairs_of(
    lm: LM, clean: Any, corrupt: Any, answer: Any, foil: Any, metric: str, positions: Any, written: Side
) -> list[Asked]:
    """Read every pair of prompts. Errors of one pair carry its number if there are several."""
    cleans, corrupts = (list(of) if listed(of) else [of] for of in (clean, corrupt))
    if len(cleans) != len(corrupts) or not cleans:
        raise ProgramError(
            f"{len(cleans)} clean prompts and {len(corrupts)} corrupt ones: they come in pairs", "corrupt"
        )
    graded = graded_of(lm, one_each(answer, len(cleans), "answer"), one_each(foil, len(cleans), "foil"), metric)
    asked = []
    for i, (one, other) in enumerate(zip(cleans, corrupts, strict=True)):
        where = f"[{i}]" if len(cleans) > 1 else ""
        words = words_of(lm, one, f"clean{where}"), words_of(lm, other, f"corrupt{where}")
        try:
            asked.append(_asked(lm, *words, graded[i], positions, i, len(cleans), written))
        except PatchclampError as error:
            raise error.under(f"pair {i}") if where else error from None
    return asked


def _asked(
    lm: LM, clean: Words, corrupt: Words, graded: Graded, positions: Any, number: int, count: int, written: Side
) -> Asked:
    alignment = align(clean.ids, corrupt.ids)
    own = 1 if written == "corrupt" else 0
    partner = {pair[own]: pair[1 - own] for pair in alignment.pairs}
    words = corrupt if written == "corrupt" else clean
    other = "clean" if written == "corrupt" else "corrupt"

    def make(label: str, chosen: tuple[int, ...], path: str) -> Column:
        alone = [p for p in chosen if p not in partner]
        if alone:
            raise TokensError(
                f"{list(chosen)}: position {alone[0]} ({words.tokens[alone[0]]!r}) has no partner in the {other} "
                f"prompt; aligned are {sorted(partner)}",
                path,
            )
        partners = tuple(partner[p] for p in chosen)
        return Column(label, *((partners, chosen) if written == "corrupt" else (chosen, partners)))

    columns = columns_of(lm, words, sorted(partner), positions, number, count, make)
    return Asked(clean, corrupt, graded, alignment, tuple(columns))


def pair_of(lm: LM, asked: Asked, clean: float, corrupt: float | None) -> Pair:
    """A pair of a result, with the metric of both prompts."""
    alone: dict[Side, tuple[int, ...]] = {"clean": asked.alignment.clean_only, "corrupt": asked.alignment.corrupt_only}
    skipped: list[tuple[Side, int, str]] = [
        (side, p, asked.side(side).tokens[p]) for side, positions in alone.items() for p in positions
    ]
    return Pair(
        clean_prompt=asked.clean.text, corrupt_prompt=asked.corrupt.text, clean_tokens=asked.clean.tokens,
        corrupt_tokens=asked.corrupt.tokens, answer=text_of(lm, asked.graded.answer) or "",
        foil=text_of(lm, asked.graded.foil), clean=clean, corrupt=corrupt, columns=asked.columns,
        alignment=asked.alignment.pairs, skipped=tuple(skipped), answer_ids=asked.graded.answer,
        foil_ids=asked.graded.foil,
    )  # fmt: skip


def question_of(asked: Sequence[Asked]) -> list[Any]:
    """Everything about the pairs that decides the values of a study, as plain data."""
    return [
        [pair.clean.ids, pair.corrupt.ids, msgspec.to_builtins(pair.graded), msgspec.to_builtins(pair.columns)]
        for pair in asked
    ]


BASELINES = 8  # reruns of an unpatched prompt, spread through its cells, that measure the noise floor


class Trial(NamedTuple):
    """One graded run: a prompt's token ids, its edits, and the graded tokens. An answer of several tokens takes one run
    per token."""

    prompt: Sequence[int]
    edits: Sequence[Op]
    graded: Graded


class Round(NamedTuple):
    """The trials of one unpatched run, which `baseline` repeats."""

    trials: Sequence[Trial]
    baseline: Trial


class Values(NamedTuple):
    """Values of the trials of a round [n], and of the reruns of its baseline."""

    trials: np.ndarray
    baselines: np.ndarray


Tell = Callable[[int, np.ndarray, np.ndarray], None]
"""Called with trials that have finished: the number of their round, their numbers in it [n], their values [n]."""


class Cells:
    """Runs trials on `lm`, up to `batch` runs at a time (`study.Pace`). Values in `journal` are not computed again.

    advance: called with the number of trials that have finished
    """

    def __init__(self, lm: LM, batch: int, journal: Journal | None, advance: Callable[[int], None]) -> None:
        self._lm, self._batch, self._journal, self._advance = lm, check_batch(batch), journal, advance
        self._runs, self._cut = 0, 0  # runs made here, and those of them that began at a cut

    @property
    def computed(self) -> str:
        """The extent of the computation in words: whole runs, or from the first edit on; empty without a choice."""
        if self._cut:
            return f"recomputed from the first edit on ({self._cut} of {self._runs} runs)"
        why = self._lm.engine.whole_because
        return f"computed whole: {why}" if why and self._runs else ""

    def once(self, count: int, compute: Callable[[], Sequence[float]]) -> list[float]:
        """`count` numbers that are computed here, unless the journal has them."""
        known = self._take(count)
        if len(known) == count:
            return known
        values = [float(value) for value in compute()]
        assert len(values) == count
        if self._journal is not None:
            self._journal.append(values)
        return values

    def graded(self, trials: Sequence[Trial]) -> list[float]:
        """The metric of trials, before normalisation. Trials in the journal are not run again."""
        values = self._take(len(trials))
        if len(values) < len(trials):
            self._carry(trials[len(values) :], len(values), lambda which, runs, new: values.extend(new))
        return values

    def run(
        self, counts: Sequence[int], rounds: Callable[[], Sequence[Round]], tell: Tell, reruns: int = BASELINES
    ) -> list[Values]:
        """The value of every trial, one round at a time.

        counts: the number of trials of each round; `rounds` makes them, and is called only if some are missing
        tell: called as trials finish, on another thread unless the journal had them; an error it raises stops the runs
        reruns: the approximate number of baselines per round
        """
        plan = [(number, i) for number, count in enumerate(counts) for i in _spread(count, reruns)]
        values = np.full(len(plan), np.nan)
        known = self._take(len(plan))
        values[: len(known)] = known
        self._told(plan, values, range(len(known)), tell)
        if len(known) < len(plan):
            self._compute(plan, values, len(known), rounds(), tell)
        return _by_round(len(counts), plan, values)

    def _take(self, count: int) -> list[float]:
        return self._journal.take(float, count) if self._journal is not None else []

    def _compute(
        self, plan: Sequence[_Planned], values: np.ndarray, begin: int, rounds: Sequence[Round], tell: Tell
    ) -> None:
        """Fill in the values from `begin` on."""
        trials = [rounds[number].baseline if i is None else rounds[number].trials[i] for number, i in plan[begin:]]

        def read(which: range, runs: list[Run], new: list[float]) -> None:
            self._runs += len(runs)
            self._cut += sum(run.answer.computed_from is not None for run in runs)
            values[which.start : which.stop] = new
            self._told(plan, values, which, tell)

        self._carry(trials, begin, read)

    def _carry(
        self, trials: Sequence[Trial], begin: int, read: Callable[[range, list[Run], list[float]], None]
    ) -> None:
        """Run trials in batches, append their values to the journal, and pass each batch to `read`: its numbers,
        counted from `begin`, its runs and its values."""
        unread: collections.deque[list[Trial]] = collections.deque()
        pace, done = Pace(self._batch), begin

        def calls() -> Iterator[dict[str, object]]:
            for part in pace.parts(trials, lambda trial: len(trial.graded.questions)):
                unread.append(part)
                yield _call(part)

        def read_batch(runs: list[Run]) -> None:
            nonlocal done
            part = unread.popleft()
            graded = iter(runs)
            new = [trial.graded.read([next(graded).scores for _ in trial.graded.questions]) for trial in part]
            if self._journal is not None:
                self._journal.append(np.array(new, float).tolist())
            read(range(done, done := done + len(part)), runs, new)

        run_batches(self._lm, calls(), read_batch, UNDER_WAY, pace)

    def _told(self, plan: Sequence[_Planned], values: np.ndarray, which: range, tell: Tell) -> None:
        by_round: dict[int, list[tuple[int, float]]] = {}
        for at in which:
            number, i = plan[at]
            if i is not None:
                by_round.setdefault(number, []).append((i, float(values[at])))
        for number, told in by_round.items():
            tell(number, np.array([i for i, _ in told]), np.array([value for _, value in told]))
        self._advance(len(which))


_Planned = tuple[int, int | None]  # the number of a round, and of a trial in it; None for the baseline


def planned(counts: Sequence[int], reruns: int = BASELINES) -> int:
    """The number of trials and reruns that `Cells.run` makes for rounds with these numbers of trials."""
    return sum(count + -(-count // max(count // reruns, 1)) + 1 for count in counts)


def _spread(count: int, reruns: int) -> Iterator[int | None]:
    """The numbers of a round's trials, with its baselines (None) evenly among them and one at the end."""
    every_nth = max(count // reruns, 1)
    for i in range(count):
        if i % every_nth == 0:
            yield None
        yield i
    yield None


def _call(part: Sequence[Trial]) -> dict[str, object]:
    """The arguments of the call that runs some trials."""
    runs = [(trial, question) for trial in part for question in trial.graded.questions]
    return {
        "prompt": [[*trial.prompt, *question.suffix] for trial, question in runs],
        "max_tokens": 1,
        "score": [question.score for _, question in runs],
        "edits": [trial.edits for trial, _ in runs],
    }


def _by_round(rounds: int, plan: Sequence[_Planned], values: np.ndarray) -> list[Values]:
    of = [([], []) for _ in range(rounds)]
    for (number, i), value in zip(plan, values.tolist(), strict=True):
        of[number][i is None].append(value)
    return [Values(np.array(trials), np.array(baselines)) for trials, baselines in of]


MIN_RERUNS = 2


class Listener(Protocol):
    """Receives the progress of a sweep, possibly on another thread. An error it raises stops the sweep."""

    def start(self, sweep: Any, cells: int) -> None:
        """The sweep begins. `sweep` is its result so far, with NaN values, and `cells` the number of cells to come; for
        a zoom, the largest possible number."""
        ...

    def cells(self, cells: list[Cell]) -> None:
        """These cells have finished in all pairs of prompts."""
        ...


class Unit(NamedTuple):
    """One unpatched run.

    before: edits that all of its runs have, ahead of a cell's edits
    written: the side of a column whose positions are patched; the other side's are read
    base: its metric; offset, factor: the grid holds (metric − offset) · factor
    writer: opens the source of the cells' values when it is first needed
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
    """A group of sites patched together: a row, and a column of its prompts for each unit. `at`: the numbers of row and
    column in the grid; for several cells, those of the first."""

    row: Row
    columns: Sequence[Column]
    at: tuple[int, int]


class Filled(NamedTuple):
    """Values [N, C] of units and places, and their noise floor."""

    values: np.ndarray
    floor: float


class Finished:
    """Collects the values of `count` places, and reports a place's mean once all of its `parts` are there."""

    def __init__(self, count: int, parts: int, tell: Callable[[list[int], np.ndarray], None] | None) -> None:
        self._sum, self._left, self._parts, self._tell = np.zeros(count), np.full(count, parts), parts, tell

    def add(self, places: np.ndarray, values: np.ndarray) -> None:
        """Add values of some places, one unit and draw each."""
        np.add.at(self._sum, places, values)
        np.subtract.at(self._left, places, 1)
        done = np.unique(places)[self._left[np.unique(places)] == 0]
        if self._tell is not None and len(done):
            self._tell(done.tolist(), self._sum[done] / self._parts)


def fill(cells: Cells, units: Sequence[Unit], places: Sequence[Place], draws: int, finished: Finished) -> Filled:
    """Patch every place in every unit. A cell's value is the mean of `draws` runs."""

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
    """The approximate number of reruns of each baseline, for this many units."""
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
    """The positions to read and the positions to write."""
    return (column.clean, column.corrupt) if unit.written == "corrupt" else (column.corrupt, column.clean)


def announce(show: Show, rows: Sequence[Any], columns: Sequence[Any], units: int) -> None:
    """Report the size of a grid before any of it is computed."""
    if isinstance(show, Reporter):
        show.grid(len(rows) * len(columns) * units)


@contextmanager
def carrying(
    lm: LM, what: str, total: int, question: Mapping[str, Any], batch: int, show: Show, resume: Resumable | None
) -> Iterator[Cells]:
    """`Cells` with a progress bar and, if the study can be resumed from a file, its journal. `question` is everything
    that decides the values, as plain data."""
    with keeping(lm, question, resume) as journal, progress(what, total, show) as advance:
        yield Cells(lm, batch, journal, advance)


def with_values(
    sweep: Any, filled: Filled, bases: Sequence[float], computed: str, seed: int, seeds: int = 1
) -> Any:  # fmt: skip
    """A sweep with the values of its units [N, R, P], their mean, and the spread of the mean if there are several.

    bases: the unpatched metric of every unit; computed: `Cells.computed`
    seed: seed of the spread; seeds: this many consecutive units belong to one prompt, and count once by their mean,
        because seeds are not independent prompts. For a single prompt the interval is over its seeds, without p-values
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
    """A function that reports places to a listener, given their numbers in row-major order."""

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


COARSEST = 8  # layers and positions of the first blocks
LEVELS = 3  # times that blocks are halved


class Zoom:
    """The blocks of a grid. `possible` [R, P] marks existing cells; the `keep` best blocks of each size are split."""

    def __init__(self, possible: np.ndarray, rows: Sequence[Row], columns: int, keep: int) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ProgramError(f"at least one block is looked into, not {keep!r}", "zoom")
        self.possible, self.keep = possible, min(keep, possible.size)
        panels = [[i for i, row in enumerate(rows) if row.panel == name] for name in panels_of(rows)]
        across = list(range(columns))
        self.first = self._whole(
            _Span(tuple(some), tuple(part)) for panel in panels for some in _cut(panel, COARSEST)
            for part in _cut(across, COARSEST)
        )  # fmt: skip

    def _whole(self, spans: object) -> list[_Span]:
        """The spans whose cells all exist; the others are replaced by their existing single cells."""
        whole: list[_Span] = []
        for span in spans:  # pyright: ignore[reportGeneralTypeIssues]
            some = self.possible[np.ix_(span.rows, span.columns)]
            if some.all():
                whole.append(span)
            else:
                whole += [_Span((r,), (p,)) for r in span.rows for p in span.columns if self.possible[r, p]]
        return whole

    def parts(self, span: _Span) -> list[_Span]:
        """A block cut in half in both directions."""
        return [_Span(tuple(rows), tuple(columns)) for rows in _halves(span.rows) for columns in _halves(span.columns)]

    @property
    def most_single(self) -> int:
        """An upper bound on the number of cells patched alone."""
        return min(int(self.possible.sum()), 4 * self.keep * LEVELS + sum(span.single for span in self.first))

    @property
    def most(self) -> int:
        """An upper bound on the number of places patched in a pair."""
        return len(self.first) + 4 * self.keep * LEVELS


class _Span(NamedTuple):
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def single(self) -> bool:
        return len(self.rows) == len(self.columns) == 1


Patch = Callable[[Sequence[_Span], bool], Filled]
"""Patches blocks; the flag is True if listeners are notified."""


def zoom_in(zoom: Zoom, patch: Patch, baseline: float) -> tuple[list[tuple[int, int]], Filled, list[Block]]:
    """Single cells (row, column) with their values [N, C], and the blocks visited before them."""
    singles: list[tuple[int, int]] = []
    values: list[np.ndarray] = []
    blocks: list[Block] = []
    floor = 0.0
    spans = zoom.first
    while spans:
        larger = []
        alone = [span for span in spans if span.single]
        joint = [span for span in spans if not span.single]
        for some, single in ((joint, False), (alone, True)):
            if not some:
                continue
            filled = patch(some, single)
            floor = max(floor, filled.floor)
            means = filled.values.mean(0)
            if single:
                singles += [(span.rows[0], span.columns[0]) for span in some]
                values.append(filled.values)
            else:
                blocks += [Block(*span, float(value)) for span, value in zip(some, means, strict=True)]
                best = np.argsort(-np.abs(means - baseline), kind="stable")[: zoom.keep]
                larger = [part for i in sorted(best.tolist()) for part in zoom.parts(some[i])]
        spans = larger
    return singles, Filled(np.concatenate(values, axis=1), floor), blocks


def _cut(items: Sequence[int], size: int) -> list[Sequence[int]]:
    """Even parts of at most `size` items."""
    count = -(-len(items) // size)
    ends = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


def _halves(items: Sequence[int]) -> list[Sequence[int]]:
    middle = (len(items) + 1) // 2
    return [part for part in (items[:middle], items[middle:]) if len(part)]
