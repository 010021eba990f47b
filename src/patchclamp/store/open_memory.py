"""Open memory: what lies in it can be mapped by another process of the machine, so that nothing is copied to it.

It is an anonymous file of the system's (`memfd`), which the owner keeps open, and which others open through `/proc`. So
it takes no room of `/dev/shm`, and it is gone with its owner.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import secrets
import weakref
from typing import NamedTuple

import numpy as np

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
