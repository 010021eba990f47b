"""Captured rows, stored as the kernel wrote them, in chunks of many steps. A fetch views one chunk or gathers several.

S steps of a chunk · W point width · T positions
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from patchclamp.errors import MissingSource
from patchclamp.language.values import DTYPES, POOLS
from patchclamp.store.host_memory import HostBlock, copy_bytes, reused
from patchclamp.store.tensors import PROBE, CapturedEntry, CaptureSource

ALIGNED = 16  # byte alignment of regions
MIN_VIEW_BYTES = 1 << 16  # smaller reads are copied, because a view keeps a whole chunk in memory
SPARSE_TURNS = 8  # turns after which a chunk shrinks if less than half of it is kept
MAX_SPARSE_BYTES = 1 << 31  # total bytes per step of such chunks; above this limit they shrink at once
MAX_UNCOUNTED = 8  # chunks with `live_bytes` still uncounted
_TORCH = tuple(getattr(torch, name) for name in DTYPES)
NONE = np.zeros(0, np.int64)
ITEM_BYTES = np.array([dtype.itemsize for dtype in _TORCH])


class BufferSlice(msgspec.Struct):
    """Captures of consecutive steps, contiguous in a block from byte `offset`."""

    block: HostBlock
    offset: int
    steps: int = 1

    @property
    def blocks(self) -> list[HostBlock]:
        return [self.block]

    def is_contiguous(self, begin: int, end: int) -> bool:
        """True if bytes begin … end−1 of each step are contiguous, so that `cut` can return them."""
        return True

    def cut(self, begin: int, end: int, stride: int) -> np.ndarray:
        """Return a view of bytes begin … end−1 of each step of `stride` bytes, [S, end − begin]."""
        assert self.block.data is not None
        data = self.block.data.numpy()[self.offset : self.offset + self.steps * stride]
        return data.reshape(self.steps, stride)[:, begin:end]


class ScatteredSlices(msgspec.Struct):
    """One step's bytes in several blocks. Each part is (begin, end, block, offset): bytes begin … end−1 of the step are
    in the block, starting at `offset`. Where parts overlap, the first part counts."""

    parts: list[tuple[int, int, HostBlock, int]]
    steps: int = 1

    @property
    def blocks(self) -> list[HostBlock]:
        return [block for _, _, block, _ in self.parts]

    def is_contiguous(self, begin: int, end: int) -> bool:
        return any(first <= begin and end <= last for first, last, _, _ in self.parts)

    def cut(self, begin: int, end: int, stride: int) -> np.ndarray:
        first, _, block, offset = next(part for part in self.parts if part[0] <= begin and end <= part[1])
        assert block.data is not None
        return block.data.numpy()[None, offset + begin - first : offset + end - first]


class CaptureChunk(msgspec.Struct, dict=True, eq=False):
    """Rows of consecutive steps with the same layout. `places`: the memory, `stride` bytes per step; `source`: the map
    from bytes to runs.

    `live_bytes`: the bytes per step that belong to kept runs, once counted
    """

    places: list[BufferSlice | ScatteredSlices]
    stride: int
    source: CaptureSource
    live_bytes: int = 0

    @functools.cached_property
    def bytes_of_runs(self) -> dict[int, int]:
        return self.source.bytes_of_runs()

    @functools.cached_property
    def table(self) -> np.ndarray:
        """Every captured range at every point, ascending by run number."""
        return self.source.table()

    @functools.cached_property
    def _table_of_run(self) -> dict[int, np.ndarray]:
        """The chunk's table, split by run number."""
        return _split_by_run(self.table)

    def gather(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Gather the rows of table entries with equal row size and alignment. Returns each row's entry index and
        position, and the bytes of all rows, one array [S, n] per place; a view if the rows are contiguous."""
        count, size = table["count"].astype(np.int64), int(table["row_bytes"][0])
        rows, begin, pieces = int(count.sum()), int(table["offset"][0]), list[np.ndarray]()
        nth = np.arange(rows) - np.repeat(np.cumsum(count) - count, count)
        is_view = np.array_equal(table["offset"][:-1] + count[:-1] * size, table["offset"][1:])
        for place in self.places:
            if is_view and place.is_contiguous(begin, begin + rows * size):
                pieces.append(place.cut(begin, begin + rows * size, self.stride))
            else:
                pieces.append(np.empty((place.steps, rows * size), np.uint8))
                _gather_rows(place, table, self.stride, pieces[-1])
        steps = np.arange(self.steps)[:, None]
        entry = np.broadcast_to(np.repeat(np.arange(len(table)), count), (self.steps, rows))
        return entry.reshape(-1), (np.repeat(table["position"], count) + nth + steps).reshape(-1), pieces

    @functools.cached_property
    def _by_point(self) -> dict[int, dict[int, list[CapturedEntry]]]:
        """The table's entries by run and point, filled in as runs are fetched."""
        return {}

    def captured(self, run: int, point: int, op: int | None) -> list[CapturedEntry]:
        """Return a run's entries at a point, of op `op` or, if None, of all ops that capture the site."""
        if run not in self._by_point:
            by_point = self._by_point[run] = collections.defaultdict(list)
            for row in self._table_of_run[run].tolist():
                by_point[row[1]].append(CapturedEntry(*row))
        entries = self._by_point[run].get(point, [])
        return [entry for entry in entries if (0 <= entry.op < PROBE if op is None else entry.op == op)]

    @property
    def steps(self) -> int:
        return self.places[0].steps if len(self.places) == 1 else sum(place.steps for place in self.places)

    @property
    def has_arrived(self) -> bool:
        """True once every byte has reached host memory."""
        return all(block.has_arrived for place in self.places for block in place.blocks)

    def append(self, place: BufferSlice | ScatteredSlices) -> None:
        """Append the bytes of one step."""
        last = self.places[-1]
        if isinstance(place, ScatteredSlices) or isinstance(last, ScatteredSlices) or place.block is not last.block:
            self.places.append(place)
        elif place.offset == last.offset + last.steps * self.stride:
            last.steps += 1
        else:
            self.places.append(place)

    def rows(self, entry: CapturedEntry, first: int, known: dict[Any, np.ndarray]) -> StoredRows:
        """Return views of an entry's rows, [S, size] per place. Skips places that end before position `first`. `known`
        caches positions across entries."""
        begin, end, count = entry.offset, entry.offset + entry.count * entry.row_bytes, entry.count
        steps, number = self.steps, 0 if first <= entry.position else len(self.places)
        before = steps if number else 0  # steps of the skipped places
        while number and before > max(first - entry.position - count + 1, 0):
            number -= 1
            before -= self.places[number].steps
        key = entry.position, count, steps, before
        if key not in known:
            position, steps = entry.position + before, steps - before
            known[key] = (np.arange(steps)[:, None] + np.arange(position, position + count)).reshape(-1)
        parts = [place.cut(begin, end, self.stride) for place in self.places[number:]]
        dtype = _TORCH[entry.dtype]
        return StoredRows(known[key], parts, dtype, entry.row_bytes // dtype.itemsize)

    def shrink(self, runs: list[int]) -> None:
        """Move the rows of `runs` to new memory, and drop all others."""
        table = np.concatenate([self._table_of_run[run] for run in sorted(runs)])
        # one `np.take` moves all rows of one size and alignment, so one or two suffice for most decode steps
        shape = np.stack([table["row_bytes"], table["offset"] % table["row_bytes"]])
        _, shape_of_entry = np.unique(shape, axis=1, return_inverse=True)
        order = np.argsort(shape_of_entry.reshape(-1), kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(shape_of_entry.reshape(-1)[order])) + 1)
        kept, stride = table.copy(), 0
        for entries in groups:  # align each group: row sizes may have different item sizes
            sizes = table["count"][entries].astype(np.int64) * table["row_bytes"][entries]
            kept["offset"][entries] = stride + np.cumsum(sizes) - sizes
            stride += -(-int(sizes.sum()) // ALIGNED) * ALIGNED
        new, step = np.empty((self.steps, stride), np.uint8), 0
        for place in self.places:
            for entries in groups:
                first = int(kept["offset"][entries[0]])
                _gather_rows(place, table[entries], self.stride, new[step : step + place.steps, first:])
            step += place.steps
        self.places = [BufferSlice(HostBlock(torch.from_numpy(new.reshape(-1))), 0, len(new))]
        self.stride, self.source = stride, StoredTable(kept)
        cached: Any = self.__dict__
        cached.clear()


class StoredTable(msgspec.Struct):
    """A capture source whose table already exists."""

    rows: np.ndarray

    def bytes_of_runs(self) -> dict[int, int]:
        run, which = np.unique(self.rows["run"], return_inverse=True)
        sizes = np.bincount(which, self.rows["count"].astype(np.int64) * self.rows["row_bytes"], len(run))
        return dict(zip(run.tolist(), sizes.astype(np.int64).tolist(), strict=True))

    def table(self) -> np.ndarray:
        return self.rows


def _gather_rows(place: BufferSlice | ScatteredSlices, table: np.ndarray, stride: int, to: np.ndarray) -> None:
    """Copy the rows of entries with equal row size and alignment into `to`, packed from the start of each step."""
    size, count, offset = int(table["row_bytes"][0]), table["count"].astype(np.int64), table["offset"]
    if isinstance(place, ScatteredSlices):
        at = 0
        for begin, end in zip(offset.tolist(), (offset + count * size).tolist(), strict=True):
            to[:, at : at + end - begin] = place.cut(begin, end, stride)
            at += end - begin
        return
    begin, end = int(offset.min()), int((offset + count * size).max())
    before = np.cumsum(count) - count
    rows = np.repeat((offset - begin) // size - before, count) + np.arange(int(count.sum()))
    from_rows = place.cut(begin, end, stride).reshape(place.steps, -1, size)
    np.take(from_rows, rows, 1, to[:, : len(rows) * size].reshape(place.steps, -1, size), "clip")


class KeptRun(msgspec.Struct):
    """A run's number, and the chunk numbers `since` … `until` − 1 that may hold its rows; `until` None: still open."""

    number: int
    since: int
    until: int | None = None


class CaptureStore:
    """Captured rows of all unreleased runs. `widths` [P]: each point's row width. `flush` waits for all queued copies.

    `keeps_last`: if a position was captured twice, its last row wins instead of its first. With speculative decoding
    the first row may belong to a rejected draft token.
    """

    def __init__(self, widths: np.ndarray, flush: Callable[[], None] = lambda: None) -> None:
        self._widths, self._flush = widths.tolist(), flush
        self.keeps_last = False
        self._runs: dict[str, KeptRun] = {}
        self._numbers: set[int] = set()  # numbers of kept runs
        self._chunks: dict[int, CaptureChunk] = {}  # by turn, the number of chunks added before it
        self._uncounted: collections.deque[int] = collections.deque()  # turns of chunks without `live_bytes`
        self._sparse: dict[int, int] = {}  # by turn of a chunk, the turn at which it became sparse
        self._turn = self._next_number = 0

    def __len__(self) -> int:
        """Return the number of kept runs."""
        return len(self._runs)

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    def open(self, run: str) -> int:
        """Start or reopen a run, and return its number."""
        if run not in self._runs:
            self._runs[run] = KeptRun(self._next_number, self._turn)
            self._numbers.add(self._next_number)
            self._next_number += 1
        self._runs[run].until = None
        return self._runs[run].number

    def close(self, run: str) -> None:
        """End a run's captures; its rows are kept until it is released."""
        if run in self._runs:
            self._runs[run].until = self._turn

    def release(self, run: str) -> None:
        """Drop a run's rows; no effect if it was already released.

        When less than half of a chunk belongs to kept runs, their rows are copied out and the chunk is freed. This
        waits until the chunk has reached host memory and `SPARSE_TURNS` more chunks were added: runs are often released
        in quick succession, and a chunk without kept rows is freed without a copy.
        """
        if run not in self._runs:
            return
        chunks = self._chunks_of(self._runs[run])
        number = self._runs.pop(run).number
        self._numbers.discard(number)
        for turn, chunk in chunks:
            chunk.live_bytes -= chunk.bytes_of_runs[number]
            if chunk.live_bytes <= 0:
                del self._chunks[turn]
            elif 2 * chunk.live_bytes < chunk.stride:
                self._sparse.setdefault(turn, self._turn)
        if sum(self._chunks[turn].stride for turn in self._sparse if turn in self._chunks) > MAX_SPARSE_BYTES:
            self._shrink(0)

    def _shrink(self, turns: int) -> None:
        """Shrink chunks that are in host memory and have been sparse for at least `turns` added chunks."""
        for turn, since in list(self._sparse.items()):
            chunk = self._chunks.get(turn)
            if chunk is None:
                del self._sparse[turn]
            elif self._turn - since >= turns and chunk.has_arrived:
                del self._sparse[turn]
                chunk.shrink([number for number in chunk.bytes_of_runs if number in self._numbers])

    @property
    def bytes(self) -> int:
        """Host memory of captures in bytes, including pending copies."""
        self._count(len(self._uncounted))
        self._shrink(0)
        return sum(chunk.steps * chunk.stride for chunk in self._chunks.values())

    def add(self, chunk: CaptureChunk) -> None:
        """Add a chunk, kept until all its runs are released. Steps may still be appended to the chunk."""
        if self._sparse:
            self._shrink(SPARSE_TURNS)
        self._chunks[self._turn] = chunk
        self._uncounted.append(self._turn)
        self._turn += 1
        if len(self._uncounted) > MAX_UNCOUNTED:
            self._count(1)

    def _count(self, chunks: int) -> None:
        """Compute `live_bytes` of the `chunks` oldest uncounted chunks; counting is deferred to batch the work."""
        for _ in range(chunks):
            turn = self._uncounted.popleft()
            chunk = self._chunks[turn]
            chunk.live_bytes = sum(size for run, size in chunk.bytes_of_runs.items() if run in self._numbers)
            if chunk.live_bytes == 0:
                del self._chunks[turn]

    def _chunks_of(self, run: KeptRun) -> list[tuple[int, CaptureChunk]]:
        """Return a run's (turn, chunk) pairs, oldest first."""
        until = self._turn if run.until is None else run.until
        while self._uncounted and self._uncounted[0] < until:
            self._count(1)
        chunks = ((turn, self._chunks.get(turn)) for turn in range(run.since, until))
        return [(turn, chunk) for turn, chunk in chunks if chunk is not None and run.number in chunk.bytes_of_runs]

    def fetch(self, run: str, point: int, op: int | None = None, first: int = 0) -> tuple[np.ndarray, torch.Tensor]:
        """Return the captured positions [T], ascending from `first`, and their rows [T, W], for op `op` or, if None,
        for all ops at the point except probes and self-checks.

        If an op captured a position twice (after preemption), its first row wins, or its last with `keeps_last`;
        between two ops, the later op wins. Raises `MissingSource` for a run that is not kept.
        """
        return tensors_of(self.find([(run, point, op, first)]))[0]

    def gather(
        self, runs: Sequence[str], point: int, op: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
        """Gather a point's rows in many runs. Returns each row's index in `runs` [R], its position [R], and the rows
        [R, W] as one tensor, ascending by run and position; a view of a chunk if contiguous. Duplicates are resolved
        as in `fetch`. Runs must be distinct."""
        self._check_kept(runs)
        self._flush()
        kept = [self._runs[run] for run in runs]
        numbers = np.array([run.number for run in kept])
        order = np.argsort(numbers)
        turns = range(
            min(run.since for run in kept), max(self._turn if run.until is None else run.until for run in kept)
        )
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, StoredRows]] = []
        how = 0
        for turn in turns:
            if (chunk := self._chunks.get(turn)) is None:
                continue
            table = chunk.table
            of_site = (table["op"] >= 0) & (table["op"] < PROBE)
            held = (table["point"] == point) & (of_site if op is None else table["op"] == op)
            at = order[np.minimum(np.searchsorted(numbers[order], table["run"]), len(numbers) - 1)]
            table = table[held & (numbers[at] == table["run"])]
            how = max(how, int(table["pool"].max(initial=0)))
            kinds = np.stack([table["row_bytes"], table["offset"] % table["row_bytes"], table["dtype"]])
            is_uniform = len(table) > 0 and bool((kinds == kinds[:, :1]).all())  # the usual case; needs no sorting
            for key in kinds[:, :1].T if is_uniform else np.unique(kinds, axis=1).T:
                entries = table[(kinds == key[:, None]).all(0)]
                entry, position, pieces = chunk.gather(entries)
                dtype = _TORCH[key[2]]
                stored = StoredRows(position, pieces, dtype, int(key[0]) // dtype.itemsize)
                run = order[np.searchsorted(numbers[order], entries["run"])]
                age = np.full(len(entry), turn)
                pooled, span = entries["pooled"][entry], entries["span"][entry]
                parts.append((run[entry], position, entries["op"][entry], pooled, span, age, stored))
        if not parts:
            return NONE, NONE, torch.empty(0, self._widths[point])
        *labels, stored = zip(*parts, strict=True)
        run, position, ops, pooled, span, turn = map(np.concatenate, labels)
        if len({(each.dtype, each.width) for each in stored}) == 1:  # one array, copied by several threads
            joined = stored[0]._replace(positions=position, parts=[piece for each in stored for piece in each.parts])
            [(_, rows)] = tensors_of([joined])
        else:
            rows = torch.cat([rows.float() for _, rows in tensors_of(list(stored))])
        if how:  # pooled within steps; the caller pools runs that also read generated tokens
            some, rest = np.flatnonzero(pooled), np.flatnonzero(pooled == 0)
            labels = run[some], position[some], pooled[some], span[some], turn[some]
            reduced = _pooled(*labels, rows.numpy()[some], POOLS[how - 1])
            if not len(rest):
                return reduced
            run, position, ops = (
                np.concatenate([new, each[rest]])
                for new, each in zip(
                    (*reduced[:2], ops[some[:1]].repeat(len(reduced[0]))), (run, position, ops), strict=True
                )
            )
            rows = torch.cat([reduced[2], rows.float()[torch.from_numpy(rest)]])
        key = run * (1 << 31) + position
        if bool((np.diff(key) > 0).all()):
            return run, position, rows
        age = np.arange(len(key))
        order = np.lexsort((-age if self.keeps_last else age, -ops.astype(np.int64), key))
        order = order[np.append(True, np.diff(key[order]) > 0)]
        return run[order], position[order], rows.index_select(0, torch.from_numpy(order))

    def _check_kept(self, runs: Iterable[str]) -> None:
        for run in runs:
            if run not in self._runs:
                raise MissingSource(f"run {run} is not available: it was released, or captured nothing")

    def find(self, wanted: Iterable[tuple[str, int, int | None, int]]) -> list[StoredRows]:
        """Find the rows of each (run, point, op, first), as in `fetch`. Waits for pending copies."""
        wanted = list(wanted)
        self._check_kept(dict.fromkeys(run for run, *_ in wanted))
        self._flush()
        chunks_of: dict[str, list[CaptureChunk]] = {}
        known = dict[Any, np.ndarray]()
        stored: list[StoredRows] = []
        for run, point, op, first in wanted:
            if run not in chunks_of:
                chunks_of[run] = [chunk for _, chunk in self._chunks_of(self._runs[run])]
            number = self._runs[run].number
            if any(entry.pool for chunk in chunks_of[run] for entry in chunk.captured(number, point, op)):
                _, positions, rows = self.gather([run], point, op)
                data = rows.numpy().view(np.uint8)
                stored.append(StoredRows(positions, [data], rows.dtype, rows.shape[1]))
                continue
            parts = [(entry.op, chunk.rows(entry, first, known)) for chunk in chunks_of[run]
                     for entry in chunk.captured(number, point, op)
                     if not first or entry.position + entry.count + chunk.steps - 1 > first]  # fmt: skip
            rows = parts[0][1] if len(parts) == 1 else _joined(parts, self._widths[point], self.keeps_last)
            begin = int(np.searchsorted(rows.positions, first)) if first else 0
            stored.append(rows.window(begin, len(rows.positions)) if begin else rows)
        return stored


def _pooled(
    run: np.ndarray, position: np.ndarray, count: np.ndarray, span: np.ndarray, turn: np.ndarray, rows: np.ndarray,
    pool: str,
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:  # fmt: skip
    """Combine rows that were pooled per step into one row per run. Returns the run [R], its last position [R], and the
    row [R, W]. Of a preempted request's prefill passes, the one that got furthest counts (the first if equal).

    run, position, count, span, turn: each row's run, first position, number of pooled positions, span from the first
        to the last, and turn, [N]
    """
    order = np.lexsort((turn, run))
    run, position, count, turn, end = (each[order] for each in (run, position, count, turn, position + span))
    of_run = _begins(run)
    is_first = position == np.minimum.reduceat(position, of_run).repeat(np.diff(of_run, append=len(run)))
    of_turn = _begins(run, turn)
    starts = np.logical_or.reduceat(is_first, of_turn)  # also turns that restart a prompt
    passes = of_turn[starts]
    furthest = np.maximum.reduceat(end, passes)
    best = np.lexsort((-furthest, run[passes]))
    best = best[_begins(run[passes][best])]
    kept = np.flatnonzero(np.isin(np.cumsum(np.isin(np.arange(len(run)), passes)) - 1, best))
    begins, rows = _begins(run[kept]), rows[order[kept]]
    if len(begins) < len(kept):
        add = functools.partial(np.add.reduceat, dtype=np.float64)
        rows = (add if pool == "mean" else np.maximum.reduceat)(rows, begins)
    if pool == "mean":
        rows = rows / np.add.reduceat(count[kept], begins).astype(rows.dtype)[:, None]
    return run[kept[begins]], furthest[best] - 1, torch.from_numpy(rows.astype(np.float32, copy=False))


def _begins(*labels: np.ndarray) -> np.ndarray:
    """Return the start index of each stretch of equal labels."""
    return np.flatnonzero(np.append(True, np.any([np.diff(each) != 0 for each in labels], axis=0)))


class StoredRows(NamedTuple):
    """Rows [T, width] at positions [T], ascending. Their bytes are the concatenation of `parts`, views of chunks, each
    [S, n]."""

    positions: np.ndarray
    parts: list[np.ndarray]
    dtype: torch.dtype
    width: int

    def is_view(self, view_bytes: int) -> bool:
        """True if the rows are contiguous and have at least this many bytes."""
        return self.nbytes >= view_bytes and len(self.parts) == 1 and self.parts[0].flags.c_contiguous

    @property
    def nbytes(self) -> int:
        return len(self.positions) * self.width * self.dtype.itemsize

    def window(self, begin: int, end: int) -> StoredRows:
        """Return rows begin … end−1, clipped to the existing rows."""
        row_bytes, at, parts = self.width * self.dtype.itemsize, 0, list[np.ndarray]()
        for part in self.parts:
            parts += _between(part, max(begin * row_bytes - at, 0), min(end * row_bytes - at, part.size))
            at += part.size
        return self._replace(positions=self.positions[begin:end], parts=parts)

    def tensor(self, data: np.ndarray) -> torch.Tensor:
        """View `data`, these rows' bytes, as a tensor [T, W]."""
        return torch.from_numpy(data.reshape(-1)).view(self.dtype).view(-1, self.width)

    def copies(self, memory: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the copies, as (to, from) pairs, that write the rows' bytes contiguously to `memory`."""
        ends = itertools.accumulate(part.size for part in self.parts)
        return [
            (memory[end - part.size : end].reshape(part.shape), part)
            for end, part in zip(ends, self.parts, strict=True)
        ]


def _between(part: np.ndarray, begin: int, end: int) -> list[np.ndarray]:
    """Return bytes begin … end−1 of a part [S, n] as 2-D views: end of a step, whole steps, start of a step."""
    views, size = [], part.shape[1]
    while begin < end:
        step, at = divmod(begin, size)
        whole = (end - begin) // size if at == 0 else 0
        view = part[step : step + whole] if whole else part[step : step + 1, at : min(size, at + end - begin)]
        views.append(view)
        begin += view.size
    return views


def tensors_of(stored: list[StoredRows], view_bytes: int = MIN_VIEW_BYTES) -> list[tuple[np.ndarray, torch.Tensor]]:
    """Return the positions and rows of each item: a view if at least `view_bytes` are contiguous in a chunk, otherwise
    a copy (all copies are made together). Chunks are not overwritten while a view is held."""
    copied = [rows for rows in stored if not rows.is_view(view_bytes)]
    begins, size = side_by_side(copied)
    memory = reused.take(size)
    places = [memory[begin : begin + rows.nbytes] for rows, begin in zip(copied, begins, strict=True)]
    copy_bytes([pair for rows, place in zip(copied, places, strict=True) for pair in rows.copies(place)])
    if len({(rows.dtype, rows.width) for rows in copied}) == 1 and size == sum(rows.nbytes for rows in copied):
        tensors = iter(copied[0].tensor(memory[:size]).split([len(rows.positions) for rows in copied]))  # much faster
    else:
        tensors = (rows.tensor(place) for rows, place in zip(copied, places, strict=True))
    return [(rows.positions, rows.tensor(rows.parts[0]) if rows.is_view(view_bytes) else next(tensors))
            for rows in stored]  # fmt: skip


def side_by_side(stored: list[StoredRows]) -> tuple[list[int], int]:
    """Return each item's aligned offset in one contiguous buffer, and the buffer's size in bytes."""
    ends = list(itertools.accumulate((-(-rows.nbytes // ALIGNED) * ALIGNED for rows in stored), initial=0))
    return ends[:-1], ends[-1]


def _joined(parts: list[tuple[int, StoredRows]], width: int, keeps_last: bool) -> StoredRows:
    """Join (op, rows) pairs. For equal positions the later op wins; within an op, the first row, or the last if
    `keeps_last`. Mixed dtypes become fp32. `width`: the row width of an empty result."""
    of_entry = [rows for _, rows in parts]
    width = of_entry[0].width if parts else width
    positions = np.concatenate([np.zeros(0, np.int64), *(rows.positions for rows in of_entry)])
    dtypes = {rows.dtype for rows in of_entry} or {torch.float32}
    ascending = bool((np.diff(positions) > 0).all())
    if ascending and len(dtypes) == 1:
        return StoredRows(positions, [part for rows in of_entry for part in rows.parts], dtypes.pop(), width)
    tensors = [rows for _, rows in tensors_of(of_entry)]
    joined = torch.cat(tensors if len(dtypes) == 1 else [rows.float() for rows in tensors])
    if not ascending:
        ops = np.repeat([op for op, _ in parts], [len(rows) for rows in tensors])
        age = np.arange(len(positions))
        order = np.lexsort((-age if keeps_last else age, -ops, positions))
        positions, first = np.unique(positions[order], return_index=True)
        joined = joined[torch.from_numpy(order[first])]
    data = joined.view(torch.uint8).numpy()
    return StoredRows(positions, [data], joined.dtype, width)


def _split_by_run(table: np.ndarray) -> dict[int, np.ndarray]:
    """Split a table that is sorted by run into one table per run."""
    parts = np.split(table, np.flatnonzero(np.diff(table["run"])) + 1)
    return {int(part["run"][0]): part for part in parts if len(part)}
