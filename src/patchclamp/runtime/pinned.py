"""Pinned host memory in slabs, made in the background and used again.

Getting memory from the system page by page is what takes long (2 GB/s on one thread), so several threads touch a slab
before it is registered with CUDA, and some slabs are made ahead of need.
"""

from __future__ import annotations

import collections
import logging
import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("patchclamp")

SLAB_BYTES = 1 << 26
AHEAD = 4  # slabs made ahead of need
_SHARE = 1 << 23
_PAGE = 4096


def _register(memory: np.ndarray) -> None:
    error = _cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(error) != 0:
        raise MemoryError(f"CUDA could not pin {memory.nbytes} bytes of host memory: {error}")


def _unregister(memory: np.ndarray) -> None:
    _cudart().cudaHostUnregister(memory.ctypes.data)


def _cudart() -> Any:
    return torch.cuda.cudart()


class Slab:
    """`data` [size] uint8 in pinned memory, as long as the slab is there; `used`: how much of it is, from 0 on."""

    __slots__ = ("__weakref__", "data", "size", "used")

    def __init__(self, memory: np.ndarray, unregister: Callable[[np.ndarray], None]) -> None:
        self.data, self.size, self.used = torch.from_numpy(memory), memory.nbytes, 0
        weakref.finalize(self, unregister, memory).atexit = False


class Pinned:
    """Slabs of pinned memory: at most `limit` bytes of them are kept when nobody uses them."""

    def __init__(
        self,
        limit: int,
        register: Callable[[np.ndarray], None] = _register,
        unregister: Callable[[np.ndarray], None] = _unregister,
    ) -> None:
        self._limit, self._register, self._unregister = limit, register, unregister
        self._free: dict[int, list[Slab]] = collections.defaultdict(list)  # by size
        self._coming: collections.deque[Future[Slab]] = collections.deque()
        self._maker = ThreadPoolExecutor(3, thread_name_prefix="patchclamp-pin")
        self._touchers = ThreadPoolExecutor(8, thread_name_prefix="patchclamp-touch")
        self.bytes = 0  # made and not given up

    def prepare(self) -> None:
        """Sees to it that some slabs are ready soon."""
        while len(self._free[SLAB_BYTES]) + len(self._coming) < AHEAD and self.bytes < self._limit:
            self._order()

    def take(self, size: int) -> Slab:
        """A slab of at least `size` bytes; waits for one to be made if none is free."""
        rounded = -(-size // SLAB_BYTES) * SLAB_BYTES
        free = self._free[rounded]
        if not free and rounded == SLAB_BYTES:
            if not self._coming:
                self._order()
            free.append(self._coming.popleft().result())
        elif not free:
            self.bytes += rounded
            free.append(self._make(rounded))
        slab = free.pop()
        self.prepare()
        return slab

    def give(self, slab: Slab) -> None:
        """A slab that nobody reads or writes any more."""
        slab.used = 0
        if self.bytes <= self._limit:
            self._free[slab.size].append(slab)
        else:
            self.bytes -= slab.size

    def close(self) -> None:
        self._maker.shutdown()
        self._touchers.shutdown()
        self._free, self._coming = collections.defaultdict(list), collections.deque()

    def _order(self) -> None:
        self.bytes += SLAB_BYTES
        self._coming.append(self._maker.submit(self._make, SLAB_BYTES))

    def _make(self, size: int) -> Slab:
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            room.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(room, np.uint8)
        list(self._touchers.map(_touch, [memory[i : i + _SHARE] for i in range(0, size, _SHARE)]))
        try:
            self._register(memory)
        except MemoryError as error:  # copies to it are slower, and as right
            logger.warning("patchclamp: captures go to ordinary memory: %s", error)
            return Slab(memory, lambda memory: None)
        return Slab(memory, self._unregister)


def _touch(memory: np.ndarray) -> None:
    memory[::_PAGE] = 0
