"""Whether a live model's stream adds up.

The stream gains what attention and MLP return, and the end of one layer is the start of the next.  Where the table was
found in the model's modules, a layer may have another mixer than attention.
"""

from __future__ import annotations

import numpy as np

from patchclamp.language import Site
from patchclamp.lm import LM
from patchclamp.run import Run

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
DEFAULT_EPS = 2.0**-3  # of any other dtype
ADDED: tuple[str, ...] = ("attn_out", "mlp_out")
MIXERS: tuple[str, ...] = ("attn_out", "mixer_out")
HEAD_RTOL = 0.1  # of a head: keys and values may be kept in eight bits
STREAM: tuple[str, ...] = ("resid_pre", "resid_mid", "resid_post")


def sums(lm: LM, base: Run) -> dict[str, str]:
    """The words that a sum is about, each with the reason why it does not add up, "" if it does.

    Where a sum fails, all its words fail: it does not tell which of them is the wrong tensor.
    base: a run that captured everything
    """
    return _of_table(lm, base) if lm.sites.family.tabled else _of_modules(lm, base)


def _of_table(lm: LM, base: Run) -> dict[str, str]:
    names = lm.sites.names
    wrong = {name: "" for name in names if name in (*STREAM, *ADDED, "mixer_out")}
    added = _added(names, lm.sites.family.both)
    if not {"resid_pre", "resid_post"} <= set(names) or not added:
        return {}
    layers_of = {name: {ref.layer for ref in lm.sites.resolve(Site(name))} for name in added}
    for layer in range(lm.sites.layers):
        for before, gains, after in _stages(names, [name for name in layers_of if layer in layers_of[name]]):
            if after == "resid_post" and lm.sites.family.afterwards:
                continue
            terms = [f"{name}[{layer}]" for name in (before, *gains)]
            if not _close(lm, [_rows(base, term) for term in terms], _rows(base, f"{after}[{layer}]")):
                why = f"{' + '.join(terms)} is not {after}[{layer}]"
                # a layer's end and the next one's start are one point, and so one tensor
                words = (*gains, after, *(["resid_pre"] if after == "resid_post" else []))
                wrong |= {name: wrong[name] or why for name in words}
        if layer and not np.array_equal(_rows(base, f"resid_post[{layer - 1}]"), _rows(base, f"resid_pre[{layer}]")):
            why = f"resid_post[{layer - 1}] is not resid_pre[{layer}]"
            wrong |= {name: wrong[name] or why for name in ("resid_pre", "resid_post")}
    if (
        "mixer_out" in wrong and "attn_out" in wrong and not lm.sites.family.both
    ):  # in layers with attention they are one point
        wrong["attn_out"] = wrong["attn_out"] or wrong["mixer_out"]
    return wrong | _of_heads(lm, base) | _of_norms(lm, base)


def _added(names: list[str], both: bool) -> list[str]:
    """The words of what is added to the stream; `both`: attention and a state space add to it in each layer."""
    mixers = MIXERS if both else ("mixer_out",) if "mixer_out" in names else ("attn_out",)
    return [name for name in (*mixers, "mlp_out") if name in names]


def _stages(names: list[str], added: list[str]) -> list[tuple[str, tuple[str, ...], str]]:
    """Each part of a layer: the stream before it, what of `added` it adds, and the stream after it."""
    if "resid_mid" not in names:
        return [("resid_pre", tuple(added), "resid_post")]
    mixers = tuple(name for name in added if name in MIXERS)
    parts = [("resid_pre", mixers, "resid_mid"), ("resid_mid", tuple(added[len(mixers) :]), "resid_post")]
    return [part for part in parts if part[1]]


def _of_heads(lm: LM, base: Run) -> dict[str, str]:
    """The first token sees itself alone, so each of its heads returns the token's own value, or a part of it where
    attention may also go to nothing (sinks). A wrong tensor, or a wrong head, would point in another direction."""
    if lm.sites.family.gated or not {"v", "z"} <= set(lm.sites.names):
        return {}
    for ref in lm.sites.resolve(Site("z")):
        z_HE, v_KE = (_rows(base, f"{name}[{ref.layer}]")[0] for name in ("z", "v"))
        if z_HE.shape[-1] != v_KE.shape[-1]:
            return {}
        v_HE = np.repeat(v_KE, len(z_HE) // len(v_KE), axis=0)
        part_H = (z_HE * v_HE).sum(1) / np.maximum((v_HE**2).sum(1), 1e-30)
        gap_H = np.linalg.norm(z_HE - part_H[:, None] * v_HE, axis=1)
        wrong = (gap_H > HEAD_RTOL * np.linalg.norm(z_HE, axis=1)) | (part_H < -HEAD_RTOL) | (part_H > 1 + HEAD_RTOL)
        if wrong.any():
            head = int(wrong.argmax())
            group = head * len(v_KE) // len(z_HE)
            why = f"z[{ref.layer}, {head}] of the first token is not along v[{ref.layer}, {group}], all it can see"
            return {"v": why, "z": why}
    return {"v": "", "z": ""}


def _of_norms(lm: LM, base: Run) -> dict[str, str]:
    """A normed input differs from the stream that it is made of."""
    names, last = lm.sites.names, lm.sites.layers - 1
    wrong: dict[str, str] = {}
    for name, stream in (("attn_in", "resid_pre"), ("mlp_in", "resid_mid"), ("final_norm", "resid_post")):
        if name in names and stream in names:
            pairs = [(name, f"{stream}[{last}]")] if name == "final_norm" else [
                (str(ref), f"{stream}[{ref.layer}]") for ref in lm.sites.resolve(Site(name))
            ]  # fmt: skip
            same = next((pair for pair in pairs if np.array_equal(_rows(base, pair[0]), _rows(base, pair[1]))), None)
            wrong[name] = "" if same is None else f"{same[0]} is {same[1]}, and not what a norm makes of it"
    return wrong


def _of_modules(lm: LM, base: Run) -> dict[str, str]:
    names = [name for name in (*ADDED, "resid_mid") if name in lm.sites.names]
    layers_of = {name: {ref.layer for ref in lm.sites.resolve(Site(name))} for name in names}
    wrong: dict[str, str] = dict.fromkeys(names, "")
    for layer in range(lm.sites.layers):
        known = {"resid_pre", "resid_post"}  # rows that are the stream
        for before, gains, after in _stages_of_layer({name for name in names if layer in layers_of[name]}):
            terms = [f"{name}[{layer}]" for name in (before, *gains)]
            if _close(lm, [_rows(base, term) for term in terms], _rows(base, f"{after}[{layer}]")):
                known |= {before, after}
                continue
            why = f"{' + '.join(terms)} is not {after}[{layer}]"
            wrong |= {name: wrong[name] or why for name in {before, *gains, after} - known if name in wrong}
    return wrong


def _stages_of_layer(has: set[str]) -> list[tuple[str, tuple[str, ...], str]]:
    """The same of a layer that has some of the words. What another mixer than attention adds has none, so of such a
    layer only the sum after it can be checked. The sum with the MLP comes first: where it holds, it vouches for
    `resid_mid`."""
    if "resid_mid" not in has:
        gains = tuple(name for name in ADDED if name in has)
        return [("resid_pre", gains, "resid_post")] if gains else []
    stages = [("resid_mid", "mlp_out", "resid_post"), ("resid_pre", "attn_out", "resid_mid")]
    return [(before, (gain,), after) for before, gain, after in stages if gain in has]


def _close(lm: LM, terms: list[np.ndarray], total: np.ndarray) -> bool:
    """Whether terms add up to `total`, number by number, within the rounding of each in the model's dtype."""
    slack = 2 * EPS.get(lm.model.dtype, DEFAULT_EPS) * sum(np.abs(term) for term in (*terms, total))
    return bool((np.abs(sum(terms) - total) <= slack).all())


def _rows(base: Run, site: str) -> np.ndarray:
    return np.asarray(base[site]).astype(np.float64)
