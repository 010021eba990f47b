"""The seams: every part of stock vLLM that this package wraps, reads or sets, with the versions it was checked on.

A seam that is not where it is expected raises `SeamMoved` when an engine with patchclamp starts, and never later.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, TypeVar

import msgspec

from patchclamp.errors import SeamMoved

F = TypeVar("F", bound=Callable[..., Any])


class Seam(msgspec.Struct, frozen=True):
    """A function, class or module of vLLM.

    name        the first word is the part that needs it: the "v1" or "v2" runner, "lora" for adapters, "images" for
                prompts with images, "openai" for a server's routes; any other: all engines
    place       `module:Class.attribute`, or `module`
    why         its purpose
    takes       required parameters of a function that is only called
    signature   all parameters of a wrapped function, in each form of a supported version: names, kinds and defaults, as
                in its `def` without annotations
    has         required attributes of a module or of a class's objects, separated by spaces; `name?` is read only if a
                version has it; `name~` is set after the model is loaded, or not on every device
    called      variable names of such an object in this package
    checked     the versions where all of this was found
    """

    name: str
    place: str
    why: str
    takes: tuple[str, ...] = ()
    has: str = ""
    called: str = ""
    signature: tuple[str, ...] = ()
    checked: tuple[str, ...] = ("0.32.0", "0.33.0")

    @property
    def part(self) -> str:
        """The part that needs it: "v1", "v2", "lora", "images" or "openai"; "" for all engines."""
        first = self.name.partition(" ")[0]
        return first if first in ("v1", "v2", "lora", "images", "openai") else ""

    @property
    def checked_on(self) -> str:
        """A description of the versions it was checked on."""
        return f"checked on {' and '.join(self.checked)}"


_V1, _V2 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_STEP, _CORE, _OPENAI = "self, scheduler_output", "vllm.v1.core.", "vllm.entrypoints.openai."
_RUNNER = "device execute_model get_model max_num_reqs max_num_tokens profile_cudagraph_memory vllm_config "
SEAMS: dict[str, Seam] = {
    seam.name: seam
    for seam in (
        Seam("vllm", "vllm", "know the version", has="__version__", called="vllm"),
        Seam("engine", "vllm.v1.engine.llm_engine:LLMEngine.step", "carry requests"),
        Seam("engine core", "vllm.v1.engine.llm_engine:LLMEngine", "shut down, and call the core",
             has="add_request engine_core get_supported_tasks input_processor output_processor renderer? vllm_config",
             called="engine"),
        Seam("core client", "vllm.v1.engine.core_client:EngineCoreClient", "add requests, and shut down",
             has="add_request shutdown", called="engine_core"),
        Seam("inputs", "vllm.v1.engine.input_processor:InputProcessor.process_inputs", "add requests",
             ("request_id", "prompt", "params", "supported_tasks")),
        Seam("input processor", "vllm.v1.engine.input_processor:InputProcessor", "add requests",
             has="assign_request_id process_inputs", called="input_processor"),
        Seam("input", "vllm.v1.engine:EngineCoreRequest", "add requests", called="asked copied",
             has="arrival_time prompt_token_ids request_id sampling_params"),
        Seam("added", "vllm.v1.engine.output_processor:OutputProcessor.add_request", "add requests",
             ("request", "prompt", "parent_req", "request_index")),
        Seam("clean up", "vllm.v1.engine.core:cleanup_dist_env_and_memory", "shut down one engine of several"),
        Seam("workspace", "vllm.v1.worker.workspace:reset_workspace_manager", "shut down one engine of several"),
        Seam("errors", "vllm.exceptions", "have vLLM's routes answer with a status", has="GracefulHTTPError?",
             called="exceptions"),
        # configuration
        Seam("configuration", "vllm.config:VllmConfig", "know how an engine is set up",
             called="vllm_config _config uncompiled plain",
             has="additional_config cache_config compilation_config compute_hash device_config ec_transfer_config? "
             "kv_transfer_config lora_config model_config parallel_config quant_config scheduler_config "
             "speculative_config use_v2_model_runner?"),
        Seam("model", "vllm.config:ModelConfig", "know the model", called="model_config",
             has="architectures dtype enforce_eager get_vocab_size hf_config hf_text_config is_encoder_decoder "
             "is_mm_prefix_lm? is_moe? max_model_len "
             "quantization runner_type sleep_mode_offload_cudagraph? trust_remote_code"),
        Seam("cache", "vllm.config:CacheConfig", "refuse what breaks a guarantee", called="cache_config",
             has="enable_prefix_caching kv_offloading_size? kv_sharing_fast_prefill? mamba_cache_mode"),
        Seam("parallel", "vllm.config:ParallelConfig", "know the workers", called="parallel_config",
             has="decode_context_parallel_size? enable_batch_sharded_sampling? enable_dbo? "
             "enable_elastic_ep? enable_expert_parallel pipeline_parallel_size prefill_context_parallel_size? "
             "tensor_parallel_size ubatch_size? world_size"),
        Seam("scheduler", "vllm.config:SchedulerConfig", "know the sizes of steps", called="scheduler_config",
             has="async_scheduling? max_num_batched_tokens max_num_seqs"),
        Seam("compilation", "vllm.config:CompilationConfig", "know how code is compiled", called="compilation_config",
             has="cache_dir cudagraph_capture_sizes cudagraph_mode custom_ops mode pass_config static_forward_context "
             "traced_files"),
        Seam("passes", "vllm.config.compilation:PassConfig", "refuse what breaks a guarantee", called="pass_config",
             has="enable_sp? fuse_attn_quant? fuse_gemm_comms?"),
        Seam("drafts", "vllm.config:SpeculativeConfig", "refuse what breaks a guarantee",
             has="enable_adaptive_verification? method num_speculative_tokens rejection_sample_method?",
             called="speculative_config"),
        Seam("draft counts", "vllm.v1.metrics.stats:RequestSpecDecodeMetrics", "count drafted tokens",
             has="histogram num_draft_tokens", called="counts"),
        Seam("completion", "vllm.outputs:CompletionOutput", "count drafted tokens", has="spec_decode_metrics?",
             called="completion"),
        Seam("device", "vllm.config:DeviceConfig", "refuse what breaks a guarantee", has="device_type",
             called="device_config"),
        Seam("modes", "vllm.config", "set up a copy", has="CompilationMode get_current_vllm_config_or_none "
             "set_current_vllm_config"),
        Seam("compilation mode", "vllm.config:CompilationMode", "set up a copy", has="NONE", called="CompilationMode"),
        Seam("platform", "vllm.platforms.interface:Platform", "know the device", has="is_cpu",
             called="current_platform"),
        Seam("platforms", "vllm.platforms", "know the device", has="current_platform"),
        Seam("environment", "vllm.envs", "have vLLM read its variables again", has="disable_envs_cache", called="envs"),
        Seam("usage", "vllm.usage.usage_lib:UsageContext", "have vLLM choose sizes", has="LLM_CLASS UNKNOWN_CONTEXT",
             called="UsageContext"),
        # the worker and its group
        Seam("load", "vllm.v1.worker.worker_base:WorkerWrapperBase", "attach taps after the model is loaded",
             has="load_model? worker", called="wrapper_base"),
        Seam("worker", "vllm.v1.worker.gpu_worker:Worker", "reach the runner", called="worker",
             has="execute_model load_model model_runner sleep vllm_config"),
        Seam("step", "vllm.v1.worker.gpu_worker:Worker.execute_model", "begin a step", signature=(_STEP,)),
        Seam("sleep", "vllm.v1.worker.gpu_worker:Worker.sleep", "refuse levels that drop tables",
             signature=("self, level=1",)),
        Seam("groups", "vllm.distributed.parallel_state", "know the rank",
             has="get_pp_group get_tp_group get_world_group init_distributed_environment init_model_parallel_group "
             "initialize_model_parallel model_parallel_is_initialized",
             called="parallel_state"),
        Seam("experts", "vllm.distributed.parallel_state:_EP", "run models with experts after others"),
        Seam("group", "vllm.distributed.parallel_state:GroupCoordinator", "know the rank",
             has="device_group is_last_rank local_rank rank rank_in_group", called="world get_pp_group get_tp_group"),
        # compiled code and graphs
        Seam("compile", "vllm.compilation.backends:VllmBackend.__call__", "compile idle steps without taps",
             signature=("self, graph, example_inputs",)),
        Seam("compiler", "vllm.compilation.backends:VllmBackend", "compile idle steps without taps",
             has="compilation_config is_encoder prefix vllm_config", called="backend"),
        Seam("compiled", "vllm.compilation.caching:VllmSerializableFunction", "run idle steps without taps",
             has="optimized_call", called="active idle"),
        Seam("fusions", "vllm.compilation.passes.vllm_inductor_pass:VllmPatternMatcherPass", "count what is fused",
             has="match_table", called="VllmPatternMatcherPass"),
        Seam("recording", "vllm.compilation.monitor:set_cudagraph_capturing_enabled", "allow graphs (V2 after V1)",
             ("enabled",)),
        Seam("graphs", "vllm.compilation.cuda_graph:CUDAGraphWrapper", "find piecewise graphs",
             has="__call__ _all_instances concrete_cudagraph_entries runnable runtime_mode vllm_config",
             called="CUDAGraphWrapper wrapper"),
        Seam("graph", "vllm.compilation.cuda_graph:CUDAGraphEntry", "exchange graphs", has="cudagraph", called="entry"),
        Seam("pieces", "vllm.compilation.piecewise_backend:PiecewiseBackend", "name what a graph reads",
             has="forward? graph", called="runnable"),
        Seam("graph key", "vllm.forward_context:BatchDescriptor", "know the size of a graph", has="num_tokens",
             called="desc batch_descriptor"),
        Seam("context", "vllm.forward_context:ForwardContext", "see what a graph reads", called="context",
             has="attn_metadata batch_descriptor cudagraph_runtime_mode slot_mapping?"),
        Seam("contexts", "vllm.forward_context", "see what a graph reads",
             has="get_forward_context is_forward_context_available set_forward_context"),
        Seam("graph mode", "vllm.config:CUDAGraphMode", "choose no graph", has="NONE",
             called="mode cg_mode cudagraph_mode runtime_mode type"),
        Seam("breakable graphs", "vllm.compilation.breakable_cudagraph:is_breakable_cudagraph_enabled", "refuse them"),
        # the scheduler's output
        Seam("step", _CORE + "sched.output:SchedulerOutput", "follow requests", called="scheduler_output",
             has="finished_req_ids num_scheduled_tokens preempted_req_ids? scheduled_cached_reqs scheduled_new_reqs "
             "scheduled_spec_decode_tokens total_num_scheduled_tokens"),
        Seam("new requests", _CORE + "sched.output:NewRequestData", "follow requests", called="new",
             has="num_computed_tokens req_id sampling_params"),
        Seam("running requests", _CORE + "sched.output:CachedRequestData", "follow requests", called="running",
             has="num_computed_tokens req_ids resumed_req_ids"),
        Seam("parameters", "vllm.sampling_params:SamplingParams", "carry programs",
             has="extra_args max_tokens n stop temperature", called="params sampling_params"),
        # the engine core and its clients
        Seam("core", "vllm.v1.engine.core:EngineCore", "admit programs", called="core _core owner",
             has="model_executor scheduler vllm_config"),
        Seam("core requests", "vllm.v1.engine.core:EngineCore.preprocess_add_request", "read programs",
             signature=("self, request",)),
        Seam("request", "vllm.v1.request:Request", "admit programs and key edited blocks", called="request",
             has="arrival_time block_hashes client_index get_finished_reason is_finished mm_features "
             "num_computed_tokens num_prompt_tokens num_tokens priority request_id resumable sampling_params "
             "spec_decode_metrics? streaming_queue? take_events trace_headers update_block_hashes"),
        Seam("image", "vllm.multimodal.inputs:MultiModalFeatureSpec", "know where images are read",
             has="mm_position modality", called="feature"),
        Seam("image place", "vllm.multimodal.inputs:PlaceholderRange", "know where images are read",
             has="length offset", called="place"),
        Seam("request ended", "vllm.v1.request:RequestStatus", "end requests that are refused", has="FINISHED_ERROR",
             called="RequestStatus"),
        Seam("core scheduler", _CORE + "sched.scheduler:Scheduler", "admit programs", called="scheduler _scheduler",
             has="_free_request _pause_state add_request finish_requests get_num_unfinished_requests "
             "has_finished_requests kv_cache_manager policy requests schedule update_from_output"),
        Seam("schedule", _CORE + "sched.scheduler:Scheduler.schedule", "send programs to the workers",
             signature=("self, throttle_prefills=False",)),
        Seam("arrival", _CORE + "sched.scheduler:Scheduler.add_request", "admit programs",
             signature=("self, request",)),
        Seam("end", _CORE + "sched.scheduler:Scheduler._free_request", "free what programs hold",
             signature=("self, request, delay_free_blocks=False",)),
        Seam("unfinished", _CORE + "sched.scheduler:Scheduler.get_num_unfinished_requests", "count waiting requests",
             signature=("self",)),
        Seam("finished", _CORE + "sched.interface:SchedulerInterface.has_finished_requests", "ask for another step",
             signature=("self",)),
        Seam("update", _CORE + "sched.scheduler:Scheduler.update_from_output", "answer for programs",
             signature=(f"{_STEP}, model_runner_output",)),
        Seam("executor", "vllm.v1.executor.abstract:Executor", "ask workers what came of programs",
             has="collective_rpc", called="model_executor"),
        Seam("output", "vllm.v1.engine:EngineCoreOutput", "answer for programs", called="output",
             has="finish_reason kv_transfer_params new_logprobs new_token_ids request_id spec_decode_metrics?"),
        Seam("log-probabilities", "vllm.v1.outputs:LogprobsLists", "read log-probabilities as arrays", called="lists",
             has="logprob_token_ids logprobs"),
        Seam("detokenizers", "vllm.v1.engine.detokenizer", "decode text when it is read", has="IncrementalDetokenizer"),
        Seam("detokenizer", "vllm.v1.engine.detokenizer:IncrementalDetokenizer", "decode text when it is read",
             has="from_new_request get_next_output_text update", called="detokenizer IncrementalDetokenizer"),
        Seam("processor", "vllm.v1.engine.output_processor:OutputProcessor", "read answers and decode text",
             has="add_request propagate_error request_states tokenizer", called="processor output_processor"),
        Seam("request state", "vllm.v1.engine.output_processor:RequestState", "read answers", called="state",
             has="external_req_id queue"),
        Seam("async client", "vllm.v1.engine.core_client:AsyncMPClient", "call the cores of a server",
             has="_ensure_output_queue_task _send_input client_count client_index core_engines utility_results",
             called="cores"),
        Seam("generate", "vllm.v1.engine.async_llm:AsyncLLM.generate", "carry a server's requests",
             signature=("self, prompt, sampling_params, request_id, *, prompt_text=None, lora_request=None, "
                        "tokenization_kwargs=None, trace_headers=None, priority=0, data_parallel_rank=None, "
                        "session_id=None, kv_hints=None, reasoning_ended=None, reasoning_parser_kwargs=None",)),
        Seam("server", "vllm.v1.engine.async_llm:AsyncLLM", "carry a server's requests", called="client",
             has="dead_error engine_core errored output_processor renderer? vllm_config"),
        Seam("arguments", "vllm.engine.arg_utils:EngineArgs", "set up an engine that drafts", called="engine_args",
             has="additional_config async_scheduling? speculative_config"),
        Seam("engine arguments", "vllm.engine.arg_utils:EngineArgs.create_engine_config", "check a server's settings",
             signature=("self, usage_context=None, headless=False",)),
        Seam("outputs", "vllm.v1.engine:EngineCoreOutputs", "answer for programs", has="outputs",
             called="part outputs"),
        Seam("engines", "vllm.v1.engine", "end requests and call the core", has="EngineCoreRequestType"),
        Seam("utility", "vllm.v1.engine:EngineCoreRequestType", "call the core", has="UTILITY",
             called="EngineCoreRequestType"),
        Seam("processed", "vllm.v1.engine.output_processor:OutputProcessor.process_outputs", "read answers",
             signature=("self, engine_core_outputs, engine_core_timestamp=None, iteration_stats=None, "
                        "weight_version=None",)),
        Seam("local client", "vllm.v1.engine.core_client:InprocClient", "call the core", has="engine_core",
             called="client engine_core"),
        Seam("remote client", "vllm.v1.engine.core_client:SyncMPClient", "call the core",
             has="_send_input call_utility output_queue_thread outputs_queue utility_results", called="client"),
        Seam("block keys", _CORE + "kv_cache_utils:generate_block_hash_extra_keys", "key edited blocks",
             signature=("request, start_token_idx, end_token_idx, start_mm_idx",)),
        Seam("cache search", _CORE + "kv_cache_manager:KVCacheManager.get_computed_blocks", "compute what is captured",
             signature=("self, request", "self, request, max_cache_hit_length=None")),
        Seam("cache manager", _CORE + "kv_cache_manager:KVCacheManager", "compute what is captured",
             has="cache_blocks coordinator enable_caching free reset_prefix_cache",
             called="cache_manager kv_cache_manager"),
        Seam("cached", _CORE + "kv_cache_coordinator:KVCacheCoordinator.cache_blocks", "cache what was proved",
             signature=("self, request, num_computed_tokens",)),
        Seam("freed", _CORE + "kv_cache_manager:KVCacheManager.free", "hold blocks until they are proved",
             signature=("self, request",)),
        Seam("reset", _CORE + "kv_cache_manager:KVCacheManager.reset_prefix_cache", "free blocks that are held",
             signature=("self",)),
        *(Seam(f"cache length{of}", f"{_CORE}kv_cache_coordinator:{kind}KVCacheCoordinator.find_longest_cache_hit",
               "compute what is captured", signature=("self, block_hashes, max_cache_hit_length",))
          for of, kind in (("", ""), (" of one group", "Unitary"), (" of several groups", "Hybrid"))),
        Seam("cache coordinator", _CORE + "kv_cache_coordinator:KVCacheCoordinator", "compute what is captured",
             has="cache_blocks find_longest_cache_hit", called="coordinator"),
        # the model
        Seam("attention", "vllm.model_executor.layers.attention.attention:unified_attention_with_output",
             "read and write what heads bring together", ("output",)),
        Seam("attention layer", "vllm.model_executor.layers.attention.attention:Attention", "tap z", has="impl",
             called="layer"),
        Seam("attention backend", "vllm.v1.attention.backend:AttentionImpl.forward", "tap z", ("output",)),
        Seam("attention implementation", "vllm.v1.attention.backend:AttentionImpl", "tap z", has="forward",
             called="impl"),
        Seam("network", "vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration", "tap logits",
             has="compute_logits", called="net"),
        Seam("make a model", "vllm.model_executor.model_loader.utils:initialize_model", "see what a class is made of",
             ("vllm_config",)),
        Seam("linear layer", "vllm.model_executor.layers.linear:LinearBase", "see what a class is made of",
             has="cpu_linear? quant_method weight?", called="linear"),
        Seam("plugins", "vllm.plugins", "see what a class is made of", has="load_general_plugins"),
        Seam("backend", "vllm.config:ModelConfig.using_transformers_backend", "know whose modules a model has"),
        Seam("decorated", "vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper", "share Transformers' classes",
             ),
        Seam("decorator", "vllm.compilation.decorators:_support_torch_compile", "share Transformers' classes",
             has="do_not_compile", called="decorated"),
        # runners
        Seam("v1 runner", _V1, "carry out a step (V1)", called="runner", has=_RUNNER + "_capture_cudagraphs "
             "_dummy_run _prepare_inputs cudagraph_dispatcher input_batch input_ids model_memory_usage~ positions "
             "requests"),
        Seam("v1 inputs", _V1 + "._prepare_inputs", "plan rows (V1)", signature=(f"{_STEP}, num_scheduled_tokens",)),
        Seam("v1 step", _V1 + ".execute_model", "begin a step (V1)",
             signature=(f"{_STEP}, intermediate_tensors=None",)),
        Seam("v1 dummy step", _V1 + "._dummy_run", "measure both variants (V1)",
             signature=("self, num_tokens, cudagraph_runtime_mode=None, force_attention=False, uniform_decode=False, "
                        "allow_microbatching=True, skip_eplb=False, is_profile=False, create_mixed_batch=False, "
                        "remove_lora=True, is_graph_capturing=False, num_active_loras=0, profile_seq_lens=None, "
                        "randomize_inputs=False",)),
        Seam("v1 graph memory", _V1 + ".profile_cudagraph_memory", "count both variants (V1)", signature=("self",)),
        Seam("v1 graphs", _V1 + "._capture_cudagraphs", "record taps (V1)",
             signature=("self, batch_descriptors, cudagraph_runtime_mode, profiler=None",)),
        Seam("v1 batch", "vllm.v1.worker.gpu_input_batch:InputBatch", "plan rows (V1)", called="batch input_batch",
             has="generators num_computed_tokens_cpu req_ids"),
        Seam("v1 request", "vllm.v1.worker.gpu_input_batch:CachedRequestState", "rewind seeds", has="generator",
             called="requests"),
        Seam("v1 buffer", "vllm.v1.utils:CpuGpuBuffer", "read token ids (V1)", has="gpu", called="input_ids"),
        Seam("v1 dispatch", "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch", "choose no graph (V1)",
             signature=("self, num_tokens, uniform_decode=False, has_lora=False, num_active_loras=0, "
                        "valid_modes=None, invalid_modes=None",)),
        Seam("v1 graph list", "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.get_capture_descs",
             "count both variants (V1)", signature=("self",)),
        Seam("v1 dispatcher", "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher", "choose no graph (V1)",
             has="dispatch get_capture_descs", called="dispatcher"),
        Seam("v2 runner", _V2, "carry out a step (V2)", called="runner", has=_RUNNER + "capture_model "
             "cudagraph_manager execute_model_state input_buffers intermediate_tensors? model_memory_usage model_state "
             "prepare_inputs req_states sample_tokens"),
        Seam("v2 states", "vllm.v1.worker.gpu.states:RequestState", "know where steps begin beside drafts (V2)",
             has="num_computed_tokens req_id_to_index", called="states"),
        Seam("v2 staged", "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor", "know where steps begin beside drafts "
             "(V2)", has="gpu", called="computed"),
        Seam("v2 inputs", _V2 + ".prepare_inputs", "plan rows (V2)",
             signature=(f"{_STEP}, batch_req_state, batch_desc, num_active_loras",)),
        Seam("v2 step", _V2 + ".execute_model", "begin a step (V2)",
             signature=(f"{_STEP}, intermediate_tensors=None, dummy_run=False, skip_attn_for_dummy_run=False, "
                        "is_profile=False, context_len=0, valid_dummy_state_slots=False, randomize_inputs=False",)),
        Seam("v2 sampling", _V2 + ".sample_tokens", "end a step (V2)", signature=("self, grammar_output",)),
        Seam("v2 graphs", _V2 + ".capture_model", "record taps (V2)", signature=("self, *, profile_only=False",)),
        Seam("v2 graph memory", _V2 + ".profile_cudagraph_memory", "count both variants (V2)", signature=("self",)),
        Seam("v2 replay", "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.run_fullgraph", "watch addresses (V2)",
             signature=("self, desc",)),
        Seam("v2 batch", "vllm.v1.worker.gpu.input_batch:InputBatch", "plan rows (V2)", called="batch input_batch",
             has="input_ids num_computed_tokens_np num_reqs num_scheduled_tokens positions query_start_loc_np req_ids"),
        Seam("v2 buffers", "vllm.v1.worker.gpu.input_batch:InputBuffers", "read rows (V2)", called="input_buffers",
             has="input_ids is_padding? positions"),
        Seam("v2 stage", "vllm.sequence:IntermediateTensors", "see what a graph reads (V2)", has="tensors",
             called="intermediate_tensors"),
        Seam("v2 state", "vllm.v1.worker.gpu.model_states.interface:ModelState", "see what a graph reads (V2)",
             has="prepare_attn prepare_dummy_inputs? prepare_inputs?", called="state"),
        Seam("v2 manager", "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager", "record taps (V2)",
             called="manager _manager", has="_capture_descs capture graphs run_fullgraph vllm_config"),
        Seam("v2 graph key", "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor", "choose no graph (V2)",
             has="cg_mode num_reqs num_tokens", called="desc"),
        Seam("v2 dispatch", "vllm.v1.worker.gpu.model_runner:dispatch_cg_and_sync_dp", "choose no graph (V2)",
             signature=tuple(
                 "cudagraph_manager, num_reqs, num_tokens, uniform_token_count, dp_size, dp_rank, max_query_len=None, "
                 "need_eager=False, num_active_loras=0, parallel_config=None, allow_ubatching=False, "
                 f"uniform_decode=False, {since_033}dp_sync_state=None"
                 for since_033 in ("", "allow_skip_drafts=False, "))),
        # prompts with images
        Seam("images renderer", "vllm.renderers.base:BaseRenderer", "make prompts with images ready",
             has="default_chat_tok_params mm_processor_cache render_chat render_cmpl", called="renderer"),
        Seam("images prompt", "vllm.renderers.base:BaseRenderer.render_cmpl", "make prompts with images ready",
             ("prompts", "skip_mm_cache")),
        Seam("images chat", "vllm.renderers.base:BaseRenderer.render_chat", "make prompts with images ready",
             ("conversations", "chat_params", "tok_params", "skip_mm_cache")),
        Seam("images parameters", "vllm.renderers", "make prompts with images ready", has="ChatParams"),
        Seam("images tokens", "vllm.renderers.params:TokenizeParams", "make prompts with images ready",
             has="with_kwargs", called="default_chat_tok_params"),
        Seam("images place", "vllm.multimodal.inputs:PlaceholderRange", "know an image's tokens",
             has="extract_embeds_range", called="place"),
        Seam("images sent", "vllm.multimodal.cache:BaseMultiModalProcessorCache", "have images sent again",
             has="invalidate", called="sent"),
        # a server's routes, which its app has by their paths (`require_alike`)
        Seam("openai completions", _OPENAI + "completion.api_router:create_completion", "carry programs",
             signature=("request, raw_request",)),
        Seam("openai chats", _OPENAI + "chat_completion.api_router:create_chat_completion", "carry programs",
             signature=("request, raw_request",)),
        Seam("openai models", _OPENAI + "models.api_router:show_available_models", "list programs as models",
             signature=("raw_request",)),
        # adapters
        Seam("lora mapping", "vllm.lora.model_manager:LoRAModelManager.set_adapter_mapping", "run adapters",
             ("mapping",)),
        Seam("lora request", "vllm.lora.request", "run adapters", has="LoRARequest"),
        Seam("lora runner", "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin", "reach adapters",
             has="lora_manager", called="runner"),
        Seam("lora worker", "vllm.lora.worker_manager:WorkerLoRAManager", "reach adapters", has="_adapter_manager",
             called="lora_manager"),
        Seam("lora manager", "vllm.lora.model_manager:LoRAModelManager", "reach adapters", called="adapters",
             has="_last_slot_layout get_adapter modules"),
        Seam("lora model", "vllm.lora.lora_model:LoRAModel", "see whether an adapter fits", has="loras",
             called="get_adapter"),
        Seam("lora weights", "vllm.lora.lora_weights:LoRALayerWeights", "see whether an adapter fits",
             has="lora_a lora_b", called="weights"),
        Seam("lora layer", "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA", "run requests without adapters",
             has="base_layer lora_a_stacked lora_a_stacked_2d? lora_b_stacked tp_size?", called="module",
             ),
        Seam("lora heads", "vllm.model_executor.layers.linear:QKVParallelLinear", "see whether an adapter fits",
             has="head_size num_heads num_kv_head_replicas num_kv_heads v_head_size", called="layer"),
        Seam("lora parts", "vllm.model_executor.layers.linear", "see whether an adapter fits",
             has="ColumnParallelLinear QKVParallelLinear RowParallelLinear"),
        Seam("lora config", "vllm.config.lora:LoRAConfig", "refuse what breaks a guarantee", has="fully_sharded_loras",
             called="lora_config"),
    )
}  # fmt: skip


def version() -> str:
    import vllm

    return vllm.__version__


def require_all(part: str) -> None:
    """Raise `SeamMoved` for a missing seam of a part; "" for the seams that all engines need."""
    for seam in SEAMS.values():
        if seam.part == part:
            require(seam.name)


def require(name: str) -> tuple[Any, str]:
    """Return the owner and the last name of a seam's place. Raises `SeamMoved` if it, a required parameter, or a
    required attribute is missing."""
    seam = SEAMS[name]
    module_name, _, path = seam.place.partition(":")
    *outer, last = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for word in outer:
            owner = getattr(owner, word)
        entered = getattr(owner, last) if path else owner
        parameters = inspect.signature(entered).parameters if seam.takes or seam.signature else {}
    except (ImportError, AttributeError, ValueError) as error:
        raise _moved(seam, f"{type(error).__name__}: {error}") from None
    if seam.signature and (difference := changed_parameters(seam, written(parameters.values()))):
        raise _moved(seam, difference)
    untaken = [word for word in seam.takes if word not in parameters]
    if untaken:
        raise _moved(seam, f"it takes no parameter {', '.join(untaken)}")
    required = [word.rstrip("~") for word in seam.has.split() if not word.endswith("?")]
    absent = [word for word in required if not hasattr(entered, word)]
    if absent:
        absent = sorted(set(absent).difference(_set_attributes(entered)))
    if absent:
        raise _moved(seam, f"it has no {', '.join(absent)}")
    return owner, last


def require_alike(name: str, function: Any) -> None:
    """Raise `SeamMoved` if a function on vLLM's app, in whatever module, is missing or has other parameters."""
    seam = SEAMS[name]
    if function is None:
        raise _moved(seam, "it is not on the server's app")
    if difference := changed_parameters(seam, written(inspect.signature(function).parameters.values())):
        raise _moved(seam, difference)


def require_on(name: str, instance: object) -> None:
    """Raise `SeamMoved` if an object of a seam's class lacks a required attribute after the model is loaded."""
    seam = SEAMS[name]
    absent = [word for word in seam.has.split() if word[-1] not in "?~" and not hasattr(instance, word)]
    if absent:
        raise _moved(seam, f"{type(instance).__name__} has no {', '.join(absent)}")


def _set_attributes(entered: Any) -> Iterator[str]:
    """Yield the names of attributes that a class annotates or its methods set, or that a function sets."""
    if inspect.isfunction(function := inspect.unwrap(getattr(entered, "__func__", entered))):
        yield from _stored(function.__code__)
    for kind in entered.__mro__ if isinstance(entered, type) else ():
        yield from vars(kind).get("__annotations__", ())
        for method in vars(kind).values():
            if not isinstance(method, type):
                yield from _set_attributes(method)


def _stored(code: CodeType) -> Iterator[str]:
    """Yield the names of the attributes that a piece of code sets."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _stored(inner)


Parameters = dict[str, str]  # by name, as `written`: `timeout=None`, `*rest`, `headless (keyword only)`


def written(parameters: Iterable[inspect.Parameter]) -> Parameters:
    """Return the parameters of a function as in its `def`, without annotations."""
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    ends = {inspect.Parameter.KEYWORD_ONLY: " (keyword only)", inspect.Parameter.POSITIONAL_ONLY: " (positional only)"}
    return {
        each.name: marks.get(each.kind, "")
        + each.name
        + ("" if each.default is each.empty else f"={each.default!r}")
        + ends.get(each.kind, "")
        for each in parameters
    }


def parameters_of(arguments: ast.arguments) -> Parameters:
    """Like `written`, from a function's source."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    found = {
        each.arg: _as_written(each.arg, default) + (" (positional only)" if number < len(arguments.posonlyargs) else "")
        for number, (each, default) in enumerate(zip(plain, defaults, strict=True))
    }
    if arguments.vararg:
        found[arguments.vararg.arg] = f"*{arguments.vararg.arg}"
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found[each.arg] = _as_written(each.arg, default) + " (keyword only)"
    if arguments.kwarg:
        found[arguments.kwarg.arg] = f"**{arguments.kwarg.arg}"
    return found


def _as_written(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def changed_parameters(seam: Seam, found: Parameters) -> str:
    """Describe how a function's parameters differ from all forms that a seam declares; "" if they match one."""
    differences = []
    for form in seam.signature:
        definition = ast.parse(f"def _({form}): ...").body[0]
        assert isinstance(definition, ast.FunctionDef)
        expected = parameters_of(definition.args)
        if list(found.items()) == list(expected.items()):
            return ""
        added = [found[name] for name in found if name not in expected]
        removed = [expected[name] for name in expected if name not in found]
        changed = [f"{expected[name]} is now {found[name]}" for name in found.keys() & expected.keys()
                   if found[name] != expected[name]]  # fmt: skip
        words = [f"has a new parameter {each}" for each in added] + [f"has no parameter {each}" for each in removed]
        differences.append(
            "; ".join(words + sorted(changed)) or f"has its parameters in another order: {', '.join(found)}"
        )
    return "it " + min(differences, key=len)


def forwards(stock: Any) -> Callable[[F], F]:
    """Mark a function as the wrapper of vLLM's `stock`, as `functools.wraps` does.

    Raises `SeamMoved` if a caller of `stock` could not call the wrapper in the same way. The wrapper must name the
    first parameters of `stock`, in order and with their defaults, and either name the rest, too, or pass it on.
    """
    theirs = list(inspect.signature(stock).parameters.values())

    def check(ours: F) -> F:
        parameters = list(inspect.signature(ours).parameters.values())
        kinds = {each.kind for each in parameters}
        named = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        names = [each.name for each in theirs]
        is_method = names[:1] == ["self"]  # the wrapper may use another name for `self`
        rest = theirs[len(named) :]
        passed_on = inspect.Parameter.VAR_KEYWORD in kinds and (
            inspect.Parameter.VAR_POSITIONAL in kinds or all(each.kind is each.KEYWORD_ONLY for each in rest)
        )
        defaults = {each.name: each.default for each in theirs}
        changed = [each for each in parameters
                   if defaults.get(each.name, each.empty) not in (each.empty, each.default)]  # fmt: skip
        own = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
        if (
            named[is_method:] != names[is_method : len(named)]
            or (rest and not passed_on and not own.keys() >= {each.name for each in rest})
            or changed
            or any(each.default is each.empty and name not in names for name, each in own.items())
        ):
            raise SeamMoved(
                f"vLLM {version()}: {getattr(stock, '__qualname__', stock)} takes ({', '.join(names)}); patchclamp's "
                f"wrapper takes ({', '.join(map(str, parameters))})"
            )
        if isinstance(ours, FunctionType):  # a bound method has no attributes of its own
            functools.update_wrapper(ours, stock)
        return ours  # type: ignore[return-value]

    return check


def _moved(seam: Seam, why: str) -> SeamMoved:
    return SeamMoved(
        f"vLLM {version()} has no seam {seam.name!r} where it is expected ({seam.place}, needed to {seam.why}; "
        f"{seam.checked_on}): {why}"
    )
