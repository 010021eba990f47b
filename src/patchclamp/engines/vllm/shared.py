"""Transfer of captured rows to another process on the same machine.

Large rows in memory that other processes can map (`store.host_memory`), such as a GPU's captures, are lent: the
receiver maps the memory and returns views to its caller. The sender keeps lent rows until the last view is freed.

All other rows pass through a shared-memory buffer, one per receiver. New memory, which the system must clear first,
transfers at 1 to 2 GB/s; a buffer that both sides have already mapped transfers at copy speed. A call's rows are
concatenated, and sent in parts if they exceed the buffer. The receiver copies the parts out, so a caller's arrays do
not depend on the buffer. Small rows are sent in the answer, as are all rows if there is no memory for a buffer.
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
from patchclamp.store.host_memory import MemoryLocation

MAX_INLINE_BYTES = 1 << 20  # bytes sent in the answer
MAX_BUFFER_BYTES = 1 << 26  # maximum bytes of a buffer, and so of a part
_PATIENCE = 3  # consecutive fetches that cannot open the sender's files before it stops offering files
_LOAN = "loan:"  # the prefix of loan names, which are released among the names of runs


class _Buffer(msgspec.Struct):
    number: int
    path: str
    memory: np.ndarray


class CaptureSender:
    """Sends rows to receivers in other processes, identified by name."""

    def __init__(self) -> None:
        self._buffers: dict[str, _Buffer] = {}
        # unique across senders: a receiver has several, and identifies each by the upper bits
        self._numbers = itertools.count((int.from_bytes(os.urandom(5), "big") << 16) + 1)
        # by loan: the receiver, and the lent rows by file
        self._lent: dict[str, tuple[str, dict[str, list[np.ndarray]]]] = {}

    def hand(
        self, stored: dict[int, StoredRows], to: str, mapped: Collection[int] = (), at: int = 0, files: bool = True,
        loan: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """Return an answer for the receiver named `to`. `stored`: rows by index; `mapped`: the buffers it has mapped.

        The answer has at most `MAX_BUFFER_BYTES` of the concatenated bytes, starting at offset `at`. `files`: True if
        the receiver can open the sender's files. `loan`: the loan name for large rows; "" to lend none.
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
        """Return the receiver's buffer, with room for `size` bytes; None if there is no memory for one."""
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

    def _lend(self, loan: str, to: str, rows: dict[int, tuple[MemoryLocation, np.ndarray]]) -> None:
        """Keep rows, grouped by file, until a receiver returns them; drop the loans of dead receivers."""
        for other in [other for other, (name, _) in self._lent.items() if not _alive(name)]:
            del self._lent[other]
        files: dict[str, list[np.ndarray]] = {}
        for place, part in rows.values():
            files.setdefault(place.name, []).append(part)
        self._lent[loan] = to, files

    def take_back(self, released: Iterable[str]) -> None:
        """End released loans by name: `LOAN`, or `LOAN/FILE` for the rows in one file."""
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
        """The number of open loans."""
        return len(self._lent)

    def _drop(self, to: str) -> None:
        buffer = self._buffers.pop(to, None)
        if buffer is not None and buffer.path:
            host_memory.delete_shared(buffer.path)


class CaptureReceiver:
    """Receives rows from `CaptureSender`s. `name` identifies the receiver. `release` is called with the names of loans
    without remaining views, on any thread that runs the garbage collector; pass the names to the senders' `take_back`.

    has_views: True once large rows have arrived as views
    """

    name: str

    def __init__(self, release: Callable[[list[str]], None]) -> None:
        self.name, self._release = f"{os.getpid()}-{uuid.uuid4().hex}", release
        self.has_views: bool = False
        self._mapped: dict[str, tuple[MemoryLocation, mmap.mmap]] = {}  # open memory, by name
        self._buffers: dict[int, tuple[int, np.ndarray]] = {}  # by sender: its buffer's number, and the memory
        self._memory = host_memory.ReusedMemory()
        self._lock = threading.Lock()  # held from the request until the buffers are copied out
        self._unseen = 0  # consecutive fetches that could not open the senders' files

    def fetch(self, ask: Callable[[str, list[int], int, bool, str], list[Any]]) -> list[dict[int, Captured]]:
        """Fetch positions and rows by index from each sender; `ask(name, mapped, at, files, loan)` calls their `hand`.

        Loans are returned if an error is raised.
        """
        loans: list[str] = []
        try:
            return self._fetch(ask, loans)
        except BaseException:
            self._release(loans)
            raise

    def _fetch(self, ask: Callable[[str, list[int], int, bool, str], list[Any]], loans: list[str]) -> list[Any]:
        """Fetch rows, as `fetch` does, and append each loan's name to `loans` before requesting it."""
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
                except OSError:  # another machine, another mount namespace, or no more open files allowed
                    self._release([loans[-1]])
                    self._unseen, files, at = self._unseen + 1, False, 0
                    continue
                self._unseen = 0 if files else self._unseen
                described = [(answer["positions"], answer["rows"], answer.get("lent")) for answer in answers]
                if at == 0 or described != before:  # the first part, or a run has captured more meanwhile
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
        """Return the bytes in an answer, or in its sender's buffer."""
        if "data" in answer:
            return np.frombuffer(answer["data"], np.uint8)
        return self._map(answer)[: answer["here"]]

    def _borrow(self, answer: dict[str, Any], loan: str) -> dict[int, np.ndarray]:
        """Map lent rows; return each item's bytes, from its first row on, by index. The loan of a file ends when all
        its views are freed."""
        if "lent" not in answer:
            return {}
        places = {number: MemoryLocation(*place) for number, *place in answer["lent"]}
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
        """Unmap memory that its owner has closed. Existing views stay valid."""
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
    """Describe rows without their bytes: for each item its index, index into `positions`, width and dtype."""
    arrays = {id(rows.positions): rows.positions for rows in stored.values()}  # the rows of a run often share one
    which = {key: i for i, key in enumerate(arrays)}
    rows = [[number, which[id(rows.positions)], rows.width, str(rows.dtype)[6:]] for number, rows in stored.items()]
    return {"positions": [array.tobytes() for array in arrays.values()], "rows": rows}


def without_bytes(answer: dict[str, Any]) -> dict[int, StoredRows]:
    """Decode a `described` answer to rows by index. The rows have no bytes."""
    positions = [np.frombuffer(array, np.int64) for array in answer["positions"]]
    return {
        number: StoredRows(positions[which], [], getattr(torch, dtype), width)
        for number, which, width, dtype in answer["rows"]
    }


def _read(answer: dict[str, Any], memory: np.ndarray, lent: dict[int, np.ndarray]) -> dict[int, Captured]:
    """Return positions and rows by index, as views of lent memory or of `memory`, the copy of all other rows."""
    stored = without_bytes(answer)
    copied = [number for number in stored if number not in lent]
    begins, _ = side_by_side([stored[number] for number in copied])
    data = lent | {number: memory[begin:] for number, begin in zip(copied, begins, strict=True)}
    return {number: (rows.positions, rows.tensor(data[number][: rows.nbytes])) for number, rows in stored.items()}


def _lendable(rows: StoredRows) -> MemoryLocation | None:
    """Return the location of rows that a receiver can map; None for other rows."""
    return host_memory.place_of(rows.parts[0]) if rows.is_view(MIN_VIEW_BYTES) else None


def _part(rows: StoredRows, at: int, memory: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (target, source) pairs that copy the rows' bytes to offset `at` of `memory`, clipped to its size."""
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
