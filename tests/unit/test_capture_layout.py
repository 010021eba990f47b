"""The capture layout against a loop over every captured row, while programs come and go."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from patchclamp.plan import CAPTURE, Batch, make_plan
from patchclamp.plan.step import BYTES, NUMBERS, PlannedCaptures
from tests.reference.admitting import Table
from tests.reference.capture_layout import PlainCapture, captured_positions
from tests.reference.records import record_array

SLOTS, POINTS = 5, 4
SAMPLED = np.array([False, False, False, True])
WIDTHS = np.array([8, 4, 8, 6])


def program(draw: np.random.Generator) -> list[tuple[int, tuple]]:
    """Capture records (point, record) of a few ops: the same ranges at all points of an op, or others at each."""
    records = []
    for op in range(int(draw.integers(0, 4))):
        dtype, alike, products = int(draw.integers(0, 3)), draw.random() < 0.7, int(draw.choice([0, 0, 1, 3]))
        starts = np.cumsum(draw.integers(1, 6, 2 * int(draw.integers(1, 4))))  # ranges that do not overlap
        for point in np.flatnonzero(draw.random(POINTS) < 0.6).tolist():
            ranges = list(zip(starts[::2].tolist(), starts[1::2].tolist(), strict=True))
            for start, stop in ranges if alike else ranges[: int(draw.integers(1, len(ranges) + 1))]:
                records.append((point, (start, stop, CAPTURE, 0, op, dtype, products)))
    return sorted(records, key=lambda record: record[0])


def step(draw: np.random.Generator, slots: list[int]) -> Batch:
    """A step of some of the slots, and of nobody's requests."""
    order = draw.permutation([*slots, 0])[: int(draw.integers(1, len(slots) + 2))]
    count = np.ones(len(order), np.int64) if draw.random() < 0.5 else draw.integers(1, 6, len(order))
    return Batch(order, np.cumsum(count) - count, draw.integers(0, 12, len(order)), count, int(count.sum()))


@pytest.mark.parametrize("unit", [NUMBERS, BYTES], ids=["numbers", "bytes"])
@seed(20261123)
@given(st.integers(0, 1 << 32))
def test_every_row_that_should_be_captured_has_a_place_of_its_own(unit, number):
    draw, table = np.random.default_rng(number), Table(SLOTS, POINTS, 400, SAMPLED)
    captures: dict[int, list[PlainCapture]] = {}
    products: dict[tuple[int, int], int] = {}  # by slot and op
    for _ in range(int(draw.integers(1, 14))):
        if captures and (len(captures) == SLOTS or draw.random() < 0.4):
            slot = int(draw.choice(sorted(captures)))
            table.drop(slot)
            del captures[slot]
        else:
            records = program(draw)
            counts = np.bincount(np.array([point for point, _ in records], int), minlength=POINTS)
            slot = table.admit(record_array([record for _, record in records]), counts)
            captures[slot] = [
                PlainCapture(slot, record[4], point, int(record[5]), record[0], record[1]) for point, record in records
            ]
            products |= {(slot, record[4]): record[6] for _, record in records}
        batch, run = step(draw, sorted(captures)), 100 + np.arange(SLOTS + 1)
        plan = make_plan(batch, table, WIDTHS, unit)
        source = PlannedCaptures(plan, run[plan.layout.slot], 0)
        found, taken, sizes = collections.Counter(), np.zeros(plan.size * plan.unit_bytes, int), collections.Counter()
        for entry in source.table():
            slot, dtype, row_bytes = int(entry["run"]) - 100, int(entry["dtype"]), int(entry["row_bytes"])
            width = products[slot, int(entry["op"])] or WIDTHS[entry["point"]]
            assert row_bytes == width * (4 if unit is NUMBERS else [4, 2, 2][dtype])
            size = int(entry["count"]) * row_bytes
            taken[entry["offset"] : entry["offset"] + size] += 1
            sizes[int(entry["run"])] += size
            for position in range(entry["position"], entry["position"] + entry["count"]):
                found[slot, int(entry["op"]), int(entry["point"]), dtype if unit is BYTES else 0, position] += 1
        expected = collections.Counter(
            (c.slot, c.op, c.point, c.dtype if unit is BYTES else 0, position)
            for slot in captures for c in captures[slot]
            for position in captured_positions(c, batch, bool(SAMPLED[c.point]))
        )  # fmt: skip
        assert found == expected
        assert taken.max(initial=0) <= 1, "two rows lie in one place"
        assert source.bytes_of_runs() == dict(sorted(sizes.items()))
        assert source.table()["run"].tolist() == sorted(source.table()["run"].tolist())
