"""The table that says whose the rows of a capture chunk are (`store.captures`); without torch, for planners.

Captured rows of several ops, put together, and in the dtype that was asked for. Torch is loaded when needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

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


def merged(parts: list[tuple[np.ndarray, torch.Tensor | np.ndarray]]) -> tuple[np.ndarray, torch.Tensor]:
    """Positions and rows of several ops together; of two that have a position the later counts."""
    import torch

    last: dict[int, tuple[int, int]] = {}
    for part, (positions, _) in enumerate(parts):
        last |= {int(position): (part, row) for row, position in enumerate(positions)}
    dtypes = {str(rows.dtype) for _, rows in parts}
    tensors = [torch.as_tensor(rows) if len(dtypes) == 1 else torch.as_tensor(rows).float() for _, rows in parts]
    rows = [tensors[part][row] for _, (part, row) in sorted(last.items())]
    return np.array(sorted(last), np.int64), torch.stack(rows) if rows else tensors[0][:0]


def cast(rows: torch.Tensor | np.ndarray, dtype: str) -> torch.Tensor:
    """Rows in a dtype, named without "torch."."""
    import torch

    return torch.as_tensor(rows).to(getattr(torch, dtype))


def overflowed(rows: torch.Tensor | np.ndarray) -> int | None:
    """The first float16 row on the host that has an infinity; None of finite rows and of other dtypes."""
    if str(rows.dtype).removeprefix("torch.") != "float16":
        return None
    bits = np.ascontiguousarray(rows).view(np.uint16)
    infinite = np.flatnonzero((bits & 0x7FFF) == 0x7C00)
    return int(infinite[0]) // (bits.size // len(bits)) if len(infinite) else None
