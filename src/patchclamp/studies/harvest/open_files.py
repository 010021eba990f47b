"""How many files this process may have open: a memory map keeps its file open."""

from __future__ import annotations

import sys

from patchclamp.errors import CapacityError

SPARE_FILES = 256
MOST_ON_MACOS = 10_240  # whatever its limit says
WRITING = "take fewer sites, fewer and larger shards (shard_rows), or another number of parts"
READING = "read fewer sites at a time, or part after part (interleave=False)"


def allow_files(count: int, times: int, beside: int = 0, advice: str = WRITING) -> int:
    """Lets this process have `count` files open, that often as far as it may, and `beside` and some more. Returns how
    often it may.

    Raises: `CapacityError` if it may not once.
    """
    try:
        import resource
    except ImportError:
        return times
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    most = min(most, MOST_ON_MACOS) if sys.platform == "darwin" else most
    more = SPARE_FILES + beside
    often = min((most - more) // max(count, 1), times)
    wanted = often * count + more
    if often < 1:
        raise CapacityError(
            f"{count + beside} files are open at a time, and this process may have {most} open: raise that limit "
            f"(ulimit -Hn), or {advice}"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return often
