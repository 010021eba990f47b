"""`Harvested`: a data set on disk, read through NumPy memory maps, PyTorch or `datasets` (`training.py`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from patchclamp.errors import MissingSource, PatchclampError, ProgramError, unknown
from patchclamp.language.values import as_file
from patchclamp.store.system import write_whole
from patchclamp.store.tensors import to_float32
from patchclamp.studies.harvest.recipe import (
    READABLE,
    Columns,
    Manifest,
    ReadingOrder,
    StoredFeatures,
    StoredSite,
    TokenizedDocuments,
    needed,
    part_of,
)
from patchclamp.studies.harvest.shards import (
    INDEX,
    READING,
    STATISTICS,
    RowsFile,
    SiteStatistics,
    allow_files,
    decode_statistics,
    encode_statistics,
)

if TYPE_CHECKING:
    import pandas

    from patchclamp.studies.harvest.training import ActivationBuffer, HarvestBatches, HarvestRows

MANIFEST, DOCUMENTS, COLUMNS = "harvest.json", "documents.safetensors", "columns.parquet"


def _only_harvest(folder: Path) -> Path:
    """Return the data set's folder: `folder` itself, or the only data set in it. Raises `ProgramError` for several."""
    if (folder / MANIFEST).exists() or not folder.is_dir():
        return folder
    inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    if len(inside) > 1:
        raise ProgramError(f"{folder} contains {len(inside)} harvests: open one of {', '.join(inside)}", "folder")
    return folder / inside[0] if inside else folder


class Harvested:
    """A data set written by `harvest`, complete or partial.

    folder: the data set's folder, or a folder with one data set in it
    interleave: read rows of several parts as one shuffle (`order`); False reads one part after another, each shuffled
        separately
    manifest: the recipe, and the sizes of the complete data set
    shards: the names of the shards that exist, in order; missing: the names of the other shards

    Raises: `ProgramError` if the folder is not a harvest.
    """

    folder: Path
    interleave: bool

    def __init__(self, folder: str | Path, interleave: bool = True) -> None:
        self.folder, self.interleave = _only_harvest(Path(as_file(folder, "folder"))), interleave
        try:
            content = (self.folder / MANIFEST).read_bytes()
            version = msgspec.json.decode(content)["recipe"]["format"]
            if version not in READABLE:
                raise ProgramError(f"expected harvest format {READABLE[0]} to {READABLE[-1]}, got {version!r}: "
                                   f"{folder}", "folder")  # fmt: skip
            self.manifest: Manifest = msgspec.json.decode(content, type=Manifest)
        except (OSError, msgspec.MsgspecError, KeyError, TypeError) as error:
            why = "no manifest" if isinstance(error, FileNotFoundError) else error
            raise ProgramError(f"{folder} is not a harvest: {why}", "folder") from None
        there = {path.name for path in self.folder.iterdir()}
        self.shards: list[str] = [name for name in self.manifest.shards if name in there]
        self.missing: list[str] = [name for name in self.manifest.shards if name not in there]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the folder, which other processes reopen."""
        return Harvested, (self.folder, self.interleave)

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def sites(self) -> list[str]:
        return [site.name for site in self.manifest.recipe.sites]

    @property
    def dtype(self) -> str:
        """The dtype of the stored rows."""
        return self.manifest.recipe.dtype

    def __len__(self) -> int:
        """Return the number of rows in the shards that exist."""
        return len(self.order) if self.shards else 0

    @functools.cached_property
    def order(self) -> ReadingOrder:
        """The reading order of the rows in existing shards."""
        shards = self._shards_or_error()
        if self.sites:
            rows = [len(self.array(self.sites[0], shard)) for shard in shards]
        else:
            metadata = needed("pyarrow.parquet").read_metadata
            rows = [metadata(self.folder / shard / INDEX).num_rows for shard in shards]
        parts = [part_of(shard) if self.interleave else 0 for shard in shards]
        return ReadingOrder(rows, parts, self.manifest.recipe.seed)

    def columns(self, sites: Sequence[str]) -> Columns:
        """Return a function from a shard's index to its memory-mapped rows at `sites`, for `order` to read."""
        self.allow_files(sites)
        return lambda shard: {site: self.array(site, self.shards[shard]) for site in sites}

    def width(self, site: str | None = None) -> int:
        """Return the width of a row at a site."""
        return self._site(site).width

    def array(self, site: str | None = None, shard: str | None = None) -> np.ndarray:
        """Return a shard's rows at a site, [rows, D], memory-mapped: float32, float16, or the 16 bits of bfloat16 as
        uint16, because NumPy lacks bfloat16. Defaults are the first shard and the only site."""
        kind = self._site(site)
        shard = self._shards_or_error()[0] if shard is None else shard
        if not isinstance(shard, str) or shard not in self.shards:
            raise unknown("shard", str(shard), self.shards, "shard")
        file = RowsFile.open(self.folder / shard / kind.file)
        if (file.dtype, file.shape[1]) != (self.dtype, kind.width):
            raise ProgramError(f"{shard}/{kind.file}: expected rows [n, {kind.width}] of {self.dtype}, got "
                               f"{list(file.shape)} of {file.dtype}", "shard")  # fmt: skip
        return file.mapped()

    def blocks(self, site: str | None = None, size: int = 4096) -> Iterator[np.ndarray]:
        """Yield a site's rows in order, in float32 blocks [up to `size`, D]. Rows were shuffled when written, and parts
        are interleaved (`order`), so the files are read sequentially."""
        name = self._site(site).name
        for piece in self.order.read(self.columns([name]), most=size):
            yield to_float32(piece[name], self.dtype)

    def index(self, shard: str | None = None) -> Any:
        """Return a `pyarrow.Table` of each row's document, position, token and kept columns: for one shard in stored
        order, or for all shards in reading order."""
        arrow, parquet = needed("pyarrow"), needed("pyarrow.parquet")
        shards = self._shards_or_error() if shard is None else [shard]
        table = arrow.concat_tables([parquet.read_table(self.folder / name / INDEX) for name in shards])
        table = with_kept(table, self._kept)
        return table if shard is not None or self.order.is_stored else table.take(arrow.array(self.order.stored()))

    def features(self, name: str | None = None, ids: Sequence[int] | None = None, shard: str | None = None) -> Any:
        """Return a `pyarrow.Table` of the rows' active features: document, position, token_id, feature, value, in
        document order, largest features first. `name`: the SAE, by default the only one; `ids`: all by default."""
        arrow, parquet = needed("pyarrow"), needed("pyarrow.parquet")
        file, which = self.stored_features(name).file, None if ids is None else [("feature", "in", list(ids))]
        shards = self._shards_or_error() if shard is None else [shard]
        table = arrow.concat_tables([parquet.read_table(self.folder / one / file, filters=which) for one in shards])
        return table.sort_by([("document", "ascending"), ("position", "ascending")]) if len(shards) > 1 else table

    def stored_features(self, name: str | None = None) -> StoredFeatures:
        """Return the recipe's entry for an SAE's features, by default the only SAE's."""
        stored = {one.name: one for one in self.manifest.recipe.features}
        if name is None and len(stored) == 1:
            return next(iter(stored.values()))
        if name not in stored:
            raise unknown("SAE in this harvest", str(name), stored, "name")
        return stored[name]

    @functools.cached_property
    def documents(self) -> TokenizedDocuments:
        """The tokens of all documents."""
        import safetensors.numpy

        return TokenizedDocuments(**safetensors.numpy.load_file(self.folder / DOCUMENTS), cut=self.manifest.cut_tokens)

    @functools.cached_property
    def _kept(self) -> Any:
        """A `pyarrow.Table` of the kept columns, one row per document; None without kept columns."""
        path = self.folder / COLUMNS
        return needed("pyarrow.parquet").read_table(path) if path.exists() else None

    def to_frame(self, sites: Any = ()) -> pandas.DataFrame:
        """Return one line per row in reading order: document, position, token, kept columns and, for each of `sites`,
        the row as a float32 array [D]."""
        frame = self.index().to_pandas()
        for site in self.names(sites):
            frame[site] = [row for block in self.blocks(site) for row in block]
        return frame

    def statistics(self) -> dict[str, SiteStatistics]:
        """Return mean, variance and norms of each site's rows in existing shards."""
        parts = [
            decode_statistics((self.folder / shard / STATISTICS).read_bytes()) for shard in self._shards_or_error()
        ]
        return {site: SiteStatistics.joined(part[site] for part in parts) for site in self.sites}

    def write_statistics(self) -> None:
        """Write `statistics.json` of the whole data set, if it is complete."""
        if self.complete:
            write_whole(self.folder / STATISTICS, encode_statistics(self.statistics()))

    def allow_files(self, sites: Sequence[str], shards: int | None = None) -> None:
        """Raise the open-file limit to allow this many shards at `sites`, by default as many as `order` opens."""
        shards = (0 if self.order.is_stored else self.order.most_open) if shards is None else shards
        allow_files(shards * len(sites), READING)

    def columns_with_index(self, sites: Sequence[str]) -> Columns:
        """Return `columns` plus each row's document, position, token and kept columns, which may be object arrays."""
        self.allow_files(sites)

        def of(shard: int) -> dict[str, np.ndarray]:
            columns = index_arrays(self.index(self.shards[shard]), self._kept, self.manifest.recipe.sums)
            return columns | {site: self.array(site, self.shards[shard]) for site in sites}

        return of

    def torch(self, sites: Any = None, index: bool = False) -> HarvestRows:
        """Return a `torch.utils.data.Dataset` of rows by index, as tensors in the stored dtype. With `index`, an item
        is a dict that also has the row's document, position, token and kept columns."""
        from patchclamp.studies.harvest.training import HarvestRows

        return HarvestRows(self, self.names(sites, index), index)

    def batches(self, sites: Any = None, size: int = 4096, repeat: bool = False, index: bool = False) -> HarvestBatches:
        """Return a `torch.utils.data.IterableDataset` of batches in the rows' order, which reads the files
        sequentially. With `index`, a batch is a dict that also has document, position, token and kept columns: tensors
        of numbers, lists of anything else."""
        from patchclamp.studies.harvest.training import HarvestBatches

        return HarvestBatches(self, self.names(sites, index), size, repeat, index)

    def datasets(self, sites: Any = None, size: int = 4096) -> Any:
        """Return a `datasets.IterableDataset` with document, position, token, and a float32 list for each site."""
        from patchclamp.studies.harvest.training import to_datasets

        return to_datasets(self, self.names(sites), size)

    def to_saelens(self, folder: str | Path, *, hook_name: str, context_size: int, site: str | None = None) -> int:
        """Write cached activations for SAELens (`training.to_saelens`). Returns the number of rows left out."""
        from patchclamp.studies.harvest.training import to_saelens

        return to_saelens(self, folder, hook_name, context_size, self._site(site).name)

    def activation_buffer(self, site: str | None = None, **options: Any) -> ActivationBuffer:
        """Return an `ActivationBuffer`, for dictionary_learning's `trainSAE`."""
        from patchclamp.studies.harvest.training import ActivationBuffer

        return ActivationBuffer(self, self._site(site).name, **options)

    def _site(self, name: str | None, path: str = "site") -> StoredSite:
        sites = {site.name: site for site in self.manifest.recipe.sites}
        if name is None:
            if len(sites) > 1:
                raise ProgramError(f"expected one of this harvest's sites: {', '.join(sites)}", path)
            return next(iter(sites.values()))
        if str(name) not in sites:
            raise unknown("site in this harvest", str(name), sites, path)
        return sites[str(name)]

    def names(self, sites: Any, index: bool = True) -> list[str]:
        """Return the names of one or several sites; None means all. At least one is required unless `index` is set."""
        if isinstance(sites, (int, np.integer)):
            raise ProgramError(f"expected sites, got {sites}; for a number of rows use size={sites}", "sites")
        names = self.sites if sites is None else [sites] if not isinstance(sites, (list, tuple)) else sites
        if not names and not index:
            raise ProgramError("expected at least one site, got none", "sites")
        return [self._site(str(name), "sites").name for name in names]

    def _shards_or_error(self) -> list[str]:
        if not self.shards:
            raise MissingSource(f"{self.folder} has no shards yet: run the harvest again to resume it")
        return self.shards

    def __repr__(self) -> str:
        there = len(self.shards)
        what = ", ".join([*self.sites, *(f"features of {one.name}" for one in self.manifest.recipe.features)])
        return f"<Harvested {self.folder.name}: {what}; {there} of {there + len(self.missing)} shards>"


def with_kept(index: Any, kept: Any) -> Any:
    """Append the documents' kept columns, `kept`, to an index of rows, if there are any."""
    if kept is not None:
        for name in kept.column_names:
            index = index.append_column(name, kept[name].take(index["document"]))
    return index


def index_arrays(index: Any, kept: Any, sums: bool) -> dict[str, np.ndarray]:
    """Return an index's columns as arrays: numeric if every row of the data set has a number, otherwise objects."""
    types = needed("pyarrow").types

    def is_numeric(name: str) -> bool:
        if kept is None or name not in kept.column_names:
            return name == "document" or not sums
        kind = kept.schema.field(name).type
        return (types.is_integer(kind) or types.is_floating(kind)) and not kept[name].null_count

    return {name: index[name].to_numpy() if is_numeric(name)  # np.array would stack lists
            else np.fromiter(index[name].to_pylist(), object, len(index))
            for name in index.column_names}  # fmt: skip


def as_harvested(value: Any, path: str) -> Harvested:
    """Open a harvest, given its folder, a `Harvested` or a `HarvestResult`."""
    try:
        return value if isinstance(value, Harvested) else Harvested(getattr(value, "folder", value))
    except PatchclampError as error:
        raise type(error)(error.message, path) from None
