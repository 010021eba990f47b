"""Recipes: common interventions, each as a trace (`traced`) and as a program written by hand (`explicit`).

`docs/recipes.md` prints them, and the tests run them on every engine.
A recipe takes a `pc.LM` and returns what it read, by name: tensors, and lists of token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.recipes import explicit, traced

Values = dict[str, Any]
Function = Callable[[Any], Values]


class Recipe(NamedTuple):
    """One intervention in both forms; they return the same values."""

    name: str
    traced: Function
    explicit: Function


RECIPES: dict[str, Recipe] = {
    name: Recipe(name, getattr(traced, name), getattr(explicit, name)) for name in traced.__all__
}


def gap(value: Any, reference: Any) -> float:
    """The worst row's ‖a − b‖₂ / ‖b‖₂; of token ids the share that differs; infinite where shapes differ."""
    if isinstance(value, list):
        longest = max(len(value), len(reference))
        same = sum(a == b for a, b in zip(value, reference, strict=False))
        return (longest - same) / max(longest, 1)
    a, b = (np.asarray(x, np.float64) for x in (value, reference))
    if a.shape != b.shape:
        return float("inf")
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    apart, sizes = np.linalg.norm(a - b, axis=-1), np.linalg.norm(b, axis=-1)
    return float(np.max(np.divide(apart, sizes, out=np.where(apart > 0, np.inf, 0.0), where=sizes > 0)))
