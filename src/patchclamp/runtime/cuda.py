"""A step on a CUDA device: graphs replay with the kernel in them, eager steps launch it, captures leave behind both.

Captured rows are written to the drain's ring on the device, whose address recorded graphs know.  When a step begins,
all that it captures is allocated there, and the tables say from which byte on.  The next steps that go on alike get the
memory behind it, so that the tables need no change.

If a step captures too much for that, as a large prefill does, every tap allocates its own part.  So 64 MiB from the
first layers leave for the host while later layers compute.  If only the sampled rows are too much, only their tap does.
"""

from __future__ import annotations

import numpy as np
import torch

from patchclamp.errors import ModelError
from patchclamp.kernels import cuda, fused, moves
from patchclamp.plan import APPLY, MATCH, Batch, ProgramTable, StepPlan
from patchclamp.plan.step import BYTES
from patchclamp.plan.table import columns_of, named
from patchclamp.runtime.device import CudaTables
from patchclamp.runtime.drain import Drain
from patchclamp.runtime.graphs import Recorded
from patchclamp.store.bank import Bank
from patchclamp.store.captures import BufferSlice, ScatteredSlices
from patchclamp.store.host_memory import HostBlock


class CudaStep:
    """Carries out steps of at most `rows` rows and `samples` sampled ones.

    positions, tokens: the engine's tensors of every row's position and token id, [R]
    kept_bytes: what a step with a graph may capture, at most; half the ring bounds it, too
    ring_bytes: what may be on its way to the host
    pinned_bytes: what may wait there in pinned memory
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
        self._upfront_bytes = 0  # bytes of captures that are allocated when a step begins
        self._begin = 0  # the byte at which, by the tables, the captures of the planned step begin
        self._upfront: BufferSlice | None = None  # what was allocated when the step began
        self._tap_parts: list[tuple[int, int, HostBlock, int]] = []  # what taps allocated, as `ScatteredSlices.parts`

    def buffers(self) -> dict[str, torch.Tensor]:
        """The tensors of ours that graphs read and write, by name."""
        return {"ring": self.drain.ring, **self.tables.buffers()}

    @property
    def memory(self) -> dict[str, int]:
        """Device memory held, beside the bank, by what it is for."""
        return {"captures on their way (ring)": self.drain.device_bytes, "tables": self.tables.bytes}

    @property
    def bytes(self) -> int:
        """Device memory held, beside the bank."""
        return sum(self.memory.values())

    def open_captures(self) -> None:
        self.drain.open()

    def begin(self, plan: StepPlan, batch: Batch, steps: int) -> None:
        self._plan, self._batch, self._steps = plan, batch, steps
        if not steps:
            self._upfront_bytes = self._bytes_upfront(plan)
            self.recorded.use(plan.active)
        self._tap_parts, self._upfront, begin = [], None, 0
        if self._upfront_bytes:
            _, first_byte, block, offset = self.drain.allocate(self._upfront_bytes)
            self._upfront = BufferSlice(block, offset)
            begin = first_byte - steps * self._upfront_bytes
        if not steps:
            self.tables.load(plan, batch, begin, self._upfront_bytes if plan.steady_steps else 0)
        elif begin != self._begin:
            self.tables.rebase(plan, begin)
        self._begin = begin

    def _bytes_upfront(self, plan: StepPlan) -> int:
        """How many bytes of a step's captures are allocated when it begins: all; or if that is too much, all but the
        sampled rows, which come last; or none."""
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
        memory, begin, plan = self.drain.ring, 0, self._plan
        if plan is not None and plan.size:
            if self._upfront_bytes == plan.size:
                begin = -self._steps * self._upfront_bytes if sampled else 0  # of other rows the kernel knows it
            elif sampled or not self._upfront_bytes:
                memory, begin = self._allocate(plan, point)
        if self.tables.table.coded:
            return self._carry_out(point, hidden_RW, residual_RW, memory, begin, sampled)
        cuda.site(self.tables, point, hidden_RW, residual_RW, memory, begin, sampled)
        return None

    def _allocate(self, plan: StepPlan, point: int) -> tuple[torch.Tensor, int]:
        """Memory for what a point captures, and the number of its first byte, as the tables count the step's bytes."""
        bounds = plan.bounds_of_point.get(point)
        if bounds is None:
            return self.drain.ring, 0
        begin, end = bounds
        memory, first_byte, block, offset = self.drain.allocate(end - begin)
        self._tap_parts.append((begin, end, block, offset))
        return memory, begin + self._begin - first_byte

    def _carry_out(
        self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, memory: torch.Tensor, begin: int,
        sampled: bool,
    ) -> np.ndarray | None:  # fmt: skip
        """Launches the kernel up to each request's next code, runs that code, and goes on, until no code is left."""
        calls = self._calls(point) if self._plan is not None else []
        arguments = (self.tables, point, hidden_RW, residual_RW, memory, begin, sampled)
        if not calls:
            cuda.site(*arguments)
            return None
        bad: list[int] = []
        for phase, phase_calls in enumerate(calls):
            cuda.site(*arguments, phase)
            for n, records in phase_calls:
                bad += self._run(point, n, records, hidden_RW, residual_RW, sampled)
        cuda.site(*arguments, len(calls))
        return np.array(bad, np.int64)

    def _calls(self, point: int) -> list[list[tuple[int, np.ndarray]]]:
        """The calls of code at a point: first every request's first one, then every request's second, and so on. A call
        is the request's number in the batch and the call's record, behind its `MATCH` record if it has one."""
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
        """Runs a request's code on its rows. Returns its slot if some results are not finite, which are not written."""
        assert self._plan is not None
        assert self.code is not None
        batch, record = self._batch, named(records[-1:], APPLY)[0]
        rows = batch.row[n] + np.arange(batch.count[n])
        position = batch.position[n] + self._steps + np.arange(batch.count[n])
        if sampled:
            rows, position = rows[-1:], position[-1:]
        holds = (record["start"] <= position) & (position < record["stop"])
        if len(records) > 1 and holds.any():
            holds &= self._matches(named(records[:1], MATCH)[0], rows)
        if not holds.any():
            return []
        row_A = torch.from_numpy(np.array([n]) if sampled else rows[holds]).to(hidden_RW.device)
        h_AW, columns = fused.join(hidden_RW, residual_RW, row_A), columns_of(record)
        result = self.code(int(record["code"]), h_AW[:, columns], point, position[holds])
        if result is None:
            return []
        new_AW = h_AW.clone()
        new_AW[:, columns] = result
        finite_A = new_AW.to(hidden_RW.dtype).isfinite().all(1)
        fused.split(hidden_RW, residual_RW, row_A[finite_A], new_AW[finite_A])
        return [] if bool(finite_A.all()) else [int(batch.slot[n])]

    def _matches(self, condition: np.void, rows: np.ndarray) -> np.ndarray:
        """Whether the token of each row meets the condition of a `MATCH` record."""
        ids = self.tables.bank[condition["ids"] : condition["ids"] + condition["count"]].long()
        token = self.tables.token_of_row[torch.from_numpy(rows).to(ids.device)].long()
        return torch.isin(token, ids).cpu().numpy() == (condition["expected"] == 1)

    def end(self, plan: StepPlan) -> BufferSlice | ScatteredSlices | None:
        """Where the step's captures will lie on the host."""
        upfront, self._upfront = self._upfront, None  # nobody but the caller holds the blocks from here on
        parts, self._tap_parts = self._tap_parts, []
        upfront_bytes = self._upfront_bytes
        if plan.size > upfront_bytes and len(parts) < sum(
            begin >= upfront_bytes for begin, _ in plan.bounds_of_point.values()
        ):
            raise ModelError("rows that were to be captured did not come by their taps")
        if not parts:
            return upfront
        if upfront is not None:
            parts.append((0, upfront_bytes, upfront.block, upfront.offset))
        return ScatteredSlices(parts)

    def prepare(self) -> None:
        self.drain.prepare()

    def flush(self) -> None:
        self.drain.flush()

    def close(self) -> None:
        self.drain.close()

    def failed(self) -> list[tuple[int, int]]:
        return self.tables.failed()
