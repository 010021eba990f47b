"""The site tables: one a model family, Transformers and vLLM side by side."""

from __future__ import annotations

import msgspec

from patchclamp.errors import ModelError
from patchclamp.sites.families import Family, Row, Size, Tap

_LAYER, _NORM = "model.layers.{l}", "model.norm"
_ATTENTION, _MLP = _LAYER + ".self_attn", _LAYER + ".mlp"
_QKV: tuple[Size, ...] = ("Q", "K", "K")

SITES_OF_ALL = {
    "embed": ("stream", 0), "resid_pre": ("stream", 0), "resid_mid": ("mid", 0), "resid_post": ("stream", 1),
    "attn_in": ("attn_in", 0), "attn_out": ("attn_out", 0), "mlp_in": ("mlp_in", 0), "mlp_out": ("mlp_out", 0),
    "q": ("q", 0), "k": ("k", 0), "v": ("v", 0), "z": ("z", 0), "neurons": ("neurons", 0),
    "final_norm": ("final_norm", 0), "logits": ("logits", 0),
}  # fmt: skip
DENSE = {"router": "its layers have one MLP each, and no experts to choose from"}


def same(module: str, moment: str = "out", width: Size = "D", **row: object) -> Row:
    """A row whose tensor both engines have bare at the same border, first among what is given or returned."""
    tap = Tap(module, moment)  # type: ignore[arg-type]
    return Row(tap, tap, width, **row)  # type: ignore[arg-type]


def merged(module: str, merged_module: str, part: int, width: Size) -> Row:
    """Queries, keys or values: a projection's own on Transformers, a part of a merged one on vLLM."""
    return Row(Tap(module, "out"), Tap(merged_module, "out", of=_QKV, part=part), width, "sharded")


LOGITS = Row(Tap("lm_head", "out"), Tap("compute_logits", "out"), "V", per_layer=False, rows="sampled")

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
    points={
        # vLLM hands a layer (positions, hidden, residual); the stream is hidden + residual
        "stream": Row(Tap(_LAYER, "in", 0), Tap(_LAYER, "in", 1, 2)),
        "stream_end": Row(Tap(_NORM, "in", 0), Tap(_NORM, "in", 0, 1), per_layer=False),
        # the fused norm's two inputs are what attention added and the stream before it
        "mid": Row(
            Tap(_LAYER + ".post_attention_layernorm", "in", 0), Tap(_LAYER + ".post_attention_layernorm", "in", 0, 1)
        ),
        "attn_in": same(_LAYER + ".input_layernorm"),
        "q": merged(_ATTENTION + ".q_proj", _ATTENTION + ".qkv_proj", 0, "Q"),
        "k": merged(_ATTENTION + ".k_proj", _ATTENTION + ".qkv_proj", 1, "K"),
        "v": merged(_ATTENTION + ".v_proj", _ATTENTION + ".qkv_proj", 2, "K"),
        "z": same(_ATTENTION + ".o_proj", "in", "Q", layout="sharded"),
        "attn_out": same(_ATTENTION),
        "mlp_in": same(_LAYER + ".post_attention_layernorm"),
        "neurons": same(_MLP + ".down_proj", "in", "M", layout="sharded"),
        "mlp_out": same(_MLP),
        "final_norm": same(_NORM, per_layer=False),
        "logits": LOGITS,
    },
    sites=SITES_OF_ALL,
    lacks=DENSE,
)

QWEN3 = msgspec.structs.replace(
    LLAMA,
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    points=LLAMA.points
    | {
        "q": same(_ATTENTION + ".q_norm", "out", "Q", layout="sharded"),
        "k": same(_ATTENTION + ".k_norm", "out", "K", layout="sharded"),
    },
)

FAMILIES: tuple[Family, ...] = (LLAMA, QWEN3)


def family_of(architectures: list[str] | tuple[str, ...] | None) -> Family:
    """The family whose table lists one of a config's `architectures`. Raises `ModelError` where none does."""
    for family in FAMILIES:
        if set(family.architectures) & set(architectures or ()):
            return family
    known = sorted(name for family in FAMILIES for name in family.architectures)
    raise ModelError(f"no site table for {list(architectures or ())}; there are tables for {', '.join(known)}")
