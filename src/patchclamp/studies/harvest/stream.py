"""`HarvestStream`: the rows of a harvest for a trainer, computed while they are read, without writing to disk.

A thread runs the documents and fills a part in memory while the part before it is read. A third part starts only when
the first has been read, so the engine waits for a slow reader. Rows have the same places as on disk.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Semaphore
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from patchclamp.engines.grading import LOOK_EVERY_S
from patchclamp.errors import ProgramError
from patchclamp.store.tensors import ARRAYS
from patchclamp.studies.harvest.harvested import index_arrays, with_kept
from patchclamp.studies.harvest.recipe import HarvestPart, HarvestPlan, Manifest, Recipe, TokenizedDocuments
from patchclamp.studies.harvest.shards import OpenPart, Writes, index_of, within_caps
from patchclamp.studies.harvest.training import Values, as_values, chunks

MOST_PARTS = 2  # in memory: one is filled while the other is read

Columns = dict[str, np.ndarray]


class FilledPart(NamedTuple):
    """The rows of a part in order: their token indices, and arrays keyed by the names of `Recipe.written`."""

    tokens: np.ndarray
    rows: Columns


class StreamedPart(OpenPart):
    """Fills a part in memory.

    room: blocks until a part may start, and returns arrays to reuse, if any · filled: receives the filled part
    """

    def __init__(
        self, recipe: Recipe, documents: TokenizedDocuments, part: HarvestPart, room: Callable[[], Columns],
        filled: Future[FilledPart],
    ) -> None:  # fmt: skip
        super().__init__(recipe, documents, part)
        self.left = np.arange(len(part.prompts))
        self._room = room
        self._filled: Future[FilledPart] | None = filled
        self._whole: Columns = {}

    @property
    def is_open(self) -> bool:
        return self._filled is not None

    def open(self) -> None:
        count, size, known = len(self.part.places), self._recipe.shard_rows, self._room()
        for site in self._recipe.written:
            rows = known.get(site.name)
            if rows is None or len(rows) < count:
                rows = np.empty((count, site.width), ARRAYS[self._recipe.dtype_of(site)])
            self._whole[site.name] = rows = rows[:count]
            for shard, at in enumerate(range(0, len(rows), size)):
                self._rows[site.name, shard] = rows[at : at + size]

    def checkpoint(self, writes: Writes, pool: ThreadPoolExecutor) -> None:
        for write, _ in writes:
            write.result()

    def seal(self, pool: ThreadPoolExecutor) -> None:
        """Hand the part's rows to the reader and drop the references."""
        self._rows.clear()
        whole, self._whole = FilledPart(self.part.tokens, self._whole), {}
        filled, self._filled = self._filled, None
        assert filled is not None
        filled.set_result(whole)

    def close(self) -> None:
        self._rows.clear()
        self._whole.clear()


class HarvestStream(IterableDataset[Values]):
    """The rows of `Harvest.stream`, in batches of `batch_rows`: tensors [n, width] in the harvest's dtype, or dicts by
    site for several sites or with `index`.

    widths: row widths, by site · rows: number of rows, before norm caps
    config: harvest, sites and batch size as plain data, for a trainer's records

    Raises: the error of any run, and `ProgramError` in a `DataLoader` with workers, which have no engine.
    """

    widths: dict[str, int]
    rows: int
    dtype: str
    batch_rows: int
    config: dict[str, Any]

    def __init__(
        self, plan: HarvestPlan, manifest: Manifest, numbers: list[int],
        run: Callable[[Iterable[OpenPart], Future[None]], None], batch_rows: int, index: bool, kept: Any,
    ) -> None:  # fmt: skip
        """numbers: parts to read · run: fills parts until `stopped` is set · kept: the documents' kept columns"""
        self._plan, self._recipe, self._numbers, self._run = plan, manifest.recipe, numbers, run
        self._index, self._kept = index, kept
        self.widths = {site.name: site.width for site in self._recipe.sites}
        self.rows, self.dtype = sum(manifest.part_rows[number] for number in numbers), self._recipe.dtype
        self.batch_rows = batch_rows
        self.config = {"harvest": self._recipe.name, "sites": list(self.widths), "batch_rows": batch_rows}

    @property
    def sites(self) -> list[str]:
        return list(self.widths)

    def __iter__(self) -> Iterator[Values]:
        if get_worker_info() is not None:
            raise ProgramError("DataLoader workers cannot run the model: use DataLoader(stream, batch_size=None, "
                               "num_workers=0)", "num_workers")  # fmt: skip
        return self._read()

    def _read(self) -> Iterator[Values]:
        room, stopped = Semaphore(MOST_PARTS), Future[None]()
        free = collections.deque[Columns]()  # part buffers to reuse: first writes to new memory are slow
        filled = collections.deque(Future[FilledPart]() for _ in self._numbers)
        empty = filled.copy()  # not a tuple: a future keeps its rows
        threads = ThreadPoolExecutor(2, thread_name_prefix="patchclamp stream")

        def take_room() -> Columns:
            while not room.acquire(timeout=LOOK_EVERY_S):
                threads.submit(int)  # raises at interpreter exit, which joins this thread
            return free.popleft() if free else {}

        def parts() -> Iterator[OpenPart]:
            for number in self._numbers:
                part = self._plan.part(number)
                yield StreamedPart(self._recipe, self._plan.tokens, part, take_room, empty.popleft())

        def ended(run: Future[None]) -> None:
            for each in filled:  # parts that the run did not fill
                if not each.done():
                    each.set_exception(run.exception())

        try:
            threads.submit(self._run, parts(), stopped).add_done_callback(ended)
            for batch in chunks(self._pieces(filled, room, free), self.batch_rows):
                yield as_values(batch, self.sites, self.dtype)
        finally:
            stopped.set_result(None)
            room.release()  # the engine's thread may be waiting for room
            threads.shutdown()

    def _pieces(
        self, filled: collections.deque[Future[FilledPart]], room: Semaphore, free: collections.deque[Columns]
    ) -> Iterator[Columns]:
        """Yield rows in order, split at batch boundaries, for `chunks`, which copies them. A part's last rows are
        copied here, because `chunks` holds them while the part's arrays are refilled."""
        held = 0
        while filled:
            while not wait([filled[0]], timeout=LOOK_EVERY_S).done:  # in short steps, as in `run_batches`
                pass
            part = filled.popleft().result()
            passing, at = self._passing(part), 0
            is_whole, count = len(passing) == len(part.tokens), len(passing)
            while at < count:
                end = min(count, at + self.batch_rows - held)
                places = slice(at, end) if is_whole and end < count else passing[at:end]
                yield self._indexed(part.tokens[places]) | {site: part.rows[site][places] for site in self.sites}
                held, at = (held + end - at) % self.batch_rows, end
            free.append(part.rows)
            del part
            room.release()

    def _passing(self, part: FilledPart) -> np.ndarray:
        """Return the places of the rows within the norm caps."""
        if self._recipe.norms is None:
            return np.arange(len(part.tokens))
        norms, size = part.rows[self._recipe.norms.name], self._recipe.shard_rows
        shards = (norms[at : at + size] for at in range(0, len(norms), size))
        return np.flatnonzero(np.concatenate([within_caps(self._recipe, of_shard) for of_shard in shards]))

    def _indexed(self, tokens: np.ndarray) -> Columns:
        """Return the rows' index columns; empty unless `index` is set."""
        if not self._index:
            return {}
        index = with_kept(index_of(self._plan.tokens, tokens, self._recipe.sums), self._kept)
        return index_arrays(index, self._kept, self._recipe.sums)
