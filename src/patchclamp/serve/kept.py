"""Objects that requests store on a server for their owner: captured runs, named vectors and programs, sweep journals.

Everything is in memory: a name is a dictionary key and never a path. Runs, vectors and programs share a namespace.

The API processes of a server synchronise through the first engine core, which stores the newest note on each name. A
process fetches new notes before it looks up a request's names, and every few seconds. A single process does not fetch
notes. Journals of sweeps are not synchronised: with several processes, a repeated sweep may start over.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from patchclamp.engines.base import Answer, Request
from patchclamp.engines.tokenizer import Chat
from patchclamp.engines.vllm.async_engine import AsyncEngine
from patchclamp.engines.vllm.server import ServeLimits
from patchclamp.errors import Gone, MissingSource, NameTaken, PatchclampError, ProgramError, near
from patchclamp.language import From, Named, Probe, Program, SameRun, SiteOp, Use, Vector, every
from patchclamp.lm import LM
from patchclamp.plan import BoundProgram
from patchclamp.plan.bind import bind
from patchclamp.plan.prompt import Prompt
from patchclamp.run import Run
from patchclamp.sites import SiteMap
from patchclamp.store.journal import Journal
from patchclamp.store.named import Means, NamedBank, from_bytes, to_bytes


class Note(msgspec.Struct):
    """The newest state of one of an owner's runs, vectors or programs.

    kind: "vector", "program", "run", "gone", or "touched" (a run was read)
    by: the process that sent it
    data: the entry as bytes; for "gone", the reason
    """

    owner: str
    name: str
    kind: str
    by: str
    data: bytes = b""


class RunNote(msgspec.Struct):
    """A run to send to other processes, without its captures. `ids`: the token ids of its conditions, by bank key."""

    key: str
    prompt_token_ids: list[int]
    max_tokens: int
    text: str | None
    bound: BoundProgram
    ids: dict[str, list[float]]
    program: str
    token_ids: list[int]
    answer: str
    finish_reason: str | None
    cached_tokens: int
    chat: Chat | None
    images: list[list[int]]


class NoteChannel:
    """Exchanges notes with the server's other API processes."""

    by: str
    is_shared: bool

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine, self._seen = engine, 0
        self.by, self.is_shared = uuid.uuid4().hex, engine.api_processes > 1

    def say(self, owner: str, name: str, kind: str, data: bytes = b"") -> None:
        """Send a note to the other processes."""
        note = msgspec.msgpack.encode(Note(owner, name, kind, self.by, data))
        self._engine.say(f"{owner} {name}{' touched' if kind == 'touched' else ''}", note)

    async def news(self) -> list[Note]:
        """Return the other processes' notes since the last call."""
        if not self.is_shared:
            return []
        self._seen, notes = await self._engine.said_since(self._seen)
        decoded = [msgspec.msgpack.decode(note, type=Note) for note in notes]
        return [note for note in decoded if note.by != self.by]


def pack_run(run: Run, request: Request) -> bytes:
    """Serialise a finished run and its request."""
    assert request.bound is not None
    keys = {op.condition.ids for op in request.bound.ops if op.condition is not None}
    note = RunNote(
        run.key, run.prompt_token_ids, request.max_tokens, request.text, request.bound,
        {key: request.vectors[key].reshape(-1).tolist() for key in keys}, run.program.to_json(), run.token_ids,
        run.text, run.finish_reason, run.cached_tokens, request.chat, request.images,
    )  # fmt: skip
    return msgspec.msgpack.encode(note)


def unpack_run(data: bytes, lm: LM) -> Run:
    """Restore a run on this process's `lm`. Dropping it frees no captures."""
    note = msgspec.msgpack.decode(data, type=RunNote)
    vectors = {key: np.array(ids, np.float32).reshape(1, -1) for key, ids in note.ids.items()}
    request = Request(note.key, note.prompt_token_ids, note.max_tokens, note.bound, vectors, text=note.text,
                      chat=note.chat, images=note.images)  # fmt: skip
    answer = Answer(note.token_ids, note.answer, None, {}, note.finish_reason, note.cached_tokens)
    return Run(lm, request, Program.from_json(note.program), answer, is_kept_elsewhere=True)


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
MAX_GONE = 4096  # dropped runs whose reasons are stored


class _KeptRun(msgspec.Struct):
    run: Run
    captured_bytes: int
    touched_s: float
    is_elsewhere: bool = False  # another API process frees it


class Owned(ChainMap[str, Any]):
    """The names that an owner's programs can use: its runs and its bank."""

    def __init__(self, bank: NamedBank, runs: dict[str, Run]) -> None:
        super().__init__(runs, bank)

    def source(self, key: str) -> Run:
        """Return the run with this key or name. Raises `MissingSource`."""
        runs = self.maps[0]
        for name, run in runs.items():
            if key in (name, run.key):
                return run
        raise MissingSource(f"unknown run {key}; available: {', '.join(runs) or 'none'}")


class _Owner:
    """One owner's objects. version: number of changes to its bank; expected_bytes: reserved for running requests."""

    def __init__(self) -> None:
        self.runs: dict[str, _KeptRun] = {}
        self.bank = NamedBank()
        self.sizes: dict[str, int] = {}  # of the bank's entries, in bytes
        self.version = self.expected_bytes = 0

    def set(self, name: str, entry: Vector | Means | Program, size: int) -> None:
        self.bank[name], self.sizes[name] = entry, size
        self.version += 1

    def delete(self, name: str) -> None:
        del self.bank[name], self.sizes[name]
        self.version += 1


class KeptObjects:
    """The runs and bank of every owner. Use it only on the event loop's thread. `channel` notifies other processes;
    `always_on`: the server's own probes, whose names programs cannot reuse."""

    limits: ServeLimits

    def __init__(
        self, limits: ServeLimits | None = None, clock: Callable[[], float] = time.monotonic,
        channel: NoteChannel | None = None, always_on: Sequence[Probe] = (),
    ) -> None:  # fmt: skip
        self.always_on: Sequence[Probe] = always_on
        self._channel = channel if channel is not None and channel.is_shared else None
        self.limits, self._clock = limits or ServeLimits(), clock
        self._owners: defaultdict[str, _Owner] = defaultdict(_Owner)
        self._gone: dict[tuple[str, str], str] = {}  # the reasons why runs were dropped

    def bank_version(self, owner: str) -> int:
        """Return a version number that changes with the owner's bank."""
        return self._owners[owner].version

    def entries(self, owner: str, kind: str) -> dict[str, Any]:
        """Return an owner's vectors (and means), or its programs, by name."""
        return {name: entry for name, entry in self._owners[owner].bank.items() if kind_of(entry) == kind}

    def named_bytes(self, owner: str) -> int:
        """Return the size of an owner's bank in bytes."""
        return sum(self._owners[owner].sizes.values())

    def entry(self, owner: str, kind: str, name: str) -> Any:
        """Return the vector, means or program with this name. Raises `MissingSource`."""
        entries = self.entries(owner, kind)
        if name not in entries:
            names = ", ".join(list(entries)[:20]) or "none"
            raise MissingSource(f"unknown {kind} {name!r}{near(name, entries)}; available: {names}")
        return entries[name]

    def put(self, owner: str, kind: str, name: str, entry: Vector | Means | Program) -> None:
        """Store a vector, means or a program under a name, replacing one of the same kind. Raises `NameTaken` for a
        name of another kind, and `CapacityError` if the owner's bank is full."""
        self.check_free(owner, name, kind)
        size, others = bytes_of(entry), [each for key, each in self._owners[owner].sizes.items() if key != name]
        self.limits.check_room("bank_names", len(others), 1, "names in the bank")
        self.limits.check_room("named_bytes", sum(others), size, "bytes in the bank")
        self._owners[owner].set(name, entry, size)
        if isinstance(entry, Program):
            self._say(owner, name, kind, lambda: entry.to_json().encode())
        else:
            self._say(owner, name, kind, lambda: to_bytes(name, entry))

    def delete(self, owner: str, kind: str, name: str) -> None:
        """Delete a vector (or means) or a program. Raises `MissingSource`."""
        self.entry(owner, kind, name)
        self._owners[owner].delete(name)
        self._say(owner, name, "gone", lambda: b"it was deleted")

    def check_free(self, owner: str, name: str, kind: str) -> None:
        """Raise `NameTaken` if the owner has an entry of another kind (run, vector or program) with this name."""
        mine = self._owners[owner]
        has = "run" if name in mine.runs else kind_of(mine.bank[name]) if name in mine.bank else kind
        if has != kind:
            raise NameTaken(f"{name!r} is already a {has}: delete it first, or choose another name")

    def owned(self, owner: str) -> Owned:
        """Return a snapshot of the names that an owner's programs may use, safe to read on any thread."""
        return Owned(self._owners[owner].bank.copy(), self.runs(owner))

    @contextlib.contextmanager
    def room_for(self, owner: str, captured_bytes: int) -> Iterator[None]:
        """Reserve memory for a run's captures while it runs. Raises `CapacityError` if too little is left."""
        mine = self._owners[owner]
        used = mine.expected_bytes + sum(kept.captured_bytes for kept in mine.runs.values())
        what = "bytes that a run with this max_tokens may capture"
        self.limits.check_room("run_bytes", used, captured_bytes, what, "capture")
        mine.expected_bytes += captured_bytes
        try:
            yield
        finally:
            mine.expected_bytes -= captured_bytes

    def keep(self, owner: str, name: str, run: Run, request: Request | None = None) -> None:
        """Store a run under a name; other processes are notified if its `request` is given. Raises `CapacityError` if
        the owner's runs leave no room, and `NameTaken` if the name belongs to an entry of another kind."""
        self.drop_old()
        self.check_free(owner, name, "run")
        runs = self._owners[owner].runs
        others = [kept.captured_bytes for key, kept in runs.items() if key != name]
        self.limits.check_room("kept_runs", len(others), 1, "runs", "run")
        self.limits.check_room("run_bytes", sum(others), run.captured_bytes, f"bytes captured by run {name}", "run")
        if name in runs:
            self._close(owner, name, "another run took its name")
        runs[name] = _KeptRun(run, run.captured_bytes, self._clock())
        self._gone.pop((owner, name), None)
        if request is not None:
            self._say(owner, name, "run", lambda: pack_run(run, request))

    def run(self, owner: str, name: str) -> Run:
        """Return the run with this name. Raises `Gone` if it was dropped, and `MissingSource` if it never existed."""
        self.drop_old()
        kept = self._owners[owner].runs.get(name)
        if kept is not None:
            kept.touched_s = self._clock()
            if kept.is_elsewhere:
                self._say(owner, name, "touched", bytes)
            return kept.run
        if (owner, name) in self._gone:
            raise Gone(f"run {name} is gone: {self._gone[owner, name]}")
        raise MissingSource(f"unknown run {name}")

    def runs(self, owner: str) -> dict[str, Run]:
        self.drop_old()
        return {name: kept.run for name, kept in self._owners[owner].runs.items()}

    def drop(self, owner: str, name: str) -> None:
        """Delete a run and free its captures."""
        self.run(owner, name)
        self._close(owner, name, "it was deleted")

    def let_go(self, owner: str, name: str, run: Run) -> None:
        """After a request, free its run if it is not to be kept, unless its name now belongs to another run."""
        kept = self._owners[owner].runs.get(name)
        if kept is not None and kept.run is run:
            self._close(owner, name, "its captures were returned with its answer, and keep was not set")

    def drop_old(self) -> None:
        """Free runs that have not been read for `run_ttl_s` seconds."""
        oldest = self._clock() - self.limits.run_ttl_s
        for owner, mine in self._owners.items():
            for name in [name for name, kept in mine.runs.items() if kept.touched_s < oldest and not kept.is_elsewhere]:
                self._close(owner, name, f"it expired after {self.limits.run_ttl_s:g} seconds without access")

    def _say(self, owner: str, name: str, kind: str, pack: Callable[[], bytes]) -> None:
        if self._channel is not None:
            self._channel.say(owner, name, kind, pack())

    def _close(self, owner: str, name: str, why: str) -> None:
        self._forget(owner, name, why)
        self._say(owner, name, "gone", why.encode)

    def _forget(self, owner: str, name: str, why: str) -> None:
        """Close a run, if this process has it, and store the reason for dropping it."""
        if (kept := self._owners[owner].runs.pop(name, None)) is not None:
            kept.run.close()
        self._gone[owner, name] = why
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def hear(self, note: Note, lm: LM) -> None:
        """Apply another process's note."""
        owner, name, mine = note.owner, note.name, self._owners[note.owner]
        if note.kind == "touched":
            if name in mine.runs:
                mine.runs[name].touched_s = self._clock()
            return
        if name in mine.runs or (note.kind == "gone" and name not in mine.bank):
            self._forget(owner, name, note.data.decode() if note.kind == "gone" else "another run took its name")
        if note.kind == "run":
            run = unpack_run(note.data, lm)
            mine.runs[name] = _KeptRun(run, run.captured_bytes, self._clock(), is_elsewhere=True)
            self._gone.pop((owner, name), None)
        elif note.kind != "gone":
            entry = Program.from_json(note.data) if note.kind == "program" else from_bytes(note.data)
            mine.set(name, entry, bytes_of(entry))
        elif name in mine.bank:
            mine.delete(name)


def check_program(program: Program, name: str, sites: SiteMap, owned: Owned) -> None:
    """Check a program before it is stored, independently of any prompt. Raises for unknown sites, vectors of the wrong
    width, and programs that use themselves. Missing names are allowed, because they may be stored later."""
    for path, op in program.ops:
        try:
            if isinstance(op, Use):
                _check_use(op, name, owned)
            elif isinstance(op, SiteOp):
                _check_op(op, sites, owned)
        except MissingSource:
            continue
        except PatchclampError as error:
            raise error.under(path) from None


def _check_use(op: Use, name: str, owned: Owned) -> None:
    seen, rest = set[str](), [op.name]
    while rest:
        used = rest.pop()
        if used == name:
            raise ProgramError(f"the program {name!r} would use itself", "name")
        if used in seen or used not in owned:
            continue
        seen.add(used)
        entry = owned[used]
        if isinstance(entry, Program):
            rest += [edit.name for edit in entry.edits if isinstance(edit, Use)]
        elif used == op.name:
            raise ProgramError(f"expected a program, got the {kind_of(entry)} {used!r}", "name")


def _check_op(op: SiteOp, sites: SiteMap, owned: Owned) -> None:
    """Check an op by binding it to a one-token prompt, with one position for each row of its value."""
    value = getattr(op, "value", None)
    if isinstance(value, (From, SameRun)) and value.site is not None:
        try:
            sites.resolve(value.site)
        except PatchclampError as error:
            raise error.under("value.site") from None
    if isinstance(value, From):  # the source run may not exist until a request names it
        return
    changes: dict[str, Any] = {"tokens": every}
    if isinstance(value, SameRun):
        changes["value"] = msgspec.structs.replace(value, position=None)
    entry = owned[value.name] if isinstance(value, Named) else value
    rows = entry.shape[0] if isinstance(entry, Vector) and len(entry.shape) == 2 else 1
    alone = Program((msgspec.structs.replace(op, **changes),))
    try:
        bind(alone, "kept", Prompt([0], lambda: ("", [])), rows, sites, owned.source, owned)
    except PatchclampError as error:
        raise type(error)(error.message, (error.path or "").removeprefix("edits[0]").removeprefix(".")) from None


def kind_of(entry: object) -> str:
    """Return the kind of a bank entry; means count as a vector."""
    return "program" if isinstance(entry, Program) else "vector"


def bytes_of(entry: Vector | Means | Program) -> int:
    """Return the size of a bank entry in bytes."""
    if isinstance(entry, Vector):
        return len(entry.data)
    if isinstance(entry, Means):
        return sum(len(row.data) for row in entry.rows.values())
    return len(entry.to_json())


def check_name(name: str, path: str) -> str:
    """Check the name of a run, vector or program, and return it. Raises `ProgramError` if it is invalid."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ProgramError(
            f"expected up to 64 letters, digits, '_', '-' and '.', not starting with '-' or '.', got {name!r}", path
        )
    return name


ENDS_WITHIN_S = 10.0  # wait for a sweep to end after its client disconnected, before the client resumes it


class SweepJournal(Journal):
    """The in-memory journal of a sweep. `reserve` raises if its owner has no room for more bytes.

    users: the number of requests that use it, each from before its sweep is planned until its thread ends
    """

    users: int
    touched_s: float

    def __init__(self, reserve: Callable[[int], None]) -> None:
        super().__init__(None, ENDS_WITHIN_S)
        self._reserve = reserve
        self.nbytes, self.users, self.touched_s = 0, 0, 0.0

    def append(self, records: Sequence[Any]) -> None:
        """Append records within the owner's limit."""
        more = sum(len(msgspec.msgpack.encode(record)) for record in records)
        self._reserve(more)
        super().append(records)
        self.nbytes += more

    def clear(self) -> None:
        """Delete all records."""
        super().clear()
        self.nbytes: int = 0


class SweepJournals:
    """The journals of each owner's sweeps. Use it only on the event loop's thread."""

    def __init__(self, limits: ServeLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._journals: dict[tuple[str, str], SweepJournal] = {}

    def start(self, owner: str, name: str) -> SweepJournal:
        """Return the journal with this name, created if missing; `end` must follow. Raises `CapacityError` if the owner
        has too many, and `ProgramError` for an invalid name."""
        key = owner, check_name(name, "resume")
        self._drop_old()
        if key not in self._journals:
            self._limits.check_room("kept_sweeps", len(self._of(owner)), 1, "resumable sweeps", "resume")
            self._journals[key] = SweepJournal(lambda more: self._reserve(owner, more))
        self._journals[key].users += 1
        return self._journals[key]

    def end(self, owner: str, name: str) -> None:
        """Start the timeout (`run_ttl_s`) of an ended sweep's journal. Drop the journal if it is empty and unused."""
        journal = self._journals[owner, name]
        journal.users -= 1
        journal.touched_s = self._clock()
        if journal.is_empty and not journal.users:
            del self._journals[owner, name]

    def _of(self, owner: str) -> list[SweepJournal]:
        return [journal for (of, _), journal in list(self._journals.items()) if of == owner]

    def _reserve(self, owner: str, more: int) -> None:
        """Raise `TooLarge` if an owner has no room for `more` bytes; called on sweep threads."""
        used = sum(journal.nbytes for journal in self._of(owner))
        self._limits.check("kept_sweep_bytes", used + more, "bytes of resumable sweeps", "resume")

    def _drop_old(self) -> None:
        oldest = self._clock() - self._limits.run_ttl_s
        for key, journal in list(self._journals.items()):
            if not journal.users and journal.touched_s < oldest:
                del self._journals[key]
