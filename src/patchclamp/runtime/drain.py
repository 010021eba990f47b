"""Captured rows leave the device: from a ring on it, over a side stream, into pinned memory that the store keeps.

The engine's thread only queues.  A reservation in the ring makes the compute stream, not the host, wait until the bytes
that lay there, and in some room ahead of it, are gone.  Pinned memory is bounded: beyond `pinned_bytes` the oldest goes
to ordinary memory on worker threads, and when they fall behind, the engine waits for them (back-pressure); nothing is
lost and nothing grows.
"""

from __future__ import annotations

import collections
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from patchclamp.store.captures import ALIGNED
from patchclamp.store.host_memory import HostBlock, PinnedSlabs, Slab

SEND_BYTES = 1 << 26  # sent at once: 1.2 ms on the way, against at most 0.3 ms of host time
SLABS_CHECKED = 8  # slabs that are asked whether they are free again, whenever one is full
MAX_SPILLS = 4  # slabs that are moved to ordinary memory at once before the engine waits


class _FilledSlab:
    """A slab, the blocks that lie in it, and when its last copy from the device is done."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.blocks: list[weakref.ref[HostBlock]] = []
        self.done: torch.cuda.Event | None = None

    @property
    def in_use(self) -> bool:
        """Whether somebody may yet read or write it."""
        return any(block() is not None for block in self.blocks) or not (self.done is None or self.done.query())


class Drain:
    """Moves device bytes to host memory in the background."""

    def __init__(self, device: torch.device, ring_bytes: int, pinned_bytes: int) -> None:
        self.ring, self._ring_bytes = torch.empty(ring_bytes, dtype=torch.uint8, device=device), ring_bytes
        self._stream, self._ready = torch.cuda.Stream(device), torch.cuda.Event()
        self._head = self._unsent = 0  # bytes unsent … head−1 of the ring wait to be sent
        self._clear = 0  # up to where, from the head on, nothing waits to be copied any more
        self._share = min(SEND_BYTES, ring_bytes // 4)  # sent at once
        self._block = HostBlock()
        self._sent: collections.deque[tuple[int, int, torch.cuda.Event]] = collections.deque()
        self._loose: list[tuple[torch.Tensor, HostBlock]] = []
        self._pinned_bytes = pinned_bytes
        self._pinned = PinnedSlabs(pinned_bytes)
        self._filled: list[_FilledSlab] = []  # the last one is being filled
        self._filled_bytes = self._next = 0  # theirs; which of them is looked at next
        self._spills: collections.deque[tuple[Future[None], _FilledSlab]] = collections.deque()
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="patchclamp-spill")
        self.bytes = self.spilled = 0

    @property
    def device_bytes(self) -> int:
        return self.ring.nbytes

    def prepare(self) -> None:
        """Captures are coming: sees to host memory for them."""
        self._pinned.prepare()

    def reserve(self, size: int) -> tuple[torch.Tensor, int, HostBlock, int]:
        """Device memory for `size` bytes to be written on the current stream, from a byte of a uint8 tensor on: the
        tensor, the byte, and the block and offset that they will have. (A view of them would cost as much as all else.)
        Until what writes them is queued nothing may be sent, nor reserved, which may send.
        """
        size = -(-size // ALIGNED) * ALIGNED
        if self._head + size > self._clear:
            if size > self._ring_bytes:
                return self._alone(size)
            self._clear_ahead(size)
        begin = self._head
        self._head += size
        return self.ring, begin, self._block, begin - self._unsent

    def _clear_ahead(self, size: int) -> None:
        """Has the compute stream wait until `size` bytes from the head on, or as many as are sent at once, are free."""
        self.send()
        if self._head + size > self._ring_bytes:
            self._head = self._unsent = self._clear = 0
        rest = self._filled[-1].slab.size - self._filled[-1].slab.used if self._filled else 0
        share = rest if size <= rest < self._share else self._share  # a parcel that does not fit leaves it empty
        clear = min(self._head + max(share, size), self._ring_bytes)
        while self._sent and self._sent[0][2].query():
            self._sent.popleft()
        while self._sent and self._overlaps(self._head, clear):
            torch.cuda.current_stream().wait_event(self._sent.popleft()[2])
        self._clear = clear

    def send(self) -> None:
        """Sends off what has been written."""
        if torch.is_inference_mode_enabled():  # as in steps
            self._send()
        else:
            with torch.inference_mode():
                self._send()

    def _send(self) -> None:
        for data, block in self._loose:
            block.data, block.copied = self._copy(data)
            self._note(block)
            data.record_stream(self._stream)
        self._loose = []
        if self._head == self._unsent:
            return
        self._block.data, self._block.copied = self._copy(self.ring[self._unsent : self._head])
        self._note(self._block)
        self._sent.append((self._unsent, self._head, self._block.copied))
        self._unsent, self._block = self._head, HostBlock()

    def flush(self) -> None:
        """Returns when everything written is in host memory."""
        self.send()
        self._stream.synchronize()

    def close(self) -> None:
        """Stops the threads. What was captured stays readable as long as somebody holds it."""
        try:
            self.flush()
        finally:  # on a device that broke, too
            self._workers.shutdown()
            self._pinned.close()

    def _overlaps(self, begin: int, end: int) -> bool:
        """Whether bytes begin … end−1 still wait to be copied; older copies are done before younger ones."""
        return any(a < end and begin < b for a, b, _ in self._sent)

    def _alone(self, size: int) -> tuple[torch.Tensor, int, HostBlock, int]:
        """A reservation larger than the ring gets memory of its own."""
        try:
            data = torch.empty(size, dtype=torch.uint8, device=self.ring.device)
        except torch.OutOfMemoryError:
            self.flush()
            torch.cuda.empty_cache()
            data = torch.empty(size, dtype=torch.uint8, device=self.ring.device)
        block = HostBlock()
        self.send()
        self._loose.append((data, block))
        return data, 0, block, 0

    def _copy(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Queues a copy to pinned memory behind what the compute stream has been given so far."""
        size = source.numel()
        held = self._room(size)
        slab = held.slab
        target = slab.data[slab.used : slab.used + size]
        slab.used += size
        compute, done = torch.cuda.current_stream(), torch.cuda.Event()
        self._ready.record(compute)
        self._stream.wait_event(self._ready)
        torch.cuda.set_stream(self._stream)  # as a `with` of PyTorch's does, in fewer calls
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(compute)
        done.record(self._stream)
        held.done = done
        self.bytes += size
        return target, done

    def _note(self, block: HostBlock) -> None:
        self._filled[-1].blocks.append(weakref.ref(block))

    def _room(self, size: int) -> _FilledSlab:
        if self._filled and self._filled[-1].slab.used + size <= self._filled[-1].slab.size:
            return self._filled[-1]
        self._give_back(SLABS_CHECKED)
        while self._spills and (len(self._spills) > MAX_SPILLS or self._spills[0][0].done()):
            future, held = self._spills.popleft()
            future.result()
            self._pinned.give(held.slab)
        if self._filled_bytes > self._pinned_bytes:
            self._give_back(len(self._filled))
        while self._filled_bytes > self._pinned_bytes:
            held, self._next = self._filled.pop(0), max(self._next - 1, 0)
            self._filled_bytes -= held.slab.size
            self._spills.append((self._workers.submit(_spill, held), held))
            self.spilled += 1
        self._filled.append(_FilledSlab(self._pinned.take(size)))
        self._filled_bytes += self._filled[-1].slab.size
        return self._filled[-1]

    def _give_back(self, most: int) -> None:
        """Looks at `most` slabs in turn, and gives back those that nobody reads or writes any more."""
        for _ in range(min(most, len(self._filled))):
            self._next %= len(self._filled)
            held = self._filled[self._next]
            if held.in_use:
                self._next += 1
                continue
            del self._filled[self._next]
            self._filled_bytes -= held.slab.size
            self._pinned.give(held.slab)


def _spill(held: _FilledSlab) -> None:
    """Moves what still lives of a slab to ordinary memory."""
    if held.done is not None:
        held.done.synchronize()
    with torch.inference_mode():
        for reference in held.blocks:
            block = reference()
            if block is not None and block.data is not None:
                room = np.empty(len(block.data), np.uint8)  # in huge pages, unlike torch's: filled three times faster
                block.data = torch.from_numpy(room).copy_(block.data)
