"""Captured rows on their way to another process of the machine.

Large rows that lie in open memory (`store.host_memory`), as a GPU's captures do, are lent: the receiver maps that
memory, and what it gives to a caller are views.  The sender keeps what it has lent until no view is left.

All other rows pass through a buffer in shared memory, one for a receiver.  Memory that the system must first find and
clear passes 1 to 2 GB/s; a buffer that both sides have mapped already passes as fast as it is copied.  The rows of one
call lie side by side, and pass in parts where they are more than a buffer holds.  The receiver copies the parts out, so
nothing that a caller holds depends on the buffer.  Little travels in the answer, and so does everything where there is
no room for a buffer.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec
import numpy as np
import torch

from patchclamp.engines.base import Captured
from patchclamp.store import host_memory
from patchclamp.store.captures import MIN_VIEW_BYTES, StoredRows, side_by_side
from patchclamp.store.host_memory import Place

MAX_INLINE_BYTES = 1 << 20  # bytes that travel in the answer
MAX_BUFFER_BYTES = 1 << 26  # bytes of a buffer, and of a part
_PATIENCE = 3  # fetches in a row without sight of the sender's files before they are asked for no more
_LOAN = "loan:"  # begins the name of what was lent, among the names of runs that are released


class _Buffer(msgspec.Struct):
    number: int
    path: str
    memory: np.ndarray


class Sender:
    """Hands rows to receivers in other processes, by their names."""

    def __init__(self) -> None:
        self._buffers: dict[str, _Buffer] = {}
        # no two senders' numbers are alike: a receiver hears from several, and knows by the upper bits from which
        self._numbers = itertools.count((int.from_bytes(os.urandom(5), "big") << 16) + 1)
        # by loan: the receiver, and by file the rows there that must stay for it
        self._lent: dict[str, tuple[str, dict[str, list[np.ndarray]]]] = {}

    def hand(
        self, stored: dict[int, StoredRows], to: str, mapped: Collection[int] = (), at: int = 0, files: bool = True,
        loan: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """An answer for the receiver `to`, which has mapped the buffers `mapped`: rows by their numbers there.

        Of the bytes, side by side, those from `at` on, at most `MAX_BUFFER_BYTES`. `files`: it can open ours. `loan`:
        the name under which large rows are lent; without one nothing is.
        """
        lends = files and loan
        places = {n: place for n, rows in stored.items() if lends and (place := _lendable(rows)) is not None}
        rows = [each for number, each in stored.items() if number not in places]
        begins, size = side_by_side(rows)
        if not files:
            self._drop(to)
        buffer = self._buffer(to, mapped, min(size, MAX_BUFFER_BYTES)) if files and size > MAX_INLINE_BYTES else None
        here = max(0, min(size - at, MAX_BUFFER_BYTES))
        memory = np.empty(here, np.uint8) if buffer is None else buffer.memory
        host_memory.copy_bytes(
            [pair for each, begin in zip(rows, begins, strict=True) for pair in _part(each, begin - at, memory[:here])]
        )
        answer = {"size": size, **described(stored)}
        if places:
            if at == 0:
                self._lend(loan, to, {number: (place, stored[number].parts[0]) for number, place in places.items()})
            answer["lent"] = [(number, *place) for number, place in places.items()]
        if buffer is None:
            return answer | {"data": memory.tobytes()}
        return answer | {"buffer": buffer.number, "path": buffer.path, "buffer_bytes": len(buffer.memory), "here": here}

    def _buffer(self, to: str, mapped: Collection[int], size: int) -> _Buffer | None:
        """The receiver's buffer, for so many bytes; None where there is no room."""
        buffer = self._buffers.get(to)
        if buffer is not None and buffer.number in mapped:
            host_memory.forget_shared(buffer.path)
            buffer.path = ""
        usable = buffer is not None and (buffer.number in mapped or os.path.exists(buffer.path))
        if buffer is not None and usable and len(buffer.memory) >= size:
            return buffer
        for name in [name for name in self._buffers if name == to or not _alive(name)]:
            self._drop(name)
        shared = host_memory.make_shared(1 << (size - 1).bit_length())
        if shared is not None:
            self._buffers[to] = _Buffer(next(self._numbers), *shared)
        return self._buffers.get(to)

    def _lend(self, loan: str, to: str, rows: dict[int, tuple[Place, np.ndarray]]) -> None:
        """Keeps rows for a receiver until they are returned, file by file; those of receivers that died go."""
        for other in [other for other, (name, _) in self._lent.items() if not _alive(name)]:
            del self._lent[other]
        files: dict[str, list[np.ndarray]] = {}
        for place, part in rows.values():
            files.setdefault(place.name, []).append(part)
        self._lent[loan] = to, files

    def take_back(self, released: Iterable[str]) -> None:
        """Forgets what was lent among names that were released: `LOAN`, or `LOAN/FILE` for what lies in one file."""
        for name in released:
            loan, _, file = name.partition("/")
            if not name.startswith(_LOAN) or loan not in self._lent:
                continue
            files = self._lent[loan][1]
            files.pop(file, None)
            if not file or not files:
                del self._lent[loan]

    @property
    def loans(self) -> int:
        """How many loans receivers hold."""
        return len(self._lent)

    def _drop(self, to: str) -> None:
        buffer = self._buffers.pop(to, None)
        if buffer is not None and buffer.path:
            host_memory.delete_shared(buffer.path)


class Receiver:
    """Takes what `Sender`s hand over. `name` tells receivers apart. `release` gets the names of loans of which no view
    is left, wherever the garbage collector runs; they go to the senders' `take_back`.

    has_views: whether large rows have come as views
    """

    def __init__(self, release: Callable[[list[str]], None]) -> None:
        self.name, self._release = f"{os.getpid()}-{uuid.uuid4().hex}", release
        self.has_views = False
        self._mapped: dict[str, tuple[Place, mmap.mmap]] = {}  # open memory, by its name
        self._buffers: dict[int, tuple[int, np.ndarray]] = {}  # by sender: its buffer's number, and the memory
        self._memory = host_memory.ReusedMemory()
        self._lock = threading.Lock()  # from asking until what lies in the buffers is copied out
        self._unseen = 0  # fetches in a row that did not see the senders' files

    def fetch(self, ask: Callable[[str, list[int], int, bool, str], list[Any]]) -> list[dict[int, Captured]]:
        """Positions and rows by number, of each sender; `ask(name, mapped, at, files, loan)` is `Sender.hand` at each.

        What was lent is returned whatever is raised.
        """
        loans: list[str] = []
        try:
            return self._fetch(ask, loans)
        except BaseException:
            self._release(loans)
            raise

    def _fetch(self, ask: Callable[[str, list[int], int, bool, str], list[Any]], loans: list[str]) -> list[Any]:
        """As `fetch`; every loan that is asked for is named in `loans` first."""
        with self._lock:
            files, at = self._unseen < _PATIENCE, 0
            before: list[Any] = []
            memories: list[np.ndarray] = []
            lent: list[dict[int, np.ndarray]] = []
            while True:
                if at == 0:
                    loans.append(_LOAN + uuid.uuid4().hex)
                answers = ask(self.name, [number for number, _ in self._buffers.values()], at, files, loans[-1])
                try:
                    parts = [self._part(answer) for answer in answers]
                    if at == 0:
                        lent = [self._borrow(answer, loans[-1]) for answer in answers]
                except OSError:  # another machine, another view of this one's files, or no file may be opened now
                    self._release([loans[-1]])
                    self._unseen, files, at = self._unseen + 1, False, 0
                    continue
                self._unseen = 0 if files else self._unseen
                described = [(answer["positions"], answer["rows"], answer.get("lent")) for answer in answers]
                if at == 0 or described != before:  # the first part, or a run has gone on meanwhile
                    before, memories = described, [self._memory.take(answer["size"]) for answer in answers]
                    if at:
                        at = 0
                        continue
                host_memory.copy_bytes(
                    [(memory[at : at + len(part)], part) for memory, part in zip(memories, parts, strict=True)]
                )
                at += MAX_BUFFER_BYTES
                if all(at >= answer["size"] for answer in answers):
                    return [_read(*parts) for parts in zip(answers, memories, lent, strict=True)]

    def _part(self, answer: dict[str, Any]) -> np.ndarray:
        """The bytes that an answer brings, or shows in its sender's buffer."""
        if "data" in answer:
            return np.frombuffer(answer["data"], np.uint8)
        return self._map(answer)[: answer["here"]]

    def _borrow(self, answer: dict[str, Any], loan: str) -> dict[int, np.ndarray]:
        """The open memory of every row that was lent, from the row's first byte on. Once no view is left of what lies
        in a file, that is returned."""
        if "lent" not in answer:
            return {}
        places = {number: Place(*place) for number, *place in answer["lent"]}
        roots: dict[str, np.ndarray] = {}
        for place in places.values():
            if place.name not in roots:
                if place.name not in self._mapped:
                    self._forget_closed()
                    self._mapped[place.name] = place, host_memory.map_place(place)
                roots[place.name] = np.frombuffer(self._mapped[place.name][1], np.uint8)
                returned = weakref.finalize(roots[place.name], self._release, [f"{loan}/{place.name}"])
                returned.atexit = False
        self.has_views = True
        return {number: roots[place.name][place.offset :] for number, place in places.items()}

    def _forget_closed(self) -> None:
        """Lets go of mapped memory that its owner has given up. Views of it stay."""
        for name in [name for name, (place, _) in self._mapped.items() if not host_memory.is_open(place)]:
            del self._mapped[name]

    def _map(self, answer: dict[str, Any]) -> np.ndarray:
        number = answer["buffer"]
        buffer = self._buffers.get(number >> 16)
        if buffer is None or buffer[0] != number:
            memory = host_memory.map_shared(answer["path"], answer["buffer_bytes"])
            buffer = self._buffers[number >> 16] = number, memory
        return buffer[1]


def described(stored: dict[int, StoredRows]) -> dict[str, Any]:
    """The rows without their bytes: each one's number, which of `positions` it has, its width and its dtype."""
    arrays = {id(rows.positions): rows.positions for rows in stored.values()}  # the rows of a run often share one
    which = {key: i for i, key in enumerate(arrays)}
    rows = [[number, which[id(rows.positions)], rows.width, str(rows.dtype)[6:]] for number, rows in stored.items()]
    return {"positions": [array.tobytes() for array in arrays.values()], "rows": rows}


def without_bytes(answer: dict[str, Any]) -> dict[int, StoredRows]:
    """What `described` has described, by number."""
    positions = [np.frombuffer(array, np.int64) for array in answer["positions"]]
    return {
        number: StoredRows(positions[which], [], getattr(torch, dtype), width)
        for number, which, width, dtype in answer["rows"]
    }


def _read(answer: dict[str, Any], memory: np.ndarray, lent: dict[int, np.ndarray]) -> dict[int, Captured]:
    """Positions and rows by number: views of what was lent, and of the memory that all others were copied to."""
    stored = without_bytes(answer)
    copied = [number for number in stored if number not in lent]
    begins, _ = side_by_side([stored[number] for number in copied])
    data = lent | {number: memory[begin:] for number, begin in zip(copied, begins, strict=True)}
    return {number: (rows.positions, rows.tensor(data[number][: rows.nbytes])) for number, rows in stored.items()}


def _lendable(rows: StoredRows) -> Place | None:
    """Where rows lie that a receiver can map."""
    return host_memory.place_of(rows.parts[0]) if rows.is_view(MIN_VIEW_BYTES) else None


def _part(rows: StoredRows, at: int, memory: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The copies that put the bytes of rows at `at` … of memory; bytes outside it are left out."""
    if at >= 0 and at + rows.nbytes <= len(memory):
        return rows.copies(memory[at:])
    copies = []
    for part in rows.parts:
        begin, end = max(at, 0), min(at + part.size, len(memory))
        if begin < end:
            copies.append((memory[begin:end], part.reshape(-1)[begin - at : end - at]))
        at += part.size
    return copies


def _alive(name: str) -> bool:
    try:
        os.kill(int(name.split("-")[0]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
