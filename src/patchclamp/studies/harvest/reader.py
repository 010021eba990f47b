"""`Harvested`: a data set on disk, read through NumPy memory maps, PyTorch or `datasets`; and its exporters."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from patchclamp.errors import MissingSource, ProgramError, unknown
from patchclamp.language.values import as_file
from patchclamp.studies.harvest.plan import FORMAT, Columns, Manifest, ReadingOrder, StoredSite, needed, part_of
from patchclamp.studies.harvest.writer import (
    INDEX,
    READING,
    STATISTICS,
    SiteStatistics,
    allow_files,
    as_float32,
    decoded,
    encoded,
    joined,
    open_rows,
    write_sealed,
)

if TYPE_CHECKING:
    import torch

    from patchclamp.studies.harvest.torch_rows import Batches, Rows

INDEX_COLUMNS = ("document", "position", "token")
MANIFEST, DOCUMENTS = "harvest.json", "documents.safetensors"


class Harvested:
    """A data set that `harvest` wrote, complete or in part.

    folder: of the data set
    interleave: read rows of several parts as one shuffle (`order`); False reads part after part, each shuffled
        separately
    manifest: the recipe, and the sizes of the complete data set
    shards: the names of the shards that exist, in order; missing: of the others

    Raises: `ProgramError` for another folder.
    """

    def __init__(self, folder: str | Path, interleave: bool = True) -> None:
        self.folder, self.interleave = Path(as_file(folder, "folder")), interleave
        try:
            content = (self.folder / MANIFEST).read_bytes()
            version = msgspec.json.decode(content)["recipe"]["format"]
            if version != FORMAT:
                raise ProgramError(f"{folder} has format {version}; this version reads {FORMAT}", "folder")
            self.manifest = msgspec.json.decode(content, type=Manifest)
        except (OSError, msgspec.MsgspecError, KeyError, TypeError) as error:
            raise ProgramError(f"{folder} has no harvest: {error}", "folder") from None
        there = {path.name for path in self.folder.iterdir()}
        self.shards = [name for name in self.manifest.shards if name in there]
        self.missing = [name for name in self.manifest.shards if name not in there]

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
        """The number of rows in the shards that exist."""
        return len(self.order) if self.shards else 0

    @functools.cached_property
    def order(self) -> ReadingOrder:
        """The order of reading rows, of the shards that exist."""
        shards = self._shards_or_error()
        rows = [len(self.array(self.sites[0], shard)) for shard in shards]
        parts = [part_of(shard) if self.interleave else 0 for shard in shards]
        return ReadingOrder(rows, parts, self.manifest.recipe.seed)

    def columns(self, sites: Sequence[str]) -> Columns:
        """A shard's rows at some sites, by its number, mapped, in the form that `order` reads."""
        self.allow_files(sites)
        return lambda shard: {site: self.array(site, self.shards[shard]) for site in sites}

    def width(self, site: str | None = None) -> int:
        """The width of a row at a site."""
        return self._site(site).width

    def array(self, site: str | None = None, shard: str | None = None) -> np.ndarray:
        """A shard's rows at a site, [rows, D], memory-mapped: float32, float16, or the 16 bits of bfloat16 as uint16,
        because NumPy lacks bfloat16. Defaults are the first shard and the only site."""
        kind = self._site(site)
        shard = self._shards_or_error()[0] if shard is None else shard
        if shard not in self.shards:
            raise unknown("shard", shard, self.shards, "shard")
        dtype, _, rows = open_rows(self.folder / shard / kind.file)
        if dtype != self.dtype or rows.shape[1] != kind.width:
            raise ProgramError(f"{shard}/{kind.file} is {dtype} {list(rows.shape)}, and not {kind.width} wide in "
                               f"{self.dtype}", "shard")  # fmt: skip
        return rows

    def blocks(self, rows: int = 4096, site: str | None = None) -> Iterator[np.ndarray]:
        """All rows of a site in order, float32 [up to `rows`, D] at a time. They were shuffled when they were written,
        and parts are interleaved (`order`), so the files are read sequentially."""
        name = self._site(site).name
        for piece in self.order.read(self.columns([name]), most=rows):
            yield as_float32(piece[name], self.dtype)

    def index(self, shard: str | None = None) -> Any:
        """A `pyarrow.Table` of each row's document, position and token: of a shard in its rows' order, or of all shards
        in reading order."""
        arrow, parquet = needed("pyarrow"), needed("pyarrow.parquet")
        shards = self._shards_or_error() if shard is None else [shard]
        table = arrow.concat_tables([parquet.read_table(self.folder / name / INDEX) for name in shards])
        return table if shard is not None or self.order.is_stored else table.take(arrow.array(self.order.stored()))

    def statistics(self) -> dict[str, SiteStatistics]:
        """Mean, variance and norms of each site's rows, of the shards that exist."""
        parts = [decoded((self.folder / shard / STATISTICS).read_bytes()) for shard in self._shards_or_error()]
        return {site: joined(part[site] for part in parts) for site in self.sites}

    def write_statistics(self) -> None:
        """Write `statistics.json` of the whole data set, if it is complete."""
        if self.complete:
            write_sealed(self.folder / STATISTICS, encoded(self.statistics()))

    def allow_files(self, sites: Sequence[str], shards: int | None = None) -> None:
        """Raise the file limit for this many open shards at some sites, by default as many as `order` opens."""
        shards = (0 if self.order.is_stored else self.order.most_open) if shards is None else shards
        allow_files(shards * len(sites), 1, advice=READING)

    def columns_with_index(self, sites: Sequence[str]) -> Columns:
        """`columns`, with each row's document, position and token, as objects because a sum has None."""
        self.allow_files(sites)

        def of(shard: int) -> dict[str, np.ndarray]:
            index = self.index(self.shards[shard])
            columns = {name: np.array(index[name].to_pylist(), object) for name in INDEX_COLUMNS}
            return columns | {site: self.array(site, self.shards[shard]) for site in sites}

        return of

    def torch(self, sites: Any = None) -> Rows:
        """A `torch.utils.data.Dataset` of rows by number, as tensors in the stored dtype."""
        from patchclamp.studies.harvest.torch_rows import Rows

        return Rows(self, self._sites(sites))

    def batches(self, size: int, sites: Any = None, repeat: bool = False) -> Batches:
        """A `torch.utils.data.IterableDataset` of batches in the rows' order, which reads the files sequentially."""
        from patchclamp.studies.harvest.torch_rows import Batches

        return Batches(self, self._sites(sites), size, repeat)

    def datasets(self, sites: Any = None, size: int = 4096) -> Any:
        """A `datasets.IterableDataset`: document, position, token, and a column of float32 lists for each site."""
        names, count = self._sites(sites), len(self._shards_or_error())
        ends = [len(self) * i // count for i in range(count + 1)]
        return needed("datasets").IterableDataset.from_generator(
            _records, gen_kwargs={"folder": str(self.folder), "interleave": self.interleave, "sites": tuple(names),
                                  "places": list(itertools.pairwise(ends)), "size": size}
        )  # fmt: skip

    def to_saelens(self, folder: str | Path, *, hook_name: str, context_size: int, site: str | None = None) -> int:
        """Write cached activations for SAELens, as `to_saelens`."""

        return to_saelens(self, folder, hook_name=hook_name, context_size=context_size, site=site)

    def activation_buffer(self, site: str | None = None, **options: Any) -> ActivationBuffer:
        """An `ActivationBuffer`, for dictionary_learning's `trainSAE`."""

        return ActivationBuffer(self, site=site, **options)

    def _site(self, name: str | None) -> StoredSite:
        sites = {site.name: site for site in self.manifest.recipe.sites}
        if name is None and len(sites) == 1:
            return next(iter(sites.values()))
        if str(name) not in sites:
            raise unknown("site in this harvest", str(name), sites, "site")
        return sites[str(name)]

    def _sites(self, sites: Any) -> list[str]:
        names = self.sites if sites is None else [sites] if not isinstance(sites, (list, tuple)) else sites
        return [self._site(str(name)).name for name in names]

    def _shards_or_error(self) -> list[str]:
        if not self.shards:
            raise MissingSource(f"{self.folder} has no shard yet: run the harvest again, it goes on where it stopped")
        return self.shards

    def __repr__(self) -> str:
        there = len(self.shards)
        return f"<Harvested {self.folder.name}: {', '.join(self.sites)}; {there} of {there + len(self.missing)} shards>"


def _records(
    folder: str, interleave: bool, sites: tuple[str, ...], places: list[tuple[int, int]], size: int
) -> Iterator[dict[str, Any]]:
    """Every row at some places as a dict. `datasets` distributes `places` over workers because it is a list."""
    data = Harvested(folder, interleave)
    for begin, end in places:
        for piece in data.order.read(data.columns_with_index(sites), begin, end, size):
            index = {name: piece[name].tolist() for name in INDEX_COLUMNS}
            blocks = {site: as_float32(piece[site], data.dtype) for site in sites}
            for row in range(len(index["document"])):
                yield {name: values[row] for name, values in index.items()} | {
                    site: block[row] for site, block in blocks.items()
                }


def to_saelens(
    data: Harvested, folder: str | Path, *, hook_name: str, context_size: int, site: str | None = None
) -> int:
    """Write a site's rows as cached activations of SAELens, in float32. Returns the number of rows left out.

    SAELens reads blocks of `context_size` rows with their token ids (`cached_activations_path`, checked with SAELens
    6.54). A block here is `context_size` shuffled rows, not a document, because SAELens shuffles only within its
    buffer. Rows at the end that do not fill a block are left out.
    """
    datasets = needed("datasets")
    if not isinstance(context_size, int) or not 1 <= context_size <= len(data):
        raise ProgramError(f"a block has 1 to {len(data)} rows, not {context_size!r}", "context_size")
    width = data.width(site)
    features = {hook_name: datasets.Array2D((context_size, width), "float32")}
    if not data.manifest.recipe.sums:  # a sum has no token
        features["token_ids"] = datasets.Sequence(datasets.Value("int32"), length=context_size)
    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as beside:
        made = datasets.Dataset.from_generator(
            _blocks, features=datasets.Features(features), cache_dir=beside,
            gen_kwargs={"folder": str(data.folder), "interleave": data.interleave, "site": site, "size": context_size,
                        "names": tuple(features)},
        )  # fmt: skip
        made.save_to_disk(str(folder))
    return len(data) % context_size


def _blocks(
    folder: str, interleave: bool, site: str | None, size: int, names: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Blocks of `size` rows in reading order, across the ends of pieces."""

    data = Harvested(folder, interleave)
    name = data.sites[0] if site is None else site
    rows, ids = np.zeros((0, data.width(site)), np.float32), np.zeros(0, object)
    for piece in data.order.read(data.columns_with_index([name])):
        rows = np.concatenate([rows, as_float32(piece[name], data.dtype)])
        ids = np.concatenate([ids, piece["token"]])
        whole = len(rows) // size * size
        for first in range(0, whole, size):
            yield dict(zip(names, (rows[first : first + size], ids[first : first + size].tolist()), strict=False))
        rows, ids = rows[whole:], ids[whole:]


class ActivationBuffer:
    """A site's rows as `trainSAE(data=…)` of dictionary_learning takes them, in place of its own buffer (checked with
    version 0.1.0): each `next` is a batch [out_batch_size, D], float32 by default.

    Rows come in reading order, which is shuffled, and start again at the end unless `repeat` is off. Rows at the end
    that do not fill a batch come with the beginning of the next round; without `repeat` they are dropped.
    """

    def __init__(
        self, data: Harvested, *, site: str | None = None, out_batch_size: int = 8192, device: str = "cpu",
        dtype: torch.dtype | None = None, repeat: bool = True,
    ) -> None:  # fmt: skip
        import torch

        if not 1 <= out_batch_size <= len(data):
            raise ProgramError(f"a batch has 1 to {len(data)} rows, not {out_batch_size!r}", "out_batch_size")
        self.d_submodule, self.out_batch_size, self.device = data.width(site), out_batch_size, device
        self.config = {"harvest": data.folder.name, "site": site or data.sites[0], "out_batch_size": out_batch_size,
                       "device": device}  # fmt: skip
        self._dtype = dtype or torch.float32
        self._batches = iter(data.batches(out_batch_size, site, repeat))

    def __iter__(self) -> ActivationBuffer:
        return self

    def __next__(self) -> torch.Tensor:
        batch = next(self._batches)
        if len(batch) < self.out_batch_size:
            raise StopIteration
        assert not isinstance(batch, dict)
        return batch.to(self.device, self._dtype)
