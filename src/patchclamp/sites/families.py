"""What a site table says: where each named tensor of a model family is made, on both engines.

A *point* is one place in the model where a tensor (or the pair whose sum is the stream) can be read and written; a
site word names a point, shifted by some layers.  `resid_post[l]` and `resid_pre[l+1]` are one point.

    D model width · V vocabulary · Q all query heads · K all key/value heads · Z all heads' results · M MLP width
    X experts · l layer
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from patchclamp.errors import ModelError
from patchclamp.language.registry import Width as Size

Moment = Literal["in", "out", "attention"]


class Tap(msgspec.Struct, frozen=True):
    """A tensor at a module's border; of vLLM's attention layers (`attention`) what they compute.

    `hidden` is its place among the positional arguments, or its name among the others (`in`), or its place in the
    returned tuple (`out`; a bare tensor is place 0); `residual`, where the engine carries the stream as two tensors, is
    the place of the other one. Where the tensor is several side by side, their sizes are `of`, and the point's is
    number `part` of them; `mixed`: head by head, those of a head side by side. `by_head`: the tensor is [B, H, T, E].
    `scale`: the config's name of a factor; the site is the tensor times that. `again`: the module is run again on what
    was edited, for it has made more of it already (a router, its choice).
    """

    module: str
    moment: Moment
    hidden: int | str = 0
    residual: int | None = None
    of: tuple[Size, ...] = ()
    part: int = 0
    mixed: bool = False
    by_head: bool = False
    scale: str = ""
    rerun: bool = False


class PointKind(msgspec.Struct, frozen=True):
    """One kind of point on both engines. Without `per_layer` it is one for the model, such as the point after the last
    layer; `dense`: only layers with an ordinary MLP have it, `sparse`: only those with experts."""

    transformers: Tap
    vllm: Tap
    width: Size = "D"
    layout: Literal["replicated", "sharded", "partial sum"] = "replicated"
    per_layer: bool = True
    rows: Literal["tokens", "sampled"] = "tokens"
    layers: Literal["all", "dense", "sparse"] = "all"


class Family(msgspec.Struct, frozen=True):
    """Model classes that share one table. `sites` maps a word to (kind of point, layers to shift by); `lacks` says of
    every other word why it is not there; `needs`: what a config must say for the table to be about it (a name: the same
    as that other setting); `backend`: on vLLM the table is of the modules that its Transformers backend makes;
    `tabled`: not if made of a module tree; `divided_by`: the config's name of what vLLM divides the stream by in
    float16."""

    name: str
    architectures: tuple[str, ...]
    points: dict[str, PointKind]
    sites: dict[str, tuple[str, int]]
    lacks: dict[str, str] = {}
    needs: dict[str, Any] = {}
    backend: bool = False
    tabled: bool = True
    divided_by: str = ""


class Sizes(msgspec.Struct, frozen=True):
    """Of a model: its layers, and how wide things are. `sparse`: the layers whose MLP is a mixture of experts;
    `d_result`: how wide a head's result is, where that is not `d_head`; `factors` by the config's names of them."""

    layers: int
    d_model: int
    d_vocab: int
    heads: int = 1
    kv_heads: int = 1
    d_head: int = 1
    d_mlp: int = 1
    experts: int = 0
    sparse: tuple[int, ...] = ()
    d_result: int = 0
    factors: dict[str, float] = {}

    def __getitem__(self, size: Size) -> int:
        return {"D": self.d_model, "V": self.d_vocab, "Q": self.heads * self.d_head, "K": self.kv_heads * self.d_head,
                "Z": self.heads * (self.d_result or self.d_head), "M": self.d_mlp, "X": self.experts}[size]  # fmt: skip

    def parts(self, size: Size) -> tuple[int, int]:
        """How many heads, neurons or experts a row of a width has, and how wide each is."""
        heads = {"Q": self.heads, "K": self.kv_heads, "Z": self.heads}
        count = heads.get(size, self[size])
        return count, self[size] // max(count, 1)


def sizes_of(config: Any, d_vocab: int | None = None) -> Sizes:
    """The sizes that a Transformers config tells, by whichever name it tells them. Raises `ModelError` where it does
    not tell one width, number of heads and number of layers."""

    def told(*names: str, otherwise: Any = None) -> Any:
        return next((found for name in names if (found := getattr(config, name, None)) is not None), otherwise)

    width, heads, layers = (_told_once(config, name) for name in ("hidden_size", "num_attention_heads",
                                                                  "num_hidden_layers"))  # fmt: skip
    experts = told("num_local_experts", "num_experts", "n_routed_experts", otherwise=0)
    return Sizes(
        layers, width, d_vocab or config.vocab_size, heads, told("num_key_value_heads", otherwise=heads),
        told("head_dim", otherwise=width // heads),
        told("ffn_dim", "n_inner", "intermediate_size", otherwise=4 * width), experts,
        _sparse(config, layers) if experts else (), told("v_head_dim", otherwise=0),
        {name: float(getattr(config, name)) for name in FACTORS if getattr(config, name, None) is not None},
    )  # fmt: skip


def _told_once(config: Any, name: str) -> int:
    try:
        found = getattr(config, name, None)
    except Exception:  # one that is another in each layer
        found = None
    if isinstance(found, int):
        return found
    named = ", ".join(getattr(config, "architectures", None) or [type(config).__name__])
    raise ModelError(
        f"the config of {named} does not tell one {name} for all layers: sites are those of decoders with attention in "
        "every layer, alike"
    )


FACTORS = ("residual_multiplier",)


def _sparse(config: Any, layers: int) -> tuple[int, ...]:
    """The layers with experts."""
    every = getattr(config, "decoder_sparse_step", None) or getattr(config, "moe_layer_freq", None) or 1
    first, dense = getattr(config, "first_k_dense_replace", 0), getattr(config, "mlp_only_layers", None) or ()
    shifted = 1 if hasattr(config, "decoder_sparse_step") else 0  # which counts from one
    return tuple(layer for layer in range(first, layers) if (layer + shifted) % every == 0 and layer not in dense)
