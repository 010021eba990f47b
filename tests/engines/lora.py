"""Random LoRA adapters in PEFT's file format, and models with one merged into their weights, without PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter(
    model: str, folder: Path, seed: int, targets: tuple[str, ...] = LINEAR, rank: int = 4, **changed: Any
) -> str:
    """A folder with a random adapter for some modules of a model, by the last word of their path."""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in AutoModelForCausalLM.from_pretrained(model).named_modules():
        if name.rpartition(".")[2] in targets:
            rows, columns = module.weight.shape
            a, b = (torch.randn(shape, generator=draw) for shape in ((rank, columns), (rows, rank)))
            if isinstance(module, torch.nn.Embedding):
                a, b = torch.randn(rank, rows, generator=draw), torch.randn(columns, rank, generator=draw)
            kind = ("lora_embedding_A", "lora_embedding_B") if isinstance(module, torch.nn.Embedding) else (
                "lora_A.weight", "lora_B.weight")  # fmt: skip
            tensors |= {f"base_model.model.{name}.{each}": 0.1 * t for each, t in zip(kind, (a, b), strict=True)}
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none",
              "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "fan_in_fan_out": False, "modules_to_save": None}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config | changed))
    return str(folder)


def merged(model: str, adapter: str, folder: Path) -> str:
    """A model's folder with W + (alpha / r) · B · A in place of each W that an adapter has matrices for."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    tensors, modules = load_file(Path(adapter) / "adapter_model.safetensors"), dict(net.named_modules())
    scale, changed = config["lora_alpha"] / config["r"], 0
    for name, a in tensors.items():
        if "lora_A" in name or "lora_embedding_A" in name:
            b = tensors[name.replace("_A", "_B")]
            module = modules[name.removeprefix("base_model.model.").partition(".lora_")[0]]
            module.weight.data += scale * (b @ a if "lora_A" in name else (b @ a).T)
            changed += 1
    assert 2 * changed == len(tensors)
    net.save_pretrained(folder)
    return str(folder)
