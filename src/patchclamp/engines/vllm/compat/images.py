"""Prompts with images: how vLLM makes them ready to run, and where in them each image is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from patchclamp.engines.vllm.compat.seams import require_all
from patchclamp.errors import ProgramError

Span = tuple[int, int]  # positions first … end−1
UNTRIED = {"Llama4ForConditionalGeneration"}  # classes whose images were not tried


def render(engine: Any, prompt: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt with images, ready to be added to an `LLMEngine`.

    Of what it makes of an image for every request of a server, vLLM sends a core what that lacks, and relies on it
    from then on. A prompt that is made ready here may never be sent: so nothing goes through that cache.
    """
    require_all("images")
    check_model(engine.vllm_config)
    [inputs] = engine.renderer.render_cmpl([dict(prompt)], skip_mm_cache=True)
    return inputs


def render_chat(engine: Any, messages: list[Any]) -> dict[str, Any]:
    """The same for a chat with images in its messages, ready for the assistant's turn."""
    require_all("images")
    check_model(engine.vllm_config)
    from vllm.renderers import ChatParams

    asked = {"add_generation_prompt": True, "continue_final_message": False, "tools": None, "tokenize": False}
    renderer = engine.renderer
    tokenizing = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)  # the template writes them
    params = ChatParams(chat_template_kwargs=asked)
    _, [inputs] = renderer.render_chat([messages], params, tokenizing, skip_mm_cache=True)
    return inputs


def images_in(inputs: Mapping[str, Any]) -> list[list[int]]:
    """Of each image of a prompt that was made ready, the positions of its tokens. Raises `ProgramError` for a prompt
    with sound or films in it."""
    placeholders = inputs.get("mm_placeholders") or {}
    check_modalities(placeholders)
    ordered = sorted(placeholders.get("image", ()), key=lambda place: place.offset)
    return [[p for first, last in place.extract_embeds_range() for p in range(first, last + 1)] for place in ordered]


def check_modalities(modalities: Iterable[str]) -> None:
    """Raises `ProgramError` where something else than images is in a prompt."""
    others = sorted(set(modalities) - {"image"})
    if others:
        raise ProgramError(
            f"programs act on text and images, and this prompt has {' and '.join(others)} in it: leave out one of them"
        )


def check_model(vllm_config: Any) -> None:
    """Raises `ProgramError` for a model whose images were not tried."""
    names = UNTRIED.intersection(vllm_config.model_config.hf_config.architectures or ())
    if names:
        raise ProgramError(f"images were not tried on {', '.join(names)}: give it prompts of text alone")


def check_request(request: Any, prompt: int, vllm_config: Any) -> None:
    """Raises `ProgramError` for a request in an engine core whose program, bound to a prompt of so many tokens, was
    bound before its images were in their places, or that has other than images in it, or images of an untried model."""
    check_model(vllm_config)
    check_modalities(feature.modality for feature in request.mm_features)
    if prompt != request.num_prompt_tokens:
        raise ProgramError(
            f"the program is bound to a prompt of {prompt} tokens, and with its images in their places this one has "
            f"{request.num_prompt_tokens}: bind it to that"
        )


def spans_of(request: Any) -> tuple[Span, ...]:
    """Where the images of a request in an engine core lie, with the marks within them."""
    if not request.mm_features:
        return ()
    places = [feature.mm_position for feature in request.mm_features]
    return tuple((place.offset, place.offset + place.length) for place in places)


def forget(client: Any, inputs: Mapping[str, Any]) -> None:
    """Has an `AsyncLLM` send the images of a prompt again next time: this one is refused, and is not sent."""
    names = [name for hashes in (inputs.get("mm_hashes") or {}).values() for name in hashes]
    sent = client.renderer.mm_processor_cache if names else None
    if sent is not None:
        for name in names:
            sent.invalidate(name)
