"""The bank: rows of fp32 numbers, resident on the device at addresses that do not move.

Where rows lie is said by whoever admits programs (`plan.room`), who also knows when they may be written over.
"""

from __future__ import annotations

import torch


class Bank:
    """`data`: a flat fp32 tensor of so many `numbers` on `device`."""

    def __init__(self, numbers: int, device: str | torch.device = "cpu") -> None:
        self.data = torch.empty(numbers, dtype=torch.float32, device=device)

    def write(self, begin: int, rows: torch.Tensor) -> None:
        """Puts rows [n, W] at numbers `begin` … of the bank, on the current stream; the host does not wait for it."""
        numbers = rows.reshape(-1)
        if self.data.is_cuda and not numbers.is_cuda:
            numbers = numbers.pin_memory()
        self.data[begin : begin + numbers.numel()].copy_(numbers, non_blocking=True)
