"""How far one next-token distribution is from another, in nats.

    KL(p ‖ q) = Σ p log(p / q)            JS(p, q) = ½ KL(p ‖ m) + ½ KL(q ‖ m), where m = ½ (p + q)

KL is of the first argument, here the unedited run's. JS is symmetric and at most log 2.
Source: Kullback and Leibler 1951, equation 2.2; Lin 1991 ("Divergence measures based on the Shannon entropy"), equation
4.1 with equal weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits, over the last axis, in fp64."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """KL(p ‖ q) of two distributions as log-probabilities [V]; never below 0, but for rounding, which is cut."""
    there = np.isfinite(log_p)
    log_p, log_q = log_p[there], log_q[there]
    return max(float((np.exp(log_p) * (log_p - log_q)).sum()), 0.0)


def js(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """JS(p, q) of two distributions as log-probabilities [V]."""
    log_m = np.logaddexp(log_p, log_q) - np.log(2.0)
    return 0.5 * (kl(log_p, log_m) + kl(log_q, log_m))


def with_rest(logprobs: Sequence[float]) -> np.ndarray:
    """Log-probabilities of some tokens, and of all others together: a distribution of n + 1.

    Of two distributions that are lumped so, both divergences are at most those of the full ones (data processing).
    """
    some = np.asarray(logprobs, np.float64)
    rest = max(1.0 - float(np.exp(some).sum()), np.finfo(np.float64).tiny)
    return np.append(some, np.log(rest))
