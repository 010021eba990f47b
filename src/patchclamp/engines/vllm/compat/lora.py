"""LoRA adapters in vLLM: their requests, a check that one fits its model, and a zero slot for requests without one.

vLLM's CPU kernels (`lora.ops.torch_ops`, 0.32.0) index with a row's slot, and the slot of a row without an adapter is
−1: in a batch with adapters such rows get the adapter of the last slot (vLLM #48421). So `prepare` adds a last slot
that no adapter uses and that stays zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from patchclamp.engines.vllm.compat.seams import require_all, require_on
from patchclamp.errors import EngineError


def request(name: str, number: int, folder: str) -> Any:
    """Return vLLM's request for an adapter; blocks of the prefix cache are keyed by its name and folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, folder)


def prepare(runner: Any) -> None:
    """Prepare a runner's model for adapters. Raises `SeamMoved`, and `EngineError` for layers of experts on a CPU."""
    require_all("lora")
    require_on("lora runner", runner)
    require_on("lora worker", runner.lora_manager)
    adapters = runner.lora_manager._adapter_manager
    require_on("lora manager", adapters)
    for module in adapters.modules.values():
        require_on("lora layer", module)
        if runner.device.type == "cpu":
            if _has_experts(module):
                raise EngineError(
                    "LoRA (enable_lora) with layers of experts does not run on a CPU: vLLM's kernels for them need "
                    "Triton; merge the adapter into the model"
                )
            module.lora_b_stacked = _with_zeros(module.lora_b_stacked)
            if not _is_table(module):
                module.lora_a_stacked = _with_zeros(module.lora_a_stacked)


def _has_experts(module: Any) -> bool:
    """True if there is one matrix per expert."""
    return isinstance(module.lora_a_stacked, list)


def _is_table(module: Any) -> bool:
    """True if an adapter's first matrix is indexed by token id, as for the embedding."""
    return hasattr(module, "lora_a_stacked_2d")


def _with_zeros(stacked: Any) -> Any:
    if isinstance(stacked, tuple):
        return tuple(map(_with_zeros, stacked))
    return torch.cat([stacked, torch.zeros_like(stacked[:1])])


def unfit(runner: Any, number: int) -> list[str]:
    """Describe the parts of a loaded adapter that the model lacks or has in another size. vLLM skips or cuts them."""
    adapters = runner.lora_manager._adapter_manager
    weights = adapters.get_adapter(number).loras
    problems = [f"the model has no {name}" for name in weights if name not in adapters.modules]
    for name in weights.keys() & adapters.modules.keys():
        if _has_experts(adapters.modules[name]):
            problems.append(f"{name} has experts, and adapters of those are not supported yet")
            continue
        widths = [*_widths(weights[name].lora_a, 1), *_widths(weights[name].lora_b, 0)]
        pairs = zip(widths, _model_widths(adapters.modules[name]), strict=True)
        wrong = [(model_width, width) for width, model_width in pairs if width not in (None, model_width)]
        problems += [f"{name} is {model_width} wide and the adapter {width}" for model_width, width in wrong[:1]]
    return sorted(problems)


def _model_widths(module: Any) -> list[Any]:
    """Return the widths of an adapter's matrices that fit a module, summed over tensor-parallel workers."""
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
    """Yield the size along an axis of one matrix, or of one per slice (None for a missing one)."""
    for matrix in matrices if isinstance(matrices, (list, tuple)) else [matrices]:
        yield None if matrix is None else matrix.shape[axis]
