"""Idle and active: vLLM's compiled code and its CUDA graphs, each made twice, and which of the two a step runs.

The idle ones are stock's own: no op of ours was ever in them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from patchclamp.engines.vllm.compat.configuration import enabled
from patchclamp.engines.vllm.compat.seams import require
from patchclamp.errors import SeamMoved
from patchclamp.runtime.graphs import MOST_NODES, NODE_BYTES

logger = logging.getLogger("patchclamp")


class Graphs:
    """A runner's CUDA graphs, each recorded twice: with the op launching nothing (idle) and its kernel (active).

    `sizes`: tokens of the steps that are recorded active (None: all that vLLM records). `recording()` is a context in
    which taps are recorded, `tapped(graph)` makes one so recorded replayable, `forget()` drops what came to nothing.
    """

    def __init__(
        self, sizes: tuple[int, ...] | None, recording: Callable[[], Any], tapped: Callable[[Any], Any],
        forget: Callable[[], None],
    ) -> None:  # fmt: skip
        self._sizes, self.recording, self._tapped, self._forget = sizes, recording, tapped, forget
        self._manager: Any = None
        self._stores: dict[bool, tuple[dict[Any, Any], list[tuple[Any, dict[Any, Any]]]]] = {}
        self._active = False
        self._recorded: set[tuple[Any, int]] = set()
        self.share = 1.0  # of the sizes that vLLM records, those that are recorded with taps too
        self.problem = ""  # why there are no active graphs, if there should be

    @property
    def active(self) -> int:
        """Sizes of step recorded with taps."""
        return len({tokens for _, tokens in self._recorded})

    def record(self, manager: Any, capture: Callable[[], None], profile: bool) -> None:
        """Records every graph of a manager once each way, and leaves the idle ones in place.

        A profile counts the idle ones alone.  Where memory runs out, active steps run without graphs.
        """
        self._stores, self._recorded, self._active = {}, set(), False
        sizes = [desc for descs in manager._capture_descs.values() for desc in descs]
        self.share = sum(map(self._wants, sizes)) / max(len(sizes), 1)
        capture()
        if profile:
            return
        self._manager, self._stores[False] = manager, self._take(manager)
        try:
            self._record_active(manager, capture)
        except RuntimeError as error:
            if not _no_room(error):
                raise
            self.problem = f"the GPU had no room for graphs with taps ({str(error).split('.')[0]})"
            logger.warning(
                "patchclamp: %s; steps with programs run without CUDA graphs. Give the cache less memory, or name "
                "fewer sizes in active_sizes.", self.problem,
            )  # fmt: skip
        self._forget()
        self._put(self._stores[False])
        torch.cuda.empty_cache()

    def _record_active(self, manager: Any, capture: Callable[[], None]) -> None:
        sizes, stock = manager._capture_descs, torch.cuda.CUDAGraph
        wanted = {mode: [d for d in descs if self._wants(d)] for mode, descs in sizes.items()}
        self._put(({}, [(wrapper, {}) for wrapper, _ in self._stores[False][1]]))
        manager._capture_descs, torch.cuda.CUDAGraph = wanted, _Kept
        try:
            with self.recording(), body(tapped=True):
                capture()
            active = self._take(manager)
            for desc in active[0]:
                active[0][desc] = self._tapped(active[0][desc])
            for _, entries in active[1]:
                for entry in entries.values():
                    entry.cudagraph = self._tapped(entry.cudagraph)
        finally:
            manager._capture_descs, torch.cuda.CUDAGraph = sizes, stock
        self._stores[True] = active
        self._recorded = {(d.cg_mode, d.num_tokens) for descs in wanted.values() for d in descs}

    def _wants(self, desc: Any) -> bool:
        return self._sizes is None or desc.num_tokens in self._sizes

    def has(self, desc: Any) -> bool:
        """Whether a step dispatched to this graph can run active."""
        return (desc.cg_mode, desc.num_tokens) in self._recorded

    def use(self, active: bool) -> None:
        """Makes one set the runner's."""
        if active == self._active or active not in self._stores:
            return
        self._put(self._stores[active])
        self._active = active

    def _take(self, manager: Any) -> tuple[dict[Any, Any], list[tuple[Any, dict[Any, Any]]]]:
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        mine = [w for w in CUDAGraphWrapper._all_instances if w.vllm_config is manager.vllm_config]
        return manager.graphs, [(w, w.concrete_cudagraph_entries) for w in mine]

    def _put(self, store: tuple[dict[Any, Any], list[tuple[Any, dict[Any, Any]]]]) -> None:
        self._manager.graphs, entries = store
        for wrapper, kept in entries:
            wrapper.concrete_cudagraph_entries = kept


def _no_room(error: BaseException | None) -> bool:
    """Whether an error, or one that it followed on, says that memory ran out: a broken capture hides the first one."""
    while error is not None:
        if any(word in str(error).lower() for word in ("out of memory", "alloc_failed")):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Kept(torch.cuda.CUDAGraph):
    """A graph whose nodes can still be looked at once it is recorded."""

    def __new__(cls, keep_graph: bool = True) -> Any:
        return super().__new__(cls, True)

    def __init__(self, keep_graph: bool = True) -> None:
        super().__init__(True)  # type: ignore[call-arg]


def two_graphs(runner: Any, graphs: Graphs) -> None:
    """Has a V2 runner record its graphs twice, whenever it does, and count the memory of both."""
    capture_model, estimate = runner.capture_model, runner.profile_cudagraph_memory

    @functools.wraps(capture_model)
    def capture(*args: Any, profile_only: bool = False, **kwargs: Any) -> Any:
        manager = runner.cudagraph_manager
        if manager.use_breakable_cg:
            raise SeamMoved("breakable CUDA graphs are not supported yet: set VLLM_USE_BREAKABLE_CUDAGRAPH=0")
        once = manager.capture
        manager.capture = lambda *a, **k: graphs.record(manager, lambda: once(*a, **k), profile_only)
        try:
            return capture_model(*args, profile_only=profile_only, **kwargs)
        finally:
            del manager.capture

    runner.capture_model = capture

    def estimate_both() -> int:
        idle = estimate()
        copies = MOST_NODES * NODE_BYTES if idle and graphs.share else 0
        return int(idle * (1 + graphs.share)) + copies

    runner.profile_cudagraph_memory = estimate_both


class _Step(threading.local):
    """What the step on this thread runs: whether code with taps in it, and which graphs it may use (None: any)."""

    tapped = False
    usable: Callable[[Any], bool] | None = None


_step = _Step()


class body:
    """Within, compiled models run the code with taps in it, or the code that never had any.

    A step whose graph is not `usable` runs without one, with the padding that its graph would have, so that its
    kernels see the same shapes.
    """

    __slots__ = ("_before", "_tapped", "_usable")

    def __init__(self, tapped: bool, usable: Callable[[Any], bool] | None = None) -> None:
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
    owner, name = require("compile", ("graph", "example_inputs"))
    stock = getattr(owner, name)
    if hasattr(stock, "patchclamp"):
        return

    @functools.wraps(stock)
    def compile_twice(self: Any, graph: Any, example_inputs: Any) -> Any:
        if enabled(self.vllm_config) is None or self.prefix.endswith(_IDLE):
            return stock(self, graph, example_inputs)
        files, bare = set(self.compilation_config.traced_files), _without_taps(graph)
        tapped = stock(self, graph, example_inputs)
        if bare is None:
            return tapped
        self.compilation_config.traced_files.update(files)
        idle = stock(type(self)(self.vllm_config, self.prefix + _IDLE, self.is_encoder), bare, example_inputs)

        def either(*args: Any) -> Any:
            return (tapped if _step.tapped else idle)(*args)

        return either

    compile_twice.patchclamp = True  # type: ignore[attr-defined]
    setattr(owner, name, compile_twice)


_IDLE = "_patchclamp_idle"


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
    owner, name = require("v2 dispatch", ("num_reqs",))
    stock = getattr(owner, name)
    if hasattr(stock, "patchclamp"):
        return

    @functools.wraps(stock)
    def dispatch(manager: Any, num_reqs: int, *args: Any, **kwargs: Any) -> Any:
        desc, *rest = stock(manager, num_reqs, *args, **kwargs)
        if _step.usable is not None and desc.cg_mode.name != "NONE" and not _step.usable(desc):
            desc = dataclasses.replace(desc, cg_mode=type(desc.cg_mode).NONE, num_reqs=num_reqs)
        return (desc, *rest)

    dispatch.patchclamp = True  # type: ignore[attr-defined]
    setattr(owner, name, dispatch)
