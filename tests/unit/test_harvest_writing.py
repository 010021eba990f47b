"""How a harvest is written: in parts of a good size, brought to the disk and sealed while others are computed."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from patchclamp.errors import CapacityError, ProgramError, RunError
from patchclamp.lm import LM
from patchclamp.store import journal
from patchclamp.store.journal import Journal
from patchclamp.studies.harvest import harvest, plan, study, writer
from patchclamp.studies.harvest.plan import MOST_ROWS, parts_for
from patchclamp.studies.harvest.writer import ReadRows, ShardFile, header, open_rows, write_sealed
from patchclamp.testing import FakeEngine
from tests.reference.harvest import bytes_of

GIB = 1 << 30


@pytest.fixture(scope="module")
def lm():
    with LM("", FakeEngine()) as lm:
        yield lm


@pytest.fixture(scope="module")
def documents():
    draw = np.random.default_rng(3)
    return [draw.integers(2, 60, draw.integers(1, 30)).tolist() for _ in range(60)]


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(journal, "SYNCHRONOUS", "OFF")


def listed_in(folder):
    """The prompts of a ledger, in the order in which they were listed."""
    (ledger,) = folder.rglob("ledger")
    with contextlib.closing(Journal(ledger).open(f"{ledger.parent.parent.name}, part 0")) as opened:
        return [prompt for prompts in opened.take(list[int]) for prompt in prompts]


def make(lm, documents, folder, **asked):
    return harvest(lm, documents, folder, **{"sites": ["resid_post[1]", "z[0, 1]"], "dtype": "float32",
                                             "batch_tokens": 40, "show_progress": False} | asked)  # fmt: skip


@pytest.mark.parametrize(("rows", "row_bytes", "machines", "parts"), [
    (1, 2, 1, 1), (GIB >> 13, 1 << 11, 1, 1),  # below the least
    (GIB >> 12, 1 << 13, 1, 8), (GIB >> 11, 1 << 14, 1, 8),  # 2 and 8 GiB
    (1 << 27, 1 << 13, 1, 512), (1 << 27, 1 << 13, 3, 513),  # 1 TiB: parts of 2 GiB, and as many for each machine
    (MOST_ROWS, 1 << 11, 1, 1), (MOST_ROWS, 1 << 11, 4, 4),  # more rows than readers interleave
])  # fmt: skip
def test_parts_are_small_enough_for_the_page_cache_and_as_many_for_each_machine(rows, row_bytes, machines, parts):
    assert parts_for(rows, row_bytes, machines) == parts


def test_a_large_data_set_has_several_parts_by_itself(lm, documents, tmp_path, monkeypatch):
    whole = make(lm, documents, tmp_path).open()
    monkeypatch.setattr(plan, "LEAST_PART_BYTES", 1)
    data = make(lm, documents, tmp_path).open()
    assert (whole.manifest.recipe.parts, data.manifest.recipe.parts) == (1, plan.PARTS)

    def by_place(data):
        index, rows = data.index().to_pydict(), np.concatenate(list(data.blocks(64, "resid_post[1]")))
        places = list(zip(index["document"], index["position"], strict=True))
        return dict(zip(places, map(bytes, rows), strict=True))

    assert by_place(data) == by_place(whole)
    assert len(by_place(data)) == sum(map(len, documents))
    assert make(lm, documents, tmp_path, sums=True).rows == len(documents)


def test_documents_are_listed_after_a_while_however_few_they_are(lm, documents, tmp_path, monkeypatch):
    """A slow engine loses no more by a stop than it computed in that time."""
    added = []
    append = Journal.append
    monkeypatch.setattr(Journal, "append", lambda ledger, new: added.extend(map(len, new)) or append(ledger, new))
    make(lm, documents, tmp_path / "once")
    assert added == [len(documents)]
    monkeypatch.setattr(writer, "CHECKPOINT_S", 0.0)
    make(lm, documents, tmp_path / "often")
    assert len(added) > 3
    assert sum(added[1:]) == len(documents)


def test_others_write_while_files_are_brought_to_the_disk(lm, documents, tmp_path, monkeypatch):
    """The first checkpoint ends when another batch has been written after it began."""
    syncing, written, waited = threading.Event(), threading.Event(), []
    write, sync = writer.OpenPart.write, ShardFile.sync

    def noted(part, *args):
        full = write(part, *args)
        if syncing.is_set():
            written.set()
        return full

    def slow(file):
        syncing.set()
        waited.append(written.wait(60))
        sync(file)

    monkeypatch.setattr(writer.OpenPart, "write", noted)
    monkeypatch.setattr(ShardFile, "sync", slow)
    monkeypatch.setattr(writer, "BEHIND", 10**9)
    assert make(lm, documents, tmp_path, checkpoint_bytes=1).complete
    assert all(waited)


def test_a_checkpoint_that_fails_beside_the_writing_is_raised_and_lists_nothing(lm, documents, tmp_path, monkeypatch):
    whole = make(lm, documents, tmp_path / "whole")
    sync = ShardFile.sync

    def broken(file):
        raise OSError("the disk is gone")

    monkeypatch.setattr(ShardFile, "sync", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        make(lm, documents, tmp_path / "broken", checkpoint_bytes=1)
    assert listed_in(tmp_path / "broken") == []
    monkeypatch.setattr(ShardFile, "sync", sync)
    again = make(lm, documents, tmp_path / "broken")
    assert again.ran == whole.ran
    assert bytes_of(Path(again.folder)) == bytes_of(Path(whole.folder))


@pytest.mark.parametrize("most", [1, writer.OPEN_PARTS])
def test_files_of_few_parts_are_open(lm, documents, tmp_path, monkeypatch, most):
    """A disk that is slow at sealing holds writers back."""
    now, seen, lock = set(), [], threading.Lock()
    open_, close = writer.OpenPart.open, writer.OpenPart._close_files

    def opened(part, pools):
        open_(part, pools)
        with lock:
            now.add(part.part.number)
            seen.append(len(now))

    def closed(part):
        time.sleep(0.02)
        with lock:
            now.discard(part.part.number)
        close(part)

    monkeypatch.setattr(writer.OpenPart, "open", opened)
    monkeypatch.setattr(writer.OpenPart, "_close_files", closed)
    monkeypatch.setattr(writer, "allow_files", lambda files, times, beside: most)
    made = make(lm, documents, tmp_path, parts=12)
    assert made.complete
    assert max(seen) == 1 if most == 1 else 1 < max(seen) <= most
    assert len(made.open()) == sum(map(len, documents))


@pytest.mark.parametrize("most", [1, writer.OPEN_PARTS])
@pytest.mark.parametrize("where", ["write", "seal", "sync", "open", "sealed"])
def test_nobody_waits_for_a_part_that_failed(lm, documents, tmp_path, monkeypatch, most, where):
    whole = make(lm, documents, tmp_path / "whole", parts=12)
    monkeypatch.setattr(writer, "allow_files", lambda files, times, beside: most)
    calls = itertools.count()
    owner, name = {
        "write": (writer.OpenPart, "_pieces"),
        "seal": (writer, "seal"),
        "sync": (ShardFile, "sync"),
        "open": (writer, "sync"),
        "sealed": (writer.OpenPart, "_sealed"),
    }[where]
    inner = getattr(owner, name)

    def broken(*args):
        if next(calls) == (3 if where != "sealed" else 15):
            raise OSError("the disk is gone")
        return inner(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        with pytest.raises(OSError, match="the disk is gone"):
            make(lm, documents, tmp_path / "broken", parts=12)
    again = make(lm, documents, tmp_path / "broken", parts=12)
    assert bytes_of(Path(again.folder)) == bytes_of(Path(whole.folder))


class Waits:
    """A part that is told that the harvest has been stopped, once another one has failed."""

    def write(self, batch, pools):
        assert pools.stopped.wait(30)
        raise RunError("the harvest has been stopped")


class Fails:
    def seal(self, pools):
        raise OSError("the disk is gone")


@pytest.mark.parametrize("how", ["finish", "put"])
def test_what_is_raised_is_what_failed_first(how):
    its = writer.Writer(1, 1)
    its.put(Waits(), None)
    its.seal(Fails())
    told = its._under_way[0].exception(30)
    assert "stopped" in str(told)
    with pytest.raises(OSError, match="the disk is gone"):
        its.finish() if how == "finish" else its.put(Waits(), None)
    its.stop()


def test_after_a_failed_sync_nothing_more_is_listed(lm, documents, tmp_path, monkeypatch):
    """The system tells of pages that it lost once: the next sync of the same file succeeds."""
    calls, listed, sync, append = itertools.count(), [], ShardFile.sync, Journal.append

    def once(file):
        if next(calls) == 0:
            raise OSError("a page is lost")
        sync(file)

    monkeypatch.setattr(ShardFile, "sync", once)
    monkeypatch.setattr(Journal, "append", lambda ledger, new: listed.extend(new) or append(ledger, new))
    with pytest.raises(OSError, match="a page is lost"):
        make(lm, documents, tmp_path, checkpoint_bytes=1)
    assert listed == []


def test_what_a_ledger_lists_of_files_that_are_gone_is_run_again(lm, documents, tmp_path, monkeypatch):
    whole = make(lm, documents, tmp_path / "whole")
    calls, append = itertools.count(), Journal.append

    def stopping(ledger, new):
        append(ledger, new)
        if next(calls) == 4:
            raise OSError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", stopping)
        with pytest.raises(OSError, match="stopped"):
            make(lm, documents, tmp_path / "lost", checkpoint_bytes=1)
    assert len(listed_in(tmp_path / "lost")) > 4
    next((tmp_path / "lost").rglob("*/resid_post.1.safetensors")).unlink()
    again = make(lm, documents, tmp_path / "lost")
    assert again.ran == whole.ran
    assert bytes_of(Path(again.folder)) == bytes_of(Path(whole.folder))


def test_a_row_too_few_is_an_error(lm, documents, tmp_path, monkeypatch):
    reduced = study._Job._reduced
    monkeypatch.setattr(study._Job, "_reduced", lambda *args: reduced(*args)[:1])
    with pytest.raises(RunError, match=r"resid_post\[1\] should have \[\d+, \d+\] rows of a prompt, and has \[1, "):
        make(lm, documents, tmp_path)


def test_a_part_whose_shards_are_all_sealed_is_not_made_again(lm, documents, tmp_path):
    """It was stopped while its folder was removed."""
    made = make(lm, documents, tmp_path)
    (Path(made.folder) / "part-0000.open").mkdir()
    again = make(lm, documents, tmp_path)
    assert (again.ran, again.complete) == (0, True)
    assert not (Path(made.folder) / "part-0000.open").exists()


def test_files_are_allowed_as_often_as_the_system_does(monkeypatch):
    resource, limits = pytest.importorskip("resource"), []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (300, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    assert [writer.allow_files(count, 4) for count in (10, 100, 300, 744)] == [4, 4, 2, 1]
    assert limits == [(656, 1000), (856, 1000), (1000, 1000)]
    assert writer.allow_files(100, 4, 500) == 2
    assert limits.pop() == (956, 1000)
    with pytest.raises(CapacityError, match=r"745 files are open at a time, and this process may have 1000 open"):
        writer.allow_files(745, 4)


def test_many_parts_are_read_within_the_files_that_may_be_open(lm, documents, tmp_path):
    """In a process that may have few: rows of 60 parts at two sites."""
    made = make(lm, documents, tmp_path, parts=60)
    code = (
        "import resource, sys; from patchclamp.studies.harvest import Harvested\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, int(sys.argv[2])))\n"
        "data = Harvested(sys.argv[1])\n"
        "print(sum(len(piece['z[0, 1]']) for piece in data.order.read(data.columns(data.sites))))"
    )
    for hard, told in (("4096", str(len(made.open()))), ("300", "raise that limit (ulimit -Hn)")):
        ended = subprocess.run([sys.executable, "-c", code, made.folder, hard], capture_output=True, text=True)
        assert told in ended.stdout + ended.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_that_are_read_are_those_that_are_mapped(tmp_path, dtype):
    path, draw = tmp_path / "rows.safetensors", np.random.default_rng(0)
    file = ShardFile(path, header("z[1]", dtype, 37, 5, {}), dtype, 37, 5)
    file.rows[draw.permutation(37)] = draw.integers(0, 200, (37, 5))
    file.close()
    _, _, mapped = open_rows(path)
    read = ReadRows(path)
    assert (read.dtype, read.shape) == (dtype, mapped.shape)
    for part in (slice(0, 10), slice(10, 37), slice(30, 99), slice(3, 3), slice(None)):
        np.testing.assert_array_equal(read[part], mapped[part])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ProgramError, match="ends before its rows do"):
        read[30:]
    read.close()


def test_what_a_killed_process_left_of_the_same_file_goes(tmp_path, monkeypatch):
    path = tmp_path / "statistics.json"
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: 1 / 0)
        patch.setattr("os.getpid", lambda: 1)
        for content in (b"same", b"other"):
            with pytest.raises(ZeroDivisionError):
                write_sealed(path, content)
    write_sealed(path, b"same")
    assert path.read_bytes() == b"same"
    (left,) = tmp_path.glob("*.new")
    assert left.read_bytes() == b"other"
