"""Writing: rows go to their places in the shards of their part while the engine computes the next ones.

Threads write batches as they come. While each of them has one, `put` waits, and so the engine gets no more. A part
whose prompts are all written is sealed on other threads.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchclamp.errors import CapacityError
from patchclamp.studies.harvest.dtypes import STORED
from patchclamp.studies.harvest.ledger import Ledger
from patchclamp.studies.harvest.plan import Part, Tokens
from patchclamp.studies.harvest.recipe import Recipe, StoredSite, shard_name
from patchclamp.studies.harvest.seal import forget, head_of, seal
from patchclamp.studies.harvest.shard_file import ShardFile, sync

WRITERS = 4
SEALERS = 4
CHECKPOINT_BYTES = 1 << 30
GROUP_BYTES = 1 << 24  # of rows that are sorted by place together
SPARE_FILES = 256


class Batch(NamedTuple):
    """The rows of some prompts.

    prompts: their numbers in the part
    rows: gives, of one stored site after the other, the rows of each prompt, [n, width] as they are stored; on the
        thread that writes
    """

    prompts: list[int]
    rows: Callable[[], Iterator[list[np.ndarray]]]


class _Group(NamedTuple):
    """Some prompts of a batch, and where their rows go.

    prompts: which of the batch's
    order: their rows [n] in the order of their places
    local: the place of each of these in its shard [n]
    shards: (shard, first, end) of those that lie in one shard
    """

    prompts: slice
    order: np.ndarray
    local: np.ndarray
    shards: list[tuple[int, int, int]]


class OpenPart:
    """A part that is being filled, in a folder of its own.

    left: which of its prompts are still to be run, by their numbers in the part
    """

    def __init__(self, folder: Path, recipe: Recipe, name: str, tokens: Tokens, part: Part, checkpoint: int) -> None:
        self.part, self._recipe, self._name, self._tokens = part, recipe, name, tokens
        self._folder, self._checkpoint = folder / f"part-{part.number:04d}.open", checkpoint
        self._folder.mkdir(exist_ok=True)
        self._ledger = Ledger(self._folder / "ledger")
        finished = np.zeros(len(part.prompts), bool)
        finished[self._ledger.finished] = True
        self.left = np.flatnonzero(~finished)
        self._unwritten = len(self.left)
        self._unsynced_bytes, self._unlisted = 0, []
        self._lock, self._syncing = threading.Lock(), threading.Lock()
        self._files: dict[str, list[ShardFile]] = {}

    @property
    def bytes_left(self) -> int:
        """Bytes that its files still need on the disk."""
        per_row = sum(site.width for site in self._recipe.sites) * STORED[self._recipe.dtype].itemsize
        used = sum(path.stat().st_blocks * 512 for path in self._folder.rglob("*.safetensors"))
        return max(self.part.rows * per_row - used, 0) if len(self.left) else 0

    def open(self) -> None:
        """Makes the shards' files, or opens those that are there."""
        _allow_files(self.part.shards * len(self._recipe.sites))
        for site in self._recipe.sites:
            self._files[site.name] = [self._file(site, shard) for shard in range(self.part.shards)]
        for folder in (*map(self._shard, range(self.part.shards)), self._folder, self._folder.parent):
            sync(folder)

    def _file(self, site: StoredSite, shard: int) -> ShardFile:
        folder = self._shard(shard)
        folder.mkdir(exist_ok=True)
        rows = self.part.rows_of_shard(shard)
        head = head_of(self._recipe, self._name, self.part.number, shard, site, rows)
        return ShardFile(folder / site.file, head, self._recipe.dtype, rows, site.width)

    def _sealed(self, shard: int) -> Path:
        return self._folder.parent / shard_name(self.part.number, shard)

    def _shard(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}"

    def write(self, batch: Batch) -> bool:
        """Puts a batch's rows at their places. Returns whether the part is full now."""
        groups, size = self._groups(batch.prompts), 0
        most = max(len(group.order) for group in groups)
        for site, blocks in zip(self._recipe.sites, batch.rows(), strict=True):
            files = self._files[site.name]
            # memory that is used again: the system takes longer to give new memory than a copy takes
            side_by_side, sorted_rows = np.empty((2, most, site.width), STORED[self._recipe.dtype])
            for group in groups:
                count = len(group.order)
                np.concatenate(blocks[group.prompts], out=side_by_side[:count])
                np.take(side_by_side[:count], group.order, axis=0, out=sorted_rows[:count], mode="clip")
                for shard, first, end in group.shards:
                    files[shard].rows[group.local[first:end]] = sorted_rows[first:end]
                size += count * sorted_rows[0].nbytes
        return self._written(batch.prompts, size)

    def _groups(self, prompts: list[int]) -> list[_Group]:
        """The prompts in groups of about `GROUP_BYTES` of rows at one site, at least one each."""
        part = self.part
        counts = part.first[np.array(prompts) + 1] - part.first[prompts]
        width = max(site.width for site in self._recipe.sites) * STORED[self._recipe.dtype].itemsize
        ends = np.flatnonzero(np.diff(np.cumsum(counts) * width // GROUP_BYTES, append=-1)) + 1
        groups = []
        for first, end in itertools.pairwise([0, *ends.tolist()]):
            numbers = np.concatenate([np.arange(part.first[i], part.first[i + 1]) for i in prompts[first:end]])
            places = part.shuffle.places(numbers)
            order = np.argsort(places)
            shards, local = np.divmod(places[order], part.shard_rows)
            cuts = np.flatnonzero(np.diff(shards, prepend=-1, append=-1)).tolist()
            of_shards = [(int(shards[a]), a, b) for a, b in itertools.pairwise(cuts)]
            groups.append(_Group(slice(first, end), order, local, of_shards))
        return groups

    def _written(self, prompts: list[int], size: int) -> bool:
        with self._lock:
            self._unlisted += prompts
            self._unsynced_bytes += size
            self._unwritten -= len(prompts)
            full, due = self._unwritten == 0, self._unsynced_bytes >= self._checkpoint
        if full or due:
            self.checkpoint()
        return full

    def checkpoint(self) -> None:
        """Brings what was written to the disk, and its prompts into the ledger."""
        with self._syncing:
            with self._lock:
                prompts, self._unlisted, self._unsynced_bytes = self._unlisted, [], 0
            if prompts:
                for file in (file for files in self._files.values() for file in files):
                    file.sync()
                self._ledger.add(prompts)

    def seal(self, pool: ThreadPoolExecutor) -> None:
        """Seals all shards of a full part; `pool` may do several at a time."""
        self._close_files()
        unsealed = [shard for shard in range(self.part.shards) if not self._sealed(shard).exists()]
        list(pool.map(self._seal, unsealed))
        self._ledger.close()
        forget(self._folder)

    def _seal(self, shard: int) -> None:
        seal(self._shard(shard), self._recipe, self._name, self._tokens, self.part, shard)

    def close(self) -> None:
        """Stops in the middle; what is not in the ledger is done again by the next harvest."""
        if self._files:
            with contextlib.suppress(OSError):  # why it stops, perhaps
                self.checkpoint()
        self._close_files()
        self._ledger.close()

    def _close_files(self) -> None:
        for file in (file for files in self._files.values() for file in files):
            file.close()
        self._files.clear()


def is_sealed(folder: Path, part: Part) -> bool:
    """Whether all shards of a part are there, and nothing is left of its making."""
    names = [shard_name(part.number, shard) for shard in range(part.shards)]
    return all((folder / name).exists() for name in names) and not (folder / f"part-{part.number:04d}.open").exists()


class Writer:
    """Takes batches and gives them to threads."""

    def __init__(self) -> None:
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="patchclamp writer")
        self._sealers = ThreadPoolExecutor(SEALERS, thread_name_prefix="patchclamp sealer")
        self._sealing = ThreadPoolExecutor(1, thread_name_prefix="patchclamp seals")
        self._room = threading.BoundedSemaphore(WRITERS)
        self._under_way: list[Future[None]] = []

    def put(self, part: OpenPart, batch: Batch) -> None:
        """Has a batch written. Waits while there are too many; raises what went wrong with those before."""
        self._room.acquire()
        self._check()
        self._under_way.append(self._writers.submit(self._write, part, batch))

    def seal(self, part: OpenPart) -> None:
        """Has a full part sealed."""
        self._under_way.append(self._sealing.submit(part.seal, self._sealers))

    def finish(self) -> None:
        """Returns when all is written and sealed; raises what went wrong."""
        while self._under_way:
            self._under_way.pop(0).result()

    def stop(self) -> None:
        """Returns when no thread runs any more; what has not begun is not done."""
        for pool in (self._writers, self._sealing, self._sealers):
            pool.shutdown(cancel_futures=True)

    def _write(self, part: OpenPart, batch: Batch) -> None:
        try:
            if part.write(batch):
                self.seal(part)
        finally:
            self._room.release()

    def _check(self) -> None:
        ended = [future for future in self._under_way if future.done()]
        for future in ended:
            self._under_way.remove(future)
            future.result()


def _allow_files(count: int) -> None:
    """Lets this process have so many files open, and some more.

    Raises: `CapacityError` if it may not.
    """
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise CapacityError(
                f"{count} files are filled at a time, and this process may have {hard} open: take fewer and larger "
                "shards (shard_rows), or more parts"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
