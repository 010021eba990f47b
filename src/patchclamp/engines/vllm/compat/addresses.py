"""What vLLM's CUDA graphs read, looked at when they are recorded and when they are replayed; only where that is asked.

A graph is recorded and replayed under one of two hands: a wrapper that is called with what the graph reads (piecewise
graphs, and full ones of a V1 runner), or a V2 runner's manager, whose replay takes no arguments; there it is what the
step built for attention just before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from patchclamp.engines.vllm.compat.seams import require
from patchclamp.runtime.addresses import addresses, compare


class Watch:
    """Watches one engine's graphs; `ours()` are patchclamp's own buffers, by name."""

    def __init__(self, ours: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._ours = ours
        self._called: dict[str, int] | None = None  # what the wrapper at work was called with
        self._built: dict[str, Any] = {}
        self.compared = 0  # replays looked at

    def now(self) -> dict[str, int]:
        """The addresses of everything that the graph at hand reads."""
        return self._seen(self._built) if self._called is None else self._called

    def _seen(self, values: Mapping[str, Any]) -> dict[str, int]:
        found: dict[str, int] = {}
        for path, value in (*values.items(), ("patchclamp", self._ours())):
            found |= addresses(value, path)
        return found

    def _compare(self, graph: Any, now: dict[str, int], what: str) -> None:
        then = getattr(graph, "addresses", None)
        if then is not None:
            self.compared += 1
            compare(then, now, what)

    def wrappers(self, vllm_config: Any) -> None:
        """Watches the wrappers of an engine: arguments by place and by name, and for full graphs what the forward
        context carries, attention metadata above all."""
        _on_call()
        _watches[id(vllm_config)] = (vllm_config, self)

    def called(self, stock: Any, wrapper: Any, context: Any, args: Any, kwargs: Any) -> Any:
        """A wrapper is called for its graph."""
        read = {"args": args, "kwargs": kwargs}
        if wrapper.runtime_mode.name == "FULL":
            read |= {"attn_metadata": context.attn_metadata, "slot_mapping": getattr(context, "slot_mapping", None)}
        now, desc = self._seen(read), context.batch_descriptor
        entry = wrapper.concrete_cudagraph_entries.get(desc)
        self._compare(getattr(entry, "cudagraph", None), now, f"{desc.num_tokens} tokens ({wrapper.runtime_mode.name})")
        self._called = now
        try:
            return stock(wrapper, *args, **kwargs)
        finally:
            self._called = None

    def preparing(self, runner: Any) -> None:
        """Watches what a V2 runner builds for a step, and what it fills in place."""
        state = runner.model_state
        prepare = state.prepare_attn
        named: dict[str, Any] = {}

        def noting(inner: Any) -> Any:
            """What a model takes beside ids and positions, or instead of them."""

            @functools.wraps(inner)
            def outer(*args: Any, **kwargs: Any) -> Any:
                found = inner(*args, **kwargs)
                named.update(found)
                return found

            return outer

        for name in ("prepare_inputs", "prepare_dummy_inputs"):
            if hasattr(state, name):
                setattr(state, name, noting(getattr(state, name)))

        @functools.wraps(prepare)
        def prepare_attn(batch: Any, mode: Any, block_tables: Any, slot_mappings: Any, *args: Any, **more: Any) -> Any:
            metadata = prepare(batch, mode, block_tables, slot_mappings, *args, **more)
            inputs = {"input_ids": batch.input_ids, "positions": batch.positions}
            self._built = {
                "kwargs": inputs, "model_inputs": named, "attn_metadata": metadata, "block_tables": block_tables,
                "slot_mappings": slot_mappings, "is_padding": getattr(runner.input_buffers, "is_padding", None),
                "intermediate_tensors": getattr(getattr(runner, "intermediate_tensors", None), "tensors", None),
            }  # fmt: skip
            return metadata

        state.prepare_attn = prepare_attn

    def replays(self, manager: Any) -> None:
        """Watches the full graphs of a V2 runner's manager."""
        run = manager.run_fullgraph
        if hasattr(run, "patchclamp"):
            return

        @functools.wraps(run)
        def run_fullgraph(desc: Any) -> Any:
            self._compare(manager.graphs.get(desc), self.now(), f"{desc.num_tokens} tokens (FULL)")
            return run(desc)

        run_fullgraph.patchclamp = True  # type: ignore[attr-defined]
        manager.run_fullgraph = run_fullgraph


_watches: dict[int, tuple[Any, Watch]] = {}  # by the id of a configuration, which is kept alive beside


def _on_call() -> None:
    from vllm.forward_context import get_forward_context, is_forward_context_available

    owner, _ = require("graphs")
    stock = owner.__call__
    if hasattr(stock, "patchclamp"):
        return

    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = _watches.get(id(self.vllm_config))
        if found is None or not is_forward_context_available():
            return stock(self, *args, **kwargs)
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode:
            return stock(self, *args, **kwargs)
        return found[1].called(stock, self, context, args, kwargs)

    call.patchclamp = True  # type: ignore[attr-defined]
    owner.__call__ = call
