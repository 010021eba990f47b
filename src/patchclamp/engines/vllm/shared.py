"""Captured rows on their way to another process of the machine: through a file in shared memory.

The sender writes it (so a full device is an error and not a crash), the receiver maps it and deletes it; then it lives
as long as the tensor does.  Small ones, and where there is no room, travel as safetensors in the answer itself.
"""

from __future__ import annotations

import atexit
import collections
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import safetensors.torch
import torch

SMALL = 1 << 20  # bytes that travel in the answer
_SHARE = 1 << 23  # bytes written at once
_FORGOTTEN_S = 300.0  # a file that nobody fetched by then is deleted

_writers = ThreadPoolExecutor(8, thread_name_prefix="patchclamp-write")
_handed: collections.deque[tuple[float, str]] = collections.deque()


def hand(positions: np.ndarray, rows: list[torch.Tensor], joined: Callable[[], torch.Tensor], files: bool) -> Any:
    """What `take` in another process makes positions [T] and rows [T, W] of.

    `rows` are contiguous parts, in order; `joined()` is all of them in one. `files`: the receiver can open ours.
    """
    _tidy()
    size = sum(part.nbytes for part in rows)
    path = _written(rows, size) if files and size > SMALL else None
    if path is None:
        return safetensors.torch.save({"positions": torch.from_numpy(positions), "rows": joined().contiguous()})
    _handed.append((time.monotonic(), path))
    shape = [sum(len(part) for part in rows), rows[0].shape[-1]]
    return {"path": path, "positions": positions.tobytes(), "shape": shape, "dtype": str(rows[0].dtype)[6:]}


def take(handed: Any) -> tuple[np.ndarray, torch.Tensor]:
    """Positions and rows that were handed over. Raises `FileNotFoundError` if the file is not to be seen from here."""
    if isinstance(handed, bytes):
        read = safetensors.torch.load(handed)
        return read["positions"].numpy(), read["rows"]
    shape, dtype = handed["shape"], getattr(torch, handed["dtype"])
    if not os.path.exists(handed["path"]):
        raise FileNotFoundError(handed["path"])
    rows = torch.from_file(handed["path"], shared=True, size=shape[0] * shape[1], dtype=dtype)
    os.unlink(handed["path"])
    return np.frombuffer(handed["positions"], np.int64), rows.view(shape)


def _written(rows: list[torch.Tensor], size: int) -> str | None:
    for folder in ("/dev/shm", tempfile.gettempdir()):
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            continue
        file, path = tempfile.mkstemp(prefix="patchclamp-", dir=folder)
        try:
            _write(file, rows)
            return path
        except OSError:  # no room here
            os.unlink(path)
        finally:
            os.close(file)
    return None


def _write(file: int, rows: list[torch.Tensor]) -> None:
    shares, at = [], 0
    for part in rows:
        data = memoryview(part.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        shares += [(data[i : i + _SHARE], at + i) for i in range(0, len(data), _SHARE)]
        at += len(data)
    written = [_writers.submit(_write_all, file, *share) for share in shares]
    wait(written)  # all of them, before the file is closed
    for share in written:
        share.result()


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done


def _tidy(everything: bool = False) -> None:
    """Deletes files that nobody has fetched."""
    while _handed and (
        everything or time.monotonic() - _handed[0][0] > _FORGOTTEN_S or not os.path.exists(_handed[0][1])
    ):
        path = _handed.popleft()[1]
        if os.path.exists(path):
            os.unlink(path)


atexit.register(_tidy, everything=True)
