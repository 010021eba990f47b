"""Do two engines mean the same by a trace? Every recipe on both, as a trace and as a program written by hand.

Differences are ‖a − b‖₂ / ‖b‖₂ of a value's rows, b the reference's; a value's is its worst row's. Of token ids, the
share that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

import patchclamp as pc
from patchclamp.errors import unknown
from patchclamp.studies.inputs import as_text, checked
from patchclamp.studies.parity import BOUNDS, ENGINES, given


class RecipeValue(msgspec.Struct, frozen=True):
    """One value of a recipe.

    gap: how far the two engines' traces are apart
    by_hand: how far trace and program are apart, on the engine where they are further apart
    """

    recipe: str
    value: str
    shape: tuple[int, ...]
    gap: float
    by_hand: float


class Recipes(msgspec.Struct, frozen=True):
    """What came of it. `engines`: with versions, first the one that is examined; `tolerance`: of every difference."""

    model: str
    dtype: str
    engines: tuple[str, str]
    tolerance: float
    values: tuple[RecipeValue, ...]

    def is_within(self, value: RecipeValue) -> bool:
        return value.gap <= self.tolerance and value.by_hand <= self.tolerance

    @property
    def problems(self) -> tuple[str, ...]:
        """What is out of tolerance, a line each."""
        return tuple(
            f"{value.recipe}: {value.value} is {value.gap:.2g} apart, and {value.by_hand:.2g} from the program written "
            f"by hand (at most {self.tolerance:g})"
            for value in self.values
            if not self.is_within(value)
        )

    @property
    def holds(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {"holds": self.holds, **msgspec.to_builtins(self), "problems": list(self.problems)}


@checked
def compare_recipes(
    model: str,
    *,
    dtype: str = "float32",
    recipes: Sequence[str] = (),
    tolerance: float | None = None,
    engines: tuple[str, str] = ENGINES,
    tell: Callable[[str], None] = lambda what: None,
    **options: Any,
) -> Recipes:
    """Runs recipes, all unless named, on both `engines`, one after the other, and compares every value.

    `tolerance`: 1e-4 in float32, and that of `parity`'s rows in other dtypes. `options` are the second engine's; what
    says how the model is read goes to the first as well. `tell` hears what is being done.

    Raises: `UnknownName` for a recipe or a dtype that there is not, and whatever an engine's start raises.
    """
    from patchclamp.trace.recipes import RECIPES

    for name in recipes:
        if name not in RECIPES:
            raise unknown("recipe", name, RECIPES, "recipes")
    if as_text(dtype, "dtype") not in BOUNDS:
        raise unknown("dtype", dtype, BOUNDS, "dtype")
    names, seen = list(recipes or RECIPES), []
    of_each = given(options, engines)
    for engine, options_of_it in zip(engines, of_each, strict=True):
        tell(f"running {model} on {engine} …")
        all_options = options_of_it if engine == "fake" else {"dtype": dtype, **options_of_it}
        with pc.LM(model, engine, prove=False, **all_options) as lm:
            seen.append((f"{lm.model.engine} {lm.model.version}", {name: _values(name, lm) for name in names}))
    (theirs, reference), (ours, examined) = seen
    values = [value for name in names for value in _compared(name, examined[name], reference[name])]
    return Recipes(model, dtype, (ours, theirs), tolerance or BOUNDS[dtype].rows, tuple(values))


Both = tuple[dict[str, Any], dict[str, Any]]  # the values of the trace, and those of the program written by hand


def _values(name: str, lm: Any) -> Both:
    from patchclamp.trace.recipes import RECIPES  # which needs torch

    return RECIPES[name].traced(lm), RECIPES[name].explicit(lm)


def _compared(recipe: str, examined: Both, reference: Both) -> list[RecipeValue]:
    values = []
    for name, value in examined[0].items():
        by_hand = max(gap(traced[name], explicit[name]) for traced, explicit in (examined, reference))
        values.append(RecipeValue(recipe, name, np.shape(value), gap(value, reference[0][name]), by_hand))
    return values


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
