"""A plain harvest: one document after the other, one row after the other, in the documents' order."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="module", autouse=True)
def no_disk():
    """A disk that is shared makes tests wait; what a stopped machine loses they cannot see."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.fsync", lambda descriptor: None)
        patched.setattr("patchclamp.store.journal.SYNCHRONOUS", "OFF")
        yield


Place = tuple[int, int]  # a document and a position


def rows_of(lm, documents: list[list[int]], sites: list[str], keep=lambda document, position: True):
    """The rows of every site by (document, position), for those that `keep` takes."""
    rows: dict[str, dict[Place, np.ndarray]] = {site: {} for site in sites}
    for number, document in enumerate(documents):
        run = lm.run(document, max_tokens=1, capture=sites)
        for site in sites:
            values = np.asarray(run[site])
            for position in range(len(document)):
                if keep(document, position):
                    rows[site][number, position] = values[position].reshape(-1)
        run.close()
    return rows


def chi_square(table: np.ndarray) -> tuple[float, float]:
    """How far a table of counts [A, B] is from one whose rows and columns have nothing to do with each other, in
    standard deviations of the chi-square that this has then: (χ² − k) / √2k for k = (A − 1)(B − 1)."""
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0, keepdims=True) / table.sum()
    statistic = float((((table - expected) ** 2) / expected).sum())
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return (statistic - freedom) / np.sqrt(2 * freedom), statistic


def bytes_of(folder) -> dict[str, bytes]:
    """Every file below a folder, by its path there."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
