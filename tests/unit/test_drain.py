"""The ring on the way off the device: nothing is overwritten before its copy is done, however late copies are."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from patchclamp.runtime import drain
from tests.reference import cuda_on_cpu


class _Copies:
    """Copies that are done late, in the order in which they were asked for."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.asked, self.done, self.waits = rng, [], 0, 0
        self.lock = threading.Lock()  # slabs are moved on by threads, which wait for the copies to them

    def go_on(self, until: int) -> None:
        with self.lock:
            for source, target in self.asked[self.done : until]:
                target.copy_(source)
            self.done = max(self.done, until)


class _Copied:
    """The event after a copy."""

    def __init__(self, copies: _Copies) -> None:
        self.copies, self.number = copies, len(copies.asked)

    def query(self) -> bool:
        copies = self.copies
        if copies.rng.random() < 0.2:
            copies.go_on(min(copies.done + 1, len(copies.asked)))
        return copies.done >= self.number

    def synchronize(self) -> None:
        self.copies.go_on(self.number)


class _Compute:
    def wait_event(self, event: _Copied) -> None:
        event.copies.waits += 1
        event.synchronize()


@pytest.mark.parametrize("seed", range(12))
def test_the_ring_is_written_again_only_when_its_bytes_are_gone(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    cuda_on_cpu.stub(monkeypatch)
    rng = random.Random(seed)
    copies = _Copies(rng)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: _Compute())

    def later(self: Any, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        held = self._room(source.numel())
        target = held.slab.data[held.slab.used : held.slab.used + source.numel()]
        held.slab.used += source.numel()
        copies.asked.append((source, target))
        held.done = event = _Copied(copies)
        self.bytes += source.numel()
        return target, event

    monkeypatch.setattr(drain.Drain, "_copy", later)
    made = drain.Drain(torch.device("cpu"), 1 << 13, 1 << 15)
    made._stream.synchronize = lambda: copies.go_on(len(copies.asked))  # type: ignore[method-assign]
    kept, sent = [], 0
    for number in range(400):
        size = rng.choice([1, 16, 40, 300, 1 << 10, 3 << 10, 1 << 13, 1 << 14])
        value, sends = number % 251 + 1, len(copies.asked)
        if rng.random() < 0.5:
            block, offset = made.put(torch.full((size,), value, dtype=torch.uint8))
        else:
            data, begin, block, offset = made.reserve(size)
            data[begin : begin + size] = value
        sent += len(copies.asked) - sends
        kept.append((block, offset, size, value))
        if rng.random() < 0.3:
            kept.pop(rng.randrange(len(kept)))
        if rng.random() < 0.05:
            made.send() if rng.random() < 0.5 else made.flush()
    made.flush()
    for block, offset, size, value in kept:
        assert block.data is not None
        assert (block.data[offset : offset + size] == value).all()
    assert copies.waits > 0, "no copy was late: this checked nothing"
    assert sent < 400, "several reservations leave together"
    made.close()
