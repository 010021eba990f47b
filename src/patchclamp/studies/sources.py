"""Sources of the values that a sweep writes into a cell: a row of another run, zeros, a vector from the bank, a mean
over prompts, or a row of a randomly drawn prompt.

D width of the patched row · T positions of a prompt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, TokensError
from patchclamp.language import From, Op, Replace, Site, Vector
from patchclamp.language.ops import Zero
from patchclamp.language.site import parse_site
from patchclamp.language.structs import PublicStruct
from patchclamp.language.tokens import Index, Positions, every
from patchclamp.language.values import Converted, Named, as_flag, as_items, as_kept, as_plain, check_name, field
from patchclamp.lm import LM
from patchclamp.plan.bound import pack_columns, position_ranges, run_key
from patchclamp.plan.cells import CellRecords, PatchedPart, patched_cells
from patchclamp.run import Run
from patchclamp.sites import SiteRef
from patchclamp.studies.inputs import Row, check_whole, chosen_positions, selection, words_of


class Zeros(PublicStruct, frozen=True):
    """Zero ablation."""


class Banked(Converted, frozen=True):
    """An entry of `lm.bank`: a vector, means, or a run's rows at the patched positions."""

    name: str


class MeanOf(Converted, frozen=True):
    """The mean over prompts, at all positions or at a selection.

    by_position: take the mean at each position separately; the prompts must be as long as the patched one, and a
        selection is not allowed
    Source: mean ablation, Wang et al. 2022 (arXiv:2211.00593), section 2.2.
    """

    prompts: Sequence[Any] = field(converter=as_kept)
    tokens: Any = None
    by_position: bool = False


class Resampled(Converted, frozen=True):
    """For each cell, the row at the same position of a randomly drawn prompt. All prompts have equal lengths.

    draws: the number of prompts drawn per cell, whose values are averaged
    Source: resample ablation, Chan et al. 2022, "Causal scrubbing" (Alignment Forum).
    """

    prompts: Sequence[Any] = field(converter=as_kept)
    seed: int = 0
    draws: int = 1


Source = Zeros | Banked | MeanOf | Resampled


def as_source(source: Any) -> Source:
    """Read a source from "zeros", "bank:NAME", an object, or a JSON object with the type mean or resampled."""
    if isinstance(source, dict):
        source = _of_json(source)
    if isinstance(source, (MeanOf, Resampled)):
        prompts = as_items(source.prompts, "source.prompts")
        if isinstance(source, MeanOf):
            by_position = as_flag(source.by_position, "source.by_position")
            if by_position and source.tokens is not None:
                raise ProgramError("not supported with by_position: pass one of the two", "source.tokens")
            try:
                None if source.tokens is None else selection(source.tokens)
            except PatchclampError as error:
                raise error.under("source.tokens") from None
            return msgspec.structs.replace(source, prompts=prompts, by_position=by_position)
        seed, draws = (as_plain(getattr(source, name), f"source.{name}") for name in ("seed", "draws"))
        seed, draws = check_whole(seed, "source.seed"), check_whole(draws, "source.draws", 1)
        return msgspec.structs.replace(source, prompts=prompts, seed=seed, draws=draws)
    if isinstance(source, (Zeros, Banked)):
        return source
    if isinstance(source, str) and source == "zeros":
        return Zeros()
    if isinstance(source, str) and source.startswith("bank:"):
        return Banked(check_name(source.removeprefix("bank:")))
    raise ProgramError(
        f"expected 'zeros', 'bank:NAME', studies.MeanOf(prompts) or studies.Resampled(prompts), got {source!r}",
        "source",
    )


def _of_json(source: dict[str, Any]) -> Source:
    kinds: dict[Any, type[MeanOf | Resampled]] = {"mean": MeanOf, "resampled": Resampled}
    if not isinstance(source.get("type"), str) or source["type"] not in kinds:
        raise ProgramError(f"expected {' or '.join(kinds)}, got {source.get('type')!r:.60}", "source.type")
    kind = kinds[source["type"]]
    fields = {name: value for name, value in source.items() if name != "type"}
    if unknown_ := fields.keys() - {*kind.__struct_fields__}:
        raise ProgramError(f"unknown field; available: {', '.join(kind.__struct_fields__)}", f"source.{min(unknown_)}")
    if "prompts" not in fields:
        raise ProgramError("missing field", "source.prompts")
    return kind(**fields)


def question_of_source(lm: LM, source: Source | None) -> Any:
    """Return everything about a source that determines the values of a study, as plain data."""
    if source is None or isinstance(source, Zeros):
        return type(source).__name__
    if isinstance(source, Banked):
        entry = _entry(lm, source.name, "source")
        rows = getattr(entry, "rows", None)
        if isinstance(entry, Vector):
            return ["bank", entry.content]
        return ["bank", {site: row.content for site, row in rows.items()} if isinstance(rows, dict) else str(entry)]
    ids = [words_of(lm, prompt, f"source.prompts[{i}]").ids for i, prompt in enumerate(source.prompts)]
    if isinstance(source, Resampled):
        return ["resampled", ids, source.seed, source.draws]
    return ["mean", ids, None if source.tokens is None else str(source.tokens), source.by_position]


def _entry(lm: LM, name: str, path: str) -> Any:
    """Return the bank entry with this name."""
    try:
        return lm.bank[name]
    except PatchclampError as error:
        raise error.under(path) from None


def in_words(source: Source) -> str:
    """Return a description of the written values: `zeros`, `'french' of the bank`, `the mean of 3 prompts`."""
    if isinstance(source, Zeros):
        return "zeros"
    if isinstance(source, Banked):
        return f"'{source.name}' of the bank"
    count = len(source.prompts)
    prompts = "1 prompt" if count == 1 else f"{count} prompts"
    if isinstance(source, Resampled):
        drawn = f", {source.draws} a cell" if source.draws > 1 else ""
        return f"rows of {prompts} drawn at random{drawn}"
    where = " by position" if source.by_position else "" if source.tokens is None else f" at {source.tokens}"
    return f"the mean of {prompts}{where}"


class Mixing(msgspec.Struct, frozen=True):
    """The weight of the new value, and the columns it applies to: `Replace`'s alpha and mask."""

    alpha: float = 1.0
    mask: Vector | Named | None = None

    def replace(self, value: Any, at: Site, write: tuple[int, ...]) -> Replace:
        return Replace(value, at=at, tokens=every[write], alpha=self.alpha, mask=self.mask)

    def question(self, lm: LM) -> dict[str, Any]:
        """Return the mix as plain data; a bank mask with its current values."""
        return {"alpha": self.alpha, "mask": msgspec.to_builtins(self.vector(lm))}

    def in_words(self, lm: LM) -> str:
        """Return the suffix of a description: ` with alpha 0.5 in 3 of 64 columns`; empty for a full replacement."""
        words = "" if self.alpha == 1 else f" with alpha {self.alpha:g}"
        mask = self.vector(lm)
        if isinstance(mask, Vector):
            numbers = mask.array()
            words += f" in {np.count_nonzero(numbers)} of {numbers.size} columns"
            words += "" if np.isin(numbers, (0, 1)).all() else ", weighted"
        return words

    def vector(self, lm: LM) -> Any:
        """Return the mask, from the bank if it is named; None if it covers all columns."""
        if not isinstance(self.mask, Named):
            return self.mask
        entry = _entry(lm, self.mask.name, "mask")
        return entry if isinstance(entry, Vector) else ["bank", str(entry)]


Sides = tuple[tuple[int, ...], tuple[int, ...]]  # positions to read and to write
Value = Callable[[Site, tuple[int, ...], tuple[int, ...]], Any]


class CellWriter:
    """Builds the edits of cells.

    value: returns the value for a site, given the positions to read from the source and to write; None if a subclass
        makes the edits
    scales: factors of the old and new value, for cells bound as arrays · run: the run that such cells read
    """

    def __init__(
        self, mixing: Mixing, value: Value | None, scales: tuple[float, float] = (0.0, 0.0), run: Run | None = None
    ) -> None:
        self.mixing: Mixing = mixing
        self.scales: tuple[float, float] = scales
        self.run: Run | None = run
        self._value = value

    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        """Return a cell's edits, one list per draw. `cell`: the indices of its prompt pair, row and column."""
        assert self._value is not None
        return [[self.mixing.replace(self._value(at, read, write), at, write) for at in row.sites]]

    def parts(self, lm: LM, row: Row) -> list[PatchedPart] | None:
        """Return the parts that a row's cells change; None unless cells differ only in positions (`plan.cells`)."""
        return None

    def close(self) -> None:
        """Free the captures."""


def cells_of_grid(lm: LM, writer: CellWriter, rows: Sequence[Row], sides: Sequence[Sides]) -> CellRecords | None:
    """Return the cells at `rows` and `sides` (N of each) as arrays; None if their edits must be bound one by one."""
    row_of, side_of = {row: i for i, row in enumerate(dict.fromkeys(rows))}, dict[Sides, int]()
    parts = []
    for row in row_of:
        of_row = writer.parts(lm, row)
        if of_row is None:
            return None
        parts.append(of_row)
    number = np.array([side_of.setdefault(side, len(side_of)) for side in sides])
    ranges = [position_ranges(np.array(write), np.array(read) if parts[0][0].key else None) for read, write in side_of]
    return patched_cells(writer.scales, parts, ranges, np.array([row_of[row] for row in rows]), number)


def _refs(lm: LM, row: Row) -> list[tuple[int, int]]:
    """Return the points of a row's sites, with their columns (`pack_columns`)."""
    refs = [ref for at in row.sites for ref in lm.sites.resolve(at)]
    return [(ref.point, pack_columns(ref.columns) if ref.columns else 0) for ref in refs]


class FromRun(CellWriter):
    """Rows of another run, which the caller closes."""

    run: Run

    def __init__(self, run: Run, mixing: Mixing) -> None:
        scales = 1.0 - mixing.alpha, mixing.alpha
        super().__init__(mixing, lambda at, read, write: From(run, at, every[read]), scales, run)

    def parts(self, lm: LM, row: Row) -> list[PatchedPart] | None:
        refs = _refs(lm, row)
        captured = [self.run.positions_of(point) for point, _ in refs]
        if self.mixing.mask is not None or any(len(at) == 0 or at[-1] != len(at) - 1 for at in captured):
            return None  # row i of the run must be position i
        return [PatchedPart(point, columns, run_key(self.run.key, point)) for point, columns in refs]


class ZeroWriter(CellWriter):
    """Overwrites cells with zeros, without mixing."""

    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        return [[Zero(at, every[write]) for at in row.sites]]

    def parts(self, lm: LM, row: Row) -> list[PatchedPart] | None:
        return [PatchedPart(point, columns, None) for point, columns in _refs(lm, row)]


class FromDrawn(CellWriter):
    """Rows of randomly drawn runs. A draw depends only on the seed and the cell, not on how cells are batched."""

    def __init__(self, runs: list[Run], seed: int, draws: int, mixing: Mixing) -> None:
        super().__init__(mixing, None)
        self._runs, self._seed, self._draws = runs, seed, draws

    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        drawn = np.random.default_rng((self._seed, *cell)).integers(len(self._runs), size=self._draws)
        return [FromRun(self._runs[i], self.mixing).edits(row, write, write, cell)[0] for i in drawn.tolist()]

    def close(self) -> None:
        for run in self._runs:
            run.close()


def opened(lm: LM, source: Source, rows: Sequence[Row], length: int | None, mixing: Mixing) -> CellWriter:
    """Run a source's prompts, and return a writer for cells of `rows`. `length`: tokens per patched prompt, None if
    lengths differ."""
    if isinstance(source, Zeros):
        if mixing == Mixing():
            return ZeroWriter(mixing, None)
        return CellWriter(mixing, lambda at, read, write: np.zeros(width_of(lm, lm.sites.resolve(at)[0]), np.float32))
    if isinstance(source, Banked):
        name, is_run = source.name, hasattr(_entry(lm, source.name, "source"), "positions_of")
        return CellWriter(mixing, lambda at, read, write: From(name, None, every[write]) if is_run else Named(name))
    prompts = [words_of(lm, prompt, f"source.prompts[{i}]") for i, prompt in enumerate(source.prompts)]
    if not prompts:
        raise ProgramError("expected at least one prompt, got none", "source.prompts")
    sites = list(dict.fromkeys(site for row in rows for site in row.sites))
    by_position = isinstance(source, MeanOf) and source.by_position
    if isinstance(source, Resampled) or by_position:
        _check_lengths([len(words.ids) for words in prompts], length)
    if isinstance(source, Resampled):
        runs = captured_runs(lm, [words.ids for words in prompts], sites)
        return FromDrawn(runs, source.seed, source.draws, mixing)
    chosen = [range(len(words.ids)) if source.tokens is None
              else chosen_positions(lm, words, source.tokens, "source.tokens") for words in prompts]  # fmt: skip
    means = _means(lm, [words.ids for words in prompts], sites, chosen, by_position)
    return CellWriter(
        mixing, lambda at, read, write: Vector.of(means[str(at)][list(write)] if by_position else means[str(at)])
    )


def captured_runs(lm: LM, prompts: Sequence[Sequence[int]], sites: Sequence[Site]) -> list[Run]:
    """Run prompts, capturing `sites` at every position. Raises the error of a failed run."""
    at_end, everywhere = Positions("prompt", -1), Positions("prompt")  # logits exist only at the prompt's end
    wanted = [Site(site.name, site.layers) @ (at_end if site.name == "logits" else everywhere) for site in sites]
    runs = lm.run([list(ids) for ids in prompts], max_tokens=1, capture=list(dict.fromkeys(wanted)))
    try:
        for run in runs:
            run.answer  # noqa: B018  raises the run's own error
    except BaseException:
        for run in runs:
            run.close()  # the error's frames may keep it alive for long
        raise
    return runs


def width_of(lm: LM, ref: SiteRef) -> int:
    """Return the width of a row at a site."""
    return ref.columns[1] - ref.columns[0] if ref.columns else lm.sites.points[ref.point].width


def check_widths(lm: LM, rows: Sequence[Row], source: Source | None, mixing: Mixing) -> None:
    """Raise `ShapeError` for a mask or bank vector whose width differs from the patched row's."""
    entry = _entry(lm, source.name, "source") if isinstance(source, Banked) else None
    sites = [at for row in rows for at in row.sites]
    for vector, path, what in ((mixing.vector(lm), "mask", "mask"), (entry, "source", "vector")):
        if not isinstance(vector, Vector):
            continue
        for at in sites:
            if vector.shape[-1] != (width := width_of(lm, lm.sites.resolve(at)[0])):
                raise ShapeError(f"{at}: expected a {what} of width {width}, got shape {list(vector.shape)}", path)


def columns_mask(lm: LM, sites: Sequence[Any], columns: Sequence[Index | None]) -> np.ndarray:
    """Return a mask [W] that is 1 in the given columns of a row and 0 elsewhere, for sites of one width."""
    refs = [ref for text in sites for ref in lm.sites.resolve(parse_site(text))]
    widths = sorted({width_of(lm, ref) for ref in refs})
    if len(widths) != 1:
        raise ProgramError(f"expected sites of equal width for one mask, got {', '.join(map(str, widths))}")
    mask = np.zeros(widths[0], np.float32)
    for index in columns:
        chosen = index if isinstance(index, int) else slice(None) if index is None else slice(*index.ends)
        if isinstance(chosen, int) and not -len(mask) <= chosen < len(mask):
            raise ProgramError(f"column {chosen} is out of range for rows of {len(mask)} columns")
        mask[chosen] = 1
    if not mask.any():
        raise ProgramError(f"expected at least one of {len(mask)} columns, got none")
    return mask


def _check_lengths(lengths: Sequence[int], length: int | None) -> None:
    if length is None:
        raise TokensError("source and patched prompts must align: expected patched prompts of equal length",
                          "source.prompts")  # fmt: skip
    if wrong := [i for i, of in enumerate(lengths) if of != length]:
        raise TokensError(f"source and patched prompts must align: expected {length} tokens, "
                          f"got {lengths[wrong[0]]} in prompt {wrong[0]}", "source.prompts")  # fmt: skip


def _means(
    lm: LM, prompts: Sequence[Sequence[int]], sites: Sequence[Site], chosen: Sequence[Sequence[int]], by_position: bool
) -> dict[str, np.ndarray]:
    """Return each site's mean, summed in fp64: over prompts and chosen positions [D], or over prompts [T, D]."""
    totals: dict[str, Any] = {}
    count = 0
    for ids, of_prompt in zip(prompts, chosen, strict=True):  # one at a time, because captures may be large
        (run,) = captured_runs(lm, [ids], sites)
        positions = list(of_prompt)
        count += 1 if by_position else len(positions)
        for site in sites:
            rows = np.asarray(run[site], np.float64)[positions].reshape(len(positions), -1)
            totals[str(site)] = totals.get(str(site), 0) + (rows if by_position else rows.sum(0))
        run.close()
    return {site: (total / count).astype(np.float32) for site, total in totals.items()}
