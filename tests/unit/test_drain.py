"""The drain, on two streams whose work is done late, and in any order that their waits allow: what was captured is what
arrives, even if its place in the ring has been written again by then."""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchclamp.runtime import cuda_step as drains
from patchclamp.store import host_memory

DONE: Callable[[], bool] = lambda: True  # noqa: E731


class Device:
    """A device's streams. Work is queued there until it is a stream's turn, or until the host waits for it."""

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
        self.device, self.queue, self.queued, self.done = device, collections.deque(), 0, 0
        device.streams.append(self)

    def give(self, may: Callable[[], bool], work: Callable[[], Any]) -> None:
        with self.device.lock:
            self.queue.append((may, work))
            self.queued += 1

    def go_on(self) -> bool:
        if not self.queue or not self.queue[0][0]():
            return False
        _, work = self.queue.popleft()
        work()
        self.done += 1
        return True

    def wait_event(self, event: Event) -> None:
        stream, at = event.stream, event.at
        self.device.late += stream.done < at
        self.give(lambda: stream.done >= at, lambda: None)

    def synchronize(self) -> None:
        self.device.go_on(lambda: not self.queue)


class Event:
    stream: Any = None
    at = 0

    def record(self, stream: Stream) -> None:
        stream.give(DONE, lambda: None)
        self.stream, self.at = stream, stream.queued

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.at

    def synchronize(self) -> None:
        self.stream.device.go_on(self.query)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], Stream]:
    """Puts streams in CUDA's place; returns what makes the one that the engine computes on."""

    def started(device: Device) -> Stream:
        current, engine_thread, copy = [Stream(device)], threading.get_ident(), torch.Tensor.copy_

        def copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if threading.get_ident() == engine_thread:
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
        monkeypatch.setattr(drains, "PinnedSlabs", slabs)
        monkeypatch.setattr(drains, "SEND_BYTES", device.rng.choice([1 << 6, 1 << 9, 1 << 11, 1 << 14]))
        return current[0]

    return started


@pytest.mark.parametrize("seed", range(16))
def test_what_was_captured_is_what_arrives(on: Callable[[Device], Stream], seed: int) -> None:
    rng = random.Random(seed)
    device = Device(rng)
    compute = on(device)
    drain = drains.Drain(torch.device("cpu"), rng.choice([16, 1000, 1 << 10, 1 << 13]), 1 << 15)
    sizes = rng.choice([[1, 16, 40], [1, 40, 300, 1 << 10], [16, 3000, 1 << 13, 1 << 14], [250, 256, 1000, 1008]])
    speeds, allocated = rng.choice([(0.05, 0.9), (0.9, 0.05), (0.5, 0.5), (0.02, 0.02)]), []
    read: list[bool] = []  # of what was taken back, if it was there until then
    viewed: list[tuple[torch.Tensor, int]] = []  # what callers hold of blocks that may be gone
    for number in range(250):
        size, value = rng.choice(sizes), number % 251 + 1
        memory, begin, block, offset = drain.allocate(size)
        assert begin % 16 == 0
        assert begin + size <= len(memory)
        row = memory[begin : begin + size]
        compute.give(DONE, lambda row=row, value=value: row.fill_(value))
        if rng.random() < 0.3:  # the rest is read on the device alone
            size = 16 * rng.randrange(size // 16 + 1)
            compute.give(DONE, lambda row=row, at=size, value=value: read.append(bool((row[at:] == value).all())))
            drain.take_back(memory, -(-len(row) // 16) * 16 - size)
            if not size:
                continue
        allocated.append((block, offset, size, value))
        if rng.random() < 0.2:
            allocated.pop(rng.randrange(len(allocated)))
        if rng.random() < 0.1 and allocated:
            block, offset, length, value = rng.choice(allocated)
            if block.has_arrived and block.data is not None:
                viewed.append((torch.from_numpy(block.data.numpy()[offset : offset + length]), value))
        if rng.random() < 0.05:
            drain.send() if rng.random() < 0.5 else drain.flush()
        with device.lock:
            for _ in range(rng.randrange(6)):
                for stream, speed in zip(device.streams, speeds, strict=True):
                    rng.random() < speed and stream.go_on()
        assert torch.cuda.current_stream() is compute
    drain.flush()
    for block, offset, size, value in allocated:
        assert block.data is not None
        assert (block.data[offset : offset + size] == value).all()
    assert all((rows == value).all() for rows, value in viewed)
    assert len(read) > 20
    assert all(read)
    assert device.late > 0, "nothing was late: this checked nothing"
    drain.close()


@pytest.mark.parametrize(("size", "fetched"), [(1 << 10, 5), (600, 9), (100, 40), (24, 200), (5000, 1)])
def test_slabs_are_filled_however_much_is_fetched_at_once(
    on: Callable[[Device], Stream], monkeypatch: pytest.MonkeyPatch, size: int, fetched: int
) -> None:
    on(Device(random.Random(0)))
    monkeypatch.setattr(drains, "SEND_BYTES", host_memory.SLAB_BYTES)
    drain = drains.Drain(torch.device("cpu"), 4 * host_memory.SLAB_BYTES, 1 << 30)
    allocated = []
    for _ in range(30):
        allocated += [drain.allocate(size)[2:] for _ in range(fetched)]
        drain.flush()
    full = [filled.slab for filled in drain._filled[:-1]]
    unused = sum(slab.size - slab.used for slab in full)
    assert unused < len(full) * (size + 16), "more is left empty than what did not fit"
    turns = drain.bytes // drain.device_bytes + 1
    assert len({id(block) for block, _ in allocated}) <= 30 + len(drain._filled) + turns, "a copy ends for no reason"
    drain.close()
