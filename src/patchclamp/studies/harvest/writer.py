"""Writing a harvest: rows go to their places in the shards of their part while the engine computes the next ones.

Threads write batches as they arrive. While all of them are busy, `put` blocks, which throttles the engine. Other
threads sync written rows to disk, and seal a part whose prompts are all written.

A site's rows in a shard are a safetensors file of full size from the beginning, filled in any order through a memory
map. The data begin at 4,096 bytes, so that rows of whole pages are aligned with the pages of the file. NumPy lacks
bfloat16, which is stored as its 16 bits. Statistics are summed in a fixed order, so that the same rows give the same
bytes.

The ledger of an unfinished part is a journal of the prompts whose rows are on disk; a resumed harvest skips them. A
record has the numbers of the prompts of one checkpoint, and is appended after their rows are synced. Sealing a complete
shard adds its index and statistics, and gives it its final name.

n rows · D width
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import json
import math
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import CapacityError, PatchclampError, ProgramError, RunError
from patchclamp.store.journal import Journal
from patchclamp.studies.harvest.plan import Part, Recipe, StoredSite, Tokens, needed, shard_name

STORED = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def stored(rows: Any, dtype: str) -> np.ndarray:
    """Rows as they are stored in `dtype`: a tensor or an array of `dtype`, or of float32, which is rounded."""
    if isinstance(rows, np.ndarray):
        return _rounded(rows, dtype)
    name = str(rows.dtype).removeprefix("torch.")
    if name == "bfloat16":
        import torch

        rows = rows.view(torch.int16)
        array = rows.numpy().view(np.uint16)
        return array if dtype == name else _rounded(as_float32(array, name), dtype)
    return _rounded(rows.numpy(), dtype)


def _rounded(rows: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # `store.captured.overflowed` detects it
        return to_bfloat16(rows.astype(np.float32, copy=False)) if dtype == "bfloat16" else rows.astype(
            STORED[dtype], copy=False)  # fmt: skip


def to_bfloat16(rows: np.ndarray) -> np.ndarray:
    """float32 to the 16 bits of the nearest bfloat16, ties to even, as uint16; NaN stays NaN."""
    bits = np.ascontiguousarray(rows).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(rows), np.uint16(0x7FC0), rounded)


def as_float32(rows: np.ndarray, dtype: str) -> np.ndarray:
    """A copy of stored rows as float32."""
    wide = np.empty(rows.shape, np.float32)
    put_float32(rows, dtype, wide)
    return wide


def put_float32(rows: np.ndarray, dtype: str, wide: np.ndarray) -> None:
    """Write stored rows as float32 into `wide`, which has their shape."""
    if dtype == "bfloat16":
        np.left_shift(rows, np.uint32(16), out=wide.view(np.uint32), dtype=np.uint32)
    else:
        wide[...] = rows


DATA_OFFSET = 4096


def header(name: str, dtype: str, rows: int, width: int, metadata: dict[str, str]) -> bytes:
    """The first `DATA_OFFSET` bytes of a safetensors file of one tensor. The header is padded with spaces, which the
    format allows."""
    size = rows * width * STORED[dtype].itemsize
    tensor = {"dtype": SAFETENSORS[dtype], "shape": [rows, width], "data_offsets": [0, size]}
    text = json.dumps({"__metadata__": metadata, name: tensor}).encode()
    room = DATA_OFFSET - 8
    if len(text) > room:
        raise ProgramError(f"{len(text)} bytes of header do not fit into {room}")
    return room.to_bytes(8, "little") + text.ljust(room)


class ShardFile:
    """A file that is being filled. `rows` is its content, [rows, width] in the stored dtype."""

    def __init__(self, path: Path, head: bytes, dtype: str, rows: int, width: int) -> None:
        self.path = path
        size = DATA_OFFSET + rows * width * STORED[dtype].itemsize
        with open(path, "r+b" if path.exists() else "w+b") as file:
            _reserve(file.fileno(), size, path)
            os.pwrite(file.fileno(), head, 0)
            self._map = mmap.mmap(file.fileno(), size)
        if hasattr(mmap, "MADV_RANDOM"):
            # otherwise the first access to a page also reads the pages around it, which takes seven times as long
            self._map.madvise(mmap.MADV_RANDOM)
        self.rows = _rows(self._map, dtype, rows, width)

    def sync(self) -> None:
        """Block until everything written is on disk."""
        sync(self.path)

    def close(self) -> None:
        """Release the memory map, which ends when no reader or writer uses it."""
        del self.rows, self._map


def open_rows(path: Path) -> tuple[str, dict[str, str], np.ndarray]:
    """The dtype, the metadata and the memory-mapped rows [rows, width] of a shard's file.

    Raises: `ProgramError` for another file, `CapacityError` if too many files are open.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(min(length, DATA_OFFSET)))
            metadata = head.pop("__metadata__")
            ((_, tensor),) = head.items()
            dtype = {name: dtype for dtype, name in SAFETENSORS.items()}[tensor["dtype"]]
            rows, width = tensor["shape"]
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return dtype, metadata, _rows(mapped, dtype, rows, width, 8 + length)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise CapacityError(f"{path} cannot be mapped: too many files are open; raise ulimit -n") from None
        raise ProgramError(f"{path} is no shard of a harvest: {type(error).__name__}: {error}") from None


class ReadRows:
    """The rows of a shard's file, read a slice at a time into one buffer. A memory map would take several times as
    long, because the pages of a file that was written in random order are mapped one by one.

    dtype, shape: of the rows, [rows, width]
    """

    def __init__(self, path: Path) -> None:
        self.dtype, _, mapped = open_rows(path)
        self.shape: tuple[int, int] = mapped.shape
        self._row_bytes = self.shape[1] * STORED[self.dtype].itemsize
        self._room: Any = np.empty((0, self.shape[1]), STORED[self.dtype])
        self._file = path.open("rb", buffering=0)
        self._offset = 8 + int.from_bytes(self._file.read(8), "little")

    def __getitem__(self, which: slice) -> np.ndarray:
        """Some rows, valid until the next call reuses their memory."""
        first, end, _ = which.indices(self.shape[0])
        if len(self._room) < end - first:
            self._room = np.empty((end - first, self.shape[1]), STORED[self.dtype])
        rows = self._room[: max(end - first, 0)]
        if not rows.size:
            return rows
        self._file.seek(self._offset + first * self._row_bytes)
        if self._file.readinto(memoryview(rows).cast("B")) != rows.nbytes:
            raise ProgramError(f"{self._file.name} ends before its rows do")
        return rows

    def close(self) -> None:
        self._file.close()


def sync(path: Path) -> None:
    """Block until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file atomically. Processes may write the same content at the same time; leftovers of one that was killed
    are removed."""
    same = f"{path.name}.{hashlib.sha256(content).hexdigest()[:8]}"
    beside = path.with_name(f"{same}.{os.getpid()}.new")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.replace(beside, path)
    except FileNotFoundError:  # another process has written the same
        if not path.exists():
            raise
    for left in path.parent.glob(f"{glob.escape(same)}.*.new"):
        left.unlink(missing_ok=True)
    sync(path.parent)


def _rows(mapped: mmap.mmap, dtype: str, rows: int, width: int, offset: int = DATA_OFFSET) -> np.ndarray:
    return np.frombuffer(mapped, STORED[dtype], rows * width, offset).reshape(rows, width)


def _reserve(descriptor: int, size: int, path: Path) -> None:
    """Set the file's size and reserve its disk space, because a write through a map cannot report a full disk."""
    if os.fstat(descriptor).st_size == size:
        return
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        os.ftruncate(descriptor, size)
    except OSError as error:
        raise CapacityError(f"{path} needs {size} bytes, and there is no room for them: {error}") from None


BLOCK_BYTES = 1 << 20  # fp32 rows summed at a time; they stay in the processor's cache


class SiteStatistics(msgspec.Struct, frozen=True, eq=False):
    """Statistics of the rows of one site.

    rows: their number
    mean, variance: of each number of a row (population variance), float64 [D]
    norm_mean, norm_rms, norm_min, norm_max: of the rows' L2 norms; NaN without rows
    """

    rows: int
    mean: np.ndarray
    variance: np.ndarray
    norm_mean: float
    norm_rms: float
    norm_min: float
    norm_max: float


@np.errstate(all="ignore")  # rows that are not finite have statistics that are not finite
def statistics_of(rows: np.ndarray | ReadRows, dtype: str) -> tuple[SiteStatistics, np.ndarray]:
    """The statistics of stored rows [n, D], and their norms [n], float32.

    Sums are of the rows minus the mean of the first rows (Chan, Golub and LeVeque 1983, section 3), in fp32 over a
    block and in float64 over blocks.
    """
    count, width = rows.shape
    if not count:
        return nothing(width), np.zeros(0, np.float32)
    size = max(1, BLOCK_BYTES // (4 * max(width, 1)))
    norms, first, squares = np.empty(count, np.float32), np.zeros(width), np.zeros(width)
    shift = as_float32(rows[:size], dtype).mean(axis=0)
    room = np.empty((min(size, count), width), np.float32)  # reused, because allocating and freeing memory is slow
    for begin in range(0, count, size):
        block = room[: min(size, count - begin)]
        put_float32(rows[begin : begin + size], dtype, block)
        np.sqrt(np.einsum("nd,nd->n", block, block), out=norms[begin : begin + size])
        np.subtract(block, shift, out=block)
        first += block.sum(axis=0)
        np.multiply(block, block, out=block)
        squares += block.sum(axis=0)
    left, wide = first / count, norms.astype(np.float64)
    return SiteStatistics(
        count, shift + left, squares / count - left**2, float(wide.mean()), math.sqrt(float((wide**2).mean())),
        float(wide.min()), float(wide.max()),
    ), norms  # fmt: skip


def nothing(width: int) -> SiteStatistics:
    """The statistics of zero rows."""
    return SiteStatistics(0, np.zeros(width), np.zeros(width), math.nan, math.nan, math.nan, math.nan)


def joined(parts: Iterable[SiteStatistics]) -> SiteStatistics:
    """The statistics of all rows, from those of parts; the order affects the last bits."""
    total, *others = parts
    for part in others:
        total = part if not total.rows else _two(total, part) if part.rows else total
    return total


def _two(a: SiteStatistics, b: SiteStatistics) -> SiteStatistics:
    rows = a.rows + b.rows
    share = b.rows / rows
    apart = b.mean - a.mean
    return SiteStatistics(
        rows, a.mean + share * apart,
        (1 - share) * a.variance + share * b.variance + share * (1 - share) * apart**2,
        (1 - share) * a.norm_mean + share * b.norm_mean,
        math.sqrt((1 - share) * a.norm_rms**2 + share * b.norm_rms**2),
        min(a.norm_min, b.norm_min), max(a.norm_max, b.norm_max),
    )  # fmt: skip


def encoded(sites: dict[str, SiteStatistics]) -> bytes:
    """`statistics.json`, by site; numbers that are not finite are null."""
    return msgspec.json.encode(sites, enc_hook=lambda array: array.tolist())


def decoded(content: bytes) -> dict[str, SiteStatistics]:
    """Parse the output of `encoded`."""
    return {
        site: SiteStatistics(
            values["rows"], _array(values["mean"]), _array(values["variance"]),
            *(math.nan if values[name] is None else values[name]
              for name in ("norm_mean", "norm_rms", "norm_min", "norm_max")),
        )
        for site, values in msgspec.json.decode(content).items()
    }  # fmt: skip


def _array(values: list[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], np.float64)


Summed = Future[tuple[SiteStatistics, np.ndarray]]
"""Statistics and norms of a file's rows, being computed."""
INDEX, STATISTICS = "index.parquet", "statistics.json"
COPIED_BYTES = 1 << 24


def metadata_of(recipe: Recipe, name: str, part: int, shard: int) -> dict[str, str]:
    """The metadata of a shard's file."""
    return {"harvest": name, "format": str(recipe.format), "shard": shard_name(part, shard)}


def head_of(recipe: Recipe, name: str, part: int, shard: int, site: StoredSite, rows: int) -> bytes:
    """The header of a site's file in a shard."""
    dtype = "float32" if site == recipe.norms else recipe.dtype
    return header(site.name, dtype, rows, site.width, metadata_of(recipe, name, part, shard))


def seal(folder: Path, recipe: Recipe, name: str, tokens: Tokens, part: Part, shard: int,
         pool: ThreadPoolExecutor, sums: Mapping[str, Summed]) -> None:  # fmt: skip
    """Add the missing files to a shard's folder and give it its final name. It may be interrupted and repeated.

    folder: the shard's folder while it is being filled, in the data set's folder
    pool: for several sites at a time
    sums: statistics of each site, by name; not used if caps on norms leave rows out
    """
    for unfinished in folder.glob("*.new"):
        unfinished.unlink()
    passing = _within_caps(folder, recipe, pool)

    def finished(site: StoredSite) -> SiteStatistics:
        path = folder / site.file
        if passing is not None and not passing.all():
            path = _compacted(path, head_of(recipe, name, part.number, shard, site, int(passing.sum())), passing)
        statistics, _ = summed(path)
        if path.name != site.file:
            path.replace(folder / site.file)
        sync(folder / site.file)
        return statistics

    kept = part.tokens_of_shard(shard)
    write_sealed(folder / INDEX, index(tokens, kept if passing is None else kept[passing], recipe.sums))
    statistics = ([sums[site.name].result()[0] for site in recipe.sites] if passing is None
                  else pool.map(finished, recipe.sites))  # fmt: skip
    of_sites = {site.name: of_site for site, of_site in zip(recipe.sites, statistics, strict=True)}
    write_sealed(folder / STATISTICS, encoded(of_sites))
    place = folder.parent.parent / shard_name(part.number, shard)
    folder.replace(place)
    sync(place.parent)
    sync(folder.parent)


def index(tokens: Tokens, rows: np.ndarray, sums: bool) -> bytes:
    """A Parquet file with each row's document, position in it and token id; a sum has only the document."""
    arrow, parquet = needed("pyarrow"), needed("pyarrow.parquet")
    document = tokens.document_of(rows)
    nowhere = np.full(len(rows), sums)
    table = arrow.table({
        "document": arrow.array(document, arrow.int64()),
        "position": arrow.array((rows - tokens.documents[document]).astype(np.int32), arrow.int32(), mask=nowhere),
        "token": arrow.array(tokens.ids[rows], arrow.int32(), mask=nowhere),
    })  # fmt: skip
    file = io.BytesIO()
    parquet.write_table(table, file, compression="zstd")
    return file.getvalue()


def _within_caps(folder: Path, recipe: Recipe, pool: ThreadPoolExecutor) -> np.ndarray | None:
    """A mask of the rows within the caps on norms at every site, bool [n]; None without caps. It is saved, because it
    cannot be computed from a compacted file."""
    if not recipe.filters.caps_norms:
        return None
    marks = folder.with_name(f"{folder.name}.passing.npy")  # outside the folder: it is not part of the data set
    if marks.exists():
        return np.load(marks)

    def within(site: StoredSite) -> np.ndarray:
        return recipe.filters.passing(summed(folder / site.file)[1])

    if recipe.norms is None:
        together = np.logical_and.reduce(list(pool.map(within, recipe.sites)))
    else:
        norms = open_rows(recipe.place(folder, recipe.norms))[2]
        of_sites = np.isfinite(norms).T if recipe.sums else [recipe.filters.passing(of_site) for of_site in norms.T]
        together = np.logical_and.reduce(of_sites)
    file = io.BytesIO()
    np.save(file, together)
    write_sealed(marks, file.getvalue())
    return together


def summed(path: Path) -> tuple[SiteStatistics, np.ndarray]:
    """The statistics of a file's rows, and their norms."""
    with contextlib.closing(ReadRows(path)) as rows:
        return statistics_of(rows, rows.dtype)


def _compacted(path: Path, head: bytes, passing: np.ndarray) -> Path:
    """A new file with only the passing rows, in their order; `path` itself if it is already compacted."""
    dtype, _, rows = open_rows(path)
    if len(rows) != len(passing):
        return path
    beside = path.with_name(f"{path.name}.new")
    step = max(1, COPIED_BYTES // (rows.shape[1] * STORED[dtype].itemsize))
    with open(beside, "wb") as file:
        file.write(head)
        assert file.tell() == DATA_OFFSET
        for first in range(0, len(rows), step):
            file.write(rows[first : first + step][passing[first : first + step]].tobytes())
    sync(beside)
    return beside


def forget(folder: Path) -> None:
    """Remove the folder of a part whose shards are all sealed."""
    shutil.rmtree(folder)
    sync(folder.parent)


SPARE_FILES = 256
MOST_ON_MACOS = 10_240  # regardless of the limit it reports
WRITING = "take fewer sites, fewer and larger shards (shard_rows), or another number of parts"
READING = "read fewer sites at a time, or part after part (interleave=False)"


def allow_files(count: int, times: int, beside: int = 0, advice: str = WRITING) -> int:
    """Raise this process's limit of open files to a multiple of `count`, plus `beside` and some spare ones. Returns the
    multiple, at most `times`. A memory map keeps its file open.

    Raises: `CapacityError` if the hard limit does not allow a multiple of 1.
    """
    try:
        import resource
    except ImportError:
        return times
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    most = min(most, MOST_ON_MACOS) if sys.platform == "darwin" else most
    more = SPARE_FILES + beside
    often = min((most - more) // max(count, 1), times)
    wanted = often * count + more
    if often < 1:
        raise CapacityError(
            f"{count + beside} files are open at a time, and this process may have {most} open: raise that limit "
            f"(ulimit -Hn), or {advice}"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return often


WRITERS = 4
SEALERS = 4  # shards at a time
SYNCERS = min(8, os.cpu_count() or 1)  # files that are synced or summed at a time
CHECKPOINT_BYTES = 1 << 32  # usually more than a part: in the middle of a part, the pages to write are scattered
CHECKPOINT_S = 2.0  # after a kill, rows since the last checkpoint are computed again
BEHIND = 2  # writers wait at this multiple of the checkpoint's bytes until the checkpoint in progress is done
OPEN_PARTS = 4  # largest number of open parts: one is being filled, the others are being synced


class Batch(NamedTuple):
    """The rows of some prompts.

    prompts: their numbers in the part
    rows: yields, for each site of `Recipe.written`, the rows of each prompt, [n, width] in the stored dtype; called on
        the writing thread
    """

    prompts: list[int]
    rows: Callable[[], Iterator[list[np.ndarray]]]


class _Piece(NamedTuple):
    """Rows of a prompt in one shard: their indices among the prompt's rows, and their places in the shard, [n] each."""

    shard: int
    rows: np.ndarray | slice
    places: np.ndarray


class OpenPart:
    """A part that is being filled, in a folder of its own.

    left: the prompts still to run, by their numbers in the part
    """

    def __init__(self, folder: Path, recipe: Recipe, name: str, tokens: Tokens, part: Part, checkpoint: int) -> None:
        self.part, self._recipe, self._name, self._tokens = part, recipe, name, tokens
        self._folder, self._checkpoint = folder / f"part-{part.number:04d}.open", checkpoint
        self._folder.mkdir(exist_ok=True)
        self._ledger = Journal(self._folder / "ledger").open(f"{name}, part {part.number}")
        unsealed = [shard for shard in range(part.shards) if not self._sealed(shard).exists()]
        if not all((self._shard(shard) / site.file).exists() for shard in unsealed for site in recipe.sites):
            self._ledger.clear()  # the rows that it lists are gone
        finished = np.zeros(len(part.prompts), bool)
        for prompts in self._ledger.take(list[int]):
            finished[prompts] = True
        if not unsealed:  # it was stopped while its folder was being removed
            finished[:] = True
        self.left = np.flatnonzero(~finished)
        self._unwritten = len(self.left)
        self._unsynced_bytes, self._unlisted = 0, []
        self._listed_at = time.monotonic()
        self._lock, self._syncing, self._opening = threading.Lock(), threading.Lock(), threading.Lock()
        self._room: threading.Semaphore | None = None  # limits the open parts; held while its files are open
        self._beside: Future[None] | None = None  # the last checkpoint that was made while others wrote
        self._failed: BaseException | None = None  # of a checkpoint: afterwards the state on disk is unknown
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
        """The number of files open while it is being filled."""
        return self.part.shards * len(self._recipe.written)

    def open(self, pools: Pools) -> None:
        """Create or open the shards' files, unless they are open. Blocks while too many parts are open."""
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
        """Write a batch's rows to their places. Returns True if the part is now full."""
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
        """The places of each prompt's rows."""
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
        """The checkpoint in progress, or a new one."""
        with self._lock:
            if self._beside is None or self._beside.done():
                self._beside = pools.checkpoints.submit(self.checkpoint, pools.files)
            return self._beside

    def checkpoint(self, pool: ThreadPoolExecutor) -> None:
        """Sync written rows to disk, then add their prompts to the ledger; `pool` may sync several files at once.

        Raises: the first error, on this and every later call, because the system reports a lost page only once.
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
                    self._ledger.append([prompts])
            except BaseException as error:
                self._failed = error
                raise

    def seal(self, pools: Pools) -> None:
        """Sync a full part and seal its shards. Rows are summed meanwhile, unless caps leave some out."""
        brought = pools.checkpoints.submit(self.checkpoint, pools.files)
        unsealed = [shard for shard in range(self.part.shards) if not self._sealed(shard).exists()]
        sums = {shard: {} if self._recipe.filters.caps_norms else {
            site.name: pools.files.submit(summed, self._shard(shard) / site.file) for site in self._recipe.sites
        } for shard in unsealed}  # fmt: skip
        try:
            brought.result()
        finally:
            if not brought.cancelled():  # otherwise `close` syncs it
                self._close_files()
        list(pools.shards.map(lambda shard: self._seal(shard, pools.files, sums[shard]), unsealed))
        self._ledger.close()
        forget(self._folder)

    def _seal(self, shard: int, pool: ThreadPoolExecutor, sums: dict[str, Summed]) -> None:
        seal(self._shard(shard), self._recipe, self._name, self._tokens, self.part, shard, pool, sums)

    def close(self) -> None:
        """Stop in the middle; the next harvest repeats what is not in the ledger."""
        if self._files and self._failed is None:
            # an error here may be the reason for stopping
            with contextlib.suppress(OSError, PatchclampError), ThreadPoolExecutor(SYNCERS) as pool:
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
    """True if all shards of a part exist, and its open folder is gone."""
    names = [shard_name(part.number, shard) for shard in range(part.shards)]
    return all((folder / name).exists() for name in names) and not (folder / f"part-{part.number:04d}.open").exists()


class Pools(NamedTuple):
    """Threads besides the writers, and the number of further parts that may be open.

    checkpoints: of parts that are not full, one at a time · sealing: of full parts, two at a time: one is synced while
    another is summed · shards: being sealed · files: being synced or summed
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
    """Passes batches to threads. `files`: largest number per part; `beside`: files that are always open."""

    def __init__(self, files: int, beside: int) -> None:
        self._writers = _threads("writer", WRITERS)
        self._pools = Pools(
            checkpoints=_threads("checkpoints", 1), sealing=_threads("sealing", 2), shards=_threads("shards", SEALERS),
            files=_threads("files", SYNCERS), open_parts=threading.Semaphore(allow_files(files, OPEN_PARTS, beside)),
            stopped=threading.Event(),
        )  # fmt: skip
        self._room = threading.BoundedSemaphore(WRITERS)
        self._under_way: list[Future[None]] = []
        self._failure: BaseException | None = None  # the first one; later ones may only report that it was stopped

    def put(self, part: OpenPart, batch: Batch) -> None:
        """Queue a batch. Blocks while there are too many; raises the error of an earlier one."""
        self._room.acquire()
        self._check()
        self._under_way.append(self._writers.submit(self._write, part, batch))

    def seal(self, part: OpenPart) -> None:
        """Queue the sealing of a full part."""
        self._under_way.append(self._pools.sealing.submit(self._seal, part))

    def finish(self) -> None:
        """Block until everything is written and sealed; raises the first error."""
        while self._under_way:
            self._take(self._under_way.pop(0))

    def stop(self) -> None:
        """Block until no thread is running; work that has not begun is cancelled."""
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
        """Release threads that wait for files to be closed: those of a failed part never are."""
        self._pools.stopped.set()
        self._pools.open_parts.release(WRITERS)

    def _check(self) -> None:
        ended = [future for future in self._under_way if future.done()]
        for future in ended:
            self._under_way.remove(future)
            self._take(future)

    def _take(self, future: Future[None]) -> None:
        """Wait for a task. Raises the first error of the harvest, if there was one."""
        try:
            future.result()
        except BaseException as error:
            raise self._failure or error from None


def _threads(name: str, count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=f"patchclamp {name}")
