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
from safetensors import safe_open

from patchclamp.errors import CapacityError, ProgramError, RunError
from patchclamp.store.journal import Journal
from patchclamp.store.system import write_whole
from patchclamp.store.tensors import to_dtype, write_header
from patchclamp.studies.harvest import _HarvestJob, harvest, recipe, shards
from patchclamp.studies.harvest.recipe import MOST_ROWS, parts_for
from patchclamp.studies.harvest.shards import PartWriter, RowsFile, allow_files, create_rows
from tests.reference.harvest import bytes_of, no_disk  # noqa: F401

GIB = 1 << 30


@pytest.fixture(scope="module")
def documents():
    draw = np.random.default_rng(3)
    return [draw.integers(2, 60, draw.integers(1, 30)).tolist() for _ in range(60)]


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
    monkeypatch.setattr(recipe, "LEAST_PART_BYTES", 1)
    data = make(lm, documents, tmp_path).open()
    assert (whole.manifest.recipe.parts, data.manifest.recipe.parts) == (1, recipe.PARTS)

    def by_place(data):
        index, rows = data.index().to_pydict(), np.concatenate(list(data.blocks("resid_post[1]", 64)))
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
    monkeypatch.setattr(shards, "CHECKPOINT_S", 1e9)
    make(lm, documents, tmp_path / "once")
    assert added == [len(documents)]
    monkeypatch.setattr(shards, "CHECKPOINT_S", 0.0)
    make(lm, documents, tmp_path / "often")
    assert len(added) > 3
    assert sum(added[1:]) == len(documents)


def broken(*_):
    raise OSError("the disk is gone")


def fails_at(inner, call: int):
    """The same function, which fails at one call."""
    calls = itertools.count()
    return lambda *args: broken() if next(calls) == call else inner(*args)


def syncs_rows(instead):
    """`shards.sync`, with another function for files of rows."""
    sync = shards.sync
    return lambda path: instead(path) if path.suffix == ".safetensors" else sync(path)


def test_others_write_while_files_are_brought_to_the_disk(lm, documents, tmp_path, monkeypatch):
    """The first checkpoint ends when another batch has been written after it began."""
    syncing, written, waited = threading.Event(), threading.Event(), []
    write = PartWriter.write

    def noted(part, batch):
        write(part, batch)
        if syncing.is_set():
            written.set()

    def slow(path):
        syncing.set()
        waited.append(written.wait(60))

    monkeypatch.setattr(PartWriter, "write", noted)
    monkeypatch.setattr(shards, "sync", syncs_rows(slow))
    monkeypatch.setattr(shards, "CHECKPOINT_S", 0.0)
    assert make(lm, documents, tmp_path).complete
    assert waited
    assert all(waited)


def test_a_checkpoint_that_fails_beside_the_writing_is_raised_and_lists_nothing(lm, documents, tmp_path, monkeypatch):
    whole = make(lm, documents, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(shards, "sync", syncs_rows(broken))
        with pytest.raises(OSError, match="the disk is gone"):
            make(lm, documents, tmp_path / "broken", checkpoint_bytes=1)
    assert listed_in(tmp_path / "broken") == []
    again = make(lm, documents, tmp_path / "broken")
    assert again.ran == whole.ran
    assert bytes_of(Path(again.folder)) == bytes_of(Path(whole.folder))


def test_files_of_few_parts_are_open(lm, documents, tmp_path, monkeypatch):
    """A disk that is slow at sealing holds writers back."""
    now, seen, lock = set(), [], threading.Lock()
    open_, seal = PartWriter.open, PartWriter.seal

    def opened(part):
        open_(part)
        with lock:
            now.add(part.part.number)
            seen.append(len(now))

    def sealed(part, pool):
        time.sleep(0.02)
        seal(part, pool)
        with lock:
            now.discard(part.part.number)

    monkeypatch.setattr(PartWriter, "open", opened)
    monkeypatch.setattr(PartWriter, "seal", sealed)
    made = make(lm, documents, tmp_path, parts=12)
    assert made.complete
    assert 1 < max(seen) <= shards.OPEN_PARTS
    assert len(made.open()) == sum(map(len, documents))


@pytest.fixture(scope="module")
def whole(lm, documents, tmp_path_factory):
    return bytes_of(Path(make(lm, documents, tmp_path_factory.mktemp("whole"), parts=12).folder))


@pytest.mark.parametrize(("owner", "name", "call"), [
    (PartWriter, "write", 3), (shards, "create_rows", 3), (shards, "sync", 3), (shards, "index_of", 3),
    (shards, "statistics_of", 3), (PartWriter, "checkpoint", 0), (shards, "write_whole", 15),
])  # fmt: skip
def test_an_error_in_any_thread_is_raised_and_the_harvest_resumes(
    lm, documents, whole, tmp_path, monkeypatch, owner, name, call
):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_at(getattr(owner, name), call))
        with pytest.raises(OSError, match="the disk is gone"):
            make(lm, documents, tmp_path / "broken", parts=12)
    again = make(lm, documents, tmp_path / "broken", parts=12)
    assert bytes_of(Path(again.folder)) == whole


def test_after_a_failed_sync_nothing_more_is_listed(lm, documents, tmp_path, monkeypatch):
    """The system tells of pages that it lost once: the next sync of the same file succeeds."""
    monkeypatch.setattr(shards, "sync", syncs_rows(fails_at(shards.sync, 0)))
    with pytest.raises(OSError, match="the disk is gone"):
        make(lm, documents, tmp_path, checkpoint_bytes=1)
    assert listed_in(tmp_path) == []


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


def test_a_part_is_sealed_while_the_one_before_it_is_filled(lm, documents, tmp_path, monkeypatch):
    """The second part was stopped before its shards were sealed, and the first one has documents left."""
    whole = make(lm, documents, tmp_path / "whole", parts=2)
    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "seal", broken)
        for machine in (1, 0):
            patch.setattr(shards, "CHECKPOINT_S", 0.0)
            patch.setattr(PartWriter, "write", fails_at(PartWriter.write, 5 if machine == 0 else 10**9))
            with pytest.raises(OSError, match="the disk is gone"):
                make(lm, documents, tmp_path / "stopped", parts=2, shard=(machine, 2))
    again = make(lm, documents, tmp_path / "stopped", parts=2)
    assert 0 < again.ran < whole.ran / 2
    assert bytes_of(Path(again.folder)) == bytes_of(Path(whole.folder))


def test_a_row_too_few_is_an_error(lm, documents, tmp_path, monkeypatch):
    reduced = _HarvestJob._reduced
    monkeypatch.setattr(_HarvestJob, "_reduced", lambda *args: reduced(*args)[:1])
    with pytest.raises(RunError, match=r"resid_post\[1\]"):
        make(lm, documents, tmp_path)


def test_a_part_whose_shards_are_all_sealed_is_not_made_again(lm, documents, tmp_path):
    """It was stopped while its folder was removed."""
    made = make(lm, documents, tmp_path)
    (Path(made.folder) / "part-0000.open").mkdir()
    again = make(lm, documents, tmp_path)
    assert (again.ran, again.complete) == (0, True)
    assert not (Path(made.folder) / "part-0000.open").exists()


def test_the_limit_of_open_files_is_raised_as_far_as_the_system_allows(monkeypatch):
    resource, limits = pytest.importorskip("resource"), []

    def setrlimit(kind, limit):
        if limit[0] > limit[1]:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(limit)

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (300, 1000))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    for count in (10, 100, 744):
        allow_files(count, "")
    assert limits == [(356, 1000), (1000, 1000)]
    with pytest.raises(CapacityError, match=r"745 files.* 1000: .*fewer sites"):
        allow_files(745, "fewer sites")


def test_many_parts_are_read_within_the_files_that_may_be_open(lm, documents, tmp_path):
    """In a process that may have few: rows of 60 parts at two sites."""
    made = make(lm, documents, tmp_path, parts=60)
    code = (
        "import resource, sys; from patchclamp.studies.harvest import Harvested\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, int(sys.argv[2])))\n"
        "data = Harvested(sys.argv[1])\n"
        "print(sum(len(piece['z[0, 1]']) for piece in data.order.read(data.columns(data.sites))))"
    )
    for hard, told in (("4096", str(len(made.open()))), ("300", "ulimit -Hn")):
        ended = subprocess.run([sys.executable, "-c", code, made.folder, hard], capture_output=True, text=True)
        assert told in ended.stdout + ended.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_that_are_read_are_those_that_are_mapped(tmp_path, dtype):
    path, draw = tmp_path / "rows.safetensors", np.random.default_rng(0)
    header = write_header({"z[1]": (dtype, (37, 5))}, size=4096)
    create_rows(path, header, dtype, 37, 5)[draw.permutation(37)] = draw.integers(0, 200, (37, 5))
    file = RowsFile.open(path)
    assert (file.dtype, file.shape) == (dtype, (37, 5))
    np.testing.assert_array_equal(np.concatenate(list(file.blocks(10))), file.mapped())
    with safe_open(path, "pt") as opened:
        np.testing.assert_array_equal(to_dtype(opened.get_tensor("z[1]"), dtype), file.mapped())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ProgramError, match="truncated"):
        list(file.blocks(10))
    path.write_bytes(b"another file")
    with pytest.raises(ProgramError, match=r"rows\.safetensors"):
        RowsFile.open(path)


def test_what_a_killed_process_left_of_the_same_file_goes(tmp_path, monkeypatch):
    path = tmp_path / "statistics.json"
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: 1 / 0)
        for other in (path, tmp_path / "other.json"):
            with pytest.raises(ZeroDivisionError):
                write_whole(other, b"old")
    (tmp_path / "statistics.json.mine.new").write_bytes(b"mine")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    left = {file.name.split(".")[0]: file.read_bytes() for file in tmp_path.glob("*.new")}
    assert left == {"statistics": b"mine", "other": b"old"}
