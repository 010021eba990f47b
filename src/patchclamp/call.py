"""Parsing of call arguments. An argument is one value for all prompts, or a list with one value per prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from patchclamp.engines.base import MAX_SCORES
from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language import At, Op, Site
from patchclamp.language.conditions import ProbeCondition
from patchclamp.language.ops import fuzz
from patchclamp.language.values import as_items

MAX_RUNS = 16_384  # per prompt, as in vLLM


class GradeArguments(TypedDict, total=False):
    """The keyword arguments that all overloads of `LM.grade` share."""

    score: Any
    kl: bool
    top: int
    capture: Any


class CallArguments(TypedDict, total=False):
    """The optional arguments that `lm.run`, `lm.arun` and `lm.stream` share, other than `messages` and `n`.
    `LM.run` documents them, and `LM._read_call` has their defaults."""

    max_tokens: int
    edits: Any
    capture: Any
    sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    temperature: float | None
    score: Any
    logprobs: bool | int | Sequence[bool | int]
    prompt_logprobs: bool | int | Sequence[bool | int]
    stop_when: ProbeCondition | Sequence[ProbeCondition | None] | None
    lora: Any
    chat_template_kwargs: Mapping[str, Any] | None


def count_of(sampling: dict[str, Any]) -> int:
    """Pop `n`, the number of runs of a prompt, from its sampling parameters; 1 by default."""
    count = sampling.pop("n", None)
    count = 1 if count is None else count
    if not is_token_id(count) or not 1 <= count <= MAX_RUNS:
        raise ProgramError(f"expected an integer from 1 to {MAX_RUNS}, got {count!r}", "sampling.n")
    if count > 1 and not sampling.get("temperature"):
        raise ProgramError(f"{count} greedy runs would be identical; set a temperature", "sampling.n")
    return int(count)


def samplings_of(sampling: Any, prompts: int, **given: Any) -> Sequence[Mapping[str, Any]]:
    """Return each prompt's sampling parameters. `given`: parameters that are arguments of the call; None if omitted."""
    given = {name: value for name, value in given.items() if value is not None}
    samplings = (
        list(sampling) if isinstance(sampling, (list, tuple)) else [{} if sampling is None else sampling] * prompts
    )
    named = (isinstance(one, Mapping) and all(isinstance(name, str) for name in one) for one in samplings)
    if len(samplings) != prompts or not all(named):
        raise ProgramError(f"expected a mapping of options, or one per prompt ({prompts})", "sampling")
    for name in ("max_tokens", "logprobs", "prompt_logprobs"):
        if any(name in one for one in samplings):
            raise ProgramError(f"pass {name}= as an argument of the call", f"sampling.{name}")
    for name in given:
        if any(name in one for one in samplings):
            raise ProgramError(f"duplicate {name}: given as an argument and in sampling", f"sampling.{name}")
    return [{**one, **given} for one in samplings] if given else samplings


def plain(value: Any) -> Any:
    """Convert a value, including NumPy scalars and arrays, to plain Python numbers, lists and dicts."""
    if isinstance(value, Mapping):
        return {name.item() if isinstance(name, np.generic) else name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=repr)
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def seeded(sampling: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the parameters of sample `number`, whose seed is `seed` + `number`; −1 is no seed, as in vLLM."""
    seed = sampling.get("seed")
    if seed in (None, -1):
        return sampling
    if not is_token_id(seed) or not -(2**63) <= seed + number < 2**63:
        raise ProgramError(f"expected a 64-bit integer, got {seed!r}", "sampling.seed")
    if seed + number == -1:
        raise ProgramError(
            f"seeds count up from {seed} and include -1, which means no seed; use a different seed", "sampling.seed"
        )
    return {**sampling, "seed": seed + number}


def fuzz_of(extra: Any) -> tuple[Op, ...]:
    if extra is not None and not isinstance(extra, Mapping):
        raise ProgramError(f"expected a mapping, got {type(extra).__name__}", "sampling.extra_args")
    try:
        return fuzz(dict(extra or {}))
    except PatchclampError as error:
        raise error.under("sampling.extra_args") from None


def is_token_id(value: object) -> bool:
    """True if a value is a Python or NumPy int, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def per_prompt(items: Any, prompts: int, name: str) -> Sequence[Any]:
    """Return the edits, captures or scores of each prompt, given one list for all prompts or a list for each."""
    if items is not None and not isinstance(items, (str, Site, At, Op, list, tuple, Mapping)):
        unordered = name == "capture" and isinstance(items, (set, frozenset))
        items = sorted(items, key=str) if unordered else as_items(items, name)
    if isinstance(items, (list, tuple)) and any(isinstance(item, (list, tuple)) for item in items):
        if not all(isinstance(item, (list, tuple)) for item in items):
            raise ProgramError("expected one list for all prompts, or a list of lists, one per prompt", name)
        if len(items) != prompts:
            raise ProgramError(f"expected one list per prompt ({prompts}), got {len(items)}", name)
        return items
    return [items] * prompts


def conditions_of(stop_when: Any, prompts: int) -> list[ProbeCondition | None]:
    """Return each prompt's stopping condition, or None."""
    each = list(stop_when) if isinstance(stop_when, (list, tuple)) else [stop_when] * prompts
    if len(each) != prompts:
        raise ProgramError(f"expected one condition per prompt ({prompts}), got {len(each)}", "stop_when")
    return each


def top_logprobs_of(logprobs: Any, scores: Sequence[Any], name: str = "logprobs") -> list[int | None]:
    """Return, for each prompt, the number of top tokens to report at each token; 0: only the token itself; None: no
    log-probabilities. `scores`: each prompt's tokens to score; `name`: the argument's name."""
    each = logprobs if isinstance(logprobs, (list, tuple)) else [logprobs] * len(scores)
    if len(each) != len(scores):
        raise ProgramError(f"expected one value per prompt ({len(scores)}), got {len(each)}", name)
    return [_top_logprobs_of(one, len(tokens) > 0, name) for one, tokens in zip(each, scores, strict=True)]


def _top_logprobs_of(logprobs: Any, scored: bool, name: str) -> int | None:
    if isinstance(logprobs, bool):
        return 0 if logprobs else None
    if not is_token_id(logprobs) or not 1 <= logprobs <= MAX_SCORES:
        raise ProgramError(f"expected True, or a number from 1 to {MAX_SCORES}, got {logprobs!r}", name)
    if scored:
        raise ProgramError("top log-probabilities are not supported with score=; use logprobs=True", "logprobs")
    return int(logprobs)


def as_list(sites: Any) -> list[Any]:
    return list(sites) if isinstance(sites, (list, tuple)) else [sites]
