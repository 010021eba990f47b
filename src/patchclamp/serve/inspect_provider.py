"""Inspect's model provider for a running server: `inspect eval task.py --model patchclamp/NAME --model-base-url URL`.

NAME is a model that the server lists, or a mix of stored programs, such as `smollm2:0.5 calm + honest`.
PATCHCLAMP_BASE_URL is the default URL, which ends in /v1; PATCHCLAMP_API_KEY is the key. A sample's metadata holds its
program, the `patchclamp` object of its requests: `Sample(..., metadata={"patchclamp": json.loads(program.to_json())})`.

Inspect finds this module through its entry point. Nothing else imports the module.
"""

from __future__ import annotations

import os
from typing import Any

from inspect_ai.model import GenerateConfig, ModelOutput, modelapi  # pyright: ignore[reportMissingImports]
from inspect_ai.model._providers.openai_compatible import (  # pyright: ignore[reportMissingImports]
    OpenAICompatibleAPI,
)
from inspect_ai.solver._task_state import sample_state  # pyright: ignore[reportMissingImports]

METADATA = "patchclamp"  # the key of a sample's program
NO_KEY = "none"  # for servers without API keys


class PatchclampAPI(OpenAICompatibleAPI):
    """The OpenAI-compatible provider, which adds each sample's program to its requests."""

    def __init__(self, model_name: str, api_key: str | None = None, **options: Any) -> None:
        api_key = api_key or os.environ.get("PATCHCLAMP_API_KEY", NO_KEY)
        super().__init__(model_name, api_key=api_key, service="patchclamp", **options)

    async def generate(self, input: Any, tools: Any, tool_choice: Any, config: GenerateConfig) -> ModelOutput:
        state = sample_state()
        program = None if state is None else state.metadata.get(METADATA)
        if program is not None:
            config = config.model_copy(update={"extra_body": {**(config.extra_body or {}), METADATA: program}})
        return await super().generate(input, tools, tool_choice, config)


@modelapi(name="patchclamp")
def patchclamp() -> type[PatchclampAPI]:
    """Return the provider's class; the function's name is the prefix of its models."""
    return PatchclampAPI
