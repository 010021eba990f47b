"""Requests go to vLLM. It checks and completes the parameters of each, a good part of what a request costs; of requests
with the same settings it does so once, and the others take what it made."""

from __future__ import annotations

import copy
import time
from typing import Any

from patchclamp.kernels import switches


class Submitter:
    """Adds the requests of one `LLMEngine`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._alike: tuple[Any, Any] = None, None  # settings and adapter of what was processed last
        self._processed: Any = None

    def add(self, run: str, prompt: dict[str, Any], params: Any, adapter: Any, settings: object) -> str:
        """Adds a request, and returns what vLLM calls it. Raises what vLLM raises.

        prompt: as vLLM takes it; of token ids alone, they must have been checked (`LM` does)
        settings: what its parameters were made of, but for what stands in `extra_args`: the same object each time
        """
        engine = self._engine
        alike = prompt.keys() == {"prompt_token_ids"} and params.n == 1 and params.max_tokens is not None
        if not alike or not switches.enabled("alike_requests"):
            return engine.add_request(run, prompt, params, lora_request=adapter) or run
        if self._processed is None or self._alike[0] is not settings or self._alike[1] is not adapter:
            self._processed = None  # what raises is not kept
            tasks = engine.get_supported_tasks()
            asked = engine.input_processor.process_inputs(run, prompt, params, tasks, lora_request=adapter)
            self._processed, self._alike = _copy(asked), (settings, adapter)
        else:
            asked = _copy(self._processed)
            asked.request_id, asked.prompt_token_ids = run, prompt["prompt_token_ids"]
            asked.sampling_params.extra_args, asked.arrival_time = params.extra_args, time.time()
        engine.input_processor.assign_request_id(asked)
        engine.output_processor.add_request(asked, None, None, 0)
        engine.engine_core.add_request(asked)
        return asked.request_id


def _copy(asked: Any) -> Any:
    copied = copy.copy(asked)
    copied.sampling_params = copy.copy(asked.sampling_params)
    return copied
