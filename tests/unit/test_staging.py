"""What the tables are brought up to date from: pinned memory that the device reads late."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from patchclamp.kernels import moves
from patchclamp.plan import ProgramTable
from tests.reference import cuda_on_cpu
from tests.reference.compiled import ptx
from tests.unit import test_drain as streams


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_written_where_the_device_has_yet_to_read(monkeypatch, seed):
    device, draw, longest = streams.Device(random.Random(seed)), np.random.default_rng(seed), 0
    compute = streams.Stream(device)

    class Event(streams.Event):
        def record(self, stream: streams.Stream = compute) -> None:
            super().record(stream)

    cuda_on_cpu.stub(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    work: Callable[..., None] = cuda_on_cpu.place
    monkeypatch.setattr(moves, "upload", lambda *args: compute.give(streams.DONE, lambda: work(*args)))
    tables = cuda_on_cpu.tables(ProgramTable(4, 3, 6_000), 64, 16)
    words = tables._words.numpy()
    expected = words.copy()
    for _ in range(60):
        size = int(draw.choice([1, 30, 3_000, 40_000]))
        at = int(draw.integers(0, len(words) - size))
        expected[at : at + size] = new = draw.integers(0, 1 << 30, size).astype(np.int32)
        tables._send([(at, new)])
        longest = max(longest, len(compute.asked))
        for _ in range(device.rng.randrange(4)):
            compute.go_on()
    compute.synchronize()
    assert longest > 4, "nothing was late: this checked nothing"
    assert np.array_equal(words, expected)


@pytest.mark.parametrize("capability", [80, 90])
def test_words_are_read_anew(capability):
    placed = ptx(moves._upload, {"staging": "i64", "tables": "i64"}, moves.CHUNK, capability)
    assert placed.count("ld.global.cv.") == placed.count("ld.global") > 3
