"""Going on where a study stopped: its journal, and runs of which the journal has some already.

Sweeps of cells keep a number a run (`cells`). Studies that keep more of a run keep a record of it, here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies.batches import UNDER_WAY, Pace, run_batches
from patchclamp.studies.identity import model_identity
from patchclamp.studies.journal import Journal, Record, Resumable, hash_of, open_journal
from patchclamp.studies.result import provenance

Item = TypeVar("Item")


@contextmanager
def keeping(lm: LM, question: Mapping[str, Any], resume: Resumable | None) -> Iterator[Journal | None]:
    """The journal of a study that is to be resumed from a file; None of one that is not.

    question: all that decides the values, as plain data
    Raises: `ProgramError` if the file is of another study, model, engine or version.
    """
    if resume is None:
        yield None
        return
    made = {"made": msgspec.to_builtins(provenance(lm)), "weights": model_identity(lm)[1]}
    journal = open_journal(resume, hash_of({**question, **made}))
    try:
        yield journal
    finally:
        journal.close()


def recorded_runs(
    lm: LM,
    journal: Journal | None,
    items: Sequence[Item],
    calls: Callable[[Iterable[Sequence[Item]]], Iterable[Mapping[str, Any]]],
    record: Callable[[Sequence[Run], Sequence[Item]], Sequence[Record]],
    kind: type[Record],
    advance: Callable[[int], None],
    batch: int,
) -> list[Record]:
    """A record of the run of every item, in order. Those that the journal has are not run again.

    calls: the calls that run batches of items, a run each, as `run_batches` takes them
    record: what is kept of some runs, which are closed then
    advance: hears how many items are done
    batch: runs in a batch at most
    """
    records = journal.take_records(len(items), kind) if journal is not None else []
    advance(len(records))

    def read(runs: list[Run]) -> None:
        first = len(records)
        new = record(runs, items[first : first + len(runs)])
        for run in runs:
            run.close()
        if journal is not None:
            journal.append_records(new)
        records.extend(new)
        advance(len(new))

    if len(records) < len(items):
        pace = Pace(batch)
        run_batches(lm, calls(pace.parts(items[len(records) :])), read, UNDER_WAY, pace)
    return records


def recorded(
    journal: Journal | None, count: int, kind: type[Record], compute: Callable[[], Sequence[Record]]
) -> list[Record]:
    """`count` records that are computed together, unless the journal has them."""
    records = journal.take_records(count, kind) if journal is not None else []
    if len(records) < count:
        records = list(compute())
        assert len(records) == count
        if journal is not None:
            journal.append_records(records)
    return records
