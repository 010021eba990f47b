"""The bank: rows of fp32 numbers by key, resident on the device at addresses that do not move.

A key in use by a request is pinned; the others are kept while there is room and leave least recently used first.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict

import torch

from patchclamp.errors import CapacityError


class _Block:
    __slots__ = ("begin", "end", "pins", "width")

    def __init__(self, begin: int, end: int, width: int) -> None:
        self.begin, self.end, self.width, self.pins = begin, end, width, 0


class Bank:
    """Room for `numbers` fp32 numbers on `device`; `data` is the flat tensor [numbers]."""

    def __init__(self, numbers: int, device: str | torch.device = "cpu") -> None:
        self.data = torch.empty(numbers, dtype=torch.float32, device=device)
        self._blocks: OrderedDict[str, _Block] = OrderedDict()  # least recently used first
        self._free = [(0, numbers)]  # (begin, end), ascending, no two side by side

    def __contains__(self, key: str) -> bool:
        return key in self._blocks

    def put(self, key: str, rows: torch.Tensor) -> None:
        """Stores rows [n, W] under `key`, evicting unpinned blocks. Raises `CapacityError` if they do not fit."""
        if key in self._blocks:
            return
        begin = self._take(rows.numel(), rows.shape[-1])
        self.data[begin : begin + rows.numel()].copy_(rows.reshape(-1))
        self._blocks[key] = _Block(begin, begin + rows.numel(), rows.shape[-1])

    def pin(self, key: str) -> tuple[int, int]:
        """Keeps a key until `unpin`; returns its first number and the width of its rows."""
        block = self._blocks[key]
        self._blocks.move_to_end(key)
        block.pins += 1
        return block.begin, block.width

    def unpin(self, key: str) -> None:
        self._blocks[key].pins -= 1

    def forget(self, key: str) -> None:
        """Drops a key that nobody pins; a pinned or unknown one is left."""
        block = self._blocks.get(key)
        if block is not None and block.pins == 0:
            self._drop(key)

    @property
    def pinned(self) -> int:
        """Keys in use."""
        return sum(block.pins > 0 for block in self._blocks.values())

    def _take(self, count: int, width: int) -> int:
        """Room for `count` numbers at a multiple of `width`, so that the flat tensor can be seen as rows."""
        while True:
            for i, (begin, end) in enumerate(self._free):
                first = -(-begin // width) * width
                if end - first >= count:
                    rest = ((begin, first), (first + count, end))
                    self._free[i : i + 1] = [gap for gap in rest if gap[0] < gap[1]]
                    return first
            oldest = next((key for key, block in self._blocks.items() if block.pins == 0), None)
            if oldest is None:
                raise CapacityError(
                    f"the bank has no room for {4 * count} bytes beside what running requests use "
                    f"({4 * len(self.data)} bytes in all); raise bank_bytes, or run fewer programs at once"
                )
            self._drop(oldest)

    def _drop(self, key: str) -> None:
        """Forgets a key, and joins its room to the free room beside it."""
        block = self._blocks.pop(key)
        begin, end = block.begin, block.end
        i = bisect.bisect(self._free, (begin, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == begin:
            i -= 1
            begin = self._free.pop(i)[0]
        self._free.insert(i, (begin, end))
