"""Whether the words of a layer come in the order in which it computes: an edit at one moves what is made of it, and
nothing else there. A table that takes one tensor for another is seen by that where no sum is about either."""

from __future__ import annotations

from typing import Any

import numpy as np

from patchclamp.language.registry import SITES, kept

MIN_MOVED_RTOL, MAX_KEPT_RTOL = (
    1e-6,
    0.05,
)  # of a row: what moves does by more than one, what is kept by less than the other


def watched(place: Any, there: set[str]) -> list[str]:
    """Of the places that are `there`, those that an edit at `place` is to move, or not to."""
    names = (*SITES[place.name].moves, *kept(place.name))
    return [at for name in names if (at := f"{name}[{place.layer}]") in there]


def disorder(place: Any, plain: Any, edited: Any, at: list[str]) -> str:
    """What an edit at `place` did that it cannot do there, of the last token's rows of two runs; "" if nothing."""
    for each in at:
        name = each.partition("[")[0]
        gap = _gap(np.asarray(edited[each]), np.asarray(plain[each]))
        if name in SITES[place.name].moves and gap <= MIN_MOVED_RTOL:
            return f"an edit at {place} does not move {each}, which is made of it"
        if name in kept(place.name) and gap > MAX_KEPT_RTOL:
            return f"an edit at {place} moves {each}, which is not made of it"
    return ""


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    x, y = a.astype(np.float64).reshape(-1), b.astype(np.float64).reshape(-1)
    return float(np.linalg.norm(x - y) / max(float(np.linalg.norm(y)), 1e-30))
