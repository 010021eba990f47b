"""The table that says whose the rows of a capture chunk are (`store.captures`); without torch, for planners."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

CAPTURED = np.dtype(
    [
        ("run", "<i8"),        # the run's number
        ("point", "<i4"),
        ("op", "<i4"),         # the op's ordinal in its program
        ("position", "<i4"),   # the first position in the first step; in each further step it is one more
        ("count", "<i4"),      # consecutive positions, the same in every step
        ("offset", "<i8"),     # where the rows begin among the bytes of a step
        ("row_bytes", "<i4"),
        ("dtype", "<i4"),      # index into `DTYPES`
    ]
)  # fmt: skip


class CapturedEntry(NamedTuple):
    """An entry of the table, in Python's numbers."""

    run: int
    point: int
    op: int
    position: int
    count: int
    offset: int
    row_bytes: int
    dtype: int


class CaptureSource(Protocol):
    """Says whose a chunk's rows are; the table of a wide batch takes longer to make than a step may."""

    def bytes_of_runs(self) -> dict[int, int]:
        """The bytes that each run has of a step, by the run's number."""
        ...

    def table(self) -> np.ndarray:
        """What a step captured as `CAPTURED`, in order of runs' numbers."""
        ...
