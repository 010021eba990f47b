"""Asynchronous copies between host and device.

A copy to or from pageable host memory synchronizes with the CUDA device, so these copies use pinned memory.
"""

from __future__ import annotations

import numpy as np
import torch


def to_device(numbers: np.ndarray | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy an array, or a tensor in pageable host memory, to a device; on the CPU the result may share its memory.
    The result is contiguous: kernels, including vLLM's, index from the first element and ignore strides."""
    tensor = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else numbers
    tensor = tensor.contiguous()
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Arriving:
    """A pending copy of a tensor to host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.cpu()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def has_arrived(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> torch.Tensor:
        """Wait until the copy is complete, and return the host tensor."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
