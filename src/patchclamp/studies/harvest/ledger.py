"""The ledger of a part under way: the prompts whose rows are on the disk, so that a resumed harvest leaves them out.

It is a file of numbers, 8 bytes each, in the order in which prompts were finished. A number is written after the rows
are on the disk; half a number at the end is what a stopped machine left, and is no entry.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from patchclamp.errors import PatchclampError

ENTRY = np.dtype("<i8")


class Ledger:
    """An open ledger, which one process at a time may have.

    Raises: `PatchclampError` if another process has it.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _locked(descriptor):
            os.close(descriptor)
            raise PatchclampError(f"another process is harvesting into {path.parent}: let it end, or stop it")
        size = os.fstat(descriptor).st_size // ENTRY.itemsize * ENTRY.itemsize
        os.ftruncate(descriptor, size)
        self.finished = np.frombuffer(os.pread(descriptor, size, 0), ENTRY).astype(np.int64)
        os.lseek(descriptor, size, os.SEEK_SET)
        self._descriptor: int | None = descriptor

    def add(self, prompts: Iterable[int]) -> None:
        """Writes down finished prompts; they are on the disk when it returns."""
        assert self._descriptor is not None
        os.write(self._descriptor, np.fromiter(prompts, ENTRY).tobytes())
        os.fsync(self._descriptor)

    def clear(self) -> None:
        """Takes all entries out."""
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.finished = self.finished[:0]

    def close(self) -> None:
        """Lets others have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _locked(descriptor: int) -> bool:
    """Whether this process has the file now; where there are no such locks, it has."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
