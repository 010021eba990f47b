"""Captured rows of several ops, put together, and in the dtype that was asked for. Torch is loaded when needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


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
