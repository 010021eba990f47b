"""On a CUDA device: the program table and the step's rows at fixed addresses, brought up to date by one copy a change.

All tables lie in one tensor of 32-bit words.  What changed is packed into pinned staging memory with where it belongs,
crosses in one copy, and one small kernel puts it in place; staging rotates, because with asynchronous scheduling the
next step is prepared while the last one still runs.  In steady decode nothing changes and nothing is copied.

    R rows of a step at most · N requests of a step at most · S slots · P points · O records
"""

from __future__ import annotations

import numpy as np
import torch

from patchclamp.kernels import cuda
from patchclamp.plan import ProgramTable, StepPlan

DEPTH = 4  # staging buffers: more steps in flight than any scheduler keeps


class CudaTables:
    """Device copies of a `ProgramTable` and of a step's rows, as the kernel reads them.

    `position_of_row` is the engine's own tensor of positions [R], which it fills before every step.
    """

    def __init__(
        self, table: ProgramTable, rows: int, samples: int, bank: torch.Tensor, positions: torch.Tensor
    ) -> None:
        self._table, self.bank, self.position_of_row, self.device = table, bank, positions, bank.device
        self.points = table.first.shape[1] - 1
        records = len(table.records)
        sizes = {
            "base": 2 * records, "offset": records, "records": cuda.RECORD_WORDS * records, "first": table.first.size,
            "generation": len(table.first), "slot_of_row": rows, "rank_of_row": rows, "row_of_sample": samples,
        }  # fmt: skip
        ends = np.cumsum(list(sizes.values())).tolist()
        self._at = {name: end - size for (name, size), end in zip(sizes.items(), ends, strict=True)}
        self._words = torch.zeros(ends[-1], dtype=torch.int32, device=self.device)
        views = {name: self._words[at : at + sizes[name]] for name, at in self._at.items()}
        self.base = views.pop("base").view(torch.int64)
        for name, view in views.items():
            setattr(self, name, view)
        self._inbox = torch.empty(1 << 16, dtype=torch.int32, device=self.device)
        self._staging = [_pinned(1 << 16) for _ in range(DEPTH)]
        self._done = [torch.cuda.Event() for _ in range(DEPTH)]
        self._turn, self._rows, self.copies = 0, 0, 0
        self._bad = _pinned(2 * len(table.first)).zero_().view(torch.int64)  # written by the device
        self._failures, self.bad_address = self._bad.numpy(), self._bad.data_ptr()

    slot_of_row: torch.Tensor
    rank_of_row: torch.Tensor
    row_of_sample: torch.Tensor
    first: torch.Tensor
    generation: torch.Tensor
    records: torch.Tensor
    offset: torch.Tensor

    @property
    def bytes(self) -> int:
        """Device memory held."""
        return self._words.nbytes + self._inbox.nbytes

    def failed(self) -> list[tuple[int, int]]:
        """Slots whose present program's edits were not finite, and the point; of steps whose results have arrived."""
        told = np.flatnonzero(self._failures)
        told = told[self._failures[told] >> 32 == self._table.generation[told]]
        return [(int(slot), int(self._failures[slot]) & 0xFFFFFFFF) for slot in told]

    def load(self, plan: StepPlan, sample_rows: np.ndarray) -> None:
        """Makes the tables say what `plan` says; `sample_rows` [N] is the flat row of each sampled token."""
        rows = len(plan.tokens.slot)
        slot = np.zeros(max(rows, self._rows), np.int32)  # rows of an earlier, longer step become nobody's
        slot[:rows], self._rows = plan.tokens.slot, rows
        segments = [
            (self._at["slot_of_row"], slot),
            (self._at["rank_of_row"], plan.tokens.rank),
            (self._at["row_of_sample"], sample_rows.astype(np.int32)),
            *self._changed(),
            *self._targets(plan),
        ]
        self._send(segments)

    def _changed(self) -> list[tuple[int, np.ndarray]]:
        slots, records = self._table.take_changed()
        stride = self._table.first.shape[1]
        found = [(self._at["first"] + slot * stride, self._table.first[slot]) for slot in sorted(slots)]
        found += [(self._at["generation"] + slot, self._table.generation[slot : slot + 1]) for slot in sorted(slots)]
        words = self._table.records.view(np.int32)
        size = cuda.RECORD_WORDS
        return found + [(self._at["records"] + a * size, words[a * size : b * size]) for a, b in records]

    def _targets(self, plan: StepPlan) -> list[tuple[int, np.ndarray]]:
        """Where captured rows go, by span and area: of each one range from the lowest number to the highest."""
        if not plan.size:
            return []
        low, offset = _by_number(plan.spans.number, plan.offset, np.int32)
        lowest, base = _by_number(plan.spans.area, plan.base, np.int64)
        return [(self._at["offset"] + low, offset), (self._at["base"] + 2 * lowest, base.view(np.int32))]

    def _send(self, segments: list[tuple[int, np.ndarray]]) -> None:
        """Brings words to the device and puts each segment where it begins: one copy, then one kernel."""
        count = sum(len(words) for _, words in segments)
        self._turn = (self._turn + 1) % DEPTH
        if not self._done[self._turn].query():
            self._done[self._turn].synchronize()
        if 3 * count > len(self._staging[self._turn]):
            self._staging[self._turn] = _pinned(6 * count)
        if 3 * count > len(self._inbox):
            self._inbox = torch.empty(6 * count, dtype=torch.int32, device=self.device)
        staging = self._staging[self._turn]
        room = staging.numpy()
        np.concatenate([np.arange(to, to + len(words)) for to, words in segments], out=room[: 2 * count].view(np.int64))
        np.concatenate([words for _, words in segments], out=room[2 * count : 3 * count])
        self._inbox[: 3 * count].copy_(staging[: 3 * count], non_blocking=True)
        self._done[self._turn].record()
        where, words = self._inbox[: 2 * count].view(torch.int64), self._inbox[2 * count : 3 * count]
        self._words.index_copy_(0, where, words)
        self.copies += 1


def _by_number(number: np.ndarray, values: np.ndarray, dtype: type) -> tuple[int, np.ndarray]:
    low = int(number.min())
    found = np.zeros(int(number.max()) + 1 - low, dtype)
    found[number - low] = values
    return low, found


def _pinned(words: int) -> torch.Tensor:
    return torch.empty(words, dtype=torch.int32, pin_memory=True)
