"""vLLM's configuration: patchclamp's section, facts about the model, and unsupported settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from patchclamp.engines.preflight import default_dtype
from patchclamp.engines.vllm.compat.connectors import KEYED
from patchclamp.errors import EngineError
from patchclamp.store.system import available_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.usage.usage_lib import UsageContext

KEY = "patchclamp"  # in `additional_config`, in `SamplingParams.extra_args`, and in a block's extra keys


def enabled(vllm_config: VllmConfig) -> dict[str, Any] | None:
    """Return patchclamp's section of `additional_config`; None for an engine without patchclamp."""
    extra = getattr(vllm_config, "additional_config", None)
    ours = extra.get(KEY) if isinstance(extra, dict) else None
    return ours if isinstance(ours, dict) else None


def is_uniform(vllm_config: VllmConfig) -> bool:
    """True if an engine uses patchclamp and all its steps run the same code, with taps."""
    ours = enabled(vllm_config)
    return ours is not None and ours["numerics"] == "uniform"


def engine_id(vllm_config: VllmConfig) -> int:
    """Return an id that all copies of an engine's configuration share: the id of its compilation config. vLLM creates
    the decoder of a multimodal model with such a copy."""
    return id(vllm_config.compilation_config)


@contextmanager
def surroundings(separate: bool) -> Iterator[None]:
    """Set environment variables for creating an engine; restore them afterwards.

    `separate`: True to run the engine core, and a single worker, in a separate process.

    vLLM must save ahead-of-time compiled code as the traced graph. Both variants are recompiled from the graph, but a
    compiled artifact would contain only one. On a CPU, vLLM could not load saved code, so `VLLM_USE_AOT_COMPILE=0`
    disables saving. It stays set, because compiled models read it in every step.
    """
    from vllm.platforms import current_platform

    if os.environ.get(MEGA) == "1":
        raise EngineError(ONE_VARIANT)
    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    with environment({"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(separate)), MEGA: "0"}):
        yield


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables that vLLM reads; restore them afterwards."""
    from vllm import envs

    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    envs.disable_envs_cache()  # vLLM caches the values of an earlier engine
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


MEGA = "VLLM_USE_MEGA_AOT_ARTIFACT"
ONE_VARIANT = f"{MEGA}=1 is not supported: it saves only one of the two variants of the compiled code"


def save_graphs(vllm_config: VllmConfig) -> None:
    """Make vLLM save ahead-of-time compiled code as the traced graph, as `surroundings` does, for an engine that
    patchclamp does not create. Raises `EngineError` if the user has set the opposite."""
    from vllm import envs

    if getattr(vllm_config.compilation_config.mode, "name", "") == "VLLM_COMPILE" and getattr(envs, MEGA, False):
        if os.environ.get(MEGA) == "1":
            raise EngineError(ONE_VARIANT)
        os.environ[MEGA] = "0"


def spare_memory(arguments: dict[str, Any]) -> None:
    """Limit the cache on a CPU to a quarter of the free memory, at most 4 GiB; vLLM would take most of the memory.

    Does nothing on a GPU, or if the caller has set a size.
    """
    from vllm.platforms import current_platform

    given = {"gpu_memory_utilization", "kv_cache_memory_bytes"} & set(arguments)
    if current_platform.is_cpu() and not given and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        arguments["kv_cache_memory_bytes"] = min(4 << 30, available_bytes() // 4)


def choose_dtype(arguments: dict[str, Any]) -> None:
    """Run a small model in fp32 on a CPU, unless the user chose a dtype or quantization."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not {"dtype", "quantization"} & set(arguments):
        dtype = default_dtype(arguments["model"])
        if dtype is not None:
            arguments["dtype"] = dtype


def usage() -> UsageContext:
    """Return the `UsageContext` for vLLM's default batch limit: `LLM_CLASS`, or `UNKNOWN_CONTEXT` on a CPU.

    Startup runs a step of the maximum size, which is slow on a CPU.
    """
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    return UsageContext.UNKNOWN_CONTEXT if current_platform.is_cpu() else UsageContext.LLM_CLASS


def share_groups(vllm_config: VllmConfig) -> None:
    """Create the expert-parallel group if an earlier model in this process had no experts: vLLM creates it only for the
    first model. Use only with a worker in this process."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    is_needed = parallel_state.model_parallel_is_initialized() and vllm_config.model_config.is_moe
    if not is_needed or parallel_state._EP is not None:
        return
    world = parallel_state.get_world_group()
    with set_current_vllm_config(vllm_config):
        parallel_state._EP = parallel_state.init_model_parallel_group(
            [[world.rank]], world.local_rank, torch.distributed.get_backend(world.device_group), group_name="ep"
        )


def model_facts(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the architectures and sizes of an engine's model."""
    model_config = vllm_config.model_config
    config = model_config.hf_text_config
    return {
        "architectures": list(model_config.hf_config.architectures or ()),
        "config": config,
        "tensor_parallel": vllm_config.parallel_config.tensor_parallel_size,
        "stages": vllm_config.parallel_config.pipeline_parallel_size,
        "layers": config.num_hidden_layers,
        "d_model": config.hidden_size,
        "d_vocab": model_config.get_vocab_size(),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "max_model_len": model_config.max_model_len,
        "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
        "trust_remote_code": model_config.trust_remote_code,
    }


def images_see_ahead(vllm_config: VllmConfig) -> bool:
    """True if the model's image tokens attend to later tokens of the same image, as in Gemma 3. On a CPU,
    image tokens never do, even if this is True."""
    return vllm_config.model_config.is_mm_prefix_lm


def settings(vllm_config: VllmConfig) -> str:
    """Return vLLM's own hash of its configuration, and the checkpoint's revision. They identify the running code."""
    return f"{vllm_config.compute_hash()} {getattr(vllm_config.model_config.hf_config, '_commit_hash', None)}"


def unrecorded(vllm_config: VllmConfig, sizes: Sequence[int]) -> str | None:
    """Describe which of `sizes` lack a CUDA graph; None if vLLM records graphs for all sizes, or for none."""
    recorded = sorted(vllm_config.compilation_config.cudagraph_capture_sizes or ())
    missing = [size for size in sizes if size not in recorded]
    if not missing or not recorded:
        return None
    return f"active_sizes {missing}: vLLM records graphs only for steps of {recorded} tokens"


def chosen(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return an engine's settings for the report, by vLLM's own names."""
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    compilation_config, scheduler_config = vllm_config.compilation_config, vllm_config.scheduler_config
    parallel_config = vllm_config.parallel_config
    mode, sizes = compilation_config.cudagraph_mode, compilation_config.cudagraph_capture_sizes or []
    return {
        "numerics": "uniform" if is_uniform(vllm_config) else "stock",
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "max_model_len": model_config.max_model_len,
        "max_num_seqs": scheduler_config.max_num_seqs,
        "max_num_batched_tokens": scheduler_config.max_num_batched_tokens,
        "enable_prefix_caching": bool(cache_config.enable_prefix_caching),
        "async_scheduling": bool(scheduler_config.async_scheduling),
        "tensor_parallel_size": parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": parallel_config.pipeline_parallel_size,
        "compilation": "eager"
        if model_config.enforce_eager
        else str(getattr(compilation_config.mode, "name", compilation_config.mode)),
        "cudagraph_mode": getattr(mode, "name", str(mode)),
        "cudagraph_capture_sizes": f"{len(sizes)}, up to {max(sizes)}" if sizes else "none",
        "quantization": model_config.quantization or "none",
    }


def check(vllm_config: VllmConfig) -> None:
    """Raise `EngineError`, with names and reasons, for a configuration that would break a guarantee."""
    reasons = refused(vllm_config)
    if reasons:
        raise EngineError(
            f"not supported by patchclamp: {'; '.join(f'{name}: {why}' for name, why in reasons.items())}"
        )


def refused(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the settings of a configuration that would break a guarantee, each with its reason.

    An option that the installed vLLM lacks counts as off.
    """
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    parallel_config, compilation_config = vllm_config.parallel_config, vllm_config.compilation_config
    pass_config, mode = compilation_config.pass_config, compilation_config.cudagraph_mode
    split = "each worker has only part of a request's positions"
    conditions = [
        *_refused_speculation(vllm_config),
        ("micro-batching (enable_dbo, ubatch_size)",
         _above(parallel_config, "enable_dbo", 0) or _above(parallel_config, "ubatch_size"),
         "a step is split in two, but its rows are planned as one"),
        ("LoRA (enable_lora) over pipeline stages",
         vllm_config.lora_config and parallel_config.pipeline_parallel_size > 1,
         "not supported yet: stock vLLM fails with it on the CPU build"),
        ("LoRA with sharded first matrices (fully_sharded_loras) over several workers",
         parallel_config.world_size > 1 and _above(vllm_config.lora_config, "fully_sharded_loras", 0),
         "not supported yet: untested"),
        ("LoRA (enable_lora) with a multimodal model", vllm_config.lora_config
         and model_config.hf_config is not model_config.hf_text_config, "not supported yet: untested"),
        ("prefill_context_parallel_size above 1", _above(parallel_config, "prefill_context_parallel_size"), split),
        ("decode_context_parallel_size above 1", _above(parallel_config, "decode_context_parallel_size"), split),
        ("elastic expert parallel (enable_elastic_ep)", _above(parallel_config, "enable_elastic_ep", 0),
         "changing the number of workers would lose programs and captures"),
        *_refused_connectors(vllm_config),
        ("encoder caches of other instances (ec_transfer_config)", getattr(vllm_config, "ec_transfer_config", None),
         "transferred entries do not record their edits"),
        ("KV-sharing fast prefill (kv_sharing_fast_prefill)", _above(cache_config, "kv_sharing_fast_prefill", 0),
         "layers skip prompt positions that programs select"),
        ("sharded sampling (enable_batch_sharded_sampling)",
         _above(parallel_config, "enable_batch_sharded_sampling", 0),
         "each worker computes logits for some requests only, bypassing the tap"),
        ("quantized attention outputs (pass_config.fuse_attn_quant)", _above(pass_config, "fuse_attn_quant", 0),
         "z would be read and written in quantized units"),
        (f"pooling models (runner type {model_config.runner_type!r})", model_config.runner_type != "generate",
         "they generate no tokens"),
        ("encoder-decoder models", model_config.is_encoder_decoder, "positions would be ambiguous"),
        ("a compile cache folder (compilation_config.cache_dir)", compilation_config.cache_dir,
         "vLLM would reuse any code in it, with or without taps: set VLLM_CACHE_ROOT instead"),
        ("offloading CUDA graphs on sleep (sleep_mode_offload_cudagraph)",
         _above(model_config, "sleep_mode_offload_cudagraph", 0), "graphs with taps would not be offloaded"),
        (f"compilation mode {getattr(compilation_config.mode, 'name', None)} on a GPU",
         getattr(compilation_config.mode, "name", "") in ("STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE")
         and vllm_config.device_config.device_type != "cpu",
         "steps without programs would run taps; use VLLM_COMPILE (3, the default) or enforce_eager=True"),
        ("batch-invariant mode (VLLM_BATCH_INVARIANT=1) on a CPU",
         _is_batch_invariant() and vllm_config.device_config.device_type == "cpu",
         "vLLM's kernels for it require a GPU, and stock vLLM stops in its first step: unset it"),
        ("breakable CUDA graphs (set VLLM_USE_BREAKABLE_CUDAGRAPH=0)",
         mode is not None and mode.name != "NONE" and _breakable(), "not supported yet: graphs are recorded in parts"),
    ]  # fmt: skip
    return {name: why for name, on, why in conditions if on}


def check_monitored(vllm_config: VllmConfig, numerics: str) -> None:
    """Raise `EngineError` for a configuration in which probes cannot score every request."""
    scheduler_config, parallel_config = vllm_config.scheduler_config, vllm_config.parallel_config
    reasons = {
        'numerics="stock"': ("steps without programs have no taps", numerics != "uniform"),
        "a KV connector": ("positions it loads are not computed", vllm_config.kv_transfer_config is not None),
        "pipeline stages": ("only the last stage returns a step's scores", parallel_config.pipeline_parallel_size > 1),
        "speculative decoding and async_scheduling": (
            "a step's positions are known too late",
            vllm_config.speculative_config is not None and bool(scheduler_config.async_scheduling),
        ),
    }
    for name, (why, holds) in reasons.items():
        if holds:
            raise EngineError(f"always-on probes are not supported with {name}: {why}", "probes")


CONNECTORS = ("ExampleConnector", "NixlConnector", *KEYED)  # tested; requests with programs bypass them


def _refused_connectors(vllm_config: VllmConfig) -> list[tuple[str, Any, str]]:
    """Return the (name, condition, reason) of unsupported KV connectors."""
    transfer, parallel_config = vllm_config.kv_transfer_config, vllm_config.parallel_config
    name = getattr(transfer, "kv_connector", None)
    module = getattr(transfer, "kv_connector_module_path", None)
    return [
        (f"the KV connector {name!r} (kv_transfer_config)", transfer is not None and name not in CONNECTORS,
         f"not supported yet: the tested ones are {' and '.join(CONNECTORS)}"),
        ("KV offloading (OffloadingConnector)",
         name in KEYED and vllm_config.device_config.device_type == "cpu", "vLLM's requires a GPU"),
        (f"a custom KV connector module (kv_connector_module_path={module!r})", module,
         "patchclamp cannot check what it stores"),
        ("another offloading spec (kv_connector_extra_config)",
         {"spec_name", "spec_module_path"} & {*(getattr(transfer, "kv_connector_extra_config", None) or {})},
         "not supported yet: the tested one is the default, in host memory"),
        ("a KV connector (kv_transfer_config) over several workers",
         transfer is not None and parallel_config.world_size > 1, "not supported yet: untested"),
        ("a KV connector (kv_transfer_config) with speculative decoding, or with LoRA",
         transfer is not None and (vllm_config.speculative_config or vllm_config.lora_config),
         "not supported yet: untested"),
    ]  # fmt: skip


DRAFTERS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")  # tested methods of speculative decoding
GPU_V1_DRAFTERS = ("ngram", "eagle")  # on a GPU with the V1 runner
PARALLEL_DRAFTERS = ("ngram", "eagle", "mtp")  # with several workers
ADAPTED_DRAFTERS = ("ngram", "draft_model")  # with adapters

# untested options of speculative decoding, with their defaults
UNTRIED_DRAFTS: dict[str, Any] = {
    "parallel_drafting": False, "use_heterogeneous_vocab": False, "disable_padded_drafter_batch": False,
    "use_local_argmax_reduction": False, "num_speculative_tokens_per_batch_size": None, "draft_sample_method": "greedy",
}  # fmt: skip


def needs_steps_apart(vllm_config: VllmConfig) -> bool:
    """True if steps are scheduled before drafts are verified, by a runner that does not expose the true positions."""
    scheduler_config = vllm_config.scheduler_config
    return (
        vllm_config.speculative_config is not None
        and bool(scheduler_config.async_scheduling)
        and not _on_v2(vllm_config)
    )


def counted_drafts(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return engine arguments that make vLLM count each request's drafted tokens, if it drafts any."""
    # a checkpoint with its own drafter enables speculative decoding by itself
    drafts = any(arguments.get(name) for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens"))
    return {"per_request_spec_decode_metrics": "summary", **arguments} if drafts else arguments


def _on_v2(vllm_config: VllmConfig) -> bool:
    return vllm_config.use_v2_model_runner


def _refused_speculation(vllm_config: VllmConfig) -> list[tuple[str, Any, str]]:
    """Return the (name, condition, reason) of unsupported kinds of speculative decoding. Programs depend on a step's
    draft rows, and on its first position, known only once the last step's drafts are verified."""
    speculative_config, no = vllm_config.speculative_config, "not supported yet: "
    if speculative_config is None:
        return []
    method = speculative_config.method
    on_gpu = vllm_config.device_config.device_type != "cpu"
    return [
        (f"speculative decoding by {method!r} (speculative_config)", method not in DRAFTERS,
         f"{no}untested; available: {', '.join(DRAFTERS)}"),
        (f"speculative decoding by {method!r} (speculative_config) on a GPU with the V1 runner",
         on_gpu and method in DRAFTERS and method not in GPU_V1_DRAFTERS and not _on_v2(vllm_config),
         f"{no}available: {', '.join(GPU_V1_DRAFTERS)}, and more with VLLM_USE_V2_MODEL_RUNNER=1"),
        ("multi-module MTP, or Gemma 4's (speculative_config)",
         any(getattr(speculative_config, kind, bool)() for kind in ("use_multi_module_mtp", "use_gemma4_mtp")),
         no + "untested"),
        ("speculative decoding (speculative_config) with async_scheduling and the V1 runner",
         needs_steps_apart(vllm_config),
         "a step is planned before the last step's draft tokens are verified; omit async_scheduling"),
        ("synthetic draft acceptance (rejection_sample_method='synthetic')",
         getattr(speculative_config, "rejection_sample_method", None) == "synthetic", "the tokens are not the model's"),
        ("block-wise draft acceptance (rejection_sample_method='block')",
         getattr(speculative_config, "rejection_sample_method", None) == "block", no + "untested"),
        ("adaptive draft verification (enable_adaptive_verification)",
         getattr(speculative_config, "enable_adaptive_verification", False),
         "the rows of a request are unknown when a step is planned"),
        ("speculative decoding (speculative_config) over pipeline stages",
         vllm_config.parallel_config.pipeline_parallel_size > 1, no + "untested"),
        (f"speculative decoding by {method!r} (speculative_config) over several workers",
         vllm_config.parallel_config.world_size > 1 and (on_gpu or method not in PARALLEL_DRAFTERS),
         f"{no}available on the CPU build: {', '.join(PARALLEL_DRAFTERS)}"),
        *((f"speculative decoding (speculative_config) with {option}",
           getattr(speculative_config, option, usual) != usual, no + "untested")
          for option, usual in UNTRIED_DRAFTS.items()),
        (f"speculative decoding by {method!r} (speculative_config) with LoRA",
         vllm_config.lora_config and (
             on_gpu or method not in ADAPTED_DRAFTERS or vllm_config.parallel_config.world_size > 1),
         no + "tested only on the CPU build, with n-grams and draft models, on one worker"),
    ]  # fmt: skip


def _above(config: Any, name: str, limit: int = 1) -> bool:
    """True if an option is above a limit. An option that the installed vLLM lacks counts as 0."""
    return (getattr(config, name, None) or 0) > limit


def _is_batch_invariant() -> bool:
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def _breakable() -> bool:
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    return is_breakable_cudagraph_enabled()


def unread_attention(vllm_config: VllmConfig, config: Any) -> str:
    """Return the reason why an engine cannot read attention patterns; "" if it can."""
    if (dtype := vllm_config.cache_config.cache_dtype) not in ("auto", "float32", "float16", "bfloat16"):
        return f"keys are cached in {dtype}; use kv_cache_dtype='auto'"
    if getattr(config, "attention_chunk_size", None):
        return "its layers use chunked attention"
    return ""
