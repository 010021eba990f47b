"""A harvest for training: PyTorch's data sets, `datasets`, SAELens and dictionary_learning."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from patchclamp.errors import ProgramError
from patchclamp.store.tensors import to_float32
from patchclamp.studies.harvest.recipe import needed
from patchclamp.studies.inputs import check_whole

Values = torch.Tensor | dict[str, Any]


class HarvestRows(Dataset[Values]):
    """A data set whose item i is row i: a tensor [D], or a dict by site for several sites or with `index`.

    Rows were shuffled when they were written, and parts are interleaved (`order`), so reading them in order is fast and
    already random.
    """

    def __init__(self, data: Any, sites: list[str], index: bool = False) -> None:
        self._data, self._sites, self._count, self._with_index = data, sites, len(data), index
        data.array(sites[0])  # raises for an unknown site

    @functools.cached_property
    def _arrays(self) -> dict[str, list[np.ndarray]]:
        """The mapped rows of every shard, by site."""
        self._data.allow_files(self._sites, len(self._data.shards))
        return {site: [self._data.array(site, shard) for shard in self._data.shards] for site in self._sites}

    @functools.cached_property
    def _index(self) -> list[dict[str, list[Any]]]:
        """The index of every shard, by column."""
        return [self._data.index(shard).to_pydict() if self._with_index else {} for shard in self._data.shards]

    @functools.cached_property
    def _block(self) -> Callable[[int], np.ndarray]:
        """A function that returns a block of the reading order; recent blocks are cached."""
        return functools.lru_cache(64)(self._data.order.block)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the mapped files; the receiving process maps them itself."""
        return {name: value for name, value in vars(self).items() if name not in ("_arrays", "_block", "_index")}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Values:
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} is out of range for {len(self)} rows")
        shard, row = self._data.order.place(number % len(self), self._block)
        values: dict[str, Any] = {site: tensor(np.array(arrays[shard][row]), self._data.dtype)
                                  for site, arrays in self._arrays.items()}  # fmt: skip
        values |= {name: column[row] for name, column in self._index[shard].items()}
        return values if len(values) > 1 else next(iter(values.values()))


class HarvestBatches(IterableDataset[Values]):
    """All rows in order, in tensors [size, D], or dicts by site for several sites or with `index`; the last batch may
    be shorter.

    With several workers of a `DataLoader` (with `batch_size=None`), each reads its own range. With `repeat`, iteration
    starts over after the last row, indefinitely.
    """

    data: Any
    sites: list[str]
    size: int
    repeat: bool
    index: bool

    def __init__(self, data: Any, sites: list[str], size: int, repeat: bool = False, index: bool = False) -> None:
        check_whole(size, "size", 1)
        self.data, self.sites, self.size, self.repeat, self.index = data, sites, size, repeat, index
        data.array(sites[0])  # raises for an unknown site

    def __iter__(self) -> Iterator[Values]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        begin, end = (len(self.data) * i // count for i in (number, number + 1))
        return self._read(begin, end)

    def _pieces(self, begin: int, end: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield rows in order, in chunks of at most `size`."""
        columns = (self.data.columns_with_index if self.index else self.data.columns)(self.sites)
        while begin < end:
            yield from self.data.order.read(columns, begin, end, self.size)
            if not self.repeat:
                return

    def _read(self, begin: int, end: int) -> Iterator[Values]:
        for batch in chunks(self._pieces(begin, end), self.size):
            yield as_values(batch, self.sites, self.data.dtype)


def chunks(pieces: Iterator[dict[str, np.ndarray]], size: int) -> Iterator[dict[str, np.ndarray]]:
    """Rechunk to exactly `size` rows across piece boundaries; the last chunk may be shorter."""
    held: list[dict[str, np.ndarray]] = []
    count = 0
    for piece in pieces:
        at, rows = 0, len(next(iter(piece.values())))
        while at < rows:
            stop = min(rows, at + size - count)
            held.append({name: column[at:stop] for name, column in piece.items()})
            count += stop - at
            at = stop
            if count == size:
                yield _joined(held)
                held, count = [], 0
    if held:
        yield _joined(held)


def _joined(held: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([piece[name] for piece in held]) for name in held[0]}


def tensor(rows: np.ndarray, dtype: str) -> torch.Tensor:
    """Return rows as a tensor in the stored dtype."""
    values = torch.from_numpy(rows)
    return values.view(torch.bfloat16) if dtype == "bfloat16" else values


def as_values(batch: dict[str, np.ndarray], sites: list[str], dtype: str) -> Values:
    """Return columns as tensors (object columns as lists): a dict by name, or the bare column if there is only one."""
    values = {name: tensor(column, dtype) if name in sites
              else column.tolist() if column.dtype == object else torch.from_numpy(column.copy())
              for name, column in batch.items()}  # fmt: skip
    return values if len(values) > 1 else next(iter(values.values()))


def to_datasets(data: Any, sites: list[str], size: int) -> Any:
    """Return a `datasets.IterableDataset` of rows, with as many shards as the harvest."""
    rows, shards, size = len(data.order), len(data.shards), check_whole(size, "size", 1)
    ends = [rows * i // shards for i in range(shards + 1)]
    given = {"data": data, "sites": tuple(sites), "places": list(itertools.pairwise(ends)), "size": size}
    return needed("datasets").IterableDataset.from_generator(_records, gen_kwargs=given)


def _records(data: Any, sites: tuple[str, ...], places: list[tuple[int, int]], size: int) -> Iterator[dict[str, Any]]:
    """Yield every row at `places` as a dict. `datasets` distributes `places` over workers because it is a list."""
    for begin, end in places:
        for piece in data.order.read(data.columns_with_index(sites), begin, end, size):
            index = {name: column.tolist() for name, column in piece.items() if name not in sites}
            blocks = {site: to_float32(piece[site], data.dtype) for site in sites}
            for row in range(len(index["document"])):
                yield {name: values[row] for name, values in index.items()} | {
                    site: block[row] for site, block in blocks.items()
                }


def to_saelens(data: Any, folder: str | Path, hook_name: str, context_size: int, site: str) -> int:
    """Write a site's rows as cached activations of SAELens, in float32. Returns the number of rows left out.

    SAELens reads blocks of `context_size` rows with their token ids (`cached_activations_path`, checked with SAELens
    6.54). A block here is `context_size` shuffled rows, not a document, because SAELens shuffles only within its
    buffer. Rows at the end that do not fill a block are left out.
    """
    datasets = needed("datasets")
    if not isinstance(context_size, int) or not 1 <= context_size <= len(data):
        raise ProgramError(f"expected blocks of 1 to {len(data)} rows, got {context_size!r}", "context_size")
    width = data.width(site)
    features = {hook_name: datasets.Array2D((context_size, width), "float32")}
    if not data.manifest.recipe.sums:  # a sum has no token
        features["token_ids"] = datasets.Sequence(datasets.Value("int32"), length=context_size)
    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as beside:
        made = datasets.Dataset.from_generator(
            _blocks, features=datasets.Features(features), cache_dir=beside,
            gen_kwargs={"data": data, "site": site, "size": context_size, "names": tuple(features)},
        )  # fmt: skip
        made.save_to_disk(str(folder))
    return len(data) % context_size


def _blocks(data: Any, site: str, size: int, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield blocks of `size` rows in reading order."""
    for chunk in chunks(data.order.read(data.columns_with_index([site])), size):
        if len(chunk[site]) == size:
            yield dict(zip(names, (to_float32(chunk[site], data.dtype), chunk["token"].tolist()), strict=False))


class ActivationBuffer:
    """A site's rows for dictionary_learning's `trainSAE(data=…)`, in place of that package's buffer (checked with
    version 0.1.0): each `next` returns a batch [out_batch_size, D], float32 by default.

    Rows arrive in reading order, which is shuffled. With `repeat`, iteration starts over after the last row, and a
    batch may span the boundary; otherwise rows that do not fill the last batch are dropped.
    """

    d_submodule: Any
    out_batch_size: int
    device: str

    def __init__(
        self, data: Any, site: str, *, out_batch_size: int = 8192, device: str = "cpu",
        dtype: torch.dtype = torch.float32, repeat: bool = True,
    ) -> None:  # fmt: skip
        if not 1 <= out_batch_size <= len(data):
            raise ProgramError(f"expected batches of 1 to {len(data)} rows, got {out_batch_size!r}", "out_batch_size")
        self.d_submodule, self.out_batch_size, self.device = data.width(site), out_batch_size, device
        self.config: dict[str, Any] = {"harvest": data.folder.name, "site": site, "out_batch_size": out_batch_size,
                       "device": device}  # fmt: skip
        self._dtype = dtype
        self._batches = iter(data.batches(site, out_batch_size, repeat))

    def __iter__(self) -> ActivationBuffer:
        return self

    def __next__(self) -> torch.Tensor:
        batch = next(self._batches)
        if len(batch) < self.out_batch_size:
            raise StopIteration
        assert not isinstance(batch, dict)
        return batch.to(self.device, self._dtype)
