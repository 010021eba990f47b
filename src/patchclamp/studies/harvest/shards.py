"""Writing a harvest: rows are written to their places in a part's shards while the engine computes the next rows.

A shard has a safetensors file per site, which is created at full size and filled in any order through a memory map.
Data begin at offset 4,096, so that rows whose size is a multiple of the page size are page-aligned. Statistics are
summed in a fixed order, so that the same rows give the same bytes.

An unfinished part has a journal of the prompts whose rows are on disk; a resumed harvest skips them. Each record lists
the prompts of a checkpoint, and is appended after their rows are synced. Sealing a complete shard adds its index and
statistics, and gives it its final name.

`HarvestWriter` runs the threads. One thread calls it, part after part. Only that thread blocks while the queue is full,
so a slow disk throttles the engine. An error on any thread is raised on the calling thread.

n rows · D width
"""

from __future__ import annotations

import collections
import contextlib
import errno
import io
import math
import mmap
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import CapacityError, PatchclampError, ProgramError, RunError
from patchclamp.store.journal import Journal
from patchclamp.store.system import sync, write_whole
from patchclamp.store.tensors import ARRAYS, DTYPES, read_header, to_float32, write_header
from patchclamp.studies.harvest.recipe import HarvestPart, Recipe, StoredSite, TokenizedDocuments, needed, shard_name

DATA_OFFSET = 4096
INDEX, STATISTICS = "index.parquet", "statistics.json"
INDEX_COLUMNS = ("document", "position", "token")
BLOCK_BYTES = 1 << 20  # fp32 rows summed at a time; they stay in the processor's cache
COPIED_BYTES = 1 << 24


def shard_header(recipe: Recipe, part: int, shard: int, site: StoredSite, rows: int) -> bytes:
    """Return the first `DATA_OFFSET` bytes of a site's file in a shard."""
    metadata = {"harvest": recipe.name, "format": str(recipe.format), "shard": shard_name(part, shard)}
    try:
        return write_header({site.name: (recipe.dtype_of(site), (rows, site.width))}, metadata, DATA_OFFSET)
    except ValueError as error:
        raise ProgramError(f"{site.name}: {error}") from None


def create_rows(path: Path, header: bytes, dtype: str, rows: int, width: int) -> np.ndarray:
    """Create or open a file to fill, and return its memory-mapped rows, [rows, width] in the stored dtype.

    Raises: `CapacityError` if the disk has no room. Space is reserved, because a write through a map cannot report a
    full disk.
    """
    size = len(header) + rows * width * ARRAYS[dtype].itemsize
    with open(path, "r+b" if path.exists() else "w+b") as file:
        try:
            if hasattr(os, "posix_fallocate") and os.fstat(file.fileno()).st_size != size:
                os.posix_fallocate(file.fileno(), 0, size)
            os.ftruncate(file.fileno(), size)
        except OSError as error:
            raise CapacityError(f"no space for the {size} bytes of {path}: {error}") from None
        os.pwrite(file.fileno(), header, 0)
        mapped = mmap.mmap(file.fileno(), size)
    if hasattr(mmap, "MADV_RANDOM"):
        # otherwise the first access to a page also reads the pages around it, which takes seven times as long
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, ARRAYS[dtype], rows * width, len(header)).reshape(rows, width)


class RowsFile(NamedTuple):
    """A rows file, finished or not: dtype and shape [rows, width] of its rows, and the offset of the first row."""

    path: Path
    dtype: str
    shape: tuple[int, int]
    offset: int

    @classmethod
    def open(cls, path: Path) -> RowsFile:
        """Open a rows file. Raises `ProgramError` if it is not one, `CapacityError` if too many files are open."""
        try:
            header = read_header(path)
            (tensor,) = header.tensors.values()
            rows, width = tensor.shape
            return cls(path, DTYPES[tensor.dtype], (rows, width), header.size)
        except (OSError, ValueError, KeyError) as error:
            raise _unreadable(path, error) from None

    def mapped(self) -> np.ndarray:
        """Return the rows as a memory map."""
        try:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return np.frombuffer(mapped, ARRAYS[self.dtype], math.prod(self.shape), self.offset).reshape(self.shape)
        except (OSError, ValueError) as error:
            raise _unreadable(self.path, error) from None

    def blocks(self, size: int) -> Iterator[np.ndarray]:
        """Yield the rows in blocks of `size`. A memory map would take several times as long, because the pages of a
        file written in random order are mapped one by one."""
        rows, width = self.shape
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for first in range(0, rows, size):
                numbers = np.fromfile(file, ARRAYS[self.dtype], min(size, rows - first) * width)
                if len(numbers) < min(size, rows - first) * width:
                    raise ProgramError(f"{self.path} is truncated")
                yield numbers.reshape(-1, width)


def _unreadable(path: Path, error: Exception) -> PatchclampError:
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return CapacityError(f"cannot map {path}: too many open files; raise ulimit -n")
    return ProgramError(f"{path} is not a harvest shard: {type(error).__name__}: {error}")


# -- statistics


class SiteStatistics(msgspec.Struct, frozen=True, eq=False):
    """Statistics of the rows of one site.

    rows: number of rows
    mean, variance: per column (population variance), float64 [D]
    norm_mean, norm_rms, norm_min, norm_max: statistics of the rows' L2 norms; NaN without rows
    """

    rows: int
    mean: np.ndarray
    variance: np.ndarray
    norm_mean: float
    norm_rms: float
    norm_min: float
    norm_max: float

    @classmethod
    def joined(cls, parts: Iterable[SiteStatistics]) -> SiteStatistics:
        """Merge the statistics of `parts`; their order affects the last bits."""
        parts = list(parts)
        some = [part for part in parts if part.rows]
        if not some:
            return parts[0]
        rows = sum(part.rows for part in some)
        share = [part.rows / rows for part in some]
        mean = sum(s * part.mean for s, part in zip(share, some, strict=True))
        return cls(
            rows, np.asarray(mean),
            np.asarray(sum(s * (p.variance + (p.mean - mean) ** 2) for s, p in zip(share, some, strict=True))),
            sum(s * part.norm_mean for s, part in zip(share, some, strict=True)),
            math.sqrt(sum(s * part.norm_rms**2 for s, part in zip(share, some, strict=True))),
            min(part.norm_min for part in some), max(part.norm_max for part in some),
        )  # fmt: skip


@np.errstate(all="ignore")  # non-finite rows give non-finite statistics
def statistics_of(file: RowsFile) -> SiteStatistics:
    """Return the statistics of a file's rows.

    Sums are over rows minus the first rows' mean (Chan, Golub and LeVeque 1983, section 3), in fp32 over a block and in
    float64 over blocks.
    """
    count, width = file.shape
    if not count:
        return SiteStatistics(0, np.zeros(width), np.zeros(width), math.nan, math.nan, math.nan, math.nan)
    size = max(1, BLOCK_BYTES // (4 * max(width, 1)))
    room = np.empty((min(size, count), width), np.float32)  # reused, because allocating and freeing memory is slow
    norms, sums, squares, shift = [], np.zeros(width), np.zeros(width), np.zeros(width, np.float32)
    for rows in file.blocks(size):
        block = to_float32(rows, file.dtype, room[: len(rows)])
        shift = shift if norms else block.mean(axis=0)
        norms.append(np.sqrt(np.einsum("nd,nd->n", block, block)))
        np.subtract(block, shift, out=block)
        sums += block.sum(axis=0)
        np.multiply(block, block, out=block)
        squares += block.sum(axis=0)
    mean, of = sums / count, np.concatenate(norms).astype(np.float64)
    return SiteStatistics(
        count, shift + mean, squares / count - mean**2, float(of.mean()), math.sqrt(float((of**2).mean())),
        float(of.min()), float(of.max()),
    )  # fmt: skip


def encode_statistics(sites: dict[str, SiteStatistics]) -> bytes:
    """Encode `statistics.json`, by site; non-finite numbers are null."""
    return msgspec.json.encode(sites, enc_hook=lambda array: array.tolist())


def decode_statistics(content: bytes) -> dict[str, SiteStatistics]:
    """Parse `statistics.json`."""

    def finite(value: list[float | None] | float | None) -> Any:
        return np.array(value, np.float64) if isinstance(value, list) else math.nan if value is None else value

    return {
        site: SiteStatistics(**{name: finite(value) for name, value in values.items()})
        for site, values in msgspec.json.decode(content).items()
    }


# -- a part


class HarvestBatch(NamedTuple):
    """A batch of prompts and their rows.

    prompts: the prompts' indices in the part
    rows: iterator with one item per entry of `Recipe.written`: a list of each prompt's rows, [n, width] in the stored
        dtype; consumed on the writing thread
    """

    prompts: list[int]
    rows: Iterator[list[np.ndarray]]


class OpenPart(ABC):
    """A part that is being filled: on disk (`PartWriter`), or in memory (`stream.StreamedPart`).

    left: the prompts still to run, as indices in the part
    """

    part: HarvestPart
    left: np.ndarray

    def __init__(self, recipe: Recipe, documents: TokenizedDocuments, part: HarvestPart) -> None:
        self.part, self._recipe, self._documents = part, recipe, documents
        self._rows: dict[tuple[str, int], np.ndarray] = {}  # by site and shard, in the stored dtype

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """True until the part is sealed."""

    @abstractmethod
    def open(self) -> None:
        """Allocate space for the part's rows."""

    @abstractmethod
    def checkpoint(self, writes: Writes, pool: ThreadPoolExecutor) -> None:
        """Wait for `writes`."""

    @abstractmethod
    def seal(self, pool: ThreadPoolExecutor) -> None:
        """Seal the part, once all its rows have been written."""

    @abstractmethod
    def close(self) -> None:
        """Stop filling the part."""

    def rows_of(self, prompts: list[int]) -> int:
        """Return the number of rows of `prompts`."""
        return int((self.part.first[np.array(prompts) + 1] - self.part.first[prompts]).sum())

    def write(self, batch: HarvestBatch) -> None:
        """Write a batch's rows to their places."""
        pieces = [self._pieces(prompt) for prompt in batch.prompts]
        for site, blocks in zip(self._recipe.written, batch.rows, strict=True):
            for prompt, block, of_prompt in zip(batch.prompts, blocks, pieces, strict=True):
                if block.shape != (shape := (self.rows_of([prompt]), site.width)):
                    raise RunError(f"{site.name}: expected rows {list(shape)} for a prompt, got {list(block.shape)}")
                for shard, rows, places in of_prompt:
                    if (site.name, shard) in self._rows:  # otherwise the shard is sealed
                        self._rows[site.name, shard][places] = block[rows]

    def _pieces(self, prompt: int) -> list[tuple[int, np.ndarray | slice, np.ndarray]]:
        """Return, for each shard with rows of a prompt: its index, the prompt's rows, and their places in the shard."""
        first, end = self.part.first[prompt : prompt + 2]
        shards, places = np.divmod(self.part.places[first:end], self._recipe.shard_rows)
        pieces = []
        for shard in np.unique(shards).tolist():
            here = shards == shard
            rows = slice(None) if here.all() else here  # a slice avoids a copy
            pieces.append((shard, rows, places[rows]))
        return pieces


class PartWriter(OpenPart):
    """Fills and seals the shards of one part, in the part's folder."""

    def __init__(self, folder: Path, recipe: Recipe, documents: TokenizedDocuments, part: HarvestPart) -> None:
        super().__init__(recipe, documents, part)
        self._folder = open_folder(folder, part.number)
        self._folder.mkdir(exist_ok=True)
        self._journal = Journal(self._folder / "ledger").open(f"{recipe.name}, part {part.number}")
        self._shards = [shard for shard in range(-(-len(part.places) // recipe.shard_rows))
                        if not (folder / shard_name(part.number, shard)).exists()]  # fmt: skip
        self._paths = {(site.name, shard): self._path(site, shard) for shard in self._shards for site in recipe.written}
        if not all(path.exists() for path in self._paths.values()):
            self._journal.clear()  # the rows listed in the journal are gone
        finished = np.full(len(part.prompts), not self._shards)  # no shards: stopped while the folder was being removed
        for prompts in self._journal.take(list[int]):
            finished[prompts] = True
        self.left = np.flatnonzero(~finished)

    def _path(self, site: StoredSite, shard: int) -> Path:
        """Return a site's file in a shard being filled. Features and norms are outside the shard's folder."""
        if site not in self._recipe.sites:
            return self._folder / f"{site.name}-{shard:05d}.safetensors"
        return self._folder / f"shard-{shard:05d}" / site.file

    @property
    def is_open(self) -> bool:
        """True until the part is sealed."""
        return self._journal.is_open

    def open(self) -> None:
        """Create or open the shards' files."""
        for site in self._recipe.written:
            for shard in self._shards:
                path = self._paths[site.name, shard]
                path.parent.mkdir(exist_ok=True)
                rows = min(self._recipe.shard_rows, len(self.part.places) - shard * self._recipe.shard_rows)
                header = shard_header(self._recipe, self.part.number, shard, site, rows)
                dtype = self._recipe.dtype_of(site)
                self._rows[site.name, shard] = create_rows(path, header, dtype, rows, site.width)
        for folder in {path.parent for path in self._paths.values()} | {self._folder, self._folder.parent}:
            sync(folder)

    def checkpoint(self, writes: Writes, pool: ThreadPoolExecutor) -> None:
        """Wait for `writes` and sync them to disk, then add their prompts to the journal."""
        for write, _ in writes:
            write.result()
        if writes:
            list(pool.map(sync, self._paths.values()))
            self._journal.append([[prompt for _, prompts in writes for prompt in prompts]])

    def seal(self, pool: ThreadPoolExecutor) -> None:
        """Complete all shards, give them their final names, and remove the folder. All rows must be on disk."""
        self._rows.clear()
        passing = {shard: self._within_caps(shard) for shard in self._shards}
        sites = {(shard, site.name): pool.submit(self._finish, site, shard, passing[shard])
                 for shard in self._shards for site in self._recipe.sites}  # fmt: skip
        for shard in self._shards:
            rows = slice(shard * self._recipe.shard_rows, (shard + 1) * self._recipe.shard_rows)
            tokens = self.part.tokens[rows]
            place, final = self._folder / f"shard-{shard:05d}", shard_name(self.part.number, shard)
            index = index_of(self._documents, tokens[passing[shard]], self._recipe.sums)
            write_whole(place / INDEX, _parquet(index))
            for one in self._recipe.features:
                found = RowsFile.open(self._paths[one.filling.name, shard]).mapped()
                content = features_of(self._documents, tokens[passing[shard]], found[passing[shard]])
                write_whole(place / one.file, content)
            statistics = {site.name: sites[shard, site.name].result() for site in self._recipe.sites}
            write_whole(place / STATISTICS, encode_statistics(statistics))
            place.replace(self._folder.parent / final)
            sync(self._folder.parent)
        self._journal.close()
        shutil.rmtree(self._folder)
        sync(self._folder.parent)

    def _within_caps(self, shard: int) -> np.ndarray | slice:
        """Return a mask of a shard's rows within the caps on norms at every site, bool [n]."""
        if self._recipe.norms is None:
            return slice(None)
        return within_caps(self._recipe, RowsFile.open(self._paths[self._recipe.norms.name, shard]).mapped())

    def _finish(self, site: StoredSite, shard: int, passing: np.ndarray | slice) -> SiteStatistics:
        """Remove the rows above the caps from a site's file, and return the statistics of the rest. Safe to interrupt
        and repeat: the file has either all rows or only those within the caps."""
        file = RowsFile.open(self._paths[site.name, shard])
        if isinstance(passing, np.ndarray) and not passing.all() and file.shape[0] == len(passing):
            beside = file.path.with_suffix(".new")
            step = max(1, COPIED_BYTES // max(1, site.width * ARRAYS[file.dtype].itemsize))
            with beside.open("wb") as new:
                new.write(shard_header(self._recipe, self.part.number, shard, site, int(passing.sum())))
                for number, rows in enumerate(file.blocks(step)):
                    new.write(rows[passing[number * step : (number + 1) * step]].tobytes())
            sync(beside)
            beside.replace(file.path)
            sync(file.path.parent)
            file = RowsFile.open(file.path)
        return statistics_of(file)

    def close(self) -> None:
        """Close the files; the next harvest repeats prompts that are not in the journal."""
        self._rows.clear()
        self._journal.close()


def within_caps(recipe: Recipe, norms: np.ndarray) -> np.ndarray:
    """Return a mask of a shard's rows within the norm caps at every site, bool [n], given norms [n, sites]."""
    if recipe.sums:
        return np.asarray(np.isfinite(norms).all(axis=1))
    return np.asarray(np.stack([recipe.filters.passing(of_site) for of_site in norms.T]).all(axis=0))


Writes = list[tuple["Future[None]", list[int]]]
"""Batches that have been written or are being written, with their prompts."""


def open_folder(folder: Path, part: int) -> Path:
    """Return the folder where a part is being filled."""
    return folder / f"part-{part:04d}.open"


def index_of(documents: TokenizedDocuments, rows: np.ndarray, sums: bool) -> Any:
    """Return a `pyarrow.Table` of the rows' documents, positions in them and token ids; for sums, of documents only."""
    arrow = needed("pyarrow")
    document = documents.document_of(rows)
    nowhere = np.full(len(rows), sums)
    return arrow.table({
        "document": arrow.array(document, arrow.int64()),
        "position": arrow.array((rows - documents.documents[document]).astype(np.int32), arrow.int32(), mask=nowhere),
        "token": arrow.array(documents.ids[rows], arrow.int32(), mask=nowhere),
    })  # fmt: skip


def features_of(documents: TokenizedDocuments, rows: np.ndarray, found: np.ndarray) -> bytes:
    """Encode the rows' active features as Parquet. `found` [n, 2k] has the layout of `StoredFeatures.filling`. Each
    record has document, position, token id, feature and value, in document order."""
    order = np.argsort(rows)
    ids, values = np.hsplit(found[order], 2)
    row, rank = np.nonzero(values)
    place = rows[order][row]
    document = documents.document_of(place)
    return _parquet(needed("pyarrow").table({
        "document": document, "position": (place - documents.documents[document]).astype(np.int32),
        "token_id": documents.ids[place], "feature": ids.view(np.int32)[row, rank], "value": values[row, rank],
    }))  # fmt: skip


def _parquet(table: Any) -> bytes:
    file = io.BytesIO()
    needed("pyarrow.parquet").write_table(table, file, compression="zstd")
    return file.getvalue()


SPARE_FILES = 256
WRITING = "use fewer sites, fewer and larger shards (shard_rows), or another number of parts"
READING = "read fewer sites at a time, or part after part (interleave=False)"


def allow_files(count: int, advice: str) -> None:
    """Raise this process's open-file limit to at least `count` plus a margin. A memory map keeps its file open.

    Raises: `CapacityError` if the system does not allow it.
    """
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count + SPARE_FILES:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count + SPARE_FILES, hard))
    except (ValueError, OSError):
        raise CapacityError(f"{count} files must be open at once, but this process may open {hard}: raise the limit "
                            f"(ulimit -Hn), or {advice}") from None  # fmt: skip


# -- threads


WRITERS = 4
SYNCERS = min(8, os.cpu_count() or 1)  # files that are synced or summed at a time
CHECKPOINT_BYTES = 1 << 32  # usually more than a part: in the middle of a part, the pages to write are scattered
CHECKPOINT_S = 2.0  # after a kill, rows since the last checkpoint are computed again
OPEN_PARTS = 3  # one is being filled, the others are being synced and sealed


class HarvestWriter:
    """Writes batches, one part after another. Its methods must be called from one thread."""

    def __init__(self, row_bytes: int, checkpoint_bytes: int) -> None:
        self._row_bytes, self._checkpoint_bytes = row_bytes, checkpoint_bytes
        self._writers, self._files = _threads("write", WRITERS), _threads("files", SYNCERS)
        self._checkpoints, self._sealers = _threads("checkpoint", 1), _threads("seal", OPEN_PARTS - 1)
        self._part: OpenPart | None = None  # the part being filled
        self._left = 0  # its prompts not yet queued
        self._writing: collections.deque[Future[None]] = collections.deque()
        self._unlisted: Writes = []  # the part's, since its last checkpoint
        self._unlisted_bytes, self._listed_at = 0, 0.0
        self._checkpoint = _done()  # the last one of the part
        self._sealing: collections.deque[Future[None]] = collections.deque()

    def put(self, part: OpenPart, batch: HarvestBatch) -> None:
        """Queue a batch. Blocks while too many are queued; raises an earlier batch's error."""
        if part is not self._part:
            self._begin(part)
        while len(self._writing) >= WRITERS or (self._writing and self._writing[0].done()):
            self._writing.popleft().result()
        write = self._writers.submit(part.write, batch)
        self._writing.append(write)
        self._unlisted.append((write, batch.prompts))
        self._unlisted_bytes += part.rows_of(batch.prompts) * self._row_bytes
        self._left -= len(batch.prompts)
        many = self._unlisted_bytes >= self._checkpoint_bytes
        if not self._left:
            self.seal(part)
        elif many or (self._checkpoint.done() and time.monotonic() - self._listed_at > CHECKPOINT_S):
            self._checkpoint.result()
            self._checkpoint = self._checkpoints.submit(part.checkpoint, self._unlisted, self._files)
            self._unlisted, self._unlisted_bytes, self._listed_at = [], 0, time.monotonic()

    def _begin(self, part: OpenPart) -> None:
        while len(self._sealing) >= OPEN_PARTS - 1 or (self._sealing and self._sealing[0].done()):
            self._sealing.popleft().result()
        part.open()
        self._part, self._left = part, len(part.left)
        self._unlisted_bytes, self._listed_at = 0, time.monotonic()
        self._checkpoint = _done()

    def seal(self, part: OpenPart) -> None:
        """Queue the sealing of a part whose prompts have all been queued, in this run or an earlier, stopped run."""
        writes, checkpoint = [], _done()
        if part is self._part:
            writes, checkpoint = self._unlisted, self._checkpoint
            self._part, self._unlisted = None, []

        def seal() -> None:
            checkpoint.result()
            part.checkpoint(writes, self._files)
            part.seal(self._files)

        self._sealing.append(self._sealers.submit(seal))

    def finish(self) -> None:
        """Block until everything is written and sealed; raises the first error."""
        for future in (*self._writing, *self._sealing):
            future.result()

    def stop(self) -> None:
        """Block until no thread is running, and add the prompts that were written to the journal."""
        self._writers.shutdown()
        self._checkpoints.shutdown()
        # after a failed sync the state on disk is unknown: the system reports a lost page only once
        if self._part is not None and self._checkpoint.exception() is None:
            written = [(write, prompts) for write, prompts in self._unlisted if write.exception() is None]
            with contextlib.suppress(OSError, PatchclampError):  # the caller raises the error that caused the stop
                self._part.checkpoint(written, self._files)
        self._sealers.shutdown()
        self._files.shutdown()


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _threads(name: str, count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=f"patchclamp {name}")
