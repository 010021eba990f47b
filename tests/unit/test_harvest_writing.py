"""How a harvest is written: in parts of a good size, brought to the disk and sealed while others are computed."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from patchclamp.engines.fake import FakeEngine
from patchclamp.errors import ProgramError
from patchclamp.lm import LM
from patchclamp.studies.harvest import harvest, plan, writer
from patchclamp.studies.harvest.ledger import Ledger
from patchclamp.studies.harvest.order import MOST_ROWS
from patchclamp.studies.harvest.plan import parts_for
from patchclamp.studies.harvest.shard_file import ReadRows, ShardFile, header, open_rows
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
    add = Ledger.add
    monkeypatch.setattr(Ledger, "add", lambda ledger, prompts: added.append(len(prompts)) or add(ledger, prompts))
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
    (ledger,) = (tmp_path / "broken").rglob("ledger")
    assert ledger.stat().st_size == 0
    monkeypatch.setattr(ShardFile, "sync", sync)
    again = make(lm, documents, tmp_path / "broken")
    assert again.ran == whole.ran
    assert bytes_of(Path(again.folder)) == bytes_of(Path(whole.folder))


def test_few_parts_are_full_and_not_sealed(lm, documents, tmp_path, monkeypatch):
    """A disk that is slow at sealing holds writers back, and files of few parts are open."""
    full, most, lock = set(), [], threading.Lock()
    write, seal = writer.OpenPart.write, writer.OpenPart.seal
    go_on = threading.Event()

    def noted(part, *args):
        if write(part, *args):
            with lock:
                full.add(part.part.number)
                most.append(len(full))
            if len(full) >= writer.FULL:
                threading.Timer(0.2, go_on.set).start()
            return True
        return False

    def slow(part, pools):
        go_on.wait(60)
        seal(part, pools)
        with lock:
            full.discard(part.part.number)

    monkeypatch.setattr(writer.OpenPart, "write", noted)
    monkeypatch.setattr(writer.OpenPart, "seal", slow)
    assert make(lm, documents, tmp_path, parts=12).complete
    assert writer.FULL <= max(most) <= writer.FULL + writer.WRITERS
    assert len(most) == 12


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
