"""The patch sweep: where in the model is the information that distinguishes a clean prompt from a corrupt one?

Denoising runs the corrupt prompt many times, each time with one cell (a site, a layer, a position) replaced by its
value in a run of the clean prompt. If that restores the clean answer, the cell carries the difference. Noising does the
reverse: cells of the corrupt run are patched into the clean one, and the answer suffers where it needs them.

Source: activation patching as in causal tracing, Meng et al. 2022 (arXiv:2202.05262), section 2.1; both directions and
practice after Heimersheim and Nanda 2024 (arXiv:2404.15255).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, UnsupportedSite, unknown
from patchclamp.language.values import as_mask
from patchclamp.lm import LM
from patchclamp.studies.grid import (
    Asked,
    Filled,
    Finished,
    Listener,
    Place,
    Trial,
    Unit,
    Zoom,
    carrying,
    check_seed,
    fill,
    pair_of,
    pairs_of,
    planned,
    question_of,
    reruns_for,
    with_values,
    zoom_in,
)
from patchclamp.studies.inputs import (
    Answers,
    Layers,
    MaskField,
    Positions,
    Progress,
    Prompts,
    ResumeFile,
    Sites,
    SourceField,
    Text,
    as_float,
)
from patchclamp.studies.sources import (
    FromRun,
    MeanOf,
    Mixing,
    Resampled,
    Source,
    Writer,
    as_source,
    captured_runs,
    check_widths,
    in_words,
    opened,
)
from patchclamp.studies.sources import question_of as question_of_source
from patchclamp.studies.study import Study, json_of, provenance
from patchclamp.studies.sweep_result import Cell, Column, PatchSweepResult, Row, Side, rows_of, same_columns, words_of

DIRECTIONS = ("denoising", "noising")
MAX_SOURCE_BYTES = 1 << 28  # captured from the source prompts at a time


class PatchSweep(Study):
    """Patch every site, layer and token of a clean run into a corrupt one, and show where the answer comes back.

    Denoising runs the corrupt prompt with one cell of the clean run: if the answer comes back, the cell carries the
    difference. Noising runs the clean prompt with one cell of the corrupt run, and shows what the answer needs.

    Raises: `TokensError` for prompts that cannot be aligned, `ProgramError` for a wrong argument, and the error of any
    run.
    """

    command = "sweep"

    clean: Prompts
    """Prompt whose activations are patched in, as text or token ids; or a list of prompts, one per pair, whose mean is
    the grid."""
    corrupt: Prompts
    """Prompt that is run with these activations; for several pairs, a list of the same length."""
    answer: Answers
    """Expected answer of the clean prompt, with its leading space: text, a token id, or a list of ids, graded exactly.
    One for all pairs, or a list with one per pair."""
    foil: Answers = None
    """Wrong answer to compare with. The metrics logprob and prob do not need one."""
    sites: Sites = ("resid_pre",)
    """Sites with or without layers, heads, neurons or experts: resid_pre, attn_out, z, 'z[:, 3]'."""
    layers: Layers = None
    """Layers of sites without an index: all by default, a number, a list, or a range such as "0:12"."""
    positions: Positions = None
    """Columns of the grid: selections of the patched prompt, such as -1 or span('Rome'), each patched together. A
    mapping gives them labels; its values may be lists with one selection per pair. All aligned positions by default."""
    metric: Text = "logit_diff"
    """logit_diff, recovered, logprob or prob."""
    direction: Text = "denoising"
    """denoising, or noising: cells of the corrupt run into the clean one."""
    group: int | None = None
    """Heads, neurons or experts per row: 1 for each head; the whole site by default."""
    window: int = 1
    """Adjacent layers patched together, around the layer of a cell; 1 is that layer alone."""
    source: SourceField = None
    """Values to write instead of the other prompt's: zeros, bank:NAME, `studies.MeanOf(prompts)` or
    `studies.Resampled(prompts)`."""
    alpha: float = 1.0
    """Weight of the new value in the mix with the old one."""
    mask: MaskField = None
    """Columns [W] of a row that are patched, as in `pc.Replace`."""
    zoom: int | None = None
    """Start with blocks of 8 layers × 8 positions and split this many of the best of each size; the grid then holds
    only the cells that were reached."""
    seed: int = 0
    """Seed of the confidence interval and of the test over pairs."""

    def _run(
        self,
        lm: LM,
        *,
        batch: int = 512,
        show_progress: Progress = None,
        listener: Listener | None = None,
        resume: ResumeFile = None,
        check: Callable[[Any], None] | None = None,
    ) -> PatchSweepResult:
        asked = _read(lm, self.clean, self.corrupt, self.answer, self.foil, self.metric, self.positions, self.direction)
        rows = rows_of(lm, self.sites, self.layers, self.group, self.window)
        try:
            mixing = Mixing(as_float(self.alpha, "alpha"), None if self.mask is None else as_mask(self.mask))
        except PatchclampError as error:
            raise error if error.path else error.under("mask") from None
        plan = SweepPlan(
            lm, asked, rows, same_columns([pair.columns for pair in asked]), self.direction,
            None if self.source is None else as_source(self.source), mixing, check_seed(self.seed), self.zoom,
        )  # fmt: skip
        check_widths(lm, rows, plan.source, mixing)
        if check is not None:
            check(plan)
        counts = [plan.most * plan.draws] * len(asked)
        total = planned(counts, reruns_for(len(asked)))
        try:
            with carrying(lm, "patching", total, plan.question, batch, show_progress, resume) as cells:
                return _sweep(plan, cells, plan.zooming, listener)
        finally:
            plan.close()


patch_sweep = PatchSweep.short_form("patch_sweep")


class SweepPlan:
    """The checked arguments of a sweep; `draws`: the runs of one cell."""

    def __init__(
        self, lm: LM, asked: list[Asked], rows: list[Row], columns: tuple[Column, ...], direction: str,
        source: Source | None, mixing: Mixing, seed: int, zoom: int | None,
    ) -> None:  # fmt: skip
        self.lm, self.asked, self.rows, self.columns, self.direction = lm, asked, rows, columns, direction
        self.source, self.mixing, self.seed, self.zoom = source, mixing, seed, zoom
        self.written: Side = "corrupt" if direction == "denoising" else "clean"
        self.draws = source.draws if isinstance(source, Resampled) else 1

    # -- size

    @property
    def grid(self) -> int:
        """Cells of the grid in all pairs, whether or not they are patched."""
        return len(self.asked) * len(self.rows) * len(self.columns)

    @property
    def most(self) -> int:
        """An upper bound on the places patched in each pair."""
        return len(self.places) if self.zooming is None else self.zooming.most

    @property
    def runs(self) -> int:
        """An upper bound on the runs with a patch, over pairs, places, draws, and graded tokens of an answer."""
        return self.most * self.draws * sum(len(pair.graded.questions) for pair in self.asked)

    @property
    def captured_bytes(self) -> int:
        """Bytes captured from the source prompts at a time, in fp32."""
        if self.source is None:
            return max(sum(self._bytes_of(i) for i in group) for group in self.groups())
        prompts = self.source.prompts if isinstance(self.source, (MeanOf, Resampled)) else ()
        lengths = [len(words_of(self.lm, prompt, f"source.prompts[{i}]").ids) for i, prompt in enumerate(prompts)]
        return self._row_bytes * (sum if isinstance(self.source, Resampled) else max)([0, *lengths])

    # -- content

    @functools.cached_property
    def possible(self) -> np.ndarray:
        """A mask of the grid's cells that exist, [R, P]."""
        return np.array([[self._possible(row, p) for p in range(len(self.columns))] for row in self.rows], bool)

    @functools.cached_property
    def places(self) -> list[tuple[int, int]]:
        """The cells, by row and column. Raises `ProgramError` if there are none."""
        places = [(int(r), int(p)) for r, p in np.argwhere(self.possible)]
        if not places:
            raise ProgramError("no cell to patch: no site has a value at any of the positions")
        return places

    @functools.cached_property
    def zooming(self) -> Zoom | None:
        """The blocks that are patched before single cells; None without a zoom."""
        if self.zoom is None:
            return None
        assert self.places
        return Zoom(self.possible, self.rows, len(self.columns), self.zoom)

    def _possible(self, row: Row, p: int) -> bool:
        """True if the cell exists: logits exist only at a prompt's last position."""
        if row.site != "logits":
            return True
        if any(len(pair.graded.questions) > 1 for pair in self.asked):
            raise UnsupportedSite("logits decide one token, and this answer or foil has several", "sites")
        return all(_ends(pair, pair.columns[p]) for pair in self.asked)

    def place(self, r: Sequence[int], p: Sequence[int]) -> Place:
        """Some rows of one panel and some columns, patched together."""
        row = self.rows[r[0]]
        if len(r) > 1:
            layers = {at.layers for i in r for at in self.rows[i].sites}
            row = msgspec.structs.replace(
                row, layers=tuple(sorted(layer for layer in layers if isinstance(layer, int)))
            )
        columns = [_joined([pair.columns[i] for i in p]) for pair in self.asked]
        return Place(row, columns, (r[0], p[0]))

    @functools.cached_property
    def shared(self) -> Writer:
        """The writer that all pairs share, if the values do not come from the other prompt."""
        assert self.source is not None
        lengths = {len(pair.side(self.written).ids) for pair in self.asked}
        return opened(self.lm, self.source, self.rows, lengths.pop() if len(lengths) == 1 else None, self.mixing)

    def close(self) -> None:
        """Close the shared writer; an error's frames may keep it alive for long."""
        shared = vars(self).pop("shared", None)
        if shared is not None:
            shared.close()

    @functools.cached_property
    def question(self) -> dict[str, Any]:
        return {
            "study": "patch_sweep", "pairs": question_of(self.asked), "rows": msgspec.to_builtins(self.rows),
            "direction": self.direction, "source": question_of_source(self.lm, self.source),
            **self.mixing.question(self.lm), "zoom": self.zoom,
        }  # fmt: skip

    @property
    def written_words(self) -> str:
        """A description of the values written into cells."""
        other = "clean" if self.written == "corrupt" else "corrupt"
        words = f"{other} activations" if self.source is None else in_words(self.source)
        return words + self.mixing.in_words(self.lm)

    def groups(self) -> Iterator[list[int]]:
        """Pairs whose sources are captured together."""
        group: list[int] = []
        size = 0
        for i in range(len(self.asked)):
            more = self._bytes_of(i)
            if group and size + more > MAX_SOURCE_BYTES:
                yield group
                group, size = [], 0
            group.append(i)
            size += more
        yield group

    @functools.cached_property
    def _row_bytes(self) -> int:
        """Bytes of one token at all sites."""
        refs = [self.lm.sites.resolve(at)[0] for row in self.rows for at in row.sites]
        return sum(4 * self.lm.sites.points[point].width for point in {ref.point for ref in refs})

    def _bytes_of(self, pair: int) -> int:
        """Bytes of the longer prompt of a pair at all sites."""
        return self._row_bytes * max(len(self.asked[pair].clean.ids), len(self.asked[pair].corrupt.ids))


def _sweep(plan: SweepPlan, cells: Any, zooming: Zoom | None, listener: Listener | None) -> PatchSweepResult:
    """The result, from the unpatched runs to the last cell."""
    baselines = cells.graded(_unpatched(plan))
    both = list(zip(baselines[::2], baselines[1::2], strict=True))  # clean and corrupt, before normalisation
    begun = _begun(plan, both)
    shape = (len(plan.asked), len(plan.rows), len(plan.columns))

    def patch(blocks: Sequence[tuple[Sequence[int], Sequence[int]]], tell: bool) -> Filled:
        where = [(rows[0], columns[0]) for rows, columns in blocks]

        def told(which: list[int], values: np.ndarray) -> None:
            assert listener is not None
            listener.cells([_cell(plan, *where[i], value) for i, value in zip(which, values.tolist(), strict=True)])

        finished = Finished(len(blocks), len(plan.asked) * plan.draws, told if tell and listener is not None else None)
        return _patched(plan, cells, [plan.place(*block) for block in blocks], both, finished)

    if listener is not None:
        listener.start(begun, zooming.most_single if zooming else len(plan.places))
    if zooming is None:
        singles, blocks = plan.places, ()
        filled = patch([([r], [p]) for r, p in singles], True)
    else:
        singles, filled, blocks = zoom_in(zooming, patch, _baseline(begun))
    each = np.full(shape, np.nan)
    for column, (r, p) in enumerate(singles):
        each[:, r, p] = filled.values[:, column]
    bases = [getattr(pair, plan.written) for pair in begun.pairs]
    sweep = with_values(begun, Filled(each, filled.floor), bases, cells.computed, plan.seed)
    return msgspec.structs.replace(sweep, blocks=tuple(blocks))


def _unpatched(plan: SweepPlan) -> list[Trial]:
    """The clean and corrupt prompt of every pair, in turn."""
    return [Trial(words.ids, (), pair.graded) for pair in plan.asked for words in (pair.clean, pair.corrupt)]


def _begun(plan: SweepPlan, both: list[tuple[float, float]]) -> PatchSweepResult:
    """The result before any cell is patched."""
    pairs = []
    for pair, values in zip(plan.asked, both, strict=True):
        offset, factor = pair.graded.scale(*values)
        pairs.append(pair_of(plan.lm, pair, *((value - offset) * factor for value in values)))
    empty = np.full((len(pairs), len(plan.rows), len(plan.columns)), np.nan)
    return PatchSweepResult(
        provenance=provenance(plan.lm, _seeds(plan)), metric=plan.asked[0].graded.metric, pairs=tuple(pairs),
        rows=tuple(plan.rows), columns=plan.columns, values=empty[0], each=empty,
        clean=float(np.mean([pair.clean for pair in pairs])), corrupt=float(np.mean([pair.corrupt for pair in pairs])),
        noise_floor=np.nan, direction=plan.direction,  # pyright: ignore[reportArgumentType]
        source=plan.written_words, question=json_of(plan.question),
    )  # fmt: skip


def _patched(
    plan: SweepPlan, cells: Any, places: list[Place], both: list[tuple[float, float]], finished: Finished
) -> Filled:
    """Every place in every pair, one group of pairs at a time."""
    values, floors = [], []
    for group in plan.groups():
        source = _Opened(plan, group)
        try:
            units = [_unit(plan, i, both[i], source.writer(n)) for n, i in enumerate(group)]
            mine = places
            if len(group) < len(both):
                mine = [place._replace(columns=[place.columns[i] for i in group]) for place in places]
            filled = fill(cells, units, mine, plan.draws, finished)
        finally:
            source.close()  # an error's frames may keep its runs alive for long
        values.append(filled.values)
        floors.append(filled.floor)
    return Filled(np.concatenate(values), max(floors))


def _unit(plan: SweepPlan, number: int, both: tuple[float, float], writer: Any) -> Unit:
    pair = plan.asked[number]
    base = both[1] if plan.written == "corrupt" else both[0]
    offset, factor = pair.graded.scale(*both)
    return Unit(pair.side(plan.written).ids, (), pair.graded, plan.written, base, offset, factor, writer, number)


class _Opened:
    """The source runs of some pairs, made when the first cell needs them."""

    def __init__(self, plan: SweepPlan, group: list[int]) -> None:
        self._plan, self._group = plan, group

    @functools.cached_property
    def _runs(self) -> list[Any]:
        plan, read = self._plan, "clean" if self._plan.written == "corrupt" else "corrupt"
        sites = list(dict.fromkeys(site for row in plan.rows for site in row.sites))
        return captured_runs(plan.lm, [plan.asked[i].side(read).ids for i in self._group], sites)

    def writer(self, number: int) -> Any:
        if self._plan.source is not None:
            return lambda: self._plan.shared
        return lambda: FromRun(self._runs[number], self._plan.mixing)

    def close(self) -> None:
        for run in vars(self).pop("_runs", ()):
            run.close()


def _read(
    lm: LM, clean: Any, corrupt: Any, answer: Any, foil: Any, metric: str, positions: Any, direction: str
) -> list[Asked]:
    if direction not in DIRECTIONS:
        raise unknown("direction", direction, DIRECTIONS, "direction")
    return pairs_of(
        lm, clean, corrupt, answer, foil, metric, positions, "corrupt" if direction == "denoising" else "clean"
    )


def _seeds(plan: SweepPlan) -> tuple[int, ...]:
    return (plan.seed, plan.source.seed) if isinstance(plan.source, Resampled) else (plan.seed,)


def _ends(pair: Asked, column: Column) -> bool:
    return (column.clean, column.corrupt) == ((pair.clean.last,), (pair.corrupt.last,))


def _joined(columns: list[Column]) -> Column:
    if len(columns) == 1:
        return columns[0]
    both = sorted({pair for column in columns for pair in zip(column.corrupt, column.clean, strict=True)})
    label = f"{columns[0].label} … {columns[-1].label}"
    return Column(label, tuple(clean for _, clean in both), tuple(corrupt for corrupt, _ in both))


def _cell(plan: SweepPlan, r: int, p: int, value: float) -> Cell:
    row = plan.rows[r]
    return Cell(row.site, row.layer, plan.columns[p], value, row.index)


def _baseline(sweep: PatchSweepResult) -> float:
    return sweep.baseline
