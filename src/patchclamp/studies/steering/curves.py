"""Steering vectors and their strength curves as `Curves`."""

from __future__ import annotations

import numpy as np

from patchclamp.errors import ProgramError
from patchclamp.plots import Chart, Curves, Line
from patchclamp.plots.words import quoted, shorten, signed
from patchclamp.studies.steering.result import SteeringVectors
from patchclamp.studies.steering.strengths import StrengthCurve

NAMES = {"mean": "difference of means", "pca": "first component of the pairs' differences", "probe": "linear probe"}


def of_layers(vectors: SteeringVectors) -> Curves:
    """The held-out check of every layer."""
    if vectors.best is None:
        raise ProgramError("no prompts were held out, so there is no check of the layers to draw", "held_out")
    layers = np.array(vectors.layers, np.float64)
    held = vectors.positive.held_out + vectors.negative.held_out
    separation = np.where(np.isfinite(vectors.separation), vectors.separation, np.nan)
    charts = []
    if not np.isnan(vectors.effect).any():
        effect = Line("effect", layers, vectors.effect)
        charts.append(Chart("Effect on held-out negative prompts", "score, nats", (effect,), level=0.0,
                            level_label="no effect"))  # fmt: skip
    return Curves(
        title=f"Steering vectors by layer: {NAMES[vectors.method]}", x_label="layer",
        charts=(
            *charts,
            Chart("Held-out accuracy", "share", (Line("accuracy", layers, vectors.accuracy),), y_range=(-0.02, 1.02),
                  level=0.5, level_label="chance"),
            Chart("Held-out separation", "standard deviations", (Line("separation", layers, separation),)),
            Chart("Length", "norm", (Line("vector", layers, np.linalg.norm(vectors.vectors, axis=1).astype(np.float64)),
                                     Line("rows it was made of", layers, vectors.row_norm)), y_log=True),
        ),
        provenance=vectors.provenance.where,
        notes=(f"{vectors.site} at {vectors.tokens}; {vectors.positive.count} positive and {vectors.negative.count} "
               f"negative prompts, {held} of them held out. Best: layer {vectors.best}.",),
    )  # fmt: skip


def of_strengths(curve: StrengthCurve) -> Curves:
    """The mean score against the scale, with quartiles over prompts."""
    low, high = np.quantile(curve.scores, (0.25, 0.75), axis=0)
    scales = np.array(curve.scales)
    lines = [Line("mean over prompts", scales, curve.scores.mean(0), low, high)]
    charts = [Chart(_score(curve), "nats", tuple(lines), note="The band has the middle half of the prompts.")]
    if curve.foils is not None:
        both = (Line("answer", scales, curve.logprobs.mean(0)), Line("foil", scales, curve.foil_logprobs.mean(0)))
        charts.append(Chart("Each continuation's log-probability", "nats", both, note="Means over prompts."))
    count, layers = len(curve.prompts), ", ".join(map(str, curve.layers))
    where = f"layer{'s' if len(curve.layers) > 1 else ''} {layers}, on {_tokens(curve.tokens)}"
    prompts = f"{count} prompt{'s' if count > 1 else ''}"
    return Curves(
        title="A behaviour's score by steering strength", x_label="scale", charts=tuple(charts),
        provenance=curve.provenance.where,
        notes=(f"{curve.vectors}, {where}; {prompts}; {signed(curve.slope)} nats by a scale of 1.",),
    )  # fmt: skip


def _tokens(tokens: str) -> str:
    return "every token" if tokens == "every" else tokens


def _score(curve: StrengthCurve) -> str:
    answer = _shown(curve.answers)
    return f"log p({answer})" if curve.foils is None else f"log p({answer}) − log p({_shown(curve.foils)})"


def _shown(texts: tuple[str, ...]) -> str:
    return quoted(shorten(texts[0], 24)) if len(set(texts)) == 1 else "its own"
