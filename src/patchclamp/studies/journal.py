"""The journal of a study: what it computes is appended as it comes, so that an interrupted study goes on from there.

One file. Its first line is JSON: `{"patchclamp": "journal", "format": 1, "made_by": HASH}`, where the hash is of all
that decides the values. Frames follow: a number of words (uint32), the words (8 bytes each), and the CRC-32 of both
(uint32), little-endian. A frame is what one batch of runs gave, and it is on the disk before the next is written. Words
are values (float64). A study that has more to keep of a run than a number writes records in their place: the length of
one (uint64), and its msgpack, filled up with zeros. An end that is torn (a process was killed while it wrote) is cut
off when the file is opened, so a study that goes on ends with the same words as one that was never interrupted. How
many of them a frame has depends on the speed of the runs (`batches.Pace`).
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
from typing import Any, TypeVar

import msgspec
import numpy as np

from patchclamp.errors import NameTaken, ProgramError
from patchclamp.language.values import as_plain

JOURNAL_FORMAT = 1
_COUNT, _SUM, _WORD = struct.Struct("<I"), struct.Struct("<I"), 8

Record = TypeVar("Record")


def hash_of(question: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of what decides the values of a study: plain data."""
    return hashlib.sha256(json_of(question).encode()).hexdigest()


def json_of(question: Mapping[str, Any]) -> str:
    """Plain data as JSON, the same text for the same data. Numbers of NumPy are as good as Python's."""
    return msgspec.json.encode(question, enc_hook=_plain, order="deterministic").decode()


def _plain(value: Any) -> Any:
    if (plain := as_plain(value)) is value:
        raise NotImplementedError(f"{type(value).__name__} is not plain data")
    return plain


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """An array as a record has it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Stored:
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Journal:
    """What one study computed, in a file. What was there before is taken first, in order; what is new is appended."""

    def __init__(self, path: str | Path, made_by: str) -> None:
        self._path = Path(path)
        self._file = _opened(self._path)
        try:
            self._lock()
            self._known = self._read(made_by)
        except BaseException:
            os.close(self._file)
            raise
        self._taken = 0  # bytes

    def take(self, count: int) -> np.ndarray:
        """The next values that were there before, `count` at most."""
        words = self._known[self._taken : self._taken + _WORD * count]
        self._taken += len(words)
        return np.frombuffer(words, "<f8")

    def append(self, values: Sequence[float] | np.ndarray) -> None:
        """Keeps a frame of values, and returns when that is safe."""
        self._keep(np.asarray(values, "<f8").tobytes())

    def take_records(self, count: int, kind: type[Record]) -> list[Record]:
        """The next records that were there before, `count` at most."""
        records: list[Record] = []
        while len(records) < count and self._taken < len(self._known):
            begin = self._taken + _WORD
            end = begin + int.from_bytes(self._known[self._taken : begin], "little")
            records.append(msgspec.msgpack.decode(self._known[begin:end], type=kind))
            self._taken = begin + _whole_words(end - begin)
        return records

    def append_records(self, records: Sequence[Any]) -> None:
        """Keeps a frame of records, and returns when that is safe."""
        words = bytearray()
        for record in map(msgspec.msgpack.encode, records):
            words += len(record).to_bytes(_WORD, "little") + record.ljust(_whole_words(len(record)), b"\0")
        self._keep(bytes(words))

    def close(self) -> None:
        os.close(self._file)

    def _keep(self, words: bytes) -> None:
        body = _COUNT.pack(len(words) // _WORD) + words
        self._write(body + _SUM.pack(zlib.crc32(body)))

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

    def _read(self, made_by: str) -> bytes:
        """What the file has of this study, without a torn end; begins a file that has nothing."""
        data = self._path.read_bytes()
        head, line_end, frames = data.partition(b"\n")
        if not line_end and _heading(made_by).startswith(data):  # killed while the first line was written
            os.ftruncate(self._file, 0)
            self._write(_heading(made_by))
            return b""
        _check(head, made_by, self._path)
        words = list(_frames(frames))
        whole = len(head) + 1 + sum(_COUNT.size + len(part) + _SUM.size for part in words)
        os.ftruncate(self._file, whole)
        return b"".join(words)


class MemoryJournal(Journal):
    """A journal in the memory of this process: of a server, which writes no files for its callers.

    wait_s: how long a study that is ending is waited for
    """

    def __init__(self, wait_s: float = 0.0) -> None:
        self._mutex, self._wait_s = threading.Lock(), wait_s
        self._made_by = ""
        self._words = bytearray()

    def opened(self, made_by: str) -> MemoryJournal:
        """This journal, for one study at a time.

        Raises: `ProgramError` if it has another study's values, `NameTaken` while a study writes to it.
        """
        if not self._mutex.acquire(timeout=self._wait_s):
            raise NameTaken("it is being written by another study: wait until that has ended", "resume")
        if self._made_by not in ("", made_by):
            self._mutex.release()
            raise ProgramError("it was made by another study: give another name", "resume")
        self._made_by, self._known, self._taken = made_by, bytes(self._words), 0
        return self

    @property
    def is_open(self) -> bool:
        return self._mutex.locked()

    @property
    def is_empty(self) -> bool:
        return not self._words

    def close(self) -> None:
        self._mutex.release()

    def _keep(self, words: bytes) -> None:
        self._words += words


Resumable = str | Path | MemoryJournal
"""What a study's values are kept in: a file, or a journal in memory."""


def open_journal(resume: Resumable, made_by: str) -> Journal:
    """The journal of a study. Raises `ProgramError` if it is another study's."""
    return resume.opened(made_by) if isinstance(resume, MemoryJournal) else Journal(resume, made_by)


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        raise ProgramError(f"{path} cannot be written: {error.strerror}", "resume") from None


def _heading(made_by: str) -> bytes:
    return json.dumps({"patchclamp": "journal", "format": JOURNAL_FORMAT, "made_by": made_by}).encode() + b"\n"


def _check(head: bytes, made_by: str, path: Path) -> None:
    """Raises `ProgramError` unless the first line is that of this study's journal."""
    try:
        found = json.loads(head)
        ours = found["patchclamp"] == "journal" and found["format"] == JOURNAL_FORMAT
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


def _frames(data: bytes) -> Iterator[bytes]:
    """The words of every frame up to the first that is not whole."""
    at = 0
    while at + _COUNT.size <= len(data):
        end = at + _COUNT.size + _WORD * _COUNT.unpack_from(data, at)[0]
        if end + _SUM.size > len(data) or _SUM.unpack_from(data, end)[0] != zlib.crc32(data[at:end]):
            return
        yield data[at + _COUNT.size : end]
        at = end + _SUM.size


def _whole_words(size: int) -> int:
    """So many bytes filled up to whole words."""
    return -(-size // _WORD) * _WORD
