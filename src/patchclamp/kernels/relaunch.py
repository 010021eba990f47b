"""Relaunch a Triton kernel without the overhead of Triton's own launch, which takes twice the host time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from patchclamp.kernels import switches

PREFIX = ("gridX", "gridY", "gridZ", "stream", "function")
# The launcher's parameters in Triton 3.5 and 3.6, and in 3.7 to 3.9. In both, the next four positional arguments are
# metadata and hooks. They are None, so a profiler that hooks launches sees only a kernel's first launch.
LAUNCHERS = (
    (*PREFIX, "args"), (*PREFIX, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"),
)  # fmt: skip


def relauncher(kernel: Any, same: tuple[int, ...], constants: tuple[Any, ...], device: int) -> Callable[..., None]:
    """Return `launch(programs, *args)`, which relaunches a kernel on the current stream with `constants`."""

    def plain(programs: int, *args: Any) -> None:
        kernel[programs, 1, 1](*same, *args, *constants)

    try:
        run = kernel.run
        parameters = tuple(inspect.signature(type(run).__call__).parameters)[1:]
        function, metadata, stream = kernel.function, kernel.packed_metadata, torch._C._cuda_getCurrentRawStream
    except (AttributeError, TypeError, ValueError) as error:  # another Triton version
        switches.give_up("launcher", error)
        return plain
    if parameters not in LAUNCHERS or not switches.enabled("launcher"):
        return plain

    def straight(programs: int, *args: Any, held: Any = kernel) -> None:  # `held` keeps the kernel loaded
        try:
            run(programs, 1, 1, stream(device), function, metadata, None, None, None, *same, *args, *constants)
        except Exception as error:  # other launchers may raise anything
            switches.give_up("launcher", error)
            plain(programs, *args)

    return straight
