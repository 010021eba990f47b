"""The one custom op, `patchclamp::site`, that every tap calls, and the runtime it finds at work on its thread.

The op mutates its tensors, so a compiler keeps it in place.  With no runtime at work (profiling, warm-up, an idle
step) it does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class AtWork(Protocol):
    def apply(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None: ...


class _Current(threading.local):
    runtime: AtWork | None = None


_current = _Current()
_library = torch.library.Library("patchclamp", "DEF")
_library.define("site(Tensor(a!) hidden, Tensor(b!)? residual, int point) -> ()")


def _run(hidden: torch.Tensor, residual: torch.Tensor | None, point: int) -> None:
    if _current.runtime is not None:
        _current.runtime.apply(point, hidden, residual)


def _trace(hidden: torch.Tensor, residual: torch.Tensor | None, point: int) -> None:
    return None


_library.impl("site", _run, "CPU")
_library.impl("site", _run, "CUDA")
torch.library.register_fake("patchclamp::site", _trace, lib=_library)

site = torch.ops.patchclamp.site


@contextmanager
def at_work(runtime: AtWork) -> Iterator[None]:
    """Taps on this thread act for `runtime` within."""
    before, _current.runtime = _current.runtime, runtime
    try:
        yield
    finally:
        _current.runtime = before
