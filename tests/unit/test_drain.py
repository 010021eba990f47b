"""The way off the device, on two streams whose work is done late, and in any order that their waits allow: what was
captured is what arrives, whatever lies where it lay by then."""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchclamp.runtime import drain
from patchclamp.store import host_memory

DONE: Callable[[], bool] = lambda: True  # noqa: E731


class Device:
    """A device's streams. What they are given waits until it is their turn, or until the host waits for it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.streams, self.late = rng, [], 0
        self.lock = threading.RLock()  # slabs are moved on by threads, which wait for the copies to them

    def go_on(self, done: Callable[[], bool]) -> None:
        with self.lock:
            while not done():
                order = self.rng.sample(self.streams, len(self.streams))
                assert any(stream.go_on() for stream in order), "the streams wait for each other"


class Stream:
    def __init__(self, device: Device) -> None:
        self.device, self.asked, self.given, self.done = device, collections.deque(), 0, 0
        device.streams.append(self)

    def give(self, may: Callable[[], bool], work: Callable[[], Any]) -> None:
        with self.device.lock:
            self.asked.append((may, work))
            self.given += 1

    def go_on(self) -> bool:
        if not self.asked or not self.asked[0][0]():
            return False
        _, work = self.asked.popleft()
        work()
        self.done += 1
        return True

    def wait_event(self, event: Event) -> None:
        stream, at = event.stream, event.at
        self.device.late += stream.done < at
        self.give(lambda: stream.done >= at, lambda: None)

    def synchronize(self) -> None:
        self.device.go_on(lambda: not self.asked)


class Event:
    stream: Any = None
    at = 0

    def record(self, stream: Stream) -> None:
        stream.give(DONE, lambda: None)
        self.stream, self.at = stream, stream.given

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.at

    def synchronize(self) -> None:
        self.stream.device.go_on(self.query)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], Stream]:
    """Puts streams in CUDA's place; returns what makes the one that the engine computes on."""

    def started(device: Device) -> Stream:
        current, mine, copy = [Stream(device)], threading.get_ident(), torch.Tensor.copy_

        def copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if threading.get_ident() == mine:
                current[0].give(DONE, lambda: copy(to, source))
                return to
            return copy(to, source)

        for name, value in (("Event", Event), ("Stream", lambda _: Stream(device)),
                            ("set_stream", lambda stream: current.__setitem__(0, stream)),
                            ("current_stream", lambda: current[0])):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr(host_memory, "SLAB_BYTES", 1 << 14)
        slabs = lambda limit: host_memory.PinnedSlabs(limit, lambda memory: None, lambda memory: None)  # noqa: E731
        monkeypatch.setattr(drain, "PinnedSlabs", slabs)
        monkeypatch.setattr(drain, "SEND_BYTES", device.rng.choice([1 << 6, 1 << 9, 1 << 11, 1 << 14]))
        return current[0]

    return started


@pytest.mark.parametrize("seed", range(16))
def test_what_was_captured_is_what_arrives(on: Callable[[Device], Stream], seed: int) -> None:
    rng = random.Random(seed)
    device = Device(rng)
    compute = on(device)
    made = drain.Drain(torch.device("cpu"), rng.choice([16, 1000, 1 << 10, 1 << 13]), 1 << 15)
    sizes = rng.choice([[1, 16, 40], [1, 40, 300, 1 << 10], [16, 3000, 1 << 13, 1 << 14], [250, 256, 1000, 1008]])
    speeds, kept = rng.choice([(0.05, 0.9), (0.9, 0.05), (0.5, 0.5), (0.02, 0.02)]), []
    for number in range(250):
        size, value = rng.choice(sizes), number % 251 + 1
        memory, begin, block, offset = made.reserve(size)
        assert begin % 16 == 0
        assert begin + size <= len(memory)
        row = memory[begin : begin + size]
        compute.give(DONE, lambda row=row, value=value: row.fill_(value))
        kept.append((block, offset, size, value))
        if rng.random() < 0.2:
            kept.pop(rng.randrange(len(kept)))
        if rng.random() < 0.05:
            made.send() if rng.random() < 0.5 else made.flush()
        with device.lock:
            for _ in range(rng.randrange(6)):
                for stream, speed in zip(device.streams, speeds, strict=True):
                    rng.random() < speed and stream.go_on()
        assert torch.cuda.current_stream() is compute
    made.flush()
    for block, offset, size, value in kept:
        assert block.data is not None
        assert (block.data[offset : offset + size] == value).all()
    assert device.late > 0, "nothing was late: this checked nothing"
    made.close()


@pytest.mark.parametrize(("size", "fetched"), [(1 << 10, 5), (600, 9), (100, 40), (24, 200), (5000, 1)])
def test_slabs_are_filled_however_much_is_fetched_at_once(
    on: Callable[[Device], Stream], monkeypatch: pytest.MonkeyPatch, size: int, fetched: int
) -> None:
    on(Device(random.Random(0)))
    monkeypatch.setattr(drain, "SEND_BYTES", host_memory.SLAB_BYTES)
    made = drain.Drain(torch.device("cpu"), 4 * host_memory.SLAB_BYTES, 1 << 30)
    kept = []
    for _ in range(30):
        kept += [made.reserve(size)[2:] for _ in range(fetched)]
        made.flush()
    held = sum(each.slab.size for each in made._filled[:-1])
    used = sum(each.slab.used for each in made._filled[:-1])
    assert held - used < (len(made._filled) - 1) * (size + 16), "more is left empty than what did not fit"
    turns = made.bytes // made.device_bytes + 1
    assert len({id(block) for block, _ in kept}) <= 30 + len(made._filled) + turns, "a parcel ends for no reason"
    made.close()
