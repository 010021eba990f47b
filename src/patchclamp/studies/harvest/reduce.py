"""Linear reductions of rows, so that less goes to disk: projections (`Project`) and sums over documents.

They are computed on the host, in fp32, document by document, before rows are rounded to what is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from patchclamp.errors import ProgramError, ShapeError


class Project:
    """W h in place of h: probes, directions, the first components of a PCA.

    matrix: W [K, D] for all sites, or one for each site by its name, as in {"resid_post[3]": W}
    """

    def __init__(self, matrix: Any) -> None:
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


class Reduction:
    """What becomes of a document's kept rows [n, D] at one site: the same rows, their projections [n, K], or one row,
    the sum of either."""

    def __init__(self, matrix: np.ndarray | None, sums: bool) -> None:
        self._matrix, self._sums = matrix, sums

    @property
    def digest(self) -> str:
        """A hash of the matrix, "" without one."""
        if self._matrix is None:
            return ""
        return hashlib.sha256(repr(self._matrix.shape).encode() + self._matrix.tobytes()).hexdigest()

    @property
    def changes(self) -> bool:
        return self._matrix is not None or self._sums

    def width(self, width: int) -> int:
        return width if self._matrix is None else len(self._matrix)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        rows = rows if self._matrix is None else rows @ self._matrix.T
        return rows.sum(axis=0, dtype=np.float64, keepdims=True).astype(np.float32) if self._sums else rows


def _matrix(value: Any) -> np.ndarray:
    value = value.detach().cpu().float().numpy() if hasattr(value, "detach") else value
    matrix = np.ascontiguousarray(value, np.float32)
    if matrix.ndim != 2 or 0 in matrix.shape or not np.isfinite(matrix).all():
        raise ShapeError(f"a finite matrix [K, D] is needed, not {list(matrix.shape)}", "project")
    return matrix
