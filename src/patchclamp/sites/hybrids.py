"""The tables of families in which some layers have a state space or linear attention for attention."""

from __future__ import annotations

from typing import Any

import msgspec

from patchclamp.language.site import SITES
from patchclamp.sites.families import Family, PointKind, Tap
from patchclamp.sites.kinds import (
    ATTENTION,
    MLP,
    NO_EXPERTS,
    L,
    end,
    in_attention,
    kind,
    projections,
    recurrent,
    results,
    same,
    sharded,
    without,
)

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
