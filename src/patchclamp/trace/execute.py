"""The schedule and the execution of a trace: runs its recordings batch by batch, and fills in the saved values.

`Execution` yields calls, which its driver makes with `lm.run`, `await lm.arun(...)` or a stream. An error of one prompt
fails that prompt and those that read it; the others keep their values, and the error is raised at the end.

A write of another run's rows must wait until that run has captured them. So every write has a level: 0 if it writes
numbers or rows of an earlier layer of its own run, else one more than its source's level. The level of a read is the
highest level of the writes that can change it: in its own prompt, those at an earlier depth, or earlier at the same
place, or all if it reads generated tokens. A run with just these writes gives the read its value in the last run. Runs
of one level and `max_tokens` form a batch. If a level depends on itself, no order exists and the trace is refused.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, TokensError
from patchclamp.language import Capture, From, Op, Vector
from patchclamp.run import Run
from patchclamp.trace.proxies import Saved, rows_of, value_of
from patchclamp.trace.recording import Entry, Line, Recording, at_line, same_run

UNDER_WAY = -1


class Planned(NamedTuple):
    """One run of a recording.

    entries: the writes and reads that it executes, in order
    max_tokens: 1 for an early run that needs only the prompt
    is_last: True for the recording's own run, with all its writes
    """

    recording: Recording
    level: int
    entries: tuple[Entry, ...]
    max_tokens: int
    is_last: bool


class Schedule:
    """The levels of all entries of some recordings, and the runs that follow from them. `has_edits`: other edits act
    before the trace's own, and may need generated tokens. Raises `ProgramError`, with the line, for a write that
    depends on itself."""

    def __init__(self, recordings: Iterable[Recording], has_edits: bool = False) -> None:
        self.recordings, self._has_edits = list(recordings), has_edits
        self._levels: dict[Entry, int] = {}
        self._last = {rec: max((self._level(e) for e in rec.entries if not e.is_read), default=0)
                      for rec in self.recordings}  # fmt: skip

    def batches(self) -> list[list[Planned]]:
        """The runs by level; each level has one batch per `max_tokens`, the shorter first."""
        runs = [*self._early_runs(), *map(self._last_run, self.recordings)]
        keys = sorted({(run.level, run.max_tokens) for run in runs})
        return [[run for run in runs if (run.level, run.max_tokens) == key] for key in keys]

    def gives(self, run: Planned, read: Entry, write: Entry) -> bool:
        """True if a write takes the rows of a read from this run."""
        level = self._levels[read]
        from_last = self._levels[write] > self._last[read.recording]
        return run.recording is read.recording and (run.is_last if from_last else run.level == level)

    def _level(self, entry: Entry) -> int:
        level = self._levels.get(entry)
        if level == UNDER_WAY:
            raise at_line(
                ProgramError(f"{entry.spot} depends on itself by way of other writes: no order of runs exists"),
                entry.line,
            )
        if level is None:
            self._levels[entry] = UNDER_WAY
            if entry.is_read:
                level = max((self._level(write) for write in _upstream(entry)), default=0)
            else:
                level = 0 if entry.source is None or entry.within else self._level(entry.source) + 1
            self._levels[entry] = level
        return level

    def _early_runs(self) -> list[Planned]:
        """Extra runs that capture sources of writes for prompts whose own run comes too late."""
        early: dict[tuple[Recording, int], list[Entry]] = {}
        for write in (e for recording in self.recordings for e in recording.entries if e.source and not e.within):
            read = write.source
            assert read is not None
            if self._levels[write] <= self._last[read.recording]:
                early.setdefault((read.recording, self._levels[read]), []).append(read)
        return [self._early_run(recording, level, reads) for (recording, level), reads in early.items()]

    def _early_run(self, recording: Recording, level: int, reads: list[Entry]) -> Planned:
        writes = {write for read in reads for write in _upstream(read)}
        in_prompt = {write for write in writes if (recording.positions(write) < recording.length).any()}
        alone = not self._has_edits and all(map(_fits_the_prompt, in_prompt))
        max_tokens = 1 if alone else recording.max_tokens
        chosen = (in_prompt if max_tokens == 1 else writes) | set(reads)
        return Planned(recording, level, tuple(e for e in recording.entries if e in chosen), max_tokens, False)

    def _last_run(self, recording: Recording) -> Planned:
        level = self._last[recording]
        entries = [e for e in recording.entries if not e.is_read or e.wanted]
        return Planned(recording, level, tuple(entries), recording.max_tokens, True)


def _upstream(read: Entry) -> list[Entry]:
    return [entry for entry in read.recording.entries if entry.is_upstream_of(read)]


def _fits_the_prompt(write: Entry) -> bool:
    """True if a write has the same effect on the prompt in a run of the prompt alone."""
    recording, op = write.recording, write.op
    rows = getattr(op, "value", None)
    if isinstance(rows, Vector) and len(rows.shape) == 2 and (recording.positions(write) >= recording.length).any():
        return False
    if write.source is not None and len(recording.positions(write)) > 1 and recording.has_generated(write):
        return False
    try:
        cases = recording.bound_prompt.cases(op.tokens, recording.length)
    except (TokensError, ShapeError):
        return False
    return all(np.all(case.positions < recording.length) for case in cases)


def is_shared(run: Planned, read: Entry) -> bool:
    """True if a run captures the place of a read again after a write there: `From` would take that later value."""
    after = [entry for entry in run.entries if entry.number > read.number and entry.points & read.points]
    written = next((entry.number for entry in after if not entry.is_read), None)
    if written is None:
        return False
    resolve = run.recording.lm.sites.resolve
    cached = (ref.point for cache in run.recording.caches for site in cache.sites for ref in resolve(site))
    again = any(entry.is_read and entry.number > written for entry in after)
    return again or (run.is_last and not read.points.isdisjoint(cached))


def runnable(recordings: Iterable[Recording]) -> list[Recording]:
    """The recordings that can run: those that have not failed and take no rows of one that has."""
    whole = [recording for recording in recordings if recording.failure is None]
    for recording in whole:
        lost = (entry.source.recording.failure for entry in recording.entries if entry.source is not None)
        recording.failure = next((failure for failure in lost if failure is not None), None)
    return whole if all(recording.failure is None for recording in whole) else runnable(whole)


def failed_with(run: Planned, error: PatchclampError) -> None:
    """Fails the recording of a failed run; the first error is kept."""
    if run.recording.failure is None:
        run.recording.failure = error


Call = dict[str, Any]  # the arguments of one `lm.run` of a list of prompts
Calls = Generator[Call, list[Run], None]


class Execution:
    """The execution of one trace. `edits` come before the trace's own ops in every program; `options` are arguments of
    `lm.run` for the prompts' own runs."""

    def __init__(self, recordings: list[Recording], edits: list[Op], options: Call) -> None:
        self._edits, self._options, self._recordings = edits, options, recordings
        for recording in recordings:
            for saved in recording.saved if recording.state == "left" else ():
                saved.failure = recording.failure
        self._schedule = Schedule(runnable(recordings), bool(edits))
        self._left = 0  # batches left, including the current one
        self._runs: dict[int, tuple[Planned, Run]] = {}  # by the planned run's id

    def calls(self) -> Calls:
        """Yields the arguments of each call and receives its runs. Raises the trace's first error at the end."""
        batches = self._schedule.batches()
        for self._left, batch in zip(range(len(batches), 0, -1), batches, strict=True):
            while batch := [run for run in batch if run.recording.failure is None]:
                programs = [self._program(run) for run in batch]
                ready = [i for i, run in enumerate(batch) if run.recording.failure is None]
                batch, programs = [batch[i] for i in ready], [programs[i] for i in ready]
                if not batch:
                    break
                try:
                    runs = yield self._call(batch, programs)
                except PatchclampError as error:
                    self._blame(batch, error)
                    continue
                self._take(batch, runs)
                break
        self._finish()

    def is_last_call(self) -> bool:
        """True if the yielded call belongs to the last batch."""
        return self._left == 1

    def value_so_far(self, saved: Saved, run: Run) -> Any:
        """The current value of a saved expression in an unfinished run of the last batch."""
        planned = next(run for batch in self._schedule.batches() for run in batch if run.is_last)
        reads = [term.read for term in saved.expression.terms]
        return value_of(
            saved.expression, {read: rows_of(read, run, self._path(planned, read)) for read in reads}
        ).clone()

    # -- calls

    def _program(self, run: Planned) -> list[Op]:
        """The ops of a run. Marks the run as failed if a prompt that it reads has failed."""
        ops: list[Op] = list(self._edits)
        for entry in run.entries:
            if entry.source is None:
                ops.append(entry.op)
            elif entry.within:
                ops.append(msgspec.structs.replace(entry.op, value=same_run(entry, entry.source)))
            elif entry.source.recording.failure is not None:
                failed_with(run, entry.source.recording.failure)
                break
            else:
                ops.append(msgspec.structs.replace(entry.op, value=self._value(entry, entry.source)))
        return ops

    def _value(self, write: Entry, read: Entry) -> From | Vector:
        """The value of a write from the run that has its read: a `From`, or the numbers themselves where `From` would
        take another read of the place or another part of the row."""
        planned, source = next(pair for pair in self._runs.values() if self._schedule.gives(pair[0], read, write))
        columns = {ref.columns for ref in (*read.refs, *write.refs)}
        if len(columns) == 1 and not is_shared(planned, read):
            return From(source, read.op.at, read.op.tokens)
        rows = rows_of(read, source, self._path(planned, read))
        count = 1 if read.spot.single else rows.shape[1] if read.spot.batched else rows.shape[0]
        flat = rows.reshape(count, -1)
        return Vector.of(flat[0] if count == 1 else flat)

    def _call(self, batch: list[Planned], programs: list[list[Op]]) -> Call:
        call: Call = {"prompt": [_prompt(run) for run in batch], "edits": programs, "max_tokens": batch[0].max_tokens}
        last = [run.is_last for run in batch]
        call["capture"] = [
            [Capture(site, cache.tokens) for cache in run.recording.caches for site in cache.sites] if own else []
            for run, own in zip(batch, last, strict=True)
        ]
        call["sampling"] = [_sampling(run) for run in batch]
        if any(run.recording.score and own for run, own in zip(batch, last, strict=True)):
            call["score"] = [run.recording.score if own else [] for run, own in zip(batch, last, strict=True)]
        return call | (self._options if any(last) else {k: v for k, v in self._options.items() if k == "lora"})

    def _take(self, batch: list[Planned], runs: list[Run]) -> None:
        for planned, run in zip(batch, runs, strict=True):
            self._runs[id(planned)] = planned, run
            if planned.is_last:
                planned.recording.run = run
            if run.error is not None:
                failed_with(planned, self._with_line(planned, run.error))

    def _path(self, planned: Planned, entry: Entry) -> str:
        return f"edits[{len(self._edits) + planned.entries.index(entry)}]"

    # -- errors

    def _blame(self, batch: list[Planned], error: PatchclampError) -> None:
        """Attributes a call's error to the prompt whose index is in its path, or to all."""
        match = re.match(r"prompt (\d+)\.?", error.path or "")
        if match is not None:
            error = type(error)(error.message, (error.path or "")[match.end() :] or None)
            batch = [batch[int(match[1])]]
        for planned in batch:
            failed_with(planned, self._with_line(planned, error))

    def _with_line(self, planned: Planned, error: PatchclampError) -> PatchclampError:
        line = self._line(planned, error)
        return at_line(error, line)

    def _line(self, planned: Planned, error: PatchclampError) -> Line:
        """The line of the op that caused an error, found by its path or by the site it names."""
        match = re.match(r"(edits|capture)\[(\d+)\]", error.path or "")
        recording = planned.recording
        if match is not None and match[1] == "edits" and int(match[2]) >= len(self._edits):
            return planned.entries[int(match[2]) - len(self._edits)].line
        if match is not None and match[1] == "capture":
            lines = [cache.line for cache in recording.caches for _ in cache.sites]
            return lines[int(match[2])]
        labels = recording.lm.sites.labels
        at = [e for e in planned.entries if not e.is_read and
              any(re.search(rf"(?<!\w){re.escape(word)}(?![\w\[])", error.message)
                  for point in e.points for word in labels(point))]  # fmt: skip
        return at[-1].line if at else recording.line

    # -- results

    def _finish(self) -> None:
        """Fills in every value it can, then raises the first error."""
        errors = [rec.failure for rec in self._recordings if rec.failure is not None and rec.state != "left"]
        errors += [error for rec in self._recordings for saved in rec.saved if (error := self._fill(saved))]
        errors += [error for rec in self._recordings if (error := self._fill_caches(rec))]
        for planned, run in self._runs.values():
            if not planned.is_last:
                run.close()
        self._runs.clear()
        if errors:
            raise errors[0]

    def _fill(self, saved: Saved) -> PatchclampError | None:
        """Fills in a saved tensor. Returns its error, if any, unless its recording has already failed."""
        failure = next((rec.failure for rec in saved.recordings if rec.failure is not None), None)
        if failure is not None:
            saved.failure = failure
            return None
        try:
            rows = {term.read: self._rows(term.read) for term in saved.expression.terms}
            saved.fill(value_of(saved.expression, rows))
        except (PatchclampError, RuntimeError) as error:  # torch raises it for shapes that do not match
            told = error if isinstance(error, PatchclampError) else ProgramError(str(error))
            saved.failure = at_line(told, saved.line)
            return saved.failure
        return None

    def _rows(self, read: Entry) -> Any:
        planned, run = next((p, r) for p, r in self._runs.values() if p.is_last and p.recording is read.recording)
        return rows_of(read, run, self._path(planned, read))

    def _fill_caches(self, recording: Recording) -> PatchclampError | None:
        for cache in recording.caches:
            cache.failure = recording.failure
            if recording.failure is not None or recording.run is None:
                continue
            try:
                cache.fill(recording.run, recording.lm.fetch([recording.run], cache.sites, copy=False)[0])
            except PatchclampError as error:
                cache.failure = at_line(error, cache.line)
                return cache.failure
        return None


def _sampling(run: Planned) -> dict[str, Any]:
    """The sampling parameters of a run; an early run of one token keeps only those that edit it."""
    sampling = run.recording.sampling or {}
    kept = sampling if run.is_last or run.max_tokens > 1 else {"extra_args": sampling.get("extra_args")}
    return {name: value for name, value in kept.items() if value is not None}


def _prompt(run: Planned) -> str | list[int]:
    assert run.recording.prompt is not None
    ids, text = run.recording.prompt
    return ids if text is None else text
