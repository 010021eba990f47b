"""Captured rows: kept step by step as the kernel left them, sorted out by run, point and position when fetched."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from patchclamp.errors import MissingSource
from patchclamp.spec.ops import DTYPES


class CapturedStep(msgspec.Struct):
    """What one step captured: run, point, op, first position, count and where in `data` the rows begin, each [C].

    `data` is flat: fp32 numbers, or bytes, of which a record's rows are in its `dtype` (a number into `DTYPES`).
    """

    data: torch.Tensor
    run: np.ndarray
    point: np.ndarray
    op: np.ndarray
    begin: np.ndarray
    count: np.ndarray
    target: np.ndarray
    dtype: np.ndarray

    def rows(self, c: int, width: int) -> torch.Tensor:
        """The rows of record c, [n, W], as a view."""
        dtype = _TORCH[int(self.dtype[c])] if self.data.dtype == torch.uint8 else self.data.dtype
        begin, count = int(self.target[c]), int(self.count[c])
        size = count * width * (dtype.itemsize if self.data.dtype == torch.uint8 else 1)
        return self.data[begin : begin + size].view(dtype).view(count, width)


_TORCH = tuple(getattr(torch, name) for name in DTYPES)


class CaptureStore:
    """Captured rows of every run that has not been released."""

    def __init__(self, widths: np.ndarray) -> None:
        self._widths = widths
        self._number: dict[str, int] = {}
        self._steps: dict[int, list[CapturedStep]] = {}
        self._next = 0

    def __len__(self) -> int:
        """Runs kept."""
        return len(self._number)

    def __contains__(self, run: str) -> bool:
        return run in self._number

    def open(self, run: str) -> int:
        """Starts keeping a run; returns its number."""
        if run not in self._number:
            self._number[run] = self._next
            self._steps[self._next] = []
            self._next += 1
        return self._number[run]

    def release(self, run: str) -> None:
        """Lets a run's rows go; a run that is not there is let go already."""
        self._steps.pop(self._number.pop(run, -1), None)

    def add(self, step: CapturedStep) -> None:
        for number in np.unique(step.run):
            kept = self._steps.get(int(number))
            if kept is not None:
                kept.append(step)

    def fetch(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, torch.Tensor]:
        """Positions [T] ascending and their rows [T, W], of one op or of all that captured there.

        A position captured again by the same op (after preemption) keeps its first rows; of two ops the later counts.
        Raises `MissingSource` for a run that is not kept.
        """
        if run not in self._number:
            raise MissingSource(f"run {run} is not here: it was released, or captured nothing")
        number, width = self._number[run], int(self._widths[point])
        positions, ops, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], []
        for step in self._steps[number]:
            mine = (step.run == number) & (step.point == point) & (step.count > 0)
            for c in np.flatnonzero(mine if op is None else mine & (step.op == op)):
                positions.append(np.arange(step.begin[c], step.begin[c] + step.count[c]))
                ops.append(np.full(step.count[c], step.op[c]))
                rows.append(step.rows(int(c), width))
        where, by = np.concatenate(positions), np.concatenate(ops)
        order = np.lexsort((np.arange(len(where)), -by, where))
        found, first = np.unique(where[order], return_index=True)
        if not rows:
            return found, torch.zeros(0, width)
        joined, chosen = torch.cat(rows), order[first]
        in_order = np.array_equal(chosen, np.arange(len(where)))
        return found, joined if in_order else joined[torch.from_numpy(chosen)]
