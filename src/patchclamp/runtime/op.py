"""The custom op `patchclamp::site`, which every tap calls. It dispatches to the thread's active runtime.

The op's schema says that it mutates its tensors, so a compiler keeps it in place. Without an active runtime (while vLLM
profiles or warms up, and in idle steps), it does nothing.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patchclamp.errors import ModelError
from patchclamp.kernels import switches


class AtWork(Protocol):
    def apply(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None: ...


class _Current(threading.local):
    runtime: AtWork | None = None
    compiled = False


_current = _Current()
_library = torch.library.Library("patchclamp", "DEF")
_library.define("site(Tensor(a!) hidden, Tensor(b!)? residual, int point, int layer=-1, Tensor? points=None) -> ()")


def acting(
    hidden: torch.Tensor, residual: torch.Tensor | None, point: int, layer: int = -1, points: torch.Tensor | None = None
) -> None:
    """Implement the op. Taps outside compiled code call this function directly.

    point: the index of the tap's point; with `points` (from `carrying`), its index in `points`
    layer: the tap's layer, or −1; only for the compiler
    """
    if points is not None:
        point = points.patchclamp_points[point]  # type: ignore[attr-defined]
    if _current.runtime is not None:
        _current.runtime.apply(point, hidden, residual)


def carrying(points: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a tensor that carries a layer's points to the op, so compiled code is the same for every layer."""
    if device.type == "meta":  # the op would silently do nothing
        raise ModelError("a traced graph has no device, so its taps would do nothing")
    tensor = torch.zeros(1, device=device)
    tensor.patchclamp_points = points  # type: ignore[attr-defined]
    return tensor


def _trace(
    hidden: torch.Tensor, residual: torch.Tensor | None, point: int, layer: int = -1, points: torch.Tensor | None = None
) -> None:
    return None


_library.impl("site", acting, "CPU")
_library.impl("site", acting, "CUDA")
torch.library.register_fake("patchclamp::site", _trace, lib=_library)

site = torch.ops.patchclamp.site


class _Passing(TorchDispatchMode):
    """A dispatch mode that calls each function unchanged."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args)


def shorten(packet: Any) -> bool:
    """Let compiled code call `acting` without PyTorch's dispatcher. Returns True on success.

    Compiled code looks the op up by name at every call. The lookup returns `acting` to compiled code and the op to all
    other code. The dispatcher takes 2 µs, or 7 µs with cold caches as in a step, at each of hundreds of taps.
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

        with _Passing():  # a mode looks the op up by name on its first call, and caches it
            op(torch.zeros(1), None, 0)
        packet.__class__ = Packet
        if packet.default is not op:
            raise TypeError("the op is not found under its name")
    except Exception as error:  # another version of PyTorch
        with suppress(Exception):
            packet.__class__ = stock
        switches.give_up("op_class", error)
        return False
    return True


shorten(site)


class at_work:
    """A context manager within which taps on this thread call `runtime`; with None they do nothing.

    compiled: True if all code in the context is already compiled. Nothing may be traced or compiled then: Dynamo does
        not support the replacement made by `shorten`
    """

    __slots__ = ("_before", "_within")

    def __init__(self, runtime: AtWork | None, compiled: bool = False) -> None:
        self._within = runtime, compiled

    def __enter__(self) -> None:
        self._before = _current.runtime, _current.compiled
        _current.runtime, _current.compiled = self._within

    def __exit__(self, *error: object) -> None:
        _current.runtime, _current.compiled = self._before
