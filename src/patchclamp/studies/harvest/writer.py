"""Writing: rows go to their places in the shards of their part while the engine computes the next ones.

Threads write batches as they come. While each of them has one, `put` waits, and so the engine gets no more. Other
threads bring what was written to the disk, and seal a part whose prompts are all written.

The dtypes in which rows are stored, as NumPy has them: bfloat16, which it lacks, as its 16 bits.

One site's rows of one shard: a safetensors file of full size from the beginning, whose rows are written in any order
through a memory map. The data begin at 4,096 bytes, so rows of whole pages are whole pages of the file.

Mean, variance and norms of a data set's rows, summed in one order, so that the same rows give the same bytes.

n rows · D width

The ledger of a part under way: a journal of the prompts whose rows are on the disk, so that a resumed harvest leaves
them out. A record has the numbers of the prompts of one checkpoint, and is appended after their rows are on the disk.

Sealing: a shard whose rows are all there gets its index and its statistics, and its name.

How many files this process may have open: a memory map keeps its file open.
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
    with np.errstate(over="ignore"):  # `store.joined.overflowed` finds it
        return to_bfloat16(rows.astype(np.float32, copy=False)) if dtype == "bfloat16" else rows.astype(
            STORED[dtype], copy=False)  # fmt: skip


def to_bfloat16(rows: np.ndarray) -> np.ndarray:
    """float32 to the 16 bits of the nearest bfloat16, ties to even, as uint16; NaN stays NaN."""
    bits = np.ascontiguousarray(rows).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(rows), np.uint16(0x7FC0), rounded)


def as_float32(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Stored rows as float32, in memory of their own."""
    wide = np.empty(rows.shape, np.float32)
    put_float32(rows, dtype, wide)
    return wide


def put_float32(rows: np.ndarray, dtype: str, wide: np.ndarray) -> None:
    """Puts stored rows as float32 into `wide`, of their shape."""
    if dtype == "bfloat16":
        np.left_shift(rows, np.uint32(16), out=wide.view(np.uint32), dtype=np.uint32)
    else:
        wide[...] = rows


DATA_OFFSET = 4096


def header(name: str, dtype: str, rows: int, width: int, metadata: dict[str, str]) -> bytes:
    """The first `DATA_OFFSET` bytes of a safetensors file of one tensor. Spaces fill the header, as in the format."""
    size = rows * width * STORED[dtype].itemsize
    tensor = {"dtype": SAFETENSORS[dtype], "shape": [rows, width], "data_offsets": [0, size]}
    text = json.dumps({"__metadata__": metadata, name: tensor}).encode()
    room = DATA_OFFSET - 8
    if len(text) > room:
        raise ProgramError(f"{len(text)} bytes of header do not fit into {room}")
    return room.to_bytes(8, "little") + text.ljust(room)


class ShardFile:
    """A file that is being filled. `rows` is what it holds, [rows, width] in its stored dtype."""

    def __init__(self, path: Path, head: bytes, dtype: str, rows: int, width: int) -> None:
        self.path = path
        size = DATA_OFFSET + rows * width * STORED[dtype].itemsize
        with open(path, "r+b" if path.exists() else "w+b") as file:
            _reserve(file.fileno(), size, path)
            os.pwrite(file.fileno(), head, 0)
            self._map = mmap.mmap(file.fileno(), size)
        if hasattr(mmap, "MADV_RANDOM"):
            # else every first touch of a page reads what lies around it: seven times as long
            self._map.madvise(mmap.MADV_RANDOM)
        self.rows = _rows(self._map, dtype, rows, width)

    def sync(self) -> None:
        """Returns when all that was written is on the disk."""
        sync(self.path)

    def close(self) -> None:
        """Lets the memory map go, which ends when nobody reads or writes it any more."""
        del self.rows, self._map


def open_rows(path: Path) -> tuple[str, dict[str, str], np.ndarray]:
    """The dtype, the metadata and the rows [rows, width], mapped to be read, of a shard's file.

    Raises: `ProgramError` for another file, `CapacityError` where too many are open.
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
    """The rows of a shard's file, read a slice at a time into the same memory: the pages of a file that was written all
    over take several times as long to be mapped, one by one.

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
        """Some rows; the next ones take their place."""
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
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_sealed(path: Path, content: bytes) -> None:
    """Writes a file so that it is there whole, or not at all. Processes may write the same at a time; what one that was
    killed left of the same goes."""
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
    """Gives the file its size and its room on the disk: a write through a map cannot say that the disk is full."""
    if os.fstat(descriptor).st_size == size:
        return
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        os.ftruncate(descriptor, size)
    except OSError as error:
        raise CapacityError(f"{path} needs {size} bytes, and there is no room for them: {error}") from None


BLOCK_BYTES = 1 << 20  # of fp32 rows that are summed at a time; they stay in the processor's cache


class SiteStatistics(msgspec.Struct, frozen=True, eq=False):
    """Of the rows of one site.

    rows: how many
    mean, variance: of each number of a row (the population's variance), float64 [D]
    norm_mean, norm_rms, norm_min, norm_max: of the rows' norms (L2); NaN without rows
    """

    rows: int
    mean: np.ndarray
    variance: np.ndarray
    norm_mean: float
    norm_rms: float
    norm_min: float
    norm_max: float


@np.errstate(all="ignore")  # rows that are not finite have such statistics
def statistics_of(rows: np.ndarray | ReadRows, dtype: str) -> tuple[SiteStatistics, np.ndarray]:
    """The statistics of stored rows [n, D], and their norms [n], float32.

    Sums are of what is left when the first rows' mean is taken off (Chan, Golub and LeVeque 1983, section 3), over a
    block in fp32, and over blocks in float64.
    """
    count, width = rows.shape
    if not count:
        return nothing(width), np.zeros(0, np.float32)
    size = max(1, BLOCK_BYTES // (4 * max(width, 1)))
    norms, first, squares = np.empty(count, np.float32), np.zeros(width), np.zeros(width)
    shift = as_float32(rows[:size], dtype).mean(axis=0)
    room = np.empty((min(size, count), width), np.float32)  # used again: the system takes long to give and take memory
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
    """The statistics of no rows."""
    return SiteStatistics(0, np.zeros(width), np.zeros(width), math.nan, math.nan, math.nan, math.nan)


def joined(parts: Iterable[SiteStatistics]) -> SiteStatistics:
    """The statistics of all rows, from those of parts; the order matters to the last bits."""
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
    """What `encoded` wrote."""
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
"""Statistics and norms of a file's rows, which are being computed."""
INDEX, STATISTICS = "index.parquet", "statistics.json"
COPIED_BYTES = 1 << 24


def metadata_of(recipe: Recipe, name: str, part: int, shard: int) -> dict[str, str]:
    """What a shard's file says of itself."""
    return {"harvest": name, "format": str(recipe.format), "shard": shard_name(part, shard)}


def head_of(recipe: Recipe, name: str, part: int, shard: int, site: StoredSite, rows: int) -> bytes:
    """The header of a site's file in a shard."""
    dtype = "float32" if site == recipe.norms else recipe.dtype
    return header(site.name, dtype, rows, site.width, metadata_of(recipe, name, part, shard))


def seal(folder: Path, recipe: Recipe, name: str, tokens: Tokens, part: Part, shard: int,
         pool: ThreadPoolExecutor, sums: Mapping[str, Summed]) -> None:  # fmt: skip
    """Gives a shard's folder what it lacks, and its name. It can be interrupted anywhere and done again.

    folder: where the shard's folder is while it is being filled, in the data set's folder
    pool: may do several sites at a time
    sums: of each site, by name; not used where caps on norms leave rows out
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
    """A Parquet file: of each row its document, its position there and its token id; a sum has only the document."""
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
    """Which rows are within the caps on norms at every site, bool [n]; None without caps. It is written down:
    once a file is compacted, nobody can tell any more."""
    if not recipe.filters.caps_norms:
        return None
    marks = folder.with_name(f"{folder.name}.passing.npy")  # beside: it is not of the data set
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
    """A file beside that has the passing rows alone, in their order; `path` itself, if it is that already."""
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
    """Removes the folder of a part whose shards are all sealed."""
    shutil.rmtree(folder)
    sync(folder.parent)


SPARE_FILES = 256
MOST_ON_MACOS = 10_240  # whatever its limit says
WRITING = "take fewer sites, fewer and larger shards (shard_rows), or another number of parts"
READING = "read fewer sites at a time, or part after part (interleave=False)"


def allow_files(count: int, times: int, beside: int = 0, advice: str = WRITING) -> int:
    """Lets this process have `count` files open, that often as far as it may, and `beside` and some more. Returns how
    often it may.

    Raises: `CapacityError` if it may not once.
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
        self._ledger = Journal(self._folder / "ledger").open(f"{name}, part {part.number}")
        unsealed = [shard for shard in range(part.shards) if not self._sealed(shard).exists()]
        if not all((self._shard(shard) / site.file).exists() for shard in unsealed for site in recipe.sites):
            self._ledger.clear()  # what it lists is gone
        finished = np.zeros(len(part.prompts), bool)
        for prompts in self._ledger.take(list[int]):
            finished[prompts] = True
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
                    self._ledger.append([prompts])
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
            # an error here is perhaps why it stops
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
