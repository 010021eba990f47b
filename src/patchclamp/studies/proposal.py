"""The base of what attribution patching returns: estimates of all cells, exact effects of some, and how well they
agree."""

from __future__ import annotations

from typing import Literal

import numpy as np

from patchclamp.plots import words
from patchclamp.studies.result import Provenance, StudyResult

Verified = Literal["all", "best", "sampled"]


class Proposal(StudyResult, frozen=True, eq=False, kw_only=True):
    """`estimates`: how far the metric of the corrupt run would move if a cell had its clean value, to first order.
    `exact`: how far it moved when the cell was patched; NaN where it was not. `sampled`: whether a cell was verified
    because it was drawn at random, and not because its estimate is large. All are of one shape.

    metric: of `clean` and `corrupt`, the unpatched runs · steps: gradients averaged on the way from corrupt to clean;
    0 is the gradient of the corrupt run alone · verified_on: what made the exact patches · noise_floor: how far two
    unpatched runs were apart there
    """

    metric: str
    clean_tokens: tuple[str, ...]
    corrupt_tokens: tuple[str, ...]
    answer: str
    foil: str | None
    steps: int
    estimates: np.ndarray
    exact: np.ndarray
    sampled: np.ndarray
    clean: float
    corrupt: float
    verified_on: Provenance
    noise_floor: float

    def pearson(self, which: Verified = "all") -> float:
        """The correlation of estimates and exact effects, of all verified cells, of those with the largest estimates,
        or of those drawn at random; NaN of fewer than three."""
        return _correlation(*self._pairs(which))

    def spearman(self, which: Verified = "all") -> float:
        """The correlation of their ranks, likewise."""
        return _correlation(*map(_ranks, self._pairs(which)))

    def _pairs(self, which: Verified) -> tuple[np.ndarray, np.ndarray]:
        verified = np.isfinite(self.exact)
        chosen = verified & (self.sampled if which == "sampled" else ~self.sampled if which == "best" else True)
        return self.estimates[chosen], self.exact[chosen]

    def largest(self, count: int) -> list[int]:
        """The numbers of the cells whose estimates are largest in size, largest first."""
        order = np.argsort(-np.abs(self.estimates), axis=None, kind="stable")
        return order[: min(count, int(np.isfinite(self.estimates).sum()))].tolist()

    def foremost(self, count: int) -> list[int]:
        """The numbers of the verified cells that moved the metric furthest from corrupt towards clean, best first."""
        towards = 1.0 if self.clean >= self.corrupt else -1.0
        verified = np.flatnonzero(np.isfinite(self.exact)).tolist()
        return sorted(verified, key=lambda number: -towards * self.exact.flat[number])[:count]

    def _quantity(self) -> str:
        if self.foil is None:
            return f"log-probability of {words.quoted(self.answer)}"
        return f"logit difference {words.quoted(self.answer)} − {words.quoted(self.foil)}"

    def _verified(self) -> str:
        """How well estimates and exact patches agree, in a sentence."""
        count = int(np.isfinite(self.exact).sum())
        if not count:
            return "No cell was verified."
        parts: list[str] = []
        kinds: dict[Verified, str] = {"best": "largest estimates", "sampled": "others, drawn at random"}
        for which, name in kinds.items():
            number = len(self._pairs(which)[0])
            if number:
                parts.append(f"r {words.number(self.pearson(which))}, ρ {words.number(self.spearman(which))} "
                             f"over the {number} {name}")  # fmt: skip
        return (
            f"{count} outlined cells were patched exactly. Estimates and exact effects correlate: {'; '.join(parts)}."
        )

    def _made_on(self) -> str:
        if self.provenance.where == self.verified_on.where:
            return self.provenance.where
        return f"{self.provenance.where}; verified on {self.verified_on.where}"

    def _way(self) -> str:
        """What the estimates are of."""
        return (
            f"gradients at {self.steps} steps between the two runs" if self.steps else "one gradient of the corrupt run"
        )


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Each value's rank; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((2 * last - counts - 1) / 2)[inverse]
