"""Open memory, and rows that are lent from it to another process: no copy, no leak, and copies where it cannot be."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.store import host_memory
from tests.unit.test_store import Line, stored


def lendable(rows: int, width: int = 16, seed: int = 0) -> torch.Tensor:
    """Random rows in memory that other processes can map."""
    made = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    memory = host_memory.make(made.nbytes)
    assert memory is not None
    memory[:] = made.view(torch.uint8).numpy().reshape(-1)
    return torch.from_numpy(memory).view(torch.float32).view(rows, width)


def test_large_rows_in_open_memory_are_lent_and_not_copied():
    line, memories = Line(), len(host_memory._open)
    rows, few, copied = lendable(70_000), lendable(5), torch.randn(30_000, 16)
    wanted = {3: stored(rows), 5: stored(few), 9: stored(copied), 11: stored(rows, 3)}
    fetched = line.fetch_many(wanted)
    for number, made in {3: rows, 5: few, 9: copied, 11: rows}.items():
        assert torch.equal(fetched[number][1], made)
    assert [number for number, *_ in line.handed[0]["lent"]] == [3]  # not what is small, elsewhere, or in parts
    assert line.sender.loans == 1
    assert line.receiver.has_views
    rows[1, 2] = 7.0
    assert fetched[3][1][1, 2] == 7.0  # the same memory
    view = fetched[3][1][60_000:]
    del wanted, rows, few, fetched, made
    gc.collect()
    assert line.sender.loans == 1
    assert len(host_memory._open) == memories + 1  # it is kept for the view
    [(_, files)] = line.sender._lent.values()
    last = next(iter(files.values()))[0].view(np.float32)[-1]
    assert view[-1, -1] == float(last)
    del view
    gc.collect()
    assert line.sender.loans == 0
    assert len(host_memory._open) == memories


def test_what_was_lent_is_mapped_once_and_forgotten_when_it_is_closed():
    line, rows = Line(), lendable(70_000)
    for _ in range(3):
        assert torch.equal(line.fetch(rows)[1], rows)
    assert len(line.receiver._mapped) == 1
    del rows
    gc.collect()
    others = [lendable(70_000, seed=seed) for seed in range(3)]
    for other in others:
        assert torch.equal(line.fetch(other)[1], other)
    assert len(line.receiver._mapped) == 3


@pytest.mark.parametrize("where", ["is_open", "map_place"])
def test_where_memory_cannot_be_mapped_rows_are_copied(monkeypatch, where):
    line, rows = Line(), lendable(70_000)

    def fail(place: host_memory.MemoryLocation) -> bool:
        if where == "is_open":
            return False
        raise OSError("no file may be opened")

    monkeypatch.setattr(host_memory, where, fail)
    for _ in range(5):
        assert torch.equal(line.fetch(rows)[1], rows)
    gc.collect()
    assert line.sender.loans == 0
    assert not line.receiver.has_views


def test_what_lies_in_one_file_is_returned_without_the_others():
    line, rows = Line(), [lendable(70_000, seed=seed) for seed in range(2)]
    fetched = line.fetch_many(dict(enumerate(map(stored, rows))))
    kept = fetched[1][1]
    del fetched
    gc.collect()
    [(_, files)] = line.sender._lent.values()
    assert len(files) == line.sender.loans == 1
    assert torch.equal(kept, rows[1])
    del kept
    gc.collect()
    assert line.sender.loans == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, pc.EngineError])
def test_what_was_lent_to_a_fetch_that_failed_is_returned(error):
    line, rows = Line(), lendable(70_000)

    def ask(*receiver):
        line.sender.hand({0: stored(rows)}, *receiver)
        assert line.sender.loans == 1
        raise error("stopped")

    with pytest.raises(error):
        line.receiver.fetch(ask)
    assert line.sender.loans == 0
    assert torch.equal(line.fetch(rows)[1], rows)


def test_the_loans_of_a_receiver_that_died_are_taken_back():
    line, rows, dead = Line(), lendable(70_000), subprocess.Popen(["true"])
    dead.wait()
    line.sender.hand({0: stored(rows)}, f"{dead.pid}-x", loan="loan:1")
    assert line.sender.loans == 1
    kept = line.fetch(rows)
    assert line.sender.loans == 1
    assert torch.equal(kept[1], rows)


def test_another_process_maps_open_memory():
    rows = lendable(70_000)
    place = host_memory.place_of(rows.view(torch.uint8).numpy().reshape(-1)[64:])
    assert place is not None
    code = (
        "import sys, hashlib\n"
        "from patchclamp.store.host_memory import MemoryLocation, map_place\n"
        "place = MemoryLocation(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))\n"
        "print(hashlib.sha256(map_place(place)[place.offset :]).hexdigest())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, place)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hashlib.sha256(rows.numpy().tobytes()[64:]).hexdigest()


def test_open_memory_knows_its_own_bytes_alone():
    rows = lendable(100)
    data = rows.view(torch.uint8).numpy().reshape(-1)
    assert host_memory.place_of(data).offset == 0
    assert host_memory.place_of(data[3:9]).offset == 3
    assert host_memory.place_of(np.zeros(8, np.uint8)) is None
    copy = data.copy()
    assert host_memory.place_of(copy) is None
