"""The order of a trace's runs. A write that reads waits for a run that has captured what it reads, unless it reads an
earlier layer of its own run.

Every write has a level: 0 if it writes numbers, or what its own run has, else one more than the read that it waits for.
A read has the highest level of the writes that can change it: those before it in its own prompt, in depth or at the
same place. So the value that a read has in a run with just these writes is the value that it has in the last run. Runs
of one level are one batch. Where a level would depend on itself, no order exists, and the trace is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, TokensError
from patchclamp.language import Vector
from patchclamp.trace.lines import at_line
from patchclamp.trace.recording import Entry, Recording

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
