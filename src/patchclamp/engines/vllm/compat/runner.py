"""Hooks on vLLM's model runners, worker and attention layers; the scheduler's output; patchclamp's own batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch

from patchclamp.engines.vllm.compat.configuration import enabled
from patchclamp.engines.vllm.compat.connectors import KEYED
from patchclamp.engines.vllm.compat.pieces import Observer, Pieces, pieces_of
from patchclamp.engines.vllm.compat.seams import forwards, require_all, seam, version
from patchclamp.engines.vllm.compat.variants import (
    Graphs,
    compiled_variant,
    on_dispatch,
    record_variants,
    record_variants_v1,
)
from patchclamp.errors import SeamMoved
from patchclamp.kernels.transfer import to_device

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from patchclamp.engines.vllm.compat.keys import PagedKeys

V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
_V1, _V2, _WORKER = f"{V1}:GPUModelRunner.", f"{V2}:GPUModelRunner.", "vllm.v1.worker.gpu_worker:Worker."
seam(_WORKER + "execute_model", "begin a step", "self, scheduler_output")
seam(_WORKER + "sleep", "refuse levels that discard weights", "self, level=1")
seam(_V1 + "_prepare_inputs", "plan rows", "self, scheduler_output, num_scheduled_tokens", part="v1")
seam(_V1 + "execute_model", "begin a step", "self, scheduler_output, intermediate_tensors=None", part="v1")
seam(
    _V1 + "_dummy_run", "measure both variants",
    "self, num_tokens, cudagraph_runtime_mode=None, force_attention=False, uniform_decode=False, "
    "allow_microbatching=True, skip_eplb=False, is_profile=False, create_mixed_batch=False, remove_lora=True, "
    "is_graph_capturing=False, num_active_loras=0, profile_seq_lens=None, randomize_inputs=False", part="v1",
)  # fmt: skip
seam("vllm.v1.sample.sampler:Sampler.gather_specific_token_logprobs", "keep other requests' top log-probabilities",
     "self, logprobs, logprob_token_ids, sampled", part="v1")  # fmt: skip
seam(_V2 + "prepare_inputs", "plan rows", "self, scheduler_output, batch_req_state, batch_desc, num_active_loras",
     part="v2")  # fmt: skip
seam(
    _V2 + "execute_model", "begin a step",
    "self, scheduler_output, intermediate_tensors=None, dummy_run=False, skip_attn_for_dummy_run=False, "
    "is_profile=False, context_len=0, valid_dummy_state_slots=False, randomize_inputs=False", part="v2",
)  # fmt: skip
seam(_V2 + "sample_tokens", "end a step", "self, grammar_output", part="v2")


class _Rewound(torch.Generator):
    """A generator whose `set_offset` restores the state that it had at the start of the step."""

    def keep(self) -> None:
        self._at_step = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        self.set_state(self._at_step)


def rewind(runner: V1Runner) -> None:
    """Make a V1 runner on a CPU use rewindable generators, for seeded requests with chunked prompts.

    vLLM samples a token for every chunk of a prompt, and reverts the draw through the generator's offset. A CPU
    generator has no offset, and the error would stop the engine. The new generators draw the same numbers.
    """
    prepare = runner._prepare_inputs

    @forwards(prepare)
    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        for row, generator in batch.generators.items():
            if not isinstance(generator, _Rewound):
                state, generator = generator.get_state(), _Rewound()
                generator.set_state(state)
                batch.generators[row] = runner.requests[batch.req_ids[row]].generator = generator
            generator.keep()
        return prepare(*args, **kwargs)

    runner._prepare_inputs = prepare_inputs


def around(layer: Any, name: Literal["query", "output"], tap: Callable[[torch.Tensor], None]) -> None:
    """Call a tap after each call of an attention layer, on its queries or its output, [T, H, E] or [T, H · E]. The tap
    may change this tensor in place. By then the step's keys are in the cache.

    This wraps the Python implementation of vLLM's attention op, which is opaque to the compiler. A later tap, in the
    model, would act on a view of the op's output, which Inductor would copy back and forth.

    Raises `SeamMoved` if the layer's implementation has no argument of this name.
    """
    inner = layer.impl.forward
    parameters = list(inspect.signature(inner).parameters)
    if name not in parameters:
        raise SeamMoved(f"vLLM {version()} does not pass {name} to {type(layer).__name__}")

    place = parameters.index(name)

    @forwards(inner)
    def forward(*args: Any, **named: Any) -> Any:
        result = inner(*args, **named)
        tap(named[name] if name in named else args[place])
        return result

    layer.impl.forward = forward


STEPS_UNDER_WAY = 2  # the maximum per worker, if steps are scheduled ahead

# -- the worker


def on_load(attach: Callable[[Any], None], call: Callable[..., Any]) -> None:
    """Call `attach(worker)` once a patchclamp worker has loaded its model, and `call(worker, verb, …)` for our RPCs."""
    from vllm.v1.worker import worker_base

    wrapper: Any = worker_base.WorkerWrapperBase
    if hasattr(wrapper, "patchclamp_rpc"):
        return

    def load_model(self: WorkerWrapperBase, *args: Any, **kwargs: Any) -> Any:
        worker: Any = self.worker
        result = worker.load_model(*args, **kwargs)
        if enabled(worker.vllm_config) is not None:
            attach(worker)
        return result

    def patchclamp_rpc(self: WorkerWrapperBase, verb: str, *args: Any) -> Any:
        return call(self.worker, verb, *args)

    wrapper.load_model, wrapper.patchclamp_rpc = load_model, patchclamp_rpc  # it forwards unknown names to its worker


def runner_of(worker: Worker) -> tuple[Any, str]:
    """Return a worker's model runner and its kind, "v1" or "v2". Raises `SeamMoved` for another kind, or if a seam that
    this kind needs differs."""
    runner: Any = worker.model_runner
    modules = {base.__module__ for base in type(runner).__mro__}
    kind = "v2" if V2 in modules else "v1" if V1 in modules else None
    if kind is None:
        raise SeamMoved(f"vLLM {version()} uses {type(runner).__qualname__}; expected the V1 or V2 runner")
    require_all("")
    require_all(kind)
    return runner, kind


def count_memory(runner: V1Runner | V2Runner, size: int) -> None:
    """Add `size` bytes to the model's device memory in vLLM's report; vLLM measures actual use itself."""
    runner.model_memory_usage += size


def on_sleep(worker: Worker, refusal: Callable[[int], Exception | None]) -> None:
    """Make a worker's `sleep` raise `refusal(level)` unless that is None."""
    stock = worker.sleep

    @forwards(stock)
    def sleep(level: int = 1) -> Any:
        error = refusal(level)
        if error is not None:
            raise error
        return stock(level)

    worker.sleep = sleep


def on_new_weights(net: torch.nn.Module, loaded: Callable[[], None]) -> None:
    """Call `loaded()` whenever weights are loaded into a model, even by a caller with direct access to the model, such
    as a trainer in this process."""
    stock: Any = net.load_weights

    @forwards(stock)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        try:
            return stock(*args, **kwargs)
        finally:
            loaded()

    net.load_weights = load_weights  # type: ignore[assignment]


def on_execute(worker: Worker, ahead: Callable[[SchedulerOutput], None]) -> None:
    """Call `ahead(scheduler_output)` when a step reaches a worker, before the worker may block on another's tensors."""
    execute = worker.execute_model

    @forwards(execute)
    def execute_model(scheduler_output: SchedulerOutput) -> Any:
        ahead(scheduler_output)
        return execute(scheduler_output)

    worker.execute_model = execute_model


class Hooks(msgspec.Struct):
    """A worker's callbacks around a step.

    before     called with the scheduler's output; returns (active, usable): True if a program acts in the step, and
               True if a graph may be used
    planned    called in active steps with the requests, and the first row, first position and row count of each; with
               speculative decoding, also the number of its final rows with logits
    logits     called with the model's logits
    after      called after active steps
    at_work    returns a context in which taps act
    at_rest    returns a context for steps that are not active
    """

    before: Callable[[SchedulerOutput], tuple[bool, bool]]
    planned: Callable[[list[str], np.ndarray, np.ndarray, np.ndarray, np.ndarray | None], None]
    logits: Callable[[torch.Tensor | None], None]
    after: Callable[[], None]
    at_work: Callable[[], AbstractContextManager[Any]]
    at_rest: Callable[[], AbstractContextManager[Any]]


def hook_runner(runner: Any, kind: str, hooks: Hooks, graphs: Graphs | None) -> None:
    """Wrap the steps of this runner instance with hooks. `graphs`: its CUDA graphs."""
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


def _hook_v1(runner: V1Runner, hooks: Hooks, graphs: Graphs | None) -> None:
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
    _keep_top_logprobs(runner)


def _keep_top_logprobs(runner: V1Runner) -> None:
    """Keep requests' top log-probabilities in a batch with a request that scores given tokens: stock's V1 sampler
    returns only one kind for a whole batch, and -inf to requests for the other kind."""
    sampler = runner.sampler
    stock = sampler.gather_specific_token_logprobs

    @forwards(stock)
    def gather(logprobs: torch.Tensor, logprob_token_ids: dict[int, list[int]], sampled: torch.Tensor) -> Any:
        scored = stock(logprobs, logprob_token_ids, sampled)
        most = runner.input_batch.sampling_metadata.max_num_logprobs
        if scored is None or not most or most < 0 or len(logprob_token_ids) == len(logprobs):
            return scored
        top = sampler.gather_logprobs(logprobs, most, token_ids=sampled)
        width = max(scored.logprobs.shape[1], top.logprobs.shape[1])
        ids, values = (
            top.logprob_token_ids.new_zeros(len(logprobs), width),
            logprobs.new_full((len(logprobs), width), -torch.inf),
        )
        is_scored = torch.zeros(len(logprobs), dtype=torch.bool)
        is_scored[list(logprob_token_ids)] = True
        for found, rows in ((scored, is_scored), (top, ~is_scored)):
            rows = rows.to(logprobs.device)
            ids[rows, : found.logprobs.shape[1]] = found.logprob_token_ids[rows]
            values[rows, : found.logprobs.shape[1]] = found.logprobs[rows]
        return top._replace(logprob_token_ids=ids, logprobs=values)

    sampler.gather_specific_token_logprobs = gather


def _samples(scheduler_output: SchedulerOutput, requests: list[str]) -> np.ndarray | None:
    """Return each request's number of rows with logits, 1 plus its draft tokens; None if the step has no drafts."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return np.array([1 + len(drafts.get(request, ())) for request in requests]) if drafts else None


def _hook_v2(runner: V2Runner, hooks: Hooks, graphs: Graphs) -> None:
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
    """Return False: no recorded graph may be used."""
    return False


def without_graph() -> AbstractContextManager[Any]:
    """Return a context in which compiled code with taps runs without a graph."""
    return compiled_variant(active=True, usable=_no_graph)


def request_amx() -> None:
    """Request AMX from Linux, if this CPU has it. vLLM's attention uses it in 16 bits without a request; the process
    dies unless oneDNN has made one, for a product of several rows."""
    torch.cpu._init_amx()


def on_results(runner: Any, taken: Callable[[int], Callable[[], np.ndarray]]) -> None:
    """Send arrays to the core with a runner's outputs, as their attribute `patchclamp`. `taken(tokens)` is called after
    the forward pass of each step that has tokens; the function that it returns is called once the output is needed."""
    execute, sample = runner.execute_model, runner.sample_tokens
    waits: list[Callable[[], np.ndarray]] = []  # of a step that was computed but not yet sampled

    def carry(result: Any) -> Any:
        if not waits or result is None:
            return result
        wait = waits.pop()
        if not hasattr(result, "get_output"):
            vars(result)["patchclamp"] = wait()
            return result
        stock = result.get_output

        @forwards(stock)
        def get_output() -> Any:
            output = stock()
            vars(output)["patchclamp"] = wait()
            return output

        result.get_output = get_output
        return result

    @forwards(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = execute(scheduler_output, *args, **kwargs)
        if kwargs.get("dummy_run") or (len(args) > 1 and args[1]) or not scheduler_output.total_num_scheduled_tokens:
            return result
        waits[:] = [taken(scheduler_output.total_num_scheduled_tokens)]
        return carry(result)

    @forwards(sample)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        return carry(sample(*args, **kwargs))

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def _profile_variants(runner: V1Runner, graphs: Graphs) -> None:
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
    """Return (tensor-parallel rank, True if this worker is the first of its stage, True if its stage computes logits).
    All workers of a stage see the same rows."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    rank = get_tp_group().rank_in_group
    return rank, rank == 0, get_pp_group().is_last_rank


def device_facts(runner: Any, kind: str) -> tuple[int, int, Any]:
    """Return a step's maximum numbers of rows and of rows with logits, and the tensor of row positions."""
    speculative_config = runner.vllm_config.speculative_config
    samples = 1 + (0 if speculative_config is None else speculative_config.num_speculative_tokens)
    positions = runner.input_buffers.positions if kind == "v2" else runner.positions
    return runner.max_num_tokens, max(samples * runner.max_num_reqs, CELLS), positions


def token_ids(runner: Any, kind: str) -> Any:
    """Return the tensor of token ids by row, which the runner fills before every step."""
    return runner.input_buffers.input_ids if kind == "v2" else runner.input_ids.gpu


def scheduled(scheduler_output: SchedulerOutput) -> tuple[dict[str, int], int]:
    """Return the token count of each request in a step, and the total."""
    return scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens


def going_on(scheduler_output: SchedulerOutput) -> list[str] | None:
    """Return a step's requests if each has one token and none was added, resumed, preempted or ended; else None."""
    new, running = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    if new or running.resumed_req_ids or scheduler_output.finished_req_ids or preempted(scheduler_output):
        return None
    requests = running.req_ids
    return requests if scheduler_output.total_num_scheduled_tokens == len(requests) else None


def same_requests(scheduler_output: SchedulerOutput) -> bool:
    """True if no request is new, finished or preempted."""
    new, finished_ids = scheduler_output.scheduled_new_reqs, scheduler_output.finished_req_ids
    return not (new or finished_ids or preempted(scheduler_output))


def positions(scheduler_output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Yield each request of a step with its first position in the step."""
    running = scheduler_output.scheduled_cached_reqs
    yield from zip(running.req_ids, running.num_computed_tokens, strict=True)
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens


def checked_positions(runner: V2Runner, scheduler_output: SchedulerOutput) -> dict[str, int]:
    """Return each request of a step with its first position in the step, read from the device once it has verified the
    last step's drafts. The scheduler's positions assume that all drafts are accepted."""
    states, running = runner.req_states, scheduler_output.scheduled_cached_reqs
    begins, computed = dict(positions(scheduler_output)), states.num_computed_tokens
    counts = torch.Tensor.tolist(computed.gpu)
    for request in running.req_ids:
        if request not in running.resumed_req_ids:
            begins[request] = counts[states.req_id_to_index[request]]
    return begins


def most_ahead(runner: V1Runner | V2Runner) -> int:
    """Return the maximum number of tokens by which the scheduler's position of a request may be too high, because steps
    are scheduled before the last step's drafts are verified."""
    speculative_config, scheduler_config = runner.vllm_config.speculative_config, runner.vllm_config.scheduler_config
    if speculative_config is None or not scheduler_config.async_scheduling:
        return 0
    return STEPS_UNDER_WAY * speculative_config.num_speculative_tokens


def orders(scheduler_output: SchedulerOutput) -> Any:
    """Return admission's orders to the workers for this step, or None."""
    return getattr(scheduler_output, "patchclamp", None)


def finished(scheduler_output: SchedulerOutput) -> set[str]:
    return scheduler_output.finished_req_ids


def preempted(scheduler_output: SchedulerOutput) -> int:
    """Return the number of requests that this step preempted."""
    return len(scheduler_output.preempted_req_ids or ())


# -- batches of our own, between the engine's steps


def refusal_of(config: VllmConfig) -> str:
    """Return the reason why cells of a model with this configuration run as requests; "" if they run in batches."""
    parallel, model = config.parallel_config, config.model_config
    # if vLLM has turned both off, such as for MLA on a CPU, attention may not read keys and values of earlier steps
    in_parts = config.scheduler_config.enable_chunked_prefill or config.cache_config.enable_prefix_caching
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "adapters": config.lora_config is not None,
        "drafts": config.speculative_config is not None,
        "images": model.is_multimodal_model or model.uses_mrope,
        "state-space layers": model.is_hybrid or model.is_attention_free,
        # copies blocks after they were freed, and does not see that a batch overwrites them
        "KV offloading": getattr(config.kv_transfer_config, "kv_connector", None) in KEYED,
        "no chunked prefill": not in_parts,
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


UNBOUNDED = {"FlashAttentionMetadataBuilder", "CPUAttentionMetadataBuilder"}  # builders without buffers per sequence
CELLS = 2048  # maximum sequences of a batch, and maximum rows with logits


class BatchModel:
    """A runner's model, for batches over cache blocks leased by the core.

    C sequences · R rows · G layer groups, each with its block tables · B tokens per block

    refusal: the reason why batches are not supported; "" if they are
    block: B · groups: G · blocks: the number of blocks in the cache
    rows, sequences, samples: the maximum per batch; samples are rows with logits
    pieces: the model's compiled pieces, so a batch may begin at any layer; None if not compiled in pieces
    """

    def __init__(self, runner: Any, kind: str, layers: int, keys: PagedKeys) -> None:
        self._runner, self._kind, self._keys = runner, kind, keys
        self.pieces: Pieces | None = pieces_of(runner.vllm_config, layers)
        if getattr(runner, "shared_kv_cache_layers", None):  # these read keys of layers before the first one computed
            self.pieces = None
        config = runner.kv_cache_config
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        kernel_blocks = getattr(runner, "kernel_block_sizes" if kind == "v2" else "_kernel_block_sizes", None)
        sizes = {spec.block_size for spec in specs}
        self.refusal: str = ""
        if len(sizes) != 1 or set(kernel_blocks or sizes) != sizes:
            self.refusal = f"blocks of several sizes ({sorted(sizes | set(kernel_blocks or ()))})"
        elif any(not hasattr(spec, "num_kv_heads") for spec in specs):
            self.refusal = f"a cache of {', '.join(sorted({type(spec).__name__ for spec in specs}))}"
        self.block: int = min(sizes, default=1)
        self.groups: int = len(specs)
        self.blocks: int = config.num_blocks
        self.rows, self.sequences = int(runner.max_num_tokens), int(runner.max_num_reqs)
        self._builders = [builder for groups in runner.attn_groups for group in groups
                          for builder in group.metadata_builders]  # fmt: skip
        self._has_graph = [bool(getattr(builder, "use_full_cuda_graph", False)) for builder in self._builders]
        if {type(builder).__name__ for builder in self._builders} <= UNBOUNDED:
            self.sequences = CELLS
        self.samples: int = CELLS
        # every cache once, with its blocks along the first axis
        caches = {cache.data_ptr(): cache for cache in self._caches()}
        self._by_block: list[torch.Tensor] = [self._blocks_first(cache) for cache in caches.values()]

    def _caches(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for cache in self._runner.kv_caches:
            found += [cache] if isinstance(cache, torch.Tensor) else list(cache)
        return found

    def _blocks_first(self, cache: torch.Tensor) -> torch.Tensor:
        axes = [axis for axis, size in enumerate(cache.shape[:2]) if size == self.blocks]
        if len(axes) != 1:
            self.refusal = self.refusal or f"a cache of shape {list(cache.shape)} for {self.blocks} blocks"
            return cache
        return cache.movedim(axes[0], 0)

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy keys and values of whole blocks in every layer."""
        if len(source):
            device = self._runner.device
            from_K, to_K = to_device(source.astype(np.int64), device), to_device(target.astype(np.int64), device)
            for cache in self._by_block:
                cache[to_K] = cache[from_K]

    @property
    def is_busy(self) -> bool:
        """True between a step and its sampling. The same on all workers of a stage."""
        return self._runner.execute_model_state is not None

    def forward(
        self, ids: np.ndarray, position: np.ndarray, count: np.ndarray, length: np.ndarray, tables: np.ndarray,
        layer: int = 0, crossing: Sequence[torch.Tensor] = (), observe: Observer | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Compute a batch, and return the stream after the last layer, [R, D].

        ids, position: token ids and positions of all rows, sequence by sequence, [R]
        count, length: each sequence's row count, and its length up to the last row, [C]
        tables: each sequence's block table, [G, C, blocks]
        layer, crossing, observe: as in `Pieces.within`
        """
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

        runner, device, rows = self._runner, self._runner.device, len(ids)
        begins = np.zeros(len(count) + 1, np.int32)
        np.cumsum(count, out=begins[1:])
        sequence = np.repeat(np.arange(len(count)), count)
        slots = tables[:, sequence, position // self.block] * self.block + position % self.block
        ids_R, position_R = self._inputs(rows)
        ids_R.copy_(to_device(ids.astype(np.int32), device))
        position_R.copy_(to_device(position.astype(np.int64), device))
        slots_GR = to_device(slots.astype(np.int64), device)
        lengths = length.astype(np.int32)
        for builder in self._builders:
            if hasattr(builder, "use_full_cuda_graph"):  # whose buffers belong to the engine's steps
                builder.use_full_cuda_graph = False
        try:
            block_tables = [to_device(table.astype(np.int32), device) for table in tables]
            metadata = self._metadata(begins, rows, count, lengths, block_tables, slots_GR, position_R)
        finally:
            for builder, has_graph in zip(self._builders, self._has_graph, strict=True):
                if has_graph:
                    builder.use_full_cuda_graph = True
        slot_mapping = build_slot_mappings_by_layer(slots_GR, runner.kv_cache_config)
        within = nullcontext() if self.pieces is None else self.pieces.within(layer, crossing, observe)
        self._keys.tables = block_tables
        try:
            with within, set_forward_context(metadata, runner.vllm_config, num_tokens=rows, slot_mapping=slot_mapping):
                return runner.get_model()(
                    input_ids=ids_R, positions=position_R, intermediate_tensors=None, inputs_embeds=None
                )
        finally:
            self._keys.tables = None

    def _metadata(
        self, begins: np.ndarray, rows: int, count: np.ndarray, lengths: np.ndarray, tables: list[torch.Tensor],
        slots_GR: torch.Tensor, position_R: torch.Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

        runner, device = self._runner, self._runner.device
        return build_attn_metadata(
            attn_groups=runner.attn_groups, num_reqs=len(count), num_tokens=rows,
            query_start_loc_gpu=to_device(begins, device), query_start_loc_cpu=torch.from_numpy(begins),
            max_query_len=int(count.max()), seq_lens=to_device(lengths, device), max_seq_len=int(lengths.max()),
            block_tables=tables, slot_mappings=slots_GR, kv_cache_config=runner.kv_cache_config,
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths), positions=position_R,
            is_prefilling=torch.ones(len(count), dtype=torch.bool),
        )  # fmt: skip

    def _inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the runner's own tensors of token ids and positions, [R] each, also read by patchclamp's kernels."""
        runner = self._runner
        if self._kind == "v2":
            return runner.input_buffers.input_ids[:rows], runner.input_buffers.positions[:rows]
        return runner.input_ids.gpu[:rows], runner.positions[:rows]

    def logits(self, hidden: torch.Tensor, row: np.ndarray) -> torch.Tensor | None:
        """Return the logits of the rows at these indices, [S, V]; None on a tensor-parallel worker without logits."""
        return self._runner.get_model().compute_logits(hidden[to_device(row, hidden.device)])

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of the given tokens of each row, [S, k], bit-identical to a request's."""
        if self._kind == "v2":
            from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

            return compute_token_logprobs(logits, tokens)
        return logits.log_softmax(-1, dtype=torch.float32).gather(-1, tokens)
