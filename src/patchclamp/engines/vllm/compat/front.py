"""Front ends: submits requests to an `LLMEngine`, wraps `AsyncLLM.generate`, and calls a server's engine cores."""

from __future__ import annotations

import asyncio
import copy
import functools
import time
import uuid
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from patchclamp.engines.vllm.admission import Verdict
from patchclamp.engines.vllm.compat.configuration import KEY, enabled, needs_steps_apart
from patchclamp.engines.vllm.compat.core import read_verdict, tables_of
from patchclamp.engines.vllm.compat.seams import forwards, require
from patchclamp.kernels import switches


class Submitter:
    """Adds the requests of one `LLMEngine`.

    vLLM checks and completes the parameters of each request, a good part of its cost. Consecutive requests with the
    same settings share the result.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._alike: tuple[Any, Any] = None, None  # settings and adapter of the last processed request
        self._processed: Any = None

    def add(self, run: str, prompt: dict[str, Any], params: Any, adapter: Any, settings: object) -> str:
        """Add a request, and return vLLM's name of it. Raises vLLM's errors.

        prompt: in vLLM's format; plain token ids must have been checked (`LM` does)
        settings: the source of its parameters, without `extra_args`; compared by identity
        """
        engine = self._engine
        alike = prompt.keys() == {"prompt_token_ids"} and params.n == 1 and params.max_tokens is not None
        if not alike or not switches.enabled("alike_requests"):
            return engine.add_request(run, prompt, params, lora_request=adapter) or run
        if self._processed is None or self._alike[0] is not settings or self._alike[1] is not adapter:
            self._processed = None  # drop it first: processing may raise
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


Generate = Callable[..., AsyncIterator[Any]]


def on_config(complete: Callable[[Any], None]) -> None:
    """Call `complete(vllm_config)` on every configuration with patchclamp that is created from engine arguments."""
    owner, name = require("engine arguments")
    stock = getattr(owner, name)
    if hasattr(stock, "patchclamp"):
        return

    @forwards(stock)
    def create_engine_config(engine_args: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = copy.copy(engine_args.speculative_config)
        config = stock(engine_args, *args, **kwargs)
        if enabled(config) is None:
            return config
        if engine_args.async_scheduling is None and needs_steps_apart(config):  # on by vLLM's default
            engine_args.async_scheduling = False
            engine_args.speculative_config = drafts  # vLLM has modified the original in place
            config = stock(engine_args, *args, **kwargs)
        complete(config)
        return config

    create_engine_config.patchclamp = True  # type: ignore[attr-defined]
    setattr(owner, name, create_engine_config)


def on_generate(edited: Callable[..., AsyncIterator[Any]], is_ours: Callable[[str], bool]) -> None:
    """Route requests with a key in `extra_args` that `is_ours`, on an `AsyncLLM` with patchclamp, to
    `edited(client, stock, prompt, params, request_id, **others)`. Others go to vLLM's own `generate`."""
    owner, name = require("generate")
    stock = getattr(owner, name)
    if hasattr(stock, "patchclamp"):
        return

    @forwards(stock)
    def generate(client: Any, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
        extra = getattr(sampling_params, "extra_args", None)
        if not extra or not any(map(is_ours, extra)) or enabled(client.vllm_config) is None:
            return stock(client, prompt, sampling_params, request_id, **kwargs)
        return edited(client, functools.partial(stock, client), prompt, sampling_params, request_id, **kwargs)

    generate.patchclamp = stock  # type: ignore[attr-defined]
    setattr(owner, name, generate)


def stock_generate(client: Any) -> Generate:
    """Return a client's unwrapped `generate`."""
    owner, name = require("generate")
    method = getattr(owner, name)
    return functools.partial(getattr(method, "patchclamp", method), client)


def core_count(client: Any) -> int:
    """Return the number of a client's engine cores: data-parallel replicas of the model."""
    cores = client.engine_core
    return len(cores.core_engines)


def process_count(client: Any) -> int:
    """Return the number of the server's API processes."""
    cores = client.engine_core
    return cores.client_count


def tell_cores(client: Any, method: str, *args: Any, only: int | None = None) -> list[asyncio.Future[Any]]:
    """Call a method of every engine core, or of core `only`, on the loop's thread. The call arrives before anything
    sent afterwards; the futures receive the results."""
    from vllm.v1.engine import EngineCoreRequestType

    cores, answers = client.engine_core, []
    for engine in cores.core_engines if only is None else [cores.core_engines[only]]:
        number = uuid.uuid1().int >> 64
        cores.utility_results[number] = answer = asyncio.get_running_loop().create_future()
        # sent immediately: the awaitable that it returns matters only if the socket is full
        try:
            cores._send_input(EngineCoreRequestType.UTILITY, (cores.client_index, number, method, args), engine)
        except Exception as error:
            if not client.errored:
                raise
            _fail(answer, error)
        answers.append(answer)
    cores._ensure_output_queue_task()
    return answers


def fail_all(client: Any) -> None:
    """Make every pending request and call raise that the engine has ended."""
    cores, output_processor = client.engine_core, client.output_processor
    output_processor.propagate_error(client.dead_error)
    for answer in list(cores.utility_results.values()):
        _fail(answer, client.dead_error)


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # retrieve it: asyncio logs exceptions of futures that are never awaited


def tables_of_client(client: Any) -> dict[str, list[Any]]:
    """Return `tables_of` the client's output processor."""
    return tables_of(client.output_processor)


def http_error(message: str, status: int) -> Exception:
    """Return an error that vLLM's own routes map to `status`, or to 400 if this version lacks such errors."""
    exceptions, _ = require("errors")
    if not hasattr(exceptions, "GracefulHTTPError"):
        return ValueError(message)
    return exceptions.GracefulHTTPError(message, HTTPStatus(status))


def verdict_in(output: Any) -> Verdict | None:
    """Remove and return the verdict on a request's program from an output; None without one."""
    params = output.kv_transfer_params
    if not isinstance(params, dict) or KEY not in params:
        return None
    output.kv_transfer_params = None
    return read_verdict(params[KEY])
