"""Activations of a data set: `harvest` writes them to disk, `Harvested` reads them, and `Harvest.stream` passes them to
a trainer without writing to disk. docs/harvest.md has the format.

`Harvest` writes the activations of documents, shuffled, from any engine. Linear reductions of rows save disk space:
projections (`Project`) and sums over documents. A projection is done by a projected capture where possible, so that
less data leaves the device. All other reductions are done on the host, in fp32, document by document, before rows are
rounded to the stored dtype.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from patchclamp.call import is_token_id
from patchclamp.errors import (
    CapacityError,
    NotFinite,
    PatchclampError,
    ProgramError,
    ShapeError,
    UnsupportedSite,
    unknown,
)
from patchclamp.grade import Pace
from patchclamp.language import Capture, Features, Vector
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import Positions, Range, Tokens, every
from patchclamp.language.values import as_array, as_dtype, as_file, as_flag
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.sites import SiteRef
from patchclamp.store.system import write_whole
from patchclamp.store.tensors import ARRAYS, overflowed, to_dtype
from patchclamp.studies.harvest.harvested import COLUMNS, DOCUMENTS, MANIFEST, Harvested, as_harvested
from patchclamp.studies.harvest.recipe import (
    Filters,
    HarvestPlan,
    Manifest,
    Recipe,
    StoredFeatures,
    StoredSite,
    documents_of,
    make_plan,
    needed,
    parts_for,
)
from patchclamp.studies.harvest.shards import (
    CHECKPOINT_BYTES,
    INDEX_COLUMNS,
    OPEN_PARTS,
    WRITING,
    HarvestBatch,
    HarvestWriter,
    OpenPart,
    PartWriter,
    allow_files,
    open_folder,
)
from patchclamp.studies.inputs import Flag, OptionalText, Progress, PythonOnly, Sites, Whole, as_texts, check_whole
from patchclamp.studies.sources import width_of
from patchclamp.studies.study import Arg, Study, StudyResult, as_lm, model_identity, progress, provenance, run_batches

if TYPE_CHECKING:
    from patchclamp.studies.harvest.stream import HarvestStream

__all__ = ["Filters", "Harvest", "HarvestResult", "Harvested", "Project", "as_harvested", "harvest"]

SHARD_ROWS = 131_072
MAX_PROJECTED = 256  # most rows of a matrix to project on the device: with more, the host is faster
BATCH_BYTES = 1 << 29  # bytes captured per batch, within these bounds in tokens:
LEAST_TOKENS, MOST_TOKENS = 8_192, 32_768
FIRST_TOKENS = 256  # in the first batch; later batches grow with speed
UNDER_WAY = 3  # batches: two are queued while one is fetched, which waits for the step in progress


class Project:
    """Store W h instead of h, with probes, directions or the first components of a PCA as the rows of W.

    matrix: W [K, D] for all sites, or one per site by name, as in {"resid_post[3]": W}
    on_device: project rows before they leave the device, if possible (`_projectable`)
    """

    def __init__(self, matrix: Any, on_device: bool = True) -> None:
        self.on_device: bool = as_flag(on_device, "on_device")
        by_site = matrix if isinstance(matrix, Mapping) else {None: matrix}  # None: for all sites
        self._by_site = {None if site is None else str(site): _matrix(value) for site, value in by_site.items()}

    def of(self, site: str, width: int) -> np.ndarray:
        """Return W [K, D] for a site of this width.

        Raises: `ProgramError` without a matrix for the site, `ShapeError` if it does not fit.
        """
        matrix = self._by_site.get(site, self._by_site.get(None))
        if matrix is None:
            raise ProgramError(f"no matrix for {site}; available: {', '.join(self.sites)}", "project")
        if matrix.shape[1] != width:
            raise ShapeError(f"{site}: expected a matrix [K, {width}], got {list(matrix.shape)}", "project")
        return matrix

    @property
    def sites(self) -> list[str]:
        """The names of the sites that have matrices."""
        return [site for site in self._by_site if site is not None]

    def __repr__(self) -> str:
        shapes = (f"{'' if site is None else site + ' '}{list(of.shape)}" for site, of in self._by_site.items())
        return f"Project({', '.join(shapes)})"


def _matrix(value: Any) -> np.ndarray:
    matrix = as_array(value, "project")
    if matrix.ndim != 2 or 0 in matrix.shape or not np.isfinite(matrix).all():
        raise ShapeError(f"expected a finite matrix [K, D], got {list(matrix.shape)}", "project")
    return matrix


class SiteReduction(NamedTuple):
    """A site and the reduction of a document's rows [n, D] there: unchanged, projected to [n, K], or the sum of either.

    site: the stored site
    matrix: W [K, D], or None
    on_device: True if rows arrive projected
    sums: True if rows are summed
    """

    site: StoredSite
    matrix: np.ndarray | None
    on_device: bool
    sums: bool

    @property
    def changes(self) -> bool:
        """True if the host must still reduce the captured rows, in fp32."""
        return self.sums or (self.matrix is not None and not self.on_device)

    def capture(self, tokens: Tokens, dtype: str) -> Capture:
        projected = Vector.of(self.matrix) if self.on_device else None
        return Capture(parse_site(self.site.name), tokens, "float32" if self.changes else dtype, projected)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        rows = rows if self.matrix is None or self.on_device else rows @ self.matrix.T
        return rows.sum(axis=0, dtype=np.float64, keepdims=True).astype(np.float32) if self.sums else rows


class HarvestResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """The result of a harvest.

    folder: the data set's folder, named by the hash of its recipe
    sites, dtype: sites and dtype of the stored rows · features: names of the SAEs with stored features
    documents, tokens: counts for the whole data set; cut_tokens: number of tokens cut off overlong documents
    rows: number of rows in the whole data set, before norm caps; ran: number of tokens run by this call
    complete: True if every part has been written
    """

    folder: str
    sites: tuple[str, ...]
    features: tuple[str, ...] = ()
    dtype: str
    documents: int
    tokens: int
    cut_tokens: int
    rows: int
    ran: int
    complete: bool

    @property
    def what(self) -> str:
        """The stored sites and features."""
        return ", ".join([*self.sites, *(f"features of {name}" for name in self.features)])

    def __repr__(self) -> str:
        state = "" if self.complete else ", incomplete"
        return f"<HarvestResult of {self.what}: {self.rows} rows{state}, in {self.folder}>"

    def open(self) -> Harvested:
        """Open the data set for reading."""
        return Harvested(self.folder)


def _filters(filters: Any, path: str) -> Filters:
    if not isinstance(filters, Filters):
        raise ProgramError(f"expected studies.Filters(...), got {type(filters).__name__}", path)
    return filters


def _project(project: Any, path: str) -> Project:
    return project if isinstance(project, Project) else Project(project)


def _shard(shard: Any, path: str) -> tuple[int, int]:
    whole = isinstance(shard, tuple) and len(shard) == 2 and all(map(is_token_id, shard))
    if not (whole and 0 <= shard[0] < shard[1]):
        raise ProgramError(f"expected (i, n) with 0 <= i < n, got {shard!r}", path)
    return int(shard[0]), int(shard[1])


def _kept_columns(keep: Any, path: str) -> list[str]:
    names = as_texts([keep] if isinstance(keep, str) else keep, path)
    if reserved := [name for name in names if name in INDEX_COLUMNS]:
        raise ProgramError(f"{reserved[0]!r} is a reserved column of the index: rename the field", path)
    return list(dict.fromkeys(names))


_from_one = functools.partial(check_whole, least=1)
Count = Annotated[int, Arg(_from_one, int)]
OptionalCount = Annotated[int | None, Arg(_from_one, int)]


class Harvest(Study):
    """Write the activations of documents' tokens at the given sites to disk, shuffled; a stopped harvest is resumed.

    `stream` passes the same rows to a trainer instead.

    Raises: `ProgramError` and `TokensError` for wrong arguments and documents, `CapacityError` if the disk is too
    small, and the error of any run.
    """

    positional = 2
    not_served = "it writes files; run it in the client with pc.LM(url)"

    documents: PythonOnly
    """A list of texts or token ids, a file of text, JSON lines or Parquet, or `datasets` (`documents_of`)."""
    folder: Annotated[Any, Arg(as_file, served=False)] = None
    """Parent folder; the data set's folder is named by the hash of all that determines its bytes. Unused by streams."""
    sites: Sites
    """Sites to store, given as for `capture=`, and `Features` of attached SAEs; each layer is a separate site."""
    column: OptionalText = None
    """Field or column with the documents; text by default."""
    keep: Annotated[Any, Arg(_kept_columns, many=True)] = ()
    """Further fields or columns of the documents to store, such as label: `Harvested.index` returns them per row."""
    dtype: Annotated[str, Arg(as_dtype)] = "bfloat16"
    """Dtype of the stored rows: bfloat16, float16 or float32."""
    filters: Annotated[Filters | None, Arg(_filters, None)] = None
    """Filters that decide which rows are kept."""
    project: Annotated[Any, Arg(_project, None)] = None
    """Store W h instead of h: a matrix W [K, D], a mapping with a matrix per site, or a `Project`."""
    sums: Flag = False
    """Store the sum over each document's rows."""
    context: OptionalCount = None
    """Maximum prompt length in tokens; the model's limit by default."""
    overlong: Literal["refuse", "cut", "split"] = "refuse"
    """Treatment of longer documents: refuse, cut or split."""
    seed: Whole = 0
    """Seed of the shuffle."""
    parts: OptionalCount = None
    """Number of parts. Documents are assigned to parts at random; each part is shuffled separately, and parts are
    written one by one. By default 8, adjusted to parts of 256 MiB to 2 GiB, with the same number for each machine.
    Readers interleave parts (`Harvested.order`)."""
    shard_rows: Count = SHARD_ROWS
    """Rows per file."""

    def _run(
        self,
        lm: LM,
        *,
        shard: Annotated[tuple[int, int], Arg(_shard)] = (0, 1),
        batch_tokens: OptionalCount = None,
        checkpoint_bytes: Annotated[int, Arg(check_whole)] = CHECKPOINT_BYTES,
        show_progress: Progress = None,
    ) -> HarvestResult:
        """
        shard: (i, n) for machine i of n, which writes parts i, i + n, …
        batch_tokens: maximum tokens per batch, by default chosen from the row width. Batches that
            would take longer than about 2 s are smaller. Three batches are in flight, and a few more are being written
        checkpoint_bytes: a resumed harvest repeats at most twice this many bytes, and at most about 10 s of work
        """
        if self.folder is None:
            raise ProgramError("expected a folder to write to; to write nothing, use Harvest(...).stream(lm)", "folder")
        needed("pyarrow.parquet")
        machine, machines = shard
        plan, manifest, columns, job = self._prepare(lm, machines, batch_tokens)
        place = _write_plan(Path(self.folder), manifest, plan, columns)
        numbers = range(machine, plan.parts, machines)
        unsealed = [number for number in numbers if not _is_sealed(place, manifest, number)]
        _check_room(place, manifest, unsealed)
        parts = (PartWriter(place, manifest.recipe, plan.tokens, plan.part(number)) for number in unsealed)
        with progress("harvesting", plan.tokens_to_run(unsealed), show_progress, "tokens") as advance:
            ran = job().run(parts, checkpoint_bytes, advance)
        data = Harvested(place)
        data.write_statistics()
        return HarvestResult(
            provenance=provenance(lm, (self.seed,)), folder=str(place), sites=tuple(data.sites), dtype=self.dtype,
            features=tuple(one.name for one in manifest.recipe.features), documents=manifest.documents,
            tokens=manifest.tokens, cut_tokens=manifest.cut_tokens, rows=sum(manifest.part_rows), ran=ran,
            complete=data.complete,
        )  # fmt: skip

    def stream(
        self, lm: LM, *, batch_rows: int = 4096, index: bool = False, shard: tuple[int, int] = (0, 1),
        batch_tokens: int | None = None,
    ) -> HarvestStream:  # fmt: skip
        """Return the harvest's rows as a `torch.utils.data.IterableDataset` of batches, computed while they are read,
        without writing to disk, in the order of `Harvested(folder, interleave=False).batches(size=batch_rows)`.

        At most two parts are in memory: one is read while the next is computed, and the engine waits for a slow reader.
        Each iteration runs the documents again; ending it early cancels its requests. A document's error is raised
        after all earlier parts have been read.

        batch_rows: rows in a batch; the last one may have fewer
        index: batches are dicts that also have document, position, token and the columns of `keep`
        shard: (i, n) for process i of n; each reads its own parts
        batch_tokens: maximum tokens per batch

        Raises: the errors of a harvest
        """
        from patchclamp.studies.harvest.stream import HarvestStream

        as_lm(lm, "lm")
        check_whole(batch_rows, "batch_rows", 1)
        as_flag(index, "index")
        machine, machines = _shard(shard, "shard")
        if any(isinstance(site, Features) for site in self.sites):
            raise ProgramError("streaming is not supported for features: harvest to a folder", "sites")
        if batch_tokens is not None:
            check_whole(batch_tokens, "batch_tokens", 1)
        plan, manifest, columns, job = self._prepare(lm, machines, batch_tokens)

        def run(parts: Iterable[OpenPart], stopped: Future[None]) -> None:
            job().run(parts, CHECKPOINT_BYTES, lambda _: None, stopped)

        numbers = [number for number in range(machine, plan.parts, machines) if manifest.part_rows[number]]
        kept = needed("pyarrow.parquet").read_table(io.BytesIO(_stored(columns))) if columns and index else None
        return HarvestStream(plan, manifest, numbers, run, batch_rows, index, kept)

    def _prepare(
        self, lm: LM, machines: int, batch_tokens: int | None
    ) -> tuple[HarvestPlan, Manifest, dict[str, list[Any]], Callable[[], _HarvestJob]]:
        """Return the plan, the manifest, the kept columns of documents by name, and a function that makes the job."""
        filters = self.filters or Filters()
        reductions = _reductions(lm, self.sites, self.project, self.sums, filters.caps_norms)
        if self.parts is not None and self.parts < machines:
            raise ProgramError(f"expected at least {machines} parts, one per machine, got {self.parts}", "parts")
        features = _features(lm, self.sites)
        if features and self.sums:
            raise ProgramError("not supported with features, which are stored per token", "sums")
        if not reductions and (filters.caps_norms or self.project is not None):
            raise ProgramError("norm caps and projections require at least one site", "sites")
        row_bytes = sum(one.site.width for one in reductions) * ARRAYS[self.dtype].itemsize
        row_bytes += sum(4 * one.filling.width for one in features)
        kept: list[tuple[Any, ...]] = []
        documents = documents_of(self.documents, self.column, self.keep, kept)
        plan = make_plan(
            lm, documents, filters, self.context, self.overlong, self.sums, self.seed,
            lambda rows: parts_for(rows, row_bytes, machines) if self.parts is None else self.parts,
        )  # fmt: skip
        columns = dict(zip(self.keep, map(list, zip(*kept, strict=True)), strict=True)) if self.keep else {}
        manifest = self._manifest(lm, plan, reductions, features, filters, columns)
        if batch_tokens is None:
            captured = [one.site.captured * (4 if one.changes else ARRAYS[self.dtype].itemsize) for one in reductions]
            captured += [4 * width_of(lm, lm.sites.dictionaries[one.name].at) for one in features]
            batch_tokens = min(max(BATCH_BYTES // sum(captured), LEAST_TOKENS), MOST_TOKENS)
        return plan, manifest, columns, functools.partial(_HarvestJob, lm, plan, manifest, reductions, batch_tokens)

    def _manifest(
        self, lm: LM, plan: HarvestPlan, reductions: list[SiteReduction], features: tuple[StoredFeatures, ...],
        filters: Filters, columns: dict[str, Any],
    ) -> Manifest:  # fmt: skip
        model, weights = model_identity(lm)
        tokens = plan.tokens
        recipe = Recipe(
            model=model, weights=weights, engine=f"{lm.model.engine} {lm.model.version}", settings=lm.model.settings,
            weights_dtype=lm.model.dtype, documents=tokens.digest, sites=tuple(one.site for one in reductions),
            dtype=self.dtype, sums=self.sums, filters=filters, seed=self.seed, parts=plan.parts,
            shard_rows=self.shard_rows,
            columns=hashlib.sha256(json.dumps(columns, default=str).encode()).hexdigest() if columns else "",
            features=features,
        )  # fmt: skip
        return Manifest(recipe, len(tokens.documents) - 1, len(tokens.ids), tokens.cut, plan.part_rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data; documents that are not in a file are represented by their type."""
        file = isinstance(self.documents, (str, Path))
        return super().to_dict() | {"documents": str(self.documents) if file else type(self.documents).__name__}


harvest: Callable[..., HarvestResult] = Harvest.short_form("harvest")


def _reductions(lm: LM, sites: Any, project: Project | None, sums: bool, capped: bool) -> list[SiteReduction]:
    """Return one reduction per requested site and layer. Norm caps rule out projected captures."""
    matrices: dict[SiteRef, np.ndarray | None] = {}
    for number, text in enumerate(sites):
        if isinstance(text, Features):
            continue
        try:
            refs = lm.sites.resolve(parse_site(text))
        except PatchclampError as error:
            raise error.under(f"sites[{number}]") from None
        for ref in refs:
            if lm.sites.points[ref.point].rows == "sampled":
                raise UnsupportedSite(f"{ref} has rows only for generated tokens, which a harvest does not store: use "
                                      "final_norm", f"sites[{number}]")  # fmt: skip
            matrices[ref] = None if project is None else project.of(str(ref), width_of(lm, ref))
    unused = [site for site in (project.sites if project else ()) if site not in map(str, matrices)]
    if unused:
        raise ProgramError(f"unused matrices for {', '.join(unused)}: not in sites=", "project")
    device = _projectable(lm, matrices) if project is not None and project.on_device and not capped else set[SiteRef]()
    reductions = []
    for ref, matrix in matrices.items():
        width = width_of(lm, ref)
        stored = width if matrix is None else len(matrix)
        site = StoredSite(str(ref), stored, stored if ref in device else width, _digest(matrix))
        reductions.append(SiteReduction(site, matrix, ref in device, sums))
    return reductions


def _features(lm: LM, sites: Any) -> tuple[StoredFeatures, ...]:
    """Return the requested `sites` that are features of attached SAEs."""
    stored: dict[str, StoredFeatures] = {}
    for number, op in enumerate(sites):
        path = f"sites[{number}]"
        if not isinstance(op, Features):
            continue
        if op.tokens != every:
            raise ProgramError("not supported in a harvest: select tokens with filters=", f"{path}.tokens")
        if op.name in stored:
            raise ProgramError(f"duplicate features of {op.name!r}", f"{path}.name")
        if op.name not in lm.sites.dictionaries:
            raise unknown("attached SAE", op.name, lm.sites.dictionaries, f"{path}.name")
        card = lm.sites.dictionaries[op.name].card
        if op.ids and max(op.ids) >= card.features:
            raise ProgramError(f"expected ids of {op.name!r} in 0..{card.features - 1}, got {max(op.ids)}", path)
        if (op.top or 0) > card.features:
            raise ProgramError(f"expected at most {card.features} features of {op.name!r}, got top={op.top}", path)
        stored[op.name] = StoredFeatures(op.name, card.content, card.at, card.dtype, card.features, op.top, op.ids)
    return tuple(stored.values())


def _projectable(lm: LM, matrices: Mapping[SiteRef, np.ndarray | None]) -> set[SiteRef]:
    """Return the sites whose projection can be captured: rows are not sharded across GPUs, the projection is narrower
    than a row and within the limit of a capture, and no other projection of the same tensor is requested."""
    ways: dict[int, set[tuple[str, tuple[int, int] | None]]] = {}
    for ref, matrix in matrices.items():
        ways.setdefault(ref.point, set()).add((_digest(matrix), ref.columns))
    return {
        ref for ref, matrix in matrices.items()
        if matrix is not None and len(matrix) <= min(MAX_PROJECTED, matrix.shape[1] - 1)
        and lm.sites.whole(ref) and len(ways[ref.point]) == 1
    }  # fmt: skip


def _digest(matrix: np.ndarray | None) -> str:
    """Return a matrix's hash, or "" for None."""
    return "" if matrix is None else hashlib.sha256(repr(matrix.shape).encode() + matrix.tobytes()).hexdigest()


def _write_plan(folder: Path, manifest: Manifest, plan: HarvestPlan, columns: dict[str, Any]) -> Path:
    """Create the data set's folder with the manifest, the documents' tokens and their columns, and return it."""
    import safetensors.numpy

    place, tokens = folder / manifest.recipe.name, plan.tokens
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProgramError(f"cannot write {place}: {error.strerror}", "folder") from None
    if not (place / DOCUMENTS).exists():
        arrays = {"ids": tokens.ids, "documents": tokens.documents, "prompts": tokens.prompts}
        write_whole(place / DOCUMENTS, safetensors.numpy.save(arrays))
    if columns and not (place / COLUMNS).exists():
        write_whole(place / COLUMNS, _stored(columns))
    if not (place / MANIFEST).exists():
        write_whole(place / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return place


def _stored(columns: dict[str, list[Any]]) -> bytes:
    """Encode documents' kept columns as Parquet."""
    arrow, file = needed("pyarrow"), io.BytesIO()
    try:
        needed("pyarrow.parquet").write_table(arrow.table(columns), file)
    except arrow.ArrowException as error:
        raise ProgramError(f"cannot store the columns as Parquet: {error}", "keep") from None
    return file.getvalue()


def _is_sealed(place: Path, manifest: Manifest, number: int) -> bool:
    """True if all of a part's shards exist, and the folder where it was filled is gone."""
    shards = manifest.shards_of(number)
    return all((place / name).exists() for name in shards) and not open_folder(place, number).exists()


def _check_room(place: Path, manifest: Manifest, unsealed: list[int]) -> None:
    """Raise `CapacityError` if the disk has too little space, or the open-file limit is too low."""
    recipe = manifest.recipe
    needs, size = 0, recipe.shard_rows
    for number in unsealed:
        for shard, name in enumerate(manifest.shards_of(number)):
            if not (place / name).exists():
                needs += min(size, manifest.part_rows[number] - shard * size) * recipe.row_bytes
        files = open_folder(place, number).rglob("*.safetensors")
        needs -= sum(path.stat().st_blocks * 512 for path in files)
    free = shutil.disk_usage(place).free
    if needs > free:
        raise CapacityError(
            f"{place} requires {needs / 1e9:.1f} GB, but {free / 1e9:.1f} GB is free: choose "
            "fewer sites, a narrower dtype, a projection, or another disk"
        )
    shards = max((len(manifest.shards_of(number)) for number in unsealed), default=0)
    allow_files(OPEN_PARTS * shards * len(recipe.written), WRITING)


class _HarvestJob:
    """Runs the prompts of parts and passes their rows to the writer."""

    def __init__(
        self, lm: LM, plan: HarvestPlan, manifest: Manifest, reductions: list[SiteReduction], batch_tokens: int
    ) -> None:
        self._lm, self._plan = lm, plan
        self._recipe, self._reductions = manifest.recipe, reductions
        self._first, self._tokens = _window(self._recipe.filters, plan)
        self._lengths = np.diff(plan.tokens.prompts)
        self._parts: list[OpenPart] = []  # open parts only, because the places of rows take much memory
        self._asked: list[tuple[OpenPart, list[int]]] = []
        self._ran, self._pace = 0, Pace(batch_tokens, FIRST_TOKENS)

    def run(
        self, parts: Iterable[OpenPart], checkpoint_bytes: int, advance: Callable[[int], None],
        stopped: Future[None] | None = None,
    ) -> int:  # fmt: skip
        """Fill `parts`, and return the number of tokens run. `advance` receives counts of finished tokens; setting
        `stopped` cancels the rest."""
        self._advance, self._writer = advance, HarvestWriter(self._recipe.row_bytes, checkpoint_bytes)
        try:
            run_batches(self._lm, self._calls(parts), self._read, UNDER_WAY, self._pace, stopped)
            self._writer.finish()
        finally:
            self._writer.stop()
            for part in self._parts:
                part.close()
        return self._ran

    def _calls(self, parts: Iterable[OpenPart]) -> Iterator[dict[str, Any]]:
        """Yield the arguments of `lm.arun` for every batch, part by part."""
        captures = [*(one.capture(self._tokens, self._recipe.dtype) for one in self._reductions),
                    *(one.op(self._tokens) for one in self._recipe.features)]  # fmt: skip
        for part in parts:
            self._parts = [*(one for one in self._parts if one.is_open), part]
            lengths = self._lengths[part.part.prompts]
            self._advance(int(lengths.sum() - lengths[part.left].sum()))
            if not len(part.left):
                self._writer.seal(part)
            for prompts in self._pace.parts(part.left.tolist(), lengths.tolist().__getitem__):
                self._asked.append((part, prompts))
                ids = [self._plan.tokens.prompt(int(part.part.prompts[i])) for i in prompts]
                yield {"prompt": ids, "max_tokens": 1, "capture": captures}

    def _read(self, runs: list[Run]) -> None:
        part, prompts = self._asked.pop(0)
        for run, i in zip(runs, prompts, strict=True):
            if run.error is not None:
                raise run.error.under(self._document(part, i))
        captured = self._fetch(part, runs, prompts)
        self._writer.put(part, HarvestBatch(prompts, self._rows(part, prompts, runs, captured)))
        tokens = sum(len(run.prompt_token_ids) for run in runs)
        self._ran += tokens
        self._advance(tokens)

    def _rows(
        self, part: OpenPart, prompts: list[int], runs: list[Run], captured: list[dict[str, Any]]
    ) -> Iterator[list[np.ndarray]]:
        """Yield the prompts' rows, site by site, then features. Runs are closed at the end."""
        kept = [self._kept(part.part.prompts[i]) for i in prompts]
        norms = []
        if self._recipe.norms is not None:
            norms = [self._norms(by_site, which) for by_site, which in zip(captured, kept, strict=True)]
            if self._recipe.sums:
                passing = [np.logical_and.reduce([self._recipe.filters.passing(of) for of in each.T]) for each in norms]
                kept = [which[of] for which, of in zip(kept, passing, strict=True)]
                norms = [np.full((1, each.shape[1]), 0 if of.any() else np.nan, np.float32)
                         for each, of in zip(norms, passing, strict=True)]  # fmt: skip
        for one in self._reductions:
            blocks = []
            for by_site, which, i in zip(captured, kept, prompts, strict=True):
                blocks.append(block := self._reduced(one, by_site.pop(one.site.name), which))
                if overflowed(block) is not None:
                    raise NotFinite(f"{one.site.name} has values above 65,504, the float16 maximum: store bfloat16 or "
                                    "float32", "dtype").under(self._document(part, i))  # fmt: skip
            yield blocks
        for one in self._recipe.features:
            found = [run.features[one.name] for run in runs]
            yield [np.hstack([each.ids[which].view(np.float32), each.values[which]])
                   for each, which in zip(found, kept, strict=True)]  # fmt: skip
        if norms:
            yield norms
        for run in runs:
            run.close()

    def _document(self, part: OpenPart, prompt: int) -> str:
        """Return the path that error messages use for a part's prompt."""
        first = self._plan.tokens.prompts[part.part.prompts[prompt]]
        return f"document {int(self._plan.tokens.document_of(first))}"

    def _fetch(self, part: OpenPart, runs: list[Run], prompts: list[int]) -> list[dict[str, Any]]:
        """Return every run's rows by site, and read its features. Raises `NotFinite` for the document whose rows
        overflow."""
        sites = [one.site.name for one in self._reductions]

        def fetch(some: list[Run]) -> list[dict[str, Any]]:
            if self._recipe.features:
                self._lm.lens(some)
            return list(self._lm.fetch(some, sites, copy=False)) if sites else [{} for _ in some]

        try:
            return fetch(runs)
        except NotFinite:
            for run, i in zip(runs, prompts, strict=True):
                try:
                    fetch([run])
                except NotFinite as error:
                    raise error.under(self._document(part, i)) from None
            raise

    def _norms(self, by_site: dict[str, Any], which: np.ndarray) -> np.ndarray:
        """Return the norms of a prompt's kept rows at every site, before any reduction, [n, sites]."""
        rows = [np.asarray(to_dtype(by_site[one.site.name], "float32")) for one in self._reductions]
        whole = [of_site.reshape(len(of_site), -1)[which] for of_site in rows]
        return np.stack([np.linalg.norm(of_site, axis=1) for of_site in whole], axis=1)

    def _kept(self, prompt: int) -> np.ndarray:
        """Return the indices of a prompt's captured rows that are kept."""
        first, end = self._plan.tokens.prompts[prompt : prompt + 2]
        return np.flatnonzero(self._plan.kept[first + self._first : end])

    def _reduced(self, one: SiteReduction, rows: Any, which: np.ndarray) -> np.ndarray:
        """Return the stored rows of a prompt at a site, [n, width]."""
        rows = to_dtype(rows, "float32" if one.changes else self._recipe.dtype)
        rows = rows.reshape(len(rows), -1)
        consecutive = len(which) and which[-1] - which[0] + 1 == len(which)
        rows = rows[which[0] : which[-1] + 1] if consecutive else rows[which]  # a slice avoids a copy
        return to_dtype(one(rows), self._recipe.dtype) if one.changes else rows


def _window(filters: Filters, plan: HarvestPlan) -> tuple[int, Tokens]:
    """Return the first captured position, and the selection to capture: the window of positions if it is the same for
    all prompts, otherwise every position."""
    whole_documents = len(plan.tokens.prompts) == len(np.unique(plan.tokens.documents))
    if len(filters.positions) != 1 or not whole_documents:
        return 0, every
    first, end = filters.positions[0]
    if (first or 0) < 0 or (end is not None and end < 0):
        return 0, every
    return first or 0, Positions("prompt", Range(first, end))
