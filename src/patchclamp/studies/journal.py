"""The journal of a study: values are appended as they are computed, so that an interrupted study goes on from there.

One file. Its first line is JSON: `{"patchclamp": "journal", "format": 1, "made_by": HASH}`, where the hash is of all
that decides the values. Frames follow: how many values (uint32), the values (float64 each), and the CRC-32 of both
(uint32), little-endian. A frame is what one batch of runs gave, and it is on the disk before the next is written. An
end that is torn (a process was killed while it wrote) is cut off when the file is opened, so a study that goes on
computes the same batches and ends with the same bytes as one that was never interrupted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from patchclamp.errors import NameTaken, ProgramError

FORMAT = 1
_COUNT, _SUM = struct.Struct("<I"), struct.Struct("<I")


def hash_of(question: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of what decides the values of a study: plain data."""
    return hashlib.sha256(json_of(question).encode()).hexdigest()


def json_of(question: Mapping[str, Any]) -> str:
    """Plain data as JSON, the same text for the same data."""
    return msgspec.json.encode(question, order="deterministic").decode()


class Journal:
    """The values of one study in a file; `taken` of those that were there before are handed out, in order."""

    def __init__(self, path: str | Path, made_by: str) -> None:
        self._path = Path(path)
        self._file = _opened(self._path)
        try:
            self._lock()
            self._known = self._read(made_by)
        except BaseException:
            os.close(self._file)
            raise
        self._taken = 0

    def take(self, count: int) -> np.ndarray:
        """The next values that were there before, `count` at most."""
        values = self._known[self._taken : self._taken + count]
        self._taken += len(values)
        return values

    def append(self, values: Sequence[float] | np.ndarray) -> None:
        """Writes a frame, and returns when it is on the disk."""
        body = _COUNT.pack(len(values)) + np.asarray(values, "<f8").tobytes()
        self._write(body + _SUM.pack(zlib.crc32(body)))

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)

    def _lock(self) -> None:
        """Refuses a file that another process writes to; where the system has no such locks, nothing does."""
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ProgramError(f"{self._path} is being written by another study", "resume") from None

    def _read(self, made_by: str) -> np.ndarray:
        """What the file has of this study, without a torn end; begins a file that has nothing."""
        data = self._path.read_bytes()
        head, line_end, frames = data.partition(b"\n")
        if not line_end and _heading(made_by).startswith(data):  # killed while the first line was written
            os.ftruncate(self._file, 0)
            self._write(_heading(made_by))
            return np.zeros(0)
        _check(head, made_by, self._path)
        values = list(_frames(frames))
        whole = len(head) + 1 + sum(_COUNT.size + 8 * len(part) + _SUM.size for part in values)
        os.ftruncate(self._file, whole)
        return np.concatenate([np.zeros(0), *values])


class MemoryJournal:
    """As `Journal`, in the memory of this process: of a server, which writes no files for its callers.

    wait_s: how long a study that is ending is waited for
    """

    def __init__(self, wait_s: float = 0.0) -> None:
        self._lock, self._wait_s = threading.Lock(), wait_s
        self._made_by = ""
        self._values: list[float] = []
        self._known = self._taken = 0

    def opened(self, made_by: str) -> MemoryJournal:
        """This journal, for one study at a time.

        Raises: `ProgramError` if it has another study's values, `NameTaken` while a study writes to it.
        """
        if not self._lock.acquire(timeout=self._wait_s):
            raise NameTaken("it is being written by another study: wait until that has ended", "resume")
        if self._made_by not in ("", made_by):
            self._lock.release()
            raise ProgramError("it was made by another study: give another name", "resume")
        self._made_by, self._known, self._taken = made_by, len(self._values), 0
        return self

    @property
    def is_open(self) -> bool:
        return self._lock.locked()

    @property
    def is_empty(self) -> bool:
        return not self._values

    def take(self, count: int) -> np.ndarray:
        values = self._values[self._taken : min(self._taken + count, self._known)]
        self._taken += len(values)
        return np.array(values)

    def append(self, values: Sequence[float] | np.ndarray) -> None:
        self._values += [float(value) for value in values]

    def close(self) -> None:
        self._lock.release()


Resumable = str | Path | MemoryJournal
"""What a study's values are kept in: a file, or a journal in memory."""


def open_journal(resume: Resumable, made_by: str) -> Journal | MemoryJournal:
    """The journal of a study. Raises `ProgramError` if it is another study's."""
    return resume.opened(made_by) if isinstance(resume, MemoryJournal) else Journal(resume, made_by)


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        raise ProgramError(f"{path} cannot be written: {error.strerror}", "resume") from None


def _heading(made_by: str) -> bytes:
    return json.dumps({"patchclamp": "journal", "format": FORMAT, "made_by": made_by}).encode() + b"\n"


def _check(head: bytes, made_by: str, path: Path) -> None:
    """Raises `ProgramError` unless the first line is that of this study's journal."""
    try:
        found = json.loads(head)
        ours = found["patchclamp"] == "journal" and found["format"] == FORMAT
    except (ValueError, TypeError, KeyError):
        ours, found = False, {}
    if not ours:
        raise ProgramError(f"{path} is no journal of a study that this version can read", "resume")
    if found.get("made_by") != made_by:
        raise ProgramError(
            f"{path} was made by another study: another model, engine, version, prompt or option. Give another file, "
            "or delete this one",
            "resume",
        )


def _frames(data: bytes) -> Iterator[np.ndarray]:
    """The values of every frame up to the first that is not whole."""
    at = 0
    while at + _COUNT.size <= len(data):
        end = at + _COUNT.size + 8 * _COUNT.unpack_from(data, at)[0]
        if end + _SUM.size > len(data) or _SUM.unpack_from(data, end)[0] != zlib.crc32(data[at:end]):
            return
        yield np.frombuffer(data[at + _COUNT.size : end], "<f8")
        at = end + _SUM.size
