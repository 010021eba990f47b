"""The site tables: one a model family, Transformers and vLLM side by side."""

from __future__ import annotations

from typing import Any

import msgspec

from patchclamp.errors import ModelError
from patchclamp.sites.families import Family, Moment, PointKind, Size, Tap

L, NORM = "model.layers.{l}", "model.norm"
ATTENTION, MLP = L + ".self_attn", L + ".mlp"
QKV: tuple[Size, ...] = ("Q", "K", "K")
PARTS: tuple[tuple[str, Size], ...] = (("q", "Q"), ("k", "K"), ("v", "K"))
NO_EXPERTS = {"router": "its layers have one MLP each, and no experts to choose from"}
FUSED = {"neurons": "its experts run in one fused kernel, which keeps what they hold to itself"}


def kind(transformers: Tap, vllm: Tap | None = None, width: Size = "D", **rest: Any) -> PointKind:
    """A kind of point, of its tap on Transformers and on vLLM, which is the same if it is not given. `rest`: other
    fields of `PointKind`."""
    return PointKind(transformers, transformers if vllm is None else vllm, width, **rest)


def same(module: str, moment: Moment = "out", width: Size = "D", **rest: Any) -> PointKind:
    """A kind whose tap is the same on both engines."""
    return kind(Tap(module, moment), width=width, **rest)


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


def merged(module: str, transformers: str | None = None, mixed: bool = False) -> dict[str, PointKind]:
    """Queries, keys and values, side by side in the output of one projection on both engines."""

    def tap(module: str, part: int) -> Tap:
        return Tap(module, "out", of=QKV, part=part, mixed=mixed)

    return {
        word: sharded(tap(transformers or module, part), tap(module, part), width)
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
    kinds = {word: kind for word, kind in (family.points | points).items() if word not in why or word in points}
    return Family(name, tuple(architectures.split()), kinds, why)


def on_backend(family: Family) -> Family:
    """The family, run by vLLM's Transformers backend: its vLLM taps are at that backend's modules."""
    return msgspec.structs.replace(family, backend=True)


# vLLM hands a layer (positions, hidden, residual): the stream is hidden + residual; a fused norm's two inputs are what
# was added last and the stream before it
LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
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
# a norm before and another after attention and MLP: what comes out of the second is added to the stream
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
# what attention and MLP make is added times a factor; `attn_out` and `mlp_out` are what is added
GRANITE = without(
    LLAMA, "granite", "GraniteForCausalLM", NO_EXPERTS,
    stream=kind(Tap(L, "in"), Tap(L, "in", 1)),
    mid=same(L + ".post_attention_layernorm", "in"),
    attn_out=kind(Tap(ATTENTION, "out", scale="residual_multiplier")),
    mlp_out=kind(Tap(MLP, "out", scale="residual_multiplier")),
    **end(NORM),
)  # fmt: skip
MIXTRAL = without(
    LLAMA, "mixtral", "MixtralForCausalLM", FUSED,
    router=kind(Tap(MLP + ".gate", "out", rerun=True), Tap(L + ".block_sparse_moe.gate", "out"), "X"),
    mlp_out=kind(Tap(MLP, "out"), Tap(L + ".block_sparse_moe", "out")),
)  # fmt: skip
QWEN3_MOE = without(
    LLAMA, "qwen3_moe", "Qwen3MoeForCausalLM", {}, **NORMED,
    neurons=sharded(Tap(MLP + ".down_proj", "in"), width="M", layers="dense"),
    router=kind(Tap(MLP + ".gate", "out", rerun=True), Tap(MLP + ".gate", "out"), "X", layers="sparse"),
)  # fmt: skip
GPT_OSS = without(
    LLAMA, "gpt_oss", "GptOssForCausalLM", FUSED,
    stream=kind(Tap(L, "in"), Tap(L, "in", 0, 2)),
    **projections(ATTENTION + ".{w}_proj", L + ".attn.qkv_proj", "q", "k", "v"),
    z=results(ATTENTION + ".o_proj", L + ".attn.attn"),
    attn_out=kind(Tap(ATTENTION, "out"), Tap(L + ".attn", "out")),
    router=kind(Tap(MLP + ".router", "out", rerun=True), Tap(MLP + ".router", "out"), "X"),
)  # fmt: skip
LATENT = "its attention keeps one latent row for all heads, from which the kernel makes keys and values"
DEEPSEEK = msgspec.structs.replace(without(
    LLAMA, "deepseek", "DeepseekV2ForCausalLM DeepseekV3ForCausalLM",
    {"q": LATENT + ", and what it asks with", "k": LATENT, "v": LATENT},
    z=sharded(Tap(ATTENTION + ".o_proj", "in"), width="Z"),
    neurons=sharded(Tap(MLP + ".down_proj", "in"), width="M", layers="dense"),
    router=kind(Tap(MLP + ".gate", "out", rerun=True), Tap(MLP + ".gate", "out"), "X", layers="sparse"),
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

# through vLLM's Transformers backend: the same modules, below `model`, with merged projections, on rows [1, T, D]
OLMO2 = on_backend(without(
    LLAMA, "olmo2", "Olmo2ForCausalLM",
    NO_EXPERTS | {"attn_in": "its attention reads the stream itself, resid_pre",
                  "mlp_in": "its MLP reads the stream itself, resid_mid"},
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
    lacks=NO_EXPERTS
    | {"resid_mid": "attention and MLP both read the stream before the layer, and none is between them"},
    needs={"use_parallel_residual": True},
    backend=True,
)

FAMILIES: tuple[Family, ...] = (
    LLAMA, QWEN3, PHI3, GEMMA2, GEMMA3, GRANITE, OLMO2, GPT2, OPT, GPT_NEOX, MIXTRAL, QWEN3_MOE, GPT_OSS, DEEPSEEK,
)  # fmt: skip

# of models that also read images: the class, the model type of its decoder's config, and the family of the decoder
DECODERS: dict[str, tuple[str, Family]] = {
    "Gemma3ForConditionalGeneration": ("gemma3_text", GEMMA3),
    "Mistral3ForConditionalGeneration": ("mistral", LLAMA),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text", LLAMA),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text", LLAMA),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text", QWEN3),
}


def has_table(architectures: list[str] | tuple[str, ...] | None, config: Any = None) -> bool:
    """Whether `family_of` finds a family."""
    try:
        return bool(family_of(architectures, config))
    except ModelError:
        return False


def family_of(architectures: list[str] | tuple[str, ...] | None, config: Any = None) -> Family:
    """The family whose table lists one of a config's `architectures`; of a model that also reads images, that of its
    decoder, whose config this is.

    Raises: `ModelError` if none does, and for a config that is not as the family `needs` it.
    """
    for family in FAMILIES:
        if set(family.architectures) & set(architectures or ()):
            for name, needed in family.needs.items():
                right = getattr(config, needed, None) if isinstance(needed, str) else needed
                if config is not None and getattr(config, name, right) != right:
                    raise ModelError(
                        f"the table of {family.name} models is for {name}={needed}, and this one has "
                        f"{getattr(config, name)}"
                    )
            return family
    for name in architectures or ():
        text, family = DECODERS.get(name, ("", LLAMA))
        if text and getattr(config, "model_type", text) == text:
            return within(family, name)
    tabled = sorted(name for family in FAMILIES for name in family.architectures)
    raise ModelError(f"no site table for {list(architectures or ())}; there are tables for {', '.join(tabled)}")


def within(family: Family, architecture: str) -> Family:
    """A family's table for decoders within models of another class, below other names."""

    def moved(tap: Tap, below: str) -> Tap:
        inner = tap.module.removeprefix("model.")
        return tap if inner == tap.module else msgspec.structs.replace(tap, module=f"{below}.{inner}")

    points = {
        name: msgspec.structs.replace(
            kind, transformers=moved(kind.transformers, "model.language_model"),
            vllm=moved(kind.vllm, "language_model.model"),
        )
        for name, kind in family.points.items()
    }  # fmt: skip
    return msgspec.structs.replace(family, architectures=(architecture,), points=points)
