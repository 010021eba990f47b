"""Idle and active: vLLM's compiled code and its CUDA graphs, each made twice, and which of the two a step runs.

The idle ones are stock's own: no op of ours was ever in them.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from patchclamp.engines.vllm.compat.configuration import enabled
from patchclamp.engines.vllm.compat.seams import require
from patchclamp.errors import SeamMoved


class Graphs:
    """A runner's CUDA graphs, each recorded twice: with the op launching nothing (idle) and its kernel (active)."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._stores: dict[bool, tuple[dict[Any, Any], list[tuple[Any, dict[Any, Any]]]]] = {}
        self._active = False

    def record(self, manager: Any, capture: Callable[[], None], recording: Callable[[], Any]) -> None:
        """Records every graph of a manager once each way, and leaves the idle ones in place."""
        capture()
        self._manager, self._stores[False] = manager, self._take(manager)
        manager.graphs = {}
        for wrapper, _ in self._stores[False][1]:
            wrapper.concrete_cudagraph_entries = {}
        with recording(), body(tapped=True):
            capture()
        self._stores[True], self._active = self._take(manager), True
        self.use(active=False)

    def use(self, active: bool) -> None:
        """Makes one set the runner's."""
        if active == self._active or not self._stores:
            return
        self._manager.graphs, entries = self._stores[active]
        for wrapper, kept in entries:
            wrapper.concrete_cudagraph_entries = kept
        self._active = active

    def _take(self, manager: Any) -> tuple[dict[Any, Any], list[tuple[Any, dict[Any, Any]]]]:
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        mine = [w for w in CUDAGraphWrapper._all_instances if w.vllm_config is manager.vllm_config]
        return manager.graphs, [(w, w.concrete_cudagraph_entries) for w in mine]


def two_graphs(runner: Any, recording: Callable[[], Any]) -> Graphs:
    """Has a V2 runner record its graphs twice, whenever it does, and count their memory twice."""
    graphs, capture_model, estimate = Graphs(), runner.capture_model, runner.profile_cudagraph_memory

    @functools.wraps(capture_model)
    def capture(*args: Any, **kwargs: Any) -> Any:
        manager = runner.cudagraph_manager
        if manager.use_breakable_cg:
            raise SeamMoved("breakable CUDA graphs are not supported yet: set VLLM_USE_BREAKABLE_CUDAGRAPH=0")
        once = manager.capture
        manager.capture = lambda *a, **k: graphs.record(manager, lambda: once(*a, **k), recording)
        try:
            return capture_model(*args, **kwargs)
        finally:
            del manager.capture

    runner.capture_model = capture
    runner.profile_cudagraph_memory = lambda: 2 * estimate()
    return graphs


_eager, _tapped = threading.local(), threading.local()


@contextmanager
def body(tapped: bool) -> Iterator[None]:
    """Within, compiled models run the code with taps in it, or the code that never had any."""
    before, _tapped.on = getattr(_tapped, "on", False), tapped
    try:
        yield
    finally:
        _tapped.on = before


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
            return (tapped if getattr(_tapped, "on", False) else idle)(*args)

        return either

    compile_twice.patchclamp = True  # type: ignore[attr-defined]
    setattr(owner, name, compile_twice)


_IDLE = "_patchclamp_idle"


def _without_taps(graph: Any) -> Any:
    """A copy of a traced graph with our op's nodes erased; None if it has none."""
    import torch

    bare = copy.deepcopy(graph)
    taps = [n for n in bare.graph.nodes if n.op == "call_function" and str(n.target).startswith("patchclamp.site")]
    for node in taps:
        bare.graph.erase_node(node)
    assert isinstance(bare, torch.fx.GraphModule)
    bare.recompile()
    return bare if taps else None


def dispatch_without_graph() -> Callable[[bool], Any]:
    """A context in which a V2 step is dispatched without a graph, through vLLM's own `need_eager`."""
    owner, name = require("v2 dispatch", ("need_eager",))
    stock = getattr(owner, name)
    if not hasattr(stock, "patchclamp"):

        @functools.wraps(stock)
        def dispatch(*args: Any, need_eager: bool = False, **kwargs: Any) -> Any:
            return stock(*args, need_eager=need_eager or getattr(_eager, "on", False), **kwargs)

        dispatch.patchclamp = True  # type: ignore[attr-defined]
        setattr(owner, name, dispatch)

    @contextmanager
    def without_graph(on: bool) -> Iterator[None]:
        _eager.on = on
        try:
            yield
        finally:
            _eager.on = False

    return without_graph
