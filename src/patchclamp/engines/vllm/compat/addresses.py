"""The addresses that vLLM's CUDA graphs read: at every replay compared with those at recording, where that is asked.

A wrapper is called with what its graph reads (piecewise graphs, and full ones of a V1 runner).  A V2 runner's manager
replays full graphs without arguments: they read what the step built for attention just before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from patchclamp.engines.vllm.compat.configuration import engine_id
from patchclamp.engines.vllm.compat.seams import forwards, require
from patchclamp.runtime.graphs import addresses, compare


class Watch:
    """Watches one engine's graphs; `buffers()` are patchclamp's own, by name."""

    def __init__(self, buffers: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._buffers = buffers
        self._call_addresses: dict[str, int] | None = None  # of what the wrapper at work was called with
        self._built: dict[str, Any] = {}  # what a V2 runner built for the step
        self.compared = 0  # replays compared

    def current_addresses(self) -> dict[str, int]:
        """The addresses of all that the present graph reads, by path."""
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

    def watch_wrappers(self, vllm_config: Any) -> None:
        """Watches the wrappers of an engine: their arguments, and for full graphs what the forward context carries."""
        _on_call()
        _watches[engine_id(vllm_config)] = (vllm_config, self)

    def run_wrapper(self, stock: Any, wrapper: Any, context: Any, args: Any, kwargs: Any) -> Any:
        """Runs a wrapper that is called for its graph, after it has compared what the graph reads."""
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

    def watch_inputs(self, runner: Any) -> None:
        """Watches what a V2 runner builds for a step, and what it fills in place."""
        state = runner.model_state
        prepare = state.prepare_attn
        model_inputs: dict[str, Any] = {}  # what a model takes beside ids and positions, or instead of them

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
        """Watches the full graphs of a V2 runner's manager."""
        run = manager.run_fullgraph
        if hasattr(run, "patchclamp"):
            return

        @forwards(run)
        def run_fullgraph(desc: Any) -> Any:
            self._compare(manager.graphs.get(desc), self.current_addresses(), f"{desc.num_tokens} tokens (FULL)")
            return run(desc)

        run_fullgraph.patchclamp = True  # type: ignore[attr-defined]
        manager.run_fullgraph = run_fullgraph


_watches: dict[int, tuple[Any, Watch]] = {}  # by the id of a configuration, which is kept alive beside


def argument_names(runnable: Any, count: int) -> list[int | str]:
    """The names of a callable's first `count` arguments: its traced graph's inputs, or its parameters; else numbers."""
    graph = getattr(runnable, "graph", None)  # of a piece of a compiled model
    if isinstance(graph, torch.fx.GraphModule):
        names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
    else:
        parameters = inspect.signature(getattr(runnable, "forward", runnable)).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    return [*names[:count], *range(len(names), count)]


def _on_call() -> None:
    from vllm.forward_context import get_forward_context, is_forward_context_available

    CUDAGraphWrapper = getattr(*require("graphs"))
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
    CUDAGraphWrapper.__call__ = call
