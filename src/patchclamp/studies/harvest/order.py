"""In which order the rows of several parts are read: an exact shuffle of all, with every part read from end to end.

Each part is shuffled by itself when it is written. Its rows keep their order here, and the parts are interleaved at
random, each in proportion to its rows: of all ways to lay the parts' numbers in a row, any is as likely as another. Any
order of all rows is then as likely as any other, and nothing is written anew.

The way is drawn block by block: how many rows of each part a block has is drawn as from an urn of all that are left
(multivariate hypergeometric), and the block is shuffled. So any place is found without the places before it.

    N rows · K parts · B blocks
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from patchclamp.errors import ProgramError

BLOCK = 4096
MORE_SHARDS = 8
MOST_ROWS = 10**9  # of what NumPy draws from at a time
_COUNTS, _LABELS = 1, 2  # what is drawn
Columns = Callable[[int], Mapping[str, np.ndarray]]
"""A shard's columns, by its number: arrays [rows, …]."""


class ReadingOrder:
    """The order of the rows of shards, by their numbers.

    rows: of every shard; parts: the part that each shard is of, ascending
    """

    def __init__(self, rows: Sequence[int], parts: Sequence[int], seed: int) -> None:
        self._seed = seed
        self._ends = np.append(0, np.cumsum(rows)).astype(np.int64)  # of shards, in stored rows
        numbers = np.unique(np.asarray(parts, np.int64))
        of_part = [self._ends[np.searchsorted(parts, part)] for part in numbers]
        self._first = np.array([*of_part, self._ends[-1]])  # the first stored row of each part, and the end

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def is_stored(self) -> bool:
        """Whether rows are read as they are stored: there is one part."""
        return len(self._first) <= 2

    @property
    def most_open(self) -> int:
        """How many shards are open at a time: one of each part, and some more."""
        return len(self._first) - 1 + MORE_SHARDS

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """How many rows of each part come before each block, [B + 1, K]."""
        left = np.diff(self._first)
        if left.sum() >= MOST_ROWS:
            raise ProgramError(
                f"rows of several parts are interleaved up to {MOST_ROWS:,} of them, and these are {left.sum():,}: "
                "Harvested(folder, interleave=False) reads part after part", "folder"
            )  # fmt: skip
        draw, before = np.random.default_rng((_COUNTS, self._seed)), [np.zeros_like(left)]
        while left.any():
            counts = draw.multivariate_hypergeometric(left, min(BLOCK, int(left.sum())), method="marginals")
            left = left - counts
            before.append(before[-1] + counts)
        return np.array(before)

    def _labels(self, block: int) -> np.ndarray:
        """The part of each place of a block."""
        counts = self._before[block + 1] - self._before[block]
        labels = np.repeat(np.arange(len(counts)), counts)
        return np.random.default_rng((_LABELS, self._seed, block)).permutation(labels)

    def block(self, number: int) -> np.ndarray:
        """The stored row at each place of a block, int64 [n]."""
        labels = self._labels(number)
        rows = np.empty(len(labels), np.int64)
        for part, (first, before) in enumerate(zip(self._first[:-1], self._before[number], strict=True)):
            places = np.flatnonzero(labels == part)
            rows[places] = first + before + np.arange(len(places))
        return rows

    def stored(self) -> np.ndarray:
        """The stored row at each place, int64 [N]."""
        if self.is_stored:
            return np.arange(len(self))
        return np.concatenate([self.block(number) for number in range(len(self._before) - 1)])

    def place(self, number: int, block: Callable[[int], np.ndarray]) -> tuple[int, int]:
        """The shard of the row at a place, and its number there. `block`: as `self.block`, which remembers some."""
        row = number if self.is_stored else int(block(number // BLOCK)[number % BLOCK])
        shard = int(np.searchsorted(self._ends, row, side="right")) - 1
        return shard, row - int(self._ends[shard])

    def read(
        self, columns: Columns, begin: int = 0, end: int | None = None, most: int = BLOCK
    ) -> Iterator[dict[str, np.ndarray]]:
        """Rows at places `begin` to `end` in order, `most` at a time at most, by column."""
        end = len(self) if end is None else end
        if self.is_stored:
            yield from self._slices(columns, begin, end, most)
            return
        opened = functools.lru_cache(self.most_open)(columns)
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            first = number * BLOCK
            rows = self.block(number)[max(begin - first, 0) : end - first]
            for at in range(0, len(rows), most):
                yield self._gathered(opened, rows[at : at + most])

    def _slices(self, columns: Columns, begin: int, end: int, most: int) -> Iterator[dict[str, np.ndarray]]:
        """Stored rows as they lie, mapped and not copied."""
        for shard, (first, last) in enumerate(zip(self._ends[:-1].tolist(), self._ends[1:].tolist(), strict=True)):
            low, high = max(begin, first), min(end, last)
            if low < high:
                of_shard = columns(shard)
                for at in range(low, high, most):
                    part = slice(at - first, min(at + most, high) - first)
                    yield {name: array[part] for name, array in of_shard.items()}

    def _gathered(self, columns: Columns, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Stored rows, copied together. Of each shard they are ascending, and next to each other."""
        shards = np.searchsorted(self._ends, rows, side="right") - 1
        gathered: dict[str, np.ndarray] = {}
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            first = int(rows[places[0]] - self._ends[shard])
            for name, array in columns(shard).items():
                if name not in gathered:
                    gathered[name] = np.empty((len(rows), *array.shape[1:]), array.dtype)
                gathered[name][places] = array[first : first + len(places)]
        return gathered
