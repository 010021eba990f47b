"""Cells as arrays (`plan.cells`) equal bound programs, one by one: records, cuts, shards; and leases of a room."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from patchclamp.engines.vllm.admission import Admission, Lease
from patchclamp.errors import CapacityError
from patchclamp.plan.bound import (
    Blend,
    BoundOp,
    BoundProgram,
    Condition,
    Linear,
    Noisy,
    NormedAdd,
    PositionRange,
    Projection,
    Rotation,
    pack_columns,
    position_ranges,
    run_key,
)
from patchclamp.plan.cells import CellRecords, PatchedPart, Placed, cells_of, joined, patched_cells, place
from patchclamp.plan.cuts import cuts_of, first_layers
from patchclamp.plan.room import Room
from patchclamp.plan.table import records_of
from patchclamp.runtime.runtime import Limits, shard_op
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import LLAMA

LENGTH, WIDTH = 12, 8
SITES = SiteMap(LLAMA, Sizes(3, WIDTH, 32, 4, 2, 2, 16))
POINTS = len(SITES.points)
WIDE = [point.number for point in SITES.points if point.width == WIDTH and point.rows != "sampled"]


def random_op(draw: np.random.Generator, number: int) -> BoundOp:
    count, several = int(draw.integers(1, 3)), int(draw.integers(1, 3))
    points = tuple(sorted(draw.choice(WIDE, count, replace=False).tolist()))
    edges = np.sort(draw.choice(LENGTH + 1, 2 * several, replace=False)).tolist()
    ranges = tuple(PositionRange(a, b, int(draw.integers(3)), int(draw.integers(2)))
                   for a, b in zip(edges[::2], edges[1::2], strict=True))  # fmt: skip
    keys = tuple(run_key(f"run{draw.integers(2)}", point) for point in points) if draw.random() < 0.5 else ("v:one",)
    action, values = {
        0: (Linear(float(draw.random()), 0.5), keys), 1: (Linear(0.0, 0.0), ()),
        2: (Blend(0.5, f"v:mask{draw.integers(2)}"), keys), 3: (Projection(-1.0, float(draw.random())), ("v:two",)),
        4: (Noisy(0.1, int(draw.integers(1 << 40)), False, tuple(range(7, 7 + count))), ()),
        5: (NormedAdd(float(draw.random())), keys), 6: (Rotation(0.6, 0.8, bool(draw.integers(2))), ("v:plane",)),
    }[int(draw.integers(7))]  # fmt: skip
    condition = Condition(f"v:ids{draw.integers(2)}", bool(draw.integers(2))) if draw.random() < 0.3 else None
    columns = pack_columns((2, 6)) if draw.random() < 0.3 else 0
    return BoundOp(f"edits[{number}]", action, points, values, ranges, True, columns, condition)


def random_programs(seed: int, count: int = 40) -> list[BoundProgram | None]:
    draw = np.random.default_rng(seed)
    programs: list[Any] = [
        BoundProgram("run", LENGTH, tuple(random_op(draw, i) for i in range(int(draw.integers(1, 4)))))
        for _ in range(count)
    ]
    return [None if draw.random() < 0.1 else program for program in programs]


def whole(keys: list[str], draw: np.random.Generator) -> tuple[dict[str, tuple[int, int]], Placed]:
    """Addresses of keys, as a mapping and as arrays, for one worker."""
    begin, width = draw.integers(0, 10_000, len(keys)), draw.integers(1, 9, len(keys))
    known = dict(zip(keys, zip(begin.tolist(), width.tolist(), strict=True), strict=True))
    none = np.zeros(POINTS, np.int64)
    return known, Placed(begin[None], width[None], none, none, none)


def records_by_cell(cells: CellRecords, placed: Placed) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    found = {}
    for group in cells.groups:
        records, counts = place(group, placed)
        found |= {number: (records[i], counts[i]) for i, number in enumerate(group.number.tolist())}
    return found


@pytest.mark.parametrize("seed", range(5))
def test_records_of_cells_are_those_of_programs(seed):
    programs = random_programs(seed)
    cells = CellRecords.of_bytes(cells_of(programs).to_bytes())
    known, placed = whole(cells.keys, np.random.default_rng(seed))
    found = records_by_cell(cells, placed)
    assert found.keys() == {i for i, program in enumerate(programs) if program is not None}
    for number, (records, counts) in found.items():
        expected, expected_counts = records_of(programs[number].ops, known, POINTS)
        assert np.array_equal(records, expected)
        assert np.array_equal(counts, expected_counts)


@pytest.mark.parametrize("rank", [0, 1])
def test_shards(rank):
    """A tensor-parallel worker's records are those of its shard of every op; one that has no column does nothing."""
    sites = SiteMap(LLAMA, SITES.sizes, tensor_parallel=2)
    shards = [sites.shard(point.number, rank) for point in sites.points]
    z = [point.number for point in sites.points if point.kind == "z"]
    ops = [
        BoundOp("edits[0]", Linear(0.0, 1.0), (point,), (key,), (PositionRange(2, 5, 1, 1),), True, columns)
        for point in (z[0], WIDE[0])
        for key in ("v:one", run_key("run", point))
        for columns in (0, pack_columns((0, 2)), pack_columns((3, 6)))
    ]
    programs = [BoundProgram("run", LENGTH, (op,)) for op in ops]
    cells = cells_of(programs)
    ways = sorted({(shard.first, shard.end) for i, shard in enumerate(shards) if sites.shard_count(i) > 1})
    begin = np.array([[100 * way + i for i, _ in enumerate(cells.keys)] for way in range(len(ways) + 1)])
    width = np.array([[WIDTH] * len(cells.keys), *([end - first] * len(cells.keys) for first, end in ways)])
    way = np.array([1 + ways.index((shard.first, shard.end)) if sites.shard_count(i) > 1 else 0
                    for i, shard in enumerate(shards)])  # fmt: skip
    first, end = (np.array([getattr(shard, name) for shard in shards]) for name in ("first", "end"))
    found = records_by_cell(cells, Placed(begin, width, way, first, end))
    acted = 0
    for number, op in enumerate(ops):
        local = shard_op(op, shards, sites)
        records = found[number][0]
        if not local.points:
            assert (records["start"] == records["stop"]).all()
            continue
        chosen = int(way[op.points[0]])
        index = cells.keys.index(op.values[0])
        known = {local.values[0]: (int(begin[chosen, index]), int(width[chosen, index]))}
        assert np.array_equal(records, records_of([local], known, POINTS)[0])
        acted += 1
    assert acted == (12, 10)[rank]


@pytest.mark.parametrize("seed", range(3))
def test_cuts(seed):
    """The first layer and position that a program touches; without a program, those of a neighbour."""
    programs, layers = random_programs(seed), first_layers(SITES)
    cuts = cuts_of(cells_of(programs), np.full(len(programs), LENGTH), layers, SITES.layers)
    before = next(program for program in programs if program is not None)
    for program, cut in zip(programs, cuts.tolist(), strict=True):
        before = before if program is None else program
        touched = [(layers[point], at) for op in before.ops for point in op.points
                   for start, stop, *_ in op.ranges for at in range(start, min(stop, LENGTH))]  # fmt: skip
        assert cut == [min(layer for layer, _ in touched), min(at for _, at in touched)]


@pytest.mark.parametrize("lengths", [(5, 9), (12, 12)])
def test_cuts_of_cells_of_several_prompts(lengths):
    """A cell without a program gets the cut of one of its own prompt, if their prompts differ in length."""
    program = BoundProgram("run", lengths[1], (BoundOp("", Linear(2.0, 0.0), (WIDE[2],), (), (PositionRange(2, 3),)),))
    layers = first_layers(SITES)
    cuts = cuts_of(cells_of([None, program, None]), np.array([lengths[0], *[lengths[1]] * 2]), layers, SITES.layers)
    own = [layers[WIDE[2]], 2]
    assert cuts.tolist() == [own if lengths[0] == lengths[1] else [SITES.layers, lengths[0] - 1], own, own]


def test_some_of_the_cells():
    programs = random_programs(9)
    cells = cells_of(programs)
    which = [5, None, 0, 17, 5, 39]
    some = cells.take(which)
    known, placed = whole(some.keys, np.random.default_rng(0))
    assert set(some.keys) == {
        key for i in which if i is not None and programs[i] for op in programs[i].ops for key in op.keys
    }
    found = records_by_cell(some, placed)
    for i, number in enumerate(which):
        if number is None or programs[number] is None:
            assert i not in found
        else:
            assert np.array_equal(found[i][0], records_of(programs[number].ops, known, POINTS)[0])


def test_cells_after_an_edit():
    """Every cell gets the records of another program first, in program order at each point."""
    programs, draw = random_programs(4), np.random.default_rng(4)
    first = BoundProgram("run", LENGTH, (random_op(draw, 0), random_op(draw, 1)))
    cells = cells_of(programs).after(cells_of([first]))
    known, placed = whole(cells.keys, draw)
    found = records_by_cell(cells, placed)
    assert len(found) == len(programs)
    for number, program in enumerate(programs):
        ops = (*first.ops, *(() if program is None else program.ops))
        assert np.array_equal(found[number][0], records_of(ops, known, POINTS)[0])


def test_cells_of_several_prompts():
    several = [random_programs(1, 7), random_programs(2, 5)]
    cells = joined([cells_of(programs) for programs in several])
    sizes = [group.records.shape[1] for group in cells.groups]
    assert len(set(sizes)) == len(sizes)  # few groups, since each is installed by itself
    known, placed = whole(cells.keys, np.random.default_rng(0))
    found = records_by_cell(cells, placed)
    for number, program in enumerate([*several[0], *several[1]]):
        if program is not None:
            assert np.array_equal(found[number][0], records_of(program.ops, known, POINTS)[0])


def test_a_grid():
    """Cells of a grid equal the programs that patch its places one by one."""
    parts = [[PatchedPart(3, 0, run_key("run", 3))], [PatchedPart(9, pack_columns((2, 4)), run_key("run", 9)),
                                                      PatchedPart(4, 0, run_key("run", 4))]]  # fmt: skip
    writes = [([4], [2]), ([1, 2, 7], [0, 1, 3]), ([5, 6], [8, 9])]
    ranges = [position_ranges(np.array(write), np.array(read)) for write, read in writes]
    part_of, range_of = (np.array(of).ravel() for of in np.meshgrid([0, 1], [0, 1, 2]))
    cells = patched_cells((0.25, 0.75), parts, ranges, part_of, range_of)
    programs = []
    for row, column in zip(part_of, range_of, strict=True):
        ops = tuple(BoundOp(f"edits[{i}]", Linear(0.25, 0.75), (part.point,), (part.key or "",), ranges[column], True, part.columns)
                    for i, part in enumerate(parts[row]))  # fmt: skip
        programs.append(BoundProgram("run", LENGTH, ops))
    known, placed = whole(cells.keys, np.random.default_rng(0))
    found = records_by_cell(cells, placed)
    assert len(found) == 6
    for number, program in enumerate(programs):
        assert np.array_equal(found[number][0], records_of(program.ops, known, POINTS)[0])


@pytest.mark.parametrize("most", [1, 30, 60, 10_000])
def test_splits_by_what_cells_read(most):
    """Consecutive cells read keys of at most `most` numbers together, unless one alone reads more."""
    programs = random_programs(6)
    cells = cells_of(programs)
    sizes = np.random.default_rng(0).integers(1, 20, len(cells.keys))
    read = [{key for op in program.ops for key in op.keys} if program else set() for program in programs]
    size = dict(zip(cells.keys, sizes.tolist(), strict=True))
    splits = list(cells.splits(sizes, most))
    assert [begin for begin, _ in splits] == [0, *(end for _, end in splits[:-1])]
    assert splits[-1][1] == len(programs)
    for begin, end in splits:
        together = sum(size[key] for key in set().union(*read[begin:end]))
        assert together <= most or end == begin + 1
        if end < len(programs):  # one more would be too many
            assert sum(size[key] for key in set().union(*read[begin : end + 1])) > most
    assert len(splits) > 1 or most == 10_000


# -- leases


def test_a_lease_takes_slots_of_its_own():
    room = Room(4, 100, 1000, cells=6)
    placement, slots, records = room.lease((2, 50), (10, 60), {"v:one": (2, 5)})
    assert slots == [5, 6, 7, 8, 9, 10]
    assert records == 50  # half of the largest free part
    assert placement.load == ("v:one",)
    assert room.counts() == {"programs": 1, "records": 50, "pinned": 1}
    assert room.lease((2, 2), (10, 20), {}) is None  # no slot is left
    assert [room.place(5, {}).slot for _ in range(3)] == [2, 3, 4]  # those of programs are
    room.end_lease(placement, slots)
    assert room.counts()["pinned"] == 0
    placement, slots, records = room.lease((2, 3), (10, 1000), {})
    assert slots == [5, 6, 7]
    assert records == 25  # half of the first 50


def test_a_lease_leaves_evictions_to_programs():
    """A worker may receive a lease after programs that were placed later. Those are told what was evicted for it, but
    not what has been placed again."""
    room = Room(4, 100, 20, cells=6)
    for name in ("v:a", "v:b"):
        room.free(room.place(1, {name: (1, 10)}))
    placement, slots, _ = room.lease((2, 2), (1, 2), {"v:c": (2, 10)})
    assert placement.evicted == ()
    room.end_lease(placement, slots)
    again = room.place(1, {"v:a": (1, 10)})
    assert again.load == ("v:a",)
    assert set(again.evicted) == {"v:b", "v:c"}


class Blocks:
    free = 8

    def take(self, count: int) -> list[int]:
        return list(range(count))


@pytest.mark.parametrize("workers", [1, 2])
def test_every_worker_loads_what_it_may_lack(workers):
    """A program on one worker's heads left rows in the bank of that worker alone."""
    room = Room(4, 100, 100, cells=6)
    room.free(room.place(1, {"r:run:3": (2, 8)}))
    admission = Admission(SITES, room, workers)
    admission.pool = Blocks()
    sizes = {"r:run:3": (2, 8), "v:vector": (1, 8)}
    lease = msgspec.msgpack.decode(admission.lease("job", (2, 4), (2, 4), (1, 2), sizes), type=Lease)
    assert lease.placement.load == tuple(sizes)[-workers:]


def test_a_program_beside_a_lease_loads_what_the_lease_may_not_have_loaded():
    """An engine step may come between a lease and its rows."""
    room, sizes = Room(4, 100, 100, cells=6), {"v:vector": (1, 8)}
    admission = Admission(SITES, room, 1)
    admission.pool = Blocks()
    admission.lease("job", (2, 4), (2, 4), (1, 2), sizes)
    assert admission._loading(room.place(1, sizes)).load == tuple(sizes)


@pytest.mark.parametrize("share", [0, -0.5, True, "0.4", None])
def test_a_share_is_a_positive_number(share):
    with pytest.raises(msgspec.ValidationError, match="batch_share"):
        msgspec.convert({"batch_share": share}, Limits, strict=True)


def test_a_lease_that_can_never_fit():
    with pytest.raises(CapacityError):
        Room(4, 100, 10, cells=6).lease((2, 6), (10, 20), {"v:one": (20, 5)})
    assert Room(4, 100, 10).lease((2, 6), (10, 20), {}) is None
