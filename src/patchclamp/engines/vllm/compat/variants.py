"""Two variants of vLLM's compiled code and CUDA graphs, and the choice between them in each step.

The active variant has taps. With stock numerics the idle variant is stock's own, without patchclamp's op. With uniform
numerics there is one version of the code, with taps; idle graphs are recorded with taps that launch nothing.

If enabled, `Watch` compares the addresses that CUDA graphs read at each replay with the addresses at recording.
Piecewise graphs, and a V1 runner's full graphs, are called with their inputs. A V2 runner's manager replays full graphs
without arguments: they read the inputs that the step has just built for attention.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from patchclamp.engines.vllm.compat.configuration import enabled, engine_id, is_uniform
from patchclamp.engines.vllm.compat.pieces import Pieces
from patchclamp.engines.vllm.compat.seams import forwards, seam
from patchclamp.errors import EngineError
from patchclamp.kernels import switches
from patchclamp.runtime.cuda_graphs import MAX_NODES, NODE_BYTES, addresses, compare
from patchclamp.runtime.taps import apart_from_layers, without_taps

if TYPE_CHECKING:
    from vllm.compilation.backends import VllmBackend
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner

COMPILE = seam("vllm.compilation.backends:VllmBackend.__call__", "compile idle steps without taps",
               "self, graph, example_inputs")  # fmt: skip
_V1, _V2 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.", "vllm.v1.worker.gpu.model_runner:GPUModelRunner."
_DISPATCHER = "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher."
seam(_V1 + "profile_cudagraph_memory", "count both variants", "self", part="v1")
seam(_V1 + "_capture_cudagraphs", "record taps", "self, batch_descriptors, cudagraph_runtime_mode, profiler=None",
     part="v1")  # fmt: skip
seam(
    _DISPATCHER + "dispatch", "choose no graph",
    "self, num_tokens, uniform_decode=False, has_lora=False, num_active_loras=0, valid_modes=None, invalid_modes=None",
    part="v1",
)  # fmt: skip
seam(_DISPATCHER + "get_capture_descs", "count both variants", "self", part="v1")
seam(_V2 + "capture_model", "record taps", "self, *, profile_only=False", part="v2")
seam(_V2 + "profile_cudagraph_memory", "count both variants", "self", part="v2")
seam("vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.run_fullgraph", "watch addresses", "self, desc", part="v2")
_DISPATCH = (
    "cudagraph_manager, num_reqs, num_tokens, uniform_token_count, dp_size, dp_rank, max_query_len=None, "
    "need_eager=False, num_active_loras=0, parallel_config=None, allow_ubatching=False, uniform_decode=False, {}"
    "dp_sync_state=None"
)
DISPATCH = seam(
    "vllm.v1.worker.gpu.model_runner:dispatch_cg_and_sync_dp", "choose no graph",
    _DISPATCH.format(""), _DISPATCH.format("allow_skip_drafts=False, "), part="v2",
)  # fmt: skip


class Watch:
    """Checks that CUDA graphs read the addresses that were recorded. `buffers()`: patchclamp's buffers, by name."""

    def __init__(self, buffers: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._buffers = buffers
        self._call_addresses: dict[str, int] | None = None  # of the arguments of the running wrapper
        self._built: dict[str, Any] = {}  # the step's inputs, as built by a V2 runner
        self.compared: int = 0  # replays compared

    def current_addresses(self) -> dict[str, int]:
        """Return the addresses of everything that the current graph reads, by path."""
        return self._addresses(self._built) if self._call_addresses is None else self._call_addresses

    def _addresses(self, values: Mapping[str, Any]) -> dict[str, int]:
        by_path: dict[str, int] = {}
        for path, value in (*values.items(), ("patchclamp", self._buffers())):
            by_path |= addresses(value, path)
        return by_path

    def _compare(self, graph: Any, filled: dict[str, int], name: str) -> None:
        recorded = getattr(graph, "addresses", None)
        if recorded is not None:
            self.compared += 1
            compare(recorded, filled, name)

    def watch_wrappers(self, vllm_config: VllmConfig) -> None:
        """Watch an engine's wrappers: their arguments, and for full graphs the attention inputs in the forward
        context."""
        _on_call()
        _watches[engine_id(vllm_config)] = (vllm_config, self)

    def run_wrapper(self, stock: Any, wrapper: Any, context: Any, args: Any, kwargs: Any) -> Any:
        """Compare the addresses that a wrapper's graph reads with the recorded addresses, then run the wrapper."""
        read: dict[str, Any] = {"args": dict(zip(argument_names(wrapper.runnable, len(args)), args, strict=True))}
        read["kwargs"] = kwargs
        if wrapper.runtime_mode.name == "FULL":
            read |= {"attn_metadata": context.attn_metadata, "slot_mapping": getattr(context, "slot_mapping", None)}
        filled, desc = self._addresses(read), context.batch_descriptor
        entry = wrapper.concrete_cudagraph_entries.get(desc)
        graph_name = f"{desc.num_tokens} tokens ({wrapper.runtime_mode.name})"
        self._compare(getattr(entry, "cudagraph", None), filled, graph_name)
        self._call_addresses = filled
        try:
            return stock(wrapper, *args, **kwargs)
        finally:
            self._call_addresses = None

    def watch_inputs(self, runner: V2Runner) -> None:
        """Watch the inputs that a V2 runner builds for a step or fills in place."""
        state = runner.model_state
        prepare = state.prepare_attn
        model_inputs: dict[str, Any] = {}  # inputs beside or instead of ids and positions

        def keeping(inner: Any) -> Any:
            @forwards(inner)
            def outer(*args: Any, **kwargs: Any) -> Any:
                inputs = inner(*args, **kwargs)
                model_inputs.update(inputs)
                return inputs

            return outer

        for name in ("prepare_inputs", "prepare_dummy_inputs"):
            if hasattr(state, name):
                setattr(state, name, keeping(getattr(state, name)))

        @forwards(prepare)
        def prepare_attn(
            input_batch: Any, cudagraph_mode: Any, block_tables: Any, slot_mappings: Any, *args: Any, **options: Any
        ) -> Any:
            metadata = prepare(input_batch, cudagraph_mode, block_tables, slot_mappings, *args, **options)
            inputs = {"input_ids": input_batch.input_ids, "positions": input_batch.positions}
            self._built = {
                "kwargs": inputs, "model_inputs": model_inputs, "attn_metadata": metadata, "block_tables": block_tables,
                "slot_mappings": slot_mappings, "is_padding": getattr(runner.input_buffers, "is_padding", None),
                "intermediate_tensors": getattr(getattr(runner, "intermediate_tensors", None), "tensors", None),
            }  # fmt: skip
            return metadata

        state.prepare_attn = prepare_attn

    def watch_replays(self, manager: Any) -> None:
        """Watch the full graphs of a V2 runner's manager."""
        run = manager.run_fullgraph
        if hasattr(run, "patchclamp"):
            return

        @forwards(run)
        def run_fullgraph(desc: Any) -> Any:
            self._compare(manager.graphs.get(desc), self.current_addresses(), f"{desc.num_tokens} tokens (FULL)")
            return run(desc)

        run_fullgraph.patchclamp = True  # type: ignore[attr-defined]
        manager.run_fullgraph = run_fullgraph


_watches: dict[int, tuple[Any, Watch]] = {}  # by `engine_id` of a configuration, which is kept alive with it


def argument_names(runnable: Any, count: int) -> list[int | str]:
    """Return names of a callable's first `count` arguments: inputs of its traced graph, parameters, or else indices."""
    graph = getattr(runnable, "graph", None)  # if it is a piece of a compiled model
    if isinstance(graph, torch.fx.GraphModule):
        names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
    else:
        parameters = inspect.signature(getattr(runnable, "forward", runnable)).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    return [*names[:count], *range(len(names), count)]


def _on_call() -> None:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.forward_context import get_forward_context, is_forward_context_available

    stock = CUDAGraphWrapper.__call__
    if hasattr(stock, "patchclamp"):
        return

    @forwards(stock)
    def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        _, watch = _watches.get(engine_id(wrapper.vllm_config), (None, None))
        if watch is None or not is_forward_context_available():
            return stock(wrapper, *args, **kwargs)
        context = get_forward_context()
        if context.cudagraph_runtime_mode != wrapper.runtime_mode:
            return stock(wrapper, *args, **kwargs)
        return watch.run_wrapper(stock, wrapper, context, args, kwargs)

    call.patchclamp = True  # type: ignore[attr-defined]
    CUDAGraphWrapper.__call__ = call  # type: ignore[method-assign]


logger: logging.Logger = logging.getLogger("patchclamp")


_Entries = list[tuple[Any, dict[Any, Any]]]  # wrappers of piecewise graphs (V1: also of full ones) and their graphs


class Graphs:
    """A runner's CUDA graphs, each recorded twice: idle, with an op that launches nothing, and active, with its kernel.

    sizes        step sizes, in tokens, to record with taps (None: all that vLLM records)
    recording    a context in which taps are recorded
    resting      a context in which graphs of idle steps are recorded
    tapped       makes a graph that was recorded with taps replayable
    forget       drops the taps of unfinished graphs
    watch        checks the addresses that graphs read, if enabled
    """

    recording: Callable[..., Any]

    def __init__(
        self, sizes: tuple[int, ...] | None, recording: Callable[[], Any], resting: Callable[[], Any],
        tapped: Callable[[Any], Any], forget: Callable[[], None], watch: Watch | None = None,
    ) -> None:  # fmt: skip
        self._sizes, self.recording, self._tapped, self._forget = sizes, recording, tapped, forget
        self._resting = resting
        self.watch = watch
        self._manager: Any = None  # a V2 runner's manager, which keeps full graphs
        self._config: Any = None
        self._stores: dict[bool, tuple[dict[Any, Any], _Entries]] = {}
        self._active = False
        self._recorded: set[tuple[Any, int]] = set()
        self._idle = 0
        self.share: float = 1.0  # the fraction of vLLM's sizes that are also recorded with taps
        self.problem: str = ""  # the reason why active graphs are missing
        self.bytes: dict[str, int] = {"without": 0, "with": 0}  # device memory of graphs without taps and with taps

    @property
    def idle(self) -> int:
        """The number of step sizes that vLLM records."""
        return self._idle

    @property
    def active(self) -> int:
        """The number of step sizes recorded with taps."""
        return len({tokens for _, tokens in self._recorded})

    def record(self, manager: Any, capture: Callable[[], None], profile: bool) -> None:
        """Record both variants of every graph of a V2 runner's manager, and leave the idle variant in place.

        A profile run records only the idle variant. If memory runs out, active steps run without graphs.
        """
        self._stores, self._recorded, self._active = {}, set(), False
        self.bytes = dict.fromkeys(self.bytes, 0)
        self.count([desc for descs in manager._capture_descs.values() for desc in descs])
        if self.watch is not None:
            self.watch.watch_replays(manager)
        counting = nullcontext() if profile else self._counting_bytes("without")
        with _graphs_of(_Watched, self.watch), self._resting(), counting:
            pieces = _recorded_in(capture)
        if profile:
            return
        self._manager, self._config = manager, manager.vllm_config
        self._stores[False] = self._take()
        wanted = {mode: [desc for desc in descs if self._wants(desc)] for mode, descs in manager._capture_descs.items()}

        def capture_wanted() -> None:
            stock_descs = manager._capture_descs
            manager._capture_descs = wanted
            try:
                capture()
            finally:
                manager._capture_descs = stock_descs

        keys = {(desc.cg_mode, desc.num_tokens) for descs in wanted.values() for desc in descs}
        store = ({}, [(wrapper, {}) for wrapper, _ in self._stores[False][1]])
        self._record_active(store, capture_wanted, keys, pieces)

    def record_mode(
        self, vllm_config: VllmConfig, mode: Any, sizes: list[Any], capture: Callable[[list[Any]], None]
    ) -> None:
        """Record both variants of a V1 runner's graphs for one mode, and leave the idle variant in place."""
        with _graphs_of(_Watched, self.watch), self._resting(), self._counting_bytes("without"):
            pieces = _recorded_in(lambda: capture(sizes))
        self._config = vllm_config
        self._stores[False] = self._take()
        recorded = {id(wrapper): dict(entries) for wrapper, entries in self._stores.get(True, ({}, []))[1]}
        wanted = [desc for desc in sizes if self._wants(desc)]
        store = ({}, [(wrapper, recorded.get(id(wrapper), {})) for wrapper, _ in self._stores[False][1]])
        self._record_active(store, lambda: capture(wanted), {(mode, desc.num_tokens) for desc in wanted}, pieces)

    def _record_active(
        self, store: tuple[dict[Any, Any], _Entries], capture: Callable[[], None], keys: set[tuple[Any, int]],
        pieces: list[tuple[Any, Any]],
    ) -> None:  # fmt: skip
        """Record graphs with taps for the (mode, tokens) in `keys` into a store, and put the idle graphs back.
        `pieces`: the wrappers with idle graphs, and each graph's descriptor.

        If device memory runs out, no graphs with taps are kept; with tensor parallelism, raises `EngineError`.
        """
        self._put(store)
        try:
            with self._counting_bytes("with"):
                with self.recording(), compiled_variant(active=True), _graphs_of(_WithNodes, self.watch):
                    capture()
                store = self._take()
                _check_recorded(store, pieces, keys, is_uniform(self._config))
                _check_full(store[0], [desc for desc in self._stores[False][0] if self._wants(desc)])
                for desc, graph in store[0].items():
                    store[0][desc] = self._tapped(graph)
                for _, entries in store[1]:
                    for entry in entries.values():
                        if isinstance(entry.cudagraph, _WithNodes):
                            entry.cudagraph = self._tapped(entry.cudagraph)
            self._stores[True] = store
            self._recorded |= keys
        except RuntimeError as error:
            if not _no_room(error):
                raise
            if self._config.parallel_config.tensor_parallel_size > 1:  # other workers may have succeeded
                raise EngineError(
                    "not enough GPU memory for graphs with taps, which every tensor-parallel worker needs: lower "
                    "gpu_memory_utilization, or list fewer sizes in active_sizes"
                ) from error
            self.problem = f"not enough GPU memory for graphs with taps ({str(error).split('.')[0]})"
            logger.warning(
                "patchclamp: %s; steps with programs run without CUDA graphs. Reduce the cache's memory, or list "
                "fewer sizes in active_sizes.", self.problem,
            )  # fmt: skip
        self._forget()
        self._put(self._stores[False])
        torch.cuda.empty_cache()

    @contextmanager
    def _counting_bytes(self, kind: str) -> Iterator[None]:
        """Add the device memory allocated inside the context to the graph bytes "with" or "without" taps."""
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        yield
        torch.cuda.empty_cache()
        self.bytes[kind] += max(before - torch.cuda.mem_get_info()[0], 0)

    def _wants(self, desc: Any) -> bool:
        return self._sizes is None or desc.num_tokens in self._sizes

    def count(self, sizes: list[Any]) -> None:
        """Count the sizes that vLLM will record."""
        self.share = sum(map(self._wants, sizes)) / max(len(sizes), 1)
        self._idle = len({desc.num_tokens for desc in sizes}) or self._idle

    def has(self, mode: Any, tokens: int) -> bool:
        """True if a step that is dispatched to a graph of this mode and size can replay the active variant."""
        return (mode, tokens) in self._recorded

    def estimate_bytes(self, idle_bytes: int) -> int:
        """Estimate the device memory of both variants of the graphs from that of the idle variant."""
        copies = MAX_NODES * NODE_BYTES if idle_bytes and self.share else 0
        return int(idle_bytes * (1 + self.share)) + copies

    def use(self, active: bool) -> None:
        """Make the runner replay one variant."""
        if active == self._active or active not in self._stores:
            return
        self._put(self._stores[active])
        self._active = active

    def _take(self) -> tuple[dict[Any, Any], _Entries]:
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        engine = engine_id(self._config)
        instances = CUDAGraphWrapper._all_instances
        wrappers = [wrapper for wrapper in instances if engine_id(wrapper.vllm_config) == engine]
        full = {} if self._manager is None else self._manager.graphs
        return full, [(wrapper, wrapper.concrete_cudagraph_entries) for wrapper in wrappers]

    def _put(self, store: tuple[dict[Any, Any], _Entries]) -> None:
        full, wrappers = store
        if self._manager is not None:
            self._manager.graphs = full
        for wrapper, entries in wrappers:
            wrapper.concrete_cudagraph_entries = entries


def _recorded_in(capture: Callable[[], None]) -> list[tuple[Any, Any]]:
    """Make vLLM record graphs; return the (wrapper, descriptor) of each new one."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    def recorded() -> list[tuple[Any, Any]]:
        entries = [(wrapper, wrapper.concrete_cudagraph_entries) for wrapper in CUDAGraphWrapper._all_instances]
        return [(wrapper, desc) for wrapper, of in entries for desc, entry in of.items() if entry.cudagraph is not None]

    before = {(id(wrapper), desc) for wrapper, desc in recorded()}
    capture()
    return [(wrapper, desc) for wrapper, desc in recorded() if (id(wrapper), desc) not in before]


def _check_recorded(
    store: tuple[dict[Any, Any], _Entries], pieces: list[tuple[Any, Any]], keys: set[tuple[Any, int]], one_code: bool
) -> None:
    """Raise `EngineError` if an edited step with its (mode, tokens) in `keys` would replay an idle graph.

    Every wrapper with an idle graph must be in `store`, so that its graphs are swapped. If both variants run
    `one_code`, each wrapper must also have a graph with taps; otherwise the code with taps has its own wrappers, within
    a wrapper of the whole model. Sizes that vLLM does not record need no check: their steps run the compiled code,
    which has taps.
    """
    tapped = {
        id(wrapper): {(wrapper.runtime_mode, desc) for desc, entry in entries.items() if entry.cudagraph is not None}
        for wrapper, entries in store[1]
    }
    anywhere = set().union(*tapped.values())
    for wrapper, desc in pieces:
        if (wrapper.runtime_mode, desc.num_tokens) not in keys:
            continue
        at, of_both = (wrapper.runtime_mode, desc), one_code or wrapper.runtime_mode.name == "FULL"
        if id(wrapper) not in tapped or at not in (tapped[id(wrapper)] if of_both else anywhere):
            raise _without_graph(wrapper.runtime_mode, desc.num_tokens)


def _check_full(graphs: dict[Any, Any], wanted: list[Any]) -> None:
    """Check the full graphs of a V2 runner's manager, as `_check_recorded` does for piecewise graphs."""
    for desc in wanted:
        if desc not in graphs:
            raise _without_graph(desc.cg_mode, desc.num_tokens)


def _without_graph(mode: Any, tokens: int) -> EngineError:
    return EngineError(
        f"vLLM recorded no graph with taps for {mode.name} steps of {tokens} tokens, so programs would do nothing: "
        "start with enforce_eager=True, and report this with the model's name"
    )


def _no_room(error: BaseException | None) -> bool:
    """True if an error in the cause chain is an out-of-memory error, which a failed graph capture hides."""
    while error is not None:
        if any(word in str(error).lower() for word in ("out of memory", "alloc_failed")):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Watched(torch.cuda.CUDAGraph):
    """A graph that stores the addresses of its inputs at recording, if a watch is enabled."""

    addresses: dict[str, int] | None = None
    watch: Watch | None = None

    def capture_end(self) -> None:
        super().capture_end()
        if _Watched.watch is not None:
            self.addresses = _Watched.watch.current_addresses()


class _WithNodes(_Watched):
    """A graph whose nodes can be inspected after recording."""

    def __new__(cls, keep_graph: bool = True) -> Any:
        return super().__new__(cls, True)

    def __init__(self, keep_graph: bool = True) -> None:
        super().__init__(True)  # type: ignore[call-arg]


@contextmanager
def _graphs_of(kind: type, watch: Watch | None) -> Iterator[None]:
    """Record graphs of class `kind` inside the context; stock graphs suffice for `_Watched` without a watch."""
    stock = torch.cuda.CUDAGraph
    if kind is not _Watched or watch is not None:
        torch.cuda.CUDAGraph = kind  # type: ignore[misc, assignment]
    _Watched.watch = watch
    try:
        yield
    finally:
        torch.cuda.CUDAGraph, _Watched.watch = stock, None  # type: ignore[misc]


def record_variants(runner: V2Runner, graphs: Graphs) -> None:
    """Make a V2 runner record both variants of its graphs, and count the memory of both."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled

    capture_model, estimate = runner.capture_model, runner.profile_cudagraph_memory

    @forwards(capture_model)
    def capture(*args: Any, **kwargs: Any) -> Any:
        manager: Any = runner.cudagraph_manager
        stock, profile = manager.capture, bool(kwargs.get("profile_only"))
        manager.capture = lambda *a, **k: graphs.record(manager, lambda: stock(*a, **k), profile)
        set_cudagraph_capturing_enabled(True)  # an earlier engine with a V1 runner disables it in the process
        try:
            return capture_model(*args, **kwargs)
        finally:
            del manager.capture

    runner.capture_model = capture

    runner.profile_cudagraph_memory = forwards(estimate)(lambda: graphs.estimate_bytes(estimate()))
    if graphs.watch is not None:
        graphs.watch.watch_inputs(runner)
        graphs.watch.watch_wrappers(runner.vllm_config)


def record_variants_v1(runner: V1Runner, graphs: Graphs) -> None:
    """Make a V1 runner record both variants. It records one mode at a time, and its dispatcher chooses the graph."""
    record, estimate = runner._capture_cudagraphs, runner.profile_cudagraph_memory
    dispatcher = runner.cudagraph_dispatcher
    stock, list_descs = dispatcher.dispatch, dispatcher.get_capture_descs

    @forwards(record)
    def capture(batch_descriptors: list[Any], cudagraph_runtime_mode: Any, *args: Any, **kwargs: Any) -> None:
        graphs.record_mode(
            runner.vllm_config, cudagraph_runtime_mode, list(batch_descriptors),
            lambda sizes: record(sizes, cudagraph_runtime_mode, *args, **kwargs),
        )  # fmt: skip

    @forwards(estimate)
    def estimate_both() -> int:
        return graphs.estimate_bytes(estimate())  # which calls `get_capture_descs`

    @forwards(list_descs)
    def get_capture_descs() -> Any:
        modes = list_descs()
        if modes:  # empty before the first use, and after profiling
            graphs.count([desc for _, descs in modes for desc in descs])
        return modes

    @forwards(stock)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        mode, desc = stock(*args, **kwargs)
        if _step.usable is not None and mode.name != "NONE" and not _step.usable(mode, desc.num_tokens):
            mode = type(mode).NONE  # keeps the graph's padding
        return mode, desc

    if graphs.watch is not None:
        graphs.watch.watch_wrappers(runner.vllm_config)
    runner._capture_cudagraphs, runner.profile_cudagraph_memory = capture, estimate_both
    dispatcher.dispatch, dispatcher.get_capture_descs = dispatch, get_capture_descs


class _StepVariant(threading.local):
    """The variant that this thread's step runs, and a test for the graphs it may use (None: any)."""

    active = False
    usable: Callable[[Any, int], bool] | None = None


_step = _StepVariant()


class compiled_variant:
    """A context in which compiled models run their active or idle variant.

    A step whose graph is not `usable` runs without a graph but with the graph's padding, so its kernels see the same
    shapes.
    """

    __slots__ = ("_active", "_before", "_usable")

    def __init__(self, active: bool, usable: Callable[[Any, int], bool] | None = None) -> None:
        self._active, self._usable = active, usable

    def __enter__(self) -> None:
        self._before = _step.active, _step.usable
        _step.active, _step.usable = self._active, self._usable

    def __exit__(self, *error: object) -> None:
        _step.active, _step.usable = self._before


def on_compile() -> None:
    """Make vLLM compile an engine's model twice: as traced (active), and with patchclamp's op erased (idle).

    The idle variant is stock's own code: no fusion is lost, and results are bit-identical. With uniform numerics the
    model is compiled once, as traced.
    """

    def compile_variants(stock: Any, backend: VllmBackend, graph: Any, example_inputs: Any) -> Any:
        if enabled(backend.vllm_config) is None or backend.prefix.endswith(_IDLE):
            return stock(backend, graph, example_inputs)
        _compiled.add(engine_id(backend.vllm_config))
        files = set(backend.compilation_config.traced_files)
        untapped = None if is_uniform(backend.vllm_config) else without_taps(graph, example_inputs)
        tapped, inputs, points = _apart_from_layers(graph, example_inputs)
        with _counting_fusions(backend.vllm_config, 1):
            active = stock(backend, tapped, inputs)
        call_active = Pieces(backend).wrap(active.optimized_call)
        if untapped is None:
            active.optimized_call = lambda *args: call_active(*args, *points)
            return active
        backend.compilation_config.traced_files.update(files)
        idle_backend = type(backend)(backend.vllm_config, backend.prefix + _IDLE, backend.is_encoder)
        with _counting_fusions(backend.vllm_config, 0):
            idle = stock(idle_backend, *untapped)
        call_idle = idle.optimized_call

        def call_variant(*args: Any) -> Any:
            return call_active(*args, *points) if _step.active else call_idle(*args)

        active.optimized_call = call_variant  # vLLM saves the traced graph, and loading it runs this function again
        return active

    COMPILE.wrap(compile_variants)


def _apart_from_layers(graph: Any, example_inputs: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    """Apply `apart_from_layers`; if it is switched off or fails, return the graph as traced."""
    if switches.enabled("equal_layers"):
        try:
            return apart_from_layers(graph, example_inputs)
        except Exception as error:  # another PyTorch version may differ
            switches.give_up("equal_layers", error)
    return graph, example_inputs, []


def compiled_ahead(vllm_config: VllmConfig) -> bool:
    """True if the model is compiled at engine start, without guards, and nothing is compiled during a step."""
    return _mode(vllm_config) in ("VLLM_COMPILE", "DYNAMO_TRACE_ONCE")


def lacks_idle_variant(vllm_config: VllmConfig) -> bool:
    """True if a model was compiled outside `on_compile`, so idle steps have taps despite stock numerics."""
    compiled = engine_id(vllm_config) in _compiled
    return _mode(vllm_config) == "VLLM_COMPILE" and not compiled and not is_uniform(vllm_config)


def _mode(vllm_config: VllmConfig) -> str | None:
    return getattr(vllm_config.compilation_config.mode, "name", None)


_IDLE = "_patchclamp_idle"
_compiled: set[int] = set()  # engines with a model compiled in `on_compile`
_fusions: dict[int, dict[str, list[int]]] = {}  # by engine


def fusions_of(vllm_config: VllmConfig) -> dict[str, list[int]]:
    """Reset and return a new engine's match counts by fusion pass, each for the idle and the active variant."""
    counts = _fusions[engine_id(vllm_config)] = {}
    _compiled.discard(engine_id(vllm_config))
    return counts


@contextmanager
def _counting_fusions(vllm_config: VllmConfig, variant: int) -> Iterator[None]:
    """Count matches of vLLM's fusion passes inside the context, for the idle variant (0) or the active variant (1).

    No matches are counted if compiled code comes from a cache.
    """
    from vllm.compilation.passes.vllm_inductor_pass import VllmPatternMatcherPass

    table = VllmPatternMatcherPass.match_table
    before = dict(table)
    yield
    for name, count in table.items():
        if count != before.get(name, 0):
            _fusions.setdefault(engine_id(vllm_config), {}).setdefault(name, [0, 0])[variant] += count - before.get(
                name, 0
            )


def on_dispatch() -> None:
    """Make V2 steps run without a graph if their graph is not usable in the current `compiled_variant`."""

    def dispatch_cg_and_sync_dp(stock: Any, cudagraph_manager: Any, num_reqs: int, *args: Any, **kwargs: Any) -> Any:
        desc, *rest = stock(cudagraph_manager, num_reqs, *args, **kwargs)
        if _step.usable is not None and desc.cg_mode.name != "NONE" and not _step.usable(desc.cg_mode, desc.num_tokens):
            desc = dataclasses.replace(desc, cg_mode=type(desc.cg_mode).NONE, num_reqs=num_reqs)
        return (desc, *rest)

    DISPATCH.wrap(dispatch_cg_and_sync_dp)
