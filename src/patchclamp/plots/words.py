"""How a sweep is read, in words: titles, sentences, numbers and tokens, the same in every picture of it.

Tokens come from prompts and are never trusted: what cannot be seen is written out here, what a format would take for
markup is that format's to escape.
"""

from __future__ import annotations

import unicodedata
from pathlib import PurePath
from typing import Literal

from patchclamp.plots.reading import Spot, panels, share
from patchclamp.studies.sweep_result import PatchSweep

Mark = Literal["same", "differs", "skipped"]
Side = Literal["clean", "corrupt"]

_SEEN = {"\n": "↵", "\t": "⇥", "\r": "␍"}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def visible(token: str) -> str:
    """A token as a label: spaces and line breaks are seen, and no character is invisible or turns the text around."""
    return plain(token).replace(" ", "·") or "∅"


def plain(text: str) -> str:
    """As `visible`, but spaces stay spaces: for running text."""
    return "".join(_seen(character) for character in text)


def _seen(character: str) -> str:
    if character in _SEEN:
        return _SEEN[character]
    hidden = unicodedata.category(character)[0] in "CZ" and character != " "
    return f"⟨{ord(character):04X}⟩" if hidden else character


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters; what is left out is marked."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def quoted(token: str) -> str:
    return f"'{plain(token)}'"


def number(value: float) -> str:
    """Two decimals, two digits where those say nothing, a power of ten for what is tiny; the minus sign is one."""
    size = abs(value)
    if 0 < size < 1e-3:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.replace('-', '−')} × 10{str(int(power)).translate(_RAISED)}"
    text = f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.2g}"
    return text.replace("-", "−")


def signed(value: float) -> str:
    return ("+" if value >= 0 else "") + number(value)


def percent(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.0f} %".replace("-", "−")


def quantity(sweep: PatchSweep) -> str:
    """What the metric is of: `logit difference ' Paris' − ' Rome'`."""
    if sweep.foil is None or sweep.metric == "logprob":
        return f"log-probability of {quoted(sweep.answer)}"
    difference = f"logit difference {quoted(sweep.answer)} − {quoted(sweep.foil)}"
    return f"recovered share of the {difference}" if sweep.metric == "recovered" else difference


def title(sweep: PatchSweep) -> str:
    return f"Patching clean activations into the corrupt run: {quantity(sweep)}"


def unbroken(text: str) -> str:
    """A title whose quoted tokens keep the space they begin with on their line."""
    return text.replace("' ", "'\u00a0").replace("− '", "−\u00a0'")


def formula(sweep: PatchSweep) -> str:
    answer, foil = quoted(sweep.answer), quoted(sweep.foil or "")
    if sweep.foil is None or sweep.metric == "logprob":
        return f"log p({answer} | prompt)"
    if sweep.metric == "recovered":
        return f"(Δ patched − Δ corrupt) / (Δ clean − Δ corrupt), where Δ = logit({answer}) − logit({foil})"
    return f"logit({answer}) − logit({foil}) = log p({answer} | prompt) − log p({foil} | prompt)"


def explained(sweep: PatchSweep) -> str:
    """The metric in one sentence."""
    answer, foil = quoted(sweep.answer), quoted(sweep.foil or "")
    if sweep.foil is None or sweep.metric == "logprob":
        return f"The log-probability that the next token is {answer}; 0 would be certainty."
    if sweep.metric == "recovered":
        return (
            f"The part of the logit difference between {answer} and {foil} that the patch brings back: "
            "0 is the corrupt run, 1 the clean one."
        )
    return f"How much the next token's logit favours {answer} over {foil}; below 0 it favours {foil}."


def noise(sweep: PatchSweep) -> str:
    if sweep.noise_floor == 0:
        return "noise floor 0: reruns of the corrupt prompt agree exactly"
    return f"noise floor {number(sweep.noise_floor)}: smaller effects mean nothing"


def best(sweep: PatchSweep, spot: Spot, limit: int = 60) -> str:
    """`resid_pre[8] @ ·Tower, 3.12 (97 % of the way to clean)`, the label at most `limit` characters."""
    where = f"{panels(sweep)[spot.panel].name(spot.row)} @ {shorten(visible(sweep.columns[spot.column].label), limit)}"
    part = share(sweep, spot.value)
    return f"{where}, {number(spot.value)}" + ("" if part is None else f" ({percent(part)} of the way to clean)")


def ran_on(sweep: PatchSweep) -> str:
    return f"{model_name(sweep)} · {sweep.engine} · {sweep.dtype}"


def model_name(sweep: PatchSweep) -> str:
    """A hub id as it is; of a local folder its name, for pictures travel."""
    path = PurePath(sweep.model)
    return path.name if path.is_absolute() else sweep.model


def positions(numbers: tuple[int, ...]) -> str:
    """`3`, `3–5`, `3, 7`."""
    if len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}–{numbers[-1]}"
    return ", ".join(map(str, numbers))


def marks(sweep: PatchSweep, side: Side) -> list[Mark]:
    """For each token of a prompt: the same as its partner, different from it, or without one."""
    own, other = (0, 1) if side == "clean" else (1, 0)
    tokens = (sweep.clean_tokens, sweep.corrupt_tokens)
    skipped = {position for prompt, position, _ in sweep.skipped if prompt == side}
    same = {pair[own] for pair in sweep.alignment if tokens[own][pair[own]] == tokens[other][pair[other]]}
    return [
        "skipped" if position in skipped else "same" if position in same else "differs"
        for position in range(len(tokens[own]))
    ]
