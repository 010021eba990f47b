"""Idle and active: vLLM's compiled code and its CUDA graphs, each made twice, and which of the two a step runs.

The idle ones are stock's own: no op of ours was ever in them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from patchclamp.engines.vllm.compat.addresses import Watch
from patchclamp.engines.vllm.compat.configuration import enabled
from patchclamp.engines.vllm.compat.seams import require
from patchclamp.errors import EngineError
from patchclamp.runtime.graphs import MAX_NODES, NODE_BYTES

logger = logging.getLogger("patchclamp")


_Entries = list[tuple[Any, dict[Any, Any]]]  # wrappers of piecewise graphs (V1: of full ones too) and their graphs


class Graphs:
    """A runner's CUDA graphs, each recorded twice: with the op launching nothing (idle) and its kernel (active).

    `sizes`: tokens of the steps that are recorded active (None: all that vLLM records). `recording()` is a context in
    which taps are recorded, `tapped(graph)` makes one so recorded replayable, `forget()` drops what came to nothing.
    """

    def __init__(
        self, sizes: tuple[int, ...] | None, recording: Callable[[], Any], tapped: Callable[[Any], Any],
        forget: Callable[[], None], watch: Watch | None = None,
    ) -> None:  # fmt: skip
        self._sizes, self.recording, self._tapped, self._forget = sizes, recording, tapped, forget
        self.watch = watch  # of what graphs read, where that is asked for
        self._manager: Any = None  # of a V2 runner, which keeps full graphs
        self._config: Any = None
        self._stores: dict[bool, tuple[dict[Any, Any], _Entries]] = {}
        self._active = False
        self._recorded: set[tuple[Any, int]] = set()
        self._idle = 0
        self.share = 1.0  # of the sizes that vLLM records, those that are recorded with taps too
        self.problem = ""  # why there are no active graphs, if there should be
        self.bytes = {"without": 0, "with": 0}  # of device memory that graphs without taps and with taps took

    @property
    def idle(self) -> int:
        """Sizes of step that vLLM records."""
        return self._idle

    @property
    def active(self) -> int:
        """Sizes of step recorded with taps."""
        return len({tokens for _, tokens in self._recorded})

    def record(self, manager: Any, capture: Callable[[], None], profile: bool) -> None:
        """Records every graph of a V2 runner's manager once each way, and leaves the idle ones in place.

        A profile counts the idle ones alone.  Where memory runs out, active steps run without graphs.
        """
        self._stores, self._recorded, self._active = {}, set(), False
        self.bytes = dict.fromkeys(self.bytes, 0)
        self.count([desc for descs in manager._capture_descs.values() for desc in descs])
        if self.watch is not None:
            self.watch.replays(manager)
        with _made_by(_Seen, self.watch), nullcontext() if profile else self._weighed("without"):
            capture()
        if profile:
            return
        self._manager, self._config = manager, manager.vllm_config
        self._stores[False] = self._take()
        wanted = {mode: [d for d in descs if self._wants(d)] for mode, descs in manager._capture_descs.items()}

        def again() -> None:
            every = manager._capture_descs
            manager._capture_descs = wanted
            try:
                capture()
            finally:
                manager._capture_descs = every

        told = {(d.cg_mode, d.num_tokens) for descs in wanted.values() for d in descs}
        self._record_active(({}, [(wrapper, {}) for wrapper, _ in self._stores[False][1]]), again, told)

    def record_mode(self, vllm_config: Any, mode: Any, sizes: list[Any], capture: Callable[[list[Any]], None]) -> None:
        """Records the graphs of one mode of a V1 runner once each way, and leaves the idle ones in place."""
        with _made_by(_Seen, self.watch), self._weighed("without"):
            capture(sizes)
        self._config = vllm_config
        self._stores[False] = self._take()
        before = {id(wrapper): dict(entries) for wrapper, entries in self._stores.get(True, ({}, []))[1]}
        wanted = [desc for desc in sizes if self._wants(desc)]
        store = ({}, [(wrapper, before.get(id(wrapper), {})) for wrapper, _ in self._stores[False][1]])
        self._record_active(store, lambda: capture(wanted), {(mode, desc.num_tokens) for desc in wanted})

    def _record_active(
        self, store: tuple[dict[Any, Any], _Entries], capture: Callable[[], None], told: set[tuple[Any, int]]
    ) -> None:
        """Records graphs with taps into a store, and puts the idle ones back; without room for them there are none."""
        self._put(store)
        try:
            with self._weighed("with"):
                with self.recording(), compiled_variant(tapped=True), _made_by(_Kept, self.watch):
                    capture()
                store = self._take()
                for desc, graph in store[0].items():
                    store[0][desc] = self._tapped(graph)
                for _, entries in store[1]:
                    for entry in entries.values():
                        if isinstance(entry.cudagraph, _Kept):
                            entry.cudagraph = self._tapped(entry.cudagraph)
            self._stores[True] = store
            self._recorded |= told
        except RuntimeError as error:
            if not _no_room(error):
                raise
            if self._config.parallel_config.tensor_parallel_size > 1:  # the others may have found room: no two ways
                raise EngineError(
                    "the GPU had no room for graphs with taps, which every tensor-parallel worker needs: lower "
                    "gpu_memory_utilization, or name fewer sizes in active_sizes"
                ) from error
            self.problem = f"the GPU had no room for graphs with taps ({str(error).split('.')[0]})"
            logger.warning(
                "patchclamp: %s; steps with programs run without CUDA graphs. Give the cache less memory, or name "
                "fewer sizes in active_sizes.", self.problem,
            )  # fmt: skip
        self._forget()
        self._put(self._stores[False])
        torch.cuda.empty_cache()

    @contextmanager
    def _weighed(self, kind: str) -> Iterator[None]:
        """Counts the device memory that is taken within."""
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        yield
        torch.cuda.empty_cache()
        self.bytes[kind] += max(before - torch.cuda.mem_get_info()[0], 0)

    def _wants(self, desc: Any) -> bool:
        return self._sizes is None or desc.num_tokens in self._sizes

    def count(self, sizes: list[Any]) -> None:
        """Notes what vLLM will record."""
        self.share = sum(map(self._wants, sizes)) / max(len(sizes), 1)
        self._idle = len({desc.num_tokens for desc in sizes}) or self._idle

    def has(self, mode: Any, tokens: int) -> bool:
        """Whether a step dispatched to a graph of this mode and size can run active."""
        return (mode, tokens) in self._recorded

    def both(self, idle: int) -> int:
        """Bytes that graphs of both kinds take where the idle ones take `idle`."""
        copies = MAX_NODES * NODE_BYTES if idle and self.share else 0
        return int(idle * (1 + self.share)) + copies

    def use(self, active: bool) -> None:
        """Makes one set the runner's."""
        if active == self._active or active not in self._stores:
            return
        self._put(self._stores[active])
        self._active = active

    def _take(self) -> tuple[dict[Any, Any], _Entries]:
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        mine = [w for w in CUDAGraphWrapper._all_instances if w.vllm_config is self._config]
        full = {} if self._manager is None else self._manager.graphs
        return full, [(wrapper, wrapper.concrete_cudagraph_entries) for wrapper in mine]

    def _put(self, store: tuple[dict[Any, Any], _Entries]) -> None:
        full, entries = store
        if self._manager is not None:
            self._manager.graphs = full
        for wrapper, kept in entries:
            wrapper.concrete_cudagraph_entries = kept


def _no_room(error: BaseException | None) -> bool:
    """Whether an error, or one that it followed on, says that memory ran out: a broken capture hides the first one."""
    while error is not None:
        if any(word in str(error).lower() for word in ("out of memory", "alloc_failed")):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Seen(torch.cuda.CUDAGraph):
    """A graph that notes, where that is asked for, the addresses of what it was recorded with."""

    addresses: dict[str, int] | None = None
    watch: Watch | None = None

    def capture_end(self) -> None:
        super().capture_end()
        if _Seen.watch is not None:
            self.addresses = _Seen.watch.now()


class _Kept(_Seen):
    """A graph whose nodes can still be looked at once it is recorded."""

    def __new__(cls, keep_graph: bool = True) -> Any:
        return super().__new__(cls, True)

    def __init__(self, keep_graph: bool = True) -> None:
        super().__init__(True)  # type: ignore[call-arg]


@contextmanager
def _made_by(kind: type, watch: Watch | None) -> Iterator[None]:
    """Graphs recorded within are of a kind; stock's own, unless someone watches or it must be ours."""
    stock = torch.cuda.CUDAGraph
    if kind is not _Seen or watch is not None:
        torch.cuda.CUDAGraph = kind  # type: ignore[misc, assignment]
    _Seen.watch = watch
    try:
        yield
    finally:
        torch.cuda.CUDAGraph, _Seen.watch = stock, None  # type: ignore[misc]


def two_graphs(runner: Any, graphs: Graphs) -> None:
    """Has a V2 runner record its graphs twice, whenever it does, and count the memory of both."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled

    capture_model, estimate = runner.capture_model, runner.profile_cudagraph_memory

    @functools.wraps(capture_model)
    def capture(*args: Any, **kwargs: Any) -> Any:
        manager = runner.cudagraph_manager
        once, profile = manager.capture, bool(kwargs.get("profile_only"))  # 0.26 has no such profile
        manager.capture = lambda *a, **k: graphs.record(manager, lambda: once(*a, **k), profile)
        set_cudagraph_capturing_enabled(True)  # an engine with a V1 runner forbids it, to all that come after it
        try:
            return capture_model(*args, **kwargs)
        finally:
            del manager.capture

    runner.capture_model = capture

    runner.profile_cudagraph_memory = lambda: graphs.both(estimate())
    if graphs.watch is not None:
        graphs.watch.preparing(runner)
        graphs.watch.wrappers(runner.vllm_config)


def two_graphs_v1(runner: Any, graphs: Graphs) -> None:
    """The same for a V1 runner, which records one mode after the other and whose dispatcher chooses the graph."""
    once, estimate = runner._capture_cudagraphs, runner.profile_cudagraph_memory
    dispatcher = runner.cudagraph_dispatcher
    stock, sizes_of = dispatcher.dispatch, dispatcher.get_capture_descs

    @functools.wraps(once)
    def capture(batch_descriptors: list[Any], cudagraph_runtime_mode: Any, *args: Any, **kwargs: Any) -> None:
        graphs.record_mode(
            runner.vllm_config, cudagraph_runtime_mode, list(batch_descriptors),
            lambda sizes: once(sizes, cudagraph_runtime_mode, *args, **kwargs),
        )  # fmt: skip

    def estimate_both() -> int:
        return graphs.both(estimate())  # which asks for the sizes on its way

    @functools.wraps(sizes_of)
    def get_capture_descs() -> Any:
        found = sizes_of()
        if found:  # there are none before they are first needed, and after they were measured
            graphs.count([desc for _, descs in found for desc in descs])
        return found

    @functools.wraps(stock)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        mode, desc = stock(*args, **kwargs)
        if _step.usable is not None and mode.name != "NONE" and not _step.usable(mode, desc.num_tokens):
            mode = type(mode).NONE  # with the padding of the graph
        return mode, desc

    if graphs.watch is not None:
        graphs.watch.wrappers(runner.vllm_config)
    runner._capture_cudagraphs, runner.profile_cudagraph_memory = capture, estimate_both
    dispatcher.dispatch, dispatcher.get_capture_descs = dispatch, get_capture_descs


class _Step(threading.local):
    """What the step on this thread runs: whether code with taps in it, and which graphs it may use (None: any)."""

    tapped = False
    usable: Callable[[Any, int], bool] | None = None


_step = _Step()


class compiled_variant:
    """Within, compiled models run the code with taps in it, or the code that never had any.

    A step whose graph is not `usable` runs without one, with the padding that its graph would have, so that its
    kernels see the same shapes.
    """

    __slots__ = ("_before", "_tapped", "_usable")

    def __init__(self, tapped: bool, usable: Callable[[Any, int], bool] | None = None) -> None:
        self._tapped, self._usable = tapped, usable

    def __enter__(self) -> None:
        self._before = _step.tapped, _step.usable
        _step.tapped, _step.usable = self._tapped, self._usable

    def __exit__(self, *error: object) -> None:
        _step.tapped, _step.usable = self._before


def on_compile() -> None:
    """Has vLLM's compiler compile a model of ours twice: as traced, and with our op's nodes erased.

    Idle steps run the second, which is stock's own code, so that no fusion is cut and no bit differs.
    """
    for seam in ("fusions", "compiled", "recording"):
        require(seam)
    owner, name = require("compile")
    stock = getattr(owner, name)
    if hasattr(stock, "patchclamp"):
        return

    @functools.wraps(stock)
    def compile_twice(self: Any, graph: Any, example_inputs: Any) -> Any:
        if enabled(self.vllm_config) is None or self.prefix.endswith(_IDLE):
            return stock(self, graph, example_inputs)
        _compiled.add(id(self.vllm_config))
        files, bare = set(self.compilation_config.traced_files), _without_taps(graph)
        with _matches(self.vllm_config, 1):
            tapped = stock(self, graph, example_inputs)
        if bare is None:
            return tapped
        self.compilation_config.traced_files.update(files)
        with _matches(self.vllm_config, 0):
            idle = stock(type(self)(self.vllm_config, self.prefix + _IDLE, self.is_encoder), bare, example_inputs)

        with_taps, without = tapped.optimized_call, idle.optimized_call

        def either(*args: Any) -> Any:
            return (with_taps if _step.tapped else without)(*args)

        tapped.optimized_call = either  # not saved: what is, the traced graph, comes by here when it is loaded
        return tapped

    compile_twice.patchclamp = True  # type: ignore[attr-defined]
    setattr(owner, name, compile_twice)


def compiled_ahead(vllm_config: Any) -> bool:
    """Whether all that is compiled is so while the engine starts, without guards, and nothing within a step."""
    return _mode(vllm_config) in ("VLLM_COMPILE", "DYNAMO_TRACE_ONCE")


def lacks_idle_variant(vllm_config: Any) -> bool:
    """Whether an engine's model is compiled and never came by here, so that idle steps would run code with taps."""
    return _mode(vllm_config) == "VLLM_COMPILE" and id(vllm_config) not in _compiled


def _mode(vllm_config: Any) -> str | None:
    return getattr(vllm_config.compilation_config.mode, "name", None)


_IDLE = "_patchclamp_idle"
_compiled: set[int] = set()  # configurations, by id, of which a model was compiled twice
_fusions: dict[int, dict[str, list[int]]] = {}  # by the id of an engine's configuration


def fusions_of(vllm_config: Any) -> dict[str, list[int]]:
    """A new engine's count, from now on, of how often each pass matched in stock's code, and in code with taps."""
    counted = _fusions[id(vllm_config)] = {}
    _compiled.discard(id(vllm_config))
    return counted


@contextmanager
def _matches(vllm_config: Any, which: int) -> Iterator[None]:
    """Counts what vLLM's fusion passes match within; where compiled code is cached they match nothing."""
    from vllm.compilation.passes.vllm_inductor_pass import VllmPatternMatcherPass

    table = VllmPatternMatcherPass.match_table
    before = dict(table)
    yield
    for name, count in table.items():
        if count != before.get(name, 0):
            _fusions.setdefault(id(vllm_config), {}).setdefault(name, [0, 0])[which] += count - before.get(name, 0)


def _without_taps(graph: Any) -> Any:
    """A copy of a traced graph with our op's nodes erased; None if it has none."""
    bare = copy.deepcopy(graph)
    taps = [n for n in bare.graph.nodes if n.op == "call_function" and str(n.target).startswith("patchclamp.site")]
    for node in taps:
        bare.graph.erase_node(node)
    assert isinstance(bare, torch.fx.GraphModule)
    bare.recompile()
    return bare if taps else None


def on_dispatch() -> None:
    """Lets V2 steps run without a graph where `body` says that theirs may not be used."""
    owner, name = require("v2 dispatch")
    stock = getattr(owner, name)
    if hasattr(stock, "patchclamp"):
        return

    @functools.wraps(stock)
    def dispatch(manager: Any, num_reqs: int, *args: Any, **kwargs: Any) -> Any:
        desc, *rest = stock(manager, num_reqs, *args, **kwargs)
        if _step.usable is not None and desc.cg_mode.name != "NONE" and not _step.usable(desc.cg_mode, desc.num_tokens):
            desc = dataclasses.replace(desc, cg_mode=type(desc.cg_mode).NONE, num_reqs=num_reqs)
        return (desc, *rest)

    dispatch.patchclamp = True  # type: ignore[attr-defined]
    setattr(owner, name, dispatch)
