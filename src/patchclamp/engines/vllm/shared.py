"""Captured rows on their way to another process of the machine: through a buffer in shared memory, one for a receiver.

Memory that the system must first find and clear passes 1 to 2 GB/s; a buffer that both sides have mapped already passes
as fast as it is copied.  The receiver copies out what it is handed, in parts where it is much, so nothing that a caller
holds depends on the buffer.  Little, and where there is no room for a buffer, travels as safetensors in the answer.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import numpy as np
import safetensors.torch
import torch

from patchclamp.store import host_memory

MAX_INLINE_BYTES = 1 << 20  # bytes that travel in the answer
MAX_BUFFER_BYTES = 1 << 26  # bytes of a buffer
_PATIENCE = 3  # fetches in a row without sight of the sender's files before they are asked for no more


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
        """An answer for the receiver `to`, which has mapped the buffers `mapped`: positions [T] and rows [T, W].

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
        parts = _cut([part.view(-1).view(torch.uint8).numpy() for part in rows], at, here)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        host_memory.copy_bytes(
            [(buffer.memory[end - len(part) : end], part) for end, part in zip(ends, parts, strict=True)]
        )
        shape = [sum(len(part) for part in rows), rows[0].shape[-1]]
        return {"buffer": buffer.number, "path": buffer.path, "size": len(buffer.memory), "here": here,
                "positions": positions.tobytes(), "shape": shape, "dtype": str(rows[0].dtype)[6:]}  # fmt: skip

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

    def _drop(self, to: str) -> None:
        buffer = self._buffers.pop(to, None)
        if buffer is not None and buffer.path:
            host_memory.delete_shared(buffer.path)


class Receiver:
    """Takes what `Sender`s hand over. `name` tells receivers apart."""

    def __init__(self) -> None:
        self.name = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._buffers: dict[int, tuple[int, np.ndarray]] = {}  # by sender: its buffer's number, and the memory
        self._memory = host_memory.ReusedMemory()
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
                    data = self._memory.take(shape[0] * shape[1] * dtype.itemsize)
                    if not fresh:
                        continue
                host_memory.copy_bytes([(data[at : at + handed["here"]], memory[: handed["here"]])])
                at += handed["here"]
                if at == len(data):
                    rows = torch.from_numpy(data).view(dtype).view(shape)
                    return np.frombuffer(handed["positions"], np.int64), rows

    def _map(self, handed: dict[str, Any]) -> np.ndarray:
        number = handed["buffer"]
        buffer = self._buffers.get(number >> 16)
        if buffer is None or buffer[0] != number:
            buffer = self._buffers[number >> 16] = number, host_memory.map_shared(handed["path"], handed["size"])
        return buffer[1]


def _cut(parts: list[np.ndarray], at: int, size: int) -> list[np.ndarray]:
    """The bytes at … at + size − 1 of several arrays laid side by side."""
    inside = []
    for part in parts:
        begin, end = max(at, 0), min(at + size, len(part))
        if begin < end:
            inside.append(part[begin:end])
        at -= len(part)
    return inside


def _alive(name: str) -> bool:
    try:
        os.kill(int(name.split("-")[0]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
