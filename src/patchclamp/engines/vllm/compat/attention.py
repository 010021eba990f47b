"""What attention makes, where vLLM's attention op has made it: in the op's own Python, which no compiler sees.

A tap on the tensor as the model hands it on would be one on a view of the op's output, which Inductor copies, and back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from patchclamp.engines.vllm.compat.seams import require, version
from patchclamp.errors import SeamMoved


def after(layer: Any, tap: Callable[[torch.Tensor], None]) -> None:
    """Hands every result of an attention layer, [T, H, E] or [T, H · E], to a tap, to be changed in place.

    Raises `SeamMoved` where the layer does not compute as it did.
    """
    require("attention")
    inner = getattr(getattr(layer, "impl", None), "forward", None)
    if inner is None or "output" not in inspect.signature(inner).parameters:
        raise SeamMoved(f"vLLM {version()} does not give {type(layer).__name__} an output to write to")
    signature = inspect.signature(inner)

    def forward(*args: Any, **named: Any) -> Any:
        made = inner(*args, **named)
        tap(named["output"] if "output" in named else signature.bind(*args, **named).arguments["output"])
        return made

    layer.impl.forward = forward
