"""Code on rows: what `Apply` runs, called so that whatever it does is its own run's error."""

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
    """Raises `EngineError` on a thread that runs code: an engine would wait for the step that waits for it."""
    if _within.code:
        raise EngineError("called from within Apply, where it would wait for itself: have what it needs before the run")


def call(code: Code, rows: torch.Tensor, point: int, position: np.ndarray) -> torch.Tensor:
    """What code makes of rows [n, W] at a point and at positions [n], in their dtype and on their device. Raises
    `RunError` for whatever it raises, and for anything but as many rows."""
    import torch

    _within.code = True
    try:
        with torch.inference_mode(False), torch.no_grad():
            known: dict[str, Any] = {}
            if "positions" in code.arguments:
                known["positions"] = torch.tensor(position, dtype=torch.int64, device=rows.device)
            if "site" in code.arguments:
                known["site"] = code.sites[point]
            made = code.fn(rows.clone(), **known)  # an ordinary tensor of its own, to be kept or changed
            if not isinstance(made, torch.Tensor):
                raise TypeError(f"it must give a tensor {list(rows.shape)}, and gave {type(made).__name__}")
            if made.shape != rows.shape or made.layout != torch.strided:
                raise TypeError(f"it must give a tensor {list(rows.shape)}, and gave {list(made.shape)}, {made.layout}")
            return made.detach().to(device=rows.device, dtype=rows.dtype, copy=True)
    except BaseException as error:  # it must not end the engine, whatever it is
        raise RunError(f"Apply raised {type(error).__name__}{_said(error)}", code.path) from error
    finally:
        _within.code = False


def _said(error: BaseException) -> str:
    try:
        return f": {error}"
    except BaseException:  # even to say what it is may fail
        return ""
