"""The seams: every place where stock vLLM is entered, and the versions it was found at.

`require` finds one or says which moved; an engine of ours then does not start.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import msgspec

from patchclamp.errors import SeamMoved


class Seam(msgspec.Struct, frozen=True):
    """`module:Class.attribute`, what it is needed for, and the versions where it was found to do that."""

    name: str
    place: str
    why: str
    checked: tuple[str, ...]


_BOTH, _NEW = ("0.26.0", "0.32.0"), ("0.32.0",)
SEAMS: dict[str, Seam] = {
    seam.name: seam
    for seam in (
        Seam("load", "vllm.v1.worker.worker_base:WorkerWrapperBase", "attach taps after the model is loaded", _NEW),
        Seam("v1 inputs", "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs", "plan rows (V1)", _NEW),
        Seam("v1 step", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model", "begin a step (V1)", _NEW),
        Seam("v2 inputs", "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs", "plan rows (V2)", _NEW),
        Seam("v2 step", "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model", "begin a step (V2)", _NEW),
        Seam("v2 dispatch", "vllm.v1.worker.gpu.model_runner:dispatch_cg_and_sync_dp", "choose no graph (V2)", _NEW),
        Seam("compile", "vllm.compilation.backends:VllmBackend.__call__", "compile idle steps without taps", _NEW),
        Seam("v2 sample", "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens", "end a step (V2)", _NEW),
        Seam("block keys", "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys", "key edited blocks", _NEW),
        Seam("cache search", "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
             "compute what is captured", _NEW),
        Seam("engine", "vllm.v1.engine.llm_engine:LLMEngine.step", "carry requests", _NEW),
    )
}  # fmt: skip


def version() -> str:
    import vllm

    return vllm.__version__


def require(name: str, parameters: tuple[str, ...] = ()) -> tuple[Any, str]:
    """The owner and attribute of a seam. Raises `SeamMoved` if it, or a parameter it must take, is not there."""
    seam = SEAMS[name]
    module_name, _, path = seam.place.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
        *outer, last = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        found = getattr(owner, last)
        taken = inspect.signature(found).parameters if parameters else ()
    except (ImportError, AttributeError, ValueError) as error:
        raise _moved(seam, f"{type(error).__name__}: {error}") from None
    missing = [word for word in parameters if word not in taken]
    if missing:
        raise _moved(seam, f"it takes no parameter {', '.join(missing)}")
    return owner, last


def _moved(seam: Seam, why: str) -> SeamMoved:
    return SeamMoved(
        f"vLLM {version()} has no seam {seam.name!r} where it is expected ({seam.place}, needed to {seam.why}; "
        f"checked on {', '.join(seam.checked)}): {why}"
    )
