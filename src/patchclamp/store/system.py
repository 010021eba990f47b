"""Durable file writes, and the amount of free memory."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
from pathlib import Path

V1 = "/sys/fs/cgroup/memory"
CGROUPS = (  # folder, files with limit and usage, and the entries of `memory.stat` for cached files
    ("/sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")),
    (V1, "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def available_bytes() -> int:
    """Return the bytes that this process can still allocate within the container's limit, including file cache."""
    import psutil

    free = psutil.virtual_memory().available
    for folder, limit, used, file in CGROUPS:
        with contextlib.suppress(OSError, ValueError, KeyError):  # no container, no limit ("max"), or another version
            counts = dict(line.split() for line in (Path(folder) / "memory.stat").read_text().splitlines())
            taken = int((Path(folder) / used).read_text()) - sum(int(counts[name]) for name in file)
            free = min(free, max(0, int((Path(folder) / limit).read_text()) - taken))
    return free


def sync(path: Path) -> None:
    """Block until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically and durably, by renaming a temporary file. Several processes may write the same
    content at once. Temporary files of killed processes are removed. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    with open(scratch, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.replace(scratch, path)
    except FileNotFoundError:  # another process wrote the file and removed this temporary file
        if not path.exists():
            raise
    for left in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.new"):
        left.unlink(missing_ok=True)
    sync(path.parent)
