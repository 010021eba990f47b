"""How often Python's garbage collector goes through everything.

It does so when a quarter more objects have come than it last found, which a sweep's cells soon are. With PyTorch and
vLLM loaded that takes 0.2 s, in which nothing else runs.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

YOUNG = 200  # collections of younger objects between two of all, instead of 10: some million new objects

_lock = threading.RLock()  # the collector itself may end a call that nobody holds
_inside = 0  # calls under way
_usual = 0  # what the threshold was before them


@contextlib.contextmanager
def rarely() -> Iterator[None]:
    """While it lasts, all objects are gone through less often; young ones as always."""
    global _inside, _usual
    with _lock:
        _inside += 1
        first, second, third = gc.get_threshold()
        if _inside == 1:
            _usual = third
            gc.set_threshold(first, second, max(third, YOUNG))
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            first, second, third = gc.get_threshold()
            if not _inside and third == max(_usual, YOUNG):  # else somebody has set it meanwhile
                gc.set_threshold(first, second, _usual)
