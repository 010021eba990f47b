"""What a raw hook where a site lies would have returned on each engine, and why that is not the site.

It follows from the tables; what the tables do not say of some families is said here.
"""

from __future__ import annotations

from typing import Literal

from patchclamp.sites.tables import Family, Tap

Engine = Literal["transformers", "vllm"]

_ITSELF = "the site itself"
_ONE_WORKER = "under tensor parallel only this worker's heads"
_INPUT = {
    "z": "the site is the input of the output projection. A hook on the attention module sees the projection's output, "
         f"where heads are mixed. A hook before the projection sees the site, but {_ONE_WORKER}",
    "neurons": "the site is the input of the down projection. A hook on the MLP sees the projection's output, where "
               "neurons are mixed. A hook before the projection sees the site, but under tensor parallel only this "
               "worker's neurons",
}  # fmt: skip
_CHOSEN = {
    "transformers": "a tuple of logits, weights and chosen experts. The experts are chosen by then, so a hook that "
                    "changes the logits changes nothing. Where patchclamp edits the site, it runs the router again on "
                    "the edited logits",
    "vllm": "the site itself. The fused kernel chooses the experts, and no hook reaches into that kernel",
}  # fmt: skip
_SCALED = {  # of `embed`: what the module of that name returns
    ("gemma2", "vllm"): "`embed_tokens` returns the embedding before it is scaled by √D; the site is after",
    ("gemma3", "vllm"): "`embed_tokens` returns the embedding before it is scaled by √D; the site is after",
    ("granite", "vllm"): "`embed_tokens` returns the embedding before `embedding_multiplier`; the site is after",
    ("granite_hybrid", "vllm"): "`embed_tokens` returns the embedding before `embedding_multiplier`; the site is after",
    ("granite_hybrid", "transformers"): "`embed_tokens` returns the embedding before `embedding_multiplier`; the site "
                                        "is after",
    ("bloom", "transformers"): "`word_embeddings` returns the embedding before its norm; the site is after",
    ("bloom", "vllm"): "`word_embeddings` returns the embedding before its norm; the site is after",
    ("granite", "transformers"): "`embed_tokens` returns the embedding before `embedding_multiplier`; the site is "
                                 "after",
}  # fmt: skip
_CAPPED = {
    "gemma2": "are capped (`final_logit_softcapping`)", "gemma3": "are capped, if the config caps them",
    "granite": "are divided by `logits_scaling`", "granite_hybrid": "are divided by `logits_scaling`",
    "cohere": "are multiplied by `logit_scale`",
}  # fmt: skip


def raw(family: Family, word: str, engine: Engine) -> str:
    """What a plain hook would see, for one site word of a family on an engine."""
    kind, _ = family.sites[word]
    tap: Tap = getattr(family.points[kind], engine)
    if word == "logits":
        return _logits(family, engine)
    if word in _INPUT:
        return _INPUT[word]
    if word == "router":
        return _CHOSEN[engine if tap.rerun or engine == "vllm" else "vllm"]
    if word in ("q", "k", "v"):
        return _projection(family, tap, engine)
    if word == "mixer_out":
        scale = f"; the stream gets it times `{tap.scale}`, and the site is that product" if tap.scale else ""
        return f"where the mixer is attention, as at `attn_out`; elsewhere {'a tensor' if scale else _ITSELF}{scale}"
    if word in ("attn_out", "mlp_out"):
        return _added(family, word, tap, engine)
    if kind in ("stream", "mid", "embed"):
        return _stream(family, word, tap, engine)
    if word in ("attn_in", "mlp_in", "final_norm"):
        return _shared(word) if tap.moment == "in" and word != "final_norm" else _normed(family, word, engine)
    raise KeyError(f"nothing is said of a raw hook at {word}: say it in _INPUT, or in a function as _normed")


def paired(family: Family) -> bool:
    """Whether vLLM carries this family's stream as two tensors."""
    return family.points["stream"].vllm.residual is not None


def _logits(family: Family, engine: Engine) -> str:
    if (name := family.name.removesuffix("_experts")) in _CAPPED:
        return f"the head's logits before they {_CAPPED[name]}; the site is after"
    if engine == "transformers":
        return f"{_ITSELF}, of the positions that the call asked for"
    return "under tensor parallel the head's logits lie split over the workers; the site is what the sampler receives"


def _projection(family: Family, tap: Tap, engine: Engine) -> str:
    normed = "norm" in tap.module
    if tap.of and tap.mixed:
        made = ["queries, keys and values interleaved head by head: [q, k, v] of the first head, then of the next"]
        if family.name == "falcon":
            made = ["queries, keys and values interleaved by key/value head: its queries, its key, its value, then the "
                    "next one's"]  # fmt: skip
    elif tap.of:
        made = ["queries, keys and values side by side in one tensor"]
    elif tap.by_head:
        made = ["[B, H, T, E], heads before positions"]
    else:
        made = ["the site itself"]
    if engine == "vllm" and not family.backend and tap.of:
        made.append("in a tuple with the bias")
    if engine == "vllm":
        made.append(_ONE_WORKER)
    return ", ".join(made) + ("; one on the projection sees them before their norm" if normed else "")


def _added(family: Family, word: str, tap: Tap, engine: Engine) -> str:
    module = "self_attn" if word == "attn_out" else "mlp"
    made = []
    hub = engine == "transformers" or family.backend
    if tap.module.endswith("norm"):
        made.append(f"`{module}` returns its output before the norm that follows; the site is after that norm: what is "
                    "added to the stream")  # fmt: skip
    elif hub and word == "attn_out":
        made.append("a tuple of the output and the attention weights; the first is the site")
    elif tap.module.endswith("fc2"):
        made.append((_ITSELF if hub else "a tuple with the bias") + "; there is no module for the whole MLP")
    elif hub and family.name == "gpt_oss":
        made.append("a tuple of the output and the router's scores; the first is the site")
    if tap.scale:
        made = [part.replace("the site", "what the site is made of") for part in made]
        made.append(f"the stream gets it times `{tap.scale}`, and the site is that product")
    if engine == "vllm" and paired(family):
        made.append(("" if made else f"{_ITSELF}, but ") + "the next norm writes the stream into this tensor, so a "
                    "reference that a hook keeps shows other numbers later")  # fmt: skip
    return "; ".join(made) or _ITSELF


def _stream(family: Family, word: str, tap: Tap, engine: Engine) -> str:
    name = family.name.removesuffix("_experts")
    if word == "embed" and (scaled := _SCALED.get((name, engine))):
        return scaled
    if word == "embed":
        return "the embedding alone; the position's is added after it" if "embed" in family.points else _ITSELF
    if tap.residual is None:
        if isinstance(tap.hidden, str):
            return f"a layer is handed its arguments by name; `{tap.hidden}` is the site"
        if tap.hidden:
            return "a layer's first argument is the positions; its second is the site"
        return _ITSELF
    if word == "resid_mid":
        return ("the norm is handed what attention added, and the stream before that. The site is neither of the two, "
                "but their sum, in fp32")  # fmt: skip
    order = "(hidden, positions, residual)" if tap.hidden == 0 else "(positions, hidden, residual)"
    order = "`hidden_states` and `residual`, by name," if isinstance(tap.hidden, str) else order
    return (f"a layer is handed {order} and returns (hidden, residual): what the last MLP added, and the stream before "
            "that. The site is neither of the two, but their sum, in fp32")  # fmt: skip


def _normed(family: Family, word: str, engine: Engine) -> str:
    if engine == "vllm" and paired(family):
        first = ", but a bare tensor in layer 0" if word == "attn_in" else ""
        return f"a tuple of the normed rows and the stream{first}; the first is the site"
    return _ITSELF


def _shared(word: str) -> str:
    other = "the MLP" if word == "attn_in" else "attention"
    return f"{_ITSELF}, in a tensor that {other} may read too: what a hook writes into it may change both"
