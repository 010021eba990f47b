"""A step on a CUDA device: graphs replay with the kernel in them, eager steps launch it, captures leave behind both.

Captured rows are written to the drain's ring on the device, whose address recorded graphs know.  A step has its part
reserved at once, from a byte that the tables tell; the parts of steps that go on alike lie one behind the other, so
that the tables stay as they are.  Of a step that captures more, say a large prefill, every tap reserves its part, and
what some layers left, 64 MiB of it, is on its way while the next ones compute; so does the tap of sampled rows if they
are what is too much.
"""

from __future__ import annotations

import numpy as np
import torch

from patchclamp.errors import ModelError
from patchclamp.kernels import cuda, fused, moves
from patchclamp.plan import APPLY, MATCH, Batch, ProgramTable, StepPlan
from patchclamp.plan.records import columns_of
from patchclamp.plan.step import BYTES
from patchclamp.runtime.device import CudaTables
from patchclamp.runtime.drain import Drain
from patchclamp.runtime.graphs import Recorded
from patchclamp.store.bank import Bank
from patchclamp.store.captures import BufferSlice, ScatteredSlices
from patchclamp.store.host_memory import HostBlock


class CudaStep:
    """Carries out steps of at most `rows` rows and `samples` sampled ones; `positions` and `tokens` are the engine's
    tensors of every row's position and token id.

    `kept_bytes` bounds what a step with a graph may capture, as half the ring does; `ring_bytes` what is on its way to
    the host, and `pinned_bytes` what waits there in pinned memory.
    """

    unit = BYTES
    code: fused.CodeRunner | None = None

    def __init__(
        self, table: ProgramTable, bank: Bank, rows: int, samples: int, positions: torch.Tensor, tokens: torch.Tensor,
        kept_bytes: int, ring_bytes: int, pinned_bytes: int,
    ) -> None:  # fmt: skip
        self.tables = CudaTables(table, rows, samples, bank.data, positions, tokens)
        self.drain = Drain(bank.data.device, ring_bytes, pinned_bytes)
        self.max_graph_bytes = min(kept_bytes, ring_bytes // 2)  # bytes that a step with a graph may capture
        self.recorded = Recorded()
        self.recording = False
        moves.warm(bank.data.device)
        self._plan: StepPlan | None = None
        self._steps = 0  # since that plan was made
        self._reserved_bytes = 0  # of each step's captures, what is reserved when it begins
        self._begin = 0  # where the tables say that the captures of the planned step begin
        self._place: BufferSlice | None = None  # what was reserved when the step began
        self._tap_parts: list[tuple[int, int, HostBlock, int]] = []  # what taps reserved

    def buffers(self) -> dict[str, torch.Tensor]:
        """What graphs read and write of ours, by name."""
        return {"ring": self.drain.ring, **self.tables.buffers()}

    @property
    def memory(self) -> dict[str, int]:
        """Device memory held, beside the bank, by what it is for."""
        return {"captures on their way (ring)": self.drain.device_bytes, "tables": self.tables.bytes}

    @property
    def bytes(self) -> int:
        """Device memory held, beside the bank."""
        return sum(self.memory.values())

    def begin(self, plan: StepPlan, batch: Batch, steps: int) -> None:
        self._plan, self._batch, self._steps = plan, batch, steps
        if not steps:
            self._reserved_bytes = self._at_once(plan)
            self.recorded.use(plan.active)
        self._tap_parts, self._place, begin = [], None, 0
        if self._reserved_bytes:
            _, at, block, offset = self.drain.reserve(self._reserved_bytes)
            self._place = BufferSlice(block, offset)
            begin = at - steps * self._reserved_bytes
        if not steps:
            self.tables.load(plan, batch, begin, self._reserved_bytes if plan.steady_steps else 0)
        elif begin != self._begin:
            self.tables.rebase(plan, begin)
        self._begin = begin

    def _at_once(self, plan: StepPlan) -> int:
        """How many bytes of a step's captures are reserved at once: all, or all but the sampled rows', which come last,
        or none where they are too many."""
        if plan.size <= self.max_graph_bytes or not plan.layout.any_sampled:
            return plan.size if plan.size <= self.max_graph_bytes else 0
        size = int(plan.base[self.tables.table.sampled[plan.layout.point]].min())
        return size if size <= self.max_graph_bytes else 0

    def apply(
        self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, sampled: bool
    ) -> np.ndarray | None:
        if self.recording:
            cuda.site(self.tables, point, hidden_RW, residual_RW, self.drain.ring, 0, sampled)
            self.recorded.note(point)
            return None
        kept, begin, plan = self.drain.ring, 0, self._plan
        if plan is not None and plan.size:
            if self._reserved_bytes == plan.size:
                begin = -self._steps * self._reserved_bytes if sampled else 0  # of other rows the kernel knows it
            elif sampled or not self._reserved_bytes:
                kept, begin = self._reserved(plan, point)
        if self.tables.table.coded:
            return self._carry_out(point, hidden_RW, residual_RW, kept, begin, sampled)
        cuda.site(self.tables, point, hidden_RW, residual_RW, kept, begin, sampled)
        return None

    def _reserved(self, plan: StepPlan, point: int) -> tuple[torch.Tensor, int]:
        """Memory for what a point captures, and which byte of the step's, as the tables count them, is its first."""
        bounds = plan.bounds_of_point.get(point)
        if bounds is None:
            return self.drain.ring, 0
        begin, end = bounds
        kept, at, block, offset = self.drain.reserve(end - begin)
        self._tap_parts.append((begin, end, block, offset))
        return kept, begin + self._begin - at

    def _carry_out(
        self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, kept: torch.Tensor, begin: int,
        sampled: bool,
    ) -> np.ndarray | None:  # fmt: skip
        """The kernel, and code between as many launches of it as there are calls."""
        calls = self._calls(point) if self._plan is not None and self.tables.table.coded else []
        arguments = (self.tables, point, hidden_RW, residual_RW, kept, begin, sampled)
        if not calls:
            cuda.site(*arguments)
            return None
        bad: list[int] = []
        for phase, phase_calls in enumerate(calls):  # the kernel up to the code, the code, and on
            cuda.site(*arguments, phase)
            for n, records in phase_calls:
                bad += self._run(point, n, records, hidden_RW, residual_RW, sampled)
        cuda.site(*arguments, len(calls))
        return np.array(bad, np.int64)

    def _calls(self, point: int) -> list[list[tuple[int, np.ndarray]]]:
        """What code is called at a point, one call of each request after the other: the request's number in the batch,
        and the call's record, after the one, if there is one, that asks for the token."""
        assert self._plan is not None
        table, phases = self.tables.table, []
        first = self._batch.position + self._steps
        for n, slot in enumerate(self._batch.slot.tolist()):
            if slot not in table.coded:
                continue
            records = table.records[table.first[slot, point] : table.first[slot, point + 1]]
            for phase, at in enumerate(np.flatnonzero(records["kind"] == APPLY).tolist()):
                if phase == len(phases):
                    phases.append([])
                if records["start"][at] < first[n] + self._batch.count[n] and first[n] < records["stop"][at]:
                    has_match = at > 0 and records["kind"][at - 1] == MATCH
                    phases[phase].append((n, records[at - has_match : at + 1]))
        return phases if any(phases) else []

    def _run(
        self, point: int, n: int, records: np.ndarray, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None,
        sampled: bool,
    ) -> list[int]:  # fmt: skip
        """Runs a request's code on its rows; its slot, if what that gave is not finite and was not written."""
        assert self._plan is not None
        assert self.code is not None
        batch, record = self._batch, records[-1]
        rows = batch.row[n] + np.arange(batch.count[n])
        position = batch.position[n] + self._steps + np.arange(batch.count[n])
        if sampled:
            rows, position = rows[-1:], position[-1:]
        holds = (record["start"] <= position) & (position < record["stop"])
        if len(records) > 1 and holds.any():
            first, count = int(records[0]["value"]), int(records[0]["step"])
            token = self.tables.token_of_row[torch.from_numpy(rows).to(hidden_RW.device)].long()
            among = torch.isin(token, self.tables.bank[first : first + count].long()).cpu().numpy()
            holds &= among == (records[0]["x"] == 1)
        at = np.array([n]) if sampled else rows[holds]
        if not holds.any():
            return []
        at_A = torch.from_numpy(at).to(hidden_RW.device)
        h_AW, within = fused.join(hidden_RW, residual_RW, at_A), columns_of(record)
        part = self.code(int(record["value"]), h_AW[:, within], point, position[holds])
        if part is None:
            return []
        new_AW = h_AW.clone()
        new_AW[:, within] = part
        finite_A = new_AW.to(hidden_RW.dtype).isfinite().all(1)
        fused.split(hidden_RW, residual_RW, at_A[finite_A], new_AW[finite_A])
        return [] if bool(finite_A.all()) else [int(batch.slot[n])]

    def end(self, plan: StepPlan) -> BufferSlice | ScatteredSlices | None:
        """Where its part of the ring will lie, and those of taps that reserved their own."""
        place, self._place = self._place, None  # whoever is given them holds them, nobody else
        parts, self._tap_parts = self._tap_parts, []
        reserved_bytes = self._reserved_bytes
        if plan.size > reserved_bytes and len(parts) < sum(
            begin >= reserved_bytes for begin, _ in plan.bounds_of_point.values()
        ):
            raise ModelError("rows that were to be captured did not come by their taps")
        if not parts:
            return place
        if place is not None:
            parts.append((0, self._reserved_bytes, place.block, place.offset))
        return ScatteredSlices(parts)

    def prepare(self) -> None:
        self.drain.prepare()

    def flush(self) -> None:
        self.drain.flush()

    def close(self) -> None:
        self.drain.close()

    def failed(self) -> list[tuple[int, int]]:
        return self.tables.failed()
