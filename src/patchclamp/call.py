"""Parses the arguments of a call: each is one value for all prompts, or a list with one per prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from patchclamp.engines.base import MAX_SCORES
from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language import At, Op, Site
from patchclamp.language.ops import fuzz
from patchclamp.language.values import as_items

MAX_RUNS = 16_384  # per prompt, as in vLLM


def count_of(sampling: dict[str, Any]) -> int:
    """The number of runs of a prompt. Removes `n` from its sampling parameters."""
    count = sampling.pop("n", None)
    count = 1 if count is None else count
    if not is_token_id(count) or not 1 <= count <= MAX_RUNS:
        raise ProgramError(f"expected a whole number from 1 to {MAX_RUNS}, got {count!r}", "sampling.n")
    if count > 1 and not sampling.get("temperature"):
        raise ProgramError(f"{count} runs without a temperature would all be the same: give one", "sampling.n")
    return int(count)


def samplings_of(sampling: Any, prompts: int) -> Sequence[Mapping[str, Any]]:
    """The sampling parameters of each prompt."""
    samplings = (
        list(sampling) if isinstance(sampling, (list, tuple)) else [{} if sampling is None else sampling] * prompts
    )
    named = (isinstance(one, Mapping) and all(isinstance(name, str) for name in one) for one in samplings)
    if len(samplings) != prompts or not all(named):
        raise ProgramError(f"names and values are needed, or a list of {prompts} of them, one a prompt", "sampling")
    return samplings


def plain(value: Any) -> Any:
    """Converts a value, NumPy's included, to plain Python numbers, lists and dicts."""
    if isinstance(value, Mapping):
        return {name.item() if isinstance(name, np.generic) else name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=repr)
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def seeded(sampling: dict[str, Any], number: int) -> dict[str, Any]:
    """The sampling parameters of the run at index `number`, seeded as in vLLM, where -1 means no seed."""
    seed = sampling.get("seed")
    if seed in (None, -1):
        return sampling
    if not is_token_id(seed) or not -(2**63) <= seed + number < 2**63:
        raise ProgramError(f"expected a whole number of 64 bits, got {seed!r}", "sampling.seed")
    if seed + number == -1:
        raise ProgramError(
            f"of runs from {seed} on one would have the seed -1, which is none: begin elsewhere", "sampling.seed"
        )
    return {**sampling, "seed": seed + number}


def fuzz_of(extra: Any) -> tuple[Op, ...]:
    if extra is not None and not isinstance(extra, Mapping):
        raise ProgramError(f"expected names and values, got {type(extra).__name__}", "sampling.extra_args")
    try:
        return fuzz(dict(extra or {}))
    except PatchclampError as error:
        raise error.under("sampling.extra_args") from None


def is_token_id(value: object) -> bool:
    """True if a value is an int of Python or NumPy, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def per_prompt(items: Any, prompts: int, name: str) -> Sequence[Any]:
    """The edits, captures or scores of each prompt, from one list for all or a list of lists, one per prompt."""
    if items is not None and not isinstance(items, (str, Site, At, Op, list, tuple, Mapping)):
        unordered = name == "capture" and isinstance(items, (set, frozenset))
        items = sorted(items, key=str) if unordered else as_items(items, name)
    if isinstance(items, (list, tuple)) and any(isinstance(item, (list, tuple)) for item in items):
        if not all(isinstance(item, (list, tuple)) for item in items):
            raise ProgramError("either one list for all prompts, or a list of lists, one a prompt", name)
        if len(items) != prompts:
            raise ProgramError(f"{len(items)} lists for {prompts} prompts", name)
        return items
    return [items] * prompts


def top_logprobs_of(logprobs: Any, scored: bool) -> int | None:
    """The number of top tokens to report at each generated token; 0: only that token; None: no log-probabilities."""
    if isinstance(logprobs, bool):
        return 0 if logprobs else None
    if not is_token_id(logprobs) or not 1 <= logprobs <= MAX_SCORES:
        raise ProgramError(f"True, or a number from 1 to {MAX_SCORES}, not {logprobs!r}", "logprobs")
    if scored:
        raise ProgramError("a run with score= has no likeliest tokens beside it: give logprobs=True", "logprobs")
    return int(logprobs)


def as_list(sites: Any) -> list[Any]:
    return list(sites) if isinstance(sites, (list, tuple)) else [sites]
