"""What the tables are brought up to date from: pinned memory that the device reads late."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from patchclamp.kernels import moves
from patchclamp.plan import ProgramTable
from tests.reference import cuda_on_cpu
from tests.reference.compiled import ptx


class Device:
    """Does what it was given in order, when an event is waited for or by chance when one is looked at."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.given, self.done = rng, [], 0

    def go_on(self, until: int) -> None:
        for work in self.given[self.done : until]:
            work()
        self.done = max(self.done, until)


def late(device: Device) -> type:
    class Event:
        at = 0

        def record(self, *stream: Any) -> None:
            self.at = len(device.given)

        def query(self) -> bool:
            if device.rng.random() < 0.3:
                device.go_on(device.rng.randint(device.done, len(device.given)))
            return device.done >= self.at

        def synchronize(self) -> None:
            device.go_on(self.at)

    return Event


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_written_where_the_device_has_yet_to_read(monkeypatch, seed):
    device, draw, longest = Device(random.Random(seed)), np.random.default_rng(seed), 0
    cuda_on_cpu.stub(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", late(device))
    work: Callable[..., None] = cuda_on_cpu.place
    monkeypatch.setattr(moves, "place", lambda *args: device.given.append(lambda: work(*args)))
    tables = cuda_on_cpu.Tables(ProgramTable(4, 3, 6_000), 64, 16, np.zeros(64, int))
    words = tables._words.numpy()
    expected = words.copy()
    for _ in range(60):
        size = int(draw.choice([1, 30, 3_000, 40_000]))
        at = int(draw.integers(0, len(words) - size))
        expected[at : at + size] = new = draw.integers(0, 1 << 30, size).astype(np.int32)
        tables._send([(at, new)])
        longest = max(longest, len(device.given) - device.done)
    device.go_on(len(device.given))
    assert longest > 1, "nothing was late: this checked nothing"
    assert np.array_equal(words, expected)


@pytest.mark.parametrize("capability", [80, 90])
def test_bytes_are_moved_sixteen_at_once_and_words_are_read_anew(capability):
    moved = ptx(moves._move, {"source": "i64", "to": "i64", "pairs": "i32"}, moves.MOVED, capability)
    assert moved.count("ld.global.v2.b64") == moved.count("st.global.v2.b64") == moved.count("ld.global") > 0
    placed = ptx(moves._place, {"staging": "i64", "tables": "i64"}, moves.CHUNK, capability)
    assert placed.count("ld.global.cv.") == placed.count("ld.global") > 3
