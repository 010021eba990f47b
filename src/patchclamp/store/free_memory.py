"""How much memory is left."""

from __future__ import annotations

import contextlib
from pathlib import Path


def available_bytes() -> int:
    """Memory that this process can still take: what the machine has left, within the container's own limit."""
    import psutil

    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        limit, used = (Path("/sys/fs/cgroup", f"memory.{name}").read_text() for name in ("max", "current"))
        free = min(free, max(0, int(limit) - int(used)))
    return free
