"""Step executors: `HostStep` in PyTorch, on any device; `cuda_step.CudaStep` in Triton, on CUDA under vLLM."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from patchclamp.kernels import fused
from patchclamp.kernels.transfer import Arriving, to_device
from patchclamp.language.values import POOLS
from patchclamp.plan import Batch, ProgramTable, StepPlan
from patchclamp.plan.bound import NEVER
from patchclamp.plan.step import NUMBERS
from patchclamp.runtime.attention import Queries
from patchclamp.store.captures import BufferSlice, ScatteredSlices
from patchclamp.store.host_memory import HostBlock


class Bank:
    """fp32 rows on the device, at fixed addresses. The process that admits programs allocates the rows, and decides
    when they may be overwritten (`plan.room`).

    data: a flat tensor of `numbers` elements on `device`
    """

    def __init__(self, numbers: int, device: str | torch.device = "cpu") -> None:
        self.data: torch.Tensor = torch.empty(numbers, dtype=torch.float32, device=device)

    def write(self, begin: int, neighbours: Sequence[torch.Tensor]) -> None:
        """Write row tensors [n, W] contiguously from offset `begin`, asynchronously on the current stream."""
        flat = [rows.reshape(-1) for rows in neighbours]
        numbers = flat[0] if len(flat) == 1 else torch.cat([rows.float() for rows in flat])
        if self.data.is_cuda and not numbers.is_cuda:
            numbers = numbers.pin_memory()
        self.data[begin : begin + numbers.numel()].copy_(numbers, non_blocking=True)


POOLED_NUMBERS = 1 << 24  # values converted to fp64 at a time
LONG = 512  # the average number of rows per range from which ranges are pooled one by one


Encode = Callable[[int, torch.Tensor, Queries], torch.Tensor]  # reads rows [n, W] by reading id


def reduced_rows(plan: StepPlan, steps: int, number: int, rows_NW: torch.Tensor, encode: Encode | None) -> torch.Tensor:
    """Pool or encode the rows of `plan.reduced[number]`; return the results, flat, in fp32. `steps`: the number of
    steps since the planned step."""
    region, how, ranges, count = plan.reduced[number]
    if how <= len(POOLS):
        return _pool(rows_NW, count, how).reshape(-1)
    assert encode is not None
    layout = plan.layout
    queries = Queries(int(layout.point[region]), layout.slot[ranges], plan.begins(steps)[ranges], count)
    return encode(how, rows_NW, queries).reshape(-1)


def _pool(rows_NW: torch.Tensor, counts: np.ndarray, pool: int) -> torch.Tensor:
    """Return the sum (accumulated in fp64) or maximum of each group of `counts[i]` consecutive rows, fp32 [R, W]."""
    if len(rows_NW) >= LONG * len(counts):  # the call below has one thread for each column of a range
        parts = rows_NW.split(counts.tolist())
        is_max = POOLS[pool - 1] == "max"
        return torch.stack([part.amax(0) if is_max else part.sum(0, dtype=torch.float64).float() for part in parts])
    lengths = to_device(counts, rows_NW.device)
    if POOLS[pool - 1] == "max":
        return torch.segment_reduce(rows_NW, "max", lengths=lengths, unsafe=True)
    parts = rows_NW.split(max(POOLED_NUMBERS // len(rows_NW), 1), 1)
    sums = [torch.segment_reduce(part.double(), "sum", lengths=lengths, unsafe=True).float() for part in parts]
    return torch.cat(sums, 1)


class Step(Protocol):
    """The runtime's interface to an executor.

    unit: the unit of capture sizes in plans, `NUMBERS` or `BYTES`
    recording: True while a graph is recorded, so that every tap launches
    code: the callback that runs programs' code at a point
    encode: the callback that computes a reading (features or attention) from rows [n, W]
    removes_keys: True if `RemoveKeys` ops are supported
    """

    unit: np.ndarray
    recording: bool
    code: fused.CodeRunner | None
    encode: Encode | None
    removes_keys: bool

    @property
    def memory(self) -> dict[str, int]:
        """Device memory in bytes by purpose, excluding the bank."""
        ...

    def begin(self, plan: StepPlan, batch: Batch, steps: int) -> None:
        """Begin the step that comes `steps` steps after the planned one (`plan`, `batch`). Unless `steps` is 0, it is a
        decode step with one token per request."""
        ...

    def apply(
        self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, sampled: bool
    ) -> np.ndarray | None:
        """Apply the plan at a point. Non-finite edits are not written; returns their slots, or None if `failed` will
        report them."""
        ...

    def end(self, plan: StepPlan) -> BufferSlice | ScatteredSlices | None:
        """Pool and encode the step's captures; return their location, or None without captures."""
        ...

    def prepare(self) -> None:
        """Prepare for captures, once a program with captures is admitted."""
        ...

    def open_captures(self) -> None:
        """Put later captures in memory that other processes can map, if the executor owns their memory."""
        ...

    def flush(self) -> None:
        """Wait until all captures are readable on the host."""
        ...

    def close(self) -> None:
        """Stop background threads. No step may follow."""
        ...

    def failed(self) -> list[tuple[int, int]]:
        """Return the (slot, point) pairs of non-finite edits that the device has reported so far, except slots that
        `apply` returned. These edits were not written."""
        ...


class HostStep:
    """Steps in PyTorch, with one fp32 capture buffer per step.

    On a GPU, non-finite edits are reported after the step; only taps with token conditions, probes or code synchronize.
    """

    unit, recording, removes_keys = NUMBERS, False, False
    code: fused.CodeRunner | None = None
    encode: Encode | None = None
    token_of_row: torch.Tensor | None = None  # the engine's token ids of the step's rows, [R]

    @property
    def memory(self) -> dict[str, int]:
        return {}

    def __init__(self, table: ProgramTable, bank: Bank) -> None:
        self._table, self._bank = table, bank
        self._is_late = bank.data.device.type != "cpu"
        self._late: dict[int, fused.Late] = {}  # late results of the current step, by point
        # for each step with pending flags: (slot, point) pairs, and the flags
        self._arriving: collections.deque[tuple[list[tuple[int, int]], Arriving]] = collections.deque()

    def begin(self, plan: StepPlan, batch: Batch, steps: int) -> None:
        self._plan, self._steps = plan.advanced(steps) if steps else plan, steps
        self._captures = torch.empty(plan.size + plan.scratch, dtype=torch.float32, device=self._bank.data.device)
        self._sampled_rows = batch.sampled_rows
        self._bits = np.zeros(batch.rows, np.int64)
        if self._table.deciding and not steps:
            since = self._table.unsettled(batch.slot, batch.position, batch.samples)
            self._table.latches[self._table.latches >= since[:, None]] = NEVER
        self._late.clear()

    def apply(
        self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, sampled: bool
    ) -> np.ndarray | None:
        rows = self._plan.sampled if sampled else self._plan.tokens
        token_R = self.token_of_row
        if token_R is not None and sampled:
            token_R = token_R[to_device(self._sampled_rows, token_R.device)]
        late = self._late.setdefault(point, []) if self._is_late else None
        arguments = (rows, point, self._table, self._plan, self._bank.data, self._captures, token_R, self.code, late,
                     self._bits)  # fmt: skip
        return fused.apply(hidden_RW, residual_RW, *arguments)

    def end(self, plan: StepPlan) -> BufferSlice | ScatteredSlices | None:
        parts = [(point, slot, flags) for point, late in self._late.items() for slot, flags in late]
        if parts:
            slots = [(int(one), point) for point, slot, _ in parts for one in slot]
            self._arriving.append((slots, Arriving(torch.cat([flags for _, _, flags in parts]))))
        captures = self._captures
        for number, (region, *_) in enumerate(plan.reduced):
            begin, width = int(plan.base[region]), int(plan.row[region])
            rows = captures[begin : begin + int(plan.rows[plan.layout.region_group[region]]) * width].view(-1, width)
            results = reduced_rows(plan, self._steps, number, rows, self.encode)
            captures[int(plan.result[region]) :][: len(results)] = results
        kept = captures[: plan.size].clone() if plan.scratch else captures  # frees the scratch rows
        return BufferSlice(HostBlock(kept.cpu().view(torch.uint8)), 0) if plan.size else None

    def prepare(self) -> None:
        return None

    def open_captures(self) -> None:
        return None

    def flush(self) -> None:
        return None

    def close(self) -> None:
        return None

    def failed(self) -> list[tuple[int, int]]:
        known = []
        while self._arriving and self._arriving[0][1].has_arrived:
            known.append(self._arriving.popleft())
        told = [pair for slots, flags in known for pair in zip(slots, flags.result().tolist(), strict=True)]
        return [slot for slot, good in told if not good]

    def arrive(self) -> None:
        """Wait until `failed` can report all steps so far."""
        try:
            for _, flags in self._arriving:
                flags.result()
        except Exception:  # the device has failed
            self._arriving.clear()
            raise
