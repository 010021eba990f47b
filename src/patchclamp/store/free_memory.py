"""The amount of free memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

V1 = "/sys/fs/cgroup/memory"
CGROUPS = (  # the folder, the files of limit and usage, and the entries of `memory.stat` for cached files
    ("/sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")),
    (V1, "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def available_bytes() -> int:
    """The bytes that this process can still allocate, within the container's limit; file cache is reclaimable."""
    import psutil

    free = psutil.virtual_memory().available
    for folder, limit, used, file in CGROUPS:
        with contextlib.suppress(OSError, ValueError, KeyError):  # no container, no limit ("max"), or another version
            counts = dict(line.split() for line in (Path(folder) / "memory.stat").read_text().splitlines())
            taken = int((Path(folder) / used).read_text()) - sum(int(counts[name]) for name in file)
            free = min(free, max(0, int((Path(folder) / limit).read_text()) - taken))
    return free
