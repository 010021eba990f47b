"""Three ways to a direction from rows of two classes, and how well it tells held-out rows apart.

n rows of the positive class · m of the negative one · D their width · r the rank of all rows

A direction is scaled so that adding it once moves the mean of the negative class to that of the positive one, as far as
that lies along it: the same scale means the same strength for all three.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from patchclamp.errors import ProgramError, unknown

RIDGE = 1.0  # of the probe, for rows scaled to a root mean square of 1
STEPS, CONVERGED = 100, 1e-10


def check_method(method: str, positive: int, negative: int) -> None:
    """Raises `UnknownName` for a method that there is not, `ProgramError` for PCA of prompts that are not pairs."""
    if method not in METHODS:
        raise unknown("method", str(method), METHODS, "method")
    if method == "pca" and positive != negative:
        raise ProgramError(f"PCA is of pairs: {positive} positive and {negative} negative prompts are none", "method")


def direction(method: str, positive_nD: np.ndarray, negative_mD: np.ndarray) -> np.ndarray:
    """A direction [D], fp64, by the method's name.

    Raises: as `check_method`, and `ProgramError` where the classes cannot be told apart at all.
    """
    check_method(method, len(positive_nD), len(negative_mD))
    positive_nD, negative_mD = np.asarray(positive_nD, np.float64), np.asarray(negative_mD, np.float64)
    raw_D = METHODS[method](positive_nD, negative_mD)
    unit_D = raw_D / (np.linalg.norm(raw_D) or 1.0)
    apart = float((positive_nD.mean(0) - negative_mD.mean(0)) @ unit_D)
    if apart == 0:
        raise ProgramError("positive and negative prompts give the same activations: no direction leads between them")
    return unit_D * apart


def mean_difference(positive_nD: np.ndarray, negative_mD: np.ndarray) -> np.ndarray:
    """The mean of the positive class minus that of the negative one.

    Source: Rimsky et al. 2023 (arXiv:2312.06681), equation 1; Marks and Tegmark 2023 (arXiv:2310.06824).
    """
    return positive_nD.mean(0) - negative_mD.mean(0)


def pca(positive_nD: np.ndarray, negative_nD: np.ndarray) -> np.ndarray:
    """The first principal component of the pairs' differences, about 0: their mean counts, it is what is looked for.

    That is what PCA finds where the order within each pair is shuffled, so that the differences have a mean of 0.
    Source: Zou et al. 2023 (arXiv:2310.01405), section 3.1.
    """
    return np.linalg.svd(positive_nD - negative_nD, full_matrices=False)[2][0]


def probe(positive_nD: np.ndarray, negative_mD: np.ndarray) -> np.ndarray:
    """The weights w of logistic regression with a ridge: they minimise Σ log(1 + exp(−y (w · x + b))) + ½ ridge |w|²,
    where x are the rows without their mean, scaled to a root mean square of 1, and y is 1 or −1.

    Newton's method, in the span of the rows: w has no part outside it.
    Source: Hastie, Tibshirani and Friedman, The Elements of Statistical Learning, 4.4.1 and 18.3.5.
    """
    x_ND = np.concatenate([positive_nD, negative_mD])
    x_ND = x_ND - x_ND.mean(0)
    y_N = np.concatenate([np.ones(len(positive_nD)), -np.ones(len(negative_mD))])
    size = np.sqrt(np.mean(x_ND**2))
    if size == 0:
        return np.zeros(x_ND.shape[1])
    u_Nr, s_r, v_rD = np.linalg.svd(x_ND / size, full_matrices=False)
    kept = s_r > 1e-9 * s_r[0]
    z_Nr = u_Nr[:, kept] * s_r[kept]
    design_NR = np.concatenate([z_Nr, np.ones((len(z_Nr), 1))], axis=1)
    return _logistic(design_NR, y_N)[:-1] @ v_rD[kept]


def _logistic(design_NR: np.ndarray, y_N: np.ndarray) -> np.ndarray:
    """Weights [R], the last of them the intercept, which has no ridge; Newton's steps, halved while they go up."""
    ridge_R = np.append(np.full(design_NR.shape[1] - 1, RIDGE), 0.0)

    def loss(w_R: np.ndarray) -> float:
        return float(np.logaddexp(0, -y_N * (design_NR @ w_R)).sum() + 0.5 * (ridge_R * w_R**2).sum())

    w_R = np.zeros(design_NR.shape[1])
    for _ in range(STEPS):
        p_N = 0.5 * (1 + np.tanh(0.5 * design_NR @ w_R))
        gradient_R = design_NR.T @ (p_N - (y_N > 0)) + ridge_R * w_R
        curvature_RR = (design_NR.T * (p_N * (1 - p_N))) @ design_NR + np.diag(ridge_R)
        step_R, before = np.linalg.solve(curvature_RR, gradient_R), loss(w_R)
        while loss(w_R - step_R) > before and np.abs(step_R).max() > CONVERGED:
            step_R = step_R / 2
        w_R = w_R - step_R
        if np.abs(step_R).max() <= CONVERGED:
            break
    return w_R


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "mean": mean_difference, "pca": pca, "probe": probe,
}  # fmt: skip


class Check(msgspec.Struct, frozen=True):
    """How well a direction tells held-out rows apart.

    accuracy: the share on the right side of the middle between the classes' means in the rows it was made of, each
        class counting half
    separation: the distance of the held-out means along it, in their pooled standard deviations (Cohen's d)
    """

    accuracy: float
    separation: float


def check(
    direction_D: np.ndarray, made_of: tuple[np.ndarray, np.ndarray], held_out: tuple[np.ndarray, np.ndarray]
) -> Check:
    """Checks a direction on held-out rows; of rows first the positive class [n, D], then the negative one [m, D]."""
    middle = sum(float(np.mean(rows @ direction_D)) for rows in made_of) / 2
    positive, negative = (np.asarray(rows, np.float64) @ direction_D for rows in held_out)
    accuracy = (np.mean(positive > middle) + np.mean(negative <= middle)) / 2
    spread = np.sqrt((np.var(positive) + np.var(negative)) / 2)
    distance = positive.mean() - negative.mean()
    return Check(float(accuracy), float(distance / spread) if spread > 0 else float(np.sign(distance)) * np.inf)
