"""The model runners, the worker and the prefix cache: where steps begin, are planned and end.

Seeded requests on the CPU whose prompts are computed in chunks.

vLLM draws a token for every chunk of a prompt, and takes that back by the offset of the request's generator.  A CPU's
generator has no offset, and the error would end the engine.

The tap on attention's result, in the Python of vLLM's attention op, which no compiler sees.

A tap further on, in the model, would be on a view of the op's output, and Inductor would copy it there and back.
"""

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
    """A generator that returns to its state at the beginning of the step, whatever offset is set."""

    def keep(self) -> None:
        self._at_step = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        self.set_state(self._at_step)


def rewind(runner: Any) -> None:
    """Has a V1 runner on a CPU give such requests generators that can be rewound; they draw the same numbers."""
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
    """Gives every result of an attention layer, [T, H, E] or [T, H · E], to a tap that may change it in place.

    Raises `SeamMoved` where the layer's implementation takes no output to write to.
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


STEPS_UNDER_WAY = 2  # at most, of one worker, where steps are scheduled ahead

# -- the worker


def on_load(attach: Callable[[Any], None], call: Callable[..., Any]) -> None:
    """Calls `attach(worker)` after a worker of ours has loaded its model, and `call(worker, verb, …)` for our RPCs."""
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
    """A worker's model runner and its kind, "v1" or "v2".

    Raises `SeamMoved` for another kind, and where a seam that this kind needs is not there.
    """
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
    """Counts `size` bytes of device memory with the model's.

    vLLM 0.26 leaves room for them in that way; 0.32 measures them itself, and only reports this.
    """
    runner.model_memory_usage += size


def on_sleep(worker: Any, refusal: Callable[[int], Exception | None]) -> None:
    """Has a worker sleep only at levels for which there is no `refusal`."""
    stock = worker.sleep

    @forwards(stock)
    def sleep(level: int = 1, *args: Any, **kwargs: Any) -> Any:
        error = refusal(level)
        if error is not None:
            raise error
        return stock(level, *args, **kwargs)

    worker.sleep = sleep


def on_execute(worker: Any, ahead: Callable[[Any], None]) -> None:
    """Calls `ahead(scheduler_output)` as soon as a step reaches a worker, which may then wait for another's tensors."""
    execute = worker.execute_model

    @forwards(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        ahead(scheduler_output)
        return execute(scheduler_output, *args, **kwargs)

    worker.execute_model = execute_model


class Hooks(msgspec.Struct):
    """What a worker does around a step.

    before     called with the scheduler's output; returns whether the step is active (a program acts in it), and
               whether a graph may be used
    planned    called in active steps with the requests, and the first row, first position and count of each; and
               with speculative decoding, for how many of its last rows logits are computed
    logits     called with what the model computed
    after      called after active steps
    at_work    makes a context in which taps act
    at_rest    makes a context for steps that are not active
    """

    before: Callable[[Any], tuple[bool, bool]]
    planned: Callable[[list[str], np.ndarray, np.ndarray, np.ndarray, np.ndarray | None], None]
    logits: Callable[[Any], None]
    after: Callable[[], None]
    at_work: Callable[[], Any]
    at_rest: Callable[[], Any]


def hook_runner(runner: Any, kind: str, hooks: Hooks, graphs: Graphs | None) -> None:
    """Puts hooks around a runner's steps, on this instance alone; `graphs` will be its CUDA graphs."""
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

    active = False  # the step at hand
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
            graphs.use(active=False)  # the model that drafts, whose graphs are among them, runs after this
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
    """For how many rows of each request a step computes logits: its newest token's and the drafted ones'. None: for
    one of each."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return np.array([1 + len(drafts.get(request, ())) for request in requests]) if drafts else None


def _hook_v2(runner: Any, hooks: Hooks, graphs: Graphs) -> None:
    execute, prepare, sample = runner.execute_model, runner.prepare_inputs, runner.sample_tokens

    record_variants(runner, graphs)
    on_dispatch()
    active = False  # the step at hand
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
            active = False  # `sample_tokens` may be called all the same
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
            graphs.use(active=False)  # the model that drafts, whose graphs are among them, runs in there
        result = sample(*args, **kwargs)
        if active:
            hooks.after()
        return result

    runner.execute_model, runner.prepare_inputs, runner.sample_tokens = execute_model, prepare_inputs, sample_tokens


def _no_graph(mode: Any, tokens: int) -> bool:
    """That no recorded graph may be used."""
    return False


def _profile_variants(runner: Any, graphs: Graphs) -> None:
    """Has a V1 runner compile, tune and measure the active variant like the idle one. Its other dummy steps are idle,
    whatever the last step was."""
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
    """This worker's tensor-parallel rank, whether it is the first of its stage, and whether its stage makes logits.

    All workers of a stage see the same rows.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    rank = get_tp_group().rank_in_group
    return rank, rank == 0, get_pp_group().is_last_rank


def all_workers() -> Any:
    """vLLM's group of all workers of an engine."""
    from vllm.distributed.parallel_state import get_world_group

    return get_world_group()


def device_facts(runner: Any, kind: str) -> tuple[int, int, Any]:
    """Most rows of a step, most of which logits are computed, and the tensor of every row's position."""
    speculative_config = runner.vllm_config.speculative_config
    samples = 1 + (0 if speculative_config is None else speculative_config.num_speculative_tokens)
    positions = runner.input_buffers.positions if kind == "v2" else runner.positions
    return runner.max_num_tokens, samples * runner.max_num_reqs, positions


def token_ids(runner: Any, kind: str) -> Any:
    """The tensor of every row's token id, which the runner fills before every step."""
    return runner.input_buffers.input_ids if kind == "v2" else runner.input_ids.gpu


def scheduled(scheduler_output: Any) -> tuple[dict[str, int], int]:
    """Tokens of each request of a step, and of all."""
    return scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens


def going_on(scheduler_output: Any) -> list[str] | None:
    """The requests of a step, if it computes one token of each and none came, came back or left; else None."""
    new, running = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    if new or running.resumed_req_ids or scheduler_output.finished_req_ids or preempted(scheduler_output):
        return None
    requests = running.req_ids
    return requests if scheduler_output.total_num_scheduled_tokens == len(requests) else None


def same_requests(scheduler_output: Any) -> bool:
    """Whether no request came for the first time, finished, or was preempted."""
    new, finished_ids = scheduler_output.scheduled_new_reqs, scheduler_output.finished_req_ids
    return not (new or finished_ids or preempted(scheduler_output))


def positions(scheduler_output: Any) -> Iterator[tuple[str, int]]:
    """Each request of a step and the first position it computes."""
    running = scheduler_output.scheduled_cached_reqs
    yield from zip(running.req_ids, running.num_computed_tokens, strict=True)
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens


def checked_positions(runner: Any, scheduler_output: Any) -> dict[str, int]:
    """Each request of a step and the first position it computes, where the scheduler does not know it yet: it says what
    it is if all drafts of the last step are right. Waits until the device has checked them."""
    import torch

    states, running = runner.req_states, scheduler_output.scheduled_cached_reqs
    begins, computed = dict(positions(scheduler_output)), states.num_computed_tokens
    counts = torch.Tensor.tolist(computed.gpu)
    for request in running.req_ids:
        if request not in running.resumed_req_ids:
            begins[request] = counts[states.req_id_to_index[request]]
    return begins


def most_ahead(runner: Any) -> int:
    """By how many tokens the scheduler may take a request to be further than it is, because steps are scheduled before
    it is known how many drafts of the last one were right."""
    speculative_config, scheduler_config = runner.vllm_config.speculative_config, runner.vllm_config.scheduler_config
    if speculative_config is None or not getattr(scheduler_config, "async_scheduling", False):
        return 0
    return STEPS_UNDER_WAY * speculative_config.num_speculative_tokens


def orders(scheduler_output: Any) -> Any:
    """What admission has for the workers to do before this step, or None."""
    return getattr(scheduler_output, "patchclamp", None)


def finished(scheduler_output: Any) -> set[str]:
    return scheduler_output.finished_req_ids


def preempted(scheduler_output: Any) -> int:
    """How many requests this step preempted."""
    return len(getattr(scheduler_output, "preempted_req_ids", None) or ())


def carried(params: Any) -> bytes | None:
    """The program in a request's sampling parameters."""
    extra = getattr(params, "extra_args", None)
    program = extra.get(KEY) if extra else None
    return program if isinstance(program, bytes) else None


def has_foreign(params: Any) -> bool:
    """Whether something else stands where a request's program would."""
    extra = getattr(params, "extra_args", None)
    return bool(extra) and extra.get(KEY) is not None and carried(params) is None


# -- the prefix cache, in the engine core


def on_block_key(content: Callable[[Any, bytes, int, int], str | None]) -> None:
    """Adds `content(request, program, start, end)` to the key of a block of tokens start … end−1."""
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
    """Replaces a function in the modules that imported it by name, too."""
    for module_name in ("kv_cache_utils", "block_pool"):
        module = importlib.import_module(f"vllm.v1.core.{module_name}")
        if getattr(module, name, None) is stock:
            setattr(module, name, ours)


def on_cache_search(lowest: Callable[[Any, bytes], int | None]) -> None:
    """Has the prefix cache serve at most the first `lowest(request, program)` tokens of a request."""
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
