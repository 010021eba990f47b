"""A step on a CUDA device: graphs replay with the kernel in them, eager steps launch it, captures leave behind both.

A recorded graph writes captured rows to `kept`, whose address it knows; after the step they are copied aside on the
device (some microseconds) and drained.  A step without a graph, a large prefill say, gives each point a buffer of
its own and drains it while the layers after it compute.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from patchclamp.kernels import cuda
from patchclamp.plan import Batch, ProgramTable, StepPlan
from patchclamp.plan.step import BYTES
from patchclamp.runtime.device import CudaTables
from patchclamp.runtime.drain import Drain
from patchclamp.runtime.step import Captured
from patchclamp.store import Bank


class CudaStep:
    """Carries out steps of at most `rows` rows and `samples` sampled ones; `positions` is the engine's tensor of them.

    `kept_bytes` bounds what a step with a graph may capture.
    """

    unit = BYTES

    def __init__(
        self, table: ProgramTable, bank: Bank, rows: int, samples: int, positions: torch.Tensor, kept_bytes: int
    ) -> None:
        self.tables = CudaTables(table, rows, samples, bank.data, positions)
        self.kept = torch.empty(kept_bytes, dtype=torch.uint8, device=bank.data.device)
        self.drain = Drain(bank.data.device)
        self.recording = False
        self._table = table
        self._parts: dict[int, tuple[np.ndarray, int, int]] = {}
        self._plan: StepPlan | None = None
        self._left: list[Captured] = []
        self._drained: set[int] = set()
        self._sampled: set[int] = set()

    @property
    def bytes(self) -> int:
        """Device memory held, beside the bank."""
        return self.kept.nbytes + self.tables.bytes

    def begin(self, plan: StepPlan, batch: Batch, fresh: bool) -> None:
        self._plan, self._left = plan, []
        self._drained.clear()
        if fresh:
            self.tables.load(plan, batch.row + batch.count - 1)
            self._parts = self._by_point(plan)

    def apply(self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, sampled: bool) -> None:
        part = None if self.recording else self._parts.get(point)
        if part is None or self._plan is None:
            cuda.site(self.tables, point, hidden_RW, residual_RW, self.kept, 0, sampled)
            return None
        mine, begin, end = part
        rows = torch.empty(end - begin, dtype=torch.uint8, device=self.kept.device)
        cuda.site(self.tables, point, hidden_RW, residual_RW, rows, begin, sampled)
        self._left.append((self.drain.take(rows), self._plan.target[mine] - begin, mine))
        self._drained.add(point)
        return None

    def end(self, plan: StepPlan) -> Iterator[Captured]:
        """What eager taps drained, then what a graph left in `kept`."""
        yield from self._left
        points = [point for point in self._parts if point not in self._drained]
        if not points:
            return
        begin = min(self._parts[point][1] for point in points)
        end = max(self._parts[point][2] for point in points)
        mine = np.concatenate([self._parts[point][0] for point in points])
        aside = torch.empty(end - begin, dtype=torch.uint8, device=self.kept.device)
        aside.copy_(self.kept[begin:end])
        yield self.drain.take(aside), plan.target[mine] - begin, mine

    def flush(self) -> None:
        self.drain.flush()

    def _by_point(self, plan: StepPlan) -> dict[int, tuple[np.ndarray, int, int]]:
        """For each point where something is captured: its records, and the bytes its rows take."""
        captures, live = self._table.captures, np.flatnonzero(plan.count)
        parts = {}
        for point in np.unique(captures.point[live]):
            mine = live[captures.point[live] == point]
            begin = int(plan.target[mine].min())
            later = plan.target[plan.target > plan.target[mine].max()]
            parts[int(point)] = (mine, begin, int(later.min()) if len(later) else plan.size)
        return parts
