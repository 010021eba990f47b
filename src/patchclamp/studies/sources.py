"""What a cell is patched with: a row of another run, zeros, a vector of the bank, a mean over prompts, or a row of a
prompt drawn at random.

    D width of what is patched · T positions of a prompt
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, ShapeError, TokensError
from patchclamp.language import From, Op, Replace, Site, Vector
from patchclamp.language.ops import Zero
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import Index, Positions, every, parse_index
from patchclamp.language.values import Converted, Named, as_flag, as_items, as_plain, check_name
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies.inputs import check_whole, selection
from patchclamp.studies.sweep_result import Row, chosen_positions, words_of


class Zeros(msgspec.Struct, frozen=True):
    """Zeros: zero ablation."""


class Banked(Converted, frozen=True):
    """What `lm.bank` has under a name: a vector, means, or a run, whose rows at the patched positions are taken."""

    name: str


class MeanOf(Converted, frozen=True):
    """The mean over the positions of some prompts, or over those of a selection.

    by_position: the mean at each position by itself; then the prompts are as long as the patched one, and there is no
        selection
    Source: mean ablation, Wang et al. 2022 (arXiv:2211.00593), section 2.2.
    """

    prompts: Sequence[Any]
    tokens: Any = None
    by_position: bool = False


class Resampled(Converted, frozen=True):
    """The row of a prompt drawn for each cell from some that are as long as the patched one, at the same position.

    draws: how many prompts are drawn for a cell, whose value is their mean
    Source: resample ablation, Chan et al. 2022, "Causal scrubbing" (Alignment Forum).
    """

    prompts: Sequence[Any]
    seed: int = 0
    draws: int = 1


Source = Zeros | Banked | MeanOf | Resampled


def as_source(source: Any) -> Source:
    """A source from "zeros", "bank:NAME", an object, or one of JSON with the type mean or resampled."""
    if isinstance(source, dict):
        source = _of_json(source)
    if isinstance(source, (MeanOf, Resampled)):
        prompts = as_items(source.prompts, "source.prompts")
        if isinstance(source, MeanOf):
            by_position = as_flag(source.by_position, "source.by_position")
            if by_position and source.tokens is not None:
                raise ProgramError(
                    "a mean by position is of every position: give tokens or by_position", "source.tokens"
                )
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
        f"a source is 'zeros', 'bank:NAME', studies.MeanOf(prompts) or studies.Resampled(prompts), not {source!r}",
        "source",
    )


def _of_json(source: dict[str, Any]) -> Source:
    kinds: dict[Any, type[MeanOf | Resampled]] = {"mean": MeanOf, "resampled": Resampled}
    if not isinstance(source.get("type"), str) or source["type"] not in kinds:
        raise ProgramError(f"expected the type {' or '.join(kinds)}, got {source.get('type')!r:.60}", "source.type")
    kind = kinds[source["type"]]
    fields = {name: value for name, value in source.items() if name != "type"}
    if unknown_ := fields.keys() - {*kind.__struct_fields__}:
        raise ProgramError(f"expected {', '.join(kind.__struct_fields__)}", f"source.{min(unknown_)}")
    if "prompts" not in fields:
        raise ProgramError("expected prompts", "source.prompts")
    return kind(**fields)


def question_of(lm: LM, source: Source | None) -> Any:
    """What of a source decides the values of a study, as plain data."""
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
    """What the bank has under a name."""
    try:
        return lm.bank[name]
    except PatchclampError as error:
        raise error.under(path) from None


def in_words(source: Source) -> str:
    """What is written into cells: `zeros`, `'french' of the bank`, `the mean of 3 prompts`."""
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


class Writer(Protocol):
    """Writes the edits of cells."""

    draws: int

    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        """The edits of a cell, for each of its draws: positions `write` get what is at `read`. `cell`: the numbers of
        the pair of prompts, the row and the column."""
        ...

    def close(self) -> None:
        """Lets go of what was captured."""
        ...


class Mixing(msgspec.Struct, frozen=True):
    """How much of the new value is mixed in, and in which columns: `Replace`'s alpha and mask."""

    alpha: float = 1.0
    mask: Vector | Named | None = None

    def replace(self, value: Any, at: Site, write: tuple[int, ...]) -> Replace:
        return Replace(value, at=at, tokens=every[write], alpha=self.alpha, mask=self.mask)

    def question(self, lm: LM) -> dict[str, Any]:
        """As plain data; a mask of the bank with its numbers, as they are now."""
        return {"alpha": self.alpha, "mask": msgspec.to_builtins(self.vector(lm))}

    def in_words(self, lm: LM) -> str:
        """What follows the words of a source: ` with alpha 0.5 in 3 of 64 columns`; nothing where all of it counts."""
        words = "" if self.alpha == 1 else f" with alpha {self.alpha:g}"
        mask = self.vector(lm)
        if isinstance(mask, Vector):
            numbers = mask.array()
            words += f" in {np.count_nonzero(numbers)} of {numbers.size} columns"
            words += "" if np.isin(numbers, (0, 1)).all() else ", weighted"
        return words

    def vector(self, lm: LM) -> Any:
        """The mask, of the bank if it is named there; None if all columns are mixed in."""
        if not isinstance(self.mask, Named):
            return self.mask
        entry = _entry(lm, self.mask.name, "mask")
        return entry if isinstance(entry, Vector) else ["bank", str(entry)]


class _Light:
    """A writer that has nothing to let go of."""

    draws = 1

    def close(self) -> None:
        pass


class FromRun(_Light):
    """Rows that another run captured, which whoever captured it closes."""

    def __init__(self, run: Run, mixing: Mixing) -> None:
        self._run, self._mixing = run, mixing

    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        return [[self._mixing.replace(From(self._run, at, every[read]), at, write) for at in row.sites]]


class FromZeros(_Light):
    """Zeros."""

    def __init__(self, lm: LM, mixing: Mixing) -> None:
        self._lm, self._mixing = lm, mixing

    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        if self._mixing == Mixing():
            return [[Zero(at, every[write]) for at in row.sites]]
        return [[self._mixing.replace(np.zeros(width_of(self._lm, at), np.float32), at, write) for at in row.sites]]


class FromBank(_Light):
    """What the bank has under a name."""

    def __init__(self, lm: LM, name: str, mixing: Mixing) -> None:
        self._name, self._mixing = name, mixing
        self._is_run = hasattr(_entry(lm, name, "source"), "positions_of")

    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        value = From(self._name, None, every[write]) if self._is_run else Named(self._name)
        return [[self._mixing.replace(value, at, write) for at in row.sites]]


class FromMean(_Light):
    """Means by site, [D], or [T, D] by position."""

    def __init__(self, means: dict[str, np.ndarray], by_position: bool, mixing: Mixing) -> None:
        self._by_position, self._mixing = by_position, mixing
        self._means = means

    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        return [[self._mixing.replace(self._value(str(at), write), at, write) for at in row.sites]]

    def _value(self, at: str, write: tuple[int, ...]) -> Vector:
        mean = self._means[at]
        return Vector.of(mean[list(write)] if self._by_position else mean)


class FromDrawn:
    """Rows of runs, one drawn for each cell and draw by the seed and the cell alone: not by how cells are grouped."""

    def __init__(self, runs: list[Run], seed: int, draws: int, mixing: Mixing) -> None:
        self._runs, self._seed, self.draws, self._mixing = runs, seed, draws, mixing

    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        drawn = np.random.default_rng((self._seed, *cell)).integers(len(self._runs), size=self.draws)
        return [FromRun(self._runs[i], self._mixing).edits(row, write, write, cell)[0] for i in drawn.tolist()]

    def close(self) -> None:
        for run in self._runs:
            run.close()


def opened(lm: LM, source: Source, rows: Sequence[Row], length: int | None, mixing: Mixing) -> Writer:
    """A writer of a source for cells of some rows of a prompt of `length` tokens, None where prompts differ in length.
    Runs the prompts that the source is of."""
    if isinstance(source, Zeros):
        return FromZeros(lm, mixing)
    if isinstance(source, Banked):
        return FromBank(lm, source.name, mixing)
    prompts = [words_of(lm, prompt, f"source.prompts[{i}]") for i, prompt in enumerate(source.prompts)]
    if not prompts:
        raise ProgramError("at least one prompt is needed", "source.prompts")
    sites = list(dict.fromkeys(site for row in rows for site in row.sites))
    if isinstance(source, Resampled):
        _check_lengths([len(words.ids) for words in prompts], length)
        runs = captured_runs(lm, [words.ids for words in prompts], sites)
        return FromDrawn(runs, source.seed, source.draws, mixing)
    if source.by_position:
        _check_lengths([len(words.ids) for words in prompts], length)
    chosen = None
    if source.tokens is not None:
        chosen = [chosen_positions(lm, words, source.tokens, "source.tokens") for words in prompts]
    means = _means(lm, [words.ids for words in prompts], sites, chosen, source.by_position)
    return FromMean(means, source.by_position, mixing)


def captured_runs(lm: LM, prompts: Sequence[Sequence[int]], sites: Sequence[Site], score: Any = ()) -> list[Run]:
    """Runs of prompts that capture some sites at every position. Raises the error of one that failed."""
    names = {site.name for site in sites}
    wanted = [Site(site.name, site.layers) @ _readable(site.name) for site in sites]
    assert names or not sites
    runs = lm.run([list(ids) for ids in prompts], max_tokens=1, capture=list(dict.fromkeys(wanted)), score=score)
    try:
        for run in runs:
            run.answer  # noqa: B018  raises the run's own error
    except BaseException:
        for run in runs:
            run.close()  # the error's frames may hold them for long
        raise
    return runs


def width_of(lm: LM, at: Site) -> int:
    """How many numbers a row has at a site of one layer."""
    ref = lm.sites.resolve(at)[0]
    return ref.columns[1] - ref.columns[0] if ref.columns else lm.sites.points[ref.point].width


def check_widths(lm: LM, rows: Sequence[Row], source: Source | None, mixing: Mixing) -> None:
    """Raises `ShapeError` for a mask, or a vector of the bank, that is not as wide as what is patched."""
    entry = _entry(lm, source.name, "source") if isinstance(source, Banked) else None
    sites = [at for row in rows for at in row.sites]
    for vector, path, what in ((mixing.vector(lm), "mask", "mask"), (entry, "source", "vector")):
        if not isinstance(vector, Vector):
            continue
        for at in sites:
            if vector.shape[-1] != width_of(lm, at):
                raise ShapeError(f"{at} is {width_of(lm, at)} wide; the {what} is {list(vector.shape)}", path)


def columns_mask(lm: LM, sites: Sequence[Any], columns: Sequence[Index | None]) -> np.ndarray:
    """A mask [W] that is 1 in some columns of a row and 0 in the others, for sites of one width."""
    refs = [ref for text in sites for ref in lm.sites.resolve(parse_site(text))]
    widths = sorted({width_of(lm, Site(ref.name, ref.layer, parse_index(ref.index) if ref.index else None))
                     for ref in refs})  # fmt: skip
    if len(widths) != 1:
        raise ProgramError(f"one mask is for all sites, and their rows have {', '.join(map(str, widths))} columns")
    mask = np.zeros(widths[0], np.float32)
    for index in columns:
        chosen = index if isinstance(index, int) else slice(None) if index is None else slice(*index.ends)
        if isinstance(chosen, int) and not -len(mask) <= chosen < len(mask):
            raise ProgramError(f"there is no column {chosen}: a row has {len(mask)}")
        mask[chosen] = 1
    if not mask.any():
        raise ProgramError(f"no column is selected of {len(mask)}")
    return mask


def _readable(name: str) -> Positions:
    """What of a prompt to capture: logits exist at its end only."""
    return Positions("prompt", -1) if name == "logits" else Positions("prompt")


def _check_lengths(lengths: Sequence[int], length: int | None) -> None:
    wrong = [i for i, of in enumerate(lengths) if of != length]
    if length is None or wrong:
        one = f"prompt {wrong[0]} has {lengths[wrong[0]]} tokens" if wrong else "the patched prompts differ in length"
        raise TokensError(
            f"rows are taken at the same positions, so these prompts must be as long as the patched one "
            f"({length} tokens): {one}",
            "source.prompts",
        )


def _means(
    lm: LM,
    prompts: Sequence[Sequence[int]],
    sites: Sequence[Site],
    chosen: list[tuple[int, ...]] | None,
    by_position: bool,
) -> dict[str, np.ndarray]:
    """The mean at every site, over prompts and their chosen positions [D], or over prompts [T, D]; in fp64."""
    totals: dict[str, Any] = {}
    count = 0
    for i, ids in enumerate(prompts):  # one at a time: what they capture may be large
        (run,) = captured_runs(lm, [ids], sites)
        positions = list(range(len(ids))) if chosen is None else list(chosen[i])
        count += 1 if by_position else len(positions)
        for site in sites:
            rows = np.asarray(run[site], np.float64)[positions].reshape(len(positions), -1)
            totals[str(site)] = totals.get(str(site), 0) + (rows if by_position else rows.sum(0))
        run.close()
    return {site: (total / count).astype(np.float32) for site, total in totals.items()}
