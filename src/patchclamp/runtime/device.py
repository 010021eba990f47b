"""On a CUDA device: the program table and the step's rows at fixed addresses, brought up to date at once.

All tables lie in one tensor of 32-bit words.  The words that changed are packed into pinned staging memory, with their
addresses, and one small kernel reads them there and puts them in place.  Staging memory rotates, because with
asynchronous scheduling the next step is prepared while the last one still runs.  In steady decode nothing changes and
nothing is copied; only when the ring for captures is at its end, the tables get a new begin.

    R rows of a step at most · N requests of a step at most · S slots · P points · O records
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from patchclamp.kernels import cuda, moves
from patchclamp.kernels.moves import CHUNK
from patchclamp.kernels.noise import quantiles
from patchclamp.plan import Batch, ProgramTable, StepPlan

DEPTH = 4  # staging buffers: more steps in flight than any scheduler keeps
MIN_STAGING_WORDS = 1 << 14  # words of a staging buffer, to begin with


class _Staging:
    """Pinned memory for so many words. `done` is the event after the device has read them."""

    def __init__(self, words: int) -> None:
        self.done, self.pinned = torch.cuda.Event(), _pinned(words)
        self.words = self.pinned.numpy()

    def room(self, words: int) -> None:
        """Makes room for so many words. The device must have read the ones before."""
        if words > len(self.words):
            self.pinned = _pinned(1 << (words - 1).bit_length())
            self.words = self.pinned.numpy()


class CudaTables:
    """Device copies of a `ProgramTable` and of a step's rows, as the kernel reads them.

    `position_of_row` and `token_of_row` are the engine's own tensors of positions and token ids [R], which it fills
    before every step.
    """

    def __init__(
        self, table: ProgramTable, rows: int, samples: int, bank: torch.Tensor, positions: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:  # fmt: skip
        self.table, self.bank, self.device = table, bank, bank.device
        self.position_of_row, self.token_of_row = positions, tokens
        self.points = table.first.shape[1] - 1
        records = len(table.records)
        sizes = {
            # "base", "stride" and "records" hold numbers of 64 bits: at even words
            "base": 2 * records, "stride": 2, "records": cuda.RECORD_WORDS * records, "offset": records,
            "first": table.first.size, "generation": len(table.first), "slot_of_row": rows, "rank_of_row": rows,
            "origin_of_row": rows, "row_of_sample": samples, "rank_of_sample": samples,
        }  # fmt: skip
        ends = np.cumsum(list(sizes.values())).tolist()
        self._at = {name: end - size for (name, size), end in zip(sizes.items(), ends, strict=True)}
        self._words = torch.zeros(ends[-1], dtype=torch.int32, device=self.device)
        views = {name: self._words[at : at + sizes[name]] for name, at in self._at.items()}
        self.base, self.stride = (views.pop(name).view(torch.int64) for name in ("base", "stride"))
        self.quantiles = torch.from_numpy(quantiles()).reshape(-1).to(self.device)
        for name, view in views.items():
            setattr(self, name, view)
        self._staging = [_Staging(MIN_STAGING_WORDS) for _ in range(DEPTH)]
        self._ranked = False  # whether some rank of a sampled row is not 0
        self.turns = 1  # sampled rows of a request of the step, at most
        self._turn, self._rows, self.copies, self.rebased = 0, 0, 0, 0
        # how the kernel was launched before, with the addresses of what it reads here (`kernels.cuda.site`)
        self.ready: dict[Any, Any] = {}
        self._bad = _pinned(2 * len(table.first)).zero_().view(torch.int64)  # written by the device
        self._failures, self.bad_address = self._bad.numpy(), self._bad.data_ptr()

    slot_of_row: torch.Tensor
    rank_of_row: torch.Tensor
    origin_of_row: torch.Tensor
    row_of_sample: torch.Tensor
    rank_of_sample: torch.Tensor
    first: torch.Tensor
    generation: torch.Tensor
    records: torch.Tensor
    offset: torch.Tensor

    def buffers(self) -> dict[str, torch.Tensor]:
        """What the kernel reads, by name."""
        names = ("position_of_row", "token_of_row", "bank", "base", "quantiles", *self._at)
        return {name: getattr(self, name) for name in names}

    @property
    def bytes(self) -> int:
        """Device memory held."""
        return self._words.nbytes + self.quantiles.nbytes

    def failed(self) -> list[tuple[int, int]]:
        """The slots whose program's edits were not finite, each with the point, of steps whose results have arrived."""
        slots = np.flatnonzero(self._failures)
        slots = slots[self._failures[slots] >> 32 == self.table.generation[slots]]
        return [(int(slot), int(self._failures[slot]) & 0xFFFFFFFF) for slot in slots]

    def load(self, plan: StepPlan, batch: Batch, begin: int = 0, stride: int = 0) -> None:
        """Writes a step's plan to the tables. Its captures begin at byte `begin`. If further steps of one token a
        request go on with the plan, the captures of each begin `stride` bytes after those of the step before."""
        slot, origin = plan.tokens.slot, []
        if stride:
            first = np.zeros(batch.rows, np.int32)
            first[batch.row] = batch.position
            origin = [(self._at["origin_of_row"], first)]
        if len(slot) < self._rows:  # rows of an earlier, longer step become nobody's
            slot = np.concatenate([slot, np.zeros(self._rows - len(slot), np.int32)])
        self._rows = len(plan.tokens.slot)
        self.turns = batch.most_samples
        self._send([
            (self._at["slot_of_row"], slot),
            (self._at["rank_of_row"], plan.tokens.rank),
            (self._at["row_of_sample"], batch.sampled_rows.astype(np.int32)),
            *self._ranks(batch),
            (self._at["stride"], np.array([stride]).view(np.int32)),
            *origin,
            *self._changed(),
            *self._targets(plan, begin),
        ])  # fmt: skip

    def _ranks(self, batch: Batch) -> list[tuple[int, np.ndarray]]:
        """The sampled rows' ranks, where they are not what they were: 0, but for drafted tokens."""
        if batch.samples is None and not self._ranked:
            return []
        self._ranked, rank = batch.samples is not None, batch.sampled_ranks.astype(np.int32)
        return [(self._at["rank_of_sample"], np.pad(rank, (0, self.rank_of_sample.shape[0] - len(rank))))]

    def rebase(self, plan: StepPlan, begin: int) -> None:
        """Moves the captures of the steps to come: the planned step's would begin at byte `begin`."""
        self._send(self._targets(plan, begin)[1:])
        self.copies, self.rebased = self.copies - 1, self.rebased + 1

    def _changed(self) -> list[tuple[int, np.ndarray]]:
        slots, records = self.table.take_changed()
        stride = self.table.first.shape[1]
        segments = [(self._at["first"] + slot * stride, self.table.first[slot]) for slot in sorted(slots)]
        segments += [(self._at["generation"] + slot, self.table.generation[slot : slot + 1]) for slot in sorted(slots)]
        words = self.table.records.view(np.int32)
        size = cuda.RECORD_WORDS
        return segments + [(self._at["records"] + a * size, words[a * size : b * size]) for a, b in records]

    def _targets(self, plan: StepPlan, begin: int) -> list[tuple[int, np.ndarray]]:
        """Offsets by capture range and bases by region, each table from the lowest number in use to the highest."""
        if not plan.size:
            return []
        low, offset = _by_number(plan.layout.range_number, plan.offset, np.int32)
        lowest, base = _by_number(plan.layout.region_number, plan.base + begin, np.int64)
        return [(self._at["offset"] + low, offset), (self._at["base"] + 2 * lowest, base.view(np.int32))]

    def _send(self, segments: list[tuple[int, np.ndarray]]) -> None:
        """Copies segments (the first word's index in the tables, words) to the device."""
        chunks = sum(-(-len(words) // CHUNK) for _, words in segments)
        if not chunks:
            return
        self._turn = (self._turn + 1) % DEPTH
        staging = self._staging[self._turn]
        if not staging.done.query():
            staging.done.synchronize()
        count, at, header = sum(len(words) for _, words in segments), 3 * chunks, []
        staging.room(at + count)
        np.concatenate([words for _, words in segments], out=staging.words[at : at + count])
        for to, words in segments:
            for begin in range(0, len(words), CHUNK):
                length = min(len(words) - begin, CHUNK)
                header += to + begin, at, length
                at += length
        staging.words[: len(header)] = header
        moves.upload(staging.pinned, self._words, chunks)
        staging.done.record()
        self.copies += 1


def _by_number(number: np.ndarray, values: np.ndarray, dtype: type) -> tuple[int, np.ndarray]:
    low = int(number.min())
    table = np.zeros(int(number.max()) + 1 - low, dtype)
    table[number - low] = values
    return low, table


def _pinned(words: int) -> torch.Tensor:
    return torch.empty(words, dtype=torch.int32, pin_memory=True)
