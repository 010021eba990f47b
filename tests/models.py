"""Models made on the spot, with random weights: real shapes with few layers for GPU checks, tiny ones of every family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

_LINEAR = dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
               linear_conv_kernel_dim=4)  # fmt: skip
_QUARTER = dict(rope_type="default", rope_theta=10000000.0, partial_rotary_factor=0.25)
_GEMMA4 = dict(head_dim=256, global_head_dim=512, final_logit_softcapping=30.0, max_position_embeddings=131072,
               tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh", model_type="gemma4_text",
               architectures=["Gemma4ForCausalLM"])  # fmt: skip
_NEMOTRON_H = dict(mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4, chunk_size=128,
                   mlp_hidden_act="relu2", layer_norm_epsilon=1e-5, max_position_embeddings=8192, tie_word_embeddings=False,
                   model_type="nemotron_h", architectures=["NemotronHForCausalLM"])  # fmt: skip
# `of`: the checkpoint with these widths, head counts, windows and factors; `reduced`: what is smaller, besides the number
# of layers and the vocabulary
SHAPES: dict[str, dict[str, Any]] = {
    "8b": dict(of="meta-llama/Llama-3.1-8B", hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
               num_key_value_heads=8, head_dim=128,
               vocab_size=128256, rope_theta=500000.0, max_position_embeddings=8192, tie_word_embeddings=False,
               architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=32),
    "0.6b": dict(of="Qwen/Qwen3-0.6B", hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
                 num_key_value_heads=8, head_dim=128,
                 vocab_size=151936, rope_theta=1000000.0, max_position_embeddings=8192, tie_word_embeddings=True,
                 architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_hidden_layers=28),
    "135m": dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
                 vocab_size=49152, rope_theta=100000.0, max_position_embeddings=8192, tie_word_embeddings=True,
                 architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=30),
    "gemma3": dict(of="google/gemma-3-27b-pt", reduced="window of 64 instead of 1024", hidden_size=5376,
                   intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
                   head_dim=128, query_pre_attn_scalar=168, vocab_size=262208, sliding_window=64,
                   max_position_embeddings=8192, tie_word_embeddings=True, architectures=["Gemma3ForCausalLM"],
                   model_type="gemma3_text", num_hidden_layers=62,
                   layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "qwen3_moe": dict(of="Qwen/Qwen3-30B-A3B", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                      num_experts=128,
                      num_experts_per_tok=8, norm_topk_prob=True, num_attention_heads=32, num_key_value_heads=4,
                      head_dim=128, vocab_size=151936, rope_theta=1000000.0, max_position_embeddings=8192,
                      tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe",
                      num_hidden_layers=48),
    "qwen3_5": dict(of="Qwen/Qwen3.5-9B", hidden_size=4096, intermediate_size=12288, num_attention_heads=16,
                    num_key_value_heads=4, head_dim=256, **_LINEAR, rope_parameters=_QUARTER,
                    max_position_embeddings=8192, tie_word_embeddings=False, model_type="qwen3_5_text",
                    layer_types=["linear_attention", "full_attention", "linear_attention"],
                    architectures=["Qwen3_5ForCausalLM"]),
    "qwen3_5_moe": dict(of="Qwen/Qwen3.5-35B-A3B", reduced="16 of 256 experts", hidden_size=2048,
                        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=16,
                        num_experts_per_tok=8, num_attention_heads=16, num_key_value_heads=2, head_dim=256, **_LINEAR,
                        rope_parameters=_QUARTER, max_position_embeddings=8192, tie_word_embeddings=False,
                        layer_types=["linear_attention", "full_attention", "linear_attention"],
                        model_type="qwen3_5_moe_text", architectures=["Qwen3_5MoeForCausalLM"]),
    "qwen3_next": dict(of="Qwen/Qwen3-Next-80B-A3B-Instruct", reduced="16 of 512 experts", hidden_size=2048,
                       intermediate_size=5120, moe_intermediate_size=512, shared_expert_intermediate_size=512,
                       num_experts=16, num_experts_per_tok=10, norm_topk_prob=True, num_attention_heads=16,
                       num_key_value_heads=2, head_dim=256, **_LINEAR, rope_parameters=_QUARTER,
                       max_position_embeddings=8192, tie_word_embeddings=False, model_type="qwen3_next",
                       layer_types=["linear_attention", "full_attention", "linear_attention"],
                       architectures=["Qwen3NextForCausalLM"]),
    "gpt_oss": dict(of="openai/gpt-oss-20b", hidden_size=2880, intermediate_size=2880, num_attention_heads=64,
                    num_key_value_heads=8, head_dim=64, sliding_window=128, num_local_experts=32, num_experts_per_tok=4,
                    swiglu_limit=7.0, attention_bias=True, rms_norm_eps=1e-5, max_position_embeddings=131072,
                    rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0,
                                         beta_slow=1.0, truncate=False, original_max_position_embeddings=4096),
                    tie_word_embeddings=False, layer_types=["sliding_attention", "full_attention"],
                    model_type="gpt_oss", architectures=["GptOssForCausalLM"]),
    "gemma4": dict(of="google/gemma-4-31B", hidden_size=5376, intermediate_size=21504, num_attention_heads=32,
                   num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True, **_GEMMA4,
                   sliding_window=1024, hidden_size_per_layer_input=0,
                   layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    "gemma4_layered": dict(of="google/gemma-4-E4B", hidden_size=2560, intermediate_size=10240, num_attention_heads=8,
                           num_key_value_heads=2, **_GEMMA4, sliding_window=512, hidden_size_per_layer_input=256,
                           vocab_size_per_layer_input=32000, num_kv_shared_layers=2,
                           layer_types=["sliding_attention", "full_attention"] * 2),
    "gemma4_moe": dict(of="google/gemma-4-26B-A4B", hidden_size=2816, intermediate_size=2112, moe_intermediate_size=704,
                       enable_moe_block=True, num_experts=128, top_k_experts=8, num_attention_heads=16,
                       num_key_value_heads=8, num_global_key_value_heads=2, attention_k_eq_v=True, **_GEMMA4,
                       sliding_window=1024, hidden_size_per_layer_input=0,
                       layer_types=["sliding_attention", "full_attention"]),
    "llama4": dict(of="meta-llama/Llama-4-Maverick-17B-128E", reduced="8 of 128 experts", hidden_size=5120,
                   intermediate_size=8192, intermediate_size_mlp=16384, num_attention_heads=40, num_key_value_heads=8,
                   head_dim=128, num_local_experts=8, num_experts_per_tok=1, interleave_moe_layer_step=2,
                   use_qk_norm=False, attention_chunk_size=8192, floor_scale=8192, attn_scale=0.1,
                   rope_parameters=dict(rope_type="default", rope_theta=500000.0), max_position_embeddings=131072,
                   no_rope_layers=[1, 0], layer_types=["chunked_attention", "full_attention"], rms_norm_eps=1e-5,
                   tie_word_embeddings=False, model_type="llama4_text", architectures=["Llama4ForCausalLM"]),
    "deepseek_v3": dict(of="deepseek-ai/DeepSeek-V3", reduced="16 of 256 experts", hidden_size=7168,
                        intermediate_size=18432, moe_intermediate_size=2048, num_attention_heads=128,
                        num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
                        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=16, num_experts_per_tok=8, n_group=8,
                        topk_group=4, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True,
                        scoring_func="sigmoid", topk_method="noaux_tc", first_k_dense_replace=1,
                        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, beta_fast=32.0,
                                             beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
                                             original_max_position_embeddings=4096),
                        max_position_embeddings=163840, tie_word_embeddings=False, model_type="deepseek_v3",
                        architectures=["DeepseekV3ForCausalLM"]),
    "glm4_moe": dict(of="zai-org/GLM-4.5", reduced="16 of 160 experts", hidden_size=5120, intermediate_size=12288,
                     moe_intermediate_size=1536, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
                     n_routed_experts=16, num_experts_per_tok=8, n_group=1, topk_group=1, n_shared_experts=1,
                     routed_scaling_factor=2.5, norm_topk_prob=True, first_k_dense_replace=1, use_qk_norm=True,
                     attention_bias=True, rms_norm_eps=1e-5, max_position_embeddings=131072, tie_word_embeddings=False,
                     rope_parameters=dict(rope_type="default", rope_theta=1000000.0, partial_rotary_factor=0.5),
                     model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"]),
    "mistral": dict(of="mistralai/Mistral-Small-24B-Base-2501", hidden_size=5120, intermediate_size=32768,
                    num_attention_heads=32, num_key_value_heads=8, head_dim=128, sliding_window=None,
                    rope_theta=100000000.0, rms_norm_eps=1e-5, max_position_embeddings=32768,
                    tie_word_embeddings=False, model_type="mistral", architectures=["MistralForCausalLM"]),
    "phi3": dict(of="microsoft/phi-4", hidden_size=5120, intermediate_size=17920, num_attention_heads=40,
                 num_key_value_heads=10, sliding_window=None, rope_theta=250000.0, rms_norm_eps=1e-5, pad_token_id=0,
                 max_position_embeddings=16384, original_max_position_embeddings=16384, tie_word_embeddings=False,
                 model_type="phi3", architectures=["Phi3ForCausalLM"]),
    "nemotron_h": dict(of="nvidia/Nemotron-H-8B-Base-8K", hidden_size=4096, intermediate_size=21504,
                       num_attention_heads=32, num_key_value_heads=8, head_dim=128, mamba_num_heads=128, **_NEMOTRON_H,
                       layers_block_type=["mamba", "mlp", "attention"]),
    "nemotron_h_experts": dict(of="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", reduced="16 of 128 experts",
                               hidden_size=2688, intermediate_size=1856, moe_intermediate_size=1856,
                               moe_shared_expert_intermediate_size=3712, n_routed_experts=16, num_experts_per_tok=6,
                               n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.5,
                               norm_topk_prob=True, num_attention_heads=32, num_key_value_heads=2, head_dim=128,
                               mamba_num_heads=64, **_NEMOTRON_H, layers_block_type=["mamba", "moe", "attention"]),
    "falcon_h1": dict(of="tiiuae/Falcon-H1-0.5B-Base", hidden_size=1024, intermediate_size=2048, num_attention_heads=8,
                      num_key_value_heads=2, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64,
                      mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_chunk_size=128, mamba_conv_bias=True,
                      mamba_rms_norm=False, mamba_norm_before_gate=False, rope_theta=100000000000.0, rms_norm_eps=1e-5,
                      embedding_multiplier=5.656854249492381, lm_head_multiplier=0.0390625, key_multiplier=0.390625,
                      attention_in_multiplier=1.0, attention_out_multiplier=0.9375, ssm_in_multiplier=1.25,
                      ssm_out_multiplier=0.23570226039551587, mlp_multipliers=[0.8838834764831844, 0.5859375],
                      ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
                      max_position_embeddings=16384, tie_word_embeddings=False, model_type="falcon_h1",
                      architectures=["FalconH1ForCausalLM"]),
}  # fmt: skip
# `inductor_compile_config`: Inductor times the kernels it could use, so that stock vLLM compiled twice need not agree with
# itself.  Of Inductor's own variable, TORCHINDUCTOR_DETERMINISTIC, code compiled ahead of time knows nothing, and vLLM
# 0.26 has it time combined kernels all the same.
UNTIMED = {"deterministic": True, "combo_kernels": True, "benchmark_combo_kernel": False}
COMMON = dict(hidden_act="silu", rms_norm_eps=1e-6, torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2)


def shape_only(folder: Path, name: str, layers: int | None = None, **changed) -> str:
    """A folder with a config of that shape, to be loaded with `load_format="dummy"`."""
    shape = {key: value for key, value in SHAPES[name].items() if key not in ("of", "reduced")}
    config = {**COMMON, **shape, **changed} | ({} if layers is None else {"num_hidden_layers": layers})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def with_weights(folder: Path, name: str, layers: int, seed: int = 0, **changed) -> str:
    """The same with random weights that a few layers keep alive, so that edits and sites mean something."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = shape_only(folder, name, layers, **{"vocab_size": 32000, **changed})
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    for place, weights in net.named_parameters():
        # convolutions, rates of decay and biases start from numbers that keep a state alive
        if "conv1d" in place or (weights.dim() == 1 and not place.endswith("weight")):
            weights.data += 0.1 * torch.randn_like(weights)
        elif weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.03)
        else:
            torch.nn.init.normal_(weights, mean=1.0, std=0.1)
    randomise_buffers(net)
    net.save_pretrained(folder)
    return path


def with_words(path: str, size: int) -> None:
    """Puts a tokenizer beside a model: words w3, w4, … with spaces between them, each the token of its number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, size))]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    ).save_pretrained(path)


# -- tiny models of every family, for the CPU

_PLAIN = dict(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=512, max_position_embeddings=512,
              bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
_GROUPED = dict(**_PLAIN, intermediate_size=256, num_key_value_heads=2, head_dim=32)
_EXPERTS = dict(**_GROUPED, num_experts_per_tok=2, moe_intermediate_size=64)
# vLLM's latent attention is made for these sizes
_LATENT = dict(_EXPERTS, num_key_value_heads=4, head_dim=64, kv_lora_rank=512, qk_nope_head_dim=128,
               qk_rope_head_dim=64, v_head_dim=128, n_group=1, topk_group=1, n_routed_experts=4, n_shared_experts=1,
               first_k_dense_replace=1)  # fmt: skip
# by family: the Transformers model type, and its config; windows are shorter than the tests' prompts
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", _GROUPED),
    "mistral": ("mistral", dict(_GROUPED, sliding_window=8)),
    "qwen2": ("qwen2", _GROUPED),
    "qwen3": ("qwen3", _GROUPED),
    "gemma2": ("gemma2", dict(_GROUPED, query_pre_attn_scalar=32, sliding_window=8)),
    "gemma3": ("gemma3_text", dict(_GROUPED, query_pre_attn_scalar=32, sliding_window=8)),
    "gpt2": ("gpt2", _PLAIN),
    "gpt_neox": ("gpt_neox", dict(_PLAIN, intermediate_size=256)),
    "opt": ("opt", dict(_PLAIN, ffn_dim=256, word_embed_proj_dim=128)),
    "phi3": ("phi3", _GROUPED),
    "olmo2": ("olmo2", _GROUPED),
    "granite": ("granite", dict(_GROUPED, residual_multiplier=0.22, embedding_multiplier=12.0, logits_scaling=4.0,
                                attention_multiplier=0.2)),
    "mixtral": ("mixtral", dict(_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen3_moe": ("qwen3_moe", dict(_EXPERTS, num_experts=4, mlp_only_layers=[1])),
    "gpt_oss": ("gpt_oss", dict(_GROUPED, head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)),
    "deepseek_v2": ("deepseek_v2", dict(_LATENT, q_lora_rank=None, topk_method="greedy")),
    # `scoring_func` as the real checkpoints say: Transformers knows no other, and vLLM's default is softmax
    "deepseek_v3": ("deepseek_v3", dict(_LATENT, q_lora_rank=64, topk_method="noaux_tc", scoring_func="sigmoid")),
}  # fmt: skip
_NO_HEAD_DIM = {name: value for name, value in _GROUPED.items() if name != "head_dim"}
_TWO = dict(_GROUPED, num_hidden_layers=2)
_STATE = dict(hidden_size=128, vocab_size=512, bos_token_id=1, eos_token_id=2, pad_token_id=0)
_LAYERED = dict(_GROUPED, vocab_size_per_layer_input=512, hidden_size_per_layer_input=0, global_head_dim=64,
                sliding_window=8, layer_types=["sliding_attention", "full_attention", "full_attention"])  # fmt: skip
# those that were tabled later: make families proves all, make test a few
MORE: dict[str, tuple[str, dict]] = {
    "glm4": ("glm4", _TWO),
    "ernie4_5": ("ernie4_5", _TWO),
    "nemotron": ("nemotron", _TWO),
    "exaone4": ("exaone4", dict(_TWO, sliding_window=8, layer_types=["sliding_attention", "full_attention"])),
    "stablelm": ("stablelm", dict(_TWO, qk_layernorm=False)),
    "cohere2": ("cohere2", dict(_TWO, sliding_window=64, layer_types=["sliding_attention", "full_attention"])),
    "cohere": ("cohere", _TWO),
    "glm4_moe_plain": ("glm4_moe", dict(_EXPERTS, num_hidden_layers=2, n_routed_experts=4, n_shared_experts=1,
                                        first_k_dense_replace=1)),
    "gptj": ("gptj", dict(_PLAIN, num_hidden_layers=2, rotary_dim=16)),
    "bloom": ("bloom", dict(_PLAIN, num_hidden_layers=2)),
    "falcon": ("falcon", dict(_PLAIN, num_hidden_layers=2, multi_query=True, parallel_attn=True, bias=False)),
    "falcon_new": ("falcon", dict(_PLAIN, num_hidden_layers=2, new_decoder_architecture=True, num_kv_heads=2, bias=False)),
    "smollm3": ("smollm3", dict(_TWO, no_rope_layers=[1, 0])),
    "seed_oss": ("seed_oss", _TWO),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _TWO),
    "starcoder2": ("starcoder2", dict(_TWO, sliding_window=None)),
    "olmo3": ("olmo3", dict(_TWO, sliding_window=8, layer_types=["sliding_attention", "full_attention"])),
    "glm4_moe": ("glm4_moe", dict(_EXPERTS, n_routed_experts=4, n_shared_experts=1,
                                  first_k_dense_replace=1, use_qk_norm=True)),
    "ernie4_5_moe": ("ernie4_5_moe", dict(_TWO, moe_num_experts=4, moe_k=2, moe_intermediate_size=64,
                                          moe_layer_start_index=1)),
    "qwen2_moe": ("qwen2_moe", dict(_EXPERTS, num_hidden_layers=2, num_experts=4, shared_expert_intermediate_size=64,
                                    mlp_only_layers=[0])),
    "olmoe": ("olmoe", dict(_TWO, num_experts=4, num_experts_per_tok=2)),
    "granite_hybrid": ("granitemoehybrid", dict(
        _NO_HEAD_DIM, layer_types=["mamba", "attention", "mamba"], num_local_experts=0, shared_intermediate_size=256,
        mamba_n_heads=8, mamba_d_state=16, mamba_d_head=32, residual_multiplier=0.22, embedding_multiplier=12.0,
        logits_scaling=4.0, attention_multiplier=0.2)),
    "nemotron_h": ("nemotron_h", dict(
        {name: value for name, value in _GROUPED.items() if name != "num_hidden_layers"},
        layers_block_type=["mamba", "attention", "mlp"], mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16,
        n_groups=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64)),
    "gemma4": ("gemma4_text", dict(_LAYERED, hidden_size_per_layer_input=16)),
    "gemma4_wide": ("gemma4_text", dict(_LAYERED, num_kv_shared_layers=1, use_double_wide_mlp=True)),
    "gemma4_moe": ("gemma4_text", dict(_LAYERED, enable_moe_block=True, num_experts=4, top_k_experts=2,
                                       moe_intermediate_size=64)),
    "falcon_h1": ("falcon_h1", dict(
        _GROUPED, mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, mamba_chunk_size=32,
        embedding_multiplier=2.0, lm_head_multiplier=0.5, key_multiplier=0.5, attention_in_multiplier=1.5,
        attention_out_multiplier=0.8, ssm_in_multiplier=0.7, ssm_out_multiplier=0.6, mlp_multipliers=[0.9, 1.2],
        ssm_multipliers=[0.5, 0.8, 1.2, 0.9, 1.1])),
    "jamba": ("jamba", dict(
        _NO_HEAD_DIM, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=3,
        expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, use_mamba_kernels=False, mamba_d_state=16,
        mamba_dt_rank=8)),
    "mamba2": ("mamba2", dict(_STATE, num_hidden_layers=2, num_heads=8, head_dim=32, state_size=16, n_groups=1)),
    "qwen3_next": ("qwen3_next", dict(
        _EXPERTS, num_experts=4, shared_expert_intermediate_size=64, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_num_key_heads=2, linear_num_value_heads=4, mlp_only_layers=[2],
        layer_types=["linear_attention", "full_attention", "linear_attention"])),
    "qwen3_5": ("qwen3_5_text", dict(
        _GROUPED, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"])),
    "qwen3_5_moe": ("qwen3_5_moe_text", dict(
        _EXPERTS, num_experts=4, shared_expert_intermediate_size=64, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"])),
    "granite_hybrid_experts": ("granitemoehybrid", dict(
        _NO_HEAD_DIM, layer_types=["mamba", "attention", "mamba"], num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=64, mamba_n_heads=8, mamba_d_state=16, mamba_d_head=32, residual_multiplier=0.22,
        embedding_multiplier=12.0, logits_scaling=4.0, attention_multiplier=0.2)),
    "nemotron_h_experts": ("nemotron_h", dict(
        {name: value for name, value in _GROUPED.items() if name != "num_hidden_layers"},
        layers_block_type=["mamba", "attention", "mlp", "moe"], mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16,
        n_groups=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64)),
    "minimax_m2": ("minimax_m2", dict(_TWO, num_local_experts=4, num_experts_per_tok=2, rotary_dim=32,
                                      scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True)),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", dict(_TWO, num_experts=4, moe_topk=2, num_shared_expert=1)),
    "llama4": ("llama4_text", dict(_TWO, intermediate_size_mlp=256, num_local_experts=4, num_experts_per_tok=1,
                                   interleave_moe_layer_step=2)),
}  # fmt: skip
_BOTH = dict(vocab_size=512, d_model=128, max_position_embeddings=512, encoder_layers=3, decoder_layers=3,
             encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256,
             pad_token_id=0, eos_token_id=2, bos_token_id=1)  # fmt: skip
# of architectures without a site table; vLLM runs the first three through its Transformers backend
UNTABLED: dict[str, tuple[str, dict]] = {
    "phi": ("phi", dict(_PLAIN, intermediate_size=256)),
    "flex_olmo": ("flex_olmo", dict(_GROUPED, num_experts=4, num_experts_per_tok=2)),
    "bitnet": ("bitnet", _GROUPED),
    "diffllama": ("diffllama", _GROUPED),
    "bart": ("bart", _BOTH),
    "pegasus": ("pegasus", _BOTH),
}
# models that also read images, by family of their decoder's class: the classes' stem, and the configs of both parts
_SEEN = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, image_size=28,
             patch_size=14)  # fmt: skip
_QWEN_SEEN = dict(depth=1, num_heads=2, patch_size=14)
_QWEN3_SEEN = dict(_QWEN_SEEN, hidden_size=32, out_hidden_size=128, intermediate_size=64, patch_size=16,
                   num_position_embeddings=16)  # fmt: skip
_GEMMA4_SEEN = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
                    num_hidden_layers=1)  # fmt: skip


def _turned(*sections: int, **more) -> dict:
    """Positions of three kinds, which are one kind in text."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}}


_QUARTER_TURNED = _turned(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25)
MULTIMODAL: dict[str, tuple[str, dict, dict]] = {
    "gemma3": ("Gemma3", dict(_GROUPED, query_pre_attn_scalar=32, sliding_window=8), _SEEN),
    "llama4": ("Llama4", MORE["llama4"][1],
               dict(_SEEN, intermediate_size=128, projector_input_dim=64, projector_output_dim=64, vision_output_dim=64)),
    "mistral3": ("Mistral3", dict(_GROUPED, model_type="mistral", sliding_window=None),
                 dict(_SEEN, model_type="pixtral", head_dim=16)),
    "qwen2_vl": ("Qwen2VL", dict(_GROUPED, **_turned(4, 6, 6)),
                 dict(_QWEN_SEEN, embed_dim=32, hidden_size=128, mlp_ratio=2)),
    "qwen2_5_vl": ("Qwen2_5_VL", dict(_GROUPED, **_turned(4, 6, 6)),
                   dict(_QWEN_SEEN, hidden_size=32, out_hidden_size=128, intermediate_size=64)),
    "qwen3_vl": ("Qwen3VL", dict(_GROUPED, **_turned(6, 5, 5, mrope_interleaved=True)),
                 dict(_QWEN3_SEEN, deepstack_visual_indexes=[0])),
    "qwen3_vl_moe": ("Qwen3VLMoe", dict(_EXPERTS, num_experts=4, mlp_only_layers=[1], norm_topk_prob=True,
                                        **_turned(6, 5, 5, mrope_interleaved=True)) | {"moe_intermediate_size": 32},
                     dict(_QWEN3_SEEN, deepstack_visual_indexes=[0])),
    "qwen3_5": ("Qwen3_5", dict(MORE["qwen3_5"][1], **_QUARTER_TURNED), _QWEN3_SEEN),
    "qwen3_5_moe": ("Qwen3_5Moe", dict(MORE["qwen3_5_moe"][1], **_QUARTER_TURNED), _QWEN3_SEEN),
    "gemma4": ("Gemma4", MORE["gemma4"][1], _GEMMA4_SEEN),
    "gemma4_moe": ("Gemma4", MORE["gemma4_moe"][1], _GEMMA4_SEEN),
    "gemma4_unified": ("Gemma4Unified", _LAYERED,
                       dict(patch_size=14, mm_embed_dim=32, mm_posemb_size=16, output_proj_dims=128)),
}  # fmt: skip
_IMAGE_TOKENS = {"image_token_index": 509, "boi_token_index": 507, "eoi_token_index": 508, "mm_tokens_per_image": 4}
_GEMMA4_TOKENS = {"image_token_id": 509, "boi_token_id": 507, "eoi_token_id": 508, "video_token_id": 506,
                  "boa_token_id": 505, "eoa_token_index": 504, "audio_token_id": 503}  # fmt: skip
_QWEN_TOKENS = {"image_token_id": 509, "video_token_id": 508, "vision_start_token_id": 507, "vision_end_token_id": 506}


def that_reads_images(folder: Path, name: str, seed: int = 0):
    """A tiny model with a decoder and a tower for images, fp32, its weights random; saved in a folder, and returned."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    stem, text, seen = MULTIMODAL[name]
    families = {"qwen": _QWEN_TOKENS, "gemma3": _IMAGE_TOKENS, "gemma4": _GEMMA4_TOKENS}
    tokens = next((ids for word, ids in families.items() if name.startswith(word)), {"image_token_index": 509})
    config = getattr(transformers, f"{stem}Config")(text_config=text, vision_config=seen, **tokens)
    torch.manual_seed(seed)
    net = getattr(transformers, f"{stem}ForConditionalGeneration")(config)
    randomise(net)
    net.save_pretrained(folder)
    if name in ("gemma3", "qwen3_vl_moe"):  # as in the checkpoints on the hub, which vLLM reads
        path = folder / "model.safetensors"
        weights = {
            key.replace("vision_tower.", "vision_tower.vision_model."): w.mT.contiguous() if ".experts." in key else w
            for key, w in load_file(path).items()
        }
        save_file(weights, path, {"format": "pt"})
    return net


def with_gemma_processor(folder: Path) -> None:
    """Puts a tokenizer and a processor of images beside a Gemma 3 of 512 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Gemma3Processor, PreTrainedTokenizerFast

    images = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    lines = ["\n" * count for count in range(1, 5)]
    names = ["<pad>", "<s>", "</s>", *lines, *(f"w{i}" for i in range(7, 507)), *images.values(), "w510", "<unk>"]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens=images, **special)
    Gemma3Processor(gemma_pictures(), tokenizer, image_seq_length=4).save_pretrained(folder)


def gemma_pictures():
    """What makes numbers of images for it."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, image_seq_length=4)


def with_qwen_processor(folder: Path, name: str):
    """Puts a tokenizer and the sizes of images beside a Qwen-VL of 512 tokens. Returns its processor, which cannot be
    read from a folder here: it has one of films in it, and that needs torchvision."""
    from types import SimpleNamespace

    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.processing_utils import ProcessorMixin, VideosKwargs

    marks = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
             "vision_eos_token": "<|vision_end|>"}  # fmt: skip
    names = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 506)), *reversed(marks.values()), "w510", "<unk>"]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens=marks, **special)
    tokenizer.chat_template = CHAT_WITH_IMAGES
    tokenizer.save_pretrained(folder)
    sizes = {"patch_size": MULTIMODAL[name][2]["patch_size"], "merge_size": 2, "temporal_patch_size": 2,
             "size": {"shortest_edge": 28 * 28, "longest_edge": 256 * 256}}  # fmt: skip
    pictures = Qwen2VLImageProcessorPil(**sizes)
    pictures.save_pretrained(folder)
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class", return_value=None):
        films = SimpleNamespace(valid_kwargs=VideosKwargs, **sizes)
        return getattr(transformers, f"{MULTIMODAL[name][0]}Processor")(pictures, tokenizer, films)


CHAT_WITH_IMAGES = (
    "{% for m in messages %}w400 {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|> <|image_pad|> <|vision_end|>{% endif %} "
    "{% endfor %}{% endif %} w401 {% endfor %}{% if add_generation_prompt %}w402{% endif %}"
)


@contextmanager
def no_table(*architectures: str) -> Iterator[None]:
    """A context in which these model classes have no site table."""
    from patchclamp.sites import tables

    left = [
        msgspec.structs.replace(family, architectures=tuple(n for n in family.architectures if n not in architectures))
        for family in tables.FAMILIES
    ]
    with mock.patch.object(tables, "FAMILIES", tuple(left)):
        yield


def of_family(folder: Path, name: str, seed: int = 0, **changed) -> str:
    """A folder with a tiny model of a family, fp32, its weights random: matrices all alike, the rest (norms, biases)
    near what they start from."""
    kind, config = (FAMILIES | MORE | UNTABLED)[name]
    return of_config(folder, kind, {**config, **changed}, seed)


def of_config(folder: Path, kind: str, config: dict, seed: int = 0) -> str:
    """The same for a Transformers model type and its config."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    net = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**config), dtype=torch.float32)
    randomise(net)
    net.save_pretrained(folder)
    return str(folder)


def randomise(net) -> None:
    """Gives a model random weights: matrices all alike, the rest near what they were."""
    import torch

    with torch.no_grad():
        for weights in net.parameters():
            if weights.dim() > 1:
                weights.normal_(std=0.1)
            else:
                weights.add_(torch.randn_like(weights), alpha=0.1)
        for place, bias in net.named_parameters():
            if place.endswith("moe_statics.e_score_correction_bias"):
                bias.zero_()  # vLLM's router for CPUs leaves it out where scores are a softmax
    randomise_buffers(net)


def randomise_buffers(net) -> None:
    """Gives a router's biases random numbers, and the factor at a layer's end one that is not 1."""
    for place, buffer in net.named_buffers():
        if place.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
        elif place.endswith("layer_scalar"):
            buffer.fill_(0.8)
