"""Calls from the front end to an engine's workers, between steps: for captures, status and LoRA adapters.

Adapters are loaded between steps, and kept while a run uses them. vLLM by itself would read an adapter in the step that
first needs it, where a bad one ends the engine, and would evict the least recently used one even while a run uses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from patchclamp.engines.base import Adapter, Captured, Request
from patchclamp.engines.vllm.compat import lora
from patchclamp.engines.vllm.compat.core import notice_death
from patchclamp.errors import CapacityError, EngineError, ModelError, unpack

Shard = TypeVar("Shard")  # one worker's part of some rows


class Workers:
    """An engine's workers. Call them on the engine's thread; each call goes to all of them."""

    def __init__(self, engine: Any, remote: bool) -> None:
        self._engine = engine
        notice_death(engine)
        self.all("started", remote)

    def all(self, verb: str, *args: Any) -> list[Any]:
        """Return every worker's result; raise the first error."""
        answers = self._engine.collective_rpc("patchclamp_rpc", args=(verb, *args))
        errors = [error for _, error in answers if error is not None]
        if errors:
            raise unpack(errors[0])
        return [result for result, _ in answers]

    def one(self, verb: str, *args: Any) -> Any:
        """Return the first result that is not None."""
        return next((result for result in self.all(verb, *args) if result is not None), None)

    def status(self, verb: str = "status") -> dict[str, Any]:
        """Return the workers' counts, merged as those of one worker."""
        statuses = self.all(verb)
        summed: dict[str, Any] = {
            name: sum(status[name] for status in statuses) for name in ("captured_bytes", "failures")
        }
        if "active_graphs" in statuses[0]:
            summed["active_graphs"] = min(status["active_graphs"] for status in statuses)
            problems = [status["active_graphs_problem"] for status in statuses if status["active_graphs_problem"]]
            summed["active_graphs_problem"] = problems[0] if problems else ""
        return {**statuses[0], **summed, "workers": len(statuses)}


def join_captured(answers: list[dict[int, Captured]], count: int) -> list[Captured]:
    """Join the workers' shards, in rank order, of each of the `count` wanted captures."""
    import torch

    shards: list[list[Captured]] = [[] for _ in range(count)]
    for answer in answers:
        for i, captured in answer.items():
            shards[i].append(captured)
    kept = [with_rows(some, [len(positions) for positions, _ in some]) for some in shards]
    return [
        some[0] if len(some) == 1 else (some[0][0], torch.cat([torch.as_tensor(rows) for _, rows in some], 1))
        for some in kept
    ]


def with_rows(shards: list[Shard], counts: list[int]) -> list[Shard]:
    """Return the shards with rows, or else the first. Projected rows are only on the worker with all columns."""
    return [shard for shard, count in zip(shards, counts, strict=True) if count] or shards[:1]


class _Loaded(msgspec.Struct):
    """vLLM's request for an adapter, and the runs that use it."""

    request: Any
    runs: set[str]


class Adapters:
    """The adapters of one engine. `config`: vLLM's LoRA configuration, or None if LoRA is off."""

    def __init__(self, engine: Any, workers: Workers, config: Any) -> None:
        self._engine, self._workers, self._config = engine, workers, config
        self._room: int = 0 if config is None else config.max_cpu_loras
        self._loaded: dict[str, _Loaded] = {}  # by name, in the order of loading
        self._numbers = itertools.count(1)

    def check(self, adapter: Adapter) -> None:
        """Raise `EngineError` or `CapacityError` for an adapter that this engine cannot run."""
        if self._config is None:
            raise EngineError(
                "this engine runs no LoRA adapters: start it with pc.LM(..., enable_lora=True), and max_loras for how "
                "many at once", "lora"
            )  # fmt: skip
        if adapter.rank > self._config.max_lora_rank:
            raise CapacityError(
                f"{adapter.folder} is of rank {adapter.rank} and max_lora_rank={self._config.max_lora_rank}: start the "
                "engine with a larger one", "lora"
            )  # fmt: skip

    def admits(self, requests: Iterable[Request]) -> int:
        """Count the leading requests whose adapters fit beside those in use."""
        used = {name for name, loaded in self._loaded.items() if loaded.runs}
        for i, request in enumerate(requests := list(requests)):
            if request.adapter is not None:
                used.add(request.adapter.name)
                if len(used) > self._room:
                    return i
        return len(requests)

    def take(self, request: Request) -> Any:
        """Load a request's adapter, keep it until `give`, and return vLLM's request for it; None without an adapter.
        Raises `ModelError` for an adapter that vLLM does not load or that does not fit this model."""
        adapter = request.adapter
        if adapter is None:
            return None
        if adapter.name not in self._loaded:
            self._make_room()
            self._loaded[adapter.name] = _Loaded(self._load(adapter), set())
        loaded = self._loaded[adapter.name]
        loaded.runs.add(request.run)
        return loaded.request

    def give(self, request: Request) -> None:
        """Return the adapter of an ended request."""
        loaded = None if request.adapter is None else self._loaded.get(request.adapter.name)
        if loaded is not None:
            loaded.runs.discard(request.run)

    def _make_room(self) -> None:
        for name in [name for name, loaded in self._loaded.items() if not loaded.runs]:
            if len(self._loaded) < self._room:
                return
            self._engine.remove_lora(self._loaded.pop(name).request.lora_int_id)

    def _load(self, adapter: Adapter) -> Any:
        number = next(self._numbers)
        lora_request = lora.request(adapter.name, number, adapter.folder)
        try:
            self._engine.add_lora(lora_request)
            unfit = sorted(set(itertools.chain(*self._workers.all("unfit", number))))
        except Exception as error:
            with suppress(Exception):  # it may not be loaded
                self._engine.remove_lora(number)
            raise ModelError(f"{adapter.folder} cannot be loaded: {type(error).__name__}: {error}", "lora") from error
        if unfit:
            self._engine.remove_lora(number)
            raise ModelError(f"{adapter.folder} is not an adapter of this model: {'; '.join(unfit[:3])}", "lora")
        return lora_request
