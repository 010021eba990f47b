"""The names that TransformerLens and nnterp have for our sites: which are read as ours, which mean something else.

A name is an alias only if it is the same tensor. One that sounds like a site of ours and is another tensor is refused
with what to use instead; one that is another tensor on some families only is in `DIFFERENCES`, which the docs print.
`{l}` is a layer.

Sources: TransformerLens 4.3 (`model_bridge`; `tools/lens_table.py` compares it),
nnterp 1 (`standardized_transformer.py`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from patchclamp.errors import PatchclampError, UnknownName, UnsupportedSite
from patchclamp.language.registry import TRANSFORMER_LENS

_UNNORMED = "is the row divided by its size, before the norm's weight"
_PER_HEAD = "is the stream before the norm, once a head: use resid_pre[{l}], or attn_in[{l}] for the normed input"
_NEVER = "are attention weights, which a fused kernel never makes"
_WEIGHTS = f"{_NEVER}: use q[{{l}}], k[{{l}}] and z[{{l}}]"
_MODULE = "is a module, not a tensor"
ELSEWHERE: dict[str, str] = {
    "blocks.{l}.ln1.hook_normalized": f"{_UNNORMED}: use attn_in[{{l}}], which is after it",
    "blocks.{l}.ln2.hook_normalized": f"{_UNNORMED}: use mlp_in[{{l}}], which is after it",
    "ln_final.hook_normalized": f"{_UNNORMED}: use final_norm, which is after it",
    "blocks.{l}.ln1.hook_scale": "is a number inside the norm: use resid_pre[{l}] or attn_in[{l}]",
    "blocks.{l}.ln2.hook_scale": "is a number inside the norm: use resid_mid[{l}] or mlp_in[{l}]",
    "ln_final.hook_scale": "is a number inside the norm: use the last layer's resid_post, or final_norm",
    "hook_pos_embed": "is the position's embedding alone: use resid_pre[0], which is after it was added",
    "blocks.{l}.hook_attn_in": _PER_HEAD,
    "blocks.{l}.hook_q_input": _PER_HEAD,
    "blocks.{l}.hook_k_input": _PER_HEAD,
    "blocks.{l}.hook_v_input": _PER_HEAD,
    "blocks.{l}.hook_mlp_in": "is the stream before the norm: use resid_mid[{l}], or mlp_in[{l}] for the normed input",
    "blocks.{l}.attn.hook_rot_q": "is after rotary embedding: use q[{l}], which is before it",
    "blocks.{l}.attn.hook_rot_k": "is after rotary embedding: use k[{l}], which is before it",
    "blocks.{l}.attn.hook_attn_scores": _WEIGHTS,
    "blocks.{l}.attn.hook_pattern": _WEIGHTS,
    "blocks.{l}.attn.hook_result": "is each head's part of attn_out, which no engine makes: use z[{l}], before the "
                                   "output projection",
    "blocks.{l}.mlp.hook_pre": "is before the activation: use neurons[{l}], which is what the down projection reads",
    "blocks.{l}.mlp.hook_pre_linear": "is one factor of a neuron: use neurons[{l}], the product",
    **dict.fromkeys(("attention_probabilities", "attn_weights", "attn_scores", "pattern"),
                    f"{_NEVER}: use q, k and z"),
    "next_token_probs": "is computed from the logits: capture logits and take their softmax",
    "layers": f"{_MODULE}: use layers_input or layers_output, or resid_pre and resid_post",
    "attentions": f"{_MODULE}: use attentions_input or attentions_output, or attn_in and attn_out",
    "mlps": f"{_MODULE}: use mlps_input or mlps_output, or mlp_in and mlp_out",
}  # fmt: skip


# by name: what an edit reaches there, and the sites that do the same here. Captures by these names are the same tensor
EDITED_ELSEWHERE: dict[str, str] = {
    "blocks.{l}.hook_resid_mid": "an edit there moves what the MLP reads, not the stream: use resid_mid[{l}] to edit "
                                 "the stream, or mlp_in[{l}] to edit what the MLP reads, after its norm",
    "blocks.{l}.ln1.hook_out": "an edit there moves everything that reads the norm, in some families the MLP too: use "
                               "attn_in[{l}] to edit what attention reads, and mlp_in[{l}] beside it for the MLP",
}  # fmt: skip


class Difference(NamedTuple):
    """Where an alias is another tensor in its own library than our site, on some families (none named: on all)."""

    aliases: tuple[str, ...]
    families: tuple[str, ...]
    what: str


_QK = ("blocks.{l}.attn.hook_q", "blocks.{l}.attn.hook_k")
_OUTPUTS = ("attentions_output", "mlps_output")
# families: with a norm after attention and MLP; without one before them; with factors; with normed queries and keys
_POST = ("olmo2", "glm4", "exaone4")
_NO_PRE, _FACTORS = ("olmo2", "exaone4"), ("granite", "granite_hybrid")
_NORMED_QK = ("qwen3", "qwen3_moe", "gemma3", "olmo2", "exaone4", "glm4_moe_normed", "olmoe")
DIFFERENCES: tuple[Difference, ...] = (
    Difference(_OUTPUTS, ("gemma2", "gemma3", *_POST), "nnterp's is what the module returns; another norm follows it, "
               "and `attn_out` and `mlp_out` are after that norm: what is added to the stream"),
    Difference(_OUTPUTS, _FACTORS, "nnterp's is what the module returns; `attn_out` and `mlp_out` are that times "
               "the config's `residual_multiplier`: what is added to the stream"),
    Difference(("token_embeddings",), _FACTORS, "nnterp's is what the embedding returns; `embed` is that times the "
               "config's `embedding_multiplier`"),
    Difference(("token_embeddings",), ("gemma2",), "on Transformers 4 nnterp's is before the embedding is scaled; "
               "`embed` is after it, as nnterp's is on Transformers 5"),
    Difference(("attentions_input", "mlps_input"), _NO_PRE, "there is no norm before attention and MLP, so there is "
               "no `attn_in` or `mlp_in`, and asking is an error: what they read is `resid_pre` and `resid_mid`"),
    Difference(("mlps_input", "mlps_output"), ("opt",), "nnterp has none, for want of an MLP module; ours are what "
               "`fc1` reads and what `fc2` returns"),
    Difference(("token_embeddings",), ("bloom",), "nnterp's is before the norm that "
               "follows the embedding; `embed` is after it: what the stream begins with"),
    Difference(("logits",), (), "nnterp's has a row for every position; ours for those that a token is sampled from"),
    Difference(_QK, _NORMED_QK, "TransformerLens' is before queries and keys "
               "are normed; `q` and `k` are after it, what rotary embedding reads"),
    Difference(("embed.hook_out",), ("bloom",), "TransformerLens' is before the norm that follows the embedding; "
               "`embed` is after it, as `hook_embed` is"),
    Difference(("hook_embed", "embed.hook_out"), ("gemma4",), "the same tensor, but an edit of TransformerLens' also "
               "moves the embeddings that each layer reads; one of `embed` moves the stream alone"),
    Difference(("hook_embed", "embed.hook_out", "blocks.{l}.ln1.hook_out", "blocks.{l}.hook_attn_out"), ("falcon_h1",),
               "TransformerLens' is before the config's factor (`embedding_multiplier`, `attention_in_multiplier`, "
               "`attention_out_multiplier`); ours is after it"),
    Difference(("blocks.{l}.ln1.hook_out", "blocks.{l}.ln2.hook_out"), _NO_PRE, "TransformerLens' is after "
               "attention and MLP; there is no `attn_in` or `mlp_in`, and asking is an error: use `attn_out` and "
               "`mlp_out`"),
)  # fmt: skip


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{l\}", r"(?P<layer>\d{1,9})"))


_HOOKS = tuple((_pattern(name), site) for name, site in TRANSFORMER_LENS.items())
_EDITED_ELSEWHERE = tuple((_pattern(name), why) for name, why in EDITED_ELSEWHERE.items())
_ELSEWHERE = tuple((_pattern(name), why) for name, why in ELSEWHERE.items())


def hook(text: str) -> tuple[str, int | None] | None:
    """The site and layer that a TransformerLens hook name means; None if it is none that we read."""
    for pattern, site in _HOOKS:
        if match := pattern.fullmatch(text):
            layer = match.groupdict().get("layer")
            return site, None if layer is None else int(layer)
    return None


def edited_elsewhere(text: str) -> str | None:
    """Why an edit by one of their names is refused, and what to write instead; None for other names."""
    for pattern, why in _EDITED_ELSEWHERE:
        if match := pattern.fullmatch(text):
            return f"{text}: {why.format(l=match['layer'])}"
    return None


def elsewhere(text: str) -> PatchclampError | None:
    """The error for a name of theirs that is no site of ours; it says what to use instead. None for other names."""
    for pattern, why in _ELSEWHERE:
        if match := pattern.fullmatch(text.partition("[")[0].strip()):
            error = UnsupportedSite if why.startswith(_NEVER) else UnknownName
            return error(f"{text} {why.format(l=match.groupdict().get('layer'))}")
    return None
