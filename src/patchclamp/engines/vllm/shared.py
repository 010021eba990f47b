"""Captured rows on their way to another process of the machine: through a buffer in shared memory, one for a receiver.

Memory that the system must first find and clear passes 1 to 2 GB/s; a buffer that both sides have mapped already passes
as fast as it is copied.  The receiver copies out what it is handed, in parts where it is much, so nothing that a caller
holds depends on the buffer.  Little, and where there is no room for a buffer, travels as safetensors in the answer.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import mmap
import os
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import safetensors.torch
import torch

MAX_INLINE_BYTES = 1 << 20  # bytes that travel in the answer
MAX_BUFFER_BYTES = 1 << 26  # bytes of a buffer
MAX_FREE_BYTES = 1 << 28  # bytes that a receiver keeps to be used again
_HUGE = 1 << 21
_SHARE = 1 << 20  # bytes that a thread copies at once
_PATIENCE = 3  # fetches in a row without sight of the sender's files before they are asked for no more

_copiers = ThreadPoolExecutor(8, thread_name_prefix="patchclamp-share")
_paths: set[str] = set()  # not mapped by a receiver yet


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

    def hand(
        self, positions: np.ndarray, rows: list[torch.Tensor], to: str, mapped: Collection[int] = (), at: int = 0,
        files: bool = True,
    ) -> Any:  # fmt: skip
        """What the receiver `to` makes positions [T] and rows [T, W] of; it has mapped the buffers `mapped`.

        `rows` are contiguous parts, in order; of their bytes those from `at` on, as many as the buffer holds.  `files`:
        it can open ours.
        """
        size = sum(part.nbytes for part in rows)
        if not files:
            self._drop(to)
        buffer = self._buffer(to, mapped, min(size, MAX_BUFFER_BYTES)) if files and size > MAX_INLINE_BYTES else None
        if buffer is None:
            joined = rows[0] if len(rows) == 1 else torch.cat(rows)
            return safetensors.torch.save({"positions": torch.from_numpy(positions), "rows": joined.contiguous()})
        here = min(size - at, len(buffer.memory))
        _copy(_cut([part.view(-1).view(torch.uint8).numpy() for part in rows], at, here), buffer.memory)
        shape = [sum(len(part) for part in rows), rows[0].shape[-1]]
        return {"buffer": buffer.number, "path": buffer.path, "size": len(buffer.memory), "here": here,
                "positions": positions.tobytes(), "shape": shape, "dtype": str(rows[0].dtype)[6:]}  # fmt: skip

    def _buffer(self, to: str, mapped: Collection[int], size: int) -> _Buffer | None:
        """The receiver's buffer, for so many bytes; None where there is no room."""
        found = self._buffers.get(to)
        if found is not None and found.number in mapped:
            _paths.discard(found.path)
            found.path = ""
        known = found is not None and (found.number in mapped or os.path.exists(found.path))
        if found is not None and known and len(found.memory) >= size:
            return found
        for name in [name for name in self._buffers if name == to or not _alive(name)]:
            self._drop(name)
        made = _made(1 << (size - 1).bit_length())
        if made is not None:
            self._buffers[to] = _Buffer(next(self._numbers), *made)
        return self._buffers.get(to)

    def _drop(self, to: str) -> None:
        buffer = self._buffers.pop(to, None)
        if buffer is not None and buffer.path:
            _unlink(buffer.path)


class Receiver:
    """Takes what `Sender`s hand over. `name` tells receivers apart."""

    def __init__(self) -> None:
        self.name = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._buffers: dict[int, tuple[int, np.ndarray]] = {}  # by sender: its buffer's number, and the memory
        self._rooms = _Rooms()
        self._lock = threading.Lock()  # from asking until what lies in the buffer is copied out
        self._unseen = 0  # fetches in a row that did not see the sender's files

    def fetch(self, ask: Callable[[str, list[int], int, bool], Any]) -> tuple[np.ndarray, torch.Tensor]:
        """Positions and rows; `ask(name, mapped, at, files)` is `Sender.hand` there."""
        with self._lock:
            shape: list[int]
            files, at, data, shape = self._unseen < _PATIENCE, 0, np.zeros(0, np.uint8), []
            while True:
                handed = ask(self.name, [number for number, _ in self._buffers.values()], at, files)
                if isinstance(handed, bytes):
                    read = safetensors.torch.load(handed)
                    return read["positions"].numpy(), read["rows"]
                try:
                    memory = self._map(handed)
                except OSError:  # another machine, another view of this one's files, or no file may be opened now
                    self._unseen, files, at = self._unseen + 1, False, 0
                    continue
                self._unseen = 0
                dtype = getattr(torch, handed["dtype"])
                if shape != handed["shape"]:  # the first part, or the run has gone on meanwhile
                    fresh, shape, at = at == 0, handed["shape"], 0
                    data = self._rooms.take(shape[0] * shape[1] * dtype.itemsize)
                    if not fresh:
                        continue
                _copy([memory[: handed["here"]]], data[at:])
                at += handed["here"]
                if at == len(data):
                    rows = torch.from_numpy(data).view(dtype).view(shape)
                    return np.frombuffer(handed["positions"], np.int64), rows

    def _map(self, handed: dict[str, Any]) -> np.ndarray:
        number = handed["buffer"]
        there = self._buffers.get(number >> 16)
        if there is not None and there[0] == number:
            return there[1]
        with open(handed["path"], "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), handed["size"]), np.uint8)
        os.unlink(handed["path"])
        self._buffers[number >> 16] = number, memory
        return memory


def _made(size: int) -> tuple[str, np.ndarray] | None:
    """A new file's path and its memory; all of it is had at once, so that a full device is an error and not a crash."""
    for folder in ("/dev/shm", tempfile.gettempdir()):
        try:
            file, path = tempfile.mkstemp(prefix="patchclamp-", dir=folder)
        except OSError:
            continue
        try:
            os.posix_fallocate(file, 0, size)
            memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        except OSError:  # no room here
            os.unlink(path)
        else:
            _paths.add(path)
            return path, memory
        finally:
            os.close(file)
    return None


class _Rooms:
    """The receiver's own memory, in huge pages if the system has them; what nobody holds any more is used again."""

    def __init__(self) -> None:
        self._free: collections.deque[mmap.mmap] = collections.deque()

    def take(self, size: int) -> np.ndarray:
        """So many bytes."""
        for room in list(self._free):
            if size <= len(room) <= 2 * size:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._free.remove(room)
                    return self._lent(room, size)
        room = mmap.mmap(-1, -(-size // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                room.madvise(mmap.MADV_HUGEPAGE)
        return self._lent(room, size)

    def _lent(self, room: mmap.mmap, size: int) -> np.ndarray:
        data = np.frombuffer(room, np.uint8, size)
        weakref.finalize(data, self._back, room).atexit = False
        return data

    def _back(self, room: mmap.mmap) -> None:
        # called wherever the last reference happens to go: it may wait for no lock
        if sum(map(len, list(self._free))) + len(room) <= MAX_FREE_BYTES:
            self._free.append(room)


def _cut(parts: list[np.ndarray], at: int, size: int) -> list[np.ndarray]:
    """The bytes at … at + size − 1 of several arrays laid side by side."""
    found = []
    for part in parts:
        begin, end = max(at, 0), min(at + size, len(part))
        if begin < end:
            found.append(part[begin:end])
        at -= len(part)
    return found


def _copy(parts: list[np.ndarray], to: np.ndarray) -> None:
    """Copies arrays of bytes side by side, several threads at once."""
    shares, at = [], 0
    for part in parts:
        for i in range(0, len(part), _SHARE):
            share = part[i : i + _SHARE]
            shares.append((to[at : at + len(share)], share))
            at += len(share)
    list(_copiers.map(lambda share: np.copyto(*share), shares))


def _alive(name: str) -> bool:
    try:
        os.kill(int(name.split("-")[0]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _unlink(path: str) -> None:
    _paths.discard(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@atexit.register
def _unlink_all() -> None:
    for path in list(_paths):
        _unlink(path)
