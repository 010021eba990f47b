"""The tap on attention's result, in the Python of vLLM's attention op, which no compiler sees.

A tap further on, in the model, would be on a view of the op's output, and Inductor would copy it there and back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from patchclamp.engines.vllm.compat.seams import forwards, require_on, version
from patchclamp.errors import SeamMoved


def after(layer: Any, tap: Callable[[torch.Tensor], None]) -> None:
    """Gives every result of an attention layer, [T, H, E] or [T, H · E], to a tap that may change it in place.

    Raises `SeamMoved` where the layer's implementation takes no output to write to.
    """
    require_on("attention layer", layer)
    require_on("attention implementation", layer.impl)
    inner = layer.impl.forward
    signature = inspect.signature(inner)
    if "output" not in signature.parameters:
        raise SeamMoved(f"vLLM {version()} does not give {type(layer).__name__} an output to write to")

    @forwards(inner)
    def forward(*args: Any, **named: Any) -> Any:
        result = inner(*args, **named)
        tap(named["output"] if "output" in named else signature.bind(*args, **named).arguments["output"])
        return result

    layer.impl.forward = forward
