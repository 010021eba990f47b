"""Hooks on vLLM's model runners, worker, attention layers and prefix cache, and readers of the scheduler's output."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from patchclamp.engines.vllm.compat.configuration import KEY, enabled
from patchclamp.engines.vllm.compat.graphs import (
    Graphs,
    compiled_variant,
    on_dispatch,
    record_variants,
    record_variants_v1,
)
from patchclamp.engines.vllm.compat.seams import forwards, require, require_all, require_on, version
from patchclamp.errors import SeamMoved


class _Rewound(torch.Generator):
    """A generator whose `set_offset` returns it to its state at the beginning of the step."""

    def keep(self) -> None:
        self._at_step = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        self.set_state(self._at_step)


def rewind(runner: Any) -> None:
    """Make a V1 runner on a CPU use generators that can be rewound, for seeded requests with chunked prompts.

    vLLM samples a token for every chunk of a prompt, and undoes that through the offset of the request's generator. A
    CPU generator has no offset, and the error would end the engine. The new generators draw the same numbers.
    """
    prepare = runner._prepare_inputs

    @forwards(prepare)
    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        for row, generator in batch.generators.items():
            if not isinstance(generator, _Rewound):
                rewound = _Rewound()
                rewound.set_state(generator.get_state())
                batch.generators[row] = runner.requests[batch.req_ids[row]].generator = rewound
            batch.generators[row].keep()
        return prepare(*args, **kwargs)

    runner._prepare_inputs = prepare_inputs


def after(layer: Any, tap: Callable[[torch.Tensor], None]) -> None:
    """Call a tap on every output of an attention layer, [T, H, E] or [T, H · E], which it may change in place.

    This wraps the Python of vLLM's attention op, which is opaque to the compiler. A later tap, in the model, would be
    on a view of the op's output, and Inductor would copy it back and forth.

    Raises `SeamMoved` if the layer's implementation has no `output` argument.
    """
    require_on("attention layer", layer)
    require_on("attention implementation", layer.impl)
    inner = layer.impl.forward
    signature = inspect.signature(inner)
    if "output" not in signature.parameters:
        raise SeamMoved(f"vLLM {version()} does not give {type(layer).__name__} an output to write to")

    @forwards(inner)
    def forward(*args: Any, **named: Any) -> Any:
        result = inner(*args, **named)
        tap(named["output"] if "output" in named else signature.bind(*args, **named).arguments["output"])
        return result

    layer.impl.forward = forward


STEPS_UNDER_WAY = 2  # the maximum per worker, if steps are scheduled ahead

# -- the worker


def on_load(attach: Callable[[Any], None], call: Callable[..., Any]) -> None:
    """Call `attach(worker)` once a worker with patchclamp has its model, and `call(worker, verb, …)` for our RPCs."""
    owner, name = require("load")
    wrapper_base = getattr(owner, name)
    if getattr(wrapper_base, "patchclamp_rpc", None) is not None:
        return

    def load_model(wrapper_base: Any, *args: Any, **kwargs: Any) -> Any:
        result = wrapper_base.worker.load_model(*args, **kwargs)
        if enabled(wrapper_base.worker.vllm_config) is not None:
            attach(wrapper_base.worker)
        return result

    def patchclamp_rpc(wrapper_base: Any, verb: str, *args: Any) -> Any:
        return call(wrapper_base.worker, verb, *args)

    wrapper_base.load_model = load_model
    wrapper_base.patchclamp_rpc = patchclamp_rpc


def runner_of(worker: Any) -> tuple[Any, str]:
    """Return a worker's model runner and its kind, "v1" or "v2". Raises `SeamMoved` for another kind, and if a seam
    that this kind needs is missing."""
    runner = worker.model_runner
    kinds = {"vllm.v1.worker.gpu.model_runner": "v2", "vllm.v1.worker.gpu_model_runner": "v1"}
    kind = next((kinds[base.__module__] for base in type(runner).__mro__ if base.__module__ in kinds), None)
    if kind is None:
        raise SeamMoved(
            f"vLLM {version()} runs this model with {type(runner).__qualname__}, which is neither V1 nor V2"
        )
    require_all("")
    require_all(kind)
    require_on(f"{kind} runner", runner)
    if kind == "v1":
        require_on("v1 batch", runner.input_batch)
        require_on("v1 buffer", runner.input_ids)
        require_on("v1 dispatcher", runner.cudagraph_dispatcher)
    else:
        require_on("v2 buffers", runner.input_buffers)
        require_on("v2 state", runner.model_state)
    require_on("network", runner.get_model())
    return runner, kind


def count_memory(runner: Any, size: int) -> None:
    """Count `size` bytes of device memory with the model's, for vLLM's report; vLLM measures the actual use itself."""
    runner.model_memory_usage += size


def on_sleep(worker: Any, refusal: Callable[[int], Exception | None]) -> None:
    """Make a worker's `sleep` raise `refusal(level)`, if that is an error."""
    stock = worker.sleep

    @forwards(stock)
    def sleep(level: int = 1, *args: Any, **kwargs: Any) -> Any:
        error = refusal(level)
        if error is not None:
            raise error
        return stock(level, *args, **kwargs)

    worker.sleep = sleep


def on_execute(worker: Any, ahead: Callable[[Any], None]) -> None:
    """Call `ahead(scheduler_output)` when a step reaches a worker, before it may wait for another worker's tensors."""
    execute = worker.execute_model

    @forwards(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        ahead(scheduler_output)
        return execute(scheduler_output, *args, **kwargs)

    worker.execute_model = execute_model


class Hooks(msgspec.Struct):
    """A worker's callbacks around a step.

    before     called with the scheduler's output; returns (active, usable): True if a program acts in the step, and
               True if a graph may be used
    planned    called in active steps with the requests, and the first row, first position and count of each; with
               speculative decoding also the number of last rows with logits
    logits     called with the model's logits
    after      called after active steps
    at_work    returns a context in which taps act
    at_rest    returns a context for steps that are not active
    """

    before: Callable[[Any], tuple[bool, bool]]
    planned: Callable[[list[str], np.ndarray, np.ndarray, np.ndarray, np.ndarray | None], None]
    logits: Callable[[Any], None]
    after: Callable[[], None]
    at_work: Callable[[], Any]
    at_rest: Callable[[], Any]


def hook_runner(runner: Any, kind: str, hooks: Hooks, graphs: Graphs | None) -> None:
    """Wrap a runner's steps with hooks, on this instance only. `graphs`: its CUDA graphs."""
    net = runner.get_model()
    compute = net.compute_logits

    @forwards(compute)
    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        hooks.logits(logits)
        return logits

    net.compute_logits = compute_logits
    if kind == "v1":
        if runner.device.type == "cpu":
            rewind(runner)
        _hook_v1(runner, hooks, graphs)
    else:
        assert graphs is not None
        _hook_v2(runner, hooks, graphs)


def _hook_v1(runner: Any, hooks: Hooks, graphs: Graphs | None) -> None:
    execute, prepare = runner.execute_model, runner._prepare_inputs
    if graphs is not None:
        record_variants_v1(runner, graphs)
        _profile_variants(runner, graphs)

    active = False  # of the current step
    drafts = runner.vllm_config.speculative_config is not None

    @forwards(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal active
        active, fits = hooks.before(scheduler_output)
        usable = None
        if graphs is not None:
            graphs.use(active)
            usable = graphs.has if fits else _no_graph
        if not active:
            with hooks.at_rest():
                return execute(scheduler_output, *args, **kwargs)
        with hooks.at_work(), compiled_variant(active=True, usable=usable):
            result = execute(scheduler_output, *args, **kwargs)
        hooks.after()
        if graphs is not None and drafts:
            graphs.use(active=False)  # the draft model, whose graphs are among these, runs after this
        return result

    @forwards(prepare)
    def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: np.ndarray, *args: Any, **kwargs: Any) -> Any:
        result = prepare(scheduler_output, num_scheduled_tokens, *args, **kwargs)
        if not active:
            return result
        batch = runner.input_batch
        requests = list(batch.req_ids)
        position = batch.num_computed_tokens_cpu[: len(requests)]
        row, samples = np.cumsum(num_scheduled_tokens) - num_scheduled_tokens, _samples(scheduler_output, requests)
        hooks.planned(requests, row, position, num_scheduled_tokens, samples)
        return result

    runner.execute_model, runner._prepare_inputs = execute_model, prepare_inputs


def _samples(scheduler_output: Any, requests: list[str]) -> np.ndarray | None:
    """Return each request's number of rows with logits: its newest token and the drafted ones. None: one each."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return np.array([1 + len(drafts.get(request, ())) for request in requests]) if drafts else None


def _hook_v2(runner: Any, hooks: Hooks, graphs: Graphs) -> None:
    execute, prepare, sample = runner.execute_model, runner.prepare_inputs, runner.sample_tokens

    record_variants(runner, graphs)
    on_dispatch()
    active = False  # of the current step
    drafts = runner.vllm_config.speculative_config is not None

    @forwards(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal active
        if kwargs.get("dummy_run") or (len(args) > 1 and args[1]):
            graphs.use(active=False)
            if kwargs.get("is_profile"):  # compile, tune and measure the active variant like the idle one
                with graphs.recording(), compiled_variant(active=True):
                    execute(scheduler_output, *args, **kwargs)
                runner.execute_model_state = None
            return execute(scheduler_output, *args, **kwargs)
        active, fits = hooks.before(scheduler_output)
        graphs.use(active)
        if not active:
            with hooks.at_rest():
                return execute(scheduler_output, *args, **kwargs)
        try:
            with hooks.at_work(), compiled_variant(active=True, usable=graphs.has if fits else _no_graph):
                return execute(scheduler_output, *args, **kwargs)
        except BaseException:
            active = False  # `sample_tokens` may still be called
            raise

    @forwards(prepare)
    def prepare_inputs(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = prepare(scheduler_output, *args, **kwargs)
        if not active:
            return batch
        requests = list(batch.req_ids)
        start, position = batch.query_start_loc_np[: batch.num_reqs], batch.num_computed_tokens_np[: batch.num_reqs]
        samples = _samples(scheduler_output, requests)
        hooks.planned(requests, start, position, batch.num_scheduled_tokens, samples)
        return batch

    @forwards(sample)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        if active and drafts:
            graphs.use(active=False)  # the draft model, whose graphs are among these, runs in `sample`
        result = sample(*args, **kwargs)
        if active:
            hooks.after()
        return result

    runner.execute_model, runner.prepare_inputs, runner.sample_tokens = execute_model, prepare_inputs, sample_tokens


def _no_graph(mode: Any, tokens: int) -> bool:
    """Reject every recorded graph."""
    return False


def _profile_variants(runner: Any, graphs: Graphs) -> None:
    """Make a V1 runner compile, tune and measure both variants. Its other dummy steps are always idle."""
    dummy = runner._dummy_run

    @forwards(dummy)
    def dummy_run(*args: Any, **kwargs: Any) -> Any:
        graphs.use(active=False)
        if kwargs.get("is_profile"):
            with graphs.recording(), compiled_variant(active=True):
                dummy(*args, **kwargs)
        return dummy(*args, **kwargs)

    runner._dummy_run = dummy_run


def worker_rank() -> tuple[int, bool, bool]:
    """Return this worker's tensor-parallel rank, True if it is the first of its stage, and True if its stage computes
    logits. All workers of a stage see the same rows.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    rank = get_tp_group().rank_in_group
    return rank, rank == 0, get_pp_group().is_last_rank


def all_workers() -> Any:
    """Return vLLM's group of all workers of an engine."""
    from vllm.distributed.parallel_state import get_world_group

    return get_world_group()


def device_facts(runner: Any, kind: str) -> tuple[int, int, Any]:
    """Return the maximum numbers of rows and of rows with logits in a step, and the tensor of the rows' positions."""
    speculative_config = runner.vllm_config.speculative_config
    samples = 1 + (0 if speculative_config is None else speculative_config.num_speculative_tokens)
    positions = runner.input_buffers.positions if kind == "v2" else runner.positions
    return runner.max_num_tokens, samples * runner.max_num_reqs, positions


def token_ids(runner: Any, kind: str) -> Any:
    """Return the tensor of every row's token id, which the runner fills before every step."""
    return runner.input_buffers.input_ids if kind == "v2" else runner.input_ids.gpu


def scheduled(scheduler_output: Any) -> tuple[dict[str, int], int]:
    """Return the number of tokens of each request of a step, and the total."""
    return scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens


def going_on(scheduler_output: Any) -> list[str] | None:
    """Return a step's requests if it computes one token of each, and none arrived, resumed or left; else None."""
    new, running = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    if new or running.resumed_req_ids or scheduler_output.finished_req_ids or preempted(scheduler_output):
        return None
    requests = running.req_ids
    return requests if scheduler_output.total_num_scheduled_tokens == len(requests) else None


def same_requests(scheduler_output: Any) -> bool:
    """True if no request is new, finished, or preempted."""
    new, finished_ids = scheduler_output.scheduled_new_reqs, scheduler_output.finished_req_ids
    return not (new or finished_ids or preempted(scheduler_output))


def positions(scheduler_output: Any) -> Iterator[tuple[str, int]]:
    """Yield each request of a step and the first position it computes."""
    running = scheduler_output.scheduled_cached_reqs
    yield from zip(running.req_ids, running.num_computed_tokens, strict=True)
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens


def checked_positions(runner: Any, scheduler_output: Any) -> dict[str, int]:
    """Return each request of a step and the first position it computes, read from the device after it has checked the
    drafts of the last step. The scheduler's positions assume that all drafts are accepted."""
    import torch

    states, running = runner.req_states, scheduler_output.scheduled_cached_reqs
    begins, computed = dict(positions(scheduler_output)), states.num_computed_tokens
    counts = torch.Tensor.tolist(computed.gpu)
    for request in running.req_ids:
        if request not in running.resumed_req_ids:
            begins[request] = counts[states.req_id_to_index[request]]
    return begins


def most_ahead(runner: Any) -> int:
    """Return the maximum number of tokens by which the scheduler's position of a request may be too high, because steps
    are scheduled before the last one's drafts are checked."""
    speculative_config, scheduler_config = runner.vllm_config.speculative_config, runner.vllm_config.scheduler_config
    if speculative_config is None or not getattr(scheduler_config, "async_scheduling", False):
        return 0
    return STEPS_UNDER_WAY * speculative_config.num_speculative_tokens


def orders(scheduler_output: Any) -> Any:
    """Return admission's orders to the workers for this step, or None."""
    return getattr(scheduler_output, "patchclamp", None)


def finished(scheduler_output: Any) -> set[str]:
    return scheduler_output.finished_req_ids


def preempted(scheduler_output: Any) -> int:
    """Return the number of requests that this step preempted."""
    return len(getattr(scheduler_output, "preempted_req_ids", None) or ())


def carried(params: Any) -> bytes | None:
    """Return the encoded program in a request's sampling parameters, or None."""
    extra = getattr(params, "extra_args", None)
    program = extra.get(KEY) if extra else None
    return program if isinstance(program, bytes) else None


def has_foreign(params: Any) -> bool:
    """True if a request has something other than a program under our key."""
    extra = getattr(params, "extra_args", None)
    return bool(extra) and extra.get(KEY) is not None and carried(params) is None


# -- the prefix cache, in the engine core


def on_block_key(content: Callable[[Any, bytes, int, int], str | None]) -> None:
    """Add `content(request, program, start, end)` to the key of a block of tokens start … end−1."""
    owner, name = require("block keys")
    stock = getattr(owner, name)
    if hasattr(stock, "patchclamp"):
        return

    @forwards(stock)
    def extra_keys(request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> Any:
        keys, following = stock(request, start_token_idx, end_token_idx, start_mm_idx)
        program = carried(request.sampling_params)
        if program is None:
            return keys, following
        edits = content(request, program, start_token_idx, end_token_idx)
        return (keys if edits is None else (*(keys or ()), (KEY, edits))), following

    extra_keys.patchclamp = True  # type: ignore[attr-defined]
    _replace_everywhere(name, stock, extra_keys)


def _replace_everywhere(name: str, stock: Any, ours: Any) -> None:
    """Replace a function, also in the modules that import it by name."""
    for module_name in ("kv_cache_utils", "block_pool"):
        module = importlib.import_module(f"vllm.v1.core.{module_name}")
        if getattr(module, name, None) is stock:
            setattr(module, name, ours)


def on_cache_search(lowest: Callable[[Any, bytes], int | None]) -> None:
    """Limit prefix cache hits to the first `lowest(request, program)` tokens of a request."""
    owner, name = require("cache search")
    stock = getattr(owner, name)
    if hasattr(stock, "patchclamp"):
        return

    @forwards(stock)
    def get_computed_blocks(cache_manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        program = carried(request.sampling_params)
        max_length = None if program is None else lowest(request, program)
        if max_length is None:
            return stock(cache_manager, request, *args, **kwargs)
        with _shorter_search(cache_manager.coordinator, max_length):
            return stock(cache_manager, request, *args, **kwargs)

    get_computed_blocks.patchclamp = True  # type: ignore[attr-defined]
    setattr(owner, name, get_computed_blocks)


@contextmanager
def _shorter_search(coordinator: Any, max_length: int) -> Iterator[None]:
    find = coordinator.find_longest_cache_hit

    @forwards(find)
    def shorter(block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any) -> Any:
        return find(block_hashes, min(max_cache_hit_length, max_length), *args, **kwargs)

    coordinator.find_longest_cache_hit = shorter
    try:
        yield
    finally:
        del coordinator.find_longest_cache_hit
