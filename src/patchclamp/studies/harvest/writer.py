"""Writing: rows go to their places in the shards of their part while the engine computes the next ones.

Threads write batches as they come. While each of them has one, `put` waits, and so the engine gets no more. Other
threads bring what was written to the disk, and seal a part whose prompts are all written.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchclamp.errors import RunError
from patchclamp.studies.harvest.dtypes import STORED
from patchclamp.studies.harvest.ledger import Ledger
from patchclamp.studies.harvest.open_files import allow_files
from patchclamp.studies.harvest.plan import Part, Tokens
from patchclamp.studies.harvest.recipe import Recipe, StoredSite, shard_name
from patchclamp.studies.harvest.seal import Summed, forget, head_of, seal, summed
from patchclamp.studies.harvest.shard_file import ShardFile, sync

WRITERS = 4
SEALERS = 4  # shards at a time
SYNCERS = min(8, os.cpu_count() or 1)  # files that are brought to the disk, or whose rows are summed, at a time
CHECKPOINT_BYTES = 1 << 32  # beyond a part's, as a rule: in the middle of a part, pages to be written lie apart
CHECKPOINT_S = 2.0  # what was computed since is computed again after a kill
BEHIND = 2  # times as much may be written while what was written before is brought to the disk
OPEN_PARTS = 4  # at most: one is being filled, and others are being brought to the disk


class Batch(NamedTuple):
    """The rows of some prompts.

    prompts: their numbers in the part
    rows: gives, of one site after the other of `Recipe.written`, the rows of each prompt, [n, width] as they are
        stored; on the thread that writes
    """

    prompts: list[int]
    rows: Callable[[], Iterator[list[np.ndarray]]]


class _Piece(NamedTuple):
    """Rows of a prompt that lie in one shard: which of the prompt's they are, and their places there, [n] each."""

    shard: int
    rows: np.ndarray | slice
    places: np.ndarray


class OpenPart:
    """A part that is being filled, in a folder of its own.

    left: which of its prompts are still to be run, by their numbers in the part
    """

    def __init__(self, folder: Path, recipe: Recipe, name: str, tokens: Tokens, part: Part, checkpoint: int) -> None:
        self.part, self._recipe, self._name, self._tokens = part, recipe, name, tokens
        self._folder, self._checkpoint = folder / f"part-{part.number:04d}.open", checkpoint
        self._folder.mkdir(exist_ok=True)
        self._ledger = Ledger(self._folder / "ledger")
        unsealed = [shard for shard in range(part.shards) if not self._sealed(shard).exists()]
        if not all((self._shard(shard) / site.file).exists() for shard in unsealed for site in recipe.sites):
            self._ledger.clear()  # what it lists is gone
        finished = np.zeros(len(part.prompts), bool)
        finished[self._ledger.finished] = True
        if not unsealed:  # it was stopped while it was forgotten
            finished[:] = True
        self.left = np.flatnonzero(~finished)
        self._unwritten = len(self.left)
        self._unsynced_bytes, self._unlisted = 0, []
        self._listed_at = time.monotonic()
        self._lock, self._syncing, self._opening = threading.Lock(), threading.Lock(), threading.Lock()
        self._room: threading.Semaphore | None = None  # where its files count among those that are open
        self._beside: Future[None] | None = None  # the last checkpoint that was made while others wrote
        self._failed: BaseException | None = None  # of a checkpoint: what is on the disk is not known any more
        self._files: dict[str, list[ShardFile]] = {}

    @property
    def bytes_left(self) -> int:
        """Bytes that its files still need on the disk."""
        per_row = sum(site.width for site in self._recipe.sites) * STORED[self._recipe.dtype].itemsize
        per_row += 0 if self._recipe.norms is None else 4 * self._recipe.norms.width
        used = sum(path.stat().st_blocks * 512 for path in self._folder.rglob("*.safetensors"))
        return max(self.part.rows * per_row - used, 0) if len(self.left) else 0

    @property
    def files(self) -> int:
        """How many files are open while it is being filled."""
        return self.part.shards * len(self._recipe.written)

    def open(self, pools: Pools) -> None:
        """Makes the shards' files, or opens those that are there, unless they are open. Waits while others' are."""
        with self._opening:
            if self._failed is not None:
                raise self._failed
            if self._room is not None:
                return
            pools.open_parts.acquire()
            self._room, self._listed_at = pools.open_parts, time.monotonic()
            try:
                if pools.stopped.is_set():
                    raise RunError("the harvest has been stopped")
                self._make_files()
            except BaseException as error:
                self._failed = error
                raise

    def _make_files(self) -> None:
        for site in self._recipe.written:
            self._files[site.name] = [self._file(site, shard) for shard in range(self.part.shards)]
        for folder in (*map(self._shard, range(self.part.shards)), self._folder, self._folder.parent):
            sync(folder)

    def _file(self, site: StoredSite, shard: int) -> ShardFile:
        folder = self._shard(shard)
        folder.mkdir(exist_ok=True)
        rows = self.part.rows_of_shard(shard)
        head = head_of(self._recipe, self._name, self.part.number, shard, site, rows)
        dtype = "float32" if site == self._recipe.norms else self._recipe.dtype
        return ShardFile(self._recipe.place(folder, site), head, dtype, rows, site.width)

    def _sealed(self, shard: int) -> Path:
        return self._folder.parent / shard_name(self.part.number, shard)

    def _shard(self, shard: int) -> Path:
        return self._folder / f"shard-{shard:05d}"

    def write(self, batch: Batch, pools: Pools) -> bool:
        """Puts a batch's rows at their places. Returns whether the part is full now."""
        self.open(pools)
        pieces, size = self._pieces(batch.prompts), 0
        for site, blocks in zip(self._recipe.written, batch.rows(), strict=True):
            files = self._files[site.name]
            for block, of_prompt in zip(blocks, pieces, strict=True):
                shape = sum(len(places) for _, _, places in of_prompt), site.width
                if block.shape != shape:
                    raise RunError(
                        f"{site.name} should have {list(shape)} rows of a prompt, and has {list(block.shape)}"
                    )
                for shard, rows, places in of_prompt:
                    files[shard].rows[places] = block[rows]
                size += block.nbytes
        return self._written(batch.prompts, size, pools)

    def _pieces(self, prompts: list[int]) -> list[list[_Piece]]:
        """Where the rows of each prompt go."""
        part = self.part
        ranges = [(part.first[i], part.first[i + 1]) for i in prompts]
        shards, places = np.divmod(
            part.shuffle.places(np.concatenate([np.arange(*one) for one in ranges])), part.shard_rows
        )
        pieces, end = [], 0
        for first, last in ranges:
            begin, end = end, end + last - first
            here, there = shards[begin:end], places[begin:end]
            if part.shards == 1:
                pieces.append([_Piece(0, slice(None), there)])
                continue
            of_shards = ((shard, np.flatnonzero(here == shard)) for shard in np.unique(here).tolist())
            pieces.append([_Piece(shard, rows, there[rows]) for shard, rows in of_shards])
        return pieces

    def _written(self, prompts: list[int], size: int, pools: Pools) -> bool:
        with self._lock:
            self._unlisted += prompts
            self._unsynced_bytes += size
            self._unwritten -= len(prompts)
            full, unsynced = self._unwritten == 0, self._unsynced_bytes
        if not full and (unsynced >= self._checkpoint or time.monotonic() - self._listed_at > CHECKPOINT_S):
            beside = self._checkpoint_beside(pools)
            if unsynced >= BEHIND * self._checkpoint:
                beside.result()
        return full

    def _checkpoint_beside(self, pools: Pools) -> Future[None]:
        """The checkpoint that is being made while others write, or a new one."""
        with self._lock:
            if self._beside is None or self._beside.done():
                self._beside = pools.checkpoints.submit(self.checkpoint, pools.files)
            return self._beside

    def checkpoint(self, pool: ThreadPoolExecutor) -> None:
        """Brings what was written to the disk, and its prompts into the ledger; `pool` may do several files at once.

        Raises: what went wrong, and from then on the same: the system tells of a lost page once.
        """
        with self._syncing:
            if self._failed is not None:
                raise self._failed
            with self._lock:
                prompts, self._unlisted, self._unsynced_bytes = self._unlisted, [], 0
                self._listed_at = time.monotonic()
            try:
                if prompts:
                    list(pool.map(ShardFile.sync, [file for files in self._files.values() for file in files]))
                    self._ledger.add(prompts)
            except BaseException as error:
                self._failed = error
                raise

    def seal(self, pools: Pools) -> None:
        """Brings a full part to the disk and seals its shards. Rows are summed meanwhile, unless some are left out."""
        brought = pools.checkpoints.submit(self.checkpoint, pools.files)
        unsealed = [shard for shard in range(self.part.shards) if not self._sealed(shard).exists()]
        sums = {shard: {} if self._recipe.filters.caps_norms else {
            site.name: pools.files.submit(summed, self._shard(shard) / site.file) for site in self._recipe.sites
        } for shard in unsealed}  # fmt: skip
        try:
            brought.result()
        finally:
            if not brought.cancelled():  # else it is brought to the disk when it is closed
                self._close_files()
        list(pools.shards.map(lambda shard: self._seal(shard, pools.files, sums[shard]), unsealed))
        self._ledger.close()
        forget(self._folder)

    def _seal(self, shard: int, pool: ThreadPoolExecutor, sums: dict[str, Summed]) -> None:
        seal(self._shard(shard), self._recipe, self._name, self._tokens, self.part, shard, pool, sums)

    def close(self) -> None:
        """Stops in the middle; what is not in the ledger is done again by the next harvest."""
        if self._files and self._failed is None:
            with contextlib.suppress(OSError), ThreadPoolExecutor(SYNCERS) as pool:  # why it stops, perhaps
                self.checkpoint(pool)
        self._close_files()
        self._ledger.close()

    def _close_files(self) -> None:
        for file in (file for files in self._files.values() for file in files):
            file.close()
        self._files.clear()
        if self._room is not None:
            self._room.release()
            self._room = None


def is_sealed(folder: Path, part: Part) -> bool:
    """Whether all shards of a part are there, and nothing is left of its making."""
    names = [shard_name(part.number, shard) for shard in range(part.shards)]
    return all((folder / name).exists() for name in names) and not (folder / f"part-{part.number:04d}.open").exists()


class Pools(NamedTuple):
    """Threads beside those that write, and how many more parts may be open.

    checkpoints: of parts that are not full, one at a time · sealing: of full parts, two at a time: one is brought to
    the disk while another is summed · shards: that are sealed · files: that are brought to the disk, or summed
    """

    checkpoints: ThreadPoolExecutor
    sealing: ThreadPoolExecutor
    shards: ThreadPoolExecutor
    files: ThreadPoolExecutor
    open_parts: threading.Semaphore
    stopped: threading.Event

    @property
    def threads(self) -> tuple[ThreadPoolExecutor, ...]:
        return self.checkpoints, self.sealing, self.shards, self.files


class Writer:
    """Takes batches and gives them to threads. `files`: of each part, at most; `beside`: that are open all the time."""

    def __init__(self, files: int, beside: int) -> None:
        self._writers = _threads("writer", WRITERS)
        self._pools = Pools(
            checkpoints=_threads("checkpoints", 1), sealing=_threads("sealing", 2), shards=_threads("shards", SEALERS),
            files=_threads("files", SYNCERS), open_parts=threading.Semaphore(allow_files(files, OPEN_PARTS, beside)),
            stopped=threading.Event(),
        )  # fmt: skip
        self._room = threading.BoundedSemaphore(WRITERS)
        self._under_way: list[Future[None]] = []
        self._failure: BaseException | None = None  # the first: others may be told that the harvest has been stopped

    def put(self, part: OpenPart, batch: Batch) -> None:
        """Has a batch written. Waits while there are too many; raises what went wrong with those before."""
        self._room.acquire()
        self._check()
        self._under_way.append(self._writers.submit(self._write, part, batch))

    def seal(self, part: OpenPart) -> None:
        """Has a full part sealed."""
        self._under_way.append(self._pools.sealing.submit(self._seal, part))

    def finish(self) -> None:
        """Returns when all is written and sealed; raises what went wrong."""
        while self._under_way:
            self._take(self._under_way.pop(0))

    def stop(self) -> None:
        """Returns when no thread runs any more; what has not begun is not done."""
        self._open_no_more()
        for pool in (self._writers, *self._pools.threads):
            pool.shutdown(cancel_futures=True)

    def _write(self, part: OpenPart, batch: Batch) -> None:
        try:
            if part.write(batch, self._pools):
                self.seal(part)
        except BaseException as error:
            self._failure = self._failure or error
            self._open_no_more()
            raise
        finally:
            self._room.release()

    def _seal(self, part: OpenPart) -> None:
        try:
            part.seal(self._pools)
        except BaseException as error:
            self._failure = self._failure or error
            self._open_no_more()
            raise

    def _open_no_more(self) -> None:
        """No thread waits for files to be closed any more: those of a part that failed never are."""
        self._pools.stopped.set()
        self._pools.open_parts.release(WRITERS)

    def _check(self) -> None:
        ended = [future for future in self._under_way if future.done()]
        for future in ended:
            self._under_way.remove(future)
            self._take(future)

    def _take(self, future: Future[None]) -> None:
        """Waits for something that is under way. Raises what went wrong first, if anything did."""
        try:
            future.result()
        except BaseException as error:
            raise self._failure or error from None


def _threads(name: str, count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=f"patchclamp {name}")
