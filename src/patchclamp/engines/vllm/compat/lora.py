"""LoRA adapters in vLLM: their requests, whether one fits its model, and a slot of zeros for requests without one.

vLLM's CPU kernels (`lora.ops.torch_ops`, 0.32.0) take a row's slot as an index, and that of a row without an adapter is
−1: in a batch with adapters such rows get the last slot's (vLLM #48421).  Here the last slot is one more than adapters
are ever given, and stays zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from patchclamp.engines.vllm.compat.seams import require, version
from patchclamp.errors import SeamMoved


def request(name: str, number: int, folder: str) -> Any:
    """vLLM's request for an adapter; blocks of the prefix cache are keyed by its name and folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, folder)


def prepare(runner: Any) -> None:
    """Readies a runner's model for requests with adapters and without. Raises `SeamMoved`."""
    require("adapters")
    manager = _manager(runner)
    if not hasattr(manager, "_last_slot_layout"):
        raise SeamMoved(f"vLLM {version()} does not look whether adapters have changed places between steps")
    for module in manager.modules.values():
        if not {"lora_a_stacked", "lora_b_stacked"} <= vars(module).keys():
            raise SeamMoved(f"vLLM {version()} keeps the adapters of {type(module).__name__} elsewhere than expected")
        if runner.device.type == "cpu":
            module.lora_b_stacked = _with_zeros(module.lora_b_stacked)
            if not _is_table(module):
                module.lora_a_stacked = _with_zeros(module.lora_a_stacked)


def _is_table(module: Any) -> bool:
    """Whether an adapter's first matrix is looked up by token id, as the embedding's is."""
    return hasattr(module, "lora_a_stacked_2d")


def _with_zeros(stacked: Any) -> Any:
    if isinstance(stacked, tuple):
        return tuple(map(_with_zeros, stacked))
    return torch.cat([stacked, torch.zeros_like(stacked[:1])])


def unfit(runner: Any, number: int) -> list[str]:
    """What of a loaded adapter has no place in the model, or another size there; vLLM would leave it out, or cut it."""
    manager = _manager(runner)
    weights = manager.get_adapter(number).loras
    found = [f"the model has no {name}" for name in weights if name not in manager.modules]
    for name in weights.keys() & manager.modules.keys():
        sizes = _sizes(weights[name].lora_a, 1), _sizes(weights[name].lora_b, 0)
        module = manager.modules[name]
        there = _rooms(module.lora_a_stacked, 1 if _is_table(module) else -1), _rooms(module.lora_b_stacked, 2)
        pairs = [pair for some, room in zip(sizes, there, strict=True) for pair in zip(some, room, strict=True)]
        wrong = [(a, b) for a, b in pairs if a is not None and a != b]
        found += [f"{name} is {b} wide and the adapter {a}" for a, b in wrong[:1]]
    return sorted(found)


def _sizes(weights: Any, axis: int) -> Iterator[int | None]:
    """Of an adapter's matrices, one or one a slice (None: it has none there)."""
    for each in weights if isinstance(weights, (list, tuple)) else [weights]:
        yield None if each is None else each.shape[axis]


def _rooms(stacked: Any, axis: int) -> Iterator[int]:
    for each in stacked if isinstance(stacked, tuple) else (stacked,):
        yield each.shape[axis]


def _manager(runner: Any) -> Any:
    try:
        return runner.lora_manager._adapter_manager
    except AttributeError as error:
        raise SeamMoved(f"vLLM {version()} keeps adapters elsewhere than expected: {error}") from None
