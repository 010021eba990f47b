"""Captured rows: kept as the kernel left them, many steps in a piece; sorted out by run and position when fetched.

S steps · C spans, G spreads and A areas of a step (`store.spans`) · W width · T positions
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import torch

from patchclamp.errors import MissingSource
from patchclamp.language.ops import DTYPES
from patchclamp.store.spans import Spans


class HostBlock:
    """Host memory that captured rows lie in, or will: flat, fp32 numbers or bytes. None until it is on its way."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: torch.Tensor | None = None) -> None:
        self.data = data


class BufferSlice(msgspec.Struct):
    """Where some steps' rows lie in a block, from `offset` on, one step after the other."""

    block: HostBlock
    offset: int
    steps: int = 1

    @property
    def blocks(self) -> list[HostBlock]:
        return [self.block]

    def cut(self, begin: int, end: int, stride: int) -> np.ndarray:
        """The numbers begin … end−1 of each step of `stride`, [S, end − begin], as a view."""
        assert self.block.data is not None
        data = self.block.data.numpy()[self.offset : self.offset + self.steps * stride]
        return data.reshape(self.steps, stride)[:, begin:end]


class ScatteredSlices(msgspec.Struct):
    """One step's rows in several places: its numbers begin … end−1 lie in a block from `offset` on, for each of
    `parts`, of which the first that holds a number counts."""

    parts: list[tuple[int, int, HostBlock, int]]
    steps: int = 1

    @property
    def blocks(self) -> list[HostBlock]:
        return [block for _, _, block, _ in self.parts]

    def cut(self, begin: int, end: int, stride: int) -> np.ndarray:
        first, _, block, offset = next(part for part in self.parts if part[0] <= begin and end <= part[1])
        assert block.data is not None
        return block.data.numpy()[None, offset + begin - first : offset + end - first]


class CaptureChunk(msgspec.Struct):
    """What some steps captured that captured alike: the same rows, in the same places of each step's `stride`.

    Span c of `spans` belongs to run `run[c]`, and has `count[c]` positions from `begin[c]` on in the first step, and in
    each further step those one further; its rows are those from `offset[c]` on of its spread's `rows`.  Area a begins
    at `base[a]`, in rows of `row[a]`.  Sizes are in the blocks' units: fp32 numbers, or bytes.  After `sort_out`:
    `runs` numbers the runs that have rows here, `held` is what of a step is theirs, and `live` the part of it that
    belongs to runs still kept.
    """

    places: list[BufferSlice | ScatteredSlices]
    stride: int
    spans: Spans
    run: np.ndarray
    begin: np.ndarray
    count: np.ndarray
    offset: np.ndarray
    rows: np.ndarray
    base: np.ndarray
    row: np.ndarray
    runs: dict[int, int] = {}
    held: list[int] = []
    live: int = 0
    order: np.ndarray | None = None
    bounds: list[int] = []

    def sort_out(self) -> None:
        """Finds out whose the spans are, and how much of a step is theirs."""
        live = np.flatnonzero(self.count)
        if len(live) == 0:
            self.runs, self.held = {}, []
            return
        run = self.run[live]
        order = np.argsort(run, kind="stable")
        self.order, run = live[order], run[order]
        begins = np.concatenate(([0], np.flatnonzero(np.diff(run)) + 1))
        self.bounds = [*begins.tolist(), len(live)]
        self.runs = dict(zip(run[begins].tolist(), range(len(begins)), strict=True))
        across = np.bincount(self.spans.owner, self.row, self.spans.spreads).astype(np.int64)
        sizes = self.count * across.take(self.spans.spread)
        self.held = np.add.reduceat(sizes.take(self.order), begins).tolist()

    def of(self, number: int) -> np.ndarray:
        """The spans of a run that have rows."""
        assert self.order is not None
        i = self.runs[number]
        return self.order[self.bounds[i] : self.bounds[i + 1]]

    @property
    def steps(self) -> int:
        return sum(place.steps for place in self.places)

    @property
    def arrived(self) -> bool:
        """Whether all of it is on the host, or on its way there."""
        return all(block.data is not None for place in self.places for block in place.blocks)

    @property
    def in_bytes(self) -> bool:
        data = (block.data for place in self.places for block in place.blocks)
        return any(found is None or found.dtype == torch.uint8 for found in data)

    def grow(self, place: BufferSlice | ScatteredSlices) -> None:
        """One step more."""
        last = self.places[-1]
        if isinstance(place, ScatteredSlices) or isinstance(last, ScatteredSlices) or place.block is not last.block:
            self.places.append(place)
        elif place.offset == last.offset + last.steps * self.stride:
            last.steps += 1
        else:
            self.places.append(place)

    def positions(self, c: int) -> np.ndarray:
        """The positions of span c, [S · count]."""
        return (self.begin[c] + np.arange(self.steps)[:, None] + np.arange(self.count[c])).reshape(-1)

    def dtype_of(self, a: int) -> torch.dtype:
        return _TORCH[int(self.spans.dtype[a])] if self.in_bytes else torch.float32

    def parts(self, c: int, a: int) -> list[np.ndarray]:
        """The bytes of span c's rows in area a, [S, size] for each place, as views."""
        begin, size = int(self.base[a] + self.offset[c] * self.row[a]), int(self.count[c] * self.row[a])
        return [place.cut(begin, begin + size, self.stride).view(np.uint8) for place in self.places]

    def shrink(self, kept: list[int]) -> None:
        """Moves the rows of some runs to memory of their own, and forgets the others."""
        mine = np.sort(np.concatenate([self.of(number) for number in kept]))
        spans, count, unit = self.spans.of(mine), self.count[mine], 1 if self.in_bytes else 4
        rows = np.bincount(spans.spread, count, spans.spreads).astype(np.int64)
        before = np.cumsum(count) - count  # in order of spread, as all spans are
        old = np.repeat(self.offset[mine] - before, count) + np.arange(int(count.sum()))  # rows of their spreads
        first = np.cumsum(rows) - rows
        taken = -(-rows[spans.owner] * self.row // ALIGNED) * ALIGNED
        base, stride = np.cumsum(taken) - taken, int(taken.sum())
        new = np.empty((self.steps, stride * unit), np.uint8)
        for a in np.flatnonzero(rows[spans.owner]).tolist():
            spread, size, at = int(spans.owner[a]), int(self.row[a]), 0
            begin, end = int(self.base[a]), int(self.base[a] + self.rows[spread] * size)
            chosen = old[first[spread] : first[spread] + rows[spread]]
            for place in self.places:
                all_rows = place.cut(begin, end, self.stride).view(np.uint8).reshape(place.steps, -1, size * unit)
                to = new[at : at + place.steps, base[a] * unit : (base[a] + len(chosen) * size) * unit]
                np.take(all_rows, chosen, 1, to.reshape(place.steps, -1, size * unit), "clip")
                at += place.steps
        data = torch.from_numpy(new.reshape(-1))
        self.places, self.stride = (
            [BufferSlice(HostBlock(data if unit == 1 else data.view(torch.float32)), 0, len(new))],
            stride,
        )
        self.run, self.begin, self.count, self.rows, self.base = self.run[mine], self.begin[mine], count, rows, base
        self.spans, self.offset = spans, before - first[spans.spread]
        self.sort_out()


ALIGNED = 16  # in either unit
MAX_UNSORTED = 8  # pieces that wait to be sorted out
_TORCH = tuple(getattr(torch, name) for name in DTYPES)
ITEM_BYTES = np.array([dtype.itemsize for dtype in _TORCH])


class _Run(msgspec.Struct):
    """A run's number, and the turns from `since` to before `until` (None: now) in which it may have captured."""

    number: int
    since: int
    until: int | None = None


class CaptureStore:
    """Captured rows of every run that has not been released. `flush` brings to the host what is still on its way."""

    def __init__(self, widths: np.ndarray, flush: Callable[[], None] = lambda: None) -> None:
        self._widths, self._flush = widths.tolist(), flush
        self._runs: dict[str, _Run] = {}
        self._numbers: set[int] = set()  # of runs kept
        self._pieces: dict[int, CaptureChunk] = {}  # by turn, a count of the pieces ever added
        self._new: collections.deque[int] = collections.deque()  # turns of pieces not sorted out yet
        self._turn = self._next = 0

    def __len__(self) -> int:
        """Runs kept."""
        return len(self._runs)

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    def open(self, run: str) -> int:
        """Starts keeping a run; returns its number."""
        if run not in self._runs:
            self._runs[run] = _Run(self._next, self._turn)
            self._numbers.add(self._next)
            self._next += 1
        self._runs[run].until = None
        return self._runs[run].number

    def close(self, run: str) -> None:
        """A run captures no more; what it has is kept until it is released."""
        if run in self._runs:
            self._runs[run].until = self._turn

    def release(self, run: str) -> None:
        """Lets a run's rows go; a run that is not there is let go already.

        A piece that less than half belongs to runs still kept is copied out for them, and its memory freed; one that
        is still on its way is looked at again when the next of its runs goes.
        """
        if run not in self._runs:
            return
        mine = self._of(self._runs[run])
        number = self._runs.pop(run).number
        self._numbers.discard(number)
        for turn, piece in mine:
            piece.live -= piece.held[piece.runs[number]]
            if piece.live <= 0:
                del self._pieces[turn]
            elif 2 * piece.live < piece.stride and piece.arrived:
                self._flush()
                piece.shrink([number for number in piece.runs if number in self._numbers])

    @property
    def bytes(self) -> int:
        """Host memory that captures hold, or will."""
        self._sort_out(len(self._new))
        return sum(piece.steps * piece.stride * (1 if piece.in_bytes else 4) for piece in self._pieces.values())

    def add(self, piece: CaptureChunk) -> None:
        """Keeps a piece, which may yet grow, for those of its runs that are kept."""
        self._pieces[self._turn] = piece
        self._new.append(self._turn)
        self._turn += 1
        if len(self._new) > MAX_UNSORTED:
            self._sort_out(1)

    def _sort_out(self, count: int) -> None:
        """Finds out whose the oldest new pieces are: left for when somebody asks, or for when they are many."""
        for _ in range(count):
            turn = self._new.popleft()
            piece = self._pieces[turn]
            piece.sort_out()
            known = zip(piece.runs, piece.held, strict=True)
            everyone = self._numbers.issuperset(piece.runs)
            piece.live = sum(piece.held) if everyone else sum(held for run, held in known if run in self._numbers)
            if piece.live == 0:
                del self._pieces[turn]

    def _of(self, run: _Run) -> list[tuple[int, CaptureChunk]]:
        """A run's pieces, each with its turn, oldest first."""
        until = self._turn if run.until is None else run.until
        while self._new and self._new[0] < until:
            self._sort_out(1)
        pieces = ((turn, self._pieces.get(turn)) for turn in range(run.since, until))
        return [(turn, piece) for turn, piece in pieces if piece is not None and run.number in piece.runs]

    def fetch(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, torch.Tensor]:
        """Positions [T] ascending and their rows [T, W], of one op or of all that captured there.

        A position captured again by the same op (after preemption) keeps its first rows; of two ops the later counts.
        Raises `MissingSource` for a run that is not kept.
        """
        where, records, chosen = self._find(run, point, op)
        return where, _gather(records, chosen, self._widths[point])

    def parts(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, list[torch.Tensor]]:
        """The same with the rows in contiguous parts [n, W], as they lie where they can be."""
        where, records, chosen = self._find(run, point, op)
        width = self._widths[point]
        dtypes = {piece.dtype_of(a) for piece, _, a in records}
        if chosen is None and len(dtypes) == 1:
            found = [part for piece, c, a in records for part in piece.parts(c, a)]
            if all(part.flags.c_contiguous for part in found):
                dtype = dtypes.pop()
                return where, [torch.from_numpy(part.reshape(-1)).view(dtype).view(-1, width) for part in found]
        return where, [_gather(records, chosen, width)]

    def _find(self, run: str, point: int, op: int | None) -> tuple[np.ndarray, list[Record], np.ndarray | None]:
        """Positions, the records that hold rows of them, and which of all their rows count (None: all, in order)."""
        if run not in self._runs:
            raise MissingSource(f"run {run} is not here: it was released, or captured nothing")
        self._flush()
        number, records = self._runs[run].number, []
        positions, ops = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for _, piece in self._of(self._runs[run]):
            for c in piece.of(number).tolist():
                a = piece.spans.area_of(c, point)
                if a is not None and op in (None, piece.spans.op[c]):
                    positions.append(piece.positions(c))
                    ops.append(np.full(len(positions[-1]), piece.spans.op[c]))
                    records.append((piece, c, a))
        where, by = np.concatenate(positions), np.concatenate(ops)
        if bool((np.diff(where) > 0).all()):
            return where, records, None
        order = np.lexsort((np.arange(len(where)), -by, where))
        found, first = np.unique(where[order], return_index=True)
        return found, records, order[first]


Record = tuple[CaptureChunk, int, int]  # a span of a piece, in an area


def _gather(records: list[Record], chosen: np.ndarray | None, width: int) -> torch.Tensor:
    """The rows of several records, side by side in new memory [T, W]; of them those chosen, in that order."""
    if not records:
        return torch.zeros(0, width)
    dtypes = {piece.dtype_of(a) for piece, _, a in records}
    if len(dtypes) > 1:
        joined = torch.cat([_gather([record], None, width).float() for record in records])
    else:
        rows = sum(piece.steps * int(piece.count[c]) for piece, c, _ in records)
        dtype = dtypes.pop()
        memory = np.empty(rows * width * dtype.itemsize, np.uint8)  # in huge pages where it is large, unlike torch's
        joined, at, copies = torch.from_numpy(memory).view(dtype).view(rows, width), 0, []
        for piece, c, a in records:
            for part in piece.parts(c, a):
                copies.append((memory[at : at + part.size].reshape(part.shape), part))
                at += part.size
        _copy_all(copies, at)
    return joined if chosen is None else joined[torch.from_numpy(chosen)]


_SHARE = 1 << 22  # bytes
_copiers = ThreadPoolExecutor(8, thread_name_prefix="patchclamp-copy")


def _copy_all(copies: list[tuple[np.ndarray, np.ndarray]], size: int) -> None:
    """Copies bytes, with several threads where they are many."""
    if size < 2 * _SHARE:
        for new, old in copies:
            new[:] = old
        return
    shares = []
    for new, old in copies:
        axis = 0 if new.shape[0] > 1 else 1
        pieces = max(-(-new.size // _SHARE), 1)
        shares += zip(np.array_split(new, pieces, axis), np.array_split(old, pieces, axis), strict=True)
    list(_copiers.map(lambda share: np.copyto(*share), shares))
