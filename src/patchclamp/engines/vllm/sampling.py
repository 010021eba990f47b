"""Checks a request's sampling parameters before it runs: an error in a step would end the engine for everybody."""

from __future__ import annotations

import functools
import math
import typing
from typing import Any

import msgspec

from patchclamp.errors import ProgramError, unknown

NOT_RETURNED = (
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "flat_logprobs",
    "routed_experts_prompt_start",
)
SET_BY_US = (
    "max_tokens",
    "logprobs",
    "logprob_token_ids",
    "extra_args",
    "output_kind",
    "n",
    "detokenize",
    "skip_clone",
)


def check(sampling: dict[str, Any]) -> None:
    """Raises `UnknownName` for a parameter that vLLM does not have, and `ProgramError` for one that cannot be given
    here or is of another type than vLLM says."""
    from vllm import SamplingParams

    types = _types()
    for name, value in sampling.items():
        if name in SET_BY_US:
            raise ProgramError(f"{name} is set by patchclamp and cannot be given here", f"sampling.{name}")
        if name in NOT_RETURNED:
            raise ProgramError(f"{name} is not given back by a Run yet, so it cannot be asked for", f"sampling.{name}")
        if name not in types:
            names = [name for name in types if name not in SET_BY_US]
            raise unknown("sampling parameter", name, names, f"sampling.{name}")
        _check_type(name, value, types[name])
    try:
        SamplingParams(**{"temperature": 0.0, "max_tokens": None, **sampling})
    except Exception as error:  # vLLM's own validation error among them, which is not a ValueError
        raise ProgramError(str(error) or f"vLLM does not take {sampling}", "sampling") from None


@functools.cache
def _types() -> dict[str, Any]:
    from vllm import SamplingParams

    return {name: kind for name, kind in typing.get_type_hints(SamplingParams).items() if not name.startswith("_")}


def _check_type(name: str, value: Any, kind: Any) -> None:
    classes = tuple(part for part in typing.get_args(kind) if getattr(part, "__module__", "").startswith("vllm"))
    if classes:
        if value is not None and not isinstance(value, classes):
            raise ProgramError(f"{classes[0].__name__} of vLLM is needed, not {value!r}", f"sampling.{name}")
        return
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ProgramError(f"{str(error).replace('`', '')}: {value!r}", f"sampling.{name}") from None
    numbers = converted.values() if isinstance(converted, dict) else [converted]
    if any(isinstance(number, float) and math.isnan(number) for number in numbers):
        raise ProgramError(f"a number is needed, not {value!r}", f"sampling.{name}")
