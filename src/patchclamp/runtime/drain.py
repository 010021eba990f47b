"""Captured rows leave the device: from a ring on it, over a side stream, into pinned memory that the store keeps.

The engine's thread only queues work, and waits for nothing.  Before a part of the ring is written again, the compute
stream waits until the bytes that lay there have been copied.  Pinned memory is bounded: beyond `pinned_bytes`, worker
threads move the oldest slabs to ordinary memory.  When the threads fall behind, the engine does wait for them, so
nothing is lost and nothing grows.
"""

from __future__ import annotations

import collections
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from patchclamp.store.captures import ALIGNED
from patchclamp.store.host_memory import HostBlock, PinnedSlabs, Slab

SEND_BYTES = 1 << 26  # bytes of one copy: 1.2 ms on the way, against at most 0.3 ms of host time
SLABS_CHECKED = 8  # slabs that are checked for being free again, whenever one is full
MAX_SPILLS = 4  # slabs that threads move to ordinary memory at one time before the engine waits


# a uint8 tensor, and the byte of it at which the memory begins (a view would cost as much as the rest of `allocate`);
# the block that the bytes will be in on the host, and their offset there
Allocation = tuple[torch.Tensor, int, HostBlock, int]


class _FilledSlab:
    """A slab, the blocks that lie in it, and the event after its last copy from the device.

    data: its bytes while it is being filled, then None. Blocks hold a part of this very tensor, and so does whatever
    views them: once none of it is left, nobody reads the slab.
    """

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        memory = slab.data.numpy()
        with torch.inference_mode(False):
            self.data: torch.Tensor | None = torch.from_numpy(memory)
        self._memory = weakref.ref(memory)
        self.blocks: list[weakref.ref[HostBlock]] = []
        self.last_copied: torch.cuda.Event | None = None

    @property
    def is_read(self) -> bool:
        """Whether a block or a view of one is there."""
        return self._memory() is not None

    @property
    def in_use(self) -> bool:
        """Whether somebody may yet read or write it."""
        return self.is_read or (self.last_copied is not None and not self.last_copied.query())


class Drain:
    """Moves device bytes to host memory in the background."""

    def __init__(self, device: torch.device, ring_bytes: int, pinned_bytes: int) -> None:
        self.ring, self._ring_bytes = torch.empty(ring_bytes, dtype=torch.uint8, device=device), ring_bytes
        self._stream, self._ready = torch.cuda.Stream(device), torch.cuda.Event()
        self._head = self._unsent = 0  # bytes unsent … head−1 of the ring wait to be sent
        self._clear = 0  # bytes head … clear−1 may be written: nothing there waits to be copied
        self._copy_bytes = min(SEND_BYTES, ring_bytes // 4)  # bytes of one copy
        self._block = HostBlock()  # gets the bytes that wait to be sent
        self._sent: collections.deque[tuple[int, int, torch.cuda.Event]] = collections.deque()  # first, end, copied
        self._beside_ring: list[tuple[torch.Tensor, HostBlock]] = []  # allocated outside the ring, and not sent yet
        self._pinned_bytes = pinned_bytes
        self._pinned = PinnedSlabs(pinned_bytes)
        self._filled: list[_FilledSlab] = []  # the last one is being filled
        self._filled_bytes = 0  # the sizes of all of them
        self._next_checked = 0  # which of them is checked next for being free
        self._spills: collections.deque[tuple[Future[None], _FilledSlab]] = collections.deque()
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="patchclamp-spill")
        self.bytes = self.spilled = 0  # bytes copied, slabs moved to ordinary memory

    @property
    def device_bytes(self) -> int:
        return self.ring.nbytes

    def open(self) -> None:
        """From now on captures come into memory that other processes can map."""
        self._pinned.is_open = True

    def prepare(self) -> None:
        """Makes pinned memory ahead of captures that are coming."""
        self._pinned.prepare()

    def allocate(self, size: int) -> Allocation:
        """Device memory for `size` bytes, to be written on the current stream.

        The caller must queue what writes them before it allocates again or sends.
        """
        size = -(-size // ALIGNED) * ALIGNED
        if self._head + size > self._clear:
            if size > self._ring_bytes:
                return self._allocate_beside_ring(size)
            self._clear_ahead(size)
        begin = self._head
        self._head += size
        return self.ring, begin, self._block, begin - self._unsent

    def _clear_ahead(self, size: int) -> None:
        """Has the compute stream wait until `size` bytes from the head on, or as many as one copy takes, may be
        written."""
        self.send()
        if self._head + size > self._ring_bytes:
            self._head = self._unsent = self._clear = 0
        clear = min(self._head + max(self._next_copy_bytes(size), size), self._ring_bytes)
        while self._sent and self._sent[0][2].query():
            self._sent.popleft()
        while self._sent and self._overlaps(self._head, clear):
            torch.cuda.current_stream().wait_event(self._sent.popleft()[2])
        self._clear = clear

    def _next_copy_bytes(self, size: int) -> int:
        """The bytes of the next copy, which has `size` at least: as many as fill the slab, if that is possible."""
        unused = self._filled[-1].slab.size - self._filled[-1].slab.used if self._filled else 0
        return unused if size <= unused < self._copy_bytes else self._copy_bytes

    def send(self) -> None:
        """Queues copies of all that was written."""
        if torch.is_inference_mode_enabled():  # as in steps
            self._send()
        else:
            with torch.inference_mode():
                self._send()

    def _send(self) -> None:
        for data, block in self._beside_ring:
            self._copy(data, block)
            data.record_stream(self._stream)
        self._beside_ring = []
        if self._head == self._unsent:
            return
        copied = self._copy(self.ring[self._unsent : self._head], self._block)
        self._sent.append((self._unsent, self._head, copied))
        self._unsent, self._block = self._head, HostBlock()

    def flush(self) -> None:
        """Returns when everything written is in host memory."""
        self.send()
        self._stream.synchronize()

    def close(self) -> None:
        """Stops the threads. Whoever holds captures can read them still."""
        try:
            self.flush()
        finally:  # after an error of the device, too
            self._workers.shutdown()
            self._pinned.close()

    def _overlaps(self, begin: int, end: int) -> bool:
        """Whether any of the bytes begin … end−1 still waits to be copied."""
        return any(sent_begin < end and begin < sent_end for sent_begin, sent_end, _ in self._sent)

    def _allocate_beside_ring(self, size: int) -> Allocation:
        """Memory of its own for more than the ring holds."""
        try:
            data = self.ring.new_empty(size)
        except torch.OutOfMemoryError:
            self.flush()
            torch.cuda.empty_cache()
            data = self.ring.new_empty(size)
        block = HostBlock()
        self.send()
        self._beside_ring.append((data, block))
        return data, 0, block, 0

    def _copy(self, source: torch.Tensor, block: HostBlock) -> torch.cuda.Event:
        """Queues a copy to pinned memory, which becomes the block's, behind the compute stream's work so far. Returns
        the event after the copy."""
        size = source.numel()
        filled = self._slab_for(size)
        slab, data = filled.slab, filled.data
        assert data is not None
        target = data[slab.used : slab.used + size]
        slab.used += size
        compute, copied = torch.cuda.current_stream(), torch.cuda.Event()
        self._ready.record(compute)
        self._stream.wait_event(self._ready)
        torch.cuda.set_stream(self._stream)  # as PyTorch's `with` does, in fewer calls
        try:
            target.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(compute)
        copied.record(self._stream)
        filled.last_copied = copied
        filled.blocks.append(weakref.ref(block))
        block.data, block.copied = target, copied
        self.bytes += size
        return copied

    def _slab_for(self, size: int) -> _FilledSlab:
        """The slab that is being filled, or the next one if `size` bytes do not fit there. May wait for spills."""
        if self._filled and self._filled[-1].slab.used + size <= self._filled[-1].slab.size:
            return self._filled[-1]
        if self._filled:
            self._filled[-1].data = None
        self._give_back(SLABS_CHECKED)
        while self._spills and (len(self._spills) > MAX_SPILLS or self._spills[0][0].done()):
            future, spilled = self._spills.popleft()
            future.result()
            (self._pinned.give_up if spilled.is_read else self._pinned.give)(spilled.slab)
        if self._filled_bytes > self._pinned_bytes:
            self._give_back(len(self._filled))
        while self._filled_bytes > self._pinned_bytes:
            self._spill_oldest()
        self._filled.append(_FilledSlab(self._pinned.take(size)))
        self._filled_bytes += self._filled[-1].slab.size
        return self._filled[-1]

    def _spill_oldest(self) -> None:
        oldest, self._next_checked = self._filled.pop(0), max(self._next_checked - 1, 0)
        self._filled_bytes -= oldest.slab.size
        self._spills.append((self._workers.submit(_spill, oldest), oldest))
        self.spilled += 1

    def _give_back(self, checked: int) -> None:
        """Checks so many slabs in turn, and gives back those that nobody reads or writes any more."""
        for _ in range(min(checked, len(self._filled))):
            self._next_checked %= len(self._filled)
            filled = self._filled[self._next_checked]
            if filled.in_use:
                self._next_checked += 1
                continue
            del self._filled[self._next_checked]
            self._filled_bytes -= filled.slab.size
            self._pinned.give(filled.slab)


def _spill(filled: _FilledSlab) -> None:
    """Moves the blocks of a slab that somebody still holds to ordinary memory."""
    if filled.last_copied is not None:
        filled.last_copied.synchronize()
    with torch.inference_mode():
        for reference in filled.blocks:
            block = reference()
            if block is not None and block.data is not None:
                memory = np.empty(len(block.data), np.uint8)  # in huge pages, unlike torch's: filled three times faster
                block.data = torch.from_numpy(memory).copy_(block.data)
