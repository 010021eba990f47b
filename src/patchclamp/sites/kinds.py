"""What site tables are written with: kinds of points, and groups of them."""

from __future__ import annotations

from typing import Any

import msgspec

from patchclamp.language.site import SITES
from patchclamp.sites.families import STREAM, Family, Moment, PointKind, Size, Tap

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
