"""What the tables are brought up to date from: pinned memory that the device reads late."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from patchclamp.kernels import moves, relaunch, switches
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
        longest = max(longest, len(compute.queue))
        for _ in range(device.rng.randrange(4)):
            compute.go_on()
    compute.synchronize()
    assert longest > 4, "nothing was late: this checked nothing"
    assert np.array_equal(words, expected)


@pytest.mark.parametrize("capability", [80, 90])
def test_words_are_read_anew(capability):
    placed = ptx(moves._upload, {"staging": "i64", "tables": "i64"}, moves.CHUNK, capability)
    assert placed.count("ld.global.cv.") == placed.count("ld.global") > 3


@pytest.mark.parametrize("kind", ["off", "fails"])
def test_plain_copies_put_every_word_where_the_kernel_would(monkeypatch, kind):
    monkeypatch.setattr(switches, "disabled", {"pinned_upload"} if kind == "off" else set())
    monkeypatch.setattr(moves, "_launch", lambda *args: (_ for _ in ()).throw(RuntimeError("no such kernel")))
    draw = np.random.default_rng(0)
    for _ in range(20):
        chunks = int(draw.integers(1, 9))
        count = draw.integers(1, moves.CHUNK + 1, chunks)
        to = np.cumsum(count + draw.integers(0, 9, chunks)) - count
        at = 3 * chunks + np.cumsum(count) - count
        staging = torch.from_numpy(draw.integers(0, 1 << 30, 3 * chunks + int(count.sum())).astype(np.int32))
        staging[: 3 * chunks] = torch.from_numpy(np.stack([to, at, count], 1).astype(np.int32)).reshape(-1)
        expected, words = torch.zeros(2, 12_000, dtype=torch.int32)
        cuda_on_cpu.place(staging, expected, chunks)
        moves.upload(staging, words, chunks)
        assert torch.equal(words, expected)
        assert words.any()
    assert switches.disabled == {"pinned_upload"}


def test_a_launcher_that_fails_gives_way_to_triton(monkeypatch):
    plain, straight = [], []

    class Run:
        def __call__(self, gridX, gridY, gridZ, stream, function, args):
            pass

    class Kernel:
        run, function, packed_metadata = Run(), 1, 2

        def __getitem__(self, grid):
            return lambda *args: plain.append((grid, args))

    def refuse(self, *args):
        straight.append(args)
        raise TypeError("another Triton")

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(relaunch, "LAUNCHERS", [("args", "more")])
    monkeypatch.setattr(Run, "__call__", refuse)
    monkeypatch.setattr(
        relaunch.inspect, "signature", lambda call: SimpleNamespace(parameters=("self", "args", "more"))
    )
    for disabled in (set(), {"launcher"}):
        monkeypatch.setattr(switches, "disabled", disabled)
        relaunch.relauncher(Kernel(), (1,), (2,), 0)(5, 10)
        assert switches.disabled == {"launcher"}
    assert plain == [((5, 1, 1), (1, 10, 2))] * 2
    assert len(straight) == 1
