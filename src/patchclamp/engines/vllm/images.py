"""Prompts with images, in the caller's process: checked, and made ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchclamp.engines.base import Expanded
from patchclamp.engines.vllm.compat import images
from patchclamp.errors import PatchclampError, ProgramError, describe_error, unknown

DATA, TEXT = "multi_modal_data", ("prompt", "prompt_token_ids")
PARTS = (*TEXT, DATA, "mm_processor_kwargs")


def expand(engine: Any, prompt: Mapping[str, Any] | None, messages: list[Any] | None) -> Expanded:
    """As `Engine.expand`, for an `LLMEngine`. On the thread of its steps: vLLM's processors change how many threads
    PyTorch has meanwhile."""
    if prompt is not None:
        _check(prompt)
    try:
        inputs = images.render_chat(engine, messages or []) if prompt is None else images.render(engine, prompt)
    except PatchclampError:
        raise
    except Exception as error:
        raise ProgramError(f"vLLM does not take this prompt: {describe_error(error)}") from error
    return Expanded(list(inputs["prompt_token_ids"]), images.images_in(inputs), inputs)


def _check(prompt: Mapping[str, Any]) -> None:
    for part in prompt:
        if part not in PARTS:
            raise unknown("part of a prompt with images", str(part), PARTS, str(part))
    if sum(part in prompt for part in TEXT) != 1:
        raise ProgramError(f"a prompt with images has either {TEXT[0]!r} or {TEXT[1]!r} in it")
    if not isinstance(prompt.get(DATA), Mapping) or not prompt[DATA]:
        raise ProgramError(
            f'a prompt with images has {{"image": ...}} under {DATA!r}; without any, give the text or the token ids'
        )
    images.check_modalities(prompt[DATA])
