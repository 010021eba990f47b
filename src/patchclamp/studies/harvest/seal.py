"""Sealing: a shard whose rows are all there gets its index and its statistics, and its name."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from patchclamp.studies.harvest.documents import needed
from patchclamp.studies.harvest.dtypes import STORED
from patchclamp.studies.harvest.moments import SiteStatistics, encoded, statistics_of
from patchclamp.studies.harvest.plan import Part, Tokens
from patchclamp.studies.harvest.recipe import Recipe, StoredSite, shard_name
from patchclamp.studies.harvest.shard_file import DATA_OFFSET, ReadRows, header, open_rows, sync, write_sealed

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
