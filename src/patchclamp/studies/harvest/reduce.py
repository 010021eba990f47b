"""Linear reductions of rows, so that less goes to disk: projections (`Project`) and sums over documents.

A projection is a projected capture where there can be one, so that less leaves the device, too. The rest is done on the
host, in fp32, document by document, before rows are rounded to what is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from patchclamp.errors import ProgramError, ShapeError
from patchclamp.language import Vector
from patchclamp.language.values import MAX_PROJECTED, as_array, as_flag
from patchclamp.lm import LM
from patchclamp.sites import SiteRef


class Project:
    """W h in place of h: probes, directions, the first components of a PCA.

    matrix: W [K, D] for all sites, or one for each site by its name, as in {"resid_post[3]": W}
    on_device: whether rows are projected before they leave the device, where that can be (`can_project`)
    """

    def __init__(self, matrix: Any, on_device: bool = True) -> None:
        self.on_device = as_flag(on_device, "on_device")
        if isinstance(matrix, Mapping):
            self._by_site = {str(site): _matrix(value) for site, value in matrix.items()}
            self._for_all = None
        else:
            self._by_site, self._for_all = {}, _matrix(matrix)

    def of(self, site: str, width: int) -> np.ndarray:
        """W [K, D] of a site that is `width` wide.

        Raises: `ProgramError` if there is none, `ShapeError` if it does not fit.
        """
        matrix = self._by_site.get(site, self._for_all)
        if matrix is None:
            raise ProgramError(f"no matrix for {site}; there are some for {', '.join(self._by_site)}", "project")
        if matrix.shape[1] != width:
            raise ShapeError(f"{site} is {width} wide; its matrix is {list(matrix.shape)}", "project")
        return matrix

    def unused(self, sites: list[str]) -> list[str]:
        """Sites that have a matrix and are not among these."""
        return [site for site in self._by_site if site not in sites]


class Reduction(msgspec.Struct, frozen=True, eq=False):
    """What becomes of a document's kept rows [n, D] at one site: the same rows, their projections [n, K], or one row,
    the sum of either.

    matrix: W [K, D], or None
    sums: whether rows are added up
    on_device: whether rows come projected
    """

    matrix: np.ndarray | None
    sums: bool
    on_device: bool = False

    @property
    def digest(self) -> str:
        """A hash of the matrix, "" without one."""
        if self.matrix is None:
            return ""
        return hashlib.sha256(repr(self.matrix.shape).encode() + self.matrix.tobytes()).hexdigest()

    @property
    def changes(self) -> bool:
        """Whether there is anything to do on the host."""
        return self.sums or (self.matrix is not None and not self.on_device)

    @property
    def captured_by(self) -> Vector | None:
        """The matrix of the projected capture; None where rows are captured whole."""
        return Vector.of(self.matrix) if self.on_device else None

    def width(self, width: int) -> int:
        return width if self.matrix is None else len(self.matrix)

    def captured(self, width: int) -> int:
        """How many numbers are captured of a row that is so wide."""
        return self.width(width) if self.on_device else width

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        rows = rows if self.matrix is None or self.on_device else rows @ self.matrix.T
        return rows.sum(axis=0, dtype=np.float64, keepdims=True).astype(np.float32) if self.sums else rows


def can_project(lm: LM, refs: Mapping[SiteRef, Reduction]) -> set[SiteRef]:
    """Of the sites of a harvest, those that can be captured projected: rows that are not cut among GPUs, fewer products
    than a row has numbers and than a capture takes at most, and no other projection of the same tensor."""
    ways: dict[int, set[tuple[str, tuple[int, int] | None]]] = {}
    for ref, reduction in refs.items():
        ways.setdefault(ref.point, set()).add((reduction.digest, ref.columns))
    return {
        ref for ref, reduction in refs.items()
        if reduction.matrix is not None and len(reduction.matrix) <= min(MAX_PROJECTED, reduction.matrix.shape[1] - 1)
        and lm.sites.whole(ref) and len(ways[ref.point]) == 1
    }  # fmt: skip


def _matrix(value: Any) -> np.ndarray:
    matrix = as_array(value, "project")
    if matrix.ndim != 2 or 0 in matrix.shape or not np.isfinite(matrix).all():
        raise ShapeError(f"a finite matrix [K, D] is needed, not {list(matrix.shape)}", "project")
    return matrix
