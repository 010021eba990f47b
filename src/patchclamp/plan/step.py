"""The step plan: what one engine step must do, as arrays.

The engine's batch is R flat rows; a request owns the rows of its scheduled positions.  Everything an op's record says
about positions is compared on the device; the host only says whose row each row is, and where captured rows go.  In
steady decode neither changes from step to step.

    R rows of the step · N requests of the step · S slots · P points · C capture records of admitted requests
"""

from __future__ import annotations

from typing import Any

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
    `count[c]` positions from `begin[c]` on, rows of `width[c]`, and its first row goes to `target[c]` in the step's
    capture buffer of `size`; all [C], the latter three in numbers, or in bytes where rows are kept in their own dtype.
    `holds` says for how many further steps, each of one token a request, the same rows are captured; `age`, for how
    many that has been so; positions here lag `behind` the step at hand by so many where nobody on the host needs them.
    """

    tokens: Rows
    sampled: Rows
    active: np.ndarray
    begin: np.ndarray
    count: np.ndarray
    target: np.ndarray
    size: int
    width: np.ndarray
    holds: int = 0
    age: int = 0
    behind: int = 0

    def later(self, labels: bool = True) -> StepPlan:
        """The plan of the next step, when every request goes on by one token and `holds` is not 0.

        `labels`: with positions brought up to date, which a device knows by itself.
        """
        changed: dict[str, Any] = {"holds": self.holds - 1, "age": self.age + 1, "behind": self.behind + 1}
        if labels:
            tokens, sampled = (rows.later(self.behind + 1) for rows in (self.tokens, self.sampled))
            changed |= {"tokens": tokens, "sampled": sampled, "begin": self.begins(1), "behind": 0}
        return msgspec.structs.replace(self, **changed)

    def begins(self, further: int = 0) -> np.ndarray:
        """The first position that each record keeps in the step at hand, or `further` steps on; [C]."""
        steps = self.behind + further
        return np.where(self.count > 0, self.begin + steps, self.begin) if steps and self.size else self.begin

    def parts(self, point: np.ndarray) -> dict[int, tuple[np.ndarray, int, int]]:
        """For each point where rows are captured: its records, and the part of the buffer that holds their rows.

        `point` [C] is the records' points. A part begins at a multiple of 16.
        """
        live = np.flatnonzero(self.count)
        order = live[np.argsort(point[live].astype(np.int16), kind="stable")]
        points, starts = np.unique(point[order], return_index=True)
        end = self.target + self.count * self.width
        return {
            int(number): (mine, int(self.target[mine].min()) // 16 * 16, int(end[mine].max()))
            for number, mine in zip(points, np.split(order, starts[1:]), strict=False)
        }

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
    steady = bool((batch.count == 1).all())
    tokens, slot = _label(batch, steady), batch.slot.astype(np.int32)
    last = Rows(slot, (batch.position + batch.count - 1).astype(np.int32), np.zeros_like(slot))
    table.settle()
    active, captures = table.active(batch.slot), table.captures
    if len(captures) == 0:
        none = np.zeros(0, np.int64)
        return StepPlan(tokens, last, active, none, none, none, 0, none, FOREVER if steady else 0)
    position, stop = np.full((2, len(table.first)), -1, np.int32)
    position[batch.slot], stop[batch.slot] = batch.position, batch.position + batch.count
    position[0] = stop[0] = -1  # nobody's
    now = position.take(captures.slot)
    end = now + 1 if steady else stop.take(captures.slot)
    lowest = np.where(sampled.take(captures.point), end - 1, now) if (active & sampled).any() else now
    begin = np.maximum(captures.start, lowest)
    count = np.minimum(captures.stop, end)
    count -= begin
    np.maximum(count, 0, out=count)
    width = (widths[:, None] * unit).take(captures.kind)  # int64: bytes of a long prefill pass 2³¹
    target, size = _side_by_side(count, width, captures.order) if unit is BYTES else _by_width(count, width)
    holds = _holds(*(column[captures.leads] for column in (now, captures.start, captures.stop))) if steady else 0
    return StepPlan(tokens, last, active, begin, count, target, size, width, holds)


def _holds(now: np.ndarray, start: np.ndarray, stop: np.ndarray) -> int:
    """For how many steps of one token no request, at position `now` of each record (−1: not here), enters or leaves a
    captured range."""
    left = np.where(now < start, start, stop) - now
    left = left[(now >= 0) & (left > 0)]
    return int(left.min()) - 1 if len(left) else FOREVER


def _side_by_side(count: np.ndarray, width: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, int]:
    """Where each capture record's rows go: in `order`, by point, each at a multiple of 16."""
    taken = count * width
    taken += 15
    taken &= -16
    taken = taken.take(order)
    end = np.cumsum(taken)
    end_of_all = int(end[-1])
    end -= taken
    target = np.empty_like(end)
    target[order] = end
    return target, end_of_all


def _by_width(count: np.ndarray, width: np.ndarray) -> tuple[np.ndarray, int]:
    """Where each capture record's rows go: those of one width at multiples of it, so that they can be seen as rows."""
    taken = count * width
    target, size = np.zeros(len(count), np.int64), 0
    for w in np.unique(width):
        mine = np.flatnonzero(width == w)
        end = -(-size // w) * w + np.cumsum(taken[mine])
        target[mine] = end - taken[mine]
        size = int(end[-1])
    return target, size


def _label(batch: Batch, steady: bool) -> Rows:
    slot, position, rank = np.zeros((3, batch.rows), np.int32)
    if steady:
        slot[batch.row], position[batch.row] = batch.slot, batch.position
        return Rows(slot, position, rank)
    total = int(batch.count.sum())
    within = np.arange(total) - np.repeat(np.cumsum(batch.count) - batch.count, batch.count)
    row = np.repeat(batch.row, batch.count) + within
    slot[row] = np.repeat(batch.slot, batch.count)
    position[row] = np.repeat(batch.position, batch.count) + within
    rank[row] = within
    return Rows(slot, position, rank)
