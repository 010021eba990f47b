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


class Captured(msgspec.Struct):
    """What `steps` steps captured: run, point, op, first position, positions a step, where the rows begin; each [C].

    Step s lies `s · stride` after `offset` in the block, and its positions are s further on.  Sizes are in the block's
    units: fp32 numbers, or bytes, of which a record's rows are in its `dtype` (a number into `DTYPES`).  `of` gives
    for each run its records that have rows.
    """

    block: Block
    offset: int
    stride: int
    run: np.ndarray
    point: np.ndarray
    op: np.ndarray
    begin: np.ndarray
    count: np.ndarray
    target: np.ndarray
    dtype: np.ndarray
    steps: int = 1
    of: dict[int, np.ndarray] = {}

    def __post_init__(self) -> None:
        self.of = self.of or _by_run(self.run, self.count)

    def later(self, block: Block, offset: int, begin: np.ndarray) -> Captured:
        """The same rows of a later step, elsewhere."""
        return msgspec.structs.replace(self, block=block, offset=offset, begin=begin, steps=1)

    def alike(self, stride: int, target: np.ndarray) -> bool:
        """Whether another step's rows lie as these do."""
        return stride == self.stride and (target is self.target or np.array_equal(target, self.target))

    def goes_on(self, block: Block, offset: int) -> bool:
        """Whether memory at `offset` of a block is where one more step would lie."""
        return block is self.block and offset == self.offset + self.steps * self.stride

    def rows(self, c: int, width: int) -> torch.Tensor:
        """The rows of record c, [S, count, W], as a view."""
        data, dtype = self.block.data, _TORCH[int(self.dtype[c])]
        assert data is not None
        unit = dtype.itemsize if data.dtype == torch.uint8 else 1
        numbers = data.view(dtype) if data.dtype == torch.uint8 else data
        count, begin = int(self.count[c]), (self.offset + int(self.target[c])) // unit
        shape, strides = (self.steps, count, width), (self.stride // unit, width, 1)
        return numbers.as_strided(shape, strides, numbers.storage_offset() + begin)

    def positions(self, c: int) -> np.ndarray:
        """The positions of record c, [S · count]."""
        return (self.begin[c] + np.arange(self.steps)[:, None] + np.arange(self.count[c])).reshape(-1)

    def sizes(self, widths: np.ndarray) -> np.ndarray:
        """What each record takes of a step, [C]."""
        data = self.block.data
        bytes_ = data is None or data.dtype == torch.uint8
        return self.count * widths[self.point] * (ITEM_BYTES[self.dtype] if bytes_ else 1)

    def only(self, numbers: list[int], widths: np.ndarray) -> Captured:
        """The same for some runs alone, in memory of its own."""
        data, mine = self.block.data, np.sort(np.concatenate([self.of[number] for number in numbers]))
        assert data is not None
        sizes = self.sizes(widths)[mine]
        ends = np.cumsum(-(-sizes // ALIGNED) * ALIGNED)
        old = data[self.offset :].as_strided((self.steps, self.stride), (self.stride, 1))
        new = torch.empty(self.steps, int(ends[-1]), dtype=data.dtype)
        target = np.concatenate(([0], ends[:-1]))
        for c, to, size in zip(mine, target, sizes, strict=True):
            new[:, to : to + size] = old[:, int(self.target[c]) : int(self.target[c]) + int(size)]
        return Captured(
            Block(new.reshape(-1)), 0, new.shape[1], self.run[mine], self.point[mine], self.op[mine],
            self.begin[mine], self.count[mine], target, self.dtype[mine], self.steps,
        )  # fmt: skip


def _by_run(run: np.ndarray, count: np.ndarray) -> dict[int, np.ndarray]:
    """The numbers of the records of each run that have rows."""
    live = np.flatnonzero(count)
    order = live[np.argsort(run[live], kind="stable")]
    runs, starts = np.unique(run[order], return_index=True)
    return {int(number): mine for number, mine in zip(runs, np.split(order, starts[1:]), strict=False)}


ALIGNED = 16  # in either unit
_TORCH = tuple(getattr(torch, name) for name in DTYPES)
ITEM_BYTES = np.array([dtype.itemsize for dtype in _TORCH])


class CaptureStore:
    """Captured rows of every run that has not been released. `flush` brings to the host what is still on its way."""

    def __init__(self, widths: np.ndarray, flush: Callable[[], None] = lambda: None) -> None:
        self._widths, self._flush = widths, flush
        self._number: dict[str, int] = {}
        self._pieces: dict[int, list[Captured]] = {}
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
        for piece in self._pieces.pop(self._number.pop(run, -1), ()):
            if piece.block.data is None:
                continue
            kept = [number for number in piece.of if number in self._pieces]
            sizes = piece.sizes(self._widths)
            if kept and 2 * sum(int(sizes[piece.of[number]].sum()) for number in kept) < piece.stride:
                self._flush()
                smaller = piece.only(kept, self._widths)
                for number in kept:
                    self._pieces[number] = [smaller if other is piece else other for other in self._pieces[number]]

    @property
    def bytes(self) -> int:
        """Host memory that captures hold, or will."""
        pieces = {id(piece): piece for pieces in self._pieces.values() for piece in pieces}
        return sum(
            piece.steps * piece.stride * (1 if piece.block.data is None else piece.block.data.itemsize)
            for piece in pieces.values()
        )

    def add(self, piece: Captured) -> None:
        for number in piece.of:
            kept = self._pieces.get(number)
            if kept is not None:
                kept.append(piece)

    def fetch(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, torch.Tensor]:
        """Positions [T] ascending and their rows [T, W], of one op or of all that captured there.

        A position captured again by the same op (after preemption) keeps its first rows; of two ops the later counts.
        Raises `MissingSource` for a run that is not kept.
        """
        where, rows, chosen = self._find(run, point, op)
        return where, _gather(rows, chosen, int(self._widths[point]))

    def parts(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, list[torch.Tensor]]:
        """The same with the rows in contiguous parts [n, W], as they lie where they can be."""
        where, rows, chosen = self._find(run, point, op)
        whole = chosen is None and len({part.dtype for part in rows}) == 1
        if whole and all(part.is_contiguous() for part in rows):
            return where, [part.view(-1, part.shape[-1]) for part in rows]
        return where, [_gather(rows, chosen, int(self._widths[point]))]

    def _find(self, run: str, point: int, op: int | None) -> tuple[np.ndarray, list[torch.Tensor], np.ndarray | None]:
        """Positions, the rows of every record as views, and which of all those rows count (None: all, in order)."""
        if run not in self._number:
            raise MissingSource(f"run {run} is not here: it was released, or captured nothing")
        self._flush()
        number, width = self._number[run], int(self._widths[point])
        positions, ops, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], []
        for piece in self._pieces[number]:
            mine = piece.of[number]
            mine = mine[piece.point[mine] == point]
            for c in mine if op is None else mine[piece.op[mine] == op]:
                positions.append(piece.positions(int(c)))
                ops.append(np.full(len(positions[-1]), piece.op[c]))
                rows.append(piece.rows(int(c), width))
        where, by = np.concatenate(positions), np.concatenate(ops)
        if bool((np.diff(where) > 0).all()):
            return where, rows, None
        order = np.lexsort((np.arange(len(where)), -by, where))
        found, first = np.unique(where[order], return_index=True)
        return found, rows, order[first]


def _gather(rows: list[torch.Tensor], chosen: np.ndarray | None, width: int) -> torch.Tensor:
    """Rows [S, count, W] of several records, side by side in new memory [T, W]; of them those chosen, in that order."""
    if not rows:
        return torch.zeros(0, width)
    dtype = rows[0].dtype if len({part.dtype for part in rows}) == 1 else torch.float32
    ends = np.cumsum([part.shape[0] * part.shape[1] for part in rows])
    joined = torch.empty(int(ends[-1]), width, dtype=dtype)
    to = [new.view(part.shape) for new, part in zip(joined.tensor_split(ends[:-1].tolist()), rows, strict=True)]
    if joined.nbytes < 2 * _SHARE:
        for new, old in zip(to, rows, strict=True):
            new.copy_(old)
    else:
        shares = [share for new, old in zip(to, rows, strict=True) for share in _shares(new, old)]
        list(_copiers.map(lambda share: _copy(*share), shares))
    return joined if chosen is None else joined[torch.from_numpy(chosen)]


def _shares(new: torch.Tensor, old: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A copy cut into shares for several threads, along its longest axis."""
    axis = 0 if new.shape[0] >= new.shape[1] else 1
    rows = max(_SHARE * new.shape[axis] // max(new.nbytes, 1), 1)
    return list(zip(new.split(rows, axis), old.split(rows, axis), strict=True))


_SHARE = 1 << 22  # bytes
_copiers = ThreadPoolExecutor(8, thread_name_prefix="patchclamp-copy")


def _copy(new: torch.Tensor, old: torch.Tensor) -> None:
    with torch.inference_mode():
        new.copy_(old)
