"""The step plan: one engine step's work, as arrays.

The engine's batch is R flat rows, one per position a request computes in the step. The host assigns rows to slots and
captured rows to buffer offsets; the device compares positions with the records' ranges. In steady decode the plan is
reused until a request arrives, ends, or enters or leaves a range.

    R rows of the step · N requests of the step · S slots · P points · C capture ranges · G point groups · A regions
    (`plan.table`)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from patchclamp.language.values import POOLS
from patchclamp.plan.table import CaptureLayout, ProgramTable
from patchclamp.store.tensors import CAPTURED


class Batch(msgspec.Struct, frozen=True):
    """The requests of a step.

    slot [N]: each request's slot; 0 without a program
    row [N]: each request's first flat row
    position [N]: the position of that row
    count [N]: the number of consecutive positions
    rows: R, the flat rows of the step
    samples [N]: the number of sampled rows, a request's last rows, whose logits are computed; None: 1 each. With
        speculative decoding these are the newest token's and the draft tokens' rows
    """

    slot: np.ndarray
    row: np.ndarray
    position: np.ndarray
    count: np.ndarray
    rows: int
    samples: np.ndarray | None = None

    @property
    def sampled_rows(self) -> np.ndarray:
        """The flat rows whose logits are computed, in order."""
        last = self.row + self.count - 1
        return last if self.samples is None else _runs(last - self.samples + 1, self.samples)

    @property
    def sampled_ranks(self) -> np.ndarray:
        """Each sampled row's index among its request's sampled rows."""
        zeros = np.zeros_like(self.row)
        return zeros if self.samples is None else _runs(zeros, self.samples)

    @property
    def most_samples(self) -> int:
        """The largest number of sampled rows of any request."""
        return 1 if self.samples is None else int(self.samples.max())


class RowLabels(msgspec.Struct, frozen=True):
    """The request, position and rank of each flat row, int32.

    slot [R]: the request's slot; 0 for rows without a program
    position [R]: the position in the request; empty, shape [0], if the device already has the positions
    rank [R]: the row's index among the request's rows of this step
    """

    slot: np.ndarray
    position: np.ndarray
    rank: np.ndarray

    def advanced(self, steps: int) -> RowLabels:
        """Return the labels after each request has advanced by `steps` positions."""
        return RowLabels(self.slot, self.position + steps, self.rank)


class StepPlan(msgspec.Struct, frozen=True, dict=True):
    """The plan of one step.

    tokens: labels of all rows
    sampled: labels of the sampled rows
    active [P]: True if a request of the step has records at the point
    layout: the capture ranges and regions
    begin, count [C]: the first position each range keeps in this step, and the number of positions
    offset [C]: the index of the range's first row among its group's rows
    rows [G]: the number of rows each group keeps
    base, row [A]: each region's offset in the step's capture buffer, and its row size
    result, result_row [A]: for a pooled or encoded region, the buffer offset of its results, and the result row size
    size: the size of the buffer
    unit_bytes: the unit of `base`, `row` and `size`: 4 for fp32 numbers, 1 if rows have their own dtype
    steady_steps: the number of later decode steps (one token per request) that can reuse the plan
    scratch: the size of the rows to reduce, placed after the buffer and discarded after the step
    sampled_size: the size of the sampled rows, placed first in the buffer if rows have their own dtype
    """

    tokens: RowLabels
    sampled: RowLabels
    active: np.ndarray
    layout: CaptureLayout
    begin: np.ndarray
    count: np.ndarray
    offset: np.ndarray
    rows: np.ndarray
    base: np.ndarray
    row: np.ndarray
    result: np.ndarray
    result_row: np.ndarray
    size: int
    unit_bytes: int = 4
    steady_steps: int = 0
    scratch: int = 0
    sampled_size: int = 0

    @property
    def captures_nothing_ever(self) -> bool:
        """True if neither this step nor any later step that reuses the plan captures anything."""
        return self.size == 0 and self.steady_steps == FOREVER

    def advanced(self, steps: int) -> StepPlan:
        """Return this plan advanced by `steps` decode steps, at most `steady_steps`, of one token per request."""
        tokens, sampled, begin = self.tokens.advanced(steps), self.sampled.advanced(steps), self.begins(steps)
        steady_steps = self.steady_steps - steps
        return msgspec.structs.replace(self, tokens=tokens, sampled=sampled, begin=begin, steady_steps=steady_steps)

    def begins(self, steps: int) -> np.ndarray:
        """Return the first position that each range keeps `steps` steps later, [C]."""
        return np.where(self.count > 0, self.begin + steps, self.begin) if steps and self.size else self.begin

    def target(self, range_number: np.ndarray, region_number: np.ndarray) -> np.ndarray:
        """Return the buffer offset of each range's first row in a region, given range and region ids."""
        region = self.layout.region_of_number[region_number]
        return self.base[region] + self.offset[self.layout.range_of_number[range_number]] * self.row[region]

    @functools.cached_property
    def by_tap(self) -> tuple[np.ndarray, dict[int, tuple[int, int, int]]]:
        """The layout when each tap allocates memory for its own point and rows have their own dtype: each region's
        offset, [A], and each captured point's (begin, middle, end). Bytes begin … middle−1 belong to the buffer; rows
        to reduce follow, up to `end`."""
        layout, rows = self.layout, self.rows[self.layout.region_group]
        kept = np.flatnonzero(rows * (layout.pool[layout.region_group] == 0))
        points, first, count = np.unique(layout.point[kept], return_index=True, return_counts=True)
        end = ((self.base + rows * self.row + 15) & -16)[kept][first + count - 1].tolist()
        parts = zip(self.base[kept][first].tolist(), end, end, strict=True)
        base, bounds = self.base.copy(), dict(zip(points.tolist(), parts, strict=True))
        for region, *_ in self.reduced:
            begin, middle, base[region] = bounds.get(point := int(layout.point[region]), (0, 0, 0))
            bounds[point] = begin, middle, (int(base[region] + rows[region] * self.row[region]) + 15) & -16
        return base, bounds

    @functools.cached_property
    def kept(self) -> KeptRows:
        """The capture ranges with rows in this step."""
        return _kept_rows(self.layout, self.begin, self.count)

    @functools.cached_property
    def reduced(self) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
        """The regions pooled or encoded in the step, each with its mode (`CaptureLayout.pool`), its results' capture
        ranges, in order, and the number of rows that each result combines."""
        layout, kept = self.layout, self.kept
        of_group = {group: kept.group == group for group in np.flatnonzero(layout.pool).tolist()}
        return [
            (region, int(layout.pool[group]), kept.ranges[of_group[group]], kept.rows[of_group[group]])
            for region in layout.reduced.tolist() if self.rows[group := int(layout.region_group[region])]
        ]  # fmt: skip

    def to_bytes(self) -> bytes:
        """Serialize the arrays in a fixed order and layout, for golden plans."""
        arrays = (
            self.tokens.slot, self.tokens.position, self.tokens.rank, self.sampled.slot, self.sampled.position,
            self.active, self.begin, self.count, self.offset, self.base,
        )  # fmt: skip
        return b"".join(np.int64(len(a)).tobytes() + np.ascontiguousarray(a, "<i4").tobytes() for a in arrays)


class PlannedCaptures(msgspec.Struct):
    """Captures of the step `steps` after the planned step. `run` [C]: each capture range's run number. The store builds
    the table only when captures are fetched (`store.tensors.CaptureSource`)."""

    plan: StepPlan
    run: np.ndarray
    steps: int

    def bytes_of_runs(self) -> dict[int, int]:
        """Return the bytes that the step captures for each run, ascending by run number."""
        plan, layout, kept = self.plan, self.plan.layout, self.plan.kept
        how = layout.pool[layout.region_group]
        row = np.where(how > 0, plan.result_row, plan.row) * plan.unit_bytes
        group_bytes = np.bincount(layout.region_group, row, layout.groups)[kept.group]
        run, run_of_range = np.unique(self.run[kept.ranges], return_inverse=True)
        sizes = np.bincount(run_of_range, kept.results * group_bytes, len(run))
        return dict(zip(run.tolist(), sizes.astype(np.int64).tolist(), strict=True))

    def table(self) -> np.ndarray:
        """Return every captured range at every point as `CAPTURED`, ascending by run number."""
        plan, layout, kept = self.plan, self.plan.layout, self.plan.kept
        ranges, regions = layout.pairs(kept.ranges[np.argsort(self.run[kept.ranges], kind="stable")])
        nth = np.searchsorted(kept.ranges, ranges)
        table: np.ndarray = np.zeros(len(ranges), CAPTURED)
        table["run"], table["op"], table["point"] = self.run[ranges], layout.op[ranges], layout.point[regions]
        table["position"], table["count"] = plan.begin[ranges] + self.steps, kept.results[nth]
        how = layout.pool[layout.group[ranges]]
        is_reduced, is_pooled = how > 0, (how > 0) & (how <= len(POOLS))
        base, row = (np.where(is_reduced, a[regions], b[regions]) for a, b in
                     ((plan.result, plan.base), (plan.result_row, plan.row)))  # fmt: skip
        first = np.where(is_pooled, nth - np.searchsorted(kept.group, kept.group[nth]), plan.offset[ranges])
        table["pool"], table["pooled"] = how * is_pooled, kept.rows[nth] * is_pooled
        table["span"] = kept.span[nth] * is_pooled
        table["offset"], table["row_bytes"] = (base + first * row) * plan.unit_bytes, row * plan.unit_bytes
        # on the CPU all rows are kept in fp32, and every region has results
        table["dtype"] = 0 if plan.unit_bytes == 4 else layout.dtype[regions] * ~is_reduced
        return table


class KeptRows(NamedTuple):
    """The capture ranges with rows in a step, [K] in layout order. A request's pooled op appears once, with its
    first range.

    ranges, group: the indices of the range and its point group
    rows: the number of captured rows
    results: the number of kept rows: 1 if pooled
    span: the number of positions from the first captured row to the last
    """

    ranges: np.ndarray
    group: np.ndarray
    rows: np.ndarray
    results: np.ndarray
    span: np.ndarray


def _kept_rows(layout: CaptureLayout, begin: np.ndarray, count: np.ndarray) -> KeptRows:
    live = np.flatnonzero(count)
    group, rows = layout.group[live], count[live]
    is_pooled = (layout.pool[group] > 0) & (layout.pool[group] <= len(POOLS))
    if not is_pooled.any():
        return KeptRows(live, group, rows, rows, rows)
    labels = np.stack([group, layout.slot[live], layout.op[live]])
    first = np.flatnonzero(np.append(True, ~is_pooled[1:] | (labels[:, 1:] != labels[:, :-1]).any(0)))
    end = (begin[live] + rows)[np.append(first[1:], len(live)) - 1]
    rows, live, is_pooled = np.add.reduceat(rows, first), live[first], is_pooled[first]
    return KeptRows(live, group[first], rows, np.where(is_pooled, 1, rows), end - begin[live])


NUMBERS, BYTES = np.array([1, 1, 1]), np.array([4, 2, 2])  # units per captured value, by dtype
FOREVER = 1 << 30  # steps


def make_plan(
    batch: Batch, table: ProgramTable, widths: np.ndarray, unit: np.ndarray = NUMBERS,
    results_of: Callable[[int], int] | None = None,
) -> StepPlan:  # fmt: skip
    """Plan one step. `widths` [P]: each point's row width. `unit`: the unit of buffer sizes, `NUMBERS` or `BYTES`.
    `results_of(how)`: returns the width of a feature or attention reading's result rows."""
    steady = np.count_nonzero(batch.count == 1) == len(batch.count)
    tokens, last = _label(batch, steady, unit is NUMBERS)
    active, layout = table.active(batch.slot), table.captures.layout()
    unit_bytes = 1 if unit is BYTES else 4
    if len(layout) == 0:
        none, steady_steps = np.zeros(0, np.int64), FOREVER if steady else 0
        return StepPlan(
            tokens, last, active, layout, none, none, none, none, none, none, none, none, 0, unit_bytes, steady_steps
        )  # fmt: skip
    bounds = np.full((2, len(table.first)), -1)  # by slot: begin and end of the step's positions
    bounds[0, batch.slot] = batch.position
    bounds[1, batch.slot] = batch.position + batch.count
    bounds[:, 0] = -1  # slot 0 has no program
    first, end = bounds.take(layout.slot, 1)
    if layout.any_sampled:
        first = np.where(layout.sampled, end - _samples(batch, table)[layout.slot], first)
    begin = np.maximum(layout.start, first)
    count = np.minimum(layout.stop, end)
    count -= begin
    np.maximum(count, 0, out=count)
    offset, rows = _offsets(count, layout)
    row = np.where(layout.products > 0, layout.products, widths[layout.point]) * unit[layout.dtype]
    sizes, scratch = rows[layout.region_group] * row, 0
    result, result_row, result_sizes = np.zeros_like(row), np.zeros_like(row), np.zeros_like(row)
    if len(layout.reduced):
        kept = _kept_rows(layout, begin, count)
        results = np.bincount(kept.group, kept.results, layout.groups).astype(np.int64)
        for region in layout.reduced.tolist():
            how = int(layout.pool[layout.region_group[region]])
            if how <= len(POOLS):
                result_row[region] = row[region]  # in fp32, like all pooled rows
            else:
                assert results_of is not None
                result_row[region] = results_of(how) * unit[0]
            result_sizes[region] = results[layout.region_group[region]] * result_row[region]
    is_reduced, sampled_size = layout.pool[layout.region_group] > 0, 0
    if unit is BYTES:
        sampled, sizes, result_sizes = table.sampled[layout.point], (sizes + 15) & -16, (result_sizes + 15) & -16
        base = _in_turn(sizes, is_reduced.astype(np.int8) - sampled)
        size, sampled_size = int(sizes[~is_reduced].sum()), int(sizes[sampled].sum())
        result, scratch = size + np.cumsum(result_sizes) - result_sizes, int(sizes[is_reduced].sum())
        base, size = base + is_reduced * result_sizes.sum(), size + int(result_sizes.sum())
    else:
        base, size = _by_width(sizes * ~is_reduced, row)
        if len(layout.reduced):
            result, size = size + np.cumsum(result_sizes) - result_sizes, size + int(result_sizes.sum())
            reduced_base, end = _by_width(sizes * is_reduced, row, size)
            base, scratch = np.where(is_reduced, reduced_base, base), end - size
    steady_steps = _steady_steps(first, layout.start, layout.stop) if steady else 0
    return StepPlan(
        tokens, last, active, layout, begin, count, offset, rows, base, row, result, result_row, size,
        unit_bytes, steady_steps, scratch, sampled_size,
    )  # fmt: skip


def _offsets(count: np.ndarray, layout: CaptureLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each range's first row among its group's rows, and the number of rows in each group."""
    offset = count.cumsum()
    offset -= count
    if layout.groups == 1:
        return offset, offset[-1:] + count[-1:]
    rows = np.bincount(layout.group, count, layout.groups).astype(np.int64)
    offset -= (rows.cumsum() - rows).take(layout.group)
    return offset, rows


def _steady_steps(position: np.ndarray, start: np.ndarray, stop: np.ndarray) -> int:
    """Return the number of later decode steps before a request enters or leaves a range. `position` [C]: the position
    of the range's request, −1 if it is not in the step."""
    steps = np.where(position < start, start, stop) - position
    steps = steps[(position >= 0) & (steps > 0)]
    return int(steps.min()) - 1 if len(steps) else FOREVER


def _in_turn(sizes: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Return the offsets of regions laid out consecutively, in ascending order of `turn`."""
    end = np.zeros_like(sizes)
    order = turn.argsort(kind="stable") if turn.any() else slice(None)
    end[order] = sizes[order].cumsum()
    return end - sizes


def _by_width(sizes: np.ndarray, row: np.ndarray, begin: int = 0) -> tuple[np.ndarray, int]:
    """Lay out regions of `sizes`, aligned to their row width (for views as rows); returns offsets and end."""
    base, size = np.zeros(len(sizes), np.int64), begin
    for width in np.unique(row):
        regions = np.flatnonzero(row == width)
        end = -(-size // width) * width + np.cumsum(sizes[regions])
        base[regions] = end - sizes[regions]
        size = int(end[-1])
    return base, size


def _label(batch: Batch, steady: bool, positions: bool) -> tuple[RowLabels, RowLabels]:
    """Label the step's rows and the sampled rows, with positions if `positions` is set."""
    slot, count, none = batch.slot.astype(np.int32), batch.count, np.zeros(0, np.int32)
    last = _label_sampled(batch, slot) if positions else None
    ends = batch.row + count
    if ends[-1] != batch.rows or batch.row[0] != 0 or ends[:-1].tobytes() != batch.row[1:].tobytes():
        return _label_with_gaps(batch), last or RowLabels(slot, none, none)
    if steady:
        position = batch.position.astype(np.int32) if positions else none
        return RowLabels(slot, position, np.zeros_like(slot)), last or RowLabels(slot, none, none)
    rank = np.arange(batch.rows, dtype=np.int32)
    rank -= batch.row.astype(np.int32).repeat(count)
    position = batch.position.repeat(count).astype(np.int32) + rank if positions else none
    return RowLabels(slot.repeat(count), position, rank), last or RowLabels(slot, none, none)


def _label_sampled(batch: Batch, slot: np.ndarray) -> RowLabels:
    """Label the rows whose logits are computed."""
    last = (batch.position + batch.count - 1).astype(np.int32)
    samples = batch.samples
    if samples is None:
        return RowLabels(slot, last, np.zeros_like(slot))
    position = _runs(last - samples + 1, samples).astype(np.int32)
    return RowLabels(slot.repeat(samples), position, position - (last - samples + 1).astype(np.int32).repeat(samples))


def _runs(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the integers first … first + count − 1 of each pair, concatenated."""
    return np.repeat(first - np.cumsum(count) + count, count) + np.arange(int(count.sum()))


def _samples(batch: Batch, table: ProgramTable) -> np.ndarray:
    """Return each slot's number of sampled rows in the step, [S + 1]."""
    samples = np.ones(len(table.first), np.int64)
    if batch.samples is not None:
        samples[batch.slot] = batch.samples
    return samples


def _label_with_gaps(batch: Batch) -> RowLabels:
    """Label a step with rows that belong to no request, or with requests that are not in row order."""
    slot, position, rank = np.zeros((3, batch.rows), np.int32)
    within = np.arange(int(batch.count.sum())) - np.repeat(np.cumsum(batch.count) - batch.count, batch.count)
    row = np.repeat(batch.row, batch.count) + within
    slot[row] = np.repeat(batch.slot, batch.count)
    position[row] = np.repeat(batch.position, batch.count) + within
    rank[row] = within
    return RowLabels(slot, position, rank)
