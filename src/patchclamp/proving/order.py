"""Checks that an edit at a site changes what its layer computes from that site, and nothing else in the layer.

A table that takes one tensor for another fails this check, even where no sum (`sums`) includes either tensor.
"""

from __future__ import annotations

import numpy as np

from patchclamp.language.site import SITES, unmoved
from patchclamp.run import Run
from patchclamp.sites import SiteRef

MIN_MOVED_RTOL = 1e-6  # a row that an edit moves changes by more than this
MAX_UNMOVED_RTOL = 0.05  # a row that it does not move changes by less than this


def watched(ref: SiteRef, watchable: dict[str, int]) -> list[str]:
    """The texts of the site refs that an edit at `ref` must move, or must not: of `watchable` ones, each with its
    point, those at other points."""
    names = (*SITES[ref.name].moves, *unmoved(ref.name))
    return [text for name in names if watchable.get(text := f"{name}[{ref.layer}]", ref.point) != ref.point]


def disorder(ref: SiteRef, plain: Run, edited: Run, watched_refs: list[str]) -> str:
    """What an edit at `ref` did and should not have done; "" if nothing. Compares the last token's rows of two runs."""
    for watched_ref in watched_refs:
        name = watched_ref.partition("[")[0]
        gap = _gap(np.asarray(edited[watched_ref]), np.asarray(plain[watched_ref]))
        if name in SITES[ref.name].moves and gap <= MIN_MOVED_RTOL:
            return f"an edit at {ref} does not move {watched_ref}, which is made of it"
        if name in unmoved(ref.name) and gap > MAX_UNMOVED_RTOL:
            return f"an edit at {ref} moves {watched_ref}, which is not made of it"
    return ""


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    x, y = a.astype(np.float64).reshape(-1), b.astype(np.float64).reshape(-1)
    return float(np.linalg.norm(x - y) / max(float(np.linalg.norm(y)), 1e-30))
