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
    """Whose rows they are: for each flat row its slot (0: nobody's), its position in that request, and its `rank`
    among the request's rows of this step; int32 [R]."""

    slot: np.ndarray
    position: np.ndarray
    rank: np.ndarray

    def later(self, steps: int) -> Rows:
        """The same rows, each request `steps` positions on."""
        return Rows(self.slot, self.position + steps, self.rank)


class StepPlan(msgspec.Struct, frozen=True):
    """`tokens` labels the rows of the step, `sampled` those that logits are computed for (each request's last).

    `active` [P] bool: points at which some request of the step has records.  Capture record c of the table keeps
    `count[c]` positions from `begin[c]` on, and its first row goes to `target[c]` in the step's capture buffer of
    `size`; all three [C], the latter in numbers, or in bytes where rows are kept in their own dtype.  `holds` says for
    how many further steps, each of one token a request, the same rows are captured.
    """

    tokens: Rows
    sampled: Rows
    active: np.ndarray
    begin: np.ndarray
    count: np.ndarray
    target: np.ndarray
    size: int
    holds: int = 0

    def later(self) -> StepPlan:
        """The plan of the next step, when every request goes on by one token and `holds` is not 0."""
        begin = np.where(self.count > 0, self.begin + 1, self.begin)
        changed = {"tokens": self.tokens.later(1), "sampled": self.sampled.later(1), "begin": begin}
        return msgspec.structs.replace(self, **changed, holds=self.holds - 1)

    def to_bytes(self) -> bytes:
        """Every array in a fixed order and layout, for golden plans."""
        arrays = (
            self.tokens.slot, self.tokens.position, self.tokens.rank, self.sampled.slot, self.sampled.position,
            self.active, self.begin, self.count, self.target,
        )  # fmt: skip
        return b"".join(np.int64(len(a)).tobytes() + np.ascontiguousarray(a, "<i4").tobytes() for a in arrays)


NUMBERS, BYTES = np.array([1, 1, 1]), np.array([4, 2, 2])  # size of a captured number, by dtype, in either unit
FOREVER = 1 << 30


def make_plan(
    batch: Batch, table: ProgramTable, widths: np.ndarray, sampled: np.ndarray, unit: np.ndarray = NUMBERS
) -> StepPlan:
    """The plan of one step. `widths` [P]: numbers in a row; `sampled` [P]: a point's rows are the sampled ones."""
    tokens, slot = _label(batch), batch.slot.astype(np.int32)
    last = Rows(slot, (batch.position + batch.count - 1).astype(np.int32), np.zeros_like(slot))
    first = table.first[np.unique(batch.slot)]
    active = np.any(first[:, 1:] > first[:, :-1], axis=0)
    steady, captures = bool((batch.count == 1).all()), table.captures
    if len(captures.record) == 0:
        none = np.zeros(0, np.int64)
        return StepPlan(tokens, last, active, none, none, none, 0, FOREVER if steady else 0)
    begin, count = _captured(batch, table, sampled)
    target, size = _targets(count, widths[captures.point] * unit[captures.dtype], captures.point)
    return StepPlan(tokens, last, active, begin, count, target, size, _holds(batch, table) if steady else 0)


def _holds(batch: Batch, table: ProgramTable) -> int:
    """For how many steps of one token no request of the batch enters or leaves a captured range."""
    captures, position = table.captures, np.full(len(table.first), -1, np.int64)
    position[batch.slot] = batch.position
    position[0] = -1
    now = position[captures.slot]
    edges = np.where(now < captures.start, captures.start, captures.stop) - now
    edges = edges[(now >= 0) & (now < captures.stop)]
    return int(edges.min()) - 1 if len(edges) else FOREVER


def _targets(count: np.ndarray, width: np.ndarray, point: np.ndarray) -> tuple[np.ndarray, int]:
    """Where each capture record's rows go: those of one width aligned to it, those of one point side by side."""
    target, size = np.zeros(len(count), np.int64), 0
    for w in np.unique(width):
        mine = np.flatnonzero(width == w)
        mine = mine[np.argsort(point[mine], kind="stable")]
        end = -(-size // w) * w + np.cumsum(count[mine] * w)
        target[mine] = end - count[mine] * w
        size = int(end[-1])
    return target, size


def _label(batch: Batch) -> Rows:
    slot, position, rank = np.zeros((3, batch.rows), np.int32)
    total = int(batch.count.sum())
    within = np.arange(total) - np.repeat(np.cumsum(batch.count) - batch.count, batch.count)
    row = np.repeat(batch.row, batch.count) + within
    slot[row] = np.repeat(batch.slot, batch.count)
    position[row] = np.repeat(batch.position, batch.count) + within
    rank[row] = within
    return Rows(slot, position, rank)


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
