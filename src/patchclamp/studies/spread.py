"""How far the mean of several prompt pairs can be trusted: a confidence interval, and a test that it is not 0.

N pairs · C cells
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEVEL = 0.95
BOOTSTRAPS, FLIPS = 2_000, 10_000
EXACT = 13  # pairs up to which every sign is tried: 2 ** 13 is below FLIPS
_AT_ONCE = 1 << 22  # numbers of one matrix


class Spread(NamedTuple):
    """Of each cell [C]: the ends of the 95 % intervals of its mean and of its mean effect, and the p-value of the
    effect, alone and as one of all cells."""

    low: np.ndarray
    high: np.ndarray
    effect_low: np.ndarray
    effect_high: np.ndarray
    p: np.ndarray
    p_family: np.ndarray


def spread(values_NC: np.ndarray, base_N: np.ndarray, seed: int) -> Spread:
    """Interval and p-values of the mean over pairs.

    values_NC: of each pair; base_N: of its unpatched run, over which effects are measured
    Both intervals are the percentile bootstrap's over pairs, from the same draws; an effect is a pair's value minus the
    same pair's base, so the spread of the bases does not widen its interval. The test flips the signs of pairs'
    effects: without any, an effect and its opposite are equally likely. `p_family` compares with the largest statistic
    of all cells, so it holds for all of them together.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, 13.3; sign flips with the largest statistic,
    Nichols and Holmes 2002 (Human Brain Mapping 15), and Westfall and Young 1993.
    """
    effects_NC = values_NC - base_N[:, None]
    intervals = [_interval(of, np.random.default_rng((seed, 0))) for of in (values_NC, effects_NC)]
    return Spread(*intervals[0], *intervals[1], *_p_values(effects_NC, np.random.default_rng((seed, 1))))


def _interval(values_NC: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    pairs, cells = values_NC.shape
    weights_BN = draw.multinomial(pairs, np.full(pairs, 1 / pairs), BOOTSTRAPS) / pairs
    low, high = np.empty(cells), np.empty(cells)
    step = max(_AT_ONCE // BOOTSTRAPS, 1)
    for begin in range(0, cells, step):
        means_BC = weights_BN @ values_NC[:, begin : begin + step]
        tails = np.quantile(means_BC, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        low[begin : begin + step], high[begin : begin + step] = tails
    return low, high


def _p_values(effects_NC: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The share of flips whose statistic is at least the observed one, the observed one counted among drawn flips."""
    size = np.sqrt((effects_NC**2).sum(0))
    unit_NC = np.divide(effects_NC, size, out=np.zeros_like(effects_NC), where=size > 0)
    observed = np.abs(unit_NC.sum(0)) - 1e-12  # sums of equal terms in another order
    signs_FN, drawn = _signs(len(effects_NC), draw)
    more, more_family = np.zeros(len(observed)), np.zeros(len(observed))
    step = max(_AT_ONCE // max(len(observed), 1), 1)
    for begin in range(0, len(signs_FN), step):
        flipped_FC = np.abs(signs_FN[begin : begin + step] @ unit_NC)
        more += (flipped_FC >= observed).sum(0)
        largest = np.sort(flipped_FC.max(1, initial=0))
        more_family += len(largest) - np.searchsorted(largest, observed)
    total = len(signs_FN) + drawn
    return (more + drawn) / total, (more_family + drawn) / total


def _signs(pairs: int, draw: np.random.Generator) -> tuple[np.ndarray, int]:
    """Signs [F, N], every combination for few pairs; and how many observed ones are to be counted with them."""
    if pairs <= EXACT:
        bits = (np.arange(2**pairs)[:, None] >> np.arange(pairs)) & 1
        return 1.0 - 2.0 * bits, 0
    return draw.choice((-1.0, 1.0), (FLIPS, pairs)), 1
