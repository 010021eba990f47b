"""How a step relates to the one before it: decided here, once a step, and read by planner, tables, staging and drain.

`quiet`: each request moved one token on, and the old plan needs no change.
`advanced`: the same, but positions and captures move one step on.
`changed`: anything else; the step gets a new plan.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from patchclamp.plan import Batch, ProgramTable, StepPlan
from patchclamp.plan.step import PlannedCaptures
from patchclamp.store.captures import BufferSlice, CaptureChunk, ScatteredSlices

Sameness = Literal["quiet", "advanced", "changed"]


class Continuity:
    """The last step that was planned, the steps since, and the capture chunk that they fill.

    `plan`, `batch`: of the step that was planned; None if no step may go on with it. `steps`: how many steps went on
    with it. Whatever happens to the programs of `table` ends it all.
    """

    def __init__(self, table: ProgramTable) -> None:
        self._table = table
        self._scheduled: list[str] | None = None  # the requests of the last answer, in the scheduler's order
        self._answer, self._answer_steps, self._answer_version = (False, True), 0, 0
        self.forget()

    def forget(self) -> None:
        """The next step is planned anew."""
        self.plan: StepPlan | None = None
        self.batch: Batch | None = None
        self.steps = 0
        self._requests: list[str] = []
        self._source: PlannedCaptures | None = None
        self._chunk: CaptureChunk | None = None
        self._chunk_end = 0  # the number of the step, counted from the plan's, that the chunk would take next

    def start(self, requests: list[str], batch: Batch, plan: StepPlan, device_labels: bool) -> None:
        """Steps may go on with this plan. `device_labels`: the device knows the positions of its rows by itself."""
        self.forget()
        self.plan, self.batch, self._requests, self._version = plan, batch, requests, self._table.version
        self._next_position = batch.position + 1
        self._nothing_to_do = plan.captures_nothing_ever and device_labels and not self._table.coded

    def judge(self, requests: list[str], position: np.ndarray, total: int) -> Sameness:
        """Relates a step of these requests, in the runner's order, at these positions, `total` tokens in all."""
        plan = self.plan
        if plan is None or self.steps >= plan.steady_steps or self._version != self._table.version:
            return "changed"
        if total != len(requests) or requests != self._requests:
            return "changed"
        if self._next_position.dtype != position.dtype:
            self._next_position = self._next_position.astype(position.dtype)
        if self._next_position.tobytes() != position.tobytes():  # the cheapest comparison there is
            return "changed"
        self._next_position += 1
        if self._nothing_to_do:
            return "quiet"
        self.steps += 1
        return "advanced"

    # -- answers to the scheduler

    def answer(self, requests: list[str] | None) -> tuple[bool, bool] | None:
        """The last answer, if it holds for a step of these requests, in the scheduler's order, each one token on."""
        if self._scheduled is None or self._answer_version != self._table.version or self._scheduled != requests:
            return None
        if not self._answer_steps:
            return None
        self._answer_steps -= 1
        return self._answer

    def keep_answer(self, requests: list[str] | None, answer: tuple[bool, bool], steps: int) -> None:
        """Keeps an answer for `steps` further steps of the same requests; with None for requests it is not kept."""
        self._scheduled = None if requests is None else list(requests)
        self._answer, self._answer_steps, self._answer_version = answer, steps, self._table.version

    # -- captures

    def captured(self, place: BufferSlice | ScatteredSlices, run: np.ndarray) -> CaptureChunk | None:
        """Appends the step's captures, which lie at a place, to the chunk at hand; or begins a chunk and returns it.

        `run`: the number of each slot's run.
        """
        assert self.plan is not None
        chunk = self._chunk
        fits = chunk is not None and self._chunk_end == self.steps and chunk.source is self._source
        self._chunk_end = self.steps + 1
        if chunk is not None and fits:  # a chunk that a release made smaller has another source
            chunk.append(place)
            return None
        plan = self.plan
        self._source = PlannedCaptures(plan, run[plan.layout.slot], self.steps)
        self._chunk = CaptureChunk([place], plan.size * plan.unit_bytes, self._source)
        return self._chunk
