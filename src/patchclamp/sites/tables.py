"""Site tables, one per model family, with Transformers and vLLM side by side.

A site table maps a model family's named tensors to modules on both engines. A *point* is a tensor that can be read and
written, or a pair of tensors that sum to the stream. A site is a point of its layer or of a later layer:
`resid_post[l]` and `resid_pre[l+1]` are the same point.

    D model width · V vocabulary · Q query heads · K key/value heads · Z heads' results · M MLP width
    X experts · l layer
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from patchclamp.errors import ModelError
from patchclamp.language.site import DERIVED, SITES, SPECS
from patchclamp.language.site import Width as Size

Moment = Literal["in", "out", "attention", "query"]
# Layers whose mixer is attention or recurrent (a state space, linear attention), and layers with an ordinary MLP
# (`dense`), with experts (`sparse`), or with either (`mlp`)
Layers = Literal["all", "attention", "recurrent", "mlp", "dense", "sparse"]


class Tap(msgspec.Struct, frozen=True):
    """A tensor at a module's input or output.

    module: the module's path, with `{l}` for the layer
    moment: the module's input (`in`) or output (`out`); for attention layers also vLLM's result (`attention`) or the
        queries after rotary embedding (`query`)
    hidden: the index of the positional argument, or the name of the keyword argument; for `out`, the tuple index
    residual: as `hidden`, for the second tensor if the engine keeps the stream as a sum of two tensors; else None
    of: the widths of the tensors packed side by side in this tensor; empty: not packed
    part: the index of the point's tensor among the packed tensors
    mixed: True if the packed tensors alternate per key/value head, each head beside its queries
    by_head: True if the tensor is [B, H, T, E]
    scale: a factor, or its config name; multiplies the tensor's values to give the site's values
    rerun: True if an edit reruns the module because its other results depend on the tensor (a router's choice)
    copied: True if the module gets a copy of its input because another module reads the same tensor
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

    transformers, vllm: the tap on each engine
    width: the row size
    layout: the layout of a row under tensor parallelism
    per_layer: True if layers have such a point; False if the model has a single one, such as the end of the stream
    rows: "tokens" for one row per token of a step, "sampled" for one per sampled position
    layers: the kind of layers that have it, or their indices
    elsewhere: the point kind that its site resolves to in other layers
    """

    transformers: Tap
    vllm: Tap
    width: Size = "D"
    layout: Literal["replicated", "sharded", "partial sum"] = "replicated"
    per_layer: bool = True
    rows: Literal["tokens", "sampled"] = "tokens"
    layers: Layers | tuple[int, ...] = "all"
    elsewhere: str = ""


STREAM: dict[str, tuple[str, int]] = {  # sites without a point kind of the same name: (kind, layer offset)
    "embed": ("stream", 0), "resid_pre": ("stream", 0), "resid_mid": ("mid", 0), "resid_post": ("stream", 1),
}  # fmt: skip

ROTATED = "rot_q"  # the queries after rotary embedding, from which attention patterns are computed
UNCHECKED = "the input of the first layer is more than a multiple of the token embedding"
PARALLEL = "attention and MLP run in parallel on the stream before the layer"  # the reason in `lacks`


class Family(msgspec.Struct, frozen=True, dict=True):
    """Model classes that share one table.

    points: point kinds by name, which is a site name or one of the names in `STREAM`
    lacks: the missing sites, with the reason
    needs: required values of config settings; a string value names the setting that has the required value
    backend: True if vLLM runs the family through its Transformers backend, which creates the vLLM taps' modules
    tabled: False if the table was derived from a module tree rather than declared in `sites.tables`
    divided_by: the config name of the number by which vLLM divides the stream in float16
    gated: True if a gate multiplies attention's result, before `z`
    both: True if each layer has attention and a state space in parallel, each added to the stream
    afterwards: a description of the operations after the MLP if a layer's end is not `resid_mid` + `mlp_out`
    unchecked: the reason why self-checks cannot compare `embed` with the token embedding (`embed` is not a mere
        multiple of it); "" if they can
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
    unchecked: str = ""

    def __post_init__(self) -> None:
        points = dict[str, PointKind]()
        for name, kind in self.points.items():
            if name == "z" and kind.vllm.moment == "attention":
                module = kind.transformers.module.rpartition(".")[0]  # the output projection
                taps = {"transformers": Tap(module, "query"), "vllm": Tap(kind.vllm.module, "query")}
                points[ROTATED] = msgspec.structs.replace(kind, **taps, width="Q")
            points |= {name: kind} if name != ROTATED else {}
        msgspec.structs.force_setattr(self, "points", points)

    @property
    def parallel(self) -> bool:
        """True if a layer's attention and MLP run in parallel, on the same stream."""
        return self.lacks.get("resid_mid") == PARALLEL

    @functools.cached_property
    def sites(self) -> dict[str, tuple[str, int]]:
        """The point kind and layer offset of each site of the family, by site name."""
        kinds = {word: (word, 0) if word in self.points else STREAM.get(word, (word, 0)) for word in SITES}
        kinds |= dict.fromkeys(DERIVED, (ROTATED, 0))
        return {word: at for word, at in kinds.items() if at[0] in self.points and word not in self.lacks}


L, NORM = "model.layers.{l}", "model.norm"
ATTENTION, MLP = L + ".self_attn", L + ".mlp"
QKV: tuple[Size, ...] = ("Q", "K", "K")
PARTS: tuple[tuple[str, Size], ...] = (("q", "Q"), ("k", "K"), ("v", "K"))
ATTENTION_ONLY = {"mixer_out": "all layers have attention, whose output is attn_out"}
NO_EXPERTS = ATTENTION_ONLY | {"router": "its layers have a single MLP and no experts"}
FUSED = ATTENTION_ONLY | {"neurons": "its experts run in one fused kernel that does not expose their activations"}


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
    """Make the point kind of the heads' results: the output projection's input or, on vLLM, the attention's result."""
    return sharded(Tap(o_proj, "in"), Tap(attention, "attention"))


def projections(transformers: str, vllm: str, *words: str) -> dict[str, PointKind]:
    """Make the point kinds `words` among q, k and v: on Transformers each is the output of a separate projection (with
    `{w}` for its letter in the path), on vLLM a slice of a merged projection's output."""
    return {
        word: sharded(Tap(transformers.format(w=word, l="{l}"), "out"), Tap(vllm, "out", of=QKV, part=part), width)
        for part, (word, width) in enumerate(PARTS)
        if word in words
    }


def merged(
    module: str, transformers: str | None = None, mixed: bool = False, regrouped: bool = False
) -> dict[str, PointKind]:
    """Make the point kinds of queries, keys and values that both engines pack into one projection's output. `mixed`:
    they alternate per key/value head; `regrouped`: they do so only on Transformers, because vLLM reorders them."""

    def tap(module: str, part: int, mixed: bool) -> Tap:
        return Tap(module, "out", of=QKV, part=part, mixed=mixed)

    return {
        word: sharded(tap(transformers or module, part, mixed or regrouped), tap(module, part, mixed), width)
        for part, (word, width) in enumerate(PARTS)
    }


def end(transformers: str, vllm: str | None = None, pair: bool = False) -> dict[str, PointKind]:
    """Make the point kinds of the stream after the last layer, the final norm's result, and the logits."""
    vllm = vllm or transformers
    return {
        "stream_end": kind(Tap(transformers, "in"), Tap(vllm, "in", 0, 1 if pair else None), per_layer=False),
        "final_norm": kind(Tap(transformers, "out"), Tap(vllm, "out"), per_layer=False),
        "logits": kind(Tap("lm_head", "out"), Tap("compute_logits", "out"), "V", per_layer=False, rows="sampled"),
    }


def without(
    family: Family, name: str, architectures: str, why: dict[str, str], fields: Any = None, **points: PointKind
) -> Family:
    """Derive a family from another: replace `points` and remove the sites in `why`. `fields`: other fields of `Family`,
    which are not inherited."""
    gone = {STREAM.get(word, (word, 0))[0] for word in why} - set(points)
    kinds = {name: kind for name, kind in (family.points | points).items() if name not in gone}
    return Family(name, tuple(architectures.split()), kinds, why, **(fields or {}))


def in_attention_layers(points: dict[str, PointKind]) -> dict[str, PointKind]:
    """Restrict attention's points to attention layers, for families where only some layers have attention."""
    return {
        word: msgspec.structs.replace(kind, layers="attention")
        for word, kind in points.items()
        if word in SITES and SPECS[word].block == "attention"
    }


def recurrent(tap: Tap, vllm: Tap | None = None) -> PointKind:
    """Make the point kind of a recurrent mixer's output (a state space or linear attention), in its layers."""
    return kind(tap, vllm, layers="recurrent", elsewhere="attn_out")


# vLLM calls a layer with (positions, hidden, residual), and the stream is hidden + residual. A fused norm's two inputs
# are the last addition and the stream before it.
LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Ernie4_5ForCausalLM",
                   "NemotronForCausalLM"),
    points={
        "stream": kind(Tap(L, "in"), Tap(L, "in", 1, 2)),
        "mid": kind(Tap(L + ".post_attention_layernorm", "in"), Tap(L + ".post_attention_layernorm", "in", 0, 1)),
        "attn_in": same(L + ".input_layernorm"),
        **projections(ATTENTION + ".{w}_proj", ATTENTION + ".qkv_proj", "q", "k", "v"),
        "z": results(ATTENTION + ".o_proj", ATTENTION + ".attn"),
        "attn_out": same(ATTENTION),
        "mlp_in": same(L + ".post_attention_layernorm"),
        "neurons": sharded(Tap(MLP + ".down_proj", "in"), width="M"),
        "mlp_out": same(MLP),
        **end(NORM, pair=True),
    },
    lacks=NO_EXPERTS,
)  # fmt: skip
NORMED = {
    "q": sharded(Tap(ATTENTION + ".q_norm", "out")),
    "k": sharded(Tap(ATTENTION + ".k_norm", "out"), width="K"),
}
QWEN3 = without(LLAMA, "qwen3", "Qwen3ForCausalLM", NO_EXPERTS, **NORMED)
PHI3 = without(LLAMA, "phi3", "Phi3ForCausalLM", NO_EXPERTS, **merged(ATTENTION + ".qkv_proj"))
# Attention and MLP have a norm before and after; the second norm's output is added to the stream.
GEMMA2 = without(
    LLAMA, "gemma2", "Gemma2ForCausalLM", NO_EXPERTS,
    mid=kind(Tap(L + ".pre_feedforward_layernorm", "in"), Tap(L + ".pre_feedforward_layernorm", "in", 0, 1)),
    attn_out=same(L + ".post_attention_layernorm"),
    mlp_in=same(L + ".pre_feedforward_layernorm"),
    mlp_out=same(L + ".post_feedforward_layernorm"),
)  # fmt: skip
GEMMA3 = without(
    GEMMA2, "gemma3", "Gemma3ForCausalLM", NO_EXPERTS,
    q=sharded(Tap(ATTENTION + ".q_norm", "out", by_head=True), Tap(ATTENTION + ".q_norm", "out")),
    k=sharded(Tap(ATTENTION + ".k_norm", "out", by_head=True), Tap(ATTENTION + ".k_norm", "out"), "K"),
)  # fmt: skip
_UNLIKE = "its sliding-window layers have a different head size than the others"
_GEMMA4 = NO_EXPERTS | dict.fromkeys("qkvz", _UNLIKE)


def _gemma4(name: str, lacks: dict[str, str], needs: dict[str, Any], **points: PointKind) -> Family:
    """Make a Gemma 4 table. A layer ends by adding a per-layer embedding (smaller models) and scaling the stream."""
    return without(
        GEMMA2, name, "Gemma4ForCausalLM", lacks, **points, stream=kind(Tap(L, "in"), Tap(L, "in", 1)),
        mid=same(L + ".pre_feedforward_layernorm", "in"), **end(NORM),
        fields={"needs": needs, "afterwards": "a per-layer embedding and a factor"},
    )  # fmt: skip


GEMMA4 = (
    _gemma4("gemma4", _GEMMA4, {"enable_moe_block": False, "use_double_wide_mlp": False}),
    _gemma4("gemma4_wide", _GEMMA4 | {"neurons": "some of its MLPs are twice as wide"}, {"enable_moe_block": False}),
    _gemma4(
        "gemma4_moe",
        {word: why for word, why in _GEMMA4.items() if word != "router"}
        | {"mlp_in": "its MLP, experts and router each have their own norm"},
        {}, router=same(L + ".router.proj", width="X", layers="sparse"),
    ),
)  # fmt: skip
# Outputs of attention and MLP are multiplied by a factor before they are added; `attn_out` and `mlp_out` include it.
GRANITE = without(
    LLAMA, "granite", "GraniteForCausalLM", NO_EXPERTS,
    stream=kind(Tap(L, "in"), Tap(L, "in", 1)),
    mid=same(L + ".post_attention_layernorm", "in"),
    attn_out=kind(Tap(ATTENTION, "out", scale="residual_multiplier")),
    mlp_out=kind(Tap(MLP, "out", scale="residual_multiplier")),
    **end(NORM),
)  # fmt: skip
GLM4 = without(
    LLAMA, "glm4", "Glm4ForCausalLM", NO_EXPERTS,
    attn_out=same(L + ".post_self_attn_layernorm"), mlp_out=same(L + ".post_mlp_layernorm"),
)  # fmt: skip
NO_INPUT_NORMS = NO_EXPERTS | {
    "attn_in": "its attention reads resid_pre directly, without a norm",
    "mlp_in": "its MLP reads resid_mid directly, without a norm",
}
BY_HEAD = {word: GEMMA3.points[word] for word in ("q", "k")}
EXAONE4 = without(
    LLAMA, "exaone4", "Exaone4ForCausalLM", NO_INPUT_NORMS, **BY_HEAD,
    stream=kind(Tap(L, "in"), Tap(L, "in", 1)), mid=same(MLP, "in"),
    attn_out=same(L + ".post_attention_layernorm"), mlp_out=same(L + ".post_feedforward_layernorm"), **end(NORM),
)  # fmt: skip
STABLELM = without(
    LLAMA, "stablelm", "StableLmForCausalLM", NO_EXPERTS,
    stream=kind(Tap(L, "in"), Tap(L, "in", 1)), mid=same(L + ".post_attention_layernorm", "in"), **end(NORM),
    fields={"needs": {"use_parallel_residual": False, "qk_layernorm": False}},
)  # fmt: skip
# Attention and MLP read the same normed tensor; attention gets a copy, so that an edit reaches only one of them.
PARALLEL_ATTENTION = NO_EXPERTS | {"resid_mid": PARALLEL}
COHERE = without(
    LLAMA, "cohere", "CohereForCausalLM Cohere2ForCausalLM", PARALLEL_ATTENTION,
    stream=kind(Tap(L, "in"), Tap(L, "in", 1)),
    attn_in=same(ATTENTION, "in", hidden="hidden_states", copied=True), mlp_in=same(MLP, "in"),
    attn_out=same(ATTENTION, layout="partial sum"), mlp_out=same(MLP, layout="partial sum"), **end(NORM),
    fields={"needs": {"use_qk_norm": False}},
)  # fmt: skip
MIXTRAL = without(
    LLAMA, "mixtral", "MixtralForCausalLM", FUSED,
    router=kind(Tap(MLP + ".gate", "out", rerun=True), Tap(L + ".block_sparse_moe.gate", "out"), "X"),
    mlp_out=kind(Tap(MLP, "out"), Tap(L + ".block_sparse_moe", "out")),
)  # fmt: skip
DENSE_AND_SPARSE = {
    "neurons": sharded(Tap(MLP + ".down_proj", "in"), width="M", layers="dense"),
    "router": kind(Tap(MLP + ".gate", "out", rerun=True), Tap(MLP + ".gate", "out"), "X", layers="sparse"),
}
QWEN3_MOE = without(
    LLAMA, "qwen3_moe", "Qwen3MoeForCausalLM", ATTENTION_ONLY, **NORMED, **DENSE_AND_SPARSE,
)  # fmt: skip
GPT_OSS = without(
    LLAMA, "gpt_oss", "GptOssForCausalLM", FUSED,
    stream=kind(Tap(L, "in"), Tap(L, "in", 0, 2)),
    **projections(ATTENTION + ".{w}_proj", L + ".attn.qkv_proj", "q", "k", "v"),
    z=results(ATTENTION + ".o_proj", L + ".attn.attn"),
    attn_out=kind(Tap(ATTENTION, "out"), Tap(L + ".attn", "out")),
    router=kind(Tap(MLP + ".router", "out", rerun=True), Tap(MLP + ".router", "out"), "X"),
)  # fmt: skip
MOE = without(
    LLAMA, "moe", "Ernie4_5_MoeForCausalLM Qwen2MoeForCausalLM", ATTENTION_ONLY, **DENSE_AND_SPARSE,
)  # fmt: skip
GLM4_MOE = without(
    LLAMA, "glm4_moe", "Glm4MoeForCausalLM", ATTENTION_ONLY, **DENSE_AND_SPARSE,
    fields={"needs": {"use_qk_norm": False}},
)  # fmt: skip
GLM4_MOE_NORMED = without(
    LLAMA, "glm4_moe_normed", "Glm4MoeForCausalLM", ATTENTION_ONLY, **NORMED, **DENSE_AND_SPARSE,
    fields={"needs": {"use_qk_norm": True}},
)  # fmt: skip
OLMOE = without(
    LLAMA, "olmoe", "OlmoeForCausalLM", FUSED, **NORMED, router=DENSE_AND_SPARSE["router"],
    fields={"needs": {"clip_qkv": None}},
)  # fmt: skip
_NORMED_INSIDE = "vLLM norms them inside attention, so no module returns them"
MINIMAX_M2 = without(
    LLAMA, "minimax_m2", "MiniMaxM2ForCausalLM", FUSED | {"q": _NORMED_INSIDE, "k": _NORMED_INSIDE},
    router=kind(Tap(MLP + ".gate", "out", rerun=True), Tap(L + ".block_sparse_moe.gate", "out"), "X"),
    mlp_out=kind(Tap(MLP, "out"), Tap(L + ".block_sparse_moe", "out")),
)  # fmt: skip
_FEED = L + ".feed_forward"
REORDERED = "vLLM orders the columns of each head differently"
LLAMA4 = without(
    LLAMA, "llama4", "Llama4ForCausalLM", ATTENTION_ONLY
    | {"q": REORDERED, "k": REORDERED,
       "router": "on Transformers the module that computes its logits also computes the experts' weights"},
    neurons=sharded(Tap(_FEED + ".down_proj", "in"), width="M", layers="dense"), mlp_out=same(_FEED),
)  # fmt: skip
LATENT = "its attention keeps one latent row for all heads, from which the kernel computes keys and values"
DEEPSEEK = without(
    LLAMA, "deepseek", "DeepseekV2ForCausalLM DeepseekV3ForCausalLM",
    ATTENTION_ONLY | dict.fromkeys("qkv", LATENT),
    z=sharded(Tap(ATTENTION + ".o_proj", "in"), width="Z"),
    **DENSE_AND_SPARSE,
    fields={"divided_by": "routed_scaling_factor"},
)  # fmt: skip

_H = "transformer.h.{l}"
GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    points={
        "embed": same("transformer.wte", per_layer=False),
        "stream": same(_H, "in"),
        "mid": same(_H + ".ln_2", "in"),
        "attn_in": same(_H + ".ln_1"),
        **merged(_H + ".attn.c_attn"),
        "z": results(_H + ".attn.c_proj", _H + ".attn.attn"),
        "attn_out": same(_H + ".attn"),
        "mlp_in": same(_H + ".ln_2"),
        "neurons": sharded(Tap(_H + ".mlp.c_proj", "in"), width="M"),
        "mlp_out": same(_H + ".mlp"),
        **end("transformer.ln_f"),
    },
    lacks=NO_EXPERTS,
)
# Without learned position embeddings, `embed` is the whole stream before layer 0
_NO_POSITIONS = msgspec.structs.replace(GPT2, points={w: kind for w, kind in GPT2.points.items() if w != "embed"})
_ATTN = _H + ".attn"
GPT_J = without(
    _NO_POSITIONS, "gpt_j", "GPTJForCausalLM", PARALLEL_ATTENTION,
    stream=kind(Tap(_H, "in"), Tap(_H, "in", 1)),
    attn_in=same(_ATTN, "in", hidden="hidden_states", copied=True),
    **projections(_ATTN + ".{w}_proj", _ATTN + ".qkv_proj", "q", "k", "v"),
    z=results(_ATTN + ".out_proj", _ATTN + ".attn"), mlp_in=same(_H + ".mlp", "in"),
    neurons=sharded(Tap(_H + ".mlp.fc_out", "in"), width="M"),
)  # fmt: skip
_SELF = _H + ".self_attention"
BLOOM = without(
    _NO_POSITIONS, "bloom", "BloomForCausalLM", NO_EXPERTS,
    stream=kind(Tap(_H, "in"), Tap(_H, "in", 1)), attn_in=same(_H + ".input_layernorm"),
    **merged(_SELF + ".query_key_value", regrouped=True), z=results(_SELF + ".dense", _SELF + ".attn"),
    attn_out=kind(Tap(_SELF + ".dense", "out"), Tap(_SELF, "out")),
    mid=same(_H + ".post_attention_layernorm", "in"), mlp_in=same(_H + ".post_attention_layernorm"),
    neurons=sharded(Tap(_H + ".mlp.dense_4h_to_h", "in"), width="M"),
    mlp_out=kind(Tap(_H + ".mlp.dense_4h_to_h", "out"), Tap(_H + ".mlp", "out")),
    fields={
        "needs": {"apply_residual_connection_post_layernorm": False, "slow_but_exact": False}, "unchecked": UNCHECKED,
    },
)  # fmt: skip
FALCON = without(
    BLOOM, "falcon", "FalconForCausalLM", PARALLEL_ATTENTION,
    attn_in=kind(Tap(_SELF, "in", copied=True), Tap(_SELF, "in", "hidden_states", copied=True)),
    attn_out=same(_SELF, layout="partial sum"),
    mlp_in=same(_H + ".mlp", "in"), mlp_out=same(_H + ".mlp", layout="partial sum"),
    fields={"needs": {"parallel_attn": True, "bias": False}},
)  # fmt: skip
_O = "model.decoder.layers.{l}"
OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    points={
        "embed": same("model.decoder.embed_tokens", per_layer=False),
        "stream": same(_O, "in"),
        "mid": same(_O + ".final_layer_norm", "in"),
        "attn_in": same(_O + ".self_attn_layer_norm"),
        **projections(_O + ".self_attn.{w}_proj", _O + ".self_attn.qkv_proj", "q", "k", "v"),
        "z": results(_O + ".self_attn.out_proj", _O + ".self_attn.attn"),
        "attn_out": same(_O + ".self_attn"),
        "mlp_in": same(_O + ".final_layer_norm"),
        "neurons": sharded(Tap(_O + ".fc2", "in"), width="M"),
        "mlp_out": same(_O + ".fc2"),
        **end("model.decoder.final_layer_norm"),
    },
    lacks=NO_EXPERTS,
    needs={"do_layer_norm_before": True, "word_embed_proj_dim": "hidden_size", "_remove_final_layer_norm": False},
)

# On vLLM's Transformers backend: the same modules, below `model`, with merged projections, on rows [1, T, D]
ON_BACKEND = {"backend": True}
BACKEND = without(
    LLAMA, "llama_backend", "SmolLM3ForCausalLM SeedOssForCausalLM HunYuanDenseV1ForCausalLM", NO_EXPERTS,
    stream=same(L, "in"), mid=same(L + ".post_attention_layernorm", "in"), **end(NORM), fields=ON_BACKEND,
)  # fmt: skip
STARCODER2 = without(
    BACKEND, "starcoder2", "Starcoder2ForCausalLM", NO_EXPERTS,
    neurons=sharded(Tap(MLP + ".c_proj", "in"), width="M"), fields=ON_BACKEND,
)  # fmt: skip
HUNYUAN_MOE = without(
    BACKEND, "hunyuan_moe", "HunYuanMoEV1ForCausalLM", FUSED,
    router=same(MLP + ".gate.wg", width="X"), fields=ON_BACKEND,
)  # fmt: skip
OLMO2 = without(
    LLAMA, "olmo2", "Olmo2ForCausalLM Olmo3ForCausalLM", NO_INPUT_NORMS,
    stream=same(L, "in"), mid=same(MLP, "in"), **NORMED,
    attn_out=same(L + ".post_attention_layernorm"), mlp_out=same(L + ".post_feedforward_layernorm"),
    **end(NORM), fields=ON_BACKEND,
)  # fmt: skip
_N, _M = "gpt_neox.layers.{l}", "model.layers.{l}"


def _neox(module: str, moment: Moment = "out", width: Size = "D", **rest: Any) -> PointKind:
    return kind(Tap(_N + module, moment), Tap(_M + module, moment), width, **rest)


GPT_NEOX = Family(
    name="gpt_neox",
    architectures=("GPTNeoXForCausalLM",),
    points={
        "stream": _neox("", "in"),
        "attn_in": _neox(".input_layernorm"),
        **merged(_M + ".attention.query_key_value", _N + ".attention.query_key_value", mixed=True),
        "z": _neox(".attention.dense", "in", "Q", layout="sharded"),
        "attn_out": _neox(".attention"),
        "mlp_in": _neox(".post_attention_layernorm"),
        "neurons": _neox(".mlp.dense_4h_to_h", "in", "M", layout="sharded"),
        "mlp_out": _neox(".mlp"),
        **end("gpt_neox.final_layer_norm", "model.final_layer_norm"),
    },
    lacks=PARALLEL_ATTENTION,
    needs={"use_parallel_residual": True},
    backend=True,
)


# -- hybrid families: layers with a state space or linear attention, in place of attention or beside it

_NO_ROUTER = {"router": NO_EXPERTS["router"]}
_KEYWORDS = Tap(L, "in", "hidden_states", "residual")  # vLLM passes these by keyword
_FORWARD = L + ".feed_forward"
_PRE_FF = L + ".pre_ff_layernorm"


def _feed_forward(**rest: Any) -> dict[str, PointKind]:
    """Make the point kinds of an MLP named `feed_forward`."""
    return {
        "mlp_in": same(_PRE_FF),
        "neurons": sharded(Tap(_FORWARD + ".down_proj", "in"), width="M", **rest),
        "mlp_out": same(_FORWARD),
    }


GRANITE_HYBRID = without(
    GRANITE, "granite_hybrid", "GraniteMoeHybridForCausalLM", _NO_ROUTER, **in_attention_layers(GRANITE.points),
    mixer_out=recurrent(Tap(L + ".mamba", "out", scale="residual_multiplier")),
    stream=kind(Tap(L, "in"), Tap(L, "in", "hidden_states")),
    neurons=sharded(Tap(L + ".shared_mlp.output_linear", "in"), width="M"),
    mlp_out=kind(Tap(L + ".shared_mlp", "out", scale="residual_multiplier")),
    fields={"needs": {"num_local_experts": 0}},
)  # fmt: skip
GRANITE_HYBRID_EXPERTS = without(
    GRANITE_HYBRID, "granite_hybrid_experts", "GraniteMoeHybridForCausalLM",
    {"mlp_out": "its experts and shared MLP are summed and added to the stream outside any module",
     "neurons": "its experts run in one fused kernel beside a shared MLP",
     "router": "its router is inside the module that runs its experts"},
)  # fmt: skip
QWEN3_NEXT = without(
    LLAMA, "qwen3_next", "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM",
    dict.fromkeys("qk", "on a GPU, vLLM norms and rotates them in one kernel, so no module returns them"),
    **{word: point for word, point in in_attention_layers(LLAMA.points).items() if word not in "qk"} | {
        "z": sharded(Tap(ATTENTION + ".o_proj", "in"), layers="attention"),
        "v": sharded(Tap(ATTENTION + ".v_proj", "out"),
                     Tap(ATTENTION + ".qkv_proj", "out", of=("Q", "Q", "K", "K"), part=3), "K", layers="attention")},
    mixer_out=recurrent(Tap(L + ".linear_attn", "out")), stream=kind(Tap(L, "in"), _KEYWORDS),
    **DENSE_AND_SPARSE, fields={"gated": True},
)  # fmt: skip
_MIXER = L + ".mixer"
NEMOTRON_H = Family(  # each layer is one block: attention, a state space, an MLP or experts
    name="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    points={
        "stream": kind(Tap(L, "in"), _KEYWORDS),
        **in_attention_layers({
            "attn_in": same(L + ".norm"),
            **projections(_MIXER + ".{w}_proj", _MIXER + ".qkv_proj", "q", "k", "v"),
            "z": results(_MIXER + ".o_proj", _MIXER + ".attn"),
            "attn_out": same(_MIXER),
        }),
        "mixer_out": recurrent(Tap(_MIXER, "out")),
        "mlp_in": same(L + ".norm", layers="mlp"),
        "router": kind(Tap(_MIXER + ".gate", "out", rerun=True), Tap(_MIXER + ".gate", "out"), "X", layers="sparse"),
        "neurons": sharded(Tap(_MIXER + ".down_proj", "in"), width="M", layers="dense"),
        "mlp_out": same(_MIXER, layers="mlp"),
        **end("model.norm_f", pair=True),
    },
    lacks={"resid_mid": "each of its layers is either a mixer or an MLP"},
)  # fmt: skip
_B = "backbone.layers.{l}"
_MLP_SITES = (*(word for word, spec in SITES.items() if spec.block == "mlp"), "resid_mid")
MAMBA2 = Family(
    name="mamba2",
    architectures=("Mamba2ForCausalLM",),
    points={
        "stream": kind(Tap(_B, "in"), Tap(_B, "in", "hidden_states", "residual")),
        "mixer_out": recurrent(Tap(_B + ".mixer", "out")),
        **end("backbone.norm_f", pair=True),
    },
    lacks=dict.fromkeys(("attn_in", "q", "k", "v", "z", "attn_out"), "no layer has attention")
    | dict.fromkeys(_MLP_SITES, "its layers have no MLP"),
)
# Attention and a state space read the normed stream, each times its own factor, and add to the stream
FALCON_H1 = without(
    LLAMA, "falcon_h1", "FalconH1ForCausalLM", _NO_ROUTER, **_feed_forward(), **end("model.final_layernorm"),
    stream=kind(Tap(L, "in"), Tap(L, "in", "hidden_states")), mid=same(_PRE_FF, "in"),
    attn_in=same(ATTENTION, "in", hidden="hidden_states"),
    attn_out=kind(Tap(ATTENTION, "out", scale="attention_out_multiplier")),
    mixer_out=kind(Tap(L + ".mamba", "out", scale="ssm_out_multiplier")), fields={"both": True},
)  # fmt: skip
# vLLM's state space writes into an output argument, so its result is read as the next norm's input; `mixer_out` comes
# first because it is tapped before `mid` at the same norm
JAMBA = Family(
    name="jamba",
    architectures=("JambaForCausalLM",),
    points={
        "mixer_out": recurrent(Tap(L + ".mamba", "out"), Tap(_PRE_FF, "in")),
        **LLAMA.points,
        **_feed_forward(layers="dense"),
        **end("model.final_layernorm", pair=True),
        **in_attention_layers({
            **projections(ATTENTION + ".{w}_proj", L + ".qkv_proj", "q", "k", "v"),
            "z": results(ATTENTION + ".o_proj", L + ".attn"),
            "attn_in": same(L + ".input_layernorm"),
            "attn_out": kind(Tap(ATTENTION, "out"), Tap(L + ".o_proj", "out")),
        }),
        "stream": kind(Tap(L, "in"), _KEYWORDS),
        "mid": kind(Tap(_PRE_FF, "in"), Tap(_PRE_FF, "in", 0, 1)),
        "router": kind(Tap(_FORWARD + ".router", "out"), width="X", layers="sparse"),
    },
)  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    LLAMA, QWEN3, PHI3, GEMMA2, GEMMA3, *GEMMA4, GRANITE, GLM4, EXAONE4, STABLELM, COHERE, BACKEND, STARCODER2, OLMO2,
    GPT2, GPT_J, BLOOM, FALCON, OPT, GPT_NEOX,
    MIXTRAL, QWEN3_MOE, MOE, GLM4_MOE, GLM4_MOE_NORMED, OLMOE, MINIMAX_M2, LLAMA4, HUNYUAN_MOE,
    GPT_OSS, DEEPSEEK, GRANITE_HYBRID, GRANITE_HYBRID_EXPERTS, QWEN3_NEXT, NEMOTRON_H, MAMBA2, FALCON_H1, JAMBA,
)  # fmt: skip


class Decoder(NamedTuple):
    """The text decoder of a multimodal model class.

    model_type: the `model_type` in the decoder's config
    architecture: a text model class with the same table
    below: the path of the decoder's base model on Transformers
    """

    model_type: str
    architecture: str
    below: str = "model.language_model"


DECODERS: dict[str, Decoder] = {
    "Gemma3ForConditionalGeneration": Decoder("gemma3_text", "Gemma3ForCausalLM"),
    "Gemma4ForConditionalGeneration": Decoder("gemma4_text", "Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": Decoder("gemma4_unified_text", "Gemma4ForCausalLM"),
    "Llama4ForConditionalGeneration": Decoder("llama4_text", "Llama4ForCausalLM", "language_model.model"),
    "Mistral3ForConditionalGeneration": Decoder("mistral", "MistralForCausalLM"),
    "Qwen2VLForConditionalGeneration": Decoder("qwen2_vl_text", "Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": Decoder("qwen2_5_vl_text", "Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": Decoder("qwen3_vl_text", "Qwen3ForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": Decoder("qwen3_vl_moe_text", "Qwen3MoeForCausalLM"),
    "Qwen3_5ForConditionalGeneration": Decoder("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": Decoder("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}


def is_listed(architectures: Sequence[str]) -> bool:
    """True if a table lists one of these classes, even if the config fails the family's requirements."""
    return any(set(family.architectures) & set(architectures) for family in FAMILIES)


def has_table(architectures: Sequence[str] | None, config: Any = None) -> bool:
    """True if `family_of` finds a family."""
    try:
        return bool(family_of(architectures, config))
    except ModelError:
        return False


def family_of(architectures: Sequence[str] | None, config: Any = None) -> Family:
    """Return the family that lists one of a config's `architectures`. For a multimodal model, the decoder's config and
    family are used.

    Raises `ModelError` if no family lists any of them, or if the config fails the family's requirements (`needs`).
    """
    families = [family for family in FAMILIES if set(family.architectures) & set(architectures or ())]
    unmet = [_unmet(family, config) for family in families]
    if "" in unmet:
        return families[unmet.index("")]
    if families:
        raise ModelError("; ".join(unmet))
    for name in architectures or ():
        decoder = DECODERS.get(name)
        if decoder and getattr(config, "model_type", decoder.model_type) == decoder.model_type:
            return within(decoder, family_of([decoder.architecture], config), name)
    tabled = sorted(name for family in FAMILIES for name in family.architectures)
    raise ModelError(f"no site table for {list(architectures or ())}; available: {', '.join(tabled)}")


def _unmet(family: Family, config: Any) -> str:
    """Return the error message for the first family requirement that a config fails; "" if it meets all."""
    for name, needed in family.needs.items():
        right = getattr(config, needed, None) if isinstance(needed, str) else needed
        if config is not None and getattr(config, name, right) != right:
            return f"{family.name} models require {name}={needed}, got {getattr(config, name)}"
    return ""


def within(decoder: Decoder, family: Family, architecture: str) -> Family:
    """Adapt a text model's site table to the multimodal model that contains it as a decoder."""
    beside = decoder.below.removesuffix("model") if decoder.below.endswith(".model") else ""  # prefix of `lm_head`

    def moved(tap: Tap, below: str) -> Tap:
        inner = tap.module.removeprefix("model.")
        module = f"{below}.{inner}" if inner != tap.module else f"{beside}{inner}" if inner == "lm_head" else inner
        return msgspec.structs.replace(tap, module=module)

    points = {
        name: msgspec.structs.replace(
            kind, transformers=moved(kind.transformers, decoder.below), vllm=moved(kind.vllm, "language_model.model")
        )
        for name, kind in family.points.items()
    }
    return msgspec.structs.replace(family, architectures=(architecture,), points=points)
