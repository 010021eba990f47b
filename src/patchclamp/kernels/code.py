"""Run the functions of `Apply` ops on rows. An exception in a function fails only its own run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from patchclamp.errors import EngineError, RunError
from patchclamp.plan.bind import Code

if TYPE_CHECKING:
    import numpy as np
    import torch


class _Within(threading.local):
    code = False


_within = _Within()


def check_outside() -> None:
    """Raise `EngineError` on a thread that is running code: a call to the engine would wait for its own step."""
    if _within.code:
        raise EngineError("a call within pc.Apply would deadlock: compute what the function needs before the run")


def call(code: Code, rows: torch.Tensor, point: int, position: np.ndarray) -> torch.Tensor:
    """Run code on rows [n, W] at a point and at positions [n]; returns rows [n, W] of the same dtype and device.

    Raises `RunError` if the code raises, or returns anything but a strided tensor [n, W] of real numbers.
    """
    import torch

    _within.code = True
    try:
        with torch.inference_mode(False), torch.no_grad():
            arguments: dict[str, Any] = {}
            if "positions" in code.arguments:
                arguments["positions"] = torch.tensor(position, dtype=torch.int64, device=rows.device)
            if "site" in code.arguments:
                arguments["site"] = code.sites[point]
            result = code.fn(rows.clone(), **arguments)  # a separate normal tensor, which `fn` may keep or modify
            if not isinstance(result, torch.Tensor):
                raise TypeError(f"expected a result tensor {list(rows.shape)}, got {type(result).__name__}")
            if result.shape != rows.shape or result.layout != torch.strided:
                raise TypeError(
                    f"expected a result tensor {list(rows.shape)}, got {list(result.shape)}, {result.layout}"
                )
            if result.is_complex():  # conversion to the rows' dtype would discard the imaginary part
                raise TypeError(f"expected a result of real numbers, got {result.dtype}: return its .real or .abs()")
            return result.detach().to(device=rows.device, dtype=rows.dtype, copy=True)
    except BaseException as error:  # even SystemExit must not end the engine
        raise RunError(f"{code.what} raised {type(error).__name__}{_text_of(error)}", code.path) from error
    finally:
        _within.code = False


def _text_of(error: BaseException) -> str:
    try:
        return f": {error}"
    except BaseException:  # its __str__ is user code too
        return ""
