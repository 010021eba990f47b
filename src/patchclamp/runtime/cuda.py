"""A step on a CUDA device: graphs replay with the kernel in them, eager steps launch it, captures leave behind both.

A recorded graph writes captured rows to `kept`, whose address it knows; after the step they are copied to the drain's
ring on the device (some microseconds).  A step without a graph, a large prefill say, has the kernel write to the ring
itself, and what some layers left, 64 MiB of it, is on its way while the next ones compute.
"""

from __future__ import annotations

import numpy as np
import torch

from patchclamp.kernels import cuda, fused, moves
from patchclamp.plan import APPLY, MATCH, Batch, ProgramTable, StepPlan
from patchclamp.plan.step import BYTES
from patchclamp.plan.table import columns_of
from patchclamp.runtime.device import CudaTables
from patchclamp.runtime.drain import Drain
from patchclamp.runtime.graphs import Recorded
from patchclamp.store.bank import Bank
from patchclamp.store.captures import Apart, Block, Place


class CudaStep:
    """Carries out steps of at most `rows` rows and `samples` sampled ones; `positions` and `tokens` are the engine's
    tensors of every row's position and token id.

    `kept_bytes` bounds what a step with a graph may capture, `ring_bytes` what is on its way to the host, and
    `pinned_bytes` what waits there in pinned memory.
    """

    unit = BYTES
    code: fused.Run | None = None

    def __init__(
        self, table: ProgramTable, bank: Bank, rows: int, samples: int, positions: torch.Tensor, tokens: torch.Tensor,
        kept_bytes: int, ring_bytes: int, pinned_bytes: int,
    ) -> None:  # fmt: skip
        self.tables = CudaTables(table, rows, samples, bank.data, positions, tokens)
        self.kept = torch.empty(kept_bytes, dtype=torch.uint8, device=bank.data.device)
        self.drain = Drain(bank.data.device, ring_bytes, pinned_bytes)
        self.recorded = Recorded()
        self.recording = False
        moves.warm(bank.data.device)
        self._plan: StepPlan | None = None
        self._parts: dict[int, tuple[int, int]] | None = None
        self._kept_apart: tuple[set[int], tuple[int, int] | None] | None = None
        self._left: list[tuple[int, int, Block, int]] = []
        self._drained: set[int] = set()

    def buffers(self) -> dict[str, torch.Tensor]:
        """What graphs read and write of ours, by name."""
        return {"kept": self.kept, **self.tables.buffers()}

    @property
    def memory(self) -> dict[str, int]:
        """Device memory held, beside the bank, by what it is for."""
        return {"captures of a graph (kept)": self.kept.nbytes, "captures on their way (ring)": self.drain.device_bytes,
                "tables": self.tables.bytes}  # fmt: skip

    @property
    def bytes(self) -> int:
        """Device memory held, beside the bank."""
        return sum(self.memory.values())

    def begin(self, plan: StepPlan, batch: Batch, fresh: bool) -> None:
        self._plan, self._batch, self._left = plan, batch, []
        self._drained.clear()
        if fresh:
            self._parts = self._kept_apart = None
            self.tables.load(plan, batch.row + batch.count - 1)
            self.recorded.use(plan.active)

    def apply(
        self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, sampled: bool
    ) -> np.ndarray | None:
        if self.recording:
            cuda.site(self.tables, point, hidden_RW, residual_RW, self.kept, 0, sampled)
            self.recorded.note(point)
            return None
        part = None
        if self._plan is not None and self._plan.size:
            self._parts = self._plan.parts() if self._parts is None else self._parts
            part = self._parts.get(point)
        kept, begin = self.kept, 0
        if part is not None:
            begin, end = part
            kept, at, block, offset = self.drain.reserve(end - begin)
            self._left.append((begin, end, block, offset))
            self._drained.add(point)
            begin -= at
        if self.tables.table.coded:
            return self._carry_out(point, hidden_RW, residual_RW, kept, begin, sampled)
        cuda.site(self.tables, point, hidden_RW, residual_RW, kept, begin, sampled)
        return None

    def _carry_out(
        self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, kept: torch.Tensor, begin: int,
        sampled: bool,
    ) -> np.ndarray | None:  # fmt: skip
        """The kernel, and code between as many launches of it as there are calls."""
        calls = self._calls(point) if self._plan is not None and self.tables.table.coded else []
        given = (self.tables, point, hidden_RW, residual_RW, kept, begin, sampled)
        if not calls:
            cuda.site(*given)
            return None
        bad: list[int] = []
        for phase, many in enumerate(calls):  # the kernel up to the code, the code, and on
            cuda.site(*given, phase)
            for n, records in many:
                bad += self._run(point, n, records, hidden_RW, residual_RW, sampled)
        cuda.site(*given, len(calls))
        return np.array(bad, np.int64)

    def _calls(self, point: int) -> list[list[tuple[int, np.ndarray]]]:
        """What code is called at a point, one call of each request after the other: the request's number in the batch,
        and the call's record, after the one, if there is one, that asks for the token."""
        assert self._plan is not None
        table, found = self.tables.table, []
        first = self._batch.position + self._plan.behind
        for n, slot in enumerate(self._batch.slot.tolist()):
            if slot not in table.coded:
                continue
            records = table.records[table.first[slot, point] : table.first[slot, point + 1]]
            for phase, at in enumerate(np.flatnonzero(records["kind"] == APPLY).tolist()):
                if phase == len(found):
                    found.append([])
                if records["start"][at] < first[n] + self._batch.count[n] and first[n] < records["stop"][at]:
                    asked = at > 0 and records["kind"][at - 1] == MATCH
                    found[phase].append((n, records[at - asked : at + 1]))
        return found if any(found) else []

    def _run(
        self, point: int, n: int, records: np.ndarray, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None,
        sampled: bool,
    ) -> list[int]:  # fmt: skip
        """Runs a request's code on its rows; its slot, if what that gave is not finite and was not written."""
        assert self._plan is not None
        assert self.code is not None
        batch, record = self._batch, records[-1]
        rows = batch.row[n] + np.arange(batch.count[n])
        position = batch.position[n] + self._plan.behind + np.arange(batch.count[n])
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
        made = h_AW.clone()
        made[:, within] = part
        finite_A = made.to(hidden_RW.dtype).isfinite().all(1)
        fused.split(hidden_RW, residual_RW, at_A[finite_A], made[finite_A])
        return [] if bool(finite_A.all()) else [int(batch.slot[n])]

    def end(self, plan: StepPlan) -> Place | Apart | None:
        """What a graph left in `kept`, beside what eager taps did."""
        if not plan.size:
            return None
        if not self._drained:
            return Place(*self.drain.put(self.kept, 0, plan.size))
        rest = self._rest()
        if rest is not None:
            begin, end = rest
            self._left.append((begin, end, *self.drain.put(self.kept, begin, end)))
        return Apart(self._left)

    def _rest(self) -> tuple[int, int] | None:
        """The part of `kept` with the rows that eager taps did not keep; found once as long as the plan goes on and the
        same taps are eager."""
        if self._kept_apart is None or self._kept_apart[0] != self._drained:
            assert self._parts is not None
            rest = [part for point, part in self._parts.items() if point not in self._drained]
            found = (min(begin for begin, _ in rest), max(end for _, end in rest)) if rest else None
            self._kept_apart = set(self._drained), found
        return self._kept_apart[1]

    def prepare(self) -> None:
        self.drain.prepare()

    def flush(self) -> None:
        self.drain.flush()

    def close(self) -> None:
        self.drain.close()

    def failed(self) -> list[tuple[int, int]]:
        return self.tables.failed()
