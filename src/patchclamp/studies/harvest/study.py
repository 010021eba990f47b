"""`harvest`: write the activations of a data set's documents to disk, shuffled, from any engine.

Linear reductions of rows save disk space: projections (`Project`) and sums over documents. A projection is done by a
projected capture where possible, so that less data leaves the device. All other reductions are done on the host, in
fp32, document by document, before rows are rounded to the stored dtype.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.call import is_token_id
from patchclamp.errors import CapacityError, NotFinite, PatchclampError, ProgramError, ShapeError, UnsupportedSite
from patchclamp.language import Capture, Vector
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import Positions, Range, Tokens, every
from patchclamp.language.values import MAX_PROJECTED, as_array, as_dtype, as_flag, as_seed
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.sites import SiteRef
from patchclamp.store.captured import overflowed
from patchclamp.studies.harvest.plan import (
    Filters,
    Manifest,
    Plan,
    Recipe,
    StoredSite,
    documents_of,
    make_plan,
    needed,
    parts_for,
)
from patchclamp.studies.harvest.reader import DOCUMENTS, MANIFEST, Harvested
from patchclamp.studies.harvest.writer import (
    CHECKPOINT_BYTES,
    STORED,
    Batch,
    OpenPart,
    Writer,
    allow_files,
    is_sealed,
    stored,
    write_sealed,
)
from patchclamp.studies.inputs import check_whole, checked
from patchclamp.studies.study import Pace, StudyResult, model_identity, progress, provenance, run_batches


class Project:
    """Store W h instead of h: probes, directions, the first components of a PCA.

    matrix: W [K, D] for all sites, or one for each site by its name, as in {"resid_post[3]": W}
    on_device: project rows before they leave the device, if possible (`can_project`)
    """

    def __init__(self, matrix: Any, on_device: bool = True) -> None:
        self.on_device = as_flag(on_device, "on_device")
        if isinstance(matrix, Mapping):
            self._by_site = {str(site): _matrix(value) for site, value in matrix.items()}
            self._for_all = None
        else:
            self._by_site, self._for_all = {}, _matrix(matrix)

    def of(self, site: str, width: int) -> np.ndarray:
        """W [K, D] of a site of this width.

        Raises: `ProgramError` if there is none, `ShapeError` if it does not fit.
        """
        matrix = self._by_site.get(site, self._for_all)
        if matrix is None:
            raise ProgramError(f"no matrix for {site}; there are some for {', '.join(self._by_site)}", "project")
        if matrix.shape[1] != width:
            raise ShapeError(f"{site} is {width} wide; its matrix is {list(matrix.shape)}", "project")
        return matrix

    def unused(self, sites: list[str]) -> list[str]:
        """Sites with a matrix that are not among these."""
        return [site for site in self._by_site if site not in sites]


class Reduction(msgspec.Struct, frozen=True, eq=False):
    """The reduction of a document's kept rows [n, D] at one site: the same rows, their projections [n, K], or one row,
    the sum of either.

    matrix: W [K, D], or None
    sums: True if rows are summed
    on_device: True if rows arrive projected
    """

    matrix: np.ndarray | None
    sums: bool
    on_device: bool = False

    @property
    def digest(self) -> str:
        """A hash of the matrix, "" without one."""
        if self.matrix is None:
            return ""
        return hashlib.sha256(repr(self.matrix.shape).encode() + self.matrix.tobytes()).hexdigest()

    @property
    def changes(self) -> bool:
        """True if there is work left for the host."""
        return self.sums or (self.matrix is not None and not self.on_device)

    @property
    def captured_by(self) -> Vector | None:
        """The matrix of the projected capture; None if rows are captured whole."""
        return Vector.of(self.matrix) if self.on_device else None

    def width(self, width: int) -> int:
        return width if self.matrix is None else len(self.matrix)

    def captured(self, width: int) -> int:
        """The captured width of a row of this width."""
        return self.width(width) if self.on_device else width

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        rows = rows if self.matrix is None or self.on_device else rows @ self.matrix.T
        return rows.sum(axis=0, dtype=np.float64, keepdims=True).astype(np.float32) if self.sums else rows


def can_project(lm: LM, refs: Mapping[SiteRef, Reduction]) -> set[SiteRef]:
    """The sites of a harvest that can be captured projected. Their rows are not sharded across GPUs, they have fewer
    products than numbers in a row and not more than a capture allows, and the same tensor has no other projection."""
    ways: dict[int, set[tuple[str, tuple[int, int] | None]]] = {}
    for ref, reduction in refs.items():
        ways.setdefault(ref.point, set()).add((reduction.digest, ref.columns))
    return {
        ref for ref, reduction in refs.items()
        if reduction.matrix is not None and len(reduction.matrix) <= min(MAX_PROJECTED, reduction.matrix.shape[1] - 1)
        and lm.sites.whole(ref) and len(ways[ref.point]) == 1
    }  # fmt: skip


def _matrix(value: Any) -> np.ndarray:
    matrix = as_array(value, "project")
    if matrix.ndim != 2 or 0 in matrix.shape or not np.isfinite(matrix).all():
        raise ShapeError(f"expected a finite matrix [K, D], got {list(matrix.shape)}", "project")
    return matrix


SHARD_ROWS = 131_072
BATCH_BYTES = 1 << 29  # captured per batch, if that is between these numbers of tokens:
LEAST_TOKENS, MOST_TOKENS = 8_192, 32_768
FIRST_TOKENS = 256  # of the first batch; later ones grow according to speed
UNDER_WAY = 3  # batches: two are queued while one is fetched, which waits for the step in progress


class Harvest(StudyResult, frozen=True, eq=False, kw_only=True):
    """The result of a harvest.

    folder: of the data set, named by the hash of its recipe
    sites, dtype: of the stored rows
    documents, tokens: of the whole data set; cut_tokens: those that were cut off
    rows: of the whole data set, before caps on norms; ran: tokens that this call ran
    complete: True if all parts exist
    """

    folder: str
    sites: tuple[str, ...]
    dtype: str
    documents: int
    tokens: int
    cut_tokens: int
    rows: int
    ran: int
    complete: bool

    def open(self) -> Harvested:
        """Open the data set for reading."""
        return Harvested(self.folder)


@checked
def harvest(
    lm: LM,
    documents: Any,
    folder: str | Path,
    *,
    sites: Any,
    column: str | None = None,
    dtype: str = "bfloat16",
    filters: Filters | None = None,
    project: Project | Any = None,
    sums: bool = False,
    context: int | None = None,
    overlong: str = "refuse",
    seed: int = 0,
    parts: int | None = None,
    shard: tuple[int, int] = (0, 1),
    shard_rows: int = SHARD_ROWS,
    batch_tokens: int | None = None,
    checkpoint_bytes: int = CHECKPOINT_BYTES,
    show_progress: bool | None = None,
) -> Harvest:
    """Write the activations of documents' tokens at some sites to disk, shuffled; a stopped harvest is resumed.

    documents, column: as `documents_of` takes them: a list, a file of text, JSON lines or Parquet, or `datasets`
    folder: parent of the data set's folder, whose name is the hash of everything that its bytes depend on
    sites: sites to keep, as `capture=` takes them; each layer is a site of its own
    dtype: of the stored rows: bfloat16, float16 or float32
    filters: rows to keep
    project: W [K, D], one by site, or a `Project`: store W h instead of h
    sums: store the sum over each document's rows
    context, overlong: the longest prompt, and the treatment of longer documents: "refuse", "cut" or "split"
    seed: of the shuffle
    parts: number of parts. Documents are assigned to parts by hash; each part is shuffled separately, and written after
        the one before. By default 8, but of at least 256 MiB and at most 2 GiB, and equally many for each machine.
        Readers interleave them (`Harvested.order`)
    shard: (i, n) for machine i of n: it makes parts i, i + n, …
    shard_rows: rows in a file
    batch_tokens: largest number of tokens run at a time, by default chosen by the width of the rows. Batches that would
        take longer than about 2 s are smaller. Three are in flight, and a few more are being written
    checkpoint_bytes: a resumed harvest repeats at most twice this many bytes, and at most about 10 s of work

    Raises: `ProgramError` and `TokensError` for wrong arguments and documents, `CapacityError` if the disk is too
    small, and the error of any run.
    """
    needed("pyarrow.parquet")
    shard = _shard(shard)
    if filters is not None and not isinstance(filters, Filters):
        raise ProgramError(f"expected studies.Filters(...), got {type(filters).__name__}", "filters")
    chosen, dtype = filters or Filters(), as_dtype(dtype, "dtype")
    kinds = _kinds(lm, sites, project, sums, chosen.caps_norms)
    batch_tokens = _batch_tokens(kinds, dtype) if batch_tokens is None else batch_tokens
    shard_rows, batch_tokens, checkpoint_bytes = (
        check_whole(value, name, least) for name, value, least in (
            ("shard_rows", shard_rows, 1), ("batch_tokens", batch_tokens, 1),
            ("checkpoint_bytes", checkpoint_bytes, 0)))  # fmt: skip
    seed = _seed(seed)
    plan = make_plan(lm, documents_of(documents, column), chosen, context, overlong,
                     _parts(parts, shard[1], kinds, dtype), sums, seed, shard_rows)  # fmt: skip
    manifest = _manifest(lm, plan, kinds, dtype, chosen)
    place = _write_plan(Path(folder), manifest, plan)
    job = _Job(lm, plan, manifest, place, kinds, _window(chosen, plan), batch_tokens, checkpoint_bytes)
    ran = job.run(range(shard[0], plan.parts, shard[1]), show_progress)
    data = Harvested(place)
    data.write_statistics()
    return Harvest(
        provenance=provenance(lm, (seed,)), folder=str(place), sites=tuple(kind.site.name for kind in kinds),
        dtype=dtype, documents=manifest.documents, tokens=manifest.tokens, cut_tokens=manifest.cut_tokens,
        rows=sum(manifest.part_rows), ran=ran, complete=data.complete,
    )  # fmt: skip


class _Kind(NamedTuple):
    """A site, and the reduction of its rows."""

    site: StoredSite
    reduction: Reduction


class _Job:
    """Runs the prompts of some parts and passes their rows to the writer."""

    def __init__(
        self, lm: LM, plan: Plan, manifest: Manifest, place: Path, kinds: list[_Kind], window: tuple[int, Tokens],
        batch_tokens: int, checkpoint: int,
    ) -> None:  # fmt: skip
        self._lm, self._plan, self._recipe, self._place = lm, plan, manifest.recipe, place
        self._kinds, self._checkpoint = kinds, checkpoint
        self._first, self._tokens = window
        self._parts: list[OpenPart] = []
        self._asked: list[tuple[OpenPart, list[int]]] = []
        self._ran, self._pace = 0, Pace(batch_tokens, FIRST_TOKENS)

    def run(self, numbers: Sequence[int], show: bool | None) -> int:
        """Make some parts. Returns the number of tokens run."""
        try:
            self._open([self._plan.part(number) for number in numbers])
            self._writer = Writer(max((part.files for part in self._parts), default=1), 2 * len(self._parts))
            try:
                self._fill(show)
            finally:
                self._writer.stop()
        finally:
            for part in self._parts:
                part.close()
        return self._ran

    def _fill(self, show: bool | None) -> None:
        """Run the remaining prompts, and wait until their rows are written."""
        total = sum(self._lengths(part)[part.left].sum() for part in self._parts)
        with progress("harvesting", int(total), show, "tokens") as self._advance:
            run_batches(self._lm, self._calls(), self._read, UNDER_WAY, self._pace)
            self._writer.finish()

    def _open(self, parts: list[Any]) -> None:
        allow_files(2 * len(parts), 1)  # their ledgers, each with its log
        for part in parts:
            if not is_sealed(self._place, part):
                self._parts.append(OpenPart(self._place, self._recipe, self._place.name, self._plan.tokens, part,
                                            self._checkpoint))  # fmt: skip
        needs, free = sum(part.bytes_left for part in self._parts), shutil.disk_usage(self._place).free
        if needs > free:
            raise CapacityError(
                f"{needs / 1e9:.1f} GB are to be written to {self._place}, where {free / 1e9:.1f} GB are free: choose "
                "fewer sites, a narrower dtype, a projection, or another disk"
            )

    def _lengths(self, part: OpenPart) -> np.ndarray:
        """The number of tokens of each of a part's prompts."""
        return np.diff(self._plan.tokens.prompts)[part.part.prompts]

    def _calls(self) -> Iterator[dict[str, Any]]:
        """The calls that run every batch, part by part."""
        captures = [Capture(parse_site(kind.site.name), self._tokens, self._captured_dtype(kind),
                            kind.reduction.captured_by) for kind in self._kinds]  # fmt: skip
        for part in self._parts:
            if not len(part.left):
                self._writer.seal(part)
                continue
            lengths = self._lengths(part).tolist()
            for prompts in self._pace.parts(part.left.tolist(), lengths.__getitem__):
                self._asked.append((part, prompts))
                ids = [self._plan.tokens.prompt(int(part.part.prompts[i])) for i in prompts]
                yield {"prompt": ids, "max_tokens": 1, "capture": captures}

    def _captured_dtype(self, kind: _Kind) -> str:
        return "float32" if kind.reduction.changes else self._recipe.dtype

    def _read(self, runs: list[Run]) -> None:
        part, prompts = self._asked.pop(0)
        for run, i in zip(runs, prompts, strict=True):
            if run.error is not None:
                raise run.error.under(self._document(part, i))
        captured = self._fetch(part, runs, prompts)
        tokens = sum(len(run.prompt_token_ids) for run in runs)

        def rows() -> Iterator[list[np.ndarray]]:
            kept = [self._kept(part.part.prompts[i]) for i in prompts]
            norms = []
            if self._recipe.norms is not None:
                norms = [self._norms(by_site, which) for by_site, which in zip(captured, kept, strict=True)]
            if norms and self._recipe.sums:
                passing = [np.logical_and.reduce([self._recipe.filters.passing(of) for of in each.T]) for each in norms]
                kept = [(np.arange(which.start, which.stop) if isinstance(which, slice) else which)[of]
                        for which, of in zip(kept, passing, strict=True)]  # fmt: skip
                norms = [np.full((1, len(self._kinds)), 0 if of.any() else np.nan, np.float32) for of in passing]
            for kind in self._kinds:
                of_site = [by_site.pop(kind.site.name) for by_site in captured]
                blocks = [self._reduced(kind, *one) for one in zip(of_site, kept, strict=True)]
                for block, i in zip(blocks, prompts, strict=True):
                    if overflowed(block) is not None:
                        raise NotFinite(f"{kind.site.name} has numbers above 65,504, the largest of float16: store "
                                        "bfloat16 or float32", "dtype").under(self._document(part, i))  # fmt: skip
                yield blocks
            if norms:
                yield norms
            for run in runs:
                run.close()

        self._writer.put(part, Batch(prompts, rows))
        self._ran += tokens
        self._advance(tokens)

    def _document(self, part: OpenPart, prompt: int) -> str:
        """The path of one of a part's prompts in errors."""
        first = self._plan.tokens.prompts[part.part.prompts[prompt]]
        return f"document {int(self._plan.tokens.document_of(first))}"

    def _fetch(self, part: OpenPart, runs: list[Run], prompts: list[int]) -> list[dict[str, Any]]:
        """The rows of every run by site. Raises the error of the document whose rows overflow."""
        sites = [kind.site.name for kind in self._kinds]
        try:
            return self._lm.fetch(runs, sites, copy=False)
        except NotFinite:
            for run, i in zip(runs, prompts, strict=True):
                try:
                    self._lm.fetch([run], sites, copy=False)
                except NotFinite as error:
                    raise error.under(self._document(part, i)) from None
            raise

    def _norms(self, by_site: dict[str, Any], which: np.ndarray | slice) -> np.ndarray:
        """The norms of a prompt's kept rows at every site, before any reduction, [n, sites]."""
        rows = [np.asarray(by_site[kind.site.name], np.float32) for kind in self._kinds]
        whole = [of_site.reshape(len(of_site), -1)[which] for of_site in rows]
        return np.stack([np.linalg.norm(of_site, axis=1) for of_site in whole], axis=1)

    def _kept(self, prompt: int) -> np.ndarray | slice:
        """The indices of a prompt's captured rows that are kept, as a slice if they are consecutive."""
        first, end = self._plan.tokens.prompts[prompt : prompt + 2]
        kept = np.flatnonzero(self._plan.kept[first + self._first : end])
        together = kept[-1] - kept[0] + 1 == len(kept)  # a slice avoids a copy
        return slice(kept[0], kept[-1] + 1) if together else kept

    def _reduced(self, kind: _Kind, rows: Any, which: np.ndarray | slice) -> np.ndarray:
        """The stored rows of a prompt at a site, [n, width]."""
        if not kind.reduction.changes:
            rows = stored(rows, self._recipe.dtype)
            return rows.reshape(len(rows), -1)[which]
        rows = np.asarray(rows, np.float32)
        return stored(kind.reduction(rows.reshape(len(rows), -1)[which]), self._recipe.dtype)


def _batch_tokens(kinds: list[_Kind], dtype: str) -> int:
    """The number of tokens per batch, from the bytes captured per token."""
    sizes = [kind.site.captured * (4 if kind.reduction.changes else STORED[dtype].itemsize) for kind in kinds]
    return min(max(BATCH_BYTES // sum(sizes), LEAST_TOKENS), MOST_TOKENS)


def _parts(parts: int | None, machines: int, kinds: list[_Kind], dtype: str) -> int | Callable[[int], int]:
    """The number of parts, or a function of the number of rows."""
    if parts is None:
        row_bytes = sum(kind.site.width for kind in kinds) * STORED[dtype].itemsize
        return lambda rows: parts_for(rows, row_bytes, machines)
    parts = check_whole(parts, "parts", 1)
    if parts < machines:
        raise ProgramError(f"{machines} machines make at least as many parts, not {parts}", "parts")
    return parts


def _seed(seed: Any) -> int:
    try:
        return as_seed(seed)
    except PatchclampError as error:
        raise error.under("seed") from None


def _shard(shard: Any) -> tuple[int, int]:
    whole = isinstance(shard, tuple) and len(shard) == 2 and all(map(is_token_id, shard))
    if not (whole and 0 <= shard[0] < shard[1]):
        raise ProgramError(f"expected (i, n) with 0 <= i < n, got {shard!r}", "shard")
    return int(shard[0]), int(shard[1])


def _kinds(lm: LM, sites: Any, project: Project | Any, sums: bool, capped: bool) -> list[_Kind]:
    """Every site of every layer, once. Norm caps need whole rows on the host, which rules out projected captures."""
    project = Project(project) if project is not None and not isinstance(project, Project) else project
    reductions: dict[SiteRef, Reduction] = {}
    for number, text in enumerate(sites if isinstance(sites, (list, tuple)) else [sites]):
        try:
            refs = lm.sites.resolve(parse_site(text))
        except PatchclampError as error:
            raise error.under(f"sites[{number}]") from None
        for ref in refs:
            point = lm.sites.points[ref.point]
            if point.rows == "sampled":
                raise UnsupportedSite(
                    f"{ref} has rows of generated tokens alone, and a harvest keeps none: take final_norm",
                    f"sites[{number}]",
                )
            matrix = None if project is None else project.of(str(ref), _width(lm, ref))
            reductions[ref] = Reduction(matrix, sums)
    if not reductions:
        raise ProgramError("there is nothing to keep: name at least one site", "sites")
    if project is not None and (unused := project.unused(list(map(str, reductions)))):
        raise ProgramError(f"there is a matrix for {', '.join(unused)}, which is not among the sites", "project")
    on_device = (
        can_project(lm, reductions) if project is not None and project.on_device and not capped else set[SiteRef]()
    )
    kinds = []
    for ref, reduction in reductions.items():
        reduction, width = msgspec.structs.replace(reduction, on_device=ref in on_device), _width(lm, ref)
        site = StoredSite(str(ref), reduction.width(width), reduction.captured(width), reduction.digest)
        kinds.append(_Kind(site, reduction))
    return kinds


def _width(lm: LM, ref: SiteRef) -> int:
    """The width of a row at a site."""
    first, end = ref.columns or (0, lm.sites.points[ref.point].width)
    return end - first


def _manifest(lm: LM, plan: Plan, kinds: list[_Kind], dtype: str, filters: Filters) -> Manifest:
    model, weights = model_identity(lm)
    tokens = plan.tokens
    recipe = Recipe(
        model=model, weights=weights, engine=f"{lm.model.engine} {lm.model.version}", settings=lm.model.settings,
        weights_dtype=lm.model.dtype, documents=tokens.digest, sites=tuple(kind.site for kind in kinds), dtype=dtype,
        sums=plan.sums, filters=filters, seed=plan.seed, parts=plan.parts, shard_rows=plan.shard_rows,
    )  # fmt: skip
    return Manifest(recipe, len(tokens.documents) - 1, len(tokens.ids), tokens.cut, plan.part_rows)


def _write_plan(folder: Path, manifest: Manifest, plan: Plan) -> Path:
    """Create the data set's folder with the manifest and the documents' tokens, and return it."""
    import safetensors.numpy

    place = folder / manifest.recipe.name
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProgramError(f"{place} cannot be written: {error.strerror}", "folder") from None
    tokens = plan.tokens
    arrays = {"ids": tokens.ids, "documents": tokens.documents, "prompts": tokens.prompts}
    if not (place / DOCUMENTS).exists():
        write_sealed(place / DOCUMENTS, safetensors.numpy.save(arrays))
    if not (place / MANIFEST).exists():
        write_sealed(place / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return place


def _window(filters: Filters, plan: Plan) -> tuple[int, Tokens]:
    """The first captured position, and the selection to capture: the window of positions if it is the same for all
    prompts, otherwise every position."""
    whole_documents = len(plan.tokens.prompts) == len(np.unique(plan.tokens.documents))
    if len(filters.positions) != 1 or not whole_documents:
        return 0, every
    first, end = filters.positions[0]
    if (first or 0) < 0 or (end is not None and end < 0):
        return 0, every
    return first or 0, Positions("prompt", Range(first, end))
