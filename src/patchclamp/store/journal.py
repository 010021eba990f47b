"""Journals: append-only records from which an interrupted computation resumes.

A journal is an SQLite file. Table `made` holds the computation's key. Table `record` holds the records in order, each
in MessagePack with its CRC-32. The write-ahead log (`NAME-wal`) exists while the file is open, and after a crash.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from patchclamp.errors import CapacityError, NameTaken, PatchclampError, ProgramError

APPLICATION, FORMAT = 0x70636A6C, 2  # "pcjl"; format 1 was not an SQLite file
SYNCHRONOUS = "FULL"  # commits survive a power loss; "NORMAL" could lose the most recent ones
BUSY_S = 0.2  # timeout if two processes open a file at the same moment
UNWRITABLE = {  # includes file systems without locks
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}  # fmt: skip

Record = TypeVar("Record")


class Journal:
    """Records of one computation, in a file or in memory, for one writer at a time.

    path: the file; None keeps the records in memory
    wait_s: the timeout of `open` while another thread has this object open
    """

    def __init__(self, path: str | Path | None, wait_s: float = 0.0) -> None:
        self._path = None if path is None else Path(path).absolute()
        self._name = "the journal" if path is None else str(path)
        self._wait_s = wait_s
        self._opened, self._writing = threading.Lock(), threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._known: Iterator[bytes] = iter(())
        self._count = 0

    def open(self, made_by: str) -> Self:
        """Open or create the journal of the computation with key `made_by`.

        Raises `NameTaken` while another writer has it open; `ProgramError` if it belongs to another computation, is
        damaged, is not a journal, or cannot be written.
        """
        if not self._opened.acquire(timeout=self._wait_s):
            raise self._taken()
        try:
            with self._errors():
                records = self._read(made_by)
        except BaseException:
            self.close()
            raise
        self._known, self._count = iter(records), len(records)
        return self

    def take(self, kind: type[Record], count: int | None = None) -> list[Record]:
        """Return the next `count` (None: all) unread records among those that existed at `open`. Raises `ProgramError`
        for records of a different kind."""
        try:
            return [msgspec.msgpack.decode(body, type=kind) for body in itertools.islice(self._known, count)]
        except msgspec.MsgspecError as error:
            raise self._no_journal(str(error)) from None

    def append(self, records: Sequence[Any]) -> None:
        """Append records in one transaction, and block until it is on disk."""
        bodies = list(map(msgspec.msgpack.encode, records))
        with self._writing, self._transaction() as database:
            rows = ((number, body, zlib.crc32(body)) for number, body in enumerate(bodies, self._count + 1))
            database.executemany("INSERT INTO record VALUES (?, ?, ?)", rows)
            self._count += len(bodies)

    def clear(self) -> None:
        """Delete all records."""
        with self._writing, self._transaction() as database:
            database.execute("DELETE FROM record")
        self._known, self._count = iter(()), 0

    @property
    def is_open(self) -> bool:
        return self._opened.locked()

    @property
    def is_empty(self) -> bool:
        return not self._count

    def close(self) -> None:
        """Merge the log into the file and release the lock."""
        if self._path is not None and self._database is not None:
            self._database.close()
            self._database = None
        if self.is_open:
            self._opened.release()

    def _read(self, made_by: str) -> list[bytes]:
        """Lock the file, check its key, and return its records."""
        if self._database is None:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            # several threads use the connection, one at a time
            self._database = sqlite3.connect(
                self._path or ":memory:", timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
        database = self._database
        database.execute("PRAGMA locking_mode=EXCLUSIVE")  # until closed, so the log needs no shared memory
        database.execute(f"PRAGMA synchronous={SYNCHRONOUS}")
        with database:
            database.execute("BEGIN EXCLUSIVE")
            self._check(database, made_by)
            records = self._records(database)
        database.execute("PRAGMA journal_mode=WAL")
        return records

    def _check(self, database: sqlite3.Connection, made_by: str) -> None:
        """Create the tables of a new file. Raises `ProgramError` unless the file is a journal with this key."""
        found = database.execute("SELECT * FROM pragma_application_id, pragma_user_version").fetchone()
        if found == (0, 0) and not database.execute("SELECT * FROM sqlite_master").fetchall():
            database.execute(f"PRAGMA application_id={APPLICATION}")
            database.execute(f"PRAGMA user_version={FORMAT}")
            database.execute("CREATE TABLE made (by TEXT NOT NULL)")
            database.execute("INSERT INTO made VALUES (?)", (made_by,))
            database.execute("CREATE TABLE record (number INTEGER PRIMARY KEY, body BLOB, crc INTEGER)")
        elif found != (APPLICATION, FORMAT):
            raise self._no_journal("a different SQLite file or version")
        if database.execute("SELECT by FROM made").fetchall() != [(made_by,)]:
            raise ProgramError(
                f"{self._name} belongs to a different study, model, engine, version, prompt or option: choose "
                "another file or delete it"
            )

    def _records(self, database: sqlite3.Connection) -> list[bytes]:
        """Return all records. Raises `ProgramError` for a damaged or truncated file."""
        [found] = database.execute("PRAGMA quick_check(1)").fetchone()  # page structure only; pages have no checksums
        records: list[bytes] = []
        for number, body, crc in database.execute("SELECT number, body, crc FROM record ORDER BY number"):
            if (number, crc) != (len(records) + 1, zlib.crc32(body)):
                found = f"record {len(records) + 1} is damaged"
                break
            records.append(body)
        if found != "ok":
            raise self._no_journal(found)
        database.execute("DELETE FROM record WHERE number < 0")  # deletes nothing; fails if read-only
        return records

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        assert self._database is not None
        with self._errors(), self._database as database:
            database.execute("BEGIN")
            yield database

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert SQLite and OS errors to this package's errors."""
        try:
            yield
        except OSError as error:
            raise ProgramError(f"{self._name} cannot be written: {error.strerror}") from None
        except (sqlite3.Error, UnicodeDecodeError, TypeError) as error:  # the last two for a value of the wrong type
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # the primary code
            if code == sqlite3.SQLITE_BUSY:
                raise self._taken() from None
            if code == sqlite3.SQLITE_FULL:
                raise CapacityError(f"{self._name} cannot be written: {error}") from None
            if code in UNWRITABLE:
                raise ProgramError(f"{self._name} cannot be written: {error}") from None
            raise self._no_journal(str(error)) from None

    def _taken(self) -> PatchclampError:
        return NameTaken(f"{self._name} is in use by another study: wait until it ends, or stop it")

    def _no_journal(self, found: str) -> PatchclampError:
        return ProgramError(
            f"expected a compatible journal, got {self._name} ({found}): choose another file or delete it"
        )
