"""Host memory: pinned slabs, reused memory, memory shared between processes, and multithreaded copies.

Page faults limit each thread to 1 to 2 GB/s. Large memory therefore uses huge pages, is touched by several threads
before CUDA pins it, is allocated ahead of need, and is reused.

Other processes on the machine can map open memory without a copy. It is an anonymous file (`memfd`) that its owner
keeps open and other processes open through `/proc`, so it takes no space in `/dev/shm` and is freed with its owner.
"""

from __future__ import annotations

import atexit
import bisect
import collections
import contextlib
import logging
import mmap
import os
import secrets
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from patchclamp.store.system import available_bytes

_NAME = "patchclamp-"
_open: dict[int, tuple[str, int, int]] = {}  # (name, file, size) of this process's open memory, by first address
_addresses: list[int] = []  # ascending


class MemoryLocation(NamedTuple):
    """Location of bytes for a process that maps them: the file's name, path and size, and the bytes' offset."""

    name: str
    path: str
    size: int
    offset: int


def make(size: int) -> np.ndarray | None:
    """Allocate `size` bytes of open memory, uint8; None if the system cannot provide it."""
    if not hasattr(os, "memfd_create") or 2 * len(_open) >= _max_files():
        return None
    name = _NAME + secrets.token_hex(8)
    try:
        file = os.memfd_create(name)
    except OSError:
        return None
    try:
        os.ftruncate(file, size)
        mapped = mmap.mmap(file, size)
    except OSError:
        os.close(file)
        return None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    address = address_of(memory)
    _open[address] = name, file, size
    bisect.insort(_addresses, address)
    weakref.finalize(memory, _forget, address).atexit = False
    return memory


def _max_files() -> int:
    """Return the maximum number of open-memory files (two descriptors each), after raising the process's limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft // 4


def _forget(address: int) -> None:
    _addresses.remove(address)
    _, file, _ = _open.pop(address)
    os.close(file)


def address_of(data: np.ndarray) -> int:
    """Return the address of an array's first byte."""
    return data.__array_interface__["data"][0]


def place_of(data: np.ndarray) -> MemoryLocation | None:
    """Return the location of contiguous bytes in open memory; None for other memory."""
    first = address_of(data)
    addresses = _addresses.copy()  # another thread may modify the list
    number = bisect.bisect(addresses, first) - 1
    memory = _open.get(addresses[number]) if number >= 0 else None
    if memory is None or first + data.nbytes > addresses[number] + memory[2]:
        return None
    name, file, size = memory
    return MemoryLocation(name, f"/proc/{os.getpid()}/fd/{file}", size, first - addresses[number])


def is_open(place: MemoryLocation) -> bool:
    """True if the location's owner still has it open. Never raises."""
    try:
        return f"/memfd:{place.name}" in os.readlink(place.path)
    except OSError:
        return False


def map_place(place: MemoryLocation) -> mmap.mmap:
    """Map a location's file. Raises `OSError` if its path leads to a different file, as on another machine."""
    if not is_open(place):
        raise FileNotFoundError(f"{place.path} is a different file")
    with open(place.path, "r+b", buffering=0) as file:
        return mmap.mmap(file.fileno(), place.size)


logger: logging.Logger = logging.getLogger("patchclamp")

SLAB_BYTES = 1 << 26
MIN_PINNED_BYTES, MAX_PINNED_BYTES = 1 << 32, 1 << 35  # bounds of a worker's default
SLABS_AHEAD = 4  # slabs made ahead of need
MAX_FREE_BYTES = 1 << 28  # unused bytes kept by `ReusedMemory`
_HUGE_BYTES, _PAGE_BYTES = 1 << 21, 4096
_TOUCH_BYTES = 1 << 23  # bytes that one thread touches at once
_MIN_SHARE_BYTES, _MAX_SHARES = 1 << 20, 64  # minimum bytes of a thread's share, maximum number of shares
_MIN_THREADED_BYTES = 1 << 17  # smaller copies are not threaded

_copiers = ThreadPoolExecutor(8, thread_name_prefix="patchclamp-copy")
_unmapped_paths: set[str] = set()  # shared files that their receivers have not mapped yet


class HostBlock:
    """Host memory of captured rows.

    data: flat bytes; None until the copy from the device is queued
    copied: the event recorded after that copy; None if the rows were never on a device
    """

    __slots__ = ("__weakref__", "copied", "data")

    def __init__(self, data: torch.Tensor | None = None) -> None:
        self.data: torch.Tensor | None = data
        self.copied: torch.cuda.Event | None = None

    @property
    def has_arrived(self) -> bool:
        """True once the bytes are in host memory. Does not block."""
        return self.data is not None and (self.copied is None or self.copied.query())


def default_pinned_bytes(workers: int) -> int:
    """Return the bytes that each worker may pin: a quarter of the free memory / `workers`, within 4 to 32 GiB."""
    return max(MIN_PINNED_BYTES, min(MAX_PINNED_BYTES, available_bytes() // (4 * workers)))


def huge_memory(size: int) -> mmap.mmap:
    """Map private memory of at least `size` bytes, in huge pages if available."""
    memory = mmap.mmap(-1, -(-size // _HUGE_BYTES) * _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


# -- pinned memory


def _register(memory: np.ndarray) -> None:
    error = _cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(error) != 0:
        raise MemoryError(f"CUDA could not pin {memory.nbytes} bytes of host memory: {error}")


def _unregister(memory: np.ndarray) -> None:
    _cudart().cudaHostUnregister(memory.ctypes.data)


def _cudart() -> Any:
    return torch.cuda.cudart()


class Slab:
    """`data` [size] uint8, pinned while the slab exists; bytes 0 … `used`−1 are in use."""

    data: torch.Tensor
    size: int
    used: int

    __slots__ = ("__weakref__", "data", "size", "used")

    def __init__(self, memory: np.ndarray, unregister: Callable[[np.ndarray], None]) -> None:
        self.data, self.size, self.used = torch.from_numpy(memory), memory.nbytes, 0
        weakref.finalize(self, unregister, memory).atexit = False


class PinnedSlabs:
    """A pool of pinned slabs, allocated in the background. Returned slabs are kept up to `limit_bytes` in total."""

    def __init__(
        self,
        limit_bytes: int,
        register: Callable[[np.ndarray], None] = _register,
        unregister: Callable[[np.ndarray], None] = _unregister,
    ) -> None:
        self._limit_bytes, self._register, self._unregister = limit_bytes, register, unregister
        self.is_open = False  # True if new slabs must be mappable by other processes
        self._free: dict[int, list[Slab]] = collections.defaultdict(list)  # slabs by size
        self._coming: collections.deque[Future[Slab]] = collections.deque()
        self._makers = ThreadPoolExecutor(3, thread_name_prefix="patchclamp-pin")
        self._touchers = ThreadPoolExecutor(8, thread_name_prefix="patchclamp-touch")
        self.bytes: int = 0  # bytes of all slabs not given up

    def prepare(self) -> None:
        """Start allocating slabs in the background."""
        while len(self._free[SLAB_BYTES]) + len(self._coming) < SLABS_AHEAD and self.bytes < self._limit_bytes:
            self._order()

    def take(self, size: int) -> Slab:
        """Take a slab of at least `size` bytes. Waits for a new slab if none is free."""
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
        """Return an unused slab to the pool."""
        slab.used = 0
        if self.bytes <= self._limit_bytes:
            self._free[slab.size].append(slab)
        else:
            self.give_up(slab)

    def give_up(self, slab: Slab) -> None:
        """Discard a slab that may still have readers; its memory is freed with the last reference."""
        self.bytes -= slab.size

    def close(self) -> None:
        """Stop the threads and drop the unused slabs."""
        self._makers.shutdown()
        self._touchers.shutdown()
        self._free, self._coming = collections.defaultdict(list), collections.deque()

    def _order(self) -> None:
        self.bytes += SLAB_BYTES
        self._coming.append(self._makers.submit(self._make, SLAB_BYTES))

    def _make(self, size: int) -> Slab:
        memory = make(size) if self.is_open else None
        if memory is None:
            memory = np.frombuffer(huge_memory(size), np.uint8, size)
        list(self._touchers.map(_touch, [memory[i : i + _TOUCH_BYTES] for i in range(0, size, _TOUCH_BYTES)]))
        try:
            self._register(memory)
        except MemoryError as error:  # copies to unpinned memory are slower; results are unchanged
            logger.warning("patchclamp: captures use pageable memory: %s", error)
            return Slab(memory, lambda memory: None)
        return Slab(memory, self._unregister)


def _touch(memory: np.ndarray) -> None:
    memory[::_PAGE_BYTES] = 0


# -- reused memory


class ReusedMemory:
    """Buffers for rows returned to callers, reused once the last reference to them is dropped."""

    def __init__(self) -> None:
        self._free: collections.deque[mmap.mmap] = collections.deque()

    def take(self, size: int) -> np.ndarray:
        """Allocate `size` bytes. Small requests get a plain NumPy array, which is not reused."""
        if size < _HUGE_BYTES // 2:
            return np.empty(size, np.uint8)
        for memory in list(self._free):
            if size <= len(memory) <= 2 * size:
                with contextlib.suppress(ValueError):  # another thread took it
                    self._free.remove(memory)
                    return self._lend(memory, size)
        return self._lend(huge_memory(size), size)

    def _lend(self, memory: mmap.mmap, size: int) -> np.ndarray:
        data = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(data, self._take_back, memory).atexit = False
        return data

    def _take_back(self, memory: mmap.mmap) -> None:
        # a finalizer may run on any thread at any point, so it must not wait for a lock
        if sum(map(len, list(self._free))) + len(memory) <= MAX_FREE_BYTES:
            self._free.append(memory)


reused = ReusedMemory()


# -- files shared by two processes


def make_shared(size: int) -> tuple[str, np.ndarray] | None:
    """Create a shared file of `size` bytes. Returns its path and memory, or None if there is no space.

    The space is reserved upfront, because a later write to a full device would crash the process.
    """
    for folder in ("/dev/shm", tempfile.gettempdir()):
        try:
            file, path = tempfile.mkstemp(prefix="patchclamp-", dir=folder)
        except OSError:
            continue
        try:
            os.posix_fallocate(file, 0, size)
            memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        except OSError:  # no space
            os.unlink(path)
        else:
            _unmapped_paths.add(path)
            return path, memory
        finally:
            os.close(file)
    return None


def map_shared(path: str, size: int) -> np.ndarray:
    """Map another process's file, and delete the file; the memory stays valid. Raises `OSError`."""
    with open(path, "r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    os.unlink(path)
    return memory


def forget_shared(path: str) -> None:
    """Stop tracking a file that its receiver has mapped and deleted."""
    _unmapped_paths.discard(path)


def delete_shared(path: str) -> None:
    """Delete a file that will not be mapped."""
    _unmapped_paths.discard(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@atexit.register
def _delete_all() -> None:
    for path in list(_unmapped_paths):
        delete_shared(path)


# -- copies


def copy_bytes(copies: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy byte arrays, given as (to, from) pairs of equal shape, [n] or [S, n]. Only large copies use several threads:
    a small one takes less time than acquiring the GIL in a thread."""
    large = [pair for pair in copies if pair[0].size >= _MIN_THREADED_BYTES]
    size = sum(new.size for new, _ in large)
    if size < 4 * _MIN_SHARE_BYTES:
        _copy(copies)
        return
    if len(large) < len(copies):
        _copy([pair for pair in copies if pair[0].size < _MIN_THREADED_BYTES])
    share_bytes, shares, share_size = max(_MIN_SHARE_BYTES, size // _MAX_SHARES), [[]], 0
    for new, old in large:
        for part in _parts(new, old, -(-new.size // share_bytes)):
            if share_size >= share_bytes:
                shares.append([])
                share_size = 0
            shares[-1].append(part)
            share_size += part[0].size
    list(_copiers.map(_copy, shares))


def floats(rows: torch.Tensor) -> np.ndarray:
    """Convert rows to fp32 on several threads, because page faults take longer than the conversion."""
    if rows.dtype == torch.float32:
        return rows.numpy()
    new = torch.from_numpy(reused.take(4 * rows.numel())).view(torch.float32).view(rows.shape)
    shares = max(1, min(new.nbytes // _MIN_SHARE_BYTES, _MAX_SHARES))
    list(_copiers.map(torch.Tensor.copy_, new.chunk(shares), rows.chunk(shares)))
    return new.numpy()


def _parts(new: np.ndarray, old: np.ndarray, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Split one copy into `count` smaller copies."""
    if count == 1:
        return [(new, old)]
    axis = 0 if new.ndim == 1 or new.shape[0] > 1 else 1
    return list(zip(np.array_split(new, count, axis), np.array_split(old, count, axis), strict=True))


def _copy(copies: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for new, old in copies:
        new[...] = old
