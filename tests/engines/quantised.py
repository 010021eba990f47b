"""Checkpoints with quantised weights, made of a model without any packing library; and the same model with those weights
as they are multiplied, for Transformers.

AWQ and GPTQ keep four bits a weight, a scale for each group of inputs, and zeros; compressed-tensors here keeps eight
bits, a scale for each output, and quantises what goes in while the model runs. NVFP4 keeps floats of four bits, and a
scale in fp8 for each 16 inputs.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

GROUP = 32  # inputs with one scale
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_GROUPS = {"group_0": {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
}}  # fmt: skip
_FLOATS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
           "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GLOBAL = 1024.0  # NVFP4's scales are divided by it. vLLM merges layers, which is exact where they have one in common
CONFIGS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": _GROUPS,
                           "quantization_status": "compressed", "ignore": ["lm_head"]},
    "nvfp4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": _FLOATS}},
              "quantization_status": "compressed"},
}  # fmt: skip


def quantised(model: str, kind: str, packed: Path, plain: Path) -> None:
    """Writes two folders: the quantised checkpoint, and a model of the weights that it stands for."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    modules = {
        name: module
        for name, module in net.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    for name, module in modules.items():
        parts, module.weight.data = PACKERS[kind](module.weight.data)
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    for name, weights in net.named_parameters():
        if name.rpartition(".")[0] not in modules:
            weights.data = weights.data.half().float()
    left = {name: w.half() for name, w in net.state_dict().items() if name.rpartition(".")[0] not in modules}
    packed.mkdir(parents=True)
    save_file(tensors | left, packed / "model.safetensors", {"format": "pt"})
    config = {**json.loads(net.config.to_json_string()), "quantization_config": CONFIGS[kind]}
    (packed / "config.json").write_text(json.dumps(config))
    net.save_pretrained(plain)


Packed = tuple[dict[str, torch.Tensor], torch.Tensor]


def _awq(weight: torch.Tensor) -> Packed:
    """Eight outputs a word; each group of inputs has its own zero."""
    w_KgN = weight.T.reshape(-1, GROUP, len(weight))
    low, high = w_KgN.amin(1, keepdim=True), w_KgN.amax(1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    q = (w_KgN / scale + zero).round().clamp(0, 15)
    parts = {"qweight": _words(q.reshape(weight.T.shape), AWQ_ORDER), "qzeros": _words(zero[:, 0], AWQ_ORDER),
             "scales": scale[:, 0].half()}  # fmt: skip
    return parts, ((q - zero) * scale).reshape(weight.T.shape).T.contiguous()


def _gptq(weight: torch.Tensor) -> Packed:
    """Eight inputs a word; every zero is 8, of which the format keeps one less."""
    w_KgN = weight.T.reshape(-1, GROUP, len(weight))
    scale = (w_KgN.abs().amax(1, keepdim=True) / 7).half().float()
    q = (w_KgN / scale).round().clamp(-8, 7)
    inputs = torch.arange(weight.shape[1], dtype=torch.int32)
    parts = {"qweight": _words((q + 8).reshape(weight.T.shape).T).T, "qzeros": _words(torch.full(scale[:, 0].shape, 7)),
             "scales": scale[:, 0].half(), "g_idx": inputs // GROUP}  # fmt: skip
    return parts, (q * scale).reshape(weight.T.shape).T.contiguous()


def _channels(weight: torch.Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    q = (weight / scale).round()
    return {"weight": q.to(torch.int8), "weight_scale": scale}, q * scale


def nvfp4(weight: torch.Tensor) -> Packed:
    """Two inputs a byte, the first in its lower half: the sign, and the index of the nearest number of `E2M1`."""
    w_NGg = weight.reshape(len(weight), -1, 16)
    scale = (w_NGg.abs().amax(2) / E2M1[-1] * GLOBAL).to(torch.float8_e4m3fn)
    step = scale.float()[..., None] / GLOBAL
    numbers = torch.tensor(E2M1)
    index = torch.bucketize(w_NGg.abs() / step, (numbers[1:] + numbers[:-1]) / 2)
    q = numbers[index].copysign(w_NGg)
    pairs = (index + 8 * q.signbit()).to(torch.uint8).reshape(len(weight), -1, 2)
    parts = {"weight_packed": pairs[..., 0] + 16 * pairs[..., 1], "weight_scale": scale,
             "weight_global_scale": torch.tensor([GLOBAL])}  # fmt: skip
    return parts, (q * step).reshape(weight.shape)


PACKERS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _channels, "nvfp4": nvfp4}


def _words(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Numbers below 16, [..., 8 n], as words of 32 bits, [..., n]."""
    eights = numbers.long().reshape(*numbers.shape[:-1], -1, 8)[..., list(order)]
    word = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()
