"""A harvest for PyTorch: rows by number (`Rows`), and batches from end to end (`Batches`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from patchclamp.errors import ProgramError

if TYPE_CHECKING:
    from patchclamp.studies.harvest.reader import Harvested

Values = torch.Tensor | dict[str, torch.Tensor]


class Rows(Dataset[Values]):
    """Row i of a data set as a tensor [D], or by site where there are several.

    Rows were shuffled when they were written: reading them in order is quick, and as random as it gets.
    """

    def __init__(self, data: Harvested, sites: list[str]) -> None:
        self._data, self._sites = data, sites
        self._ends = np.cumsum([len(rows) for rows in self._arrays[sites[0]]])

    @functools.cached_property
    def _arrays(self) -> dict[str, list[np.ndarray]]:
        """The mapped rows of every shard, by site."""
        return {site: [self._data.array(site, shard) for shard in self._data.shards] for site in self._sites}

    def __getstate__(self) -> dict[str, Any]:
        """A process that gets it maps the files anew."""
        return {name: value for name, value in vars(self).items() if name != "_arrays"}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Values:
        shard, row = self._row(number)
        values = {site: tensor(arrays[shard][row], self._data.dtype) for site, arrays in self._arrays.items()}
        return values if len(values) > 1 else next(iter(values.values()))

    def _row(self, number: int) -> tuple[int, int]:
        """The shard of a row, and its number there."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"there are {len(self)} rows, not {number}")
        number %= len(self)
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return shard, number - (int(self._ends[shard - 1]) if shard else 0)


class Batches(IterableDataset[Values]):
    """All rows in order, `size` at a time [size, D], or by site where there are several; the last batch may be shorter.

    Of several workers of a `DataLoader` (with `batch_size=None`) each reads shards of its own. `repeat`: begins again
    at the end, for ever.
    """

    def __init__(self, data: Harvested, sites: list[str], size: int, repeat: bool = False) -> None:
        if size < 1:
            raise ProgramError(f"a batch has at least one row, not {size}", "size")
        self.data, self.sites, self.size, self.repeat = data, sites, size, repeat
        data.array(sites[0])  # raises if there is none

    def __iter__(self) -> Iterator[Values]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        shards = self.data.shards[first::step]
        return self._read(itertools.cycle(shards) if self.repeat else iter(shards))

    def _read(self, shards: Iterator[str]) -> Iterator[Values]:
        """Batches go across the ends of shards."""
        held: list[dict[str, torch.Tensor]] = []
        count = 0
        for shard in shards:
            arrays = {site: self.data.array(site, shard) for site in self.sites}
            begin, rows = 0, len(arrays[self.sites[0]])
            while begin < rows:
                end = min(rows, begin + self.size - count)
                held.append({site: tensor(array[begin:end], self.data.dtype) for site, array in arrays.items()})
                count += end - begin
                begin = end
                if count == self.size:
                    yield self._joined(held)
                    held, count = [], 0
        if held:
            yield self._joined(held)

    def _joined(self, held: list[dict[str, torch.Tensor]]) -> Values:
        values = {site: torch.cat([part[site] for part in held]) for site in self.sites}
        return values if len(values) > 1 else next(iter(values.values()))


def tensor(rows: np.ndarray, dtype: str) -> torch.Tensor:
    """Mapped rows as a tensor of memory of its own, in the stored dtype."""
    values = torch.from_numpy(np.array(rows))
    return values.view(torch.bfloat16) if dtype == "bfloat16" else values
