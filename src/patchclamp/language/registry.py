"""The registry of sites: every named tensor, said once.

The public names, the parser, the docs page, the order of reports, the proofs and the parts of a row are all read from
here. A new site is one entry, and its column in the families' tables (`sites.tables`).

    T tokens of a request · N generated tokens · D model width · H query heads · K key/value heads · E head size
    M MLP width · X experts · V vocabulary
"""

from __future__ import annotations

from typing import Literal

import msgspec

Width = Literal["D", "V", "Q", "K", "Z", "M", "X"]
Block = Literal["", "attention", "mlp"]


class SiteSpec(msgspec.Struct, frozen=True):
    """One site word.

    name: the word
    shape: of what `run[...]` returns, in the letters above
    meaning: what the tensor is, for people
    width: the size of its row (`Sizes` has the numbers; Q, K and Z are heads times head size)
    layered: whether every layer has one
    index: what the second index counts; "" where it takes none
    block: the part of a layer it is computed in
    moves: the words of its layer that an edit here changes, in every family; the others of `kept` stay as they are
    transformer_lens, nnterp: its names there, `{l}` a layer
    """

    name: str
    shape: str
    meaning: str
    width: Width = "D"
    layered: bool = True
    index: str = ""
    block: Block = ""
    moves: tuple[str, ...] = ()
    transformer_lens: tuple[str, ...] = ()
    nnterp: tuple[str, ...] = ()


_MIXER, _MLP = ("attn_out", "mixer_out"), ("mlp_out",)
_HEADS = ("z", *_MIXER)
_BLOCKS, _ATTN = "blocks.{l}.", "blocks.{l}.attn."

SITES: dict[str, SiteSpec] = {  # in the order in which a model computes them
    spec.name: spec
    for spec in (
        SiteSpec("embed", "[T, D]", "what the token embedding puts into the stream, scaled where the model scales it",
                 layered=False, transformer_lens=("hook_embed", "embed.hook_out"), nnterp=("token_embeddings",)),
        SiteSpec("resid_pre", "[T, D]", "the whole residual stream before a layer",
                 transformer_lens=(_BLOCKS + "hook_resid_pre", _BLOCKS + "hook_in"), nnterp=("layers_input",)),
        SiteSpec("attn_in", "[T, D]", "the normed input of attention", block="attention",
                 moves=("q", "k", "v", *_HEADS), transformer_lens=(_BLOCKS + "ln1.hook_out",),
                 nnterp=("attentions_input",)),
        SiteSpec("q", "[T, H, E]", "queries before rotary embedding, after their norm where there is one", "Q",
                 index="head", block="attention", moves=_HEADS, transformer_lens=(_ATTN + "hook_q",)),
        SiteSpec("k", "[T, K, E]", "keys, likewise", "K",
                 index="key/value head", block="attention", moves=_HEADS, transformer_lens=(_ATTN + "hook_k",)),
        SiteSpec("v", "[T, K, E]", "values", "K",
                 index="key/value head", block="attention", moves=_HEADS, transformer_lens=(_ATTN + "hook_v",)),
        SiteSpec("z", "[T, H, E]", "each head's result before the output projection", "Z",
                 index="head", block="attention", moves=_MIXER, transformer_lens=(_ATTN + "hook_z",)),
        SiteSpec("attn_out", "[T, D]", "what attention adds to the stream", block="attention", moves=("mixer_out",),
                 transformer_lens=(_BLOCKS + "hook_attn_out",), nnterp=("attentions_output",)),
        SiteSpec("mixer_out", "[T, D]", "what a layer's mixer adds to the stream, where some layers have a state "
                 "space or linear attention for attention; in a layer with attention it is `attn_out[l]`, but in one "
                 "with both it is what the state space adds",
                 block="attention", moves=("attn_out",)),
        SiteSpec("resid_mid", "[T, D]", "the stream between attention and MLP",
                 transformer_lens=(_BLOCKS + "hook_resid_mid",)),
        SiteSpec("mlp_in", "[T, D]", "the normed input of the MLP", block="mlp", moves=("router", "neurons", *_MLP),
                 transformer_lens=(_BLOCKS + "ln2.hook_out",), nnterp=("mlps_input",)),
        SiteSpec("router", "[T, X]", "routing logits of a mixture of experts", "X",
                 index="expert", block="mlp", moves=_MLP),
        SiteSpec("neurons", "[T, M]", "MLP activations before the down projection", "M",
                 index="neuron", block="mlp", moves=_MLP, transformer_lens=(_BLOCKS + "mlp.hook_post",)),
        SiteSpec("mlp_out", "[T, D]", "what the MLP adds to the stream", block="mlp",
                 transformer_lens=(_BLOCKS + "hook_mlp_out",), nnterp=("mlps_output",)),
        SiteSpec("resid_post", "[T, D]", "the stream after a layer; `resid_post[l]` is `resid_pre[l+1]`",
                 transformer_lens=(_BLOCKS + "hook_resid_post", _BLOCKS + "hook_out"), nnterp=("layers_output",)),
        SiteSpec("final_norm", "[T, D]", "the normed last stream",
                 layered=False, transformer_lens=("ln_final.hook_out",), nnterp=("ln_final",)),
        SiteSpec("logits", "[N, V]", "next-token logits, as the sampler receives them", "V",
                 layered=False, nnterp=("logits",)),
    )
}  # fmt: skip

TRANSFORMER_LENS: dict[str, str] = {alias: spec.name for spec in SITES.values() for alias in spec.transformer_lens}
NNTERP: dict[str, str] = {alias: spec.name for spec in SITES.values() for alias in spec.nnterp}


def unmoved(name: str) -> tuple[str, ...]:
    """The words of a layer that an edit at `name` does not change: of its own block all that it does not move, and of
    an MLP's site all of attention."""
    spec = SITES[name]
    blocks: tuple[Block, ...] = ("attention", "mlp") if spec.block == "mlp" else (spec.block,)
    return tuple(
        other.name
        for other in SITES.values()
        if other.block and other.block in blocks and other.name != name and other.name not in spec.moves
    )
