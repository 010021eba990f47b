"""The one custom op, `patchclamp::site`, that every tap calls, and the runtime it finds at work on its thread.

The op mutates its tensors, so a compiler keeps it in place.  With no runtime at work (profiling, warm-up, an idle
step) it does nothing.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patchclamp.kernels import switches


class AtWork(Protocol):
    def apply(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None: ...


class _Current(threading.local):
    runtime: AtWork | None = None
    compiled = False


_current = _Current()
_library = torch.library.Library("patchclamp", "DEF")
_library.define("site(Tensor(a!) hidden, Tensor(b!)? residual, int point) -> ()")


def acting(hidden: torch.Tensor, residual: torch.Tensor | None, point: int) -> None:
    """What the op does: on its own for taps that no compiler sees."""
    if _current.runtime is not None:
        _current.runtime.apply(point, hidden, residual)


def _trace(hidden: torch.Tensor, residual: torch.Tensor | None, point: int) -> None:
    return None


_library.impl("site", acting, "CPU")
_library.impl("site", acting, "CUDA")
torch.library.register_fake("patchclamp::site", _trace, lib=_library)

site = torch.ops.patchclamp.site


class _Passing(TorchDispatchMode):
    """Calls what it is asked about."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args)


def shorten(packet: Any) -> bool:
    """Makes compiled code that runs find `acting` under the op's name, where it looks at every call.

    The way through PyTorch's dispatcher takes 2 µs, and 7 where caches are cold, as they are in a step, at each of
    hundreds of taps.  Whoever else looks finds the op.  Where PyTorch does not allow it, everybody does, and the answer
    is False.
    """
    if not switches.enabled("op_class"):
        return False
    stock = type(packet)
    try:
        op = packet.default

        class Packet(stock):
            @property
            def default(self) -> Any:
                return acting if _current.compiled else op

        with _Passing():  # PyTorch looks the op up by its name once, when a mode first meets it, and remembers it
            op(torch.zeros(1), None, 0)
        packet.__class__ = Packet
        if packet.default is not op:
            raise TypeError("the op is not found under its name")
    except Exception as error:  # whatever another PyTorch raises
        with suppress(Exception):
            packet.__class__ = stock
        switches.give_up("op_class", error)
        return False
    return True


shorten(site)


class at_work:
    """Taps on this thread act for `runtime` within; `compiled`: all that runs there was compiled before, and nothing is
    traced or compiled (Dynamo would not know what it finds)."""

    __slots__ = ("_before", "_now")

    def __init__(self, runtime: AtWork, compiled: bool = False) -> None:
        self._now = runtime, compiled

    def __enter__(self) -> None:
        self._before = _current.runtime, _current.compiled
        _current.runtime, _current.compiled = self._now

    def __exit__(self, *error: object) -> None:
        _current.runtime, _current.compiled = self._before
