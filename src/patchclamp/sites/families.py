"""The structs and helpers of site tables, and the tables of hybrid families (state space or linear attention).

A site table maps each named tensor of a model family to modules on both engines. A *point* is a tensor that can be read
and written, or the pair of tensors whose sum is the stream. A site is a point of its layer or of a later one:
`resid_post[l]` and `resid_pre[l+1]` are one point.

    D model width · V vocabulary · Q all query heads · K all key/value heads · Z all heads' results · M MLP width
    X experts · l layer
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import msgspec

from patchclamp.errors import ModelError
from patchclamp.language.site import SITES
from patchclamp.language.site import Width as Size

Moment = Literal["in", "out", "attention"]
# Layers whose mixer is attention or recurrent (a state space, linear attention), and layers with an ordinary MLP
# (`dense`), with experts (`sparse`), or with either (`mlp`)
Layers = Literal["all", "attention", "recurrent", "mlp", "dense", "sparse"]


class Tap(msgspec.Struct, frozen=True):
    """A tensor at a module's input or output.

    module: its path, `{l}` a layer
    moment: its input (`in`), its output (`out`), or the result that vLLM's attention layer computes (`attention`)
    hidden: the number of the positional argument, or the name of the keyword argument; for `out`, the item of a tuple
    residual: the same for the second tensor, if the engine carries the stream as a sum of two; None: no second tensor
    of: the widths of several tensors packed side by side in this one; empty: not packed
    part: the index of the point's tensor among them
    mixed: True if they are packed within each key/value head, next to the queries that read it
    by_head: True if the tensor is [B, H, T, E]
    scale: a factor, or the config's name of one; the site is the tensor times this factor
    rerun: True if an edit reruns the module, because its other results depend on the tensor (a router's choice)
    copied: True if the module gets a copy of its input, because another module reads the same tensor
    """

    module: str
    moment: Moment
    hidden: int | str = 0
    residual: int | str | None = None
    of: tuple[Size, ...] = ()
    part: int = 0
    mixed: bool = False
    by_head: bool = False
    scale: str | float = ""
    rerun: bool = False
    copied: bool = False


class PointKind(msgspec.Struct, frozen=True):
    """One kind of point, on both engines.

    transformers, vllm: its tap
    width: the size of its rows
    layout: the layout of a row under tensor parallelism
    per_layer: True if layers have one each; otherwise the model has one, such as the point after the last layer
    rows: one for each token of a step, or only for those that are sampled from
    layers: the kind of layers that have it, or their numbers
    elsewhere: the point kind that its site resolves to in the other layers
    """

    transformers: Tap
    vllm: Tap
    width: Size = "D"
    layout: Literal["replicated", "sharded", "partial sum"] = "replicated"
    per_layer: bool = True
    rows: Literal["tokens", "sampled"] = "tokens"
    layers: Layers | tuple[int, ...] = "all"
    elsewhere: str = ""


STREAM: dict[str, tuple[str, int]] = {  # sites without a point kind of that name: (kind, layers to shift by)
    "embed": ("stream", 0), "resid_pre": ("stream", 0), "resid_mid": ("mid", 0), "resid_post": ("stream", 1),
}  # fmt: skip

PARALLEL = "attention and MLP both read the stream before the layer, and none is between them"  # the reason in `lacks`


class Family(msgspec.Struct, frozen=True, dict=True):
    """Model classes that share one table.

    points: point kinds by name, which is a site, or a name of the stream (`STREAM`)
    lacks: the sites that it does not have, and why
    needs: settings that a config must have; a string is the name of another setting with the required value
    backend: True if vLLM runs it through its Transformers backend, which creates the modules of the vLLM taps
    tabled: False if the table was derived from a module tree rather than declared in `sites.tables`
    divided_by: the config's name of the number that vLLM divides the stream by in float16
    gated: True if a gate multiplies the result of attention, before `z`
    both: True if each layer has attention and a state space in parallel, and both add to the stream
    afterwards: a description of what follows the MLP, if a layer's end is not `resid_mid` + `mlp_out`
    """

    name: str
    architectures: tuple[str, ...]
    points: dict[str, PointKind]
    lacks: dict[str, str] = {}
    needs: dict[str, str | bool | int | None] = {}
    backend: bool = False
    tabled: bool = True
    divided_by: str = ""
    gated: bool = False
    both: bool = False
    afterwards: str = ""

    @property
    def parallel(self) -> bool:
        """True if a layer's attention and MLP read the same stream, and neither reads the other's result."""
        return self.lacks.get("resid_mid") == PARALLEL

    @functools.cached_property
    def sites(self) -> dict[str, tuple[str, int]]:
        """Its sites, each with its point kind and the number of layers by which its point is later."""
        kinds = {word: (word, 0) if word in self.points else STREAM.get(word, (word, 0)) for word in SITES}
        return {word: at for word, at in kinds.items() if at[0] in self.points and word not in self.lacks}


class Sizes(msgspec.Struct, frozen=True):
    """The number of a model's layers, and the widths of its rows.

    sparse: the layers whose MLP is a mixture of experts
    recurrent: the layers whose mixer is a state space or linear attention
    no_mixer, no_mlp: the layers that are only an MLP, or only a mixer
    d_result: the width of a head's result, if it is not `d_head`
    factors: multipliers of the model, by their names in the config
    """

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
    recurrent: tuple[int, ...] = ()
    no_mixer: tuple[int, ...] = ()
    no_mlp: tuple[int, ...] = ()

    def layers_with(self, kind: Layers | tuple[int, ...]) -> list[int]:
        """The layers of a kind; explicit layers are returned as a list."""
        if isinstance(kind, tuple):
            return list(kind)
        every = set(range(self.layers))
        with_mlp, sparse, recurrent = every - set(self.no_mlp), set(self.sparse), set(self.recurrent)
        return sorted({"all": every, "attention": every - recurrent - set(self.no_mixer), "recurrent": recurrent,
                       "mlp": with_mlp, "dense": with_mlp - sparse, "sparse": sparse}[kind])  # fmt: skip

    def __getitem__(self, size: Size) -> int:
        return {"D": self.d_model, "V": self.d_vocab, "Q": self.heads * self.d_head, "K": self.kv_heads * self.d_head,
                "Z": self.heads * (self.d_result or self.d_head), "M": self.d_mlp, "X": self.experts}[size]  # fmt: skip

    def factor(self, scale: str | float) -> float:
        """The value of a tap's `scale`, default 1."""
        if not scale:
            return 1.0
        return self.factors[scale] if isinstance(scale, str) else scale

    def parts(self, size: Size) -> tuple[int, int]:
        """The number of heads, neurons or experts in a row, and the width of each."""
        heads = {"Q": self.heads, "K": self.kv_heads, "Z": self.heads}
        count = heads.get(size, self[size])
        return count, self[size] // max(count, 1)


def sizes_of(config: Any, d_vocab: int | None = None) -> Sizes:
    """Read the sizes from a Transformers config, under any of their names. If layers differ in heads, or have no heads,
    the number of heads is 0, and sites cannot be indexed by head.

    Raises `ModelError` if the config does not give a number of layers and one width for all of them.
    """

    def setting(*names: str, otherwise: Any = None) -> Any:
        return next((value for name in names if (value := _setting(config, name)) is not None), otherwise)

    width, layers = (_single(config, name) for name in ("hidden_size", "num_hidden_layers"))
    kinds = layer_kinds(config, layers)
    heads = setting("num_attention_heads", otherwise=0)
    experts = setting("num_local_experts", "num_experts", "n_routed_experts", otherwise=0)
    return Sizes(
        layers, width, d_vocab or config.vocab_size, heads, _kv_heads(config, heads),
        setting("head_dim", otherwise=width // max(heads, 1)),
        setting(*MLP_WIDTHS, otherwise=4 * width), experts,
        _sparse(config, kinds) if experts else (), setting("v_head_dim", otherwise=0),
        {name: float(getattr(config, name)) for name in FACTORS if getattr(config, name, None) is not None},
        _of_kinds(kinds, "recurrent"), _of_kinds(kinds, "mlp", "experts"),
        _of_kinds(kinds, "recurrent", "attention") if {"mlp", "experts"} & set(kinds) else (),
    )  # fmt: skip


def architectures_of(config: Any) -> list[str]:
    """The config's `architectures`, or else the name of its own class."""
    return list(getattr(config, "architectures", None) or [type(config).__name__])


def _single(config: Any, name: str) -> int:
    """A setting that is one number for all layers, or `ModelError`."""
    value = _setting(config, name)
    if value is not None:
        return value
    raise ModelError(
        f"the config of {', '.join(architectures_of(config))} does not tell one {name} for all layers: sites are those "
        "of decoders whose layers are alike"
    )


def _setting(config: Any, name: str) -> int | None:
    """A setting, if it is one number for all layers; otherwise None."""
    try:
        value = getattr(config, name, None)
    except Exception:  # Transformers' error for one that differs between layers
        return None
    return value if isinstance(value, int) else None


MLP_WIDTHS = (
    "ffn_dim",
    "intermediate_size_mlp",
    "n_inner",
    "ffn_hidden_size",
    "shared_intermediate_size",
    "intermediate_size",
)
FACTORS = ("residual_multiplier", "attention_out_multiplier", "ssm_out_multiplier")


def _kv_heads(config: Any, heads: int) -> int:
    one_for_all = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    names = ("num_key_value_heads", "num_kv_heads")
    return 1 if one_for_all else next((n for name in names if (n := _setting(config, name)) is not None), heads)


KINDS = {  # config names of layer kinds, including those of layers that are only an MLP
    "M": "recurrent", "mamba": "recurrent", "mamba2": "recurrent", "linear_attention": "recurrent",
    "conv": "recurrent", "*": "attention", "-": "mlp", "mlp": "mlp", "E": "experts", "moe": "experts",
}  # fmt: skip


def layer_kinds(config: Any, layers: int) -> list[str]:
    """The kind of each layer in a config: a layer with `attention`, with a `recurrent` mixer, or only an `mlp` or
    `experts`. If the config lists no kinds, all layers have attention."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    said = next((list(kinds) for name in names if (kinds := getattr(config, name, None))), [])
    return [KINDS.get(kind, "attention") for kind in said] if len(said) == layers else ["attention"] * layers


def _of_kinds(kinds: list[str], *which: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind in which)


def _sparse(config: Any, kinds: list[str]) -> tuple[int, ...]:
    """The layers with experts."""
    if {"mlp", "experts"} & set(kinds):
        return _of_kinds(kinds, "experts")
    if (listed := getattr(config, "moe_layers", None)) is not None:
        return tuple(listed)
    if (period := getattr(config, "expert_layer_period", None)) is not None:
        return tuple(range(config.expert_layer_offset, len(kinds), period))
    names = "decoder_sparse_step", "moe_layer_freq", "moe_layer_interval"
    every = next((step for name in names if (step := getattr(config, name, None))), 1)
    if isinstance(every, list | tuple):  # one flag per layer, as in MiMo V2
        return tuple(layer for layer, is_sparse in enumerate(every) if is_sparse)
    shift = any(hasattr(config, name) for name in ("decoder_sparse_step", "moe_layer_interval"))  # these count from 1
    first = getattr(config, "first_k_dense_replace", getattr(config, "moe_layer_start_index", 0))
    end = getattr(config, "moe_layer_end_index", -1) % len(kinds) + 1
    dense = getattr(config, "mlp_only_layers", None) or ()
    return tuple(layer for layer in range(first, end) if (layer + shift) % every == 0 and layer not in dense)


L, NORM = "model.layers.{l}", "model.norm"
ATTENTION, MLP = L + ".self_attn", L + ".mlp"
QKV: tuple[Size, ...] = ("Q", "K", "K")
PARTS: tuple[tuple[str, Size], ...] = (("q", "Q"), ("k", "K"), ("v", "K"))
ATTENTION_ONLY = {"mixer_out": "each of its layers has attention: what that adds is attn_out"}
NO_EXPERTS = ATTENTION_ONLY | {"router": "its layers have one MLP each, and no experts to choose from"}
FUSED = ATTENTION_ONLY | {"neurons": "its experts run in one fused kernel, which keeps what they hold to itself"}


def kind(transformers: Tap, vllm: Tap | None = None, width: Size = "D", **rest: Any) -> PointKind:
    """Make a point kind from its taps; `vllm` defaults to the same tap. `rest`: other fields of `PointKind`."""
    return PointKind(transformers, transformers if vllm is None else vllm, width, **rest)


def same(
    module: str, moment: Moment = "out", width: Size = "D", hidden: int | str = 0, copied: bool = False, **rest: Any
) -> PointKind:
    """Make a point kind with the same tap on both engines."""
    return kind(Tap(module, moment, hidden, copied=copied), width=width, **rest)


def sharded(transformers: Tap, vllm: Tap | None = None, width: Size = "Q", **rest: Any) -> PointKind:
    return kind(transformers, vllm, width, layout="sharded", **rest)


def results(o_proj: str, attention: str) -> PointKind:
    """The heads' results: the input of the output projection; on vLLM the result of the attention layer."""
    return sharded(Tap(o_proj, "in"), Tap(attention, "attention"))


def projections(transformers: str, vllm: str, *words: str) -> dict[str, PointKind]:
    """Queries, keys or values, selected by `words`: on Transformers each is the output of its own projection (`{w}` is
    the word), on vLLM a part of the output of a merged projection."""
    return {
        word: sharded(Tap(transformers.format(w=word, l="{l}"), "out"), Tap(vllm, "out", of=QKV, part=part), width)
        for part, (word, width) in enumerate(PARTS)
        if word in words
    }


def merged(
    module: str, transformers: str | None = None, mixed: bool = False, regrouped: bool = False
) -> dict[str, PointKind]:
    """Queries, keys and values, packed in the output of one projection on both engines: `mixed` within each head, or
    mixed on Transformers alone if vLLM has `regrouped` them."""

    def tap(module: str, part: int, mixed: bool) -> Tap:
        return Tap(module, "out", of=QKV, part=part, mixed=mixed)

    return {
        word: sharded(tap(transformers or module, part, mixed or regrouped), tap(module, part, mixed), width)
        for part, (word, width) in enumerate(PARTS)
    }


def end(transformers: str, vllm: str | None = None, pair: bool = False) -> dict[str, PointKind]:
    """The stream after the last layer, the result of its norm, and the logits."""
    vllm = vllm or transformers
    return {
        "stream_end": kind(Tap(transformers, "in"), Tap(vllm, "in", 0, 1 if pair else None), per_layer=False),
        "final_norm": kind(Tap(transformers, "out"), Tap(vllm, "out"), per_layer=False),
        "logits": kind(Tap("lm_head", "out"), Tap("compute_logits", "out"), "V", per_layer=False, rows="sampled"),
    }


def without(family: Family, name: str, architectures: str, why: dict[str, str], **points: PointKind) -> Family:
    """Derive a family from another: change some `points`, and remove the sites of `why`."""
    gone = {STREAM.get(word, (word, 0))[0] for word in why} - set(points)
    kinds = {name: kind for name, kind in (family.points | points).items() if name not in gone}
    return Family(name, tuple(architectures.split()), kinds, why)


def on_backend(family: Family) -> Family:
    """The family on vLLM's Transformers backend: its vLLM taps are that backend's modules."""
    return msgspec.structs.replace(family, backend=True)


def in_attention(family: Family) -> dict[str, PointKind]:
    """The family's points of attention, for a family with attention in some layers only."""
    return {
        word: msgspec.structs.replace(kind, layers="attention")
        for word, kind in family.points.items()
        if word in SITES and SITES[word].block == "attention"
    }


def recurrent(tap: Tap, vllm: Tap | None = None) -> PointKind:
    """The output of a state space or linear attention, in the layers with such a mixer."""
    return kind(tap, vllm, layers="recurrent", elsewhere="attn_out")


_NO_EXPERTS = {"router": NO_EXPERTS["router"]}
_NO_ATTENTION = "none of its layers has attention"
_KEYWORDS = Tap(L, "in", "hidden_states", "residual")  # vLLM passes these by keyword


def hybrids(llama: Family, granite: Family) -> tuple[Family, ...]:
    """The tables of hybrid families; some are derived from Llama's and Granite's."""
    return (
        _granite(granite),
        _granite_experts(granite),
        _qwen3_next(llama),
        _nemotron_h(),
        MAMBA2,
        _falcon_h1(llama),
        _jamba(llama),
    )


def _granite(granite: Family) -> Family:
    family = without(
        granite, "granite_hybrid", "GraniteMoeHybridForCausalLM", _NO_EXPERTS, **in_attention(granite),
        mixer_out=recurrent(Tap(L + ".mamba", "out", scale="residual_multiplier")),
        stream=kind(Tap(L, "in"), Tap(L, "in", "hidden_states")),
        neurons=sharded(Tap(L + ".shared_mlp.output_linear", "in"), width="M"),
        mlp_out=kind(Tap(L + ".shared_mlp", "out", scale="residual_multiplier")),
    )  # fmt: skip
    return msgspec.structs.replace(family, needs={"num_local_experts": 0})


def _granite_experts(granite: Family) -> Family:
    summed = "its experts and its shared MLP are added to each other and to the stream outside of any module"
    return without(
        _granite(granite), "granite_hybrid_experts", "GraniteMoeHybridForCausalLM",
        {"mlp_out": summed, "neurons": "its experts run in one fused kernel, beside a shared MLP",
         "router": "its router is inside the module that runs its experts"},
    )  # fmt: skip


def _qwen3_next(llama: Family) -> Family:
    fused = "on a GPU vLLM norms them in the kernel that rotates them, and no module makes them alone"
    family = without(
        llama, "qwen3_next", "Qwen3NextForCausalLM Qwen3_5ForCausalLM", {"q": fused, "k": fused},
        **in_attention(llama) | {"z": sharded(Tap(ATTENTION + ".o_proj", "in"), layers="attention"), "v": sharded(
            Tap(ATTENTION + ".v_proj", "out"), Tap(ATTENTION + ".qkv_proj", "out", of=("Q", "Q", "K", "K"), part=3),
            "K", layers="attention")},
        mixer_out=recurrent(Tap(L + ".linear_attn", "out")), stream=kind(Tap(L, "in"), _KEYWORDS),
        neurons=sharded(Tap(MLP + ".down_proj", "in"), width="M", layers="dense"),
        router=kind(Tap(MLP + ".gate", "out", rerun=True), Tap(MLP + ".gate", "out"), "X", layers="sparse"),
    )  # fmt: skip
    points = {word: kind for word, kind in family.points.items() if word not in family.lacks}
    return msgspec.structs.replace(family, gated=True, points=points)


_FORWARD = L + ".feed_forward"


def _feed_forward(**rest: Any) -> dict[str, PointKind]:
    """The points of an MLP named `feed_forward`."""
    return {
        "mlp_in": same(L + ".pre_ff_layernorm"),
        "neurons": sharded(Tap(_FORWARD + ".down_proj", "in"), width="M", **rest),
        "mlp_out": same(_FORWARD),
    }


def _falcon_h1(llama: Family) -> Family:
    """Falcon-H1: attention and a state space read the normed stream, each times its own factor, and both add to it."""
    family = without(
        llama, "falcon_h1", "FalconH1ForCausalLM", _NO_EXPERTS, **_feed_forward(), **end("model.final_layernorm"),
        stream=kind(Tap(L, "in"), Tap(L, "in", "hidden_states")), mid=same(L + ".pre_ff_layernorm", "in"),
        attn_in=same(ATTENTION, "in", hidden="hidden_states"),
        attn_out=kind(Tap(ATTENTION, "out", scale="attention_out_multiplier")),
        mixer_out=kind(Tap(L + ".mamba", "out", scale="ssm_out_multiplier")),
    )  # fmt: skip
    return msgspec.structs.replace(family, both=True)


def _jamba(llama: Family) -> Family:
    """Jamba: vLLM's state space writes into an output argument, so its result is read as the next norm's input."""
    norm = L + ".pre_ff_layernorm"
    vllm = projections(ATTENTION + ".{w}_proj", L + ".qkv_proj", "q", "k", "v") | {
        "z": results(ATTENTION + ".o_proj", L + ".attn"), "attn_in": same(L + ".input_layernorm"),
        "attn_out": kind(Tap(ATTENTION, "out"), Tap(L + ".o_proj", "out")),
    }  # fmt: skip
    mixer = recurrent(Tap(L + ".mamba", "out"), Tap(norm, "in"))
    family = without(
        llama, "jamba", "JambaForCausalLM", {}, **_feed_forward(layers="dense"),
        **end("model.final_layernorm", pair=True),
        **{word: msgspec.structs.replace(kind, layers="attention") for word, kind in vllm.items()},
        stream=kind(Tap(L, "in"), _KEYWORDS), mid=kind(Tap(norm, "in"), Tap(norm, "in", 0, 1)),
        router=kind(Tap(_FORWARD + ".router", "out"), width="X", layers="sparse"),
    )  # fmt: skip
    return msgspec.structs.replace(
        family, points={"mixer_out": mixer, **family.points}
    )  # `mixer_out` first: it is tapped before `mid` at the same norm


_MIXER = L + ".mixer"


def _nemotron_h() -> Family:
    """Nemotron-H: each layer is one block: attention, a state space, an MLP or experts."""
    attention = {
        "attn_in": same(L + ".norm"),
        **projections(_MIXER + ".{w}_proj", _MIXER + ".qkv_proj", "q", "k", "v"),
        "z": results(_MIXER + ".o_proj", _MIXER + ".attn"),
        "attn_out": same(_MIXER),
    }
    points = {
        "stream": kind(Tap(L, "in"), _KEYWORDS),
        **{word: msgspec.structs.replace(kind, layers="attention") for word, kind in attention.items()},
        "mixer_out": recurrent(Tap(_MIXER, "out")),
        "mlp_in": same(L + ".norm", layers="mlp"),
        "router": kind(Tap(_MIXER + ".gate", "out", rerun=True), Tap(_MIXER + ".gate", "out"), "X", layers="sparse"),
        "neurons": sharded(Tap(_MIXER + ".down_proj", "in"), width="M", layers="dense"),
        "mlp_out": same(_MIXER, layers="mlp"),
        **end("model.norm_f", pair=True),
    }
    alone = {"resid_mid": "each of its layers is a mixer or an MLP alone, and nothing is between them"}
    return Family("nemotron_h", ("NemotronHForCausalLM",), points, alone)


def _in_a(block: str) -> list[str]:
    """The sites of a block, except `mixer_out`. `resid_mid` counts as a site of the MLP."""
    named = [word for word, spec in SITES.items() if spec.block == block and word != "mixer_out"]
    return named + (["resid_mid"] if block == "mlp" else [])


_B = "backbone.layers.{l}"
MAMBA2 = Family(
    name="mamba2",
    architectures=("Mamba2ForCausalLM",),
    points={
        "stream": kind(Tap(_B, "in"), Tap(_B, "in", "hidden_states", "residual")),
        "mixer_out": recurrent(Tap(_B + ".mixer", "out")),
        **end("backbone.norm_f", pair=True),
    },
    lacks=dict.fromkeys(_in_a("attention"), _NO_ATTENTION) | dict.fromkeys(_in_a("mlp"), "its layers have no MLP"),
)
