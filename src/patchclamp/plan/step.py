"""The step plan: what one engine step must do, as arrays.

The engine's batch is R flat rows; a request owns the rows of its scheduled positions.  Everything an op's record says
about positions is compared on the device; the host only says whose row each row is, and where captured rows go.  In
steady decode neither changes from step to step.

    R rows of the step · N requests of the step · S slots · P points · C spans that admitted programs capture ·
    G spreads of them · A areas (`store.spans`)
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from patchclamp.plan.table import ProgramTable
from patchclamp.store.spans import Spans


class Batch(msgspec.Struct, frozen=True):
    """A step's requests: slot (0: no program), first flat row, first position, how many positions; each [N]."""

    slot: np.ndarray
    row: np.ndarray
    position: np.ndarray
    count: np.ndarray
    rows: int


class Rows(msgspec.Struct, frozen=True):
    """Whose rows they are: for each flat row its slot (0: nobody's), its position in that request, and its `rank`
    among the request's rows of this step; int32 [R]. Positions are left out, [0], where a device knows them."""

    slot: np.ndarray
    position: np.ndarray
    rank: np.ndarray

    def later(self, steps: int) -> Rows:
        """The same rows, each request `steps` positions on."""
        return Rows(self.slot, self.position + steps, self.rank)


class StepPlan(msgspec.Struct, frozen=True):
    """`tokens` labels the rows of the step, `sampled` those that logits are computed for (each request's last).

    `active` [P] bool: points at which some request of the step has records.  Of `spans`, span c keeps `count[c]`
    positions from `begin[c]` on, and its rows are those from `offset[c]` on of the `rows` [G] of its spread; [C].
    Area a begins at `base[a]` of the step's capture buffer of `size`, in rows of `row[a]`; [A], in numbers, or in bytes
    where rows are kept in their own dtype.  `holds` says for how many further steps, each of one token a request, the
    same rows are captured; `age`, for how many that has been so; positions here lag `behind` the step at hand by so
    many where nobody on the host needs them.
    """

    tokens: Rows
    sampled: Rows
    active: np.ndarray
    spans: Spans
    begin: np.ndarray
    count: np.ndarray
    offset: np.ndarray
    rows: np.ndarray
    base: np.ndarray
    row: np.ndarray
    size: int
    steady_steps: int = 0
    steps_since: int = 0
    label_lag: int = 0

    @property
    def captures_nothing_ever(self) -> bool:
        """Whether nothing is captured, nor will be in any step that goes on like this one."""
        return self.size == 0 and self.steady_steps == FOREVER

    def later(self, labels: bool = True) -> StepPlan:
        """The plan of the next step, when every request goes on by one token and `holds` is not 0.

        `labels`: with positions brought up to date, which a device knows by itself.
        """
        changed: dict[str, Any] = {
            "steady_steps": self.steady_steps - 1,
            "steps_since": self.steps_since + 1,
            "label_lag": self.label_lag + 1,
        }
        if labels:
            tokens, sampled = (rows.later(self.label_lag + 1) for rows in (self.tokens, self.sampled))
            changed |= {"tokens": tokens, "sampled": sampled, "begin": self._begins(self.label_lag + 1), "label_lag": 0}
        return msgspec.structs.replace(self, **changed)

    def begins(self) -> np.ndarray:
        """The first position that each span keeps in the step at hand, [C]."""
        return self._begins(self.label_lag)

    def _begins(self, steps: int) -> np.ndarray:
        return np.where(self.count > 0, self.begin + steps, self.begin) if steps and self.size else self.begin

    def target(self, span: np.ndarray, area: np.ndarray) -> np.ndarray:
        """Where in the step's buffer the rows of spans lie in areas, both by number."""
        a = self.spans.areas_by_number[area]
        return self.base[a] + self.offset[self.spans.spans_by_number[span]] * self.row[a]

    def parts(self) -> dict[int, tuple[int, int]]:
        """For each point where rows are captured the part of the buffer that holds them: its begin and end."""
        rows = self.rows[self.spans.owner]
        live = np.flatnonzero(rows)
        points, starts = np.unique(self.spans.point[live], return_index=True)
        end = (self.base + rows * self.row)[live]
        last = np.append(starts[1:], len(live)) - 1
        ranges = zip(self.base[live][starts].tolist(), end[last].tolist(), strict=True)
        return dict(zip(points.tolist(), ranges, strict=True))

    def to_bytes(self) -> bytes:
        """Every array in a fixed order and layout, for golden plans."""
        arrays = (
            self.tokens.slot, self.tokens.position, self.tokens.rank, self.sampled.slot, self.sampled.position,
            self.active, self.begin, self.count, self.offset, self.base,
        )  # fmt: skip
        return b"".join(np.int64(len(a)).tobytes() + np.ascontiguousarray(a, "<i4").tobytes() for a in arrays)


NUMBERS, BYTES = np.array([1, 1, 1]), np.array([4, 2, 2])  # size of a captured number, by dtype, in either unit
FOREVER = 1 << 30


def make_plan(batch: Batch, table: ProgramTable, widths: np.ndarray, unit: np.ndarray = NUMBERS) -> StepPlan:
    """The plan of one step. `widths` [P]: numbers in a row of each point."""
    steady = np.count_nonzero(batch.count == 1) == len(batch.count)
    tokens, last = _label(batch, steady, unit is NUMBERS)
    active, spans = table.active(batch.slot), table.captures.now()
    if len(spans) == 0:
        none = np.zeros(0, np.int64)
        nothing = (none, none, none, none, none, none)
        return StepPlan(tokens, last, active, spans, *nothing, 0, FOREVER if steady else 0)
    reach = np.full((2, len(table.first)), -1)  # of each slot: its first position, and where it ends
    reach[0, batch.slot] = batch.position
    reach[1, batch.slot] = batch.position + batch.count
    reach[:, 0] = -1  # nobody's
    now, end = reach.take(spans.slot, 1)
    begin = np.maximum(spans.start, np.where(spans.sampled, end - 1, now) if spans.any_sampled else now)
    count = np.minimum(spans.stop, end)
    count -= begin
    np.maximum(count, 0, out=count)
    offset = count.cumsum()
    offset -= count
    if spans.spreads == 1:
        rows = offset[-1:] + count[-1:]
    else:
        rows = np.bincount(spans.spread, count, spans.spreads).astype(np.int64)
        offset -= (rows.cumsum() - rows).take(spans.spread)
    row = widths[spans.point] * unit[spans.dtype]
    taken = rows[spans.owner] * row
    base, size = _side_by_side(taken, table.sampled[spans.point]) if unit is BYTES else _by_width(taken, row)
    holds = _steady_steps(now, spans.start, spans.stop) if steady else 0
    return StepPlan(tokens, last, active, spans, begin, count, offset, rows, base, row, size, holds)


def _steady_steps(now: np.ndarray, start: np.ndarray, stop: np.ndarray) -> int:
    """For how many steps of one token no request, at position `now` (−1: not here), enters or leaves a span."""
    left = np.where(now < start, start, stop) - now
    left = left[(now >= 0) & (left > 0)]
    return int(left.min()) - 1 if len(left) else FOREVER


def _side_by_side(taken: np.ndarray, sampled: np.ndarray) -> tuple[np.ndarray, int]:
    """Where areas of so many bytes begin: each at a multiple of 16, those of sampled rows after all others."""
    taken, end = (taken + 15) & -16, np.zeros_like(taken)
    order = sampled.argsort(kind="stable") if sampled.any() else slice(None)
    end[order] = taken[order].cumsum()
    return end - taken, int(end.max())


def _by_width(taken: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, int]:
    """Where areas of so many numbers begin: those of one width at multiples of it, so that they can be seen as rows."""
    base, size = np.zeros(len(taken), np.int64), 0
    for width in np.unique(row):
        mine = np.flatnonzero(row == width)
        end = -(-size // width) * width + np.cumsum(taken[mine])
        base[mine] = end - taken[mine]
        size = int(end[-1])
    return base, size


def _label(batch: Batch, steady: bool, positions: bool) -> tuple[Rows, Rows]:
    """Labels of the step's rows and of the sampled ones; without positions where a device knows them."""
    slot, count, none = batch.slot.astype(np.int32), batch.count, np.zeros(0, np.int32)
    last = Rows(slot, (batch.position + count - 1).astype(np.int32), np.zeros_like(slot)) if positions else None
    ends = batch.row + count
    if ends[-1] != batch.rows or batch.row[0] != 0 or ends[:-1].tobytes() != batch.row[1:].tobytes():
        return _label_apart(batch), last or Rows(slot, none, none)
    if steady:
        position = batch.position.astype(np.int32) if positions else none
        return Rows(slot, position, np.zeros_like(slot)), last or Rows(slot, none, none)
    rank = np.arange(batch.rows, dtype=np.int32)
    rank -= batch.row.astype(np.int32).repeat(count)
    position = batch.position.repeat(count).astype(np.int32) + rank if positions else none
    return Rows(slot.repeat(count), position, rank), last or Rows(slot, none, none)


def _label_apart(batch: Batch) -> Rows:
    """The same where rows of nobody's lie between, or requests are in another order than their rows."""
    slot, position, rank = np.zeros((3, batch.rows), np.int32)
    within = np.arange(int(batch.count.sum())) - np.repeat(np.cumsum(batch.count) - batch.count, batch.count)
    row = np.repeat(batch.row, batch.count) + within
    slot[row] = np.repeat(batch.slot, batch.count)
    position[row] = np.repeat(batch.position, batch.count) + within
    rank[row] = within
    return Rows(slot, position, rank)
