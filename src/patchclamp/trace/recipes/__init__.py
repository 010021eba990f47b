"""Recipes: common interventions, each as a trace (`traced`) and as a program written by hand (`explicit`).

`docs/recipes.md` prints them, the tests run them on every engine, and `patchclamp recipes MODEL` runs them on yours.
A recipe takes a `pc.LM` and returns what it read, by name: tensors, and lists of token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from patchclamp.trace.recipes import explicit, traced

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
