"""Linear probes for two classes of rows: logistic regression, difference of means, AUROC, and folds.

N rows · D row width · R rank of the rows
"""

from __future__ import annotations

import numpy as np

from patchclamp.errors import PatchclampError, ProgramError

STEPS, CONVERGED = 100, 1e-12  # Newton steps; their predicted gain, as a share of the loss
CONSTANT = 1e-9  # standard deviation of a constant column, as a share of its mean
LEAST_VARIANCE = 1e-4  # within classes, as a share of the squared distance of their means


def fit_logistic(rows_ND: np.ndarray, positive_N: np.ndarray, l2: float) -> tuple[np.ndarray, float]:
    """Return the weight w [D] and bias b of logistic regression, which minimise Σ log(1 + exp(−y (w · x + b))) + ½ l2
    |w|², where y is 1 or −1.

    Uses Newton's method, halving steps while the loss rises. With fewer rows than columns, the fit is in the span of
    the rows, which contains w.
    Source: Hastie, Tibshirani and Friedman, The Elements of Statistical Learning, 4.4.1 and 18.3.5.
    """
    basis_DR, z_NR = None, rows_ND
    if len(rows_ND) < rows_ND.shape[1]:
        basis_DR, triangle = np.linalg.qr(rows_ND.T)
        z_NR = triangle.T
    design = np.concatenate([z_NR, np.ones((len(z_NR), 1))], axis=1)  # the last column is the bias
    penalty, sign_N = np.append(np.full(z_NR.shape[1], l2), 0.0), np.where(positive_N, 1.0, -1.0)

    def loss(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -sign_N * (design @ w)).sum() + 0.5 * (penalty * w**2).sum())

    w = np.zeros(design.shape[1])
    for _ in range(STEPS):
        p_N, before = sigmoid(design @ w), loss(w)
        gradient = design.T @ (p_N - positive_N) + penalty * w
        curvature = (design.T * (p_N * (1 - p_N))) @ design + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        gain = gradient @ step
        while gain > CONVERGED * (1 + before) and loss(w - step) > before:
            step = step / 2
        w = w - step
        if gain <= CONVERGED * (1 + before):
            return w[:-1] if basis_DR is None else basis_DR @ w[:-1], float(w[-1])
    raise PatchclampError(f"the logistic regression did not converge in {STEPS} Newton steps: use a larger l2", "l2")


def fit_mean_difference(rows_ND: np.ndarray, positive_N: np.ndarray) -> tuple[np.ndarray, float]:
    """Return weight [D] and bias: the difference of class means, with log-odds of 0 at the midpoint. Both are scaled so
    that w · x + b is the log-odds of two normal distributions along w with the pooled variance."""
    first, second = rows_ND[positive_N].mean(0), rows_ND[~positive_N].mean(0)
    difference = first - second
    along_N = rows_ND @ difference
    apart = float(difference @ difference)
    if apart == 0:
        raise ProgramError("both classes have the same mean row: no direction separates them", "labels")
    within = [np.var(along_N[of]) * np.mean(of) for of in (positive_N, ~positive_N)]
    weight = difference * apart / max(sum(within), LEAST_VARIANCE * apart**2)
    return weight, -float(weight @ (first + second)) / 2


def fit_rows(method: str, rows_ND: np.ndarray, positive_N: np.ndarray, l2: float) -> tuple[np.ndarray, float]:
    """Return the weight [D] and bias fitted by `method`. Logistic regression standardises each column first, as
    scikit-learn's `StandardScaler` does; weight and bias apply to unscaled rows."""
    if method == "mean_difference":
        return fit_mean_difference(rows_ND, positive_N)
    mean, std = rows_ND.mean(0), rows_ND.std(0)
    std = np.where(std > CONSTANT * np.abs(mean), std, 1.0)
    weight, bias = fit_logistic((rows_ND - mean) / std, positive_N, l2)
    return weight / std, bias - float(weight / std @ mean)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def auroc(scores_N: np.ndarray, positive_N: np.ndarray) -> float:
    """Return the fraction of (positive, negative) row pairs whose positive row scores higher; ties count half."""
    _, inverse, counts = np.unique(scores_N, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = int(positive_N.sum())
    pairs = positive * (len(scores_N) - positive)
    return float((ranks[positive_N].sum() - positive * (positive + 1) / 2) / pairs)


def split_folds(document_N: np.ndarray, positive_N: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Return the fold [N] of every row. Documents stay whole. They are shuffled, sorted by their fraction of positive
    rows, and assigned round-robin, which balances the folds. Raises `ProgramError` if a fold has a single class."""
    _, number_N = np.unique(document_N, return_inverse=True)
    share = np.bincount(number_N, positive_N) / np.bincount(number_N)
    order = np.random.default_rng(seed).permutation(len(share))
    order, fold = order[np.argsort(share[order], kind="stable")], np.empty(len(share), np.int64)
    fold[order] = np.arange(len(order)) % folds
    of_rows = fold[number_N]
    if any(len(np.unique(positive_N[of_rows == k])) < 2 for k in range(folds)):
        counts = [len(np.unique(document_N[positive_N == side])) for side in (False, True)]
        raise ProgramError(f"expected both classes in each of {folds} folds, got {counts[0]} negative and {counts[1]} "
                           "positive documents: use fewer folds", "folds")  # fmt: skip
    return of_rows
