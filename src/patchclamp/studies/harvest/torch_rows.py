"""A harvest for PyTorch: rows by number (`Rows`), and batches from end to end (`Batches`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from patchclamp.errors import ProgramError

Values = torch.Tensor | dict[str, torch.Tensor]


class Rows(Dataset[Values]):
    """Row i of a data set as a tensor [D], or by site if there are several.

    Rows were shuffled when they were written, and parts are interleaved (`order`), so reading them in order is fast and
    already random.
    """

    def __init__(self, data: Any, sites: list[str]) -> None:
        self._data, self._sites, self._count = data, sites, len(data)
        data.array(sites[0])  # raises if there is none

    @functools.cached_property
    def _arrays(self) -> dict[str, list[np.ndarray]]:
        """The mapped rows of every shard, by site."""
        self._data.allow_files(self._sites, len(self._data.shards))
        return {site: [self._data.array(site, shard) for shard in self._data.shards] for site in self._sites}

    @functools.cached_property
    def _block(self) -> Callable[[int], np.ndarray]:
        """Blocks of the order; the most recent ones are cached."""
        return functools.lru_cache(64)(self._data.order.block)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the mapped files, which the receiving process maps itself."""
        return {name: value for name, value in vars(self).items() if name not in ("_arrays", "_block")}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Values:
        shard, row = self._row(number)
        values = {site: tensor(arrays[shard][row], self._data.dtype) for site, arrays in self._arrays.items()}
        return values if len(values) > 1 else next(iter(values.values()))

    def _row(self, number: int) -> tuple[int, int]:
        """The shard of a row, and its number there."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"there are {len(self)} rows, not {number}")
        return self._data.order.place(number % len(self), self._block)


class Batches(IterableDataset[Values]):
    """All rows in order, `size` at a time [size, D], or by site if there are several; the last batch may be shorter.

    With several workers of a `DataLoader` (with `batch_size=None`), each reads its own range. `repeat` starts again
    after the last row, without end.
    """

    def __init__(self, data: Any, sites: list[str], size: int, repeat: bool = False) -> None:
        if size < 1:
            raise ProgramError(f"a batch has at least one row, not {size}", "size")
        self.data, self.sites, self.size, self.repeat = data, sites, size, repeat
        data.array(sites[0])  # raises if there is none

    def __iter__(self) -> Iterator[Values]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        begin, end = (len(self.data) * i // count for i in (number, number + 1))
        return self._read(begin, end)

    def _pieces(self, begin: int, end: int) -> Iterator[dict[str, np.ndarray]]:
        """Rows in order, at most `size` at a time."""
        while begin < end:
            yield from self.data.order.read(self.data.columns(self.sites), begin, end, self.size)
            if not self.repeat:
                return

    def _read(self, begin: int, end: int) -> Iterator[Values]:
        """Batches in order, joined across the ends of pieces."""
        held: list[dict[str, torch.Tensor]] = []
        count = 0
        for piece in self._pieces(begin, end):
            at, rows = 0, len(piece[self.sites[0]])
            while at < rows:
                stop = min(rows, at + self.size - count)
                held.append({site: tensor(array[at:stop], self.data.dtype) for site, array in piece.items()})
                count += stop - at
                at = stop
                if count == self.size:
                    yield self._joined(held)
                    held, count = [], 0
        if held:
            yield self._joined(held)

    def _joined(self, held: list[dict[str, torch.Tensor]]) -> Values:
        values = {site: torch.cat([part[site] for part in held]) for site in self.sites}
        return values if len(values) > 1 else next(iter(values.values()))


def tensor(rows: np.ndarray, dtype: str) -> torch.Tensor:
    """Mapped rows copied into a tensor, in the stored dtype."""
    values = torch.from_numpy(np.array(rows))
    return values.view(torch.bfloat16) if dtype == "bfloat16" else values
