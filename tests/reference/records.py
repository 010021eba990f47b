"""Records written out by hand: fields at the end that are 0 may be left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from patchclamp.plan import RECORD


def record_array(rows: Sequence[tuple]) -> np.ndarray:
    """Rows (start, stop, kind, step, value, x, y, other, found, columns) as `RECORD`."""
    return np.array([(*row, *[0] * (len(RECORD) - len(row))) for row in rows], RECORD)
