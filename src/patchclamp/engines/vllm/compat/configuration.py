"""What vLLM's configuration says: whether an engine is ours, what its model is, what it may not be combined with."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

KEY = "patchclamp"  # in `additional_config`, in `SamplingParams.extra_args`, and in a block's extra keys


def enabled(vllm_config: Any) -> dict[str, Any] | None:
    """Our part of `additional_config`, or None for an engine that is not ours."""
    extra = getattr(vllm_config, "additional_config", None)
    found = extra.get(KEY) if isinstance(extra, dict) else None
    return found if isinstance(found, dict) else None


@contextmanager
def core_process(separate: bool) -> Iterator[None]:
    """While a configuration is made: whether the engine core, and a lone worker, get a process of their own.

    vLLM reads this from the environment, which is put back afterwards.
    """
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"  # its artifact would hold one compiled body where ours are two
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = str(int(separate))
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def spare_memory(arguments: dict[str, Any]) -> None:
    """On a CPU, where vLLM would take most of the memory for its cache, takes at most a quarter of what is free.

    Left alone where the caller says how much, and on a GPU.
    """
    import psutil
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not {"gpu_memory_utilization", "kv_cache_memory_bytes"} & set(arguments):
        arguments["kv_cache_memory_bytes"] = min(4 << 30, psutil.virtual_memory().available // 4)


def shut_down(engine: Any, alone: bool) -> None:
    """Frees an engine. vLLM also takes down what all engines of a process share; with others alive that is left."""
    if alone:
        engine.engine_core.shutdown()
        return
    with (
        _nothing("vllm.v1.engine.core:cleanup_dist_env_and_memory"),
        _nothing("vllm.v1.worker.workspace:reset_workspace_manager"),
    ):
        engine.engine_core.shutdown()


@contextmanager
def _nothing(place: str) -> Iterator[None]:
    """A module's function does nothing within."""
    module, _, name = place.partition(":")
    owner = importlib.import_module(module)
    before = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(owner, name, before)


def model_facts(vllm_config: Any) -> dict[str, Any]:
    """Architectures and sizes of an engine's model."""
    model = vllm_config.model_config
    config = model.hf_text_config
    return {
        "architectures": list(model.hf_config.architectures or ()),
        "layers": config.num_hidden_layers,
        "d_model": config.hidden_size,
        "d_vocab": model.get_vocab_size(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
    }


def settings(vllm_config: Any) -> str:
    """What decides which code runs the model: vLLM's own hash of its configuration, and the checkpoint's revision."""
    return f"{vllm_config.compute_hash()} {getattr(vllm_config.model_config.hf_config, '_commit_hash', None)}"


def unrecorded(vllm_config: Any, sizes: Sequence[int]) -> str | None:
    """Which sizes of step vLLM records no CUDA graphs for, in words; None if it does for all, or records none."""
    there = sorted(vllm_config.compilation_config.cudagraph_capture_sizes or ())
    missing = [size for size in sizes if size not in there]
    if not missing or not there:
        return None
    return f"active_sizes {missing}: vLLM records graphs for steps of {there} tokens here"


def refused(vllm_config: Any) -> list[str]:
    """Configurations under which a guarantee would not hold, in words; an engine with any of them does not start."""
    parallel, found = vllm_config.parallel_config, []
    if vllm_config.speculative_config is not None:
        found.append("speculative decoding")
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "ubatch_size", 0) > 1:
        found.append("micro-batching (enable_dbo, ubatch_size)")
    if vllm_config.lora_config is not None:
        found.append("LoRA (not supported yet)")
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            found.append(name)
    if vllm_config.kv_transfer_config is not None:
        found.append("KV connectors (kv_transfer_config)")
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        found.append("kv_sharing_fast_prefill")
    if vllm_config.model_config.runner_type != "generate":
        found.append(f"runner type {vllm_config.model_config.runner_type!r}")
    if vllm_config.model_config.is_encoder_decoder:
        found.append("encoder-decoder models")
    if getattr(parallel, "data_parallel_size", 1) > 1:
        found.append("data_parallel_size above 1")
    return found
