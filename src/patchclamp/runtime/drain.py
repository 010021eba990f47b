"""Captured rows leave the device: over a side stream into pinned memory, then into ordinary memory on worker threads.

The engine's thread only queues; it waits for nothing but room.  Pinned memory is a fixed set of blocks: when all are in
use the engine waits for one (back-pressure), so nothing is lost and nothing grows.
"""

from __future__ import annotations

import queue
from concurrent.futures import Future, ThreadPoolExecutor

import torch

BLOCK_BYTES = 1 << 25
THREADS = 6


class Drain:
    """Moves device bytes to host memory in the background; at most `ring_bytes` are under way."""

    def __init__(self, device: torch.device, ring_bytes: int = 1 << 30) -> None:
        self._stream = torch.cuda.Stream(device)
        self._room = max(ring_bytes // BLOCK_BYTES, 2)
        self._made = 0
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._workers = ThreadPoolExecutor(THREADS, thread_name_prefix="patchclamp-drain")
        self._under_way: list[Future[None]] = []
        self.bytes = 0

    def take(self, source: torch.Tensor) -> torch.Tensor:
        """Host memory [n] uint8 that will hold `source`'s bytes once `flush` has returned."""
        ready = torch.cuda.Event()
        ready.record()
        target = torch.empty(len(source), dtype=torch.uint8)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for begin in range(0, len(source), BLOCK_BYTES):
                part = slice(begin, min(begin + BLOCK_BYTES, len(source)))
                block = self._block()
                block[: part.stop - begin].copy_(source[part], non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._stream)
                self._under_way.append(self._workers.submit(self._settle, done, block, target[part]))
        source.record_stream(self._stream)
        self.bytes += len(source)
        self._under_way = [future for future in self._under_way if not (future.done() and future.exception() is None)]
        return target

    def flush(self) -> None:
        """Returns when everything taken is in host memory."""
        for future in self._under_way:
            future.result()
        self._under_way = []

    def close(self) -> None:
        self._workers.shutdown()

    def _block(self) -> torch.Tensor:
        if self._made < self._room and self._free.empty():
            self._made += 1
            return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        return self._free.get()

    def _settle(self, done: torch.cuda.Event, block: torch.Tensor, target: torch.Tensor) -> None:
        try:
            done.synchronize()
            with torch.inference_mode():  # both were made within a step
                target.copy_(block[: len(target)])
        finally:
            self._free.put(block)
