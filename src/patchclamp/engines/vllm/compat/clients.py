"""vLLM's front ends, `LLMEngine` and a server's `AsyncLLM`: submitting requests, reading outputs, and calling cores."""

from __future__ import annotations

import asyncio
import collections
import copy
import functools
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from patchclamp.engines.base import Request
from patchclamp.engines.vllm.admission import Verdict
from patchclamp.engines.vllm.compat.configuration import KEY, enabled, needs_steps_apart
from patchclamp.engines.vllm.compat.core import KEEPS_WEIGHTS, SCORES, WEIGHTS, is_pending
from patchclamp.engines.vllm.compat.seams import forwards, seam
from patchclamp.engines.vllm.monitors import MonitorLog
from patchclamp.errors import EngineError
from patchclamp.kernels import switches

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor

CONFIG = seam(
    "vllm.engine.arg_utils:EngineArgs.create_engine_config", "check an engine's settings",
    "self, usage_context=None, headless=False",
)  # fmt: skip
GENERATE = seam(
    "vllm.v1.engine.async_llm:AsyncLLM.generate", "run a server's requests",
    "self, prompt, sampling_params, request_id, *, prompt_text=None, lora_request=None, tokenization_kwargs=None, "
    "trace_headers=None, priority=0, data_parallel_rank=None, session_id=None, kv_hints=None, reasoning_ended=None, "
    "reasoning_parser_kwargs=None",
)  # fmt: skip
ADD = seam(
    "vllm.v1.engine.llm_engine:LLMEngine.add_request", "run programs in requests to a vllm.LLM",
    "self, request_id, prompt, params, arrival_time=None, lora_request=None, tokenization_kwargs=None, "
    "trace_headers=None, priority=0, session_id=None, prompt_text=None, kv_hints=None",
)  # fmt: skip
seam("vllm.v1.engine.llm_engine:LLMEngine.step", "read the outputs of a vllm.LLM", "self")
seam("vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests", "read the outputs of a vllm.LLM", "self")
seam("vllm.v1.engine.llm_engine:LLMEngine.collective_rpc", "detect new weights",
     "self, method, timeout=None, args=(), kwargs=None")  # fmt: skip
seam("vllm.v1.engine.async_llm:AsyncLLM.collective_rpc", "detect new weights",
     "self, method, timeout=None, args=(), kwargs=None")  # fmt: skip
OUTPUTS = seam(
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs", "read log-probabilities",
    "self, engine_core_outputs, engine_core_timestamp=None, iteration_stats=None, weight_version=None",
)  # fmt: skip
DISABLED = (
    seam("vllm.v1.engine.core:cleanup_dist_env_and_memory", "shut down one engine of several"),
    seam("vllm.v1.worker.workspace:reset_workspace_manager", "shut down one engine of several"),
)
_OPENAI = "vllm.entrypoints.openai."
ROUTES = (
    seam(_OPENAI + "completion.api_router:create_completion", "carry programs", "request, raw_request", part="openai"),
    seam(_OPENAI + "chat_completion.api_router:create_chat_completion", "carry programs", "request, raw_request",
         part="openai"),
    seam(_OPENAI + "models.api_router:show_available_models", "list programs as models", "raw_request", part="openai"),
)  # fmt: skip
Table = tuple[np.ndarray, np.ndarray]  # token ids and log-probabilities [n, 1 + k] of n tokens, their own first


def on_config(complete: Callable[[VllmConfig], None]) -> None:
    """Call `complete(vllm_config)` on each patchclamp-enabled config built from engine arguments."""

    def create_engine_config(stock: Any, engine_args: EngineArgs, *args: Any, **kwargs: Any) -> Any:
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

    CONFIG.wrap(create_engine_config)


# -- requests


def extra_args(carried: bytes | None, weights: int) -> dict[str, Any]:
    """Return the `extra_args` that carry an encoded program. `weights`: `proved_weights` when it was encoded."""
    return {} if carried is None else {KEY: carried, **({WEIGHTS: weights} if weights else {})}


def sampling_params(request: Request, carried: bytes | None, has_text: bool, weights: int = 0) -> SamplingParams:
    """Return vLLM's parameters for a request, with its encoded program. vLLM detokenizes during generation only for
    stop strings and listeners."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    listens = request.listener is not None
    arguments: dict[str, Any] = {"temperature": 0.0, **request.sampling}
    if request.score:
        arguments["logprob_token_ids"] = list(dict.fromkeys(request.score))
    return SamplingParams(
        max_tokens=request.max_tokens,
        logprobs=len(arguments["logprob_token_ids"]) if request.score else request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        output_kind=RequestOutputKind.DELTA if listens else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # made for this request alone
        detokenize=has_text and (listens or bool(request.sampling.get("stop"))),
        extra_args=extra_args(carried, weights) or None,
        **arguments,
    )


class Submitter:
    """Adds requests to one `LLMEngine`.

    vLLM validates and completes each request's parameters, which is a large part of the cost of a request. Consecutive
    requests with the same settings share the result.
    """

    def __init__(self, engine: LLMEngine, has_text: bool) -> None:
        self._engine, self._has_text = engine, has_text
        self._settings: tuple[object, ...] = ()  # of the last processed request
        self._processed: EngineCoreRequest | None = None

    def add(self, request: Request, carried: bytes | None, adapter: LoRARequest | None, weights: int = 0) -> None:
        """Add a request with its encoded program; `weights`: as in `extra_args`. Raises vLLM's errors."""
        engine, run = self._engine, request.run
        settings = (
            request.sampling, request.max_tokens, request.score, request.logprobs, request.prompt_logprobs,
            request.listener is None, adapter,
        )  # fmt: skip
        # a limit that vLLM sets, max_tokens=None, depends on the prompt
        is_shared = request.inputs is None and request.max_tokens is not None and switches.enabled("alike_requests")
        if is_shared and self._processed is not None and settings == self._settings:
            asked = _copy(self._processed)  # `LM` has checked the token ids
            asked.request_id, asked.prompt_token_ids, asked.arrival_time = run, request.prompt_token_ids, time.time()
            assert asked.sampling_params is not None
            asked.sampling_params.extra_args = extra_args(carried, weights) or None
        else:
            params = sampling_params(request, carried, self._has_text, weights)
            prompt: Any = dict(request.inputs or {"prompt_token_ids": request.prompt_token_ids})
            if not is_shared:
                engine.add_request(run, prompt, params, lora_request=adapter)
                return
            self._processed = None  # drop it first: processing may raise
            tasks = engine.get_supported_tasks()
            asked = engine.input_processor.process_inputs(run, prompt, params, tasks, lora_request=adapter)
            self._processed, self._settings = _copy(asked), settings
        engine.input_processor.assign_request_id(asked)
        engine.output_processor.add_request(asked, None, None, 0)
        engine.engine_core.add_request(asked)


def _copy(asked: EngineCoreRequest) -> EngineCoreRequest:
    copied = copy.copy(asked)
    copied.sampling_params = copy.copy(asked.sampling_params)
    return copied


def on_generate(
    edited: Callable[..., AsyncIterator[Any]], is_ours: Callable[[str], bool], entered: Callable[[str, int], str]
) -> None:
    """Redirect an `AsyncLLM`'s requests to `edited(client, stock, prompt, params, request_id, **others)` if `is_ours`
    is true for a key in their `extra_args`. Other requests go to vLLM's own `generate`, under the name
    `entered(request_id, n)`. Clients without patchclamp are unaffected."""

    def generate(
        stock: Any, client: AsyncLLM, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> Any:
        extra = getattr(sampling_params, "extra_args", None)
        if enabled(client.vllm_config) is None:
            return stock(client, prompt, sampling_params, request_id, **kwargs)
        if not extra or not any(map(is_ours, extra)):
            request_id = entered(request_id, getattr(sampling_params, "n", 1))
            return stock(client, prompt, sampling_params, request_id, **kwargs)
        return edited(client, functools.partial(stock, client), prompt, sampling_params, request_id, **kwargs)

    GENERATE.wrap(generate)


def stock_generate(client: AsyncLLM) -> Callable[..., AsyncIterator[Any]]:
    """Return a client's unwrapped `generate`."""
    return functools.partial(GENERATE.stock(), client)


def http_error(message: str, status: int) -> Exception:
    """Return an error that vLLM's own routes map to `status`."""
    from vllm.exceptions import GracefulHTTPError

    return GracefulHTTPError(message, HTTPStatus(status))


# -- a caller's `vllm.LLM`


def on_add_request(added: Callable[..., str]) -> None:
    """Redirect `add_request` calls on `LLMEngine`s that a caller created with patchclamp to `added(engine, stock,
    request_id, prompt, params, ...)`."""

    def add_request(
        stock: Any, engine: LLMEngine, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> str:
        if enabled(engine.vllm_config) is None or OWN in vars(engine):
            return stock(engine, request_id, prompt, params, *args, **kwargs)
        return added(engine, functools.partial(stock, engine), request_id, prompt, params, *args, **kwargs)

    ADD.wrap(add_request)


OWN = "patchclamp_own"


def mark_own(engine: LLMEngine) -> None:
    """Mark an `LLMEngine` as used only by patchclamp."""
    vars(engine)[OWN] = True


class SharedSteps:
    """The steps of an `LLMEngine` that its caller and patchclamp share.

    read: a function that processes each step's outputs, and returns those of the caller's requests
    may_differ: True if a worker call may have changed the model's weights since this was set to False
    """

    def __init__(self, engine: LLMEngine, read: Callable[[list[Any]], list[Any]]) -> None:
        self._step, self._unfinished, self._rpc = engine.step, engine.has_unfinished_requests, engine.collective_rpc
        self._read, self._theirs = read, list[Any]()  # outputs for the caller's next step
        self.may_differ = True
        engine.step = forwards(self._step)(self.step)
        engine.has_unfinished_requests = forwards(self._unfinished)(self.has_unfinished_requests)
        engine.collective_rpc = forwards(self._rpc)(self.collective_rpc)

    def own_step(self) -> None:
        """Run a step for patchclamp's own requests, and store outputs of the caller's requests for `step`."""
        self._theirs += self._read(self._step())

    def step(self) -> list[Any]:
        """Return the outputs stored for the caller, or run a step. Replaces `LLMEngine.step`."""
        theirs, self._theirs = self._theirs, []
        return theirs or self._read(self._step())

    def has_unfinished_requests(self) -> bool:
        return bool(self._theirs) or self._unfinished()

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        self.may_differ |= method not in KEEPS_WEIGHTS
        return self._rpc(method, *args, **kwargs)


def on_new_weights(client: AsyncLLM, updated: Callable[[], Awaitable[None]]) -> None:
    """Await `updated()` after each worker call of a server that may have changed the model's weights."""
    stock = client.collective_rpc

    @forwards(stock)
    async def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await stock(method, *args, **kwargs)
        finally:
            if method not in KEEPS_WEIGHTS:
                await updated()

    client.collective_rpc = collective_rpc


# -- outputs


def on_outputs() -> None:
    """Take the log-probabilities of registered requests (`tables_of`) out of a core's outputs, before vLLM builds
    dictionaries from them."""

    def process_outputs(
        stock: Any, processor: OutputProcessor, engine_core_outputs: Sequence[EngineCoreOutput], *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        tables, log = tables_of(processor), vars(processor).get("patchclamp_monitors")
        if log is not None:
            _file_scores(log, processor, engine_core_outputs)
        for output in engine_core_outputs if tables else ():
            state = processor.request_states.get(output.request_id)  # None: aborted
            if output.new_prompt_logprobs_tensors is not None and state is not None and state.external_req_id in tables:
                tensors, output.new_prompt_logprobs_tensors = output.new_prompt_logprobs_tensors, None
                table = np.asarray(tensors.logprob_token_ids), np.asarray(tensors.logprobs)
                tables[state.external_req_id].append(table)  # before those of generated tokens
            if output.new_logprobs is not None and state is not None and state.external_req_id in tables:
                lists, output.new_logprobs = output.new_logprobs, None
                table = np.asarray(lists.logprob_token_ids), np.asarray(lists.logprobs)
                tables[state.external_req_id].append(table)
        return stock(processor, engine_core_outputs, *args, **kwargs)

    OUTPUTS.wrap(process_outputs)


def _file_scores(log: MonitorLog, processor: OutputProcessor, outputs: Sequence[EngineCoreOutput]) -> None:
    """Assign the scores sent with these outputs to their requests."""
    if not outputs:
        return
    params = outputs[0].kv_transfer_params
    if params is not None and (message := params.pop(SCORES, None)) is not None:
        outputs[0].kv_transfer_params = params or None
        log.arrived(message)

    def owner(name: str) -> tuple[str, int] | None:
        if (state := processor.request_states.get(name)) is None:  # aborted
            return None
        parent = state.parent_req
        return state.external_req_id if parent is None else parent.external_req_id, state.request_index

    log.file([output.request_id for output in outputs], owner)


def request_tokens(processor: OutputProcessor, name: str, first: int, count: int) -> tuple[str, int, list[int | None]]:
    """Return a request's submitted name, its choice index, and `count` token ids starting at position `first` (None:
    unknown). `name`: the core's name for the request."""
    if (state := processor.request_states.get(name)) is None:
        return name, 0, [None] * count
    prompt, detokenizer = state.prompt_token_ids or [], state.detokenizer
    found: list[int | None] = list(prompt[first : first + count])
    if detokenizer is not None and first + count > state.prompt_len:
        begin = max(first - state.prompt_len, 0)
        found += detokenizer.output_token_ids[begin : first + count - state.prompt_len]
    parent = state.parent_req
    external = state.external_req_id if parent is None else parent.external_req_id
    return external, state.request_index, found + [None] * (count - len(found))


def log_monitors(processor: OutputProcessor, log: MonitorLog) -> None:
    """Store all scores that later arrive with a processor's outputs in `log`."""
    vars(processor)["patchclamp_monitors"] = log


def tables_of(processor: OutputProcessor) -> dict[str, list[Table]]:
    """Return log-probabilities by run. They are stored only for runs added to this dict before their first output."""
    return vars(processor).setdefault("patchclamp_tables", {})


def verdict_in(output: RequestOutput) -> Verdict | None:
    """Remove and return the verdict on a request's program from an output; None if absent."""
    params = output.kv_transfer_params
    if not isinstance(params, dict) or KEY not in params:
        return None
    output.kv_transfer_params = None
    receipt, error, *rest = params[KEY]
    return Verdict(receipt, tuple(error) if error is not None else None, *rest)


def draft_counts(completion: CompletionOutput) -> tuple[int, int] | None:
    """Return a completion's counts of drafted and accepted tokens; None if vLLM does not count them."""
    counts = completion.spec_decode_metrics
    if counts is None:
        return None
    return counts.num_draft_tokens, sum(accepted * steps for accepted, steps in enumerate(counts.histogram))


def decoded(
    processor: OutputProcessor, prompt: list[int], params: SamplingParams, ids: list[int], stopped: bool
) -> str:
    """Decode generated ids with vLLM's detokenizer. `stopped`: True if the last id stopped the request."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request: Any = SimpleNamespace(request_id="", sampling_params=params, prompt_token_ids=prompt, prompt_embeds=None)
    detokenizer = IncrementalDetokenizer.from_new_request(processor.tokenizer, request)
    detokenizer.update(ids, stopped)
    return detokenizer.get_next_output_text(finished=True, delta=False)


# -- the core of an `LLMEngine`


def tell_core(engine: LLMEngine, method: str, *args: Any) -> None:
    """Call a method of the core's `Admission` without waiting. The call arrives before requests added later. Raises
    `EngineError` if an earlier call failed."""
    client: Any = engine.engine_core
    if (core := core_here(engine)) is not None:
        core.patchclamp_call(method, args)
        return
    from vllm.v1.engine import EngineCoreRequestType

    answers: collections.deque[Future[Any]] = vars(client).setdefault("patchclamp_calls", collections.deque())
    while answers and answers[0].done():
        failure = answers.popleft().exception()
        if failure is not None:
            raise EngineError(f"the engine core rejected a call: {failure}")
    number, future = uuid.uuid1().int >> 64, Future()
    client.utility_results[number] = future
    client._send_input(EngineCoreRequestType.UTILITY, (0, number, "patchclamp_call", (method, args)))
    answers.append(future)


def ask_core(engine: LLMEngine, method: str, *args: Any) -> Any:
    """Call a method of the core's `Admission` and return its result."""
    client: Any = engine.engine_core
    core = core_here(engine)
    return client.call_utility("patchclamp_call", method, args) if core is None else core.patchclamp_call(method, args)


def core_here(engine: LLMEngine) -> Any:
    """Return an engine's core if it is in this process, else None."""
    from vllm.v1.engine.core_client import InprocClient

    return engine.engine_core.engine_core if isinstance(engine.engine_core, InprocClient) else None


def is_unfinished(engine: LLMEngine, name: str) -> bool:
    """True if a request with this caller's id has not finished."""
    return name in engine.output_processor.external_req_ids


def is_busy(engine: LLMEngine) -> bool:
    """True if an engine must be stepped. A core in another process steps by itself."""
    core = core_here(engine)
    return engine.has_unfinished_requests() or (core is not None and is_pending(core))


def notice_death(engine: LLMEngine) -> None:
    """Fail pending calls when a core's process is killed. Otherwise, vLLM ends its output thread without an error."""
    from vllm.v1.engine.core_client import SyncMPClient

    client = engine.engine_core
    if not isinstance(client, SyncMPClient):
        return
    thread, arrived, results = client.output_queue_thread, client.outputs_queue, client.utility_results

    def wait() -> None:
        thread.join()
        error = EngineError("the engine core process has exited")
        arrived.put(error)
        for future in list(results.values()):
            if not future.done():
                future.set_exception(error)

    threading.Thread(target=wait, name="patchclamp core", daemon=True).start()


def shut_down(engine: LLMEngine, alone: bool) -> None:
    """Shut down an engine. If this process has other engines, keep the state that they share."""
    if alone:
        engine.engine_core.shutdown()
        return
    with _disabled():
        engine.engine_core.shutdown()


@contextmanager
def _disabled() -> Iterator[None]:
    """Replace vLLM's cleanup of shared state with no-ops inside the context."""
    places = [each.found() for each in DISABLED]
    before = [getattr(*place) for place in places]
    for owner, name in places:
        setattr(owner, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for (owner, name), stock in zip(places, before, strict=True):
            setattr(owner, name, stock)


# -- the cores of an `AsyncLLM`


def core_count(client: AsyncLLM) -> int:
    """Return the number of a client's engine cores: data-parallel replicas of the model."""
    return len(_cores_of(client).core_engines)


def process_count(client: AsyncLLM) -> int:
    """Return the number of the server's API processes."""
    return _cores_of(client).client_count


def process_index(client: AsyncLLM) -> int:
    """Return the index of this API process."""
    return _cores_of(client).client_index


def _cores_of(client: AsyncLLM) -> AsyncMPClient:
    return client.engine_core  # type: ignore[return-value]


def tell_cores(client: AsyncLLM, method: str, *args: Any, only: int | None = None) -> list[asyncio.Future[Any]]:
    """Call a method of each core's `Admission`, or only of core `only`'s, on the loop's thread. Return futures."""
    return _tell(client, "patchclamp_call", (method, args), only)


def tell_workers(client: AsyncLLM, verb: str, *args: Any, only: int | None = None) -> list[asyncio.Future[Any]]:
    """Call the workers of every engine core, or of core `only`. Each future receives one core's list of results."""
    return _tell(client, "collective_rpc", ("patchclamp_rpc", None, (verb, *args), {}), only)


def _tell(client: AsyncLLM, method: str, args: tuple[Any, ...], only: int | None) -> list[asyncio.Future[Any]]:
    from vllm.v1.engine import EngineCoreRequestType

    cores, answers = _cores_of(client), []
    for engine in cores.core_engines if only is None else [cores.core_engines[only]]:
        number = uuid.uuid1().int >> 64
        answer: Any = asyncio.get_running_loop().create_future()
        cores.utility_results[number] = answer
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


def fail_all(client: AsyncLLM) -> None:
    """Fail every pending request and call with vLLM's error for a dead engine."""
    error: Any = client.dead_error
    client.output_processor.propagate_error(error)
    for answer in list(_cores_of(client).utility_results.values()):
        _fail(answer, error)


def _fail(answer: Any, error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # retrieve it: asyncio logs exceptions of futures that are never awaited
