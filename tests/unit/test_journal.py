"""A journal has what was appended, in order, whatever stopped its writer and whatever happened to its file."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import patchclamp as pc
from patchclamp.errors import CapacityError, NameTaken, ProgramError
from patchclamp.store import journal as store
from patchclamp.store.journal import Journal

MADE = "made"
BATCHES = [[1.0], [2.0, 3.0], [4.0], [5.0, 6.0, 7.0]]
WHOLE = [value for batch in BATCHES for value in batch]
PREFIXES = [WHOLE[:count] for count in (0, 1, 3, 4, 7)]
OLD = b'{"patchclamp": "journal", "format": 1, "made_by": "made"}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "j"


def written(path: Path, batches: list[list[float]] = BATCHES) -> Journal:
    """An open journal with these batches."""
    journal = Journal(path).open(MADE)
    for batch in batches:
        journal.append(batch)
    return journal


def known(path: Path, made_by: str = MADE) -> list[float]:
    """The records of a journal that is not open."""
    with contextlib.closing(Journal(path).open(made_by)) as journal:
        return journal.take(float)


def files(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


# -- order


@pytest.mark.parametrize("in_memory", [False, True])
def test_records_come_back_in_order_and_new_ones_follow(path, in_memory):
    kept = Journal(None if in_memory else path)
    first = kept.open(MADE)
    assert (first.take(float, 5), first.is_empty, first.is_open) == ([], True, True)
    first.append([1.0, np.nan])
    first.append([-0.0])
    first.append([])
    first.close()
    again = kept.open(MADE)
    assert not again.is_empty
    assert np.array(again.take(float, 2)).tobytes() == np.array([1.0, np.nan]).tobytes()
    assert np.array(again.take(float, 9)).tobytes() == np.array([-0.0]).tobytes()
    assert again.take(float, 1) == []
    again.append([2.0])
    again.close()
    assert kept.open(MADE).take(float)[2:] == [-0.0, 2.0]
    kept.close()
    kept.close()
    assert not kept.is_open


class Made(msgspec.Struct):
    text: str
    rows: list[bytes]


def test_records_are_of_any_kind(path):
    records = [Made("a", [b"", b"\0" * 5000]), Made("ö", [])]
    journal = Journal(path).open(MADE)
    journal.append(records)
    journal.close()
    journal = Journal(path).open(MADE)
    assert journal.take(Made, 9) == records
    journal.close()


def test_a_journal_that_is_cleared_has_nothing(path):
    journal = written(path)
    journal.clear()
    assert journal.is_empty
    journal.append([8.0])
    journal.close()
    assert known(path) == [8.0]


def test_records_of_one_transaction_are_there_together_or_not_at_all(path):
    journal = written(path)
    with pytest.raises(TypeError):
        journal.append([9.0, object()])
    journal._database.execute(
        "CREATE TRIGGER t AFTER INSERT ON record WHEN new.number = 9 BEGIN SELECT RAISE(ABORT, 'x'); END"
    )
    with pytest.raises(ProgramError):
        journal.append([8.0, 9.0])
    journal._database.execute("DROP TRIGGER t")
    journal.append([8.0])
    journal.close()
    assert known(path) == [*WHOLE, 8.0]


def test_threads_take_turns(path):
    journal = Journal(path).open(MADE)
    batches = [[float(i), i + 0.5] for i in range(40)]
    threads = [threading.Thread(target=journal.append, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    read = known(path)
    assert sorted(zip(read[::2], read[1::2], strict=True)) == [tuple(batch) for batch in batches]


def test_a_closed_journal_is_one_file(path):
    journal = written(path)
    assert files(path) == ["j", "j-wal"]
    journal.close()
    assert files(path) == ["j"]
    assert known(path) == WHOLE
    assert files(path) == ["j"]


# -- one writer


def test_two_writers_do_not_have_one_file(path):
    def refused(where: Path) -> None:
        with pytest.raises(NameTaken, match="in use") as raised:
            Journal(where).open(MADE)
        assert raised.value.status == 409
        code = f"from patchclamp.store.journal import Journal; Journal({str(where)!r}).open({MADE!r})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert "NameTaken" in done.stderr

    journal = Journal(path).open(MADE)
    refused(path)
    journal.append([1.0])
    refused(path)
    journal.close()
    journal = Journal(path).open(MADE)  # that has a log from its first transaction on
    refused(path)
    journal.append([2.0])
    journal.close()
    assert known(path) == [1.0, 2.0]


def test_two_writers_do_not_have_one_journal_in_memory():
    kept = Journal(None).open(MADE)
    with pytest.raises(NameTaken):
        kept.open(MADE)
    kept.append([1.0])
    waiting = Journal(None, wait_s=30).open(MADE)
    threading.Timer(0.1, waiting.close).start()
    waiting.open(MADE)
    kept.close()
    with pytest.raises(ProgramError, match="different study"):
        kept.open("other")
    assert kept.open(MADE).take(float) == [1.0]


# -- kills


WRITING = """
import itertools, sys
from patchclamp.store.journal import Journal
journal = Journal(sys.argv[1]).open("made")
first = len(journal.take(float))
for number in itertools.count(first, 3):
    journal.append([float(number), float(number + 1), float(number + 2)])
    print(number + 3, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_was_appended(path):
    """Ten times, each going on from what the one before left."""
    draw, before = random.Random(0), 0
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", WRITING, str(path)], stdout=subprocess.PIPE, text=True)
        first = process.stdout.readline()
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        told = [first, *process.stdout]
        assert process.wait() == -signal.SIGKILL
        appended = int([line for line in told if line.endswith("\n")][-1])
        read = known(path)
        assert read == [float(number) for number in range(len(read))]
        assert len(read) in (appended, appended + 3)  # killed before it could print
        assert appended > before
        before = len(read)


def killed_at(path: Path, statement: int) -> tuple[int, int]:
    """Writes `BATCHES` in a process that is killed at that SQL statement. Returns its exit code, and how many batches
    it had appended by then."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        left, connect = statement, sqlite3.connect

        def count(sql: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        def watched(*args: Any, **named: Any) -> sqlite3.Connection:
            database = connect(*args, **named)
            database.set_trace_callback(count)
            return database

        sqlite3.connect = watched
        journal = Journal(path).open(MADE)
        for batch in BATCHES[PREFIXES.index(journal.take(float)) :]:
            journal.append(batch)
            os.write(tell, b".")
        os._exit(0)
    os.close(tell)
    with open(told, "rb") as pipe:
        appended = len(pipe.read())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), appended


@pytest.mark.slow
def test_a_writer_that_is_killed_at_any_statement_is_resumed(tmp_path, monkeypatch):
    """While the file is made too, and in the middle of transactions."""
    monkeypatch.setattr(store, "SYNCHRONOUS", "OFF")  # a kill loses nothing that the system has
    for statement in range(1000):
        path = tmp_path / str(statement)
        code, appended = killed_at(path, statement)
        assert known(path) == PREFIXES[appended]
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed_at(path, 1000)
        assert known(path) == WHOLE
    assert statement > 25


def test_a_torn_log_loses_its_last_transactions_alone(path, tmp_path):
    journal, log = Journal(path).open(MADE), Path(f"{path}-wal")
    sizes, copy = [0], tmp_path / "copy"
    for batch in BATCHES:
        journal.append(batch)
        sizes.append(log.stat().st_size)
    for length in {*range(0, sizes[-1], 509), *sizes, *(size - 1 for size in sizes[1:])}:
        shutil.copy(path, copy)
        Path(f"{copy}-wal").write_bytes(log.read_bytes()[:length])
        left = sum(size <= length for size in sizes[1:])
        torn = Journal(copy).open(MADE)
        assert torn.take(float) == PREFIXES[left]
        for batch in BATCHES[left:]:
            torn.append(batch)
        torn.close()
        assert known(copy) == WHOLE
    journal.close()


def test_a_kill_while_the_log_is_taken_into_the_file_loses_nothing(path, tmp_path):
    """With the first bytes of the new file and the rest of the old one, or the other way round."""
    journal, log, copy = written(path), Path(f"{path}-wal"), tmp_path / "copy"
    before, kept = path.read_bytes(), log.read_bytes()
    journal.close()
    after = path.read_bytes()
    old = before.ljust(len(after), b"\0")
    assert old != after
    for cut in range(0, len(after) + 1, 512):
        for data in (after[:cut] + old[cut:], old[:cut] + after[cut:]):
            copy.write_bytes(data)
            Path(f"{copy}-wal").write_bytes(kept)
            assert known(copy) == WHOLE


def test_every_commit_is_on_the_disk(path):
    """A system that stops loses no transaction: SQLite's FULL."""
    journal = Journal(path).open(MADE)
    assert journal._database.execute("PRAGMA synchronous").fetchone() == (2,)
    assert journal._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    journal.close()


# -- damaged files, and others


def test_bytes_that_changed_are_not_believed(path, tmp_path, monkeypatch):
    """Wherever they are in the file, it is refused, or has what was written, and so it is after more was appended."""
    monkeypatch.setattr(store, "SYNCHRONOUS", "OFF")
    written(path).close()
    data, copy, read = path.read_bytes(), tmp_path / "copy", 0
    used = [at for at, byte in enumerate(data) if byte]
    assert len(used) > 200
    for at in used:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        copy.write_bytes(changed)
        for expected in (WHOLE, [*WHOLE, 8.0]):
            try:
                assert known(copy) == expected, at
            except ProgramError:
                break
            read += 1
            with contextlib.closing(Journal(copy).open(MADE)) as journal:
                journal.append([8.0])
    assert read < len(used) / 4


@pytest.mark.parametrize("change", ["crc = crc + 1", "body = x'00'", "body = 1", "body = NULL", "number = 33"])
def test_a_record_that_changed_is_named(path, change):
    written(path).close()
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE record SET {change} WHERE number = 3")
    database.close()
    data = path.read_bytes()
    with pytest.raises(ProgramError, match=r"compatible journal.* got .*/j"):
        known(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("count", [1, 4, 2000])
def test_a_file_that_is_cut_off_is_refused_and_kept(path, count, monkeypatch):
    monkeypatch.setattr(store, "SYNCHRONOUS", "OFF")
    written(path, [[float(i) for i in range(count)]]).close()
    data = path.read_bytes()
    for length in range(2, len(data), 333):  # one byte is an empty file to SQLite
        path.write_bytes(data[:length])
        with pytest.raises(ProgramError, match=r"compatible journal.* got .*/j"):
            known(path)
        assert path.read_bytes() == data[:length]
    path.write_bytes(b"")  # it was made, and nothing was written
    assert known(path) == []


def test_other_files_are_refused_and_kept(path):
    path.parent.mkdir()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE notes (text)")
    database.close()
    notes = path.read_bytes()
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE notes")
        database.execute(f"PRAGMA application_id={store.APPLICATION}")
        database.execute("PRAGMA user_version=99")
    database.close()
    newer = path.read_bytes()
    for data in (notes, newer, b"notes of mine", b"\x00" * 400, b"\x00" * 9000, OLD, OLD + bytes(range(256)) * 40):
        path.write_bytes(data)
        with pytest.raises(ProgramError, match=r"compatible journal.* got .*/j"):
            known(path)
        assert path.read_bytes() == data
        assert files(path) == ["j"]


def test_another_computations_file_is_refused_and_kept(path):
    written(path).close()
    data = path.read_bytes()
    with pytest.raises(ProgramError, match="/j belongs to a different study"):
        known(path, "other")
    assert path.read_bytes() == data
    assert known(path) == WHOLE


@pytest.mark.parametrize("name", ["", "file/j"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProgramError, match=f"{tmp_path / name} cannot be written"):
        Journal(tmp_path / name).open(MADE)


def test_a_file_that_can_only_be_read_is_refused_at_once(path):
    written(path).close()
    data = bytearray(path.read_bytes())
    data[18] = 3  # as a later SQLite marks a file that this one must not write
    path.write_bytes(data)
    with pytest.raises(ProgramError, match="/j cannot be written"):
        known(path)
    assert path.read_bytes() == data


def test_a_full_disk_is_told_and_loses_nothing(path):
    journal = written(path)
    journal._database.execute("PRAGMA max_page_count=3")
    with pytest.raises(CapacityError, match="/j cannot be written"):
        journal.append([bytes(100_000)])
    journal.append([8.0])
    journal.close()
    assert known(path) == [*WHOLE, 8.0]


def test_records_of_another_kind_are_refused(path):
    """As of a journal with the same key that another program wrote."""
    with contextlib.closing(written(path)):
        pass
    with contextlib.closing(Journal(path).open(MADE)) as journal, pytest.raises(ProgramError, match="journal"):
        journal.take(list[str])


@pytest.mark.parametrize("code", [sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_PROTOCOL])
def test_a_file_system_without_locks_is_named_as_the_cause(path, code):
    error = sqlite3.OperationalError("locking protocol")
    error.sqlite_errorcode = code
    with pytest.raises(ProgramError, match="cannot be written"), Journal(path)._errors():
        raise error


def test_a_studys_error_names_the_argument(path):
    asked = dict(clean="The Eiffel is in the", corrupt="The Colosseum is in the", answer=7, foil=9, show_progress=False)
    path.parent.mkdir()
    path.write_bytes(OLD)
    with pc.LM("fake") as lm, pytest.raises(ProgramError, match="compatible journal") as raised:
        pc.studies.patch_sweep(lm, **asked, resume=path)
    assert raised.value.path == "resume"


def test_several_threads_append_to_one_journal(path):
    journal, every = Journal(path).open(MADE), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda value: journal.append([float(value)]), range(200)))
    finally:
        sys.setswitchinterval(every)
    journal.close()
    assert sorted(known(path)) == list(range(200))
