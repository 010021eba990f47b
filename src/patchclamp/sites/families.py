"""The site tables: for each model family, where each named tensor is made, on both engines.

A *point* is one place in the model where a tensor (or the pair whose sum is the stream) can be read and written; a
site word names a point, shifted by some layers.  `resid_post[l]` and `resid_pre[l+1]` are one point.

    D model width · V vocabulary · l layer
"""

from __future__ import annotations

from typing import Literal

import msgspec

from patchclamp.errors import ModelError

Moment = Literal["in", "out"]


class Tap(msgspec.Struct, frozen=True):
    """A tensor at a module's border.

    `hidden` is its place among the positional arguments (`in`) or in the returned tuple (`out`; a bare tensor is
    place 0); `residual`, where the engine carries the stream as two tensors, is the place of the other one.
    """

    module: str
    moment: Moment
    hidden: int = 0
    residual: int | None = None


class Row(msgspec.Struct, frozen=True):
    """One kind of point on both engines. `last` marks the point after the last layer, which has no layer of its own."""

    transformers: Tap
    vllm: Tap
    width: Literal["D", "V"] = "D"
    layout: Literal["replicated", "sharded", "partial sum"] = "replicated"
    per_layer: bool = True
    rows: Literal["tokens", "sampled"] = "tokens"


class Family(msgspec.Struct, frozen=True):
    """Model classes that share one table. `sites` maps a word to (kind of point, layers to shift by)."""

    name: str
    architectures: tuple[str, ...]
    layers: str
    points: dict[str, Row]
    sites: dict[str, tuple[str, int]]


_LAYER = "model.layers.{l}"
_NORM = "model.norm"

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    layers="model.layers",
    points={
        # vLLM hands a layer (positions, hidden, residual); the stream is hidden + residual
        "stream": Row(Tap(_LAYER, "in", 0), Tap(_LAYER, "in", 1, 2)),
        "stream_end": Row(Tap(_NORM, "in", 0), Tap(_NORM, "in", 0, 1), per_layer=False),
        # the fused norm's two inputs are what attention added and the stream before it
        "mid": Row(
            Tap(_LAYER + ".post_attention_layernorm", "in", 0), Tap(_LAYER + ".post_attention_layernorm", "in", 0, 1)
        ),
        "attn_out": Row(Tap(_LAYER + ".self_attn", "out", 0), Tap(_LAYER + ".self_attn", "out", 0)),
        "mlp_out": Row(Tap(_LAYER + ".mlp", "out", 0), Tap(_LAYER + ".mlp", "out", 0)),
        "final_norm": Row(Tap(_NORM, "out", 0), Tap(_NORM, "out", 0), per_layer=False),
        "logits": Row(Tap("lm_head", "out", 0), Tap("compute_logits", "out", 0), "V", per_layer=False, rows="sampled"),
    },
    sites={
        "embed": ("stream", 0),
        "resid_pre": ("stream", 0),
        "resid_mid": ("mid", 0),
        "resid_post": ("stream", 1),
        "attn_out": ("attn_out", 0),
        "mlp_out": ("mlp_out", 0),
        "final_norm": ("final_norm", 0),
        "logits": ("logits", 0),
    },
)

FAMILIES: tuple[Family, ...] = (LLAMA,)


def family_of(architectures: list[str] | tuple[str, ...] | None) -> Family:
    """The family whose table lists one of a config's `architectures`. Raises `ModelError` where none does."""
    for family in FAMILIES:
        if set(family.architectures) & set(architectures or ()):
            return family
    known = sorted(name for family in FAMILIES for name in family.architectures)
    raise ModelError(f"no site table for {list(architectures or ())}; there are tables for {', '.join(known)}")
