"""The bank: rows of fp32 numbers on the device, at fixed addresses.

The process that admits programs allocates the rows, and decides when they may be overwritten (`plan.room`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Bank:
    """`data`: a flat fp32 tensor of `numbers` numbers on `device`."""

    def __init__(self, numbers: int, device: str | torch.device = "cpu") -> None:
        self.data = torch.empty(numbers, dtype=torch.float32, device=device)

    def write(self, begin: int, neighbours: Sequence[torch.Tensor]) -> None:
        """Write tensors of rows [n, W] consecutively from offset `begin` on, asynchronously on the current stream."""
        flat = [rows.reshape(-1) for rows in neighbours]
        numbers = flat[0] if len(flat) == 1 else torch.cat([rows.float() for rows in flat])
        if self.data.is_cuda and not numbers.is_cuda:
            numbers = numbers.pin_memory()
        self.data[begin : begin + numbers.numel()].copy_(numbers, non_blocking=True)
