"""Tiny models that draft for others: of each method of speculative decoding that vLLM has a model for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models import of_family

Weights = dict[str, Any]
COUNT = 3  # tokens that are drafted at once


def drafting(method: str, folder: Path, vocab_size: int) -> tuple[str, dict[str, Any]]:
    """A folder with a model, and the `speculative_config` of one that drafts for it: the model itself
    ("draft_model"), or one whose weights are random as far as they are not the model's own."""
    family = "glm4_moe" if method == "mtp" else "llama"
    for name in ("model", "drafter"):
        (folder / name).mkdir(exist_ok=True)
    model = of_family(folder / "model", family, vocab_size=vocab_size)
    if method == "ngram":
        return model, {"method": method, "num_speculative_tokens": COUNT, "prompt_lookup_max": 3}
    if method == "draft_model":
        return model, {"method": method, "model": model, "num_speculative_tokens": COUNT}
    if method == "mtp":
        return _changed(model, model, _with_mtp), {"method": method, "num_speculative_tokens": 2}
    made = _changed(model, str(folder / "drafter"), {"eagle": _eagle, "eagle3": _eagle3}[method])
    return model, {"method": method, "model": made, "num_speculative_tokens": COUNT}


def eagle_of(model: str, folder: Path, words: int) -> str:
    """A folder with an EAGLE drafter for a Llama of any size, which is changed so that it says its first `words` words
    alone: some drafts are right then."""

    def of_few_words(config: dict[str, Any], weights: Weights) -> Weights:
        config["tie_word_embeddings"] = False
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).clone()
        head[words:] = 0
        return weights | {"lm_head.weight": head}

    return _changed(_changed(model, model, of_few_words), str(folder), _eagle)


def _changed(model: str, to: str, change: Callable[[dict[str, Any], Weights], Weights]) -> str:
    """Writes what `change(config, weights)` makes of a model; it may change the config."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config, weights = (
        json.loads((Path(model) / "config.json").read_text()),
        load_file(Path(model) / "model.safetensors"),
    )
    made = {name: tensor.contiguous().clone() for name, tensor in change(config, weights).items()}
    save_file(made, Path(to) / "model.safetensors", metadata={"format": "pt"})
    (Path(to) / "config.json").write_text(json.dumps(config))
    return to


def _random(*shape: int) -> Any:
    import torch

    return 0.1 * torch.randn(shape)


def _layer(weights: Weights, index: int, name: str) -> Weights:
    """The weights of one of the model's layers, under another name."""
    path = f"model.layers.{index}."
    return {name + key.removeprefix(path): tensor for key, tensor in weights.items() if key.startswith(path)}


def _eagle(config: dict[str, Any], weights: Weights) -> Weights:
    """Li et al. 2024, EAGLE: a layer that reads the model's last stream beside the token, whose embedding is the model's."""
    config |= {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    layer = {key: tensor for key, tensor in _layer(weights, 0, "layers.0.").items() if "input_layernorm" not in key}
    return layer | {"fc.weight": _random(config["hidden_size"], 2 * config["hidden_size"])}


def _eagle3(config: dict[str, Any], weights: Weights) -> Weights:
    """Li et al. 2025, EAGLE-3: reads the stream of three of the model's layers."""
    import torch

    width, aux = config["hidden_size"], {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "eagle_config": aux}
    layer = _layer(weights, 0, "midlayer.")
    for key, tensor in layer.items():
        if key.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):  # of the token's embedding and of the stream
            layer[key] = torch.cat([tensor, _random(*tensor.shape)], 1)
    norms = {name: torch.ones(width) for name in ("midlayer.hidden_norm.weight", "norm.weight")}
    return layer | norms | {"fc.weight": _random(width, 3 * width), "lm_head.weight": weights["lm_head.weight"]}


def _with_mtp(config: dict[str, Any], weights: Weights) -> Weights:
    """One more layer in the model's own checkpoint, which predicts the token after the next (DeepSeek-V3, 2.2)."""
    import torch

    width, count = config["hidden_size"], config["num_hidden_layers"]
    config |= {"num_nextn_predict_layers": 1}
    layer = _layer(weights, count - 1, f"model.layers.{count}.")
    norms = {
        f"model.layers.{count}.{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    return weights | layer | norms | {f"model.layers.{count}.eh_proj.weight": _random(width, 2 * width)}
