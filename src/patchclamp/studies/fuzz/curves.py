"""A fuzz sweep as `Curves`: each measure against the strength, with its spread over prompts and seeds."""

from __future__ import annotations

import numpy as np

from patchclamp.plots import Chart, Curves, Line
from patchclamp.studies.fuzz.result import FuzzSweep

QUARTILES = "Median over prompts and seeds; the band has the middle half of them."
SHARES = "Share of prompts and seeds; the band is its 95 % interval over prompts (Wilson)."


def curves(sweep: FuzzSweep) -> Curves:
    """A chart each for agreement, divergence, perplexity and refusals, as far as they were asked for."""
    charts = [_agreement(sweep)]
    if not np.isnan(sweep.kl).any():
        charts.append(Chart(
            "First token", "divergence (nats)", (_quartiles(sweep, "KL from unfuzzed", sweep.kl),
                                                 _quartiles(sweep, "JS", sweep.js)), note=_divergence(sweep),
        ))  # fmt: skip
    if not np.isnan(sweep.perplexity).any():
        level = float(np.median(sweep.unfuzzed_perplexity))
        charts.append(Chart(
            "Fluency", "perplexity, unedited model", (_quartiles(sweep, "fuzzed answer", sweep.perplexity),),
            y_log=True, note=QUARTILES, level=level, level_label="unfuzzed answers",
        ))  # fmt: skip
    if not np.isnan(sweep.refused).any():
        lines = (_share(sweep, "refused", sweep.refused),)
        charts.append(Chart("Refusals", "share of answers", lines, y_range=(-0.02, 1.02), note=SHARES))
    prompts, _, seeds = sweep.exact.shape
    return Curves(
        title="Answers under noise of growing strength", x_label="strength", charts=tuple(charts), x_log=True,
        provenance=sweep.provenance.where,
        notes=(f"{prompts} prompts{' as chats' if sweep.chat else ''}, {seeds} seed{'s' if seeds > 1 else ''}, "
               f"{sweep.max_tokens} tokens, {_sampling(sweep)}; {sweep.noise}.",),
    )  # fmt: skip


def _agreement(sweep: FuzzSweep) -> Chart:
    lines = (_share(sweep, "same answer", sweep.exact), _quartiles(sweep, "share before it differs", sweep.prefix))
    note = "Same answer: share, with its 95 % interval over prompts. Share before it differs: median and middle half."
    return Chart("Agreement with the unfuzzed answer", "share", lines, y_range=(-0.02, 1.02), note=note)


def _divergence(sweep: FuzzSweep) -> str:
    of = "" if sweep.divergence == "full" else f" Of the {sweep.divergence}."
    return QUARTILES + of


def _quartiles(sweep: FuzzSweep, label: str, values: np.ndarray) -> Line:
    """Median, and the middle half."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=(0, 2))
    return Line(label, np.array(sweep.strengths), middle, low, high)


def _share(sweep: FuzzSweep, label: str, values: np.ndarray) -> Line:
    """How many are 1, with Wilson's interval. Prompts are its draws: a prompt's seeds are alike, and of them the share
    counts."""
    low, high = wilson(values.mean(2).sum(0), values.shape[0])
    return Line(label, np.array(sweep.strengths), values.mean((0, 2)), low, high)


def wilson(hits: np.ndarray, count: int, z: float = 1.959964) -> tuple[np.ndarray, np.ndarray]:
    """The interval of a share of `count` draws, 95 % unless `z` says otherwise.

    Source: Wilson 1927 ("Probable inference"), the score interval.
    """
    share = np.asarray(hits, np.float64) / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * np.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return np.clip(middle - half, 0, share), np.clip(middle + half, share, 1)


def _sampling(sweep: FuzzSweep) -> str:
    temperature = sweep.sampling.get("temperature")
    return f"sampled at temperature {temperature:g}" if temperature else "greedy"
