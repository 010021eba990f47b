"""The cells of a study: many graded runs, submitted in batches, with reruns of the unpatched prompt among them.

Every study that fills a grid goes through here: it says what to run (`Trial`), and gets numbers. Here are the batches
of which two are under way, the reruns that measure the noise floor, the progress bar, and the journal from which an
interrupted study goes on.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from patchclamp.language import Op
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies.batches import UNDER_WAY, Pace, run_batches
from patchclamp.studies.checks import check_batch
from patchclamp.studies.journal import Journal
from patchclamp.studies.metric import Graded

BASELINES = 8  # reruns of an unpatched prompt, spread through its cells, that measure the noise floor


class Trial(NamedTuple):
    """One graded run: a prompt's token ids, its edits, and what is graded. An answer of several tokens takes a run for
    each of them."""

    prompt: Sequence[int]
    edits: Sequence[Op]
    graded: Graded


class Round(NamedTuple):
    """The trials of one unpatched run, which `baseline` repeats."""

    trials: Sequence[Trial]
    baseline: Trial


class Values(NamedTuple):
    """What the trials of a round gave [n], and what the reruns of its baseline did."""

    trials: np.ndarray
    baselines: np.ndarray


Tell = Callable[[int, np.ndarray, np.ndarray], None]
"""Hears of trials that have finished: the number of their round, their numbers in it [n], their values [n]."""


class Cells:
    """Carries trials on `lm`, up to `batch` runs at a time (`batches.Pace`). What `journal` has is not computed again.

    advance: is told how many runs have finished
    """

    def __init__(self, lm: LM, batch: int, journal: Journal | None, advance: Callable[[int], None]) -> None:
        self._lm, self._batch, self._journal, self._advance = lm, check_batch(batch), journal, advance
        self._runs, self._cut = 0, 0  # that were carried out here, and those of them that began at a cut

    @property
    def computed(self) -> str:
        """How much of the runs was computed, in words; empty if the engine has one way only."""
        if self._cut:
            return f"recomputed from the first edit on ({self._cut} of {self._runs} runs)"
        why = self._lm.engine.whole_because
        return f"computed whole: {why}" if why and self._runs else ""

    def once(self, count: int, compute: Callable[[], Sequence[float]]) -> list[float]:
        """`count` numbers that are computed here, unless the journal has them."""
        known = self._take(count)
        if len(known) == count:
            return known.tolist()
        values = [float(value) for value in compute()]
        assert len(values) == count
        if self._journal is not None:
            self._journal.append(values)
        return values

    def graded(self, trials: Sequence[Trial]) -> list[float]:
        """The metric of trials, before normalisation. Those that the journal has are not run again."""
        values = self._take(len(trials)).tolist()
        if len(values) < len(trials):
            self._carry(trials[len(values) :], len(values), lambda which, runs, new: values.extend(new))
        return values

    def run(
        self, counts: Sequence[int], rounds: Callable[[], Sequence[Round]], tell: Tell, reruns: int = BASELINES
    ) -> list[Values]:
        """Every trial's value, a round at a time.

        counts: how many trials each round has; `rounds` makes them, and is called only if some are not known yet
        tell: hears of trials as they finish, on another thread; what it raises stops what is under way
        reruns: about how many baselines a round has
        """
        plan = [(number, i) for number, count in enumerate(counts) for i in _spread(count, reruns)]
        values = np.full(len(plan), np.nan)
        known = self._take(len(plan))
        values[: len(known)] = known
        self._told(plan, values, range(len(known)), tell)
        if len(known) < len(plan):
            self._compute(plan, values, len(known), rounds(), tell)
        return _by_round(len(counts), plan, values)

    def _take(self, count: int) -> np.ndarray:
        return self._journal.take(count) if self._journal is not None else np.zeros(0)

    def _compute(
        self, plan: Sequence[_Planned], values: np.ndarray, begin: int, rounds: Sequence[Round], tell: Tell
    ) -> None:
        """Fills in the values from `begin` on."""
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
        """Runs trials in batches, appends their values to the journal, and passes on the numbers of each batch, counted
        from `begin`, its runs and its values."""
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
                self._journal.append(np.array(new))
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


_Planned = tuple[int, int | None]  # the round, and the number of a trial in it; None: its baseline


def planned(counts: Sequence[int], reruns: int = BASELINES) -> int:
    """How many trials and reruns `Cells.run` makes of rounds of so many trials."""
    return sum(len(list(_spread(count, reruns))) for count in counts)


def _spread(count: int, reruns: int) -> Iterator[int | None]:
    """The numbers of a round's trials with its baselines, None, evenly among them; one stands at the end."""
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
