"""The table of a capture chunk (`store.captures`), which maps rows to runs, and helpers for captured rows.

Torch is imported only when needed, since planners import this module.
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
        ("position", "<i4"),   # the first position in the first step; it grows by one per step
        ("count", "<i4"),      # consecutive positions, the same in every step
        ("offset", "<i8"),     # of the rows, in the bytes of a step
        ("row_bytes", "<i4"),
        ("dtype", "<i4"),      # index into `DTYPES`
    ]
)  # fmt: skip


class CapturedEntry(NamedTuple):
    """An entry of the table, as Python integers."""

    run: int
    point: int
    op: int
    position: int
    count: int
    offset: int
    row_bytes: int
    dtype: int


class CaptureSource(Protocol):
    """The source of a chunk's table, built lazily: for a wide batch this would take too long within a step."""

    def bytes_of_runs(self) -> dict[int, int]:
        """The bytes of each run in a step, by run number."""
        ...

    def table(self) -> np.ndarray:
        """The captures of a step as `CAPTURED`, in order of run numbers."""
        ...


def merged(parts: list[tuple[np.ndarray, torch.Tensor | np.ndarray]]) -> tuple[np.ndarray, torch.Tensor]:
    """Merge the positions and rows of several ops; if two have the same position, the later op wins."""
    import torch

    last: dict[int, tuple[int, int]] = {}
    for part, (positions, _) in enumerate(parts):
        last |= {int(position): (part, row) for row, position in enumerate(positions)}
    dtypes = {str(rows.dtype) for _, rows in parts}
    tensors = [torch.as_tensor(rows) if len(dtypes) == 1 else torch.as_tensor(rows).float() for _, rows in parts]
    rows = [tensors[part][row] for _, (part, row) in sorted(last.items())]
    return np.array(sorted(last), np.int64), torch.stack(rows) if rows else tensors[0][:0]


def cast(rows: torch.Tensor | np.ndarray, dtype: str) -> torch.Tensor:
    """Convert rows to a dtype, named without "torch."."""
    import torch

    return torch.as_tensor(rows).to(getattr(torch, dtype))


def overflowed(rows: torch.Tensor | np.ndarray) -> int | None:
    """The index of the first float16 row on the host with an infinity; None for finite rows and other dtypes."""
    if str(rows.dtype).removeprefix("torch.") != "float16":
        return None
    bits = np.ascontiguousarray(rows).view(np.uint16)
    infinite = np.flatnonzero((bits & 0x7FFF) == 0x7C00)
    return int(infinite[0]) // (bits.size // len(bits)) if len(infinite) else None
