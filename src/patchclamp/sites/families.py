"""The structs of a site table, which says at which modules each named tensor of a model family is, on both engines.

A *point* is a place in the model where a tensor can be read and written, or the pair of tensors whose sum is the
stream.  A site word names a point, of its layer or of a later one: `resid_post[l]` and `resid_pre[l+1]` are one point.

    D model width · V vocabulary · Q all query heads · K all key/value heads · Z all heads' results · M MLP width
    X experts · l layer

What site tables are written with: kinds of points, and groups of them.

The tables of families in which some layers have a state space or linear attention for attention.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import msgspec

from patchclamp.errors import ModelError
from patchclamp.language.site import SITES
from patchclamp.language.site import Width as Size

Moment = Literal["in", "out", "attention"]
# those whose mixer is attention, or a recurrent one (a state space, linear attention); those with an ordinary MLP
# (`dense`), with experts (`sparse`), or with either (`mlp`)
Layers = Literal["all", "attention", "recurrent", "mlp", "dense", "sparse"]


class Tap(msgspec.Struct, frozen=True):
    """A tensor at a module's border.

    module: its path, `{l}` a layer
    moment: its input (`in`), its output (`out`), or the result that vLLM's attention layer computes (`attention`)
    hidden: the number of the positional argument, or the name of the keyword argument; for `out`, the item of a tuple
    residual: the same for the second tensor, where the engine carries the stream as the sum of two; None is no tensor
    of: if several tensors lie side by side in it, their widths
    part: which of them the point is
    mixed: whether they lie side by side within each key/value head, with the queries that read it
    by_head: whether the tensor is [B, H, T, E]
    scale: a factor, or the config's name of one; the site is the tensor times this factor
    rerun: whether an edit runs the module again, because it made its other results of the tensor (a router's choice)
    copied: whether the module is handed a copy of its input, because another module reads the same tensor
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
    layout: how a row lies under tensor parallel
    per_layer: whether it is in layers; otherwise the model has one, such as the point after the last layer
    rows: the tokens of a step, or only those that are sampled from
    layers: which layers have it: those of a kind, or these
    elsewhere: the point kind that its word names in the layers that do not have it
    """

    transformers: Tap
    vllm: Tap
    width: Size = "D"
    layout: Literal["replicated", "sharded", "partial sum"] = "replicated"
    per_layer: bool = True
    rows: Literal["tokens", "sampled"] = "tokens"
    layers: Layers | tuple[int, ...] = "all"
    elsewhere: str = ""


STREAM: dict[str, tuple[str, int]] = {  # words without a kind of point of that name: (kind, layers to shift by)
    "embed": ("stream", 0), "resid_pre": ("stream", 0), "resid_mid": ("mid", 0), "resid_post": ("stream", 1),
}  # fmt: skip

PARALLEL = "attention and MLP both read the stream before the layer, and none is between them"  # why no resid_mid


class Family(msgspec.Struct, frozen=True, dict=True):
    """Model classes that share one table.

    points: its point kinds by name, which is a site word, or a name of the stream (`STREAM`)
    lacks: the words that it does not have, and why
    needs: settings that a config must have; a text is the name of another setting, whose value it must be
    backend: whether vLLM runs it through its Transformers backend, which makes the modules of the vLLM taps
    tabled: whether the table is in `sites.tables`, and not made from a module tree
    divided_by: the config's name of the number that vLLM divides the stream by in float16
    gated: whether a gate multiplies what attention computes, before `z`
    both: whether each layer has attention and a state space, side by side: both add to the stream
    afterwards: what a layer does to the stream after its MLP, so that its end is not `resid_mid` and `mlp_out` alone
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
        """True if attention and MLP of a layer read the same stream, so that neither reads the other."""
        return self.lacks.get("resid_mid") == PARALLEL

    @functools.cached_property
    def sites(self) -> dict[str, tuple[str, int]]:
        """The words it has, each with its point kind, and how many layers later its point is."""
        kinds = {word: (word, 0) if word in self.points else STREAM.get(word, (word, 0)) for word in SITES}
        return {word: at for word, at in kinds.items() if at[0] in self.points and word not in self.lacks}


class Sizes(msgspec.Struct, frozen=True):
    """How many layers a model has, and how wide its rows are.

    sparse: the layers whose MLP is a mixture of experts
    recurrent: the layers whose mixer is a state space or linear attention
    no_mixer, no_mlp: the layers that are an MLP alone, or a mixer alone
    d_result: the width of a head's result, if it is not `d_head`
    factors: numbers that the model multiplies by, by their names in the config
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
        """The layers of a kind, or the layers given."""
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
        """A factor of a tap; 1 where it has none."""
        if not scale:
            return 1.0
        return self.factors[scale] if isinstance(scale, str) else scale

    def parts(self, size: Size) -> tuple[int, int]:
        """How many heads, neurons or experts a row of a width has, and how wide each is."""
        heads = {"Q": self.heads, "K": self.kv_heads, "Z": self.heads}
        count = heads.get(size, self[size])
        return count, self[size] // max(count, 1)


def sizes_of(config: Any, d_vocab: int | None = None) -> Sizes:
    """The sizes in a Transformers config, whatever it calls them. Where its layers differ in heads, or have none, there
    are 0: no site is cut into heads then.

    Raises: `ModelError` if it does not have one width for all layers, and a number of them.
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
    """The model classes that a config names, or else its own class."""
    return list(getattr(config, "architectures", None) or [type(config).__name__])


def _single(config: Any, name: str) -> int:
    """A setting that is one number for all layers."""
    value = _setting(config, name)
    if value is not None:
        return value
    raise ModelError(
        f"the config of {', '.join(architectures_of(config))} does not tell one {name} for all layers: sites are those "
        "of decoders whose layers are alike"
    )


def _setting(config: Any, name: str) -> int | None:
    """A setting, if it is one number for all layers."""
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


KINDS = {  # how configs name what a layer is, where one is an MLP alone too
    "M": "recurrent", "mamba": "recurrent", "mamba2": "recurrent", "linear_attention": "recurrent",
    "conv": "recurrent", "*": "attention", "-": "mlp", "mlp": "mlp", "E": "experts", "moe": "experts",
}  # fmt: skip


def layer_kinds(config: Any, layers: int) -> list[str]:
    """What each layer is, by its config: a layer with `attention`, with a `recurrent` mixer, or an `mlp` or `experts`
    alone. Of a config that does not say, all layers have attention."""
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
    if isinstance(every, list | tuple):  # one number a layer, as MiMo V2 has it
        return tuple(layer for layer, is_sparse in enumerate(every) if is_sparse)
    shift = any(hasattr(config, name) for name in ("decoder_sparse_step", "moe_layer_interval"))  # they count from one
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
    """A kind of point, of its tap on Transformers and on vLLM, which is the same if it is not given. `rest`: other
    fields of `PointKind`."""
    return PointKind(transformers, transformers if vllm is None else vllm, width, **rest)


def same(
    module: str, moment: Moment = "out", width: Size = "D", hidden: int | str = 0, copied: bool = False, **rest: Any
) -> PointKind:
    """A kind whose tap is the same on both engines."""
    return kind(Tap(module, moment, hidden, copied=copied), width=width, **rest)


def sharded(transformers: Tap, vllm: Tap | None = None, width: Size = "Q", **rest: Any) -> PointKind:
    return kind(transformers, vllm, width, layout="sharded", **rest)


def results(o_proj: str, attention: str) -> PointKind:
    """The heads' results: the input of the output projection; on vLLM what the attention layer computes."""
    return sharded(Tap(o_proj, "in"), Tap(attention, "attention"))


def projections(transformers: str, vllm: str, *words: str) -> dict[str, PointKind]:
    """Queries, keys or values, by their `words`: on Transformers each is the output of a projection of its own (`{w}`
    is the word), on vLLM a part of the output of a merged one."""
    return {
        word: sharded(Tap(transformers.format(w=word, l="{l}"), "out"), Tap(vllm, "out", of=QKV, part=part), width)
        for part, (word, width) in enumerate(PARTS)
        if word in words
    }


def merged(
    module: str, transformers: str | None = None, mixed: bool = False, regrouped: bool = False
) -> dict[str, PointKind]:
    """Queries, keys and values, side by side in the output of one projection on both engines: `mixed` head by head, or
    so on Transformers alone, where vLLM has `regrouped` them."""

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
    """A family like another, with some `points` changed, and without the words of `why`."""
    gone = {STREAM.get(word, (word, 0))[0] for word in why} - set(points)
    kinds = {name: kind for name, kind in (family.points | points).items() if name not in gone}
    return Family(name, tuple(architectures.split()), kinds, why)


def on_backend(family: Family) -> Family:
    """The family, run by vLLM's Transformers backend: its vLLM taps are at that backend's modules."""
    return msgspec.structs.replace(family, backend=True)


def in_attention(family: Family) -> dict[str, PointKind]:
    """The family's points of attention, as those of a family that has attention in some layers only."""
    return {
        word: msgspec.structs.replace(kind, layers="attention")
        for word, kind in family.points.items()
        if word in SITES and SITES[word].block == "attention"
    }


def recurrent(tap: Tap, vllm: Tap | None = None) -> PointKind:
    """What a state space or linear attention adds to the stream, in the layers that have such a mixer."""
    return kind(tap, vllm, layers="recurrent", elsewhere="attn_out")


_NO_EXPERTS = {"router": NO_EXPERTS["router"]}
_NO_ATTENTION = "none of its layers has attention"
_KEYWORDS = Tap(L, "in", "hidden_states", "residual")  # vLLM calls these layers with names


def hybrids(llama: Family, granite: Family) -> tuple[Family, ...]:
    """The tables, some of them made of another family's."""
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
    """The points around an MLP that is called so, and the model's end."""
    return {
        "mlp_in": same(L + ".pre_ff_layernorm"),
        "neurons": sharded(Tap(_FORWARD + ".down_proj", "in"), width="M", **rest),
        "mlp_out": same(_FORWARD),
    }


def _falcon_h1(llama: Family) -> Family:
    """Attention and a state space read the same normed stream, each times a factor of its own, and both add to it."""
    family = without(
        llama, "falcon_h1", "FalconH1ForCausalLM", _NO_EXPERTS, **_feed_forward(), **end("model.final_layernorm"),
        stream=kind(Tap(L, "in"), Tap(L, "in", "hidden_states")), mid=same(L + ".pre_ff_layernorm", "in"),
        attn_in=same(ATTENTION, "in", hidden="hidden_states"),
        attn_out=kind(Tap(ATTENTION, "out", scale="attention_out_multiplier")),
        mixer_out=kind(Tap(L + ".mamba", "out", scale="ssm_out_multiplier")),
    )  # fmt: skip
    return msgspec.structs.replace(family, both=True)


def _jamba(llama: Family) -> Family:
    """vLLM's state space writes its result where it is told to: it is read as the next norm's first input."""
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
    )  # before the stream's tap there


_MIXER = L + ".mixer"


def _nemotron_h() -> Family:
    """Each layer is one block: attention, a state space, an MLP or experts."""
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
    """The words of a block, but for what any mixer adds; those between mixer and MLP are an MLP's."""
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
