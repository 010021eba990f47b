"""How many files this process may have open: a memory map keeps its file open."""

from __future__ import annotations

import sys

from patchclamp.errors import CapacityError

SPARE_FILES = 256


def allow_files(count: int, times: int) -> int:
    """Lets this process have `count` files open, that often as far as it may, and some more. Returns how often it may.

    Raises: `CapacityError` if it may not once.
    """
    try:
        import resource
    except ImportError:
        return times
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    often = min((most - SPARE_FILES) // count, times)
    if often < 1:
        raise CapacityError(
            f"{count} files are open at a time, and this process may have {most} open: raise that limit (ulimit -Hn), "
            "or take fewer sites, fewer and larger shards (shard_rows), or another number of parts"
        )
    wanted = often * count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return often
