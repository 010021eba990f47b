"""TransformerLens' weights of five families, spelled out from the tensors of their checkpoints."""

from __future__ import annotations

import torch

H, KV, E, D = 4, 2, 32, 128  # of the models in `tests.models`
Tensors = dict[str, torch.Tensor]


def from_checkpoint(family: str, t: Tensors, layer: int) -> Tensors:
    """The weights of a layer, and those that the model has once, by TransformerLens' name."""
    t = {name.removeprefix("transformer."): tensor.float() for name, tensor in t.items()}
    return {"llama": _llama, "gemma2": _gemma2, "gpt2": _gpt2, "gpt_neox": _neox, "falcon_new": _falcon}[family](
        t, layer
    )


def _by_head(weight_OI: torch.Tensor) -> torch.Tensor:
    return weight_OI.reshape(-1, E, D).transpose(1, 2)


def _llama(t: Tensors, layer: int) -> Tensors:
    of = f"model.layers.{layer}."
    return {
        "W_E": t["model.embed_tokens.weight"], "W_U": t["lm_head.weight"].T, "ln_final.w": t["model.norm.weight"],
        **{f"W_{word.upper()}": _by_head(t[f"{of}self_attn.{word}_proj.weight"]) for word in "qkv"},
        "W_O": t[of + "self_attn.o_proj.weight"].T.reshape(H, E, D),
        "W_gate": t[of + "mlp.gate_proj.weight"].T, "W_in": t[of + "mlp.up_proj.weight"].T,
        "W_out": t[of + "mlp.down_proj.weight"].T,
        "ln1.w": t[of + "input_layernorm.weight"], "ln2.w": t[of + "post_attention_layernorm.weight"],
    }  # fmt: skip


def _gemma2(t: Tensors, layer: int) -> Tensors:
    of = f"model.layers.{layer}."
    tied = {"lm_head.weight": t["model.embed_tokens.weight"]}
    return _llama(tied | t, layer) | {
        "ln1_post.w": t[of + "post_attention_layernorm.weight"], "ln2.w": t[of + "pre_feedforward_layernorm.weight"],
        "ln2_post.w": t[of + "post_feedforward_layernorm.weight"],
    }  # fmt: skip


def _gpt2(t: Tensors, layer: int) -> Tensors:
    of = f"h.{layer}."
    matrices, biases = t[of + "attn.c_attn.weight"].split(D, 1), t[of + "attn.c_attn.bias"].split(D)
    return {
        "W_E": t["wte.weight"], "W_U": t["wte.weight"].T, "W_pos": t["wpe.weight"],
        "ln_final.w": t["ln_f.weight"], "ln_final.b": t["ln_f.bias"],
        **{f"W_{word}": matrix.reshape(D, H, E).transpose(0, 1) for word, matrix in zip("QKV", matrices, strict=True)},
        **{f"b_{word}": bias.reshape(H, E) for word, bias in zip("QKV", biases, strict=True)},
        "W_O": t[of + "attn.c_proj.weight"].reshape(H, E, D), "b_O": t[of + "attn.c_proj.bias"],
        "W_in": t[of + "mlp.c_fc.weight"], "b_in": t[of + "mlp.c_fc.bias"],
        "W_out": t[of + "mlp.c_proj.weight"], "b_out": t[of + "mlp.c_proj.bias"],
        **{f"ln{n}.{end}": t[f"{of}ln_{n}.{name}"] for n in (1, 2) for end, name in (("w", "weight"), ("b", "bias"))},
    }  # fmt: skip


def _neox(t: Tensors, layer: int) -> Tensors:
    of = f"gpt_neox.layers.{layer}."
    packed_H3ED = t[of + "attention.query_key_value.weight"].reshape(H, 3, E, D)
    biases_H3E = t[of + "attention.query_key_value.bias"].reshape(H, 3, E)
    return {
        "W_E": t["gpt_neox.embed_in.weight"], "W_U": t["embed_out.weight"].T,
        **{f"W_{word}": packed_H3ED[:, i].transpose(1, 2) for i, word in enumerate("QKV")},
        **{f"b_{word}": biases_H3E[:, i] for i, word in enumerate("QKV")},
        "W_O": t[of + "attention.dense.weight"].T.reshape(H, E, D), "b_O": t[of + "attention.dense.bias"],
        "W_in": t[of + "mlp.dense_h_to_4h.weight"].T, "b_in": t[of + "mlp.dense_h_to_4h.bias"],
        "W_out": t[of + "mlp.dense_4h_to_h.weight"].T, "b_out": t[of + "mlp.dense_4h_to_h.bias"],
        "ln1.b": t[of + "input_layernorm.bias"], "ln2.w": t[of + "post_attention_layernorm.weight"],
    }  # fmt: skip


def _falcon(t: Tensors, layer: int) -> Tensors:
    of = f"h.{layer}."
    packed = t[of + "self_attention.query_key_value.weight"].reshape(KV, H // KV + 2, E, D)
    return {
        "W_E": t["word_embeddings.weight"], "W_U": t["word_embeddings.weight"].T,
        "W_Q": _by_head(packed[:, :-2].reshape(-1, D)), "W_K": packed[:, -2].transpose(1, 2),
        "W_V": packed[:, -1].transpose(1, 2), "W_O": t[of + "self_attention.dense.weight"].T.reshape(H, E, D),
        "W_in": t[of + "mlp.dense_h_to_4h.weight"].T, "W_out": t[of + "mlp.dense_4h_to_h.weight"].T,
        "ln1.w": t[of + "ln_attn.weight"], "ln2.w": t[of + "ln_mlp.weight"],
    }  # fmt: skip
