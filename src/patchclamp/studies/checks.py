"""Numbers that studies are given, checked before anything runs. NumPy's whole numbers are as good as Python's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from patchclamp.call import is_token_id
from patchclamp.errors import ProgramError


def check_whole(value: Any, path: str, least: int = 0) -> int:
    """A whole number from `least` on. Raises `ProgramError` for anything else."""
    if not is_token_id(value) or value < least:
        raise ProgramError(f"a whole number from {least} on is needed, not {value!r}", path)
    return int(value)


def check_batch(batch: Any) -> int:
    """How many runs are submitted at a time."""
    if not is_token_id(batch) or batch < 1:
        raise ProgramError(f"runs are submitted at least one at a time, not {batch!r}", "batch")
    return int(batch)


def numbers_of(layers: Any) -> list[int]:
    """Layers as a list: one number, or several. Raises `ProgramError` for anything else."""
    layers = layers.tolist() if isinstance(layers, np.ndarray) else layers
    several = list(layers) if isinstance(layers, Iterable) else [layers]
    for layer in several:
        if not is_token_id(layer):
            raise ProgramError(f"a layer is a whole number, not {layer!r}", "layers")
    return [int(layer) for layer in several]
