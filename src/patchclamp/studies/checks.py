"""Numbers that studies are given, checked before anything runs. NumPy's whole numbers are as good as Python's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, SupportsIndex, TypeVar

import numpy as np

from patchclamp.call import is_token_id
from patchclamp.errors import ProgramError
from patchclamp.language.conversions import as_flag
from patchclamp.language.ranges import Range, as_integer
from patchclamp.lm import LM

P = ParamSpec("P")
R = TypeVar("R")


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


def as_lm(lm: Any, path: str = "lm") -> LM:
    if not isinstance(lm, LM):
        raise ProgramError(f"expected an LM, got {type(lm).__name__} {lm!r:.100}; pc.LM(...) loads one", path)
    return lm


def as_items(items: Any, path: str) -> list[Any]:
    """A list of things. Raises `ProgramError` for text, bytes and mappings, whose characters or keys are not meant."""
    items = items.tolist() if hasattr(items, "tolist") else items
    if isinstance(items, (str, bytes, bytearray, Mapping)) or not isinstance(items, Iterable):
        raise ProgramError(f"expected a list, got {type(items).__name__} {items!r:.100}", path)
    return list(items)


def as_layers(layers: Any, path: str = "layers") -> Any:
    """Layers as people write them: None for all, a whole number, a range, its text, or a list of these."""
    if layers is None or isinstance(layers, (str, slice, Range)):
        return layers
    try:
        if isinstance(layers, SupportsIndex) and getattr(layers, "shape", ()) == ():
            return as_integer(layers)
        return [one if isinstance(one, (slice, Range)) else as_integer(one) for one in as_items(layers, path)]
    except ProgramError as error:
        raise error if error.path else error.under(path) from None


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A study whose arguments of a known name are read before it starts: one reader for each name."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def study(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if name in READERS and not (value is None and signature.parameters[name].default is None):
                bound.arguments[name] = READERS[name](value, name)
        return function(*bound.args, **bound.kwargs)

    return study


READERS: dict[str, Callable[[Any, str], Any]] = {
    "lm": as_lm, "on": as_lm, "layers": as_layers, "target_layers": as_layers, "strengths": as_items,
    "scales": as_items, "normed": as_flag, "chat": as_flag, "sums": as_flag, "relative": as_flag,
    "perplexity": as_flag, "quick": as_flag, "show_progress": as_flag,
}  # fmt: skip


def numbers_of(layers: Any, path: str = "layers") -> list[int]:
    """Layers as a list: one number, or several. Raises `ProgramError` for anything else."""
    layers = layers.tolist() if isinstance(layers, np.ndarray) else layers
    several = list(layers) if isinstance(layers, Iterable) else [layers]
    for layer in several:
        if not is_token_id(layer):
            raise ProgramError(f"a layer is a whole number, not {layer!r}", path)
    return [int(layer) for layer in several]
