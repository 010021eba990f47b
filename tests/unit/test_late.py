"""Captured rows as on a GPU, with streams that do what they are given late: what fills the tables, the kernel, the
engine's positions and the copies off the device come in any order that the streams allow."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from patchclamp.kernels import moves
from patchclamp.runtime import cuda_step
from patchclamp.sites import Sizes
from tests.reference import cuda_on_cpu
from tests.unit import test_cuda_step as steps
from tests.unit import test_drain as streams

PLACE, SITE, COPY = cuda_on_cpu.place, cuda_on_cpu._Kernel.site, torch.Tensor.copy_
REDUCE = cuda_step.reduced_rows
SIZES = (
    Sizes(steps.LAYERS, steps.WIDTH, 6), Sizes(steps.LAYERS, steps.WIDTH, 61),
    Sizes(steps.LAYERS, steps.WIDTH, 61, experts=8, sparse=(0, 1)),
)  # fmt: skip


class Positions:
    """The engine's positions, which it has the device fill."""

    def __init__(self, held: np.ndarray, compute: streams.Stream) -> None:
        self.held, self.compute = held, compute

    def __setitem__(self, key: Any, value: Any) -> None:
        new = np.array(value)
        self.compute.give(streams.DONE, lambda: self.held.__setitem__(key, new))


def late(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> streams.Device:
    """Streams in CUDA's place, the first of which the engine computes on."""
    cuda_on_cpu.stub(monkeypatch)
    device, mine = streams.Device(rng), threading.get_ident()
    compute = streams.Stream(device)
    current = [compute]

    def copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if threading.get_ident() != mine or not non_blocking:
            return COPY(to, source)
        current[0].give(streams.DONE, lambda: COPY(to, source))
        return to

    def site(tables: Any, point: int, hidden: torch.Tensor, *rest: Any) -> None:
        hidden = hidden.clone()
        compute.give(streams.DONE, lambda: SITE(tables, point, hidden, *rest))

    class Event(streams.Event):
        def record(self, stream: Any = None) -> None:
            super().record(stream or current[0])

    def reduced_rows(*arguments: Any) -> Any:  # the device computes it when it is its turn, and here the host now
        device.go_on(lambda: not compute.queue)
        return REDUCE(*arguments)

    monkeypatch.setattr(cuda_step, "reduced_rows", reduced_rows)
    for name, value in (("Event", Event), ("Stream", lambda *_: streams.Stream(device)),
                        ("set_stream", lambda stream: current.__setitem__(0, stream)),
                        ("current_stream", lambda *_: current[0])):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(cuda_step, "SEND_BYTES", rng.choice([1 << 6, 1 << 9, 1 << 11, 1 << 14]))
    monkeypatch.setattr(cuda_on_cpu._Kernel, "site", staticmethod(site))
    monkeypatch.setattr(moves, "upload", lambda *args: compute.give(streams.DONE, lambda: PLACE(*args)))
    return device


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("calm", [False, True])
def test_every_captured_row_is_the_right_one_however_late(monkeypatch, sizes, calm):
    rows = waits = 0
    for seed in np.random.default_rng(0).integers(1 << 30, size=4).tolist():
        random.seed(seed)
        rng = random.Random(seed)
        device = late(monkeypatch, rng)
        engine: Any = steps.Engine(seed, sizes, calm)
        engine.positions = Positions(engine.positions, device.streams[0])
        for _ in range(120):
            engine.go()
            with device.lock:
                for _ in range(rng.randrange(12)):
                    for stream in device.streams:
                        rng.random() < 0.5 and stream.go_on()
            if engine.done and rng.random() < 0.2:
                request = rng.choice(engine.done)
                rows += engine.check(request)
                engine.release(request)
        for request in list(engine.done):
            rows += engine.check(request)
            engine.release(request)
        waits += device.late
        engine.step.close()
    assert rows > 200
    assert waits > 0, "nothing was late: this checked nothing"
