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
    """`module:Class.attribute`, what it is needed for, the parameters it must take, and the versions where it was found
    to do that."""

    name: str
    place: str
    why: str
    takes: tuple[str, ...] = ()
    checked: tuple[str, ...] = ("0.26.0", "0.32.0")

    @property
    def checked_on(self) -> str:
        """Where it was checked, in words."""
        return f"checked on {' and '.join(self.checked)}" if self.checked else "not checked yet"


_V1, _V2 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.", "vllm.v1.worker.gpu.model_runner:"
_STEP, _CORE = ("scheduler_output",), "vllm.v1.core."
SEAMS: dict[str, Seam] = {
    seam.name: seam
    for seam in (
        Seam("engine", "vllm.v1.engine.llm_engine:LLMEngine.step", "carry requests"),
        Seam("load", "vllm.v1.worker.worker_base:WorkerWrapperBase", "attach taps after the model is loaded"),
        Seam("compile", "vllm.compilation.backends:VllmBackend.__call__", "compile idle steps without taps",
             ("graph", "example_inputs")),
        Seam("fusions", "vllm.compilation.passes.vllm_inductor_pass:VllmPatternMatcherPass.match_table",
             "count what is fused"),
        Seam("compiled", "vllm.compilation.caching:VllmSerializableFunction.__init__", "run idle steps without taps",
             ("optimized_call",)),
        Seam("recording", "vllm.compilation.monitor:set_cudagraph_capturing_enabled", "allow graphs (V2 after V1)",
             ("enabled",)),
        Seam("graphs", "vllm.compilation.cuda_graph:CUDAGraphWrapper._all_instances", "find piecewise graphs"),
        Seam("breakable graphs", "vllm.compilation.breakable_cudagraph:is_breakable_cudagraph_enabled", "refuse them"),
        Seam("v1 inputs", _V1 + "_prepare_inputs", "plan rows (V1)", (*_STEP, "num_scheduled_tokens")),
        Seam("v1 step", _V1 + "execute_model", "begin a step (V1)", _STEP),
        Seam("v1 graphs", _V1 + "_capture_cudagraphs", "record taps (V1)",
             ("batch_descriptors", "cudagraph_runtime_mode")),
        Seam("v1 estimate", _V1 + "profile_cudagraph_memory", "count the memory of graphs (V1)"),
        Seam("v1 dispatch", "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch", "choose no graph (V1)",
             ("num_tokens",)),
        Seam("v2 inputs", _V2 + "GPUModelRunner.prepare_inputs", "plan rows (V2)", _STEP),
        Seam("v2 step", _V2 + "GPUModelRunner.execute_model", "begin a step (V2)", (*_STEP, "dummy_run")),
        Seam("v2 sample", _V2 + "GPUModelRunner.sample_tokens", "end a step (V2)"),
        Seam("v2 graphs", _V2 + "GPUModelRunner.capture_model", "record taps (V2)"),
        Seam("v2 estimate", _V2 + "GPUModelRunner.profile_cudagraph_memory", "count the memory of graphs (V2)"),
        Seam("v2 dispatch", _V2 + "dispatch_cg_and_sync_dp", "choose no graph (V2)", ("num_reqs",)),
        Seam("attention", "vllm.model_executor.layers.attention.attention:unified_attention_with_output",
             "read and write what heads bring together", ("output",)),
        Seam("block keys", _CORE + "kv_cache_utils:generate_block_hash_extra_keys", "key edited blocks",
             ("request", "start_token_idx", "end_token_idx", "start_mm_idx")),
        Seam("adapters", "vllm.lora.model_manager:LoRAModelManager.set_adapter_mapping", "run adapters",
             ("mapping",), ("0.32.0",)),
        Seam("backend", "vllm.config:ModelConfig.using_transformers_backend", "know whose modules a model has"),
        Seam("decorated", "vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper", "share Transformers' classes",
             checked=("0.32.0",)),
        Seam("experts", "vllm.distributed.parallel_state:_EP", "run models with experts after others",
             checked=("0.32.0",)),
        Seam("cache search", _CORE + "kv_cache_manager:KVCacheManager.get_computed_blocks", "compute what is captured",
             ("request",)),
    )
}  # fmt: skip


def version() -> str:
    import vllm

    return vllm.__version__


def require(name: str) -> tuple[Any, str]:
    """The owner and attribute of a seam. Raises `SeamMoved` if it, or a parameter it must take, is not there."""
    seam = SEAMS[name]
    module_name, _, path = seam.place.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
        *outer, last = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        found = getattr(owner, last)
        taken = inspect.signature(found).parameters if seam.takes else ()
    except (ImportError, AttributeError, ValueError) as error:
        raise _moved(seam, f"{type(error).__name__}: {error}") from None
    missing = [word for word in seam.takes if word not in taken]
    if missing:
        raise _moved(seam, f"it takes no parameter {', '.join(missing)}")
    return owner, last


def _moved(seam: Seam, why: str) -> SeamMoved:
    return SeamMoved(
        f"vLLM {version()} has no seam {seam.name!r} where it is expected ({seam.place}, needed to {seam.why}; "
        f"{seam.checked_on}): {why}"
    )
