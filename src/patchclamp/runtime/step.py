"""How a step is carried out where the model is: on the host, or (`runtime.cuda`) on a CUDA device."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from patchclamp.kernels import fused
from patchclamp.plan import Batch, ProgramTable, StepPlan
from patchclamp.plan.step import NUMBERS
from patchclamp.store.bank import Bank
from patchclamp.store.captures import BufferSlice, ScatteredSlices
from patchclamp.store.host_memory import HostBlock


class Step(Protocol):
    """`unit`: what captured rows are measured in; `recording`: every tap launches, for a graph is being recorded;
    `code`: runs that of a number on rows [n, W] at a point and at positions [n], and gives None if it failed."""

    unit: np.ndarray
    recording: bool
    code: fused.CodeRunner | None

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held on the device beside the bank, by what they are for."""
        ...

    def begin(self, plan: StepPlan, batch: Batch, steps: int) -> None:
        """Begins the step that is `steps` after the one of `plan` and `batch`, each of one token a request."""
        ...

    def apply(
        self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, sampled: bool
    ) -> np.ndarray | None:
        """Carries a point out; returns the slots whose edits were not written because they are not finite, if known."""
        ...

    def end(self, plan: StepPlan) -> BufferSlice | ScatteredSlices | None:
        """Where what was captured lies, if anything was."""
        ...

    def prepare(self) -> None:
        """A program that captures has been admitted."""
        ...

    def flush(self) -> None:
        """Returns when all that `end` gave can be read."""
        ...

    def close(self) -> None:
        """Stops what runs beside the steps; none follows."""
        ...

    def failed(self) -> list[tuple[int, int]]:
        """Slots whose program's edits were not finite and not written, where `apply` did not tell, and at which point;
        of steps whose results have arrived."""
        ...


class HostStep:
    """On the CPU: rows are kept in one fp32 buffer a step."""

    unit, recording = NUMBERS, False
    code: fused.CodeRunner | None = None
    token_of_row: torch.Tensor | None = None  # the engine's own, of every row of the step at hand

    @property
    def memory(self) -> dict[str, int]:
        return {}

    def __init__(self, table: ProgramTable, bank: Bank) -> None:
        self._table, self._bank = table, bank

    def begin(self, plan: StepPlan, batch: Batch, steps: int) -> None:
        self._plan = plan.advanced(steps) if steps else plan
        self._kept = torch.empty(plan.size, device=self._bank.data.device)
        self._last_rows = batch.row + batch.count - 1

    def apply(
        self, point: int, hidden_RW: torch.Tensor, residual_RW: torch.Tensor | None, sampled: bool
    ) -> np.ndarray | None:
        rows = self._plan.sampled if sampled else self._plan.tokens
        token_R = self.token_of_row
        if token_R is not None and sampled:
            token_R = token_R[torch.from_numpy(self._last_rows).to(token_R.device)]
        arguments = (rows, point, self._table, self._plan, self._bank.data, self._kept, token_R, self.code)
        return fused.apply(hidden_RW, residual_RW, *arguments)

    def end(self, plan: StepPlan) -> BufferSlice | ScatteredSlices | None:
        return BufferSlice(HostBlock(self._kept.cpu().view(torch.uint8)), 0) if plan.size else None

    def prepare(self) -> None:
        return None

    def flush(self) -> None:
        return None

    def close(self) -> None:
        return None

    def failed(self) -> list[tuple[int, int]]:
        return []
