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

    def only(self, numbers: list[int], widths: np.ndarray) -> CapturedStep:
        """The same for some runs alone, in memory of its own."""
        mine = np.flatnonzero(np.isin(self.run, numbers) & (self.count > 0))
        rows = [self.rows(int(c), int(widths[self.point[c]])).reshape(-1).view(self.data.dtype) for c in mine]
        target = np.cumsum([0, *(len(r) for r in rows)])[:-1]
        return CapturedStep(
            torch.cat(rows), self.run[mine], self.point[mine], self.op[mine], self.begin[mine], self.count[mine],
            target, self.dtype[mine],
        )  # fmt: skip

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
        """Lets a run's rows go; a run that is not there is let go already.

        A step that less than half belongs to runs still kept is copied out for them, and its memory freed.
        """
        for step in self._steps.pop(self._number.pop(run, -1), ()):
            kept = [int(number) for number in np.unique(step.run[step.count > 0]) if int(number) in self._steps]
            live = int(self._sizes(step)[np.isin(step.run, kept)].sum())
            if kept and 2 * live < len(step.data):
                smaller = step.only(kept, self._widths)
                for number in kept:
                    self._steps[number] = [smaller if other is step else other for other in self._steps[number]]

    @property
    def bytes(self) -> int:
        """Host memory that captures hold."""
        return sum({id(step): step.data.nbytes for steps in self._steps.values() for step in steps}.values())

    def _sizes(self, step: CapturedStep) -> np.ndarray:
        """What each record takes of a step's data, in its units."""
        unit = (
            np.array([dtype.itemsize for dtype in _TORCH]) if step.data.dtype == torch.uint8 else np.ones(3, np.int64)
        )
        return step.count * self._widths[step.point] * unit[step.dtype]

    def add(self, step: CapturedStep) -> None:
        for number in np.unique(step.run[step.count > 0]):
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
