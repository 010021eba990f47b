"""A sweep as a `Heatmap`: its panels, its prompts marked token by token, and what its metric is in words."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import numpy as np

from patchclamp.language.site import SITES
from patchclamp.plots import Anchor, Column, Heatmap, Mark, Panel, Strip
from patchclamp.plots.words import number, quoted, visible
from patchclamp.studies.sweep_result import CausalTrace, PatchSweep, PathPatch, Sweep

ACROSS = 4  # up to so many columns, parts of a site (heads, …) stand across, and each column has panels of its own
EFFECT = (("effect from", "effect_low"), ("effect to", "effect_high"))
DETAILS = (("95 % interval from", "low"), ("to", "high"), *EFFECT, ("p", "p"), ("p among all cells", "p_family"))
OVER_SEEDS = (("95 % interval over seeds from", "low"), ("to", "high"), *EFFECT)  # of one prompt, which has no p-values


def heatmap(sweep: Sweep) -> Heatmap:
    """One panel a site, those without layers last. Heads, neurons and experts stand across where there are few
    columns."""
    panels, columns, axis = _by_part(sweep) if _parts_across(sweep) else _by_site(sweep)
    base, goal = sweep.patched, sweep.goal
    other = "clean" if base == "corrupt" else "corrupt"
    return Heatmap(
        title=f"{did(sweep)}: {quantity(sweep)}", metric=sweep.metric, formula=formula(sweep),
        explained=explained(sweep), provenance=f"{model_name(sweep)} · {sweep.engine} · {sweep.dtype}",
        panels=panels, columns=columns, baseline=Anchor(_name(sweep, base), base, sweep.baseline),
        goal=None if goal is None else Anchor(other, other, goal), noise_floor=sweep.noise_floor, strips=_strips(sweep),
        cell=_cell(sweep), axis=axis, note=_note(sweep),
    )  # fmt: skip


# -- the grid


def _by_site(sweep: Sweep) -> tuple[tuple[Panel, ...], tuple[Column, ...], str]:
    """A panel for each site, or part of one; the sweep's columns across."""
    panels = [
        Panel(name, _layers(sweep, name), *_cut(sweep, name, lambda of, s: of[s]))
        for name in sweep.sites
    ]  # fmt: skip
    columns = tuple(Column(column.label, column.clean, column.corrupt) for column in sweep.columns)
    return tuple(sorted(panels, key=lambda panel: panel.rows == (None,))), columns, _axis(sweep)


def _cut(
    sweep: Sweep, name: str, pick: Any
) -> tuple[np.ndarray, np.ndarray | None, tuple[tuple[str, np.ndarray], ...]]:
    """A panel's values, those of its blocks, and its details."""
    at = sweep.sites.index(name)
    rows = 1 if _layers(sweep, name) == (None,) else len(sweep.layers)
    coarse = _coarse(sweep)
    details = [(label, getattr(sweep, field)) for label, field in (OVER_SEEDS if sweep.p is None else DETAILS)]
    return (
        pick(sweep.grid, at)[:rows],
        None if coarse is None else pick(sweep.as_grid(coarse), at)[:rows],
        tuple((label, pick(sweep.as_grid(of), at)[:rows]) for label, of in details if of is not None),
    )


def _layers(sweep: Sweep, name: str) -> tuple[int | None, ...]:
    return (None,) if name in SITES and not SITES[name].layered else sweep.layers


def _parts_across(sweep: Sweep) -> bool:
    """Whether every row is a part of a site, and there are more parts than columns."""
    return all(row.index for row in sweep.rows) and len(sweep.columns) <= min(ACROSS, len(sweep.sites))


def _by_part(sweep: Sweep) -> tuple[tuple[Panel, ...], tuple[Column, ...], str]:
    """A panel for each site and column of the sweep; the site's parts across."""
    parts = tuple(dict.fromkeys(row.index for row in sweep.rows))
    names = tuple(dict.fromkeys(row.site for row in sweep.rows))
    panels = []
    for p, column in enumerate(sweep.columns):
        for name in names:
            wanted = {f"{name}[:, {part}]": i for i, part in enumerate(parts)}
            there = {i: sweep.sites.index(panel) for panel, i in wanted.items() if panel in sweep.sites}

            def of(grid: np.ndarray, _: int, there: dict[int, int] = there, p: int = p) -> np.ndarray:
                picked = np.full((len(sweep.layers), len(parts)), np.nan)
                for i, s in there.items():
                    picked[:, i] = grid[s, :, p]
                return picked

            join = "→" if isinstance(sweep, PathPatch) else "@"
            title = f"{name} {join} {visible(column.label)}"
            cut = _cut(sweep, sweep.sites[0], of)
            panels.append(Panel(title, sweep.layers, *cut, part_of=(name, column.label)))
    first = sweep.columns[0]
    positions = (first.clean, first.corrupt) if len(sweep.columns) == 1 else ((), ())
    kinds = {SITES[name].index for name in names}
    return tuple(panels), tuple(Column(part, *positions) for part in parts), kinds.pop() if len(kinds) == 1 else "part"


def _coarse(sweep: Sweep) -> np.ndarray | None:
    """The value of the smallest block that each cell was in, [R, P]."""
    if not sweep.blocks:
        return None
    coarse = np.full(sweep.values.shape, np.nan)
    for block in sorted(sweep.blocks, key=lambda block: -len(block.rows) * len(block.columns)):
        coarse[np.ix_(block.rows, block.columns)] = block.value
    return coarse


# -- prompts


def _strips(sweep: Sweep) -> tuple[Strip, ...]:
    if sweep.corrupt is None or isinstance(sweep, CausalTrace):
        subject = sweep.subjects[0] if isinstance(sweep, CausalTrace) else ()
        side = "corrupt" if isinstance(sweep, CausalTrace) else "clean"
        own: list[Mark] = ["differs" if p in subject else "same" for p in range(len(sweep.clean_tokens))]
        return (Strip(side, sweep.clean_tokens, tuple(own), "noised" if side == "corrupt" else "prompt"),)
    return (
        Strip("clean", sweep.clean_tokens, marks(sweep, 0)),
        Strip("corrupt", sweep.corrupt_tokens, marks(sweep, 1)),
    )


def marks(sweep: Sweep, own: int) -> tuple[Mark, ...]:
    """For each token of the clean prompt (`own` 0) or the corrupt one (1): how it is to its partner, if it has one."""
    tokens = (sweep.clean_tokens, sweep.corrupt_tokens)
    skipped = {position for side, position, _ in sweep.skipped if side == ("clean", "corrupt")[own]}
    same = {pair[own] for pair in sweep.alignment if tokens[0][pair[0]] == tokens[1][pair[1]]}
    return tuple(
        "skipped" if position in skipped else "same" if position in same else "differs"
        for position in range(len(tokens[own]))
    )


# -- words


def did(sweep: Sweep) -> str:
    """What was done to the runs."""
    if sweep.kind == "ablation":
        return f"Ablating one place at a time{_by(sweep)}"
    if sweep.kind == "trace":
        return "Restoring clean activations in runs with a noised subject"
    if sweep.kind == "path":
        return "Patching the paths from senders to receivers"
    return f"Patching {sweep.source or _read(sweep)} into the {sweep.patched} run"


def _read(sweep: Sweep) -> str:
    """What a patch writes if nothing else is said."""
    return f"{'clean' if sweep.patched == 'corrupt' else 'corrupt'} activations"


def _by(sweep: Sweep) -> str:
    return f" by {sweep.source}" if sweep.source else ""


def _cell(sweep: Sweep) -> str:
    """What a cell is."""
    one, other = ("corrupt", "clean") if sweep.patched == "corrupt" else ("clean", "corrupt")
    if sweep.kind == "ablation":
        return f"the run with one place ablated{_by(sweep)}"
    if sweep.kind == "trace":
        return "a run with the subject noised and one place restored"
    if sweep.kind == "path":
        return f"the {one} run with the way from a sender to a receiver patched from the {other} run"
    if sweep.source not in ("", _read(sweep)):
        return f"the {one} run with one place patched with {sweep.source}"
    return f"the {one} run with one place patched from the {other} run"


def _axis(sweep: Sweep) -> str:
    if sweep.kind == "path":
        return "receiver"
    if isinstance(sweep, PatchSweep):
        return f"token of the {sweep.patched} prompt"
    return "token"


def _name(sweep: Sweep, side: str) -> str:
    if sweep.kind == "ablation":
        return "unablated"
    return "noised" if sweep.kind == "trace" else side


def _note(sweep: Sweep) -> str:
    notes = []
    units = len(sweep.each)
    if isinstance(sweep, CausalTrace):
        notes.append(f"Noise of standard deviation {number(sweep.std)} on the embeddings of the subject.")
    if units > 1:
        pairs = len(sweep.pairs)
        of = (
            f"{pairs} prompts"
            if sweep.corrupt is None or isinstance(sweep, CausalTrace)
            else f"{pairs} pairs of prompts"
        )
        if isinstance(sweep, CausalTrace):
            of = f"{of} and {units // pairs} noise seeds each" if pairs > 1 else f"{units} noise seeds"
        notes.append(f"Means over {of}" + ("; the first is shown." if pairs > 1 else "."))
    return " ".join(notes)


def quantity(sweep: Sweep) -> str:
    """What the metric is of: `logit difference ' Paris' − ' Rome'`."""
    if len({(pair.answer, pair.foil) for pair in sweep.pairs}) > 1:
        answer, foil = "the answer", "the foil"
    else:
        answer, foil = quoted(sweep.answer), quoted(sweep.foil or "")
    if sweep.metric == "prob":
        return f"probability of {answer}"
    if sweep.metric == "logprob" or sweep.foil is None:
        return f"log-probability of {answer}"
    difference = f"{'log-probability' if _several(sweep) else 'logit'} difference {answer} − {foil}"
    return f"recovered share of the {difference}" if sweep.metric == "recovered" else difference


def formula(sweep: Sweep) -> str:
    """How the metric is computed."""
    answer, foil = quoted(sweep.answer), quoted(sweep.foil or "")
    if sweep.metric == "prob":
        return f"p({answer} | prompt)"
    if sweep.metric == "logprob" or sweep.foil is None:
        return f"log p({answer} | prompt)"
    if sweep.metric == "recovered":
        difference = f"log p({answer}) − log p({foil})" if _several(sweep) else f"logit({answer}) − logit({foil})"
        return f"(Δ patched − Δ corrupt) / (Δ clean − Δ corrupt), where Δ = {difference}"
    difference = f"log p({answer} | prompt) − log p({foil} | prompt)"
    return difference if _several(sweep) else f"logit({answer}) − logit({foil}) = {difference}"


def _several(sweep: Sweep) -> bool:
    """Whether an answer or a foil has several tokens: their log-probabilities are sums, and no logits."""
    return any(len(ids or ()) > 1 for pair in sweep.pairs for ids in (pair.answer_ids, pair.foil_ids))


def explained(sweep: Sweep) -> str:
    """The metric in one sentence."""
    answer, foil = quoted(sweep.answer), quoted(sweep.foil or "")
    if sweep.metric == "prob":
        return f"The probability that the prompt goes on with {answer}."
    if sweep.metric == "logprob" or sweep.foil is None:
        return f"The log-probability that the prompt goes on with {answer}; 0 would be certainty."
    if sweep.metric == "recovered":
        back = "brings back" if sweep.direction == "denoising" else "leaves"
        return (
            f"The part of the logit difference between {answer} and {foil} that the patch {back}: "
            "0 is the corrupt run, 1 the clean one."
        )
    return f"How much the model favours {answer} over {foil}; below 0 it favours {foil}."


def model_name(sweep: Sweep) -> str:
    """A hub id as it is; of a local folder its name, for pictures travel."""
    path = PurePath(sweep.model)
    return path.name if path.is_absolute() else sweep.model
