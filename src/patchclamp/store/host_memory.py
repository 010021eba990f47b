"""Host memory: pinned slabs, memory that is used again, files that two processes map, and copies by several threads.

The system hands out memory page by page at 1 to 2 GB/s on one thread.  So large memory is asked for in huge pages, is
touched by several threads before CUDA pins it, is made ahead of need, and is used again.

Open memory: what lies in it can be mapped by another process of the machine, so that nothing is copied to it.

It is an anonymous file of the system's (`memfd`), which the owner keeps open, and which others open through `/proc`. So
it takes no room of `/dev/shm`, and it is gone with its owner.
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

from patchclamp.store.free_memory import available_bytes

_NAME = "patchclamp-"
_open: dict[int, tuple[str, int, int]] = {}  # by first address: name, file, and size of all that this process has
_addresses: list[int] = []  # ascending


class Place(NamedTuple):
    """Where bytes lie, for a process that maps them: the file's name and its path, its size, and their offset."""

    name: str
    path: str
    size: int
    offset: int


def make(size: int) -> np.ndarray | None:
    """Memory of `size` bytes that others can map, uint8; None where the system has no such thing."""
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
    """How many files this process may hold open for it: each memory takes two, and a quarter of the limit is enough."""
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
    """The address of an array's first byte."""
    return data.__array_interface__["data"][0]


def place_of(data: np.ndarray) -> Place | None:
    """Where contiguous bytes lie; None for those in other memory."""
    first = address_of(data)
    addresses = _addresses.copy()  # other threads may change it meanwhile
    number = bisect.bisect(addresses, first) - 1
    memory = _open.get(addresses[number]) if number >= 0 else None
    if memory is None or first + data.nbytes > addresses[number] + memory[2]:
        return None
    name, file, size = memory
    return Place(name, f"/proc/{os.getpid()}/fd/{file}", size, first - addresses[number])


def is_open(place: Place) -> bool:
    """Whether the owner of a place still has it. Raises nothing."""
    try:
        return f"/memfd:{place.name}" in os.readlink(place.path)
    except OSError:
        return False


def map_place(place: Place) -> mmap.mmap:
    """Maps the file of a place. Raises `OSError` where it is not that file, as on another machine."""
    if not is_open(place):
        raise FileNotFoundError(f"{place.path} is another file")
    with open(place.path, "r+b", buffering=0) as file:
        return mmap.mmap(file.fileno(), place.size)


logger = logging.getLogger("patchclamp")

SLAB_BYTES = 1 << 26
MIN_PINNED_BYTES, MAX_PINNED_BYTES = 1 << 32, 1 << 35  # of a worker, if nothing else was asked for
SLABS_AHEAD = 4  # slabs that are made ahead of need
MAX_FREE_BYTES = 1 << 28  # bytes that `ReusedMemory` keeps while nobody holds them
_HUGE_BYTES, _PAGE_BYTES = 1 << 21, 4096
_TOUCH_BYTES = 1 << 23  # bytes that one thread touches at once
_MIN_SHARE_BYTES, _MAX_SHARES = 1 << 20, 64  # of a copy: what one thread copies at once, and how many parts there are
_MIN_THREADED_BYTES = 1 << 17  # of a copy that threads make

_copiers = ThreadPoolExecutor(8, thread_name_prefix="patchclamp-copy")
_unmapped_paths: set[str] = set()  # files that no receiver has mapped yet


class HostBlock:
    """Host memory that captured rows lie in.

    data: flat bytes, or None until their copy from the device is queued
    copied: the event after that copy; None for what was never on a device
    """

    __slots__ = ("__weakref__", "copied", "data")

    def __init__(self, data: torch.Tensor | None = None) -> None:
        self.data = data
        self.copied: torch.cuda.Event | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether the bytes are there now; waits for nothing."""
        return self.data is not None and (self.copied is None or self.copied.query())


def default_pinned_bytes(workers: int) -> int:
    """What each of so many workers of this machine may pin: together a quarter of the free memory; 4 to 32 GiB each."""
    return max(MIN_PINNED_BYTES, min(MAX_PINNED_BYTES, available_bytes() // (4 * workers)))


def huge_memory(size: int) -> mmap.mmap:
    """Private memory of `size` bytes or a little more, in huge pages if the system has them."""
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
    """`data` [size] uint8 in pinned memory, which is pinned as long as the slab lives; bytes 0 … `used`−1 are taken."""

    __slots__ = ("__weakref__", "data", "size", "used")

    def __init__(self, memory: np.ndarray, unregister: Callable[[np.ndarray], None]) -> None:
        self.data, self.size, self.used = torch.from_numpy(memory), memory.nbytes, 0
        weakref.finalize(self, unregister, memory).atexit = False


class PinnedSlabs:
    """Slabs of pinned memory, made in the background. At most `limit_bytes` of unused ones are kept."""

    def __init__(
        self,
        limit_bytes: int,
        register: Callable[[np.ndarray], None] = _register,
        unregister: Callable[[np.ndarray], None] = _unregister,
    ) -> None:
        self._limit_bytes, self._register, self._unregister = limit_bytes, register, unregister
        self.is_open = False  # whether other processes are to map new slabs
        self._free: dict[int, list[Slab]] = collections.defaultdict(list)  # by size
        self._coming: collections.deque[Future[Slab]] = collections.deque()
        self._makers = ThreadPoolExecutor(3, thread_name_prefix="patchclamp-pin")
        self._touchers = ThreadPoolExecutor(8, thread_name_prefix="patchclamp-touch")
        self.bytes = 0  # of all slabs that were made and not given up

    def prepare(self) -> None:
        """Has some slabs made in the background."""
        while len(self._free[SLAB_BYTES]) + len(self._coming) < SLABS_AHEAD and self.bytes < self._limit_bytes:
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
        """Takes back a slab that nobody reads or writes any more."""
        slab.used = 0
        if self.bytes <= self._limit_bytes:
            self._free[slab.size].append(slab)
        else:
            self.give_up(slab)

    def give_up(self, slab: Slab) -> None:
        """Lets go of a slab that somebody may read yet; its memory stays as long as they do."""
        self.bytes -= slab.size

    def close(self) -> None:
        """Stops the threads and drops the unused slabs."""
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
        except MemoryError as error:  # copies to it are slower, and as right
            logger.warning("patchclamp: captures go to ordinary memory: %s", error)
            return Slab(memory, lambda memory: None)
        return Slab(memory, self._unregister)


def _touch(memory: np.ndarray) -> None:
    memory[::_PAGE_BYTES] = 0


# -- memory that is used again


class ReusedMemory:
    """Memory for rows that callers hold; what nobody holds any more is used again."""

    def __init__(self) -> None:
        self._free: collections.deque[mmap.mmap] = collections.deque()

    def take(self, size: int) -> np.ndarray:
        """`size` bytes; a few are ordinary memory."""
        if size < _HUGE_BYTES // 2:
            return np.empty(size, np.uint8)
        for memory in list(self._free):
            if size <= len(memory) <= 2 * size:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._free.remove(memory)
                    return self._lend(memory, size)
        return self._lend(huge_memory(size), size)

    def _lend(self, memory: mmap.mmap, size: int) -> np.ndarray:
        data = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(data, self._take_back, memory).atexit = False
        return data

    def _take_back(self, memory: mmap.mmap) -> None:
        # runs wherever the last reference happens to go: it may wait for no lock
        if sum(map(len, list(self._free))) + len(memory) <= MAX_FREE_BYTES:
            self._free.append(memory)


reused = ReusedMemory()


# -- files that two processes map


def make_shared(size: int) -> tuple[str, np.ndarray] | None:
    """A new file's path and its memory of `size` bytes; None where no device has room.

    All of it is reserved at once, so that a full device is an error and not a crash.
    """
    for folder in ("/dev/shm", tempfile.gettempdir()):
        try:
            file, path = tempfile.mkstemp(prefix="patchclamp-", dir=folder)
        except OSError:
            continue
        try:
            os.posix_fallocate(file, 0, size)
            memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        except OSError:  # no room here
            os.unlink(path)
        else:
            _unmapped_paths.add(path)
            return path, memory
        finally:
            os.close(file)
    return None


def map_shared(path: str, size: int) -> np.ndarray:
    """The memory of a file that another process made; the file is deleted, the memory stays. Raises `OSError`."""
    with open(path, "r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    os.unlink(path)
    return memory


def forget_shared(path: str) -> None:
    """The receiver has mapped, and so deleted, a file."""
    _unmapped_paths.discard(path)


def delete_shared(path: str) -> None:
    """Deletes a file that nobody will map."""
    _unmapped_paths.discard(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@atexit.register
def _delete_all() -> None:
    for path in list(_unmapped_paths):
        delete_shared(path)


# -- copies


def copy_bytes(copies: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copies arrays of bytes, pairs (to, from) of one shape, [n] or [S, n]; large ones with several threads. A small
    one takes less time than a thread waits for its turn in Python."""
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


def _parts(new: np.ndarray, old: np.ndarray, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """A copy as `count` copies."""
    if count == 1:
        return [(new, old)]
    axis = 0 if new.ndim == 1 or new.shape[0] > 1 else 1
    return list(zip(np.array_split(new, count, axis), np.array_split(old, count, axis), strict=True))


def _copy(copies: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for new, old in copies:
        new[...] = old
