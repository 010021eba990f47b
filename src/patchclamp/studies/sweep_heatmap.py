"""A patch sweep as a `Heatmap`: its panels, both prompts marked token by token, and what its metric is in words."""

from __future__ import annotations

from pathlib import PurePath

from patchclamp.language.registry import SITES
from patchclamp.plots import Column, Heatmap, Mark, Panel, Strip
from patchclamp.plots.words import quoted
from patchclamp.studies.sweep_result import PatchSweep


def heatmap(sweep: PatchSweep) -> Heatmap:
    """One panel a site, those without layers last."""
    panels = [_panel(sweep, number, site) for number, site in enumerate(sweep.sites)]
    return Heatmap(
        title=f"Patching clean activations into the corrupt run: {quantity(sweep)}", metric=sweep.metric,
        formula=formula(sweep), explained=explained(sweep),
        provenance=f"{model_name(sweep)} · {sweep.engine} · {sweep.dtype}",
        panels=tuple(sorted(panels, key=lambda panel: panel.rows == (None,))),
        columns=tuple(Column(column.label, column.clean, column.corrupt) for column in sweep.columns),
        clean=sweep.clean, corrupt=sweep.corrupt, noise_floor=sweep.noise_floor,
        strips=(Strip("clean", sweep.clean_tokens, marks(sweep, 0)),
                Strip("corrupt", sweep.corrupt_tokens, marks(sweep, 1))),
    )  # fmt: skip


def _panel(sweep: PatchSweep, number: int, site: str) -> Panel:
    if site in SITES and not SITES[site].layered:
        return Panel(site, (None,), sweep.grid[number, :1])
    return Panel(site, sweep.layers, sweep.grid[number])


def marks(sweep: PatchSweep, own: int) -> tuple[Mark, ...]:
    """For each token of the clean prompt (`own` 0) or the corrupt one (1): how it is to its partner, if it has one."""
    tokens = (sweep.clean_tokens, sweep.corrupt_tokens)
    skipped = {position for side, position, _ in sweep.skipped if side == ("clean", "corrupt")[own]}
    same = {pair[own] for pair in sweep.alignment if tokens[0][pair[0]] == tokens[1][pair[1]]}
    return tuple(
        "skipped" if position in skipped else "same" if position in same else "differs"
        for position in range(len(tokens[own]))
    )


def quantity(sweep: PatchSweep) -> str:
    """What the metric is of: `logit difference ' Paris' − ' Rome'`."""
    if sweep.foil is None or sweep.metric == "logprob":
        return f"log-probability of {quoted(sweep.answer)}"
    difference = f"logit difference {quoted(sweep.answer)} − {quoted(sweep.foil)}"
    return f"recovered share of the {difference}" if sweep.metric == "recovered" else difference


def formula(sweep: PatchSweep) -> str:
    """How the metric is computed."""
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


def model_name(sweep: PatchSweep) -> str:
    """A hub id as it is; of a local folder its name, for pictures travel."""
    path = PurePath(sweep.model)
    return path.name if path.is_absolute() else sweep.model
