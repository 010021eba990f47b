"""Prompts with images: rendering with vLLM's processors, and each image's positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from patchclamp.engines.base import Expanded
from patchclamp.errors import PatchclampError, ProgramError, describe_error, unknown

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.request import Request

Span = tuple[int, int]  # positions first … end−1
# classes whose images are not tested
UNTRIED = {"Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration", "Llama4ForConditionalGeneration",
           "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}  # fmt: skip


DATA, TEXT = "multi_modal_data", ("prompt", "prompt_token_ids")
PARTS = (*TEXT, DATA, "mm_processor_kwargs")


def expand(
    engine: LLMEngine, prompt: Mapping[str, Any] | None, messages: list[Any] | None, options: dict[str, Any]
) -> Expanded:
    """Implement `Engine.expand` for an `LLMEngine`. Call it on the thread that steps the engine: vLLM's processors
    temporarily change PyTorch's number of threads."""
    if prompt is not None:
        _check(prompt)
    check_model(engine.vllm_config)
    # bypass vLLM's cache of processed images: it assumes that the core has received every image in it, but this prompt
    # may never be sent
    inputs: Any
    given: Any = None if prompt is None else dict(prompt)
    try:
        if prompt is None:
            inputs = _render_chat(engine, messages or [], options)
        else:
            [inputs] = engine.renderer.render_cmpl([given], skip_mm_cache=True)
    except PatchclampError:
        raise
    except Exception as error:
        raise ProgramError(f"vLLM rejected this prompt: {describe_error(error)}") from error
    return Expanded(list(inputs["prompt_token_ids"]), images_in(inputs), inputs)


def _check(prompt: Mapping[str, Any]) -> None:
    for part in prompt:
        if part not in PARTS:
            raise unknown("key in a prompt with images", str(part), PARTS, str(part))
    if sum(part in prompt for part in TEXT) != 1:
        raise ProgramError(f"a prompt with images requires exactly one of {TEXT[0]!r} and {TEXT[1]!r}")
    if not isinstance(prompt.get(DATA), Mapping) or not prompt[DATA]:
        raise ProgramError(f'expected {{"image": ...}} under {DATA!r}; without images, pass text or token ids')
    check_modalities(prompt[DATA])


def _render_chat(engine: LLMEngine, messages: list[Any], options: dict[str, Any]) -> Any:
    """Render a chat with images in its messages."""
    from vllm.renderers import ChatParams

    stated = {"add_generation_prompt": True, "continue_final_message": False, "tools": None, "tokenize": False}
    renderer = engine.renderer
    tokenizing = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)  # the template writes them
    params = ChatParams(chat_template_kwargs=stated | options)
    _, [inputs] = renderer.render_chat([messages], params, tokenizing, skip_mm_cache=True)
    return inputs


def images_in(inputs: Mapping[str, Any]) -> list[list[int]]:
    """Return the token positions of each image in a rendered prompt. Raises `ProgramError` for audio or video."""
    placeholders = inputs.get("mm_placeholders") or {}
    check_modalities(placeholders)
    ordered = sorted(placeholders.get("image", ()), key=lambda place: place.offset)
    return [[p for first, last in place.extract_embeds_range() for p in range(first, last + 1)] for place in ordered]


def check_modalities(modalities: Iterable[str]) -> None:
    """Raise `ProgramError` if a prompt contains modalities other than images."""
    others = sorted(set(modalities) - {"image"})
    if others:
        raise ProgramError(
            f"programs support only text and images: omit {' and '.join(others)} from this prompt, or the program"
        )


def check_model(vllm_config: VllmConfig) -> None:
    """Raise `ProgramError` for a model that is untested with images."""
    names = UNTRIED.intersection(vllm_config.model_config.hf_config.architectures or ())
    if names:
        raise ProgramError(f"images are untested on {', '.join(names)}: use text-only prompts")


def check_request(request: Request, prompt: int, vllm_config: VllmConfig) -> None:
    """Raise `ProgramError` in an engine core for a request with modalities other than images, on an untested model, or
    with a program that was bound before the prompt's images were expanded."""
    check_model(vllm_config)
    check_modalities(feature.modality for feature in request.mm_features)
    if prompt != request.num_prompt_tokens:
        raise ProgramError(
            f"the program is bound to a prompt of {prompt} tokens, but the prompt with its images expanded has "
            f"{request.num_prompt_tokens}: bind the program to the expanded prompt"
        )


def spans_of(request: Request) -> tuple[Span, ...]:
    """Return the spans of a request's images in an engine core, including separator tokens within them."""
    if not request.mm_features:
        return ()
    places = [feature.mm_position for feature in request.mm_features]
    return tuple((place.offset, place.offset + place.length) for place in places)


def forget(client: AsyncLLM, inputs: Mapping[str, Any]) -> None:
    """Make an `AsyncLLM` send a prompt's images again next time: this prompt was rejected before it was sent."""
    names = [name for hashes in (inputs.get("mm_hashes") or {}).values() for name in hashes]
    sent = client.renderer.mm_processor_cache if names else None
    if sent is not None:
        for name in names:
            sent.invalidate(name)
