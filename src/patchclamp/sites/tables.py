"""The site tables, one per model family, Transformers and vLLM side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from patchclamp.errors import ModelError
from patchclamp.sites.families import (
    ATTENTION,
    ATTENTION_ONLY,
    FUSED,
    MLP,
    NO_EXPERTS,
    NORM,
    PARALLEL,
    Family,
    L,
    Moment,
    PointKind,
    Size,
    Tap,
    end,
    hybrids,
    kind,
    merged,
    on_backend,
    projections,
    results,
    same,
    sharded,
    without,
)

# vLLM calls a layer with (positions, hidden, residual), and the stream is hidden + residual. A fused norm's two inputs
# are the last addition and the stream before it.
LLAMA = Family(
    name="llama",
    architectures=(
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Ernie4_5ForCausalLM",
        "NemotronForCausalLM",
    ),
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
)
NORMED = {
    "q": sharded(Tap(ATTENTION + ".q_norm", "out")),
    "k": sharded(Tap(ATTENTION + ".k_norm", "out"), width="K"),
}
QWEN3 = without(LLAMA, "qwen3", "Qwen3ForCausalLM", NO_EXPERTS, **NORMED)
PHI3 = without(LLAMA, "phi3", "Phi3ForCausalLM", NO_EXPERTS, **merged(ATTENTION + ".qkv_proj"))
# Attention and MLP have a norm before and one after; the output of the second is added to the stream.
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
_UNLIKE = "its layers with a window have heads of another size than its layers without"
_GEMMA4 = NO_EXPERTS | dict.fromkeys("qkvz", _UNLIKE)


def _gemma4(name: str, lacks: dict[str, str], needs: dict[str, Any], **points: PointKind) -> Family:
    """A Gemma 4 table. A layer ends with an embedding of its own (smaller models) and a factor for the whole stream."""
    family = without(
        GEMMA2, name, "Gemma4ForCausalLM", lacks, **points, stream=kind(Tap(L, "in"), Tap(L, "in", 1)),
        mid=same(L + ".pre_feedforward_layernorm", "in"), **end(NORM),
    )  # fmt: skip
    return msgspec.structs.replace(family, needs=needs, afterwards="an embedding of the layer, and a factor")


GEMMA4 = (
    _gemma4("gemma4", _GEMMA4, {"enable_moe_block": False, "use_double_wide_mlp": False}),
    _gemma4("gemma4_wide", _GEMMA4 | {"neurons": "some of its MLPs are twice as wide"}, {"enable_moe_block": False}),
    _gemma4(
        "gemma4_moe",
        {word: why for word, why in _GEMMA4.items() if word != "router"}
        | {"mlp_in": "its MLP, its experts and their router each read the stream through a norm of their own"},
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
    "attn_in": "its attention reads the stream itself, resid_pre",
    "mlp_in": "its MLP reads the stream itself, resid_mid",
}
BY_HEAD = {word: GEMMA3.points[word] for word in ("q", "k")}
EXAONE4 = without(
    LLAMA, "exaone4", "Exaone4ForCausalLM", NO_INPUT_NORMS, **BY_HEAD,
    stream=kind(Tap(L, "in"), Tap(L, "in", 1)), mid=same(MLP, "in"),
    attn_out=same(L + ".post_attention_layernorm"), mlp_out=same(L + ".post_feedforward_layernorm"), **end(NORM),
)  # fmt: skip
STABLELM = msgspec.structs.replace(without(
    LLAMA, "stablelm", "StableLmForCausalLM", NO_EXPERTS,
    stream=kind(Tap(L, "in"), Tap(L, "in", 1)), mid=same(L + ".post_attention_layernorm", "in"), **end(NORM),
), needs={"use_parallel_residual": False, "qk_layernorm": False})  # fmt: skip
# Attention and MLP read the same normed tensor; attention gets a copy, so that an edit reaches only one of them.
PARALLEL_ATTENTION = NO_EXPERTS | {"resid_mid": PARALLEL}
COHERE = msgspec.structs.replace(without(
    LLAMA, "cohere", "CohereForCausalLM Cohere2ForCausalLM", PARALLEL_ATTENTION,
    stream=kind(Tap(L, "in"), Tap(L, "in", 1)),
    attn_in=same(ATTENTION, "in", hidden="hidden_states", copied=True), mlp_in=same(MLP, "in"),
    attn_out=same(ATTENTION, layout="partial sum"), mlp_out=same(MLP, layout="partial sum"), **end(NORM),
), needs={"use_qk_norm": False})  # fmt: skip
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
GLM4_MOE = msgspec.structs.replace(
    without(LLAMA, "glm4_moe", "Glm4MoeForCausalLM", ATTENTION_ONLY, **DENSE_AND_SPARSE),
    needs={"use_qk_norm": False},
)
GLM4_MOE_NORMED = msgspec.structs.replace(
    without(LLAMA, "glm4_moe_normed", "Glm4MoeForCausalLM", ATTENTION_ONLY, **NORMED, **DENSE_AND_SPARSE),
    needs={"use_qk_norm": True},
)
OLMOE = msgspec.structs.replace(without(
    LLAMA, "olmoe", "OlmoeForCausalLM", FUSED, **NORMED, router=DENSE_AND_SPARSE["router"],
), needs={"clip_qkv": None})  # fmt: skip
_NORMED_INSIDE = "vLLM norms them in one function of the whole attention, and no module makes them alone"
MINIMAX_M2 = without(
    LLAMA, "minimax_m2", "MiniMaxM2ForCausalLM", FUSED | {"q": _NORMED_INSIDE, "k": _NORMED_INSIDE},
    router=kind(Tap(MLP + ".gate", "out", rerun=True), Tap(L + ".block_sparse_moe.gate", "out"), "X"),
    mlp_out=kind(Tap(MLP, "out"), Tap(L + ".block_sparse_moe", "out")),
)  # fmt: skip
_FEED = L + ".feed_forward"
LLAMA4 = without(
    LLAMA, "llama4", "Llama4ForCausalLM", ATTENTION_ONLY
    | {"q": "vLLM orders the numbers of each head otherwise", "k": "vLLM orders the numbers of each head otherwise",
       "router": "on Transformers the module that makes its logits also makes of them what the experts are given"},
    neurons=sharded(Tap(_FEED + ".down_proj", "in"), width="M", layers="dense"), mlp_out=same(_FEED),
)  # fmt: skip
LATENT = "its attention keeps one latent row for all heads, from which the kernel makes keys and values"
DEEPSEEK = msgspec.structs.replace(without(
    LLAMA, "deepseek", "DeepseekV2ForCausalLM DeepseekV3ForCausalLM",
    ATTENTION_ONLY | {"q": LATENT + ", and what it asks with", "k": LATENT, "v": LATENT},
    z=sharded(Tap(ATTENTION + ".o_proj", "in"), width="Z"),
    **DENSE_AND_SPARSE,
), divided_by="routed_scaling_factor")  # fmt: skip

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
BLOOM = msgspec.structs.replace(without(
    _NO_POSITIONS, "bloom", "BloomForCausalLM", NO_EXPERTS,
    stream=kind(Tap(_H, "in"), Tap(_H, "in", 1)), attn_in=same(_H + ".input_layernorm"),
    **merged(_SELF + ".query_key_value", regrouped=True), z=results(_SELF + ".dense", _SELF + ".attn"),
    attn_out=kind(Tap(_SELF + ".dense", "out"), Tap(_SELF, "out")),
    mid=same(_H + ".post_attention_layernorm", "in"), mlp_in=same(_H + ".post_attention_layernorm"),
    neurons=sharded(Tap(_H + ".mlp.dense_4h_to_h", "in"), width="M"),
    mlp_out=kind(Tap(_H + ".mlp.dense_4h_to_h", "out"), Tap(_H + ".mlp", "out")),
), needs={"apply_residual_connection_post_layernorm": False, "slow_but_exact": False})  # fmt: skip
FALCON = msgspec.structs.replace(without(
    BLOOM, "falcon", "FalconForCausalLM", PARALLEL_ATTENTION,
    attn_in=kind(Tap(_SELF, "in", copied=True), Tap(_SELF, "in", "hidden_states", copied=True)),
    attn_out=same(_SELF, layout="partial sum"),
    mlp_in=same(_H + ".mlp", "in"), mlp_out=same(_H + ".mlp", layout="partial sum"),
), needs={"parallel_attn": True, "bias": False})  # fmt: skip
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
BACKEND = on_backend(without(
    LLAMA, "llama_backend", "SmolLM3ForCausalLM SeedOssForCausalLM HunYuanDenseV1ForCausalLM", NO_EXPERTS,
    stream=same(L, "in"), mid=same(L + ".post_attention_layernorm", "in"), **end(NORM),
))  # fmt: skip
STARCODER2 = on_backend(without(
    BACKEND, "starcoder2", "Starcoder2ForCausalLM", NO_EXPERTS,
    neurons=sharded(Tap(MLP + ".c_proj", "in"), width="M"),
))  # fmt: skip
HUNYUAN_MOE = on_backend(without(
    BACKEND, "hunyuan_moe", "HunYuanMoEV1ForCausalLM", FUSED, router=same(MLP + ".gate.wg", width="X"),
))  # fmt: skip
OLMO2 = on_backend(without(
    LLAMA, "olmo2", "Olmo2ForCausalLM Olmo3ForCausalLM", NO_INPUT_NORMS,
    stream=same(L, "in"), mid=same(MLP, "in"), **NORMED,
    attn_out=same(L + ".post_attention_layernorm"), mlp_out=same(L + ".post_feedforward_layernorm"),
    **end(NORM),
))  # fmt: skip
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

FAMILIES: tuple[Family, ...] = (
    LLAMA, QWEN3, PHI3, GEMMA2, GEMMA3, *GEMMA4, GRANITE, GLM4, EXAONE4, STABLELM, COHERE, BACKEND, STARCODER2, OLMO2,
    GPT2, GPT_J, BLOOM, FALCON, OPT, GPT_NEOX,
    MIXTRAL, QWEN3_MOE, MOE, GLM4_MOE, GLM4_MOE_NORMED, OLMOE, MINIMAX_M2, LLAMA4, HUNYUAN_MOE,
    GPT_OSS, DEEPSEEK, *hybrids(LLAMA, GRANITE),
)  # fmt: skip


class Decoder(NamedTuple):
    """The decoder within a class of models that also read images.

    model_type: `model_type` of the decoder's config
    family: the family of its table
    below: the path of its base model on Transformers
    """

    model_type: str
    family: Family
    below: str = "model.language_model"


DECODERS: dict[str, Decoder] = {
    "Gemma3ForConditionalGeneration": Decoder("gemma3_text", GEMMA3),
    "Llama4ForConditionalGeneration": Decoder("llama4_text", LLAMA4, "language_model.model"),
    "Mistral3ForConditionalGeneration": Decoder("mistral", LLAMA),
    "Qwen2VLForConditionalGeneration": Decoder("qwen2_vl_text", LLAMA),
    "Qwen2_5_VLForConditionalGeneration": Decoder("qwen2_5_vl_text", LLAMA),
    "Qwen3VLForConditionalGeneration": Decoder("qwen3_vl_text", QWEN3),
}


def is_listed(architectures: list[str] | tuple[str, ...]) -> bool:
    """True if a table lists one of these classes, whether or not the config meets its needs."""
    return any(set(family.architectures) & set(architectures) for family in FAMILIES)


def has_table(architectures: list[str] | tuple[str, ...] | None, config: Any = None) -> bool:
    """True if `family_of` finds a family."""
    try:
        return bool(family_of(architectures, config))
    except ModelError:
        return False


def family_of(architectures: list[str] | tuple[str, ...] | None, config: Any = None) -> Family:
    """The family whose table lists one of a config's `architectures`. For a model that also reads images, the config is
    its decoder's, and so is the family.

    Raises `ModelError` if no table lists one, or if the config does not meet the family's `needs`.
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
            return within(decoder, name)
    tabled = sorted(name for family in FAMILIES for name in family.architectures)
    raise ModelError(f"no site table for {list(architectures or ())}; there are tables for {', '.join(tabled)}")


def _unmet(family: Family, config: Any) -> str:
    """The first of the family's needs that a config does not meet, as an error message; "" if it meets all."""
    for name, needed in family.needs.items():
        right = getattr(config, needed, None) if isinstance(needed, str) else needed
        if config is not None and getattr(config, name, right) != right:
            return f"the table of {family.name} models is for {name}={needed}, and this one has {getattr(config, name)}"
    return ""


def within(decoder: Decoder, architecture: str) -> Family:
    """A family's table for decoders within models of another class, with the module paths moved."""
    beside = decoder.below.removesuffix("model") if decoder.below.endswith(".model") else ""  # prefix of `lm_head`

    def moved(tap: Tap, below: str) -> Tap:
        inner = tap.module.removeprefix("model.")
        module = f"{below}.{inner}" if inner != tap.module else f"{beside}{inner}" if inner == "lm_head" else inner
        return msgspec.structs.replace(tap, module=module)

    points = {
        name: msgspec.structs.replace(
            kind, transformers=moved(kind.transformers, decoder.below), vllm=moved(kind.vllm, "language_model.model")
        )
        for name, kind in decoder.family.points.items()
    }
    return msgspec.structs.replace(decoder.family, architectures=(architecture,), points=points)
