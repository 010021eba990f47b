"""Sites: a model's named tensors, with their registry, parser, and aliases in TransformerLens and nnterp.

`resid_post[12]` is one layer, `resid_post[8:12]` four layers, `resid_post` all; `z[5, 3]` is head 3 of layer 5.
Layers and indices are 0-based and may count from the end; ranges are half-open. `patchclamp.sites` maps names to a
model.

`SITES` registers tensors, `DERIVED` attention patterns. The public names, parser, docs page, report order, proofs and
parts of a row are derived from both. A new site is one entry here and one column in the family tables (`sites.tables`).

    T tokens of a request · N generated tokens · D model width · H query heads · K key/value heads (in `pattern`: key
    positions) · E head size
    M MLP width · X experts · V vocabulary · `{l}` a layer

A name is an alias only if it is the same tensor. A similar name for a different tensor is rejected with a suggestion
(`ELSEWHERE`). `DIFFERENCES` lists aliases that differ only in some families, for the docs.

Sources: TransformerLens 4.3 (`model_bridge`; `tools/lens_table.py` compares it),
nnterp 1 (`standardized_transformer.py`).
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

import msgspec

from patchclamp.errors import ProgramError, UnknownName, UnsupportedSite, unknown
from patchclamp.language.structs import PublicStruct
from patchclamp.language.tokens import (
    Index,
    IndexLike,
    Indices,
    IndicesLike,
    Selection,
    TokensLike,
    as_index,
    as_indices,
    parse_index,
    parse_tokens,
)

Width = Literal["D", "V", "Q", "K", "Z", "M", "X"]
Block = Literal["", "attention", "mlp"]


class SiteSpec(msgspec.Struct, frozen=True):
    """Registry entry of a site.

    name: its name in the language
    shape: the shape that `run[...]` returns, in the letters above
    meaning: a short description, for the docs
    width: the row size (a letter of `Sizes`; Q, K and Z are heads times head size)
    layered: True if it has a layer index
    index: the unit of the second index; "": no second index
    block: the part of a layer that computes the tensor
    moves: the sites of the same layer that an edit changes in every family; the sites in `unmoved` never change
    transformer_lens, nnterp: the site's aliases in these libraries
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

SITES: dict[str, SiteSpec] = {  # in order of computation
    spec.name: spec
    for spec in (
        SiteSpec("embed", "[T, D]", "the token embedding as it enters the stream, scaled if the model scales it",
                 layered=False, transformer_lens=("hook_embed", "embed.hook_out"), nnterp=("token_embeddings",)),
        SiteSpec("resid_pre", "[T, D]", "the whole residual stream before a layer",
                 transformer_lens=(_BLOCKS + "hook_resid_pre", _BLOCKS + "hook_in"), nnterp=("layers_input",)),
        SiteSpec("attn_in", "[T, D]", "the normed input of attention", block="attention",
                 moves=("q", "k", "v", *_HEADS), transformer_lens=(_BLOCKS + "ln1.hook_out",),
                 nnterp=("attentions_input",)),
        SiteSpec("q", "[T, H, E]", "queries before rotary embedding, after their norm if the model has one", "Q",
                 index="head", block="attention", moves=_HEADS, transformer_lens=(_ATTN + "hook_q",)),
        SiteSpec("k", "[T, K, E]", "keys before rotary embedding, after their norm if the model has one", "K",
                 index="key/value head", block="attention", moves=_HEADS, transformer_lens=(_ATTN + "hook_k",)),
        SiteSpec("v", "[T, K, E]", "values", "K",
                 index="key/value head", block="attention", moves=_HEADS, transformer_lens=(_ATTN + "hook_v",)),
        SiteSpec("z", "[T, H, E]", "each head's result before the output projection", "Z",
                 index="head", block="attention", moves=_MIXER, transformer_lens=(_ATTN + "hook_z",)),
        SiteSpec("attn_out", "[T, D]", "what attention adds to the stream", block="attention", moves=("mixer_out",),
                 transformer_lens=(_BLOCKS + "hook_attn_out",), nnterp=("attentions_output",)),
        SiteSpec("mixer_out", "[T, D]", "what a layer's mixer adds to the stream, in models where some layers have "
                 "a state space or linear attention; `attn_out[l]` in a layer with attention, the state space's "
                 "output in a layer with both",
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

# Sites that are computed from queries and cached keys on capture
DERIVED: dict[str, SiteSpec] = {
    spec.name: spec
    for spec in (
        SiteSpec("attn_scores", "[T, H, K]", "attention scores over key positions, as the softmax reads them: scaled, "
                 "capped and with ALiBi; −∞ where a query cannot see a key", "Q", index="head", block="attention",
                 transformer_lens=(_ATTN + "hook_attn_scores",)),
        SiteSpec("pattern", "[T, H, K]", "attention probabilities over key positions, 0 where a query cannot see a key",
                 "Q", index="head", block="attention", transformer_lens=(_ATTN + "hook_pattern",)),
    )
}  # fmt: skip
SPECS: dict[str, SiteSpec] = SITES | DERIVED  # by name

TRANSFORMER_LENS: dict[str, str] = {alias: spec.name for spec in SPECS.values() for alias in spec.transformer_lens}
NNTERP: dict[str, str] = {alias: spec.name for spec in SITES.values() for alias in spec.nnterp}


def unmoved(name: str) -> tuple[str, ...]:
    """Return the sites of a layer that an edit at `name` leaves unchanged: the other sites of its block and, for an MLP
    site, all attention sites."""
    spec = SITES[name]
    blocks: tuple[Block, ...] = ("attention", "mlp") if spec.block == "mlp" else (spec.block,)
    return tuple(
        other.name
        for other in SITES.values()
        if other.block and other.block in blocks and other.name != name and other.name not in spec.moves
    )


_UNNORMED = "is the normalised row before the norm's weight"
_PER_HEAD = "is the stream before the norm, repeated per head: use resid_pre[{l}], or attn_in[{l}] for the normed input"
_MODULE = "is a module, not a tensor"
ELSEWHERE: dict[str, str] = {
    "blocks.{l}.ln1.hook_normalized": f"{_UNNORMED}: use attn_in[{{l}}], which is after it",
    "blocks.{l}.ln2.hook_normalized": f"{_UNNORMED}: use mlp_in[{{l}}], which is after it",
    "ln_final.hook_normalized": f"{_UNNORMED}: use final_norm, which is after it",
    "blocks.{l}.ln1.hook_scale": "is a scalar inside the norm: use resid_pre[{l}] or attn_in[{l}]",
    "blocks.{l}.ln2.hook_scale": "is a scalar inside the norm: use resid_mid[{l}] or mlp_in[{l}]",
    "ln_final.hook_scale": "is a scalar inside the norm: use the last layer's resid_post, or final_norm",
    "hook_pos_embed": "is only the position embedding: use resid_pre[0], which includes it",
    **{f"blocks.{{l}}.hook_{name}": _PER_HEAD for name in ("attn_in", "q_input", "k_input", "v_input")},
    "blocks.{l}.hook_mlp_in": "is the stream before the norm: use resid_mid[{l}], or mlp_in[{l}] for the normed input",
    "blocks.{l}.attn.hook_rot_q": "is after rotary embedding: use q[{l}], which is before it",
    "blocks.{l}.attn.hook_rot_k": "is after rotary embedding: use k[{l}], which is before it",
    "blocks.{l}.attn.hook_result": "is each head's share of attn_out, which no engine computes: use z[{l}], before "
                                   "the output projection",
    "blocks.{l}.mlp.hook_pre": "is before the activation: use neurons[{l}], which is what the down projection reads",
    "blocks.{l}.mlp.hook_pre_linear": "is one factor of a neuron: use neurons[{l}], the product",
    **dict.fromkeys(("attention_probabilities", "attn_weights"),
                    "are attention weights: use pattern, or attn_scores before the softmax"),
    "next_token_probs": "is computed from the logits: capture logits and take their softmax",
    "layers": f"{_MODULE}: use layers_input or layers_output, or resid_pre and resid_post",
    "attentions": f"{_MODULE}: use attentions_input or attentions_output, or attn_in and attn_out",
    "mlps": f"{_MODULE}: use mlps_input or mlps_output, or mlp_in and mlp_out",
    **dict.fromkeys(("model.embed_tokens", "transformer.wte", "gpt_neox.embed_in"), f"{_MODULE}: use embed"),
    **dict.fromkeys(("model.norm", "transformer.ln_f", "gpt_neox.final_layer_norm"), f"{_MODULE}: use final_norm"),
    **dict.fromkeys(("lm_head", "embed_out"), f"{_MODULE}: use logits"),
}  # fmt: skip


# Names rejected only for edits: the reason and the replacement. A capture by such a name is the same tensor.
EDITED_ELSEWHERE: dict[str, str] = {
    "blocks.{l}.hook_resid_mid": "an edit there changes the MLP's input, not the stream: use resid_mid[{l}] to edit "
                                 "the stream, or mlp_in[{l}] to edit the MLP's normed input",
    "blocks.{l}.ln1.hook_out": "an edit there affects everything that reads the norm, in some families the MLP too: "
                               "use attn_in[{l}] to edit the input of attention, and also mlp_in[{l}] for the MLP",
}  # fmt: skip


class Difference(NamedTuple):
    """A difference between our site and the tensor that an alias names in its library, in `families` (empty: all)."""

    aliases: tuple[str, ...]
    families: tuple[str, ...]
    what: str


_QK = ("blocks.{l}.attn.hook_q", "blocks.{l}.attn.hook_k")
_OUTPUTS = ("attentions_output", "mlps_output")
# Families with a norm after attention and MLP; without a norm before them; with factors; with normed queries and keys
_POST = ("olmo2", "glm4", "exaone4")
_NO_PRE, _FACTORS = ("olmo2", "exaone4"), ("granite", "granite_hybrid")
_NORMED_QK = ("qwen3", "qwen3_moe", "gemma3", "olmo2", "exaone4", "glm4_moe_normed", "olmoe")
DIFFERENCES: tuple[Difference, ...] = (
    Difference(_OUTPUTS, ("gemma2", "gemma3", *_POST), "nnterp's is the module's output; "
               "`attn_out` and `mlp_out` are after the norm that follows it, as added to the stream"),
    Difference(_OUTPUTS, _FACTORS, "nnterp's is the module's output; `attn_out` and `mlp_out` are that times "
               "the config's `residual_multiplier`, as added to the stream"),
    Difference(("token_embeddings",), _FACTORS, "nnterp's is the embedding's output; `embed` is that times the "
               "config's `embedding_multiplier`"),
    Difference(("token_embeddings",), ("gemma2",), "on Transformers 4 nnterp's is before the embedding is scaled; "
               "`embed` is after it, as nnterp's is on Transformers 5"),
    Difference(("attentions_input", "mlps_input"), _NO_PRE, "without a norm before attention and MLP, "
               "`attn_in` and `mlp_in` are not available: use their inputs, `resid_pre` and `resid_mid`"),
    Difference(("mlps_input", "mlps_output"), ("opt",), "not available in nnterp without an MLP module; "
               "ours are the input of `fc1` and the output of `fc2`"),
    Difference(("token_embeddings",), ("bloom",), "nnterp's is before the norm that "
               "follows the embedding; `embed` is after it, at the start of the stream"),
    Difference(("logits",), (), "nnterp's has a row for every position; ours only for sampled positions"),
    Difference(_QK, _NORMED_QK, "TransformerLens' is before the norm of queries and keys; "
               "`q` and `k` are after it, as rotary embedding reads them"),
    Difference(("embed.hook_out",), ("bloom",), "TransformerLens' is before the norm that follows the embedding; "
               "`embed` is after it, as `hook_embed` is"),
    Difference(("hook_embed", "embed.hook_out"), ("gemma4",), "the same tensor, but editing TransformerLens' also "
               "changes the embeddings that each layer reads; editing `embed` changes only the stream"),
    Difference(("hook_embed", "embed.hook_out", "blocks.{l}.ln1.hook_out", "blocks.{l}.hook_attn_out"), ("falcon_h1",),
               "TransformerLens' is before the config's factor (`embedding_multiplier`, `attention_in_multiplier`, "
               "`attention_out_multiplier`); ours is after it"),
    Difference(("blocks.{l}.ln1.hook_out", "blocks.{l}.ln2.hook_out"), _NO_PRE, "TransformerLens' is after "
               "attention and MLP; `attn_in` and `mlp_in` are not available: use `attn_out` and `mlp_out`"),
)  # fmt: skip


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{l\}", r"(?P<layer>\d{1,9})"))


_HOOKS = tuple((_pattern(name), site) for name, site in TRANSFORMER_LENS.items())
_EDITED_ELSEWHERE = tuple((_pattern(name), why) for name, why in EDITED_ELSEWHERE.items())
_ELSEWHERE = tuple((_pattern(name), why) for name, why in ELSEWHERE.items())


def hook(text: str) -> tuple[str, int | None] | None:
    """Return the site and layer of a TransformerLens hook name; None if it is not an alias."""
    for pattern, site in _HOOKS:
        if match := pattern.fullmatch(text):
            layer = match.groupdict().get("layer")
            return site, None if layer is None else int(layer)
    return None


def edited_elsewhere(text: str) -> str | None:
    """Return the reason to reject an edit at a TransformerLens name, with a suggestion; None for other names."""
    for pattern, why in _EDITED_ELSEWHERE:
        if match := pattern.fullmatch(text):
            return f"{text}: {why.format(l=match['layer'])}"
    return None


def elsewhere(text: str) -> UnknownName | None:
    """Return the error, with a suggestion, for a TransformerLens or nnterp name without a site here; else None."""
    for pattern, why in _ELSEWHERE:
        if match := pattern.fullmatch(text.partition("[")[0].strip()):
            return UnknownName(f"{text} {why.format(l=match.groupdict().get('layer'))}")
    return None


class Site(PublicStruct, frozen=True):
    """A named tensor: its name, its layers (None: all), and an index within its row (None: the whole row)."""

    name: str
    layers: Indices | None = None
    index: Index | None = None

    def __post_init__(self) -> None:
        spec = SPECS.get(self.name) if isinstance(self.name, str) else None
        if spec is None:
            raise unknown("site", self.name, SPECS)
        msgspec.structs.force_setattr(self, "layers", as_indices(self.layers))
        msgspec.structs.force_setattr(self, "index", as_index(self.index))
        if self.layers is not None and not spec.layered:
            raise ProgramError(f"{self.name} has no layers: write {self.name!r} without brackets")
        if self.index is not None and not spec.index:
            raise ProgramError(f"{self.name} takes a layer but no second index")

    def __getitem__(self, key: IndicesLike | tuple[IndicesLike, IndexLike]) -> Site:
        if self.layers is not None or self.index is not None:
            raise ProgramError(f"{self} is already indexed")
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > 2:
            raise ProgramError(f"expected a layer and at most one index, got {len(keys)}")
        if any(key is None for key in keys):
            raise ProgramError(f"expected a layer or a range, got None; for all layers, omit the brackets: {self.name}")
        return Site(self.name, *keys)  # pyright: ignore[reportArgumentType]  converted by __post_init__

    def __matmul__(self, tokens: Selection | str) -> At:
        return At(self, parse_tokens(tokens))

    def __str__(self) -> str:
        if self.layers is None and self.index is None:
            return self.name
        layers = self.layers
        layers = ":" if layers is None else str(list(layers)) if isinstance(layers, tuple) else str(layers)
        return f"{self.name}[{layers}]" if self.index is None else f"{self.name}[{layers}, {self.index}]"

    def __repr__(self) -> str:
        return f"pc.{self}"


class At(PublicStruct, frozen=True):
    """A site at a selection of tokens, for `capture=` and `at=`. Prints as `z[5, 3] @ prompt[-1]`.

    `@` binds tighter than `|`, `&` and `-`, but in `pc.embed @ pc.generated & pc.token(13)`, `&` joins the selections.
    """

    site: Site
    tokens: Selection

    def __or__(self, other: TokensLike) -> At:
        return At(self.site, self.tokens | other)

    def __and__(self, other: TokensLike) -> At:
        return At(self.site, self.tokens & other)

    def __sub__(self, other: TokensLike) -> At:
        return At(self.site, self.tokens - other)

    def __str__(self) -> str:
        return f"{self.site} @ {self.tokens}"


def parse_edited_site(text: Site | str) -> Site:
    """Parse a site for an edit. Raises `UnsupportedSite` for attention patterns, and for a TransformerLens name
    whose edits have a different effect in TransformerLens."""
    site = parse_site(text)
    if site.name in DERIVED:
        raise UnsupportedSite(f"expected a site that is a tensor, got {site}: use q, k, v or z")
    if isinstance(text, str) and (reason := edited_elsewhere(text.strip())):
        raise UnsupportedSite(reason)
    return site


_BRACKETS = re.compile(
    r"\s*(?P<name>[A-Za-z_][\w.]*)\s*(?:\[\s*(?:\[(?P<layers>[^\[\]]*)\]\s*,?)?(?P<keys>[^\[\]]*)\])?\s*"
)


MAX_TEXT = 1 << 12  # characters of a site's text form


_MODULE_PATH = re.compile(r"(?:\w+\.)*(?:layers|h|blocks)[.\[](?P<layer>\d+)\]?(?:\.(?:\w+\.)*(?P<module>\w+))?")
_ATTENTION = "attn_out[{0}] is its output, attn_in[{0}] its input, z[{0}, 3] one head"
_MODULES = {  # the sites at a layer's module, by the last part of its path; "" is the layer
    "": "resid_post[{0}] is its output, resid_pre[{0}] its input",
    **dict.fromkeys(("self_attn", "attn", "attention"), _ATTENTION),
    "o_proj": "attn_out[{0}] is its output, z[{0}] its input",
    **{f"{name}_proj": f"{name}[{{0}}] is its output" for name in "qkv"},
    "mlp": "mlp_out[{0}] is its output, mlp_in[{0}] its input",
    "down_proj": "mlp_out[{0}] is its output, neurons[{0}] its input",
    "input_layernorm": "attn_in[{0}] is its output, resid_pre[{0}] its input",
}


def parse_site(text: Site | str | tuple[Any, ...]) -> Site:
    """Parse a site from its text form, a tuple of name and layer (`("resid_post", 12)`), or its TransformerLens or
    nnterp name; return a `Site` unchanged.

    Raises `UnknownName` for an unknown name (with a suggestion for TransformerLens and nnterp names), and
    `ProgramError` for malformed text.
    """
    if isinstance(text, Site):
        return text
    if isinstance(text, tuple) and 1 < len(text) < 4 and isinstance(text[0], str):  # ("resid_post", 12)
        return parse_site(text[0])[text[1] if len(text) == 2 else text[1:]]
    if not isinstance(text, str):
        raise ProgramError(f"expected a site such as 'resid_post[12]', got {type(text).__name__} {text!r}")
    if len(text) > MAX_TEXT:
        raise ProgramError(f"expected a site of at most {MAX_TEXT} characters, got {len(text)}")
    if hooked := hook(text.strip()):
        return Site(*hooked)
    if reason := elsewhere(text.strip()):
        raise reason
    module = _MODULE_PATH.fullmatch(text.strip())
    if module is not None and (sites := _MODULES.get(module["module"] or "")):
        raise UnknownName(f"expected a site, got the module {text!r}: {sites.format(module['layer'])}")
    words = _BRACKETS.fullmatch(text)
    if words is None:
        raise ProgramError(f"invalid site {text!r}; expected a form such as 'resid_post[12]' or 'z[5, 3]'")
    name = NNTERP.get(words["name"], words["name"])
    if name not in SPECS:
        raise unknown("site", name, SPECS)
    listed = [] if words["layers"] is None else [tuple(parse_index(key) for key in words["layers"].split(","))]
    keys = [] if words["keys"] is None or (listed and not words["keys"].strip()) else words["keys"].split(",")
    if len(listed) + len(keys) > 2:
        raise ProgramError(f"{text!r}: expected a layer and at most one index")
    return Site(name, *listed, *(parse_index(key) for key in keys))  # pyright: ignore[reportArgumentType]


def is_stacked(at: Site) -> bool:
    """True if a site's rows have a leading layer axis."""
    return SPECS[at.name].layered and not isinstance(at.layers, int)
