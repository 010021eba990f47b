"""One site's rows of one shard: a safetensors file of full size from the beginning, whose rows are written in any order
through a memory map. The data begin at 4,096 bytes, so rows of whole pages are whole pages of the file."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from patchclamp.errors import CapacityError, ProgramError
from patchclamp.studies.harvest.dtypes import SAFETENSORS, STORED

DATA_OFFSET = 4096


def header(name: str, dtype: str, rows: int, width: int, metadata: dict[str, str]) -> bytes:
    """The first `DATA_OFFSET` bytes of a safetensors file of one tensor. Spaces fill the header, as in the format."""
    size = rows * width * STORED[dtype].itemsize
    tensor = {"dtype": SAFETENSORS[dtype], "shape": [rows, width], "data_offsets": [0, size]}
    text = json.dumps({"__metadata__": metadata, name: tensor}).encode()
    room = DATA_OFFSET - 8
    if len(text) > room:
        raise ProgramError(f"{len(text)} bytes of header do not fit into {room}")
    return room.to_bytes(8, "little") + text.ljust(room)


class ShardFile:
    """A file that is being filled. `rows` is what it holds, [rows, width] in its stored dtype."""

    def __init__(self, path: Path, head: bytes, dtype: str, rows: int, width: int) -> None:
        self.path = path
        size = DATA_OFFSET + rows * width * STORED[dtype].itemsize
        with open(path, "r+b" if path.exists() else "w+b") as file:
            _reserve(file.fileno(), size, path)
            os.pwrite(file.fileno(), head, 0)
            self._map = mmap.mmap(file.fileno(), size)
        if hasattr(mmap, "MADV_RANDOM"):
            # else every first touch of a page reads what lies around it: seven times as long
            self._map.madvise(mmap.MADV_RANDOM)
        self.rows = _rows(self._map, dtype, rows, width)

    def sync(self) -> None:
        """Returns when all that was written is on the disk."""
        sync(self.path)

    def close(self) -> None:
        """Lets the memory map go, which ends when nobody reads or writes it any more."""
        del self.rows, self._map


def open_rows(path: Path) -> tuple[str, dict[str, str], np.ndarray]:
    """The dtype, the metadata and the rows [rows, width], mapped to be read, of a shard's file.

    Raises: `ProgramError` for another file, `CapacityError` where too many are open.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(min(length, DATA_OFFSET)))
            metadata = head.pop("__metadata__")
            ((_, tensor),) = head.items()
            dtype = {name: dtype for dtype, name in SAFETENSORS.items()}[tensor["dtype"]]
            rows, width = tensor["shape"]
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return dtype, metadata, _rows(mapped, dtype, rows, width, 8 + length)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise CapacityError(f"{path} cannot be mapped: too many files are open; raise ulimit -n") from None
        raise ProgramError(f"{path} is no shard of a harvest: {type(error).__name__}: {error}") from None


class ReadRows:
    """The rows of a shard's file, read a slice at a time into the same memory: the pages of a file that was written all
    over take several times as long to be mapped, one by one.

    dtype, shape: of the rows, [rows, width]
    """

    def __init__(self, path: Path) -> None:
        self.dtype, _, mapped = open_rows(path)
        self.shape: tuple[int, int] = mapped.shape
        self._row_bytes = self.shape[1] * STORED[self.dtype].itemsize
        self._room: Any = np.empty((0, self.shape[1]), STORED[self.dtype])
        self._file = path.open("rb", buffering=0)
        self._offset = 8 + int.from_bytes(self._file.read(8), "little")

    def __getitem__(self, which: slice) -> np.ndarray:
        """Some rows; the next ones take their place."""
        first, end, _ = which.indices(self.shape[0])
        if len(self._room) < end - first:
            self._room = np.empty((end - first, self.shape[1]), STORED[self.dtype])
        rows = self._room[: max(end - first, 0)]
        if not rows.size:
            return rows
        self._file.seek(self._offset + first * self._row_bytes)
        if self._file.readinto(memoryview(rows).cast("B")) != rows.nbytes:
            raise ProgramError(f"{self._file.name} ends before its rows do")
        return rows

    def close(self) -> None:
        self._file.close()


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_sealed(path: Path, content: bytes) -> None:
    """Writes a file so that it is there whole, or not at all. Processes may write the same at a time; what one that was
    killed left of the same goes."""
    same = f"{path.name}.{hashlib.sha256(content).hexdigest()[:8]}"
    beside = path.with_name(f"{same}.{os.getpid()}.new")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.replace(beside, path)
    except FileNotFoundError:  # another process has written the same
        if not path.exists():
            raise
    for left in path.parent.glob(f"{glob.escape(same)}.*.new"):
        left.unlink(missing_ok=True)
    sync(path.parent)


def _rows(mapped: mmap.mmap, dtype: str, rows: int, width: int, offset: int = DATA_OFFSET) -> np.ndarray:
    return np.frombuffer(mapped, STORED[dtype], rows * width, offset).reshape(rows, width)


def _reserve(descriptor: int, size: int, path: Path) -> None:
    """Gives the file its size and its room on the disk: a write through a map cannot say that the disk is full."""
    if os.fstat(descriptor).st_size == size:
        return
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        os.ftruncate(descriptor, size)
    except OSError as error:
        raise CapacityError(f"{path} needs {size} bytes, and there is no room for them: {error}") from None
