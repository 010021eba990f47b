"""The bank: rows of fp32 numbers, resident on the device at addresses that do not move.

Where rows lie is said by whoever admits programs (`plan.room`), who also knows when they may be written over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Bank:
    """`data`: a flat fp32 tensor of so many `numbers` on `device`."""

    def __init__(self, numbers: int, device: str | torch.device = "cpu") -> None:
        self.data = torch.empty(numbers, dtype=torch.float32, device=device)

    def write(self, begin: int, neighbours: Sequence[torch.Tensor]) -> None:
        """Puts rows [n, W], one tensor after the other, at numbers `begin` … of the bank, on the current stream; the
        host does not wait for it."""
        flat = [rows.reshape(-1) for rows in neighbours]
        numbers = flat[0] if len(flat) == 1 else torch.cat([rows.float() for rows in flat])
        if self.data.is_cuda and not numbers.is_cuda:
            numbers = numbers.pin_memory()
        self.data[begin : begin + numbers.numel()].copy_(numbers, non_blocking=True)
