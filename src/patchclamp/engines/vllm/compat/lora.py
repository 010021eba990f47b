"""LoRA adapters in vLLM: loading between steps, a check that an adapter fits its model, and a zero slot for requests
without an adapter.

By itself, vLLM would load an adapter in the step that first needs it, where an invalid adapter stops the engine, and
would evict the least recently used adapter even while a run uses it.

vLLM's CPU kernels (`lora.ops.torch_ops`, 0.32.0) index with a row's slot, and a row without an adapter has slot −1: in
a batch with adapters such rows get the last slot's adapter (vLLM #48421). So `prepare` adds a last slot that no adapter
uses and that stays zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from patchclamp.engines.base import Adapter, Request
from patchclamp.errors import CapacityError, EngineError, ModelError, ProgramError

if TYPE_CHECKING:
    from vllm.config import LoRAConfig, VllmConfig
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine


# -- in the front end


class _Loaded(msgspec.Struct):
    """vLLM's request for an adapter, and the runs that use it."""

    request: LoRARequest
    runs: set[str]


def check_prompt_logprobs(vllm_config: VllmConfig, prompt_logprobs: int | None) -> None:
    """Raise `ProgramError` for log-probabilities of a prompt on an engine with adapters: vLLM applies the sampled rows'
    adapters to the prompt's rows."""
    if prompt_logprobs is not None and vllm_config.lora_config is not None:
        raise ProgramError(
            "prompt_logprobs is not supported with enable_lora: use score for the tokens after a prompt",
            "prompt_logprobs",
        )


class Adapters:
    """One engine's adapters. `find_unfit(number)` returns the problems that each worker finds with a loaded adapter.
    `config`: vLLM's LoRA configuration, or None if LoRA is off."""

    def __init__(
        self, engine: LLMEngine, find_unfit: Callable[[int], list[list[str]]], config: LoRAConfig | None
    ) -> None:
        self._engine, self._find_unfit, self._config = engine, find_unfit, config
        self._room: int = 0 if config is None else config.max_cpu_loras or config.max_loras
        self._loaded: dict[str, _Loaded] = {}  # by name, in the order of loading
        self._numbers = itertools.count(1)

    def check(self, adapter: Adapter) -> None:
        """Raise `EngineError` or `CapacityError` for an adapter that this engine cannot run."""
        if self._config is None:
            raise EngineError(
                "this engine was started without LoRA: use pc.LM(..., enable_lora=True), and max_loras for the number "
                "of adapters in a batch", "lora"
            )  # fmt: skip
        if adapter.rank > self._config.max_lora_rank:
            raise CapacityError(
                f"{adapter.folder} has rank {adapter.rank}, above max_lora_rank={self._config.max_lora_rank}: start "
                "the engine with a larger max_lora_rank", "lora"
            )  # fmt: skip

    def admits(self, requests: Iterable[Request]) -> int:
        """Return the number of leading requests whose adapters fit alongside the adapters in use."""
        used = {name for name, loaded in self._loaded.items() if loaded.runs}
        for i, request in enumerate(requests := list(requests)):
            if request.adapter is not None:
                used.add(request.adapter.name)
                if len(used) > self._room:
                    return i
        return len(requests)

    def take(self, request: Request) -> LoRARequest | None:
        """Load a request's adapter, keep it until `give`, and return vLLM's request for it; None without an adapter.
        Raises `ModelError` for an adapter that vLLM cannot load or that does not fit this model."""
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
        """Release an ended request's adapter."""
        loaded = None if request.adapter is None else self._loaded.get(request.adapter.name)
        if loaded is not None:
            loaded.runs.discard(request.run)

    def _make_room(self) -> None:
        for name in [name for name, loaded in self._loaded.items() if not loaded.runs]:
            if len(self._loaded) < self._room:
                return
            self._engine.remove_lora(self._loaded.pop(name).request.lora_int_id)

    def _load(self, adapter: Adapter) -> LoRARequest:
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        lora_request = LoRARequest(adapter.name, number, adapter.folder)  # both key blocks of the prefix cache
        try:
            self._engine.add_lora(lora_request)
            unfit = sorted(set(itertools.chain(*self._find_unfit(number))))
        except Exception as error:
            with suppress(Exception):  # it may not be loaded
                self._engine.remove_lora(number)
            raise ModelError(f"{adapter.folder} cannot be loaded: {type(error).__name__}: {error}", "lora") from error
        if unfit:
            self._engine.remove_lora(number)
            raise ModelError(f"{adapter.folder} does not fit this model: {'; '.join(unfit[:3])}", "lora")
        return lora_request


# -- in a worker


def prepare(runner: Any) -> None:
    """Prepare a runner's model for adapters. Raises `EngineError` for expert layers on a CPU."""
    for module in _manager_of(runner).modules.values():
        if runner.device.type == "cpu":
            if _has_experts(module):
                raise EngineError(
                    "LoRA (enable_lora) with expert layers is not supported on a CPU: vLLM's kernels for them need "
                    "Triton; merge the adapter into the model"
                )
            module.lora_b_stacked = _with_zeros(module.lora_b_stacked)
            if not _is_table(module):
                module.lora_a_stacked = _with_zeros(module.lora_a_stacked)


def _manager_of(runner: Any) -> LoRAModelManager:
    return runner.lora_manager._adapter_manager


def _has_experts(module: Any) -> bool:
    """True if the module has one matrix per expert."""
    return isinstance(module.lora_a_stacked, list)


def _is_table(module: Any) -> bool:
    """True if an adapter's first matrix is indexed by token id, as for the embedding."""
    return hasattr(module, "lora_a_stacked_2d")


def _with_zeros(stacked: Any) -> Any:
    if isinstance(stacked, tuple):
        return tuple(map(_with_zeros, stacked))
    return torch.cat([stacked, torch.zeros_like(stacked[:1])])


def unfit(runner: Any, number: int) -> list[str]:
    """Describe the parts of a loaded adapter that the model lacks or has with a different size. vLLM skips or truncates
    them."""
    adapters = _manager_of(runner)
    adapter = adapters.get_adapter(number)
    assert adapter is not None
    weights = adapter.loras
    problems = [f"the model has no {name}" for name in weights if name not in adapters.modules]
    for name in weights.keys() & adapters.modules.keys():
        if _has_experts(adapters.modules[name]):
            problems.append(f"{name}: adapters of experts are not supported yet")
            continue
        widths = [*_widths(weights[name].lora_a, 1), *_widths(weights[name].lora_b, 0)]
        pairs = zip(widths, _model_widths(adapters.modules[name]), strict=True)
        wrong = [(model_width, width) for width, model_width in pairs if width not in (None, model_width)]
        problems += [f"{name}: expected width {model_width}, got {width}" for model_width, width in wrong[:1]]
    return sorted(problems)


def _model_widths(module: Any) -> list[Any]:
    """Return the widths that a module requires of adapter matrices, summed over tensor-parallel workers."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    into = [*_widths(module.lora_a_stacked, 1 if _is_table(module) else -1)]
    out, layer = [*_widths(module.lora_b_stacked, 2)], module.base_layer
    workers = module.tp_size if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) else 1
    if workers == 1:
        return [*into, *out]
    if isinstance(layer, RowParallelLinear):
        return [*(workers * width for width in into), *out]
    if not isinstance(layer, QKVParallelLinear):
        return [*into, *(workers * width for width in out)]
    q, k, v = (workers * width for width in (layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size,
                                             layer.num_kv_heads * layer.v_head_size))  # fmt: skip
    q, k, v = q, k // layer.num_kv_head_replicas, v // layer.num_kv_head_replicas  # several workers may share a head
    return [*into, *((q, k, v) if len(out) == 3 else (q + k + v,))]


def _widths(matrices: Any, axis: int) -> Iterator[int | None]:
    """Yield the size along `axis` of a matrix, or of each matrix in a list with one per slice (None if missing)."""
    for matrix in matrices if isinstance(matrices, (list, tuple)) else [matrices]:
        yield None if matrix is None else matrix.shape[axis]
