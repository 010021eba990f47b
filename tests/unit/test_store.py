"""Captured rows: kept in chunks of many steps, given back row by row, let go of; and the memory they travel through."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.engines.vllm import shared
from patchclamp.plan.step import PlannedCaptures, RowLabels, StepPlan, _offsets
from patchclamp.plan.table import CaptureLayout
from patchclamp.store import host_memory
from patchclamp.store.captures import (
    ALIGNED,
    BufferSlice,
    CaptureChunk,
    CaptureStore,
    ScatteredSlices,
    StoredRows,
    tensors_of,
)
from patchclamp.store.host_memory import SLAB_BYTES, SLABS_AHEAD, HostBlock, PinnedSlabs

WIDTHS = np.array([4, 6])
TORCH = (torch.float32, torch.bfloat16, torch.float16)


class Plain:
    """The same store, one row at a time."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[int, int, int, torch.Tensor]]] = {}

    def fetch(self, run: str, point: int, op: int | None) -> dict[int, torch.Tensor]:
        found: dict[int, tuple[int, torch.Tensor]] = {}
        for at, by, position, row in self.rows[run]:
            if at == point and op in (None, by) and (position not in found or by > found[position][0]):
                found[position] = (by, row)
        return {position: found[position][1] for position in sorted(found)}


def layout_of(group, points, dtypes=None, op=None, products=None) -> CaptureLayout:
    """Capture ranges, by their groups, and the points of each group; of each region how many products it keeps."""
    count, none = len(group), np.zeros(len(group), np.int64)
    region_group = np.repeat(np.arange(len(points)), [len(p) for p in points])
    point = np.concatenate(points)
    dtype = np.repeat([0] * len(points) if dtypes is None else dtypes, np.bincount(region_group))
    order = np.argsort(point, kind="stable")
    return CaptureLayout(
        np.arange(count), none + 1, none if op is None else op, none, none, np.asarray(group), none > 0,
        np.arange(len(point))[order], region_group[order], point[order], dtype[order],
        none[:1].repeat(len(point)) if products is None else np.asarray(products)[point[order]], len(points),
        np.zeros(len(points), np.int64),
    )  # fmt: skip


def captured(places, size, layout, run, begin, count, base, row, unit_bytes=4) -> CaptureChunk:
    """A chunk of steps of `size`; sizes are in numbers of `unit_bytes`, and a group's rows lie one after the other."""
    none, labels = np.zeros(0, np.int64), RowLabels(*np.zeros((3, 0), np.int32))
    offset, rows = _offsets(np.asarray(count), layout)
    plan = StepPlan(labels, labels, none, layout, np.asarray(begin), np.asarray(count), offset, rows,
                    np.asarray(base), np.asarray(row), *np.zeros((2, len(base)), np.int64), size, unit_bytes)  # fmt: skip
    return CaptureChunk(places, size * unit_bytes, PlannedCaptures(plan, np.asarray(run), 0))


def in_block(numbers: torch.Tensor) -> HostBlock:
    return HostBlock(numbers.reshape(-1).view(torch.uint8))


def chunk(
    draw: np.random.Generator, runs: dict[str, int], plain: Plain, in_bytes: bool, products: np.ndarray
) -> CaptureChunk:
    """One step of a few rows a range, or several of one row each; some of nobody's, some empty, some rows scattered."""
    count, steps, groups = int(draw.integers(1, 9)), int(draw.integers(1, 5)), int(draw.integers(1, 4))
    names = [str(name) for name in draw.choice([*runs, "nobody"], count)]
    points = [np.flatnonzero(draw.random(2) < 0.6) for _ in range(groups)]
    points = [some if len(some) else np.array([1]) for some in points]
    # an op captures a position of a step once
    layout = layout_of(np.sort(draw.integers(0, groups, count)), points, draw.integers(0, 3, groups),
                       draw.permutation(count), products)  # fmt: skip
    widths = np.where(products, products, WIDTHS)
    counts = np.ones(count, np.int64) if steps > 1 else draw.integers(0, 4, count)
    begin, rows = draw.integers(0, 20, count), np.bincount(layout.group, counts, groups).astype(np.int64)
    row, unit = widths[layout.point] * (np.array([4, 2, 2])[layout.dtype] if in_bytes else 1), 1 if in_bytes else 4
    sizes = -(-rows[layout.region_group] * row // ALIGNED) * ALIGNED
    base, size = np.cumsum(sizes) - sizes, int(sizes.sum())
    numbers = [runs.get(name, -1) for name in names]
    made, done = captured([], size, layout, numbers, begin, counts, base, row, unit), 0
    offsets, stride = _offsets(counts, layout)[0], made.stride
    while done < steps:  # some steps in one block, some in the next
        here, offset = int(draw.integers(1, steps - done + 1)), ALIGNED * int(draw.integers(0, 3))
        data = torch.zeros(offset + here * stride + 8, dtype=torch.uint8)
        for step, c, a in np.ndindex(here, count, len(row)):
            if layout.region_group[a] != layout.group[c]:
                continue
            at, point = offset + step * stride + unit * int(base[a] + offsets[c] * row[a]), int(layout.point[a])
            for i in range(int(counts[c])):
                one = torch.from_numpy(draw.standard_normal(widths[point]).astype(np.float32))
                one = one.to(TORCH[layout.dtype[a]]) if in_bytes else one
                data[at + i * one.nbytes : at + (i + 1) * one.nbytes] = one.view(torch.uint8)
                if names[c] in plain.rows:
                    plain.rows[names[c]].append((point, int(layout.op[c]), int(begin[c]) + done + step + i, one))
        if (
            here == 1 and draw.random() < 0.5
        ):  # each region in a block of its own, and one block for several that follow
            cut = int(draw.integers(len(row)))
            ends = [unit * int(base[a]) for a in range(cut + 1)]
            parts = [(x, y, HostBlock(data[offset + x : offset + y].clone()), 0) for x, y in itertools.pairwise(ends)]
            parts.append((ends[-1], stride, HostBlock(data[offset - ALIGNED * (offset > 0) + ends[-1] :].clone()),
                          ALIGNED * (offset > 0)))  # fmt: skip
            made.places.append(ScatteredSlices(parts))
        else:
            made.places.append(BufferSlice(HostBlock(data), offset, here))
        done += here
    return made


@given(st.integers(0, 2**32), st.booleans())
@example(134587, True)  # regions that follow each other, in several blocks
def test_what_is_fetched_is_what_each_row_was(seed, in_bytes):
    draw, plain, store = np.random.default_rng(seed), Plain(), CaptureStore(WIDTHS)
    runs, held, products = {}, [], draw.integers(0, 4, 2)  # by point; 0: rows are whole
    for name in "abc":
        runs[name], plain.rows[name] = store.open(name), []
    for _ in range(int(draw.integers(1, 7))):
        store.add(chunk(draw, runs, plain, in_bytes, products))
        for name in list(runs):
            if draw.random() < 0.1:
                store.release(name)
                del runs[name], plain.rows[name]
        for name in runs:
            for point in range(2):
                for op in (None, 0, 1, 2):
                    positions, rows = store.fetch(name, point, op)
                    expected = plain.fetch(name, point, op)
                    assert positions.tolist() == list(expected)
                    assert rows.tolist() == [row.tolist() for row in expected.values()]
                    held.append((rows, rows.tolist()))
        for point in range(2) if runs else ():
            for op in (None, 0, 1, 2):
                asked = [str(name) for name in draw.permutation(list(runs))]
                run, positions, rows = store.gather(asked, point, op)
                of_each = [plain.fetch(name, point, op) for name in asked]
                expected = [(i, p, row.float().tolist()) for i, found in enumerate(of_each) for p, row in found.items()]
                assert list(zip(run.tolist(), positions.tolist(), rows.float().tolist(), strict=True)) == expected
                held.append((rows, rows.tolist()))
        wanted = [(name, point, op, first) for name in runs for point in range(2) for op in (None, 0, 1, 2)
                  for first in (0, int(draw.integers(25)))]  # fmt: skip
        for view_bytes in (0, 1 << 30):  # views where they can be, and none
            for one, (positions, rows) in zip(wanted, tensors_of(store.find(wanted), view_bytes), strict=True):
                assert dict(zip(positions.tolist(), rows.tolist(), strict=True)) == {
                    position: row.tolist() for position, row in plain.fetch(*one[:3]).items() if position >= one[3]
                }
                held.append((rows, rows.tolist()))
    for name in list(runs):
        store.release(name)
    assert (len(store), store.bytes) == (0, 0)
    assert all(rows.tolist() == was for rows, was in held)  # whatever came and went since


def test_a_chunk_grows_in_place_where_the_next_step_lies():
    block, other = HostBlock(torch.zeros(96)), HostBlock(torch.zeros(96))
    one = captured([BufferSlice(block, 16)], 8, layout_of([0], [[0]]), [0], [0], [1], [0], [4])
    for place in (
        BufferSlice(block, 48),
        BufferSlice(block, 0),
        BufferSlice(other, 32),
        ScatteredSlices([(0, 32, other, 64)]),
        BufferSlice(other, 64),
    ):
        one.append(place)
    assert [place.steps for place in one.places] == [2, 1, 1, 1, 1]
    assert one.steps == 6


def test_what_is_still_on_its_way_is_waited_for_and_not_copied_out():
    """A chunk without data yet survives the release of most of its runs, and `flush` is asked before it is read."""
    asked = []
    store = CaptureStore(WIDTHS, lambda: asked.append(1) or setattr(block, "data", data.view(torch.uint8)))
    numbers, block = [store.open("a"), store.open("b"), store.open("c")], HostBlock()
    data = torch.arange(12.0)
    store.add(captured([BufferSlice(block, 0)], 12, layout_of([0, 0, 0], [[0]]), numbers, [0] * 3, [1] * 3, [0], [4]))
    store.release("a"), store.release("b")
    assert (asked, store.bytes) == ([], 48)
    assert store.fetch("c", 0)[1].tolist() == [[8.0, 9.0, 10.0, 11.0]]
    assert asked == [1]
    block.copied = SimpleNamespace(query=lambda: False)  # its copy is queued, and not done
    assert store.bytes == 48
    block.copied = SimpleNamespace(query=lambda: True)
    assert store.bytes == 16
    assert store.fetch("c", 0)[1].tolist() == [[8.0, 9.0, 10.0, 11.0]]


def test_a_run_has_the_chunks_of_its_time_and_no_chunk_outlives_its_runs():
    store, one = CaptureStore(WIDTHS), layout_of([0], [[0]])

    def add(number: int, at: int) -> None:
        block = in_block(torch.full((4,), float(at)))
        store.add(captured([BufferSlice(block, 0)], 4, one, [number], [at], [1], [0], [4]))

    a = store.open("a")
    add(a, 0), add(-1, 1)  # nobody's
    b = store.open("b")
    add(b, 2), add(a, 3)
    store.close("a")
    for at in range(4, 30):
        add(b, at)
    assert store.fetch("a", 0)[0].tolist() == [0, 3]
    assert store.fetch("b", 0)[0].tolist() == [2, *range(4, 30)]
    assert store.open("a") == a  # again: it may capture more
    add(a, 30)
    assert store.fetch("a", 0)[0].tolist() == [0, 3, 30]
    store.release("b")
    assert store.bytes == 3 * 16
    add(b, 31)  # it was released already
    store.release("a")
    assert (store.bytes, len(store)) == (0, 0)


def test_large_rows_are_copied_by_several_threads_and_nothing_is_lost():
    store, rows = CaptureStore(np.array([64])), torch.randn(100_000, 64)
    number, one = [store.open("a")], layout_of([0], [[0]])
    store.add(captured([BufferSlice(in_block(rows), 0)], rows.numel(), one, number, [0], [100_000], [0], [64]))
    assert torch.equal(store.fetch("a", 0)[1], rows)
    store.add(captured([BufferSlice(in_block(rows), 0, 50_000)], 128, one, number, [200_000], [1], [0], [64]))
    assert torch.equal(store.fetch("a", 0)[1][100_000:], rows[::2])


def test_pinned_memory_is_made_ahead_used_again_and_bounded():
    pinned, gone = [], []
    memory = PinnedSlabs(3 * SLAB_BYTES, register=pinned.append, unregister=gone.append)
    first = memory.take(1)
    memory.give(first)
    assert memory.take(1) is first
    a, b = memory.take(100), memory.take(SLAB_BYTES)
    assert (len(a.data), len(b.data)) == (SLAB_BYTES, SLAB_BYTES)
    big = memory.take(SLAB_BYTES + 1)
    assert (len(big.data), memory.bytes <= 3 * SLAB_BYTES + len(big.data)) == (2 * SLAB_BYTES, True)
    assert len(pinned) <= 3 + 1 + SLABS_AHEAD
    before = memory.bytes
    memory.give(big)
    del big
    gc.collect()
    assert len(gone) == 1
    assert memory.bytes == before - 2 * SLAB_BYTES
    memory.close()


def test_memory_that_cannot_be_pinned_serves_as_ordinary(caplog):
    def refuse(memory):
        raise MemoryError("not today")

    memory = PinnedSlabs(1 << 30, register=refuse, unregister=lambda memory: pytest.fail("it was never registered"))
    slab = memory.take(10)
    slab.data[:2] = 7
    assert (slab.data[:3].tolist(), "not today" in caplog.text) == ([7, 7, 0], True)
    del slab
    memory.close()
    gc.collect()


def stored(rows: torch.Tensor, parts: int = 1) -> StoredRows:
    """Rows as a store has them, in several parts of a chunk."""
    flat = rows.reshape(-1).view(torch.uint8).numpy()
    return StoredRows(np.arange(len(rows)) + 3, np.array_split(flat, parts), rows.dtype, rows.shape[-1])


class Line:
    """A sender and a receiver, and what passes between them."""

    def __init__(self) -> None:
        self.sender, self.handed = shared.CaptureSender(), []
        self.receiver = shared.CaptureReceiver(self.sender.take_back)

    def fetch(self, rows: torch.Tensor, parts: int = 1, before=lambda: None):
        return self.fetch_many({0: stored(rows, parts)}, before)[0]

    def fetch_many(self, wanted: dict[int, StoredRows], before=lambda: None):
        def ask(*receiver):
            before()
            self.handed.append(self.sender.hand(wanted, *receiver))
            return [self.handed[-1]]

        return self.receiver.fetch(ask)[0]


def left() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("patchclamp-")}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("rows", [5, 70_000, 400_001])
def test_rows_cross_to_another_process_and_leave_nothing(monkeypatch, parts, rows):
    monkeypatch.setattr(shared, "MAX_BUFFER_BYTES", 1 << 22)
    line, before, open_files, kept = Line(), left(), len(os.listdir("/proc/self/fd")), []
    for _ in range(3):
        made = torch.randn(rows, 16).to(torch.bfloat16)
        found, taken = line.fetch(made, parts)
        assert found.tolist() == list(range(3, rows + 3))
        assert torch.equal(taken.view(torch.int16), made.view(torch.int16))
        kept.append((taken, made))
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in kept)  # nobody writes there again
    assert left() == before
    assert len(os.listdir("/proc/self/fd")) <= open_files + 2  # the buffer, on either side
    sent = [handed["here"] for handed in line.handed if "data" not in handed]
    assert len(sent) == {5: 0, 70_000: 3, 400_001: 12}[rows]
    assert len({handed["buffer"] for handed in line.handed if "data" not in handed}) == (rows > 5)


@given(st.integers(0, 2**32))
def test_rows_of_many_pass_together(seed):
    """Of several senders at once, in several dtypes and parts, however the rows meet the ends of a buffer."""
    draw = np.random.default_rng(seed)
    senders, receiver = (
        [shared.CaptureSender() for _ in range(int(draw.integers(1, 4)))],
        shared.CaptureReceiver(lambda loans: None),
    )
    asked = 0
    with mock.patch.object(shared, "MAX_BUFFER_BYTES", 512), mock.patch.object(shared, "MAX_INLINE_BYTES", 300):
        for _ in range(3):
            wanted = []
            for _ in senders:
                many = {}
                for number in draw.permutation(9)[: int(draw.integers(0, 9))].tolist():
                    rows = torch.from_numpy(draw.standard_normal((int(draw.integers(0, 30)), int(draw.integers(1, 7)))))
                    many[number] = stored(rows.to(TORCH[int(draw.integers(3))]), int(draw.integers(1, 4)))
                wanted.append(many)

            def ask(*receiver_arguments, wanted=wanted):
                nonlocal asked
                asked += 1
                pairs = zip(senders, wanted, strict=True)
                answers = [sender.hand(many, *receiver_arguments) for sender, many in pairs]
                return msgspec.msgpack.decode(msgspec.msgpack.encode(answers))

            for many, taken in zip(wanted, receiver.fetch(ask), strict=True):
                assert many.keys() == taken.keys()
                for number, (positions, rows) in taken.items():
                    ((where, expected),) = tensors_of([many[number]], 1 << 30)
                    assert positions.tolist() == where.tolist()
                    assert (rows.dtype, rows.shape) == (expected.dtype, expected.shape)
                    assert torch.equal(rows.float(), expected.float())
    assert asked >= 3


@pytest.mark.parametrize(("chunks", "count", "is_view"), [(1, 1000, True), (2, 1000, False), (1, 3, False)])
def test_rows_that_lie_contiguous_are_viewed_and_others_are_copied_once(chunks, count, is_view):
    """A view shares the chunk's memory, which outlives the run. What lies in several chunks, or is little, is copied."""
    width, store, one = 64, CaptureStore(np.array([64])), layout_of([0], [[0]])
    number, rows = store.open("a"), torch.randn(chunks, count, 64)
    for i in range(chunks):
        place = BufferSlice(in_block(rows[i]), 0)
        store.add(captured([place], count * width, one, [number], [i * count], [count], [0], [width]))
    copy = mock.Mock(wraps=host_memory.copy_bytes)
    with mock.patch("patchclamp.store.captures.copy_bytes", copy):
        positions, fetched = store.fetch("a", 0)
    assert sum(new.nbytes for new, _ in copy.call_args[0][0]) == (0 if is_view else rows.nbytes)
    assert (fetched.data_ptr() == rows.data_ptr()) == is_view
    store.release("a")
    assert store.bytes == 0
    assert positions.tolist() == list(range(chunks * count))
    assert torch.equal(fetched, rows.reshape(-1, width))


@pytest.mark.parametrize(("count", "threads"), [(3, False), (40, True)])
def test_copies_are_the_same_whether_threads_make_them_or_not(monkeypatch, count, threads):
    """Small ones among large ones, of one axis and of two, in pieces and not: each byte once, and small ones here."""
    rng, made = np.random.default_rng(count), []
    sizes = [int(size) for size in rng.integers(1, 5_000, 50)] + [int(size) for size in rng.integers(1, 400_000, count)]
    for size in [*sizes, 3 << 20] if threads else sizes:
        old = rng.integers(0, 256, (int(rng.integers(1, 3)), size), dtype=np.uint8)[:, : max(size - 3, 1)]
        made.append((np.zeros(old.shape, np.uint8), old))
        made.append((np.zeros(size, np.uint8), rng.integers(0, 256, size, dtype=np.uint8)))
    copy, here = host_memory._copy, []
    monkeypatch.setattr(host_memory, "_copy", lambda pairs: (here.extend(pairs), copy(pairs))[1])
    pool = mock.Mock(wraps=host_memory._copiers)
    monkeypatch.setattr(host_memory, "_copiers", pool)
    host_memory.copy_bytes(made)
    assert pool.map.called == threads
    assert sum(new.size for new, _ in here) == sum(new.size for new, _ in made)
    for new, old in made:
        assert (new == old).all()


def test_a_callers_memory_is_used_again_once_nobody_holds_it_and_is_bounded(monkeypatch):
    monkeypatch.setattr(host_memory, "MAX_FREE_BYTES", 8 << 20)
    line, made = (
        Line(),
        [torch.full((50_000, 16), float(i)) for i in range(6)],
    )  # 3.1 MiB each, 4 with what is left over
    first = line.fetch(made[0])[1]
    part, address = first[10:12].numpy(), first.data_ptr()  # a view holds all of it
    del first
    gc.collect()
    second = line.fetch(made[1])[1]
    assert second.data_ptr() != address
    assert (part == 0.0).all()
    del part
    gc.collect()
    third = line.fetch(made[2])[1]
    assert third.data_ptr() == address
    held = [second, third, *(line.fetch(rows)[1] for rows in made[3:])]
    assert [rows[0, 0].item() for rows in held] == [1.0, 2.0, 3.0, 4.0, 5.0]
    del held, second, third
    gc.collect()
    assert len(line.receiver._memory._free) == 2


def test_a_larger_buffer_takes_the_place_of_a_smaller_one():
    line, before = Line(), left()
    for size in (50_000, 400_000, 60_000):
        made = torch.randn(size, 16)
        assert torch.equal(line.fetch(made)[1], made)
    first = line.handed[0]["buffer"]
    assert [handed["buffer"] - first for handed in line.handed] == [0, 1, 1]
    assert left() == before


def test_files_that_cannot_be_seen_are_done_without(monkeypatch):
    """Another machine's, or none may be opened; then they are asked for no more, and none stays behind."""
    line, before, made = Line(), left(), torch.randn(50_000, 16)
    monkeypatch.setattr(line.receiver, "_map", lambda handed: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    for _ in range(5):
        assert torch.equal(line.fetch(made)[1], made)
    assert ["data" in handed for handed in line.handed] == [False, True] * 3 + [True, True]
    assert left() == before


def test_a_fetch_that_fails_or_is_interrupted_changes_nothing():
    line, before, made = Line(), left(), torch.randn(50_000, 16)
    for failure in (RuntimeError, KeyboardInterrupt):
        for _ in range(3):
            with pytest.raises(failure):
                line.fetch(made, before=lambda failure=failure: (_ for _ in ()).throw(failure))
    stock_map = line.receiver._map
    line.receiver._map = lambda handed: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        line.fetch(made)
    line.receiver._map = stock_map
    assert torch.equal(line.fetch(made)[1], made)
    assert len({handed["buffer"] for handed in line.handed}) == 1
    assert left() == before


def test_a_run_that_goes_on_between_two_parts_is_fetched_anew(monkeypatch):
    monkeypatch.setattr(shared, "MAX_BUFFER_BYTES", 1 << 21)
    line, rows, asked = Line(), [torch.randn(50_000, 16), torch.randn(60_000, 16)], []

    def ask(to, mapped, at, files, loan):
        asked.append(at)
        return [line.sender.hand({0: stored(rows[len(asked) > 1])}, to, mapped, at, files)]

    assert torch.equal(line.receiver.fetch(ask)[0][0][1], rows[1])
    assert asked == [0, 1 << 21, 0, 1 << 21]


def test_a_receiver_hears_from_several_senders():
    """Each stage of a pipeline hands over its own rows through a buffer of its own."""
    senders, receiver, before = (
        [shared.CaptureSender() for _ in range(3)],
        shared.CaptureReceiver(lambda loans: None),
        left(),
    )
    handed = []
    for turn in range(12):
        made = torch.full((50_000, 16), float(turn))

        def ask(*asked, made=made, sender=senders[turn % 3]):
            handed.append(sender.hand({0: stored(made)}, *asked))
            return [handed[-1]]

        assert torch.equal(receiver.fetch(ask)[0][0][1], made)
    assert len({answer["buffer"] for answer in handed}) == 3  # each is mapped once, and gone on with
    assert left() == before


def test_what_a_dead_receiver_leaves_is_deleted():
    sender, before, made = shared.CaptureSender(), left(), torch.zeros(50_000, 16)
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    lost = sender.hand({0: stored(made)}, f"{int(dead.stdout)}-x")
    assert os.path.exists(lost["path"])
    receiver = shared.CaptureReceiver(lambda loans: None)
    receiver.fetch(lambda *asked: [sender.hand({0: stored(made)}, *asked)])
    assert left() == before


def test_rows_travel_in_the_answer_where_no_file_can_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    line, made = Line(), torch.randn(70_000, 16)
    assert torch.equal(line.fetch(made)[1], made)
    assert "data" in line.handed[0]
    assert os.listdir(tmp_path) == []


def test_a_run_that_was_released_is_told():
    with pytest.raises(pc.MissingSource, match="it was released"):
        CaptureStore(WIDTHS).fetch("x", 0)


@pytest.mark.parametrize("in_bytes", [True, False])
def test_most_runs_of_a_wide_batch_leave_and_the_others_keep_their_rows(in_bytes):
    """Rows all of one size, as in decode: the copy that lets their memory go moves them in one take."""
    runs, points, steps, width = 12, 3, 5, 16
    store, unit = CaptureStore(np.full(points, width)), 1 if in_bytes else 4
    number = np.array([store.open(f"run{i}") for i in range(runs)])
    rows = torch.randn(steps, points, runs, width)
    flat = rows.view(-1).view(torch.uint8)
    halves = flat.split(len(flat) // steps * 2)
    places = [BufferSlice(HostBlock(half.clone()), 0, len(half) * steps // len(flat)) for half in halves]
    across = 4 * width // unit
    store.add(captured(places, points * runs * across, layout_of([0] * runs, [range(points)]), number, [7] * runs,
                       [1] * runs, np.arange(points) * runs * across, [across] * points, unit))  # fmt: skip
    before = store.bytes
    for i in range(7):
        store.release(f"run{i}")
    assert store.bytes < before / 2
    for i in range(7, runs):
        for point in range(points):
            positions, found = store.fetch(f"run{i}", point)
            assert positions.tolist() == [7, 8, 9, 10, 11]
            assert torch.equal(found, rows[:, point, i])
