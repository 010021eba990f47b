"""The step plan: what one engine step must do, as arrays.

The engine's batch is R flat rows; a request owns the rows of its scheduled positions.  Everything an op's record says
about positions is compared on the device; the host only says whose row each row is, and where captured rows go.  In
steady decode neither changes from step to step.

    R rows of the step · N requests of the step · S slots · P points · C capture records of admitted requests
"""

from __future__ import annotations

import msgspec
import numpy as np

from patchclamp.plan.table import ProgramTable


class Batch(msgspec.Struct, frozen=True):
    """A step's requests: slot (0: no program), first flat row, first position, how many positions; each [N]."""

    slot: np.ndarray
    row: np.ndarray
    position: np.ndarray
    count: np.ndarray
    rows: int


class Rows(msgspec.Struct, frozen=True):
    """Whose rows they are: for each flat row its slot (0: nobody's) and its position in that request; int32 [R]."""

    slot: np.ndarray
    position: np.ndarray


class StepPlan(msgspec.Struct, frozen=True):
    """`tokens` labels the rows of the step, `sampled` those that logits are computed for (each request's last).

    `active` [P] bool: points at which some request of the step has records.  Capture record c of the table keeps
    `count[c]` positions from `begin[c]` on, and its first row goes to number `target[c]` of the step's capture buffer
    of `size` numbers; all three [C].
    """

    tokens: Rows
    sampled: Rows
    active: np.ndarray
    begin: np.ndarray
    count: np.ndarray
    target: np.ndarray
    size: int

    def to_bytes(self) -> bytes:
        """Every array in a fixed order and layout, for golden plans."""
        arrays = (
            self.tokens.slot, self.tokens.position, self.sampled.slot, self.sampled.position,
            self.active, self.begin, self.count, self.target,
        )  # fmt: skip
        return b"".join(np.int64(len(a)).tobytes() + np.ascontiguousarray(a, "<i4").tobytes() for a in arrays)


def make_plan(batch: Batch, table: ProgramTable, widths: np.ndarray, sampled: np.ndarray) -> StepPlan:
    """The plan of one step. `widths` [P]: numbers in a row; `sampled` [P]: a point's rows are the sampled ones."""
    tokens = _label(batch)
    last = Rows(batch.slot.astype(np.int32), (batch.position + batch.count - 1).astype(np.int32))
    begin, count = _captured(batch, table, sampled)
    target, size = _targets(count, widths[table.captures.point])
    first = table.first[np.unique(batch.slot)]
    active = np.logical_or.reduce(first[:, 1:] > first[:, :-1])
    return StepPlan(tokens, last, active, begin, count, target, size)


def _targets(count: np.ndarray, width: np.ndarray) -> tuple[np.ndarray, int]:
    """Where each capture record's rows go, those of one width side by side and aligned; and the size in numbers."""
    target, size = np.zeros(len(count), np.int64), 0
    for w in np.unique(width):
        mine = width == w
        end = -(-size // w) * w + np.cumsum(count[mine] * w)
        target[mine] = end - count[mine] * w
        size = int(end[-1])
    return target, size


def _label(batch: Batch) -> Rows:
    slot, position = np.zeros(batch.rows, np.int32), np.zeros(batch.rows, np.int32)
    total = int(batch.count.sum())
    within = np.arange(total) - np.repeat(np.cumsum(batch.count) - batch.count, batch.count)
    row = np.repeat(batch.row, batch.count) + within
    slot[row] = np.repeat(batch.slot, batch.count)
    position[row] = np.repeat(batch.position, batch.count) + within
    return Rows(slot, position)


def _captured(batch: Batch, table: ProgramTable, sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each capture record, the first position and the number of positions that this step computes."""
    captures = table.captures
    position, count = np.zeros((2, len(table.first)), np.int64)
    position[batch.slot], count[batch.slot] = batch.position, batch.count
    position[0] = count[0] = 0
    stop = position + count
    only_last = sampled[captures.point]
    lowest = np.where(only_last, stop[captures.slot] - 1, position[captures.slot])
    begin = np.maximum(captures.start, lowest)
    end = np.minimum(captures.stop, stop[captures.slot])
    kept = np.where(count[captures.slot] > 0, np.maximum(end - begin, 0), 0)
    return begin, kept
