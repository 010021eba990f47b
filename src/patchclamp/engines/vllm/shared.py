"""Captured rows on their way to another process of the machine: through shared memory that is used again.

Memory that the system must first find and clear passes 1 to 2 GB/s; memory that both sides have mapped already passes
as fast as it is copied.  So a sender writes into segments, files that the receiver maps and unlinks; when the receiver
no longer holds what lay in one, it says so, and the sender writes there again.  Small ones, and where there is no room,
travel as safetensors in the answer itself.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import mmap
import os
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import safetensors.torch
import torch

SMALL = 1 << 20  # bytes that travel in the answer
MOST_FREE = 1 << 30  # bytes kept for a receiver to be used again
_ROUND = 1 << 20  # segments are multiples of it
_SHARE = 1 << 21  # bytes that a thread copies at once
_FORGOTTEN_S = 300.0  # a segment that was handed over and not mapped by then is deleted

_copiers = ThreadPoolExecutor(8, thread_name_prefix="patchclamp-share")
_paths: set[str] = set()  # not mapped by a receiver yet


class _Segment(msgspec.Struct):
    number: int
    path: str  # "" once the receiver has mapped it
    memory: np.ndarray
    handed: float = 0.0


class _Known(msgspec.Struct):
    """What a sender knows of a receiver: its segments in use and those free, oldest first, and what to tell it."""

    used: dict[int, _Segment] = {}
    free: list[_Segment] = []
    gone: list[int] = []


class Sender:
    """Hands rows to receivers in other processes, by their names."""

    def __init__(self) -> None:
        self._known: collections.defaultdict[str, _Known] = collections.defaultdict(_Known)
        self._numbers = itertools.count(1)

    def hand(
        self, positions: np.ndarray, rows: list[torch.Tensor], joined: Callable[[], torch.Tensor], to: str,
        back: Iterable[int] = (), files: bool = True,
    ) -> Any:  # fmt: skip
        """What `Receiver.take` makes positions [T] and rows [T, W] of.

        `rows` are contiguous parts, in order; `joined()` is all of them in one. `back`: segments that the receiver `to`
        holds no more; `files`: it can open ours.
        """
        self._tidy(to)
        known, size = self._known[to], sum(part.nbytes for part in rows)
        for number in back:
            if number in known.used:
                known.free.append(known.used.pop(number))
        self._bound(known, MOST_FREE if files else 0)
        segment = self._segment(known, size) if files and size > SMALL else None
        if segment is None:
            return safetensors.torch.save({"positions": torch.from_numpy(positions), "rows": joined().contiguous()})
        _copy(segment.memory, rows)
        shape = [sum(len(part) for part in rows), rows[0].shape[-1]]
        handed = {"segment": segment.number, "path": segment.path, "size": len(segment.memory), "gone": known.gone,
                  "positions": positions.tobytes(), "shape": shape, "dtype": str(rows[0].dtype)[6:]}  # fmt: skip
        segment.handed, known.gone = time.monotonic(), []
        return handed

    def _segment(self, known: _Known, size: int) -> _Segment | None:
        """A segment for so many bytes, the smallest free one or a new one; None where there is no room."""
        fit = [segment for segment in known.free if size <= len(segment.memory) <= 4 * size + _ROUND]
        if fit:
            found = min(fit, key=lambda segment: len(segment.memory))
            known.free = [segment for segment in known.free if segment is not found]
            found.path = ""
        else:
            made = _made(-(-size // _ROUND) * _ROUND)
            if made is None:
                return None
            found = _Segment(next(self._numbers), *made)
        known.used[found.number] = found
        return found

    def _bound(self, known: _Known, most: int) -> None:
        while sum(len(segment.memory) for segment in known.free) > most:
            known.gone.append(known.free.pop(0).number)

    def _tidy(self, present: str) -> None:
        """Lets go of what is for receivers that are no more, and of what nobody has mapped."""
        for name in [name for name in self._known if name != present and not _alive(name)]:
            for segment in self._known.pop(name).used.values():
                _unlink(segment.path)
        for known in self._known.values():
            for segment in list(known.used.values()):
                if segment.path and not os.path.exists(segment.path):
                    _paths.discard(segment.path)
                    segment.path = ""
                elif segment.path and time.monotonic() - segment.handed > _FORGOTTEN_S:
                    _unlink(segment.path)
                    del known.used[segment.number]


class Receiver:
    """Takes what a `Sender` hands over. `name` tells receivers apart."""

    def __init__(self) -> None:
        self.name = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._mapped: dict[int, mmap.mmap] = {}
        self._free: collections.deque[int] = collections.deque()

    def back(self) -> list[int]:
        """Segments that nobody here holds any more, each told once."""
        found: list[int] = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._free.popleft())
        return found

    def take(self, handed: Any) -> tuple[np.ndarray, torch.Tensor]:
        """Positions and rows that were handed over; the rows are the caller's own as long as it holds them.

        Raises `FileNotFoundError` if the sender's files are not to be seen from here.
        """
        if isinstance(handed, bytes):
            read = safetensors.torch.load(handed)
            return read["positions"].numpy(), read["rows"]
        number = handed["segment"]
        for gone in handed["gone"]:
            self._mapped.pop(gone, None)
        if number not in self._mapped:
            try:
                with open(handed["path"], "r+b") as file:
                    self._mapped[number] = mmap.mmap(file.fileno(), handed["size"])
            except FileNotFoundError:
                self._free.append(number)
                raise
            os.unlink(handed["path"])
        shape, dtype = handed["shape"], getattr(torch, handed["dtype"])
        data = np.frombuffer(self._mapped[number], np.uint8, shape[0] * shape[1] * dtype.itemsize)
        weakref.finalize(data, self._free.append, number).atexit = False
        return np.frombuffer(handed["positions"], np.int64), torch.from_numpy(data).view(dtype).view(shape)


def _made(size: int) -> tuple[str, np.ndarray] | None:
    """A new file's path and its memory; all of it is had at once, so that a full device is an error and not a crash."""
    for folder in ("/dev/shm", tempfile.gettempdir()):
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            continue
        file, path = tempfile.mkstemp(prefix="patchclamp-", dir=folder)
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


def _copy(memory: np.ndarray, rows: list[torch.Tensor]) -> None:
    shares, at = [], 0
    for part in rows:
        data = part.view(-1).view(torch.uint8).numpy()
        shares += [(memory[at + i : at + i + len(data[i : i + _SHARE])], data[i : i + _SHARE])
                   for i in range(0, len(data), _SHARE)]  # fmt: skip
        at += len(data)
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
    if path and os.path.exists(path):
        os.unlink(path)


@atexit.register
def _unlink_all() -> None:
    for path in list(_paths):
        _unlink(path)
