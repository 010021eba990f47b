"""Models for GPU checks, made on the spot: a real model's shape with few layers and random weights."""

from __future__ import annotations

import json
from pathlib import Path

SHAPES = {
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
               vocab_size=128256, rope_theta=500000.0, max_position_embeddings=8192, tie_word_embeddings=False,
               architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=32),
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                 vocab_size=151936, rope_theta=1000000.0, max_position_embeddings=8192, tie_word_embeddings=True,
                 architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_hidden_layers=28),
    "135m": dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
                 vocab_size=49152, rope_theta=100000.0, max_position_embeddings=8192, tie_word_embeddings=True,
                 architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=30),
}  # fmt: skip
# `inductor_compile_config`: Inductor times the kernels it could use, so that stock vLLM compiled twice need not agree with
# itself.  Of Inductor's own variable, TORCHINDUCTOR_DETERMINISTIC, code compiled ahead of time knows nothing, and vLLM
# 0.26 has it time combined kernels all the same.
UNTIMED = {"deterministic": True, "combo_kernels": True, "benchmark_combo_kernel": False}
COMMON = dict(hidden_act="silu", rms_norm_eps=1e-6, torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2)


def shape_only(folder: Path, name: str, layers: int | None = None, **changed) -> str:
    """A folder with a config of that shape, to be loaded with `load_format="dummy"`."""
    config = {**COMMON, **SHAPES[name], **changed} | ({} if layers is None else {"num_hidden_layers": layers})
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
    for weights in net.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.03)
        else:
            torch.nn.init.normal_(weights, mean=1.0, std=0.1)
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
