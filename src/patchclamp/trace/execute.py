"""Runs what a trace has recorded, batch by batch, and fills in what it saved.

The calls are made by whoever drives `Execution`: `lm.run`, `await lm.arun(...)`, or a stream. What is wrong with one
prompt fails that prompt, and those that read it; the others keep their values, and the error is raised at the end.

The order of a trace's runs. A write that reads waits for a run that has captured what it reads, unless it reads an
earlier layer of its own run.

Every write has a level: 0 if it writes numbers, or what its own run has, else one more than the read that it waits for.
A read has the highest level of the writes that can change it: those before it in its own prompt, in depth or at the
same place. So the value that a read has in a run with just these writes is the value that it has in the last run. Runs
of one level are one batch. Where a level would depend on itself, no order exists, and the trace is refused.
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

    writes, reads: the entries that it carries out, in order
    max_tokens: 1 for a run that only gives reads of the prompt
    is_last: whether it is the recording's own, with all its writes
    """

    recording: Recording
    level: int
    entries: tuple[Entry, ...]
    max_tokens: int
    is_last: bool


class Schedule:
    """The levels of all entries of some recordings, and the runs that these make.

    has_edits: whether other edits act before the trace's own; they may need tokens that are generated

    Raises `ProgramError`, with the line, for writes that depend on themselves.
    """

    def __init__(self, recordings: Iterable[Recording], has_edits: bool = False) -> None:
        self.recordings, self._has_edits = list(recordings), has_edits
        self._levels: dict[Entry, int] = {}
        self._last = {rec: max((self._level(e) for e in rec.entries if not e.is_read), default=0)
                      for rec in self.recordings}  # fmt: skip

    def batches(self) -> list[list[Planned]]:
        """The runs, level by level; those of one level are one batch for each `max_tokens`, the shorter first."""
        runs = [*self._early_runs(), *map(self._last_run, self.recordings)]
        keys = sorted({(run.level, run.max_tokens) for run in runs})
        return [[run for run in runs if (run.level, run.max_tokens) == key] for key in keys]

    def gives(self, run: Planned, read: Entry, write: Entry) -> bool:
        """Whether a run is the one whose rows of a read a write takes."""
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
        """Runs that only give reads to writes: of prompts whose own run has a higher level."""
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
    """Whether a write is the same op in a run of the prompt alone: what it does to the prompt does not change."""
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
    """Whether a run reads the place of a read again once it was written, which is what `From` would take."""
    after = [entry for entry in run.entries if entry.number > read.number and entry.points & read.points]
    written = next((entry.number for entry in after if not entry.is_read), None)
    if written is None:
        return False
    resolve = run.recording.lm.sites.resolve
    cached = (ref.point for cache in run.recording.caches for site in cache.sites for ref in resolve(site))
    again = any(entry.is_read and entry.number > written for entry in after)
    return again or (run.is_last and not read.points.isdisjoint(cached))


def runnable(recordings: Iterable[Recording]) -> list[Recording]:
    """Those that can run: not what an error left before, nor what takes of such."""
    whole = [recording for recording in recordings if recording.failure is None]
    for recording in whole:
        lost = (entry.source.recording.failure for entry in recording.entries if entry.source is not None)
        recording.failure = next((failure for failure in lost if failure is not None), None)
    return whole if all(recording.failure is None for recording in whole) else runnable(whole)


def failed_with(run: Planned, error: PatchclampError) -> None:
    """A run failed: so does what its recording saves."""
    if run.recording.failure is None:
        run.recording.failure = error


Call = dict[str, Any]  # the arguments of one `lm.run` of a list of prompts
Calls = Generator[Call, list[Run], None]


class Execution:
    """One trace, run.

    edits: what stands before the trace's own ops in every program
    options: of `lm.run`, for the prompts' own runs
    """

    def __init__(self, recordings: list[Recording], edits: list[Op], options: Call) -> None:
        self._edits, self._options, self._recordings = edits, options, recordings
        for recording in recordings:
            for saved in recording.saved if recording.state == "left" else ():
                saved.failure = recording.failure
        self._schedule = Schedule(runnable(recordings), bool(edits))
        self._left = 0  # batches, this one included
        self._runs: dict[int, tuple[Planned, Run]] = {}  # by the planned run's id

    def calls(self) -> Calls:
        """Yields the arguments of one call after the other, and takes its runs. Raises the trace's error at its end."""
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
        """Whether the call that was yielded is of the last batch."""
        return self._left == 1

    def value_so_far(self, saved: Saved, run: Run) -> Any:
        """What a saved value of the last batch has in a run that is under way."""
        planned = next(run for batch in self._schedule.batches() for run in batch if run.is_last)
        reads = [term.read for term in saved.expression.terms]
        return value_of(
            saved.expression, {read: rows_of(read, run, self._path(planned, read)) for read in reads}
        ).clone()

    # -- a call

    def _program(self, run: Planned) -> list[Op]:
        """The ops of a run. It fails where the prompt that it reads has failed."""
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
        """What a write takes of the run that has its read: the rows themselves, or, where another read of the place or
        another part of the row would be taken for them, their numbers."""
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

    # -- what goes wrong

    def _blame(self, batch: list[Planned], error: PatchclampError) -> None:
        """An error that a call raised is of the prompt whose number stands in its path, or of all."""
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
        """The line of the op that an error speaks of, by its path or by the place that it names."""
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

    # -- what comes of it

    def _finish(self) -> None:
        """Fills in everything that can be, then raises the first error."""
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
        """Gives a saved tensor its numbers; returns what is wrong, unless its recording has failed."""
        failure = next((rec.failure for rec in saved.recordings if rec.failure is not None), None)
        if failure is not None:
            saved.failure = failure
            return None
        try:
            rows = {term.read: self._rows(term.read) for term in saved.expression.terms}
            saved.fill(value_of(saved.expression, rows))
        except (PatchclampError, RuntimeError) as error:  # torch's, of shapes that do not go together
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
    """The sampling of a run; of one that samples nothing that counts, only what edits it."""
    sampling = run.recording.sampling or {}
    kept = sampling if run.is_last or run.max_tokens > 1 else {"extra_args": sampling.get("extra_args")}
    return {name: value for name, value in kept.items() if value is not None}


def _prompt(run: Planned) -> str | list[int]:
    assert run.recording.prompt is not None
    ids, text = run.recording.prompt
    return ids if text is None else text
