"""Captured rows: kept as the kernel left them, many steps in a piece; sorted out by run and position when fetched.

S steps · C capture records of a step · W width · T positions
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import torch

from patchclamp.errors import MissingSource
from patchclamp.spec.ops import DTYPES


class Block:
    """Host memory that captured rows lie in, or will: flat, fp32 numbers or bytes. None until it is on its way."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: torch.Tensor | None = None) -> None:
        self.data = data


class Place(msgspec.Struct):
    """Where some steps' rows lie in a block, from `offset` on, `stride` apart."""

    block: Block
    offset: int
    steps: int = 1


class Captured(msgspec.Struct):
    """What some steps captured that captured alike: run, point, op, position, count and place in a step; each [C].

    Record c has `count[c]` positions from `begin[c]` on in the first step, and in each further step those one further.
    Sizes are in the blocks' units: fp32 numbers, or bytes, of which a record's rows are in its `dtype` (a number into
    `DTYPES`).  After `sort_out`: `runs` numbers the runs that have rows here, `held` is what of a step is theirs, and
    `live` the part of it that belongs to runs still kept.
    """

    places: list[Place]
    stride: int
    run: np.ndarray
    point: np.ndarray
    op: np.ndarray
    begin: np.ndarray
    count: np.ndarray
    target: np.ndarray
    dtype: np.ndarray
    runs: dict[int, int] = {}
    held: list[int] = []
    live: int = 0
    order: np.ndarray | None = None
    bounds: list[int] = []

    def sort_out(self, widths: np.ndarray) -> None:
        """Finds out whose the records are, and how much of it."""
        live = np.flatnonzero(self.count)
        if len(live) == 0:
            self.runs, self.held = {}, []
            return
        run = self.run[live]
        run -= run.min()
        order = np.argsort(run.astype(np.int16) if run.max() < 1 << 15 else run, kind="stable")
        self.order, run = live[order], run[order]
        begins = np.concatenate(([0], np.flatnonzero(np.diff(run)) + 1))
        self.bounds = [*begins.tolist(), len(live)]
        self.runs = dict(zip(self.run[self.order[begins]].tolist(), range(len(begins)), strict=True))
        self.held = np.add.reduceat(self.sizes(widths).take(self.order), begins).tolist()

    def of(self, number: int) -> np.ndarray:
        """The records of a run that have rows."""
        assert self.order is not None
        i = self.runs[number]
        return self.order[self.bounds[i] : self.bounds[i + 1]]

    @property
    def steps(self) -> int:
        return sum(place.steps for place in self.places)

    @property
    def arrived(self) -> bool:
        """Whether all of it is on the host, or on its way there."""
        return all(place.block.data is not None for place in self.places)

    @property
    def in_bytes(self) -> bool:
        return any(place.block.data is None or place.block.data.dtype == torch.uint8 for place in self.places)

    def alike(self, stride: int, target: np.ndarray) -> bool:
        """Whether another step's rows lie as these do."""
        return stride == self.stride and (target is self.target or np.array_equal(target, self.target))

    def grow(self, block: Block, offset: int) -> None:
        """One step more."""
        last = self.places[-1]
        if block is last.block and offset == last.offset + last.steps * self.stride:
            last.steps += 1
        else:
            self.places.append(Place(block, offset))

    def positions(self, c: int) -> np.ndarray:
        """The positions of record c, [S · count]."""
        return (self.begin[c] + np.arange(self.steps)[:, None] + np.arange(self.count[c])).reshape(-1)

    def dtype_of(self, c: int) -> torch.dtype:
        return _TORCH[int(self.dtype[c])] if self.in_bytes else torch.float32

    def sizes(self, widths: np.ndarray) -> np.ndarray:
        """What each record takes of a step, [C]."""
        found = widths.take(self.point)
        found *= self.count
        if self.in_bytes:
            found *= ITEM_BYTES.take(self.dtype)
        return found

    def parts(self, c: int, width: int) -> list[np.ndarray]:
        """The bytes of record c's rows, [S, size] for each place, as views."""
        item = ITEM_BYTES[self.dtype[c]] if self.in_bytes else 4
        unit = 1 if self.in_bytes else 4
        begin, size = unit * int(self.target[c]), int(self.count[c]) * width * int(item)
        return [steps[:, begin : begin + size] for steps in self._steps()]

    def shrink(self, kept: list[int], widths: np.ndarray) -> None:
        """Moves the rows of some runs to memory of their own, and forgets the others."""
        mine = np.sort(np.concatenate([self.of(number) for number in kept]))
        unit, sizes, old = 1 if self.in_bytes else 4, self.sizes(widths)[mine], self.target[mine]
        taken = -(-sizes // ALIGNED) * ALIGNED
        ends, dtype = np.cumsum(taken), torch.uint8 if self.in_bytes else torch.float32
        new = torch.empty(self.steps, int(ends[-1]), dtype=dtype)
        target, at = ends - taken, 0
        for steps in self._steps():
            to = new[at : at + len(steps)].numpy().view(np.uint8)
            at += len(steps)
            if (sizes == sizes[0]).all() and (old % sizes[0] == 0).all() and self.stride % sizes[0] == 0:
                width = unit * int(sizes[0])
                rows = steps.reshape(len(steps), -1, width)[:, old // sizes[0]]
                to.reshape(len(steps), len(mine), -1)[:, :, :width] = rows
                continue
            for begin, end, size in zip(unit * target, unit * old, unit * sizes, strict=True):
                to[:, begin : begin + size] = steps[:, end : end + size]
        self.places, self.stride = [Place(Block(new.reshape(-1)), 0, len(new))], new.shape[1]
        self.run, self.point, self.op, self.dtype = self.run[mine], self.point[mine], self.op[mine], self.dtype[mine]
        self.begin, self.count, self.target = self.begin[mine], self.count[mine], target
        self.sort_out(widths)

    def _steps(self) -> list[np.ndarray]:
        """The bytes of every step, [S, stride] for each place, as views."""
        found = []
        for place in self.places:
            assert place.block.data is not None
            data = place.block.data.numpy()
            steps = data[place.offset : place.offset + place.steps * self.stride]
            found.append(steps.view(np.uint8).reshape(place.steps, -1))
        return found


ALIGNED = 16  # in either unit
MOST_NEW = 8  # pieces that wait to be sorted out
_TORCH = tuple(getattr(torch, name) for name in DTYPES)
ITEM_BYTES = np.array([dtype.itemsize for dtype in _TORCH])


class CaptureStore:
    """Captured rows of every run that has not been released. `flush` brings to the host what is still on its way."""

    def __init__(self, widths: np.ndarray, flush: Callable[[], None] = lambda: None) -> None:
        self._widths, self._flush = widths, flush
        self._number: dict[str, int] = {}
        self._pieces: dict[int, list[Captured]] = {}
        self._new: list[Captured] = []  # not sorted out yet
        self._next = 0

    def __len__(self) -> int:
        """Runs kept."""
        return len(self._number)

    def __contains__(self, run: str) -> bool:
        return run in self._number

    def open(self, run: str) -> int:
        """Starts keeping a run; returns its number."""
        if run not in self._number:
            self._number[run] = self._next
            self._pieces[self._next] = []
            self._next += 1
        return self._number[run]

    def release(self, run: str) -> None:
        """Lets a run's rows go; a run that is not there is let go already.

        A piece that less than half belongs to runs still kept is copied out for them, and its memory freed; one that
        is still on its way is looked at again when the next of its runs goes.
        """
        self._sort_out()
        number = self._number.pop(run, -1)
        for piece in self._pieces.pop(number, ()):
            piece.live -= piece.held[piece.runs[number]]
            if 0 < 2 * piece.live < piece.stride and piece.arrived:
                self._flush()
                piece.shrink([number for number in piece.runs if number in self._pieces], self._widths)

    @property
    def bytes(self) -> int:
        """Host memory that captures hold, or will."""
        self._sort_out()
        pieces = {id(piece): piece for pieces in self._pieces.values() for piece in pieces}
        return sum(piece.steps * piece.stride * (1 if piece.in_bytes else 4) for piece in pieces.values())

    def add(self, piece: Captured) -> None:
        """Keeps a piece, which may yet grow, for those of its runs that are kept."""
        self._new.append(piece)
        if len(self._new) > MOST_NEW:
            self._sort_out()

    def _sort_out(self) -> None:
        """Notes new pieces under their runs: what `add` leaves for when somebody asks, or for when they are many."""
        for piece in self._new:
            piece.sort_out(self._widths)
            for number, i in piece.runs.items():
                pieces = self._pieces.get(number)
                if pieces is not None:
                    pieces.append(piece)
                    piece.live += piece.held[i]
        self._new = []

    def fetch(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, torch.Tensor]:
        """Positions [T] ascending and their rows [T, W], of one op or of all that captured there.

        A position captured again by the same op (after preemption) keeps its first rows; of two ops the later counts.
        Raises `MissingSource` for a run that is not kept.
        """
        where, records, chosen = self._find(run, point, op)
        return where, _gather(records, chosen, int(self._widths[point]))

    def parts(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, list[torch.Tensor]]:
        """The same with the rows in contiguous parts [n, W], as they lie where they can be."""
        where, records, chosen = self._find(run, point, op)
        width = int(self._widths[point])
        dtypes = {piece.dtype_of(c) for piece, c in records}
        if chosen is None and len(dtypes) == 1:
            found = [part for piece, c in records for part in piece.parts(c, width)]
            if all(part.flags.c_contiguous for part in found):
                dtype = dtypes.pop()
                return where, [torch.from_numpy(part.reshape(-1)).view(dtype).view(-1, width) for part in found]
        return where, [_gather(records, chosen, width)]

    def _find(self, run: str, point: int, op: int | None) -> tuple[np.ndarray, list[Record], np.ndarray | None]:
        """Positions, the records that hold rows of them, and which of all their rows count (None: all, in order)."""
        if run not in self._number:
            raise MissingSource(f"run {run} is not here: it was released, or captured nothing")
        self._flush()
        self._sort_out()
        number, records = self._number[run], []
        positions, ops = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for piece in self._pieces[number]:
            mine = piece.of(number)
            mine = mine[piece.point[mine] == point]
            for c in mine if op is None else mine[piece.op[mine] == op]:
                positions.append(piece.positions(int(c)))
                ops.append(np.full(len(positions[-1]), piece.op[c]))
                records.append((piece, int(c)))
        where, by = np.concatenate(positions), np.concatenate(ops)
        if bool((np.diff(where) > 0).all()):
            return where, records, None
        order = np.lexsort((np.arange(len(where)), -by, where))
        found, first = np.unique(where[order], return_index=True)
        return found, records, order[first]


Record = tuple[Captured, int]


def _gather(records: list[Record], chosen: np.ndarray | None, width: int) -> torch.Tensor:
    """The rows of several records, side by side in new memory [T, W]; of them those chosen, in that order."""
    if not records:
        return torch.zeros(0, width)
    dtypes = {piece.dtype_of(c) for piece, c in records}
    if len(dtypes) > 1:
        joined = torch.cat([_gather([record], None, width).float() for record in records])
    else:
        rows = sum(piece.steps * int(piece.count[c]) for piece, c in records)
        joined, at, copies = torch.empty(rows, width, dtype=dtypes.pop()), 0, []
        memory = joined.view(-1).view(torch.uint8).numpy()
        for piece, c in records:
            for part in piece.parts(c, width):
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
