"""Conditions on probe scores, for `When`: `probe > 0.8`, `probe[2] <= 1`, combined with `&`, `|` and `~`."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language.tokens import as_integer
from patchclamp.language.values import Converted, as_flag, as_number, field

MAX_DEPTH = 64  # maximum nesting depth; a program runs out of condition bits first


class ProbeCondition(Converted, frozen=True):
    """Base class of conditions, which the worker evaluates per token."""

    def __and__(self, other: ProbeCondition) -> ProbeCondition:
        parts = (each.conditions if isinstance(each, Every) else (each,) for each in (self, check_condition(other)))
        return Every(tuple(itertools.chain.from_iterable(parts)))

    def __or__(self, other: ProbeCondition) -> ProbeCondition:
        return ~(~self & ~check_condition(other))

    def __invert__(self) -> ProbeCondition:
        return Not(self)

    def __bool__(self) -> bool:
        raise ProgramError(
            "a condition has no truth value until the model runs: combine conditions with &, | and ~, "
            "and use pc.When(probe > t, [...])"
        )


class Above(ProbeCondition, frozen=True, tag="above"):
    """True where a probe's score `output` (0-based) exceeds `threshold` or, with `inclusive`, equals it."""

    probe: Any  # a `Probe` or `Features`, whose module imports this one
    threshold: float = field(converter=as_number)
    output: int = field(converter=as_integer, default=0)
    inclusive: bool = field(converter=as_flag, default=False)


class Every(ProbeCondition, frozen=True, tag="every"):
    """True where all `conditions` hold."""

    conditions: tuple[ProbeCondition, ...]


class Not(ProbeCondition, frozen=True, tag="not"):
    """True where `condition` does not hold."""

    condition: ProbeCondition

    def __invert__(self) -> ProbeCondition:
        return self.condition


class Output:
    """Output i of a probe, `probe[i]`; comparing it with a number gives a condition."""

    def __init__(self, probe: Any, output: int) -> None:
        self.probe: Any = probe
        self.output: int = output

    def __gt__(self, threshold: float) -> ProbeCondition:
        return Above(self.probe, threshold, self.output)

    def __ge__(self, threshold: float) -> ProbeCondition:
        return Above(self.probe, threshold, self.output, inclusive=True)

    def __lt__(self, threshold: float) -> ProbeCondition:
        return Not(self >= threshold)

    def __le__(self, threshold: float) -> ProbeCondition:
        return Not(self > threshold)


def check_condition(value: object, path: str | None = None) -> ProbeCondition:
    if not isinstance(value, ProbeCondition):
        raise ProgramError(f"expected a condition like probe > 0.8, got {type(value).__name__} {value!r:.100}", path)
    return value


def comparisons(condition: ProbeCondition) -> list[Above]:
    """Return all comparisons in a condition, from left to right."""
    if isinstance(condition, Not):
        return comparisons(condition.condition)
    if isinstance(condition, Every):
        return [each for part in condition.conditions for each in comparisons(part)]
    assert isinstance(condition, Above)
    return [condition]


def holding(condition: ProbeCondition, above: Callable[[Above], Any]) -> Any:
    """Evaluate a condition per token, bool [T]; `above` evaluates a single comparison."""
    if isinstance(condition, Not):
        return ~holding(condition.condition, above)
    if isinstance(condition, Every):
        return functools.reduce(operator.and_, (holding(each, above) for each in condition.conditions))
    assert isinstance(condition, Above)
    return above(condition)


def deciding(condition: ProbeCondition, above: Callable[[Above], Any]) -> Above:
    """Return the comparison that decides a condition's value at one token; the leftmost if there are several."""
    if isinstance(condition, Not):
        return deciding(condition.condition, above)
    if isinstance(condition, Every):
        failing = (each for each in condition.conditions if not holding(each, above))
        return deciding(next(failing, condition.conditions[0]), above)
    assert isinstance(condition, Above)
    return condition


def condition_data(condition: ProbeCondition, probe_data: Any) -> dict[str, Any]:
    """Convert a condition to plain data; `probe_data` converts a probe."""
    if isinstance(condition, Not):
        return {"type": "not", "condition": condition_data(condition.condition, probe_data)}
    if isinstance(condition, Every):
        return {"type": "every", "conditions": [condition_data(each, probe_data) for each in condition.conditions]}
    assert isinstance(condition, Above)
    return {"type": "above", "probe": probe_data(condition.probe), "threshold": condition.threshold,
            "output": condition.output, "inclusive": condition.inclusive}  # fmt: skip


def read_condition(data: object, path: str, read_probe: Any, depth: int = 0) -> ProbeCondition:
    """Parse the output of `condition_data`; `read_probe(data, path)` parses a probe."""
    if not isinstance(data, dict) or depth > MAX_DEPTH:
        raise ProgramError(f"expected an object nested at most {MAX_DEPTH} deep, got {type(data).__name__}", path)
    fields = {"above": {"type", "probe", "threshold", "output", "inclusive"}, "every": {"type", "conditions"},
              "not": {"type", "condition"}}  # fmt: skip
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in fields or not data.keys() <= fields[kind]:
        raise ProgramError(f"expected a condition of type {', '.join(fields)}, with only that type's fields", path)
    try:
        if kind == "not":
            return Not(read_condition(data.get("condition"), f"{path}.condition", read_probe, depth + 1))
        if kind == "every":
            parts = data.get("conditions")
            if not isinstance(parts, list) or not parts:
                raise ProgramError("expected a list of conditions", "conditions")
            return Every(tuple(
                read_condition(each, f"{path}.conditions[{i}]", read_probe, depth + 1) for i, each in enumerate(parts)
            ))  # fmt: skip
        numbers = {name: data[name] for name in ("threshold", "output", "inclusive") if name in data}
        return Above(read_probe(data.get("probe"), f"{path}.probe"), **numbers)
    except PatchclampError as error:
        raise error if (error.path or "").startswith(path) else error.under(path) from None
