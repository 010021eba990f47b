"""The base of studies that fill a grid: each cell is patched in one or several runs, and its values are averaged.

A study reads its arguments into a `GridPlan`: its prompts (`GridCase`), rows, and source of values (`sources`). The
plan grades the unpatched runs, repeats each with every cell patched in turn, and returns a `Sweep`. `Cells` runs graded
trials in batches. Reruns of the unpatched prompt among them measure the noise floor. Values are appended to a journal,
so that an interrupted study can resume.

`Zoom` goes from coarse to fine: it patches blocks of layers and positions at once, and splits the best into smaller
ones. A block's value is not the sum of its cells' values: a patch in one layer is overwritten by the next layer's, and
opposite effects cancel out. So a zoom finds strong cells with a tenth of the runs, but does not prove that the rest are
weak.

N unpatched runs · R rows · P columns
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from patchclamp.engines.grading import GradeJob, Grades
from patchclamp.errors import PatchclampError, ProgramError, TokensError, UnsupportedSite
from patchclamp.language import Op
from patchclamp.lm import LM
from patchclamp.plots.heatmap import Side
from patchclamp.run import Run
from patchclamp.store.journal import Journal
from patchclamp.studies import inputs, sources
from patchclamp.studies.inputs import Alignment, Column, Match, Row, Words
from patchclamp.studies.metric import Graded, Metric, Recorded, answer_tokens, grade, single_token, spread, text_of
from patchclamp.studies.study import Study, json_of, keeping, progress, provenance
from patchclamp.studies.sweep_result import Block, Cell, Pair, Sweep

MAX_SOURCE_BYTES = 1 << 28  # captured from the source prompts at a time


class GridListener(Protocol):
    """Receives the progress of a grid, possibly on another thread. An error it raises stops the study."""

    def start(self, sweep: Any, cells: int) -> None:
        """Receive the start of a study: its result, with NaN in all cells, and the number of cells to run (for a zoom,
        an upper bound)."""
        ...

    def cells(self, cells: list[Cell]) -> None:
        """Receive cells that have finished in all prompt pairs."""
        ...


class Grid(Study):
    """The base of studies whose result is a `Sweep`."""

    def plan(self, lm: LM) -> GridPlan:
        """Read and check the arguments."""
        raise NotImplementedError

    def _run(
        self, lm: LM, *, batch: inputs.Positive = 512, show_progress: inputs.Progress = None,
        listener: GridListener | None = None, resume: inputs.ResumeFile = None,
        check: Callable[[Any], None] | None = None,
    ) -> Sweep:  # fmt: skip
        plan = self.plan(lm)
        if check is not None:
            check(plan)
        if resume is not None and plan.zoom is not None and plan.cases[0].graded.custom is not None:
            raise ProgramError("not supported for a zoom with a custom metric, which has no stable key", "resume")
        with (
            plan.open,
            keeping(lm, plan.question, resume) as journal,
            progress(plan.verb, plan.total, show_progress) as advance,
        ):
            return plan.run(Cells(lm, batch, journal, advance), listener)


class PairGrid(Grid):
    """The base of grids over a clean and a corrupt prompt."""

    clean: inputs.Prompts
    """Prompt whose activations are patched in, as text or token ids; or a list with one prompt per pair: the grid is
    the mean over pairs."""
    corrupt: inputs.Prompts
    """Prompt that is run with these activations; for several pairs, a list of the same length."""
    answer: inputs.Answers
    """Expected answer of the clean prompt: text with its leading space, a token id, or a list of ids (graded exactly).
    One answer for all pairs, or a list with one per pair."""
    foil: inputs.Answers = None
    """Wrong answer to compare with. The metrics logprob and prob do not need one."""
    metric: inputs.MetricField = "logit_diff"
    """logit_diff, recovered, logprob or prob; in Python also a function or `Metric`."""
    direction: Literal["denoising", "noising"] = "denoising"
    """denoising (patch clean activations into the corrupt run) or noising (the reverse)."""
    layers: inputs.Layers = None
    """Layers for sites given without an index: a number, a list, or a range such as "0:12"; all by default."""
    seed: inputs.Whole = 0
    """Seed for the bootstrap interval and the significance test over pairs."""

    def cases(self, lm: LM, positions: Any) -> list[GridCase]:
        """Read every pair of prompts. With several pairs, an error's path includes the pair's index."""
        cleans, corrupts = (inputs.each_prompt(getattr(self, side), side) for side in ("clean", "corrupt"))
        if (count := len(cleans)) != len(corrupts):
            raise ProgramError(f"expected one corrupt prompt per clean prompt, got {count} clean and "
                               f"{len(corrupts)} corrupt", "corrupt")  # fmt: skip
        graded = graded_of(lm, self.answer, self.foil, self.metric, count)
        cases = []
        for i, (one, other) in enumerate(zip(cleans, corrupts, strict=True)):
            clean, corrupt = inputs.words_of(lm, *one), inputs.words_of(lm, *other)
            try:
                alignment = inputs.align(clean.ids, corrupt.ids, positions is not None)
                columns = _pair_columns(lm, clean, corrupt, alignment, positions, (i, count), self.direction)
                pairs = (pair for of in columns for pair in zip(of.clean, of.corrupt, strict=True))
                alignment = inputs.with_pairs(alignment, pairs)
            except PatchclampError as error:
                raise error.under(f"pair {i}") if count > 1 else error from None
            cases.append(GridCase(clean, corrupt, graded[i], alignment, columns))
        return cases


def _pair_columns(
    lm: LM, clean: Words, corrupt: Words, alignment: Alignment, positions: Any, of: tuple[int, int], direction: str
) -> tuple[Column, ...]:
    """Return the columns of pair `of[0]` out of `of[1]`: patched positions and their aligned partners."""
    denoising = direction == "denoising"
    words, other = (corrupt, "clean") if denoising else (clean, "corrupt")
    partner = {b: a for a, b in alignment.pairs} if denoising else dict(alignment.pairs)

    def make(label: str, chosen: tuple[int, ...], path: str) -> Column:
        alone = [p for p in chosen if p not in partner]
        if alone:
            raise TokensError(
                f"{list(chosen)}: position {alone[0]} ({words.tokens[alone[0]]!r}) has no partner in the {other} "
                f"prompt; aligned positions: {sorted(partner)}. Pair other tokens with "
                "pc.studies.Match(clean=…, corrupt=…)", path
            )  # fmt: skip
        partners = tuple(partner[p] for p in chosen)
        return Column(label, *((partners, chosen) if denoising else (chosen, partners)))

    def matched(label: str | None, match: Match, path: str) -> Column:
        pairs = match.pairs(lm, clean, corrupt, path)
        texts = ["".join(of.tokens[pair[side]] for pair in pairs) for side, of in enumerate((clean, corrupt))]
        written, read = reversed(texts) if denoising else texts
        return Column(label or inputs.matched_label(written, read), *zip(*pairs, strict=True))

    return tuple(inputs.columns_of(lm, words, sorted(partner), positions, *of, make, matched))


class PromptGrid(Grid):
    """The base of grids over single prompts."""

    prompt: inputs.Prompts
    """Prompt, as text or token ids; or a list of prompts: the grid is the mean over them."""
    answer: inputs.Answers
    """Expected answer: text with its leading space, a token id, or a list of ids (graded exactly). One answer for all
    prompts, or a list with one per prompt."""
    foil: inputs.Answers = None
    """Wrong answer to compare with. The metrics logprob and prob do not need one."""
    layers: inputs.Layers = None
    """Layers for sites given without an index: a number, a list, or a range such as "0:12"; all by default."""
    group: inputs.OptionalCount = None
    """Number of heads, neurons or experts per row: 1 gives each head a row; by default a row is the whole site."""
    window: inputs.Positive = 1
    """Number of adjacent layers patched together, centred on the cell's layer."""

    def read(self, lm: LM, metric: str | Metric) -> list[tuple[Words, Graded]]:
        """Return the prompts with their graded tokens."""
        prompts = inputs.each_prompt(self.prompt, "prompt")
        graded = graded_of(lm, self.answer, self.foil, metric, len(prompts))
        return list(zip([inputs.words_of(lm, *one) for one in prompts], graded, strict=True))


def graded_of(lm: LM, answer: Any, foil: Any, metric: str | Metric, count: int) -> list[Graded]:
    """Return, for each of `count` prompts, the metric with its graded tokens."""
    graded: list[Graded] = []
    own: dict[str | int, int] = {}
    for i, token in enumerate(metric.tokens if isinstance(metric, Metric) else ()):
        own[token] = one = single_token(lm, token, f"metric.tokens[{i}]")
        own[one] = one
    each = zip(inputs.one_each(answer, count, "answer"), inputs.one_each(foil, count, "foil"), strict=True)
    for i, (one, other) in enumerate(each):
        where = f"[{i}]" if count > 1 else ""
        tokens = answer_tokens(lm, one, f"answer{where}")
        foils = None if other is None else answer_tokens(lm, other, f"foil{where}")
        graded.append(grade(metric, tokens, foils, own))
    return graded


class GridCase(NamedTuple):
    """A pair of prompts with its graded tokens, alignment and columns. Without a second prompt, `corrupt` has no
    tokens; in a causal trace both prompts are the same."""

    clean: Words
    corrupt: Words
    graded: Graded
    alignment: Alignment
    columns: tuple[Column, ...]

    def side(self, name: Side) -> Words:
        return self.clean if name == "clean" else self.corrupt

    def pair(self, lm: LM, clean: float, corrupt: float | None) -> Pair:
        """Return the result's `Pair`, with the metric of both prompts."""
        sides: tuple[tuple[Side, tuple[int, ...]], ...] = (
            ("clean", self.alignment.clean_only), ("corrupt", self.alignment.corrupt_only),
        )  # fmt: skip
        return Pair(
            clean_prompt=self.clean.text, corrupt_prompt=self.corrupt.text, clean_tokens=self.clean.tokens,
            corrupt_tokens=self.corrupt.tokens, answer=text_of(lm, self.graded.answer),
            foil=None if self.graded.foil is None else text_of(lm, self.graded.foil), clean=clean, corrupt=corrupt,
            columns=self.columns,
            alignment=self.alignment.pairs, answer_ids=self.graded.answer, foil_ids=self.graded.foil,
            skipped=tuple((side, p, self.side(side).tokens[p]) for side, alone in sides for p in alone),
        )  # fmt: skip


class GridPlace(NamedTuple):
    """Cells that are patched together: the sites of `row`, in the grid columns with the indices `columns`. `at`: the
    first cell's row and column index."""

    row: Row
    columns: tuple[int, ...]
    at: tuple[int, int]


class Unit(NamedTuple):
    """An unpatched run, which is the baseline of the runs that patch its cells.

    before: edits that every patched run applies before the cell's edits
    base: the unpatched metric; offset, factor: the grid holds (metric − offset) · factor
    writer: returns the writer for the given places; sources are opened on first use
    number: the index of its case
    """

    prompt: Sequence[int]
    before: tuple[Op, ...]
    graded: Graded
    base: float
    offset: float
    factor: float
    writer: OpenWriter
    number: int


OpenWriter = Callable[[Sequence[GridPlace]], sources.CellWriter]


@dataclass(eq=False)
class GridPlan:
    """The checked arguments of a grid.

    cases: the prompts · rows: the grid's rows
    source: source of the values written into a cell, by default the other prompt's run · mixing: their weight against
        the old values, and the columns they apply to
    repeats: number of unpatched runs of each case's corrupt prompt
    seed: seed for intervals and tests over prompts · seeds: all seeds that the result records, if more
    settings: further arguments that determine the values, as plain data · extra: further fields of the result
    open: closes captures at the end, because an error's traceback could keep them alive
    """

    lm: LM
    study: Grid
    result: type[Sweep]
    cases: list[GridCase]
    rows: list[Row]
    direction: str = "denoising"
    source: sources.Source | None = None
    mixing: sources.Mixing = field(default_factory=sources.Mixing)
    seed: int = 0
    seeds: tuple[int, ...] = ()
    repeats: int = 1
    zoom: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    verb: str = "patching"
    open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.written: Side = "corrupt" if self.direction == "denoising" else "clean"
        self.columns: tuple[Column, ...] = inputs.same_columns(
            [case.columns for case in self.cases], self.written, bool(self.cases[0].corrupt.ids),
            [len(case.side(self.written).ids) for case in self.cases],
        )  # fmt: skip
        self.read: Side = "clean" if self.direction == "denoising" else "corrupt"
        self.draws: int = 1
        self.seeds = self.seeds or (self.seed,)
        if isinstance(self.source, sources.Resampled):
            self.draws, self.seeds = self.source.draws, (*self.seeds, self.source.seed)

    # -- size

    @property
    def units(self) -> int:
        """The number of unpatched runs, each the baseline of every cell."""
        return len(self.cases) * self.repeats

    @property
    def grid(self) -> int:
        """The number of grid cells in all units, patched or not."""
        return self.units * len(self.rows) * len(self.columns)

    @property
    def most(self) -> int:
        """An upper bound on the number of places patched in each unit."""
        return self.blocks.most

    @property
    def runs(self) -> int:
        """An upper bound on the number of patched runs, over units, places, draws and graded answer tokens."""
        return self.most * self.draws * self.repeats * sum(case.graded.runs for case in self.cases)

    @property
    def captured_bytes(self) -> int:
        """The peak size of captures from the source prompts, in bytes of fp32."""
        if self.source is None:
            return max(sum(self._bytes_of(i) for i in group) for group in self.groups())
        prompts = self.source.prompts if isinstance(self.source, (sources.MeanOf, sources.Resampled)) else ()
        lengths = [
            len(inputs.words_of(self.lm, prompt, f"source.prompts[{i}]").ids) for i, prompt in enumerate(prompts)
        ]
        return self._row_bytes * (sum if isinstance(self.source, sources.Resampled) else max)([0, *lengths])

    @functools.cached_property
    def reruns(self) -> int:
        """The approximate number of reruns of each unpatched run."""
        return max(BASELINES // self.units, MIN_RERUNS)

    @property
    def total(self) -> int:
        """The number of trials, one for each place, unit and draw; for a zoom, an upper bound."""
        return self.most * self.units * self.draws

    # -- content

    @functools.cached_property
    def possible(self) -> np.ndarray:
        """A mask [R, P] of the cells that exist."""
        return np.array([[self._possible(row, p) for p in range(len(self.columns))] for row in self.rows], bool)

    @functools.cached_property
    def blocks(self) -> Zoom:
        """The blocks patched first: single cells without a zoom. Raises `ProgramError` if no cell exists."""
        blocks = Zoom(self.possible, self.rows, len(self.columns), self.zoom)
        if not blocks.first:
            raise ProgramError("no cells to patch: none of the sites has a value at these positions")
        return blocks

    def _possible(self, row: Row, p: int) -> bool:
        """True if the cell exists: logits exist only at a prompt's last position."""
        if row.site != "logits":
            return True
        if any(len(tokens) > 1 for case in self.cases for tokens in case.graded.compared):
            raise UnsupportedSite("logits require an answer and a foil of one token each", "sites")
        ends = [((case.clean.last,), (case.corrupt.last,)) for case in self.cases]
        return all((case.columns[p].clean, case.columns[p].corrupt) == end
                   for case, end in zip(self.cases, ends, strict=True))  # fmt: skip

    def place(self, r: Sequence[int], p: Sequence[int]) -> GridPlace:
        """Return the place that patches rows `r`, all of one panel, and columns `p` together."""
        row = self.rows[r[0]]
        if len(r) > 1:
            layers = {at.layers for i in r for at in self.rows[i].sites if isinstance(at.layers, int)}
            row = msgspec.structs.replace(row, layers=tuple(sorted(layers)))
        return GridPlace(row, tuple(p), (r[0], p[0]))

    def sides(self, place: GridPlace, number: int) -> sources.Sides:
        """Return a place's positions to read and to write in case `number`."""
        column = _joined([self.cases[number].columns[i] for i in place.columns])
        return (column.clean, column.corrupt) if self.written == "corrupt" else (column.corrupt, column.clean)

    def parts(self, places: Sequence[GridPlace]) -> list[Sequence[GridPlace]]:
        """Split places into groups whose sources fit into memory."""
        return [places]

    @functools.cached_property
    def question(self) -> dict[str, Any]:
        """Everything that determines the values, as plain data: the journal's key."""
        pairs = [(case.clean.ids, case.corrupt.ids, case.graded.key, case.columns) for case in self.cases]
        return {
            "study": self.study.short, "pairs": msgspec.to_builtins(pairs), "rows": msgspec.to_builtins(self.rows),
            "direction": self.direction, "source": sources.question_of_source(self.lm, self.source),
            **self.mixing.question(self.lm), "zoom": self.zoom, **self.settings,
        }  # fmt: skip

    def groups(self) -> Iterator[list[int]]:
        """Yield the indices of cases whose sources are captured together."""
        group: list[int] = []
        size = 0
        for i in range(len(self.cases)):
            more = self._bytes_of(i)
            if group and size + more > MAX_SOURCE_BYTES:
                yield group
                group, size = [], 0
            group.append(i)
            size += more
        yield group

    @functools.cached_property
    def sites(self) -> list[Any]:
        """The patched sites."""
        return list(dict.fromkeys(site for row in self.rows for site in row.sites))

    @functools.cached_property
    def _row_bytes(self) -> int:
        """The size of one token's rows at all patched sites, in bytes of fp32."""
        points = {self.lm.sites.resolve(at)[0].point for at in self.sites}
        return sum(4 * self.lm.sites.points[point].width for point in points)

    def _bytes_of(self, number: int) -> int:
        """Return the size of all patched sites' rows for a case's longer prompt, in bytes of fp32."""
        return self._row_bytes * max(len(self.cases[number].clean.ids), len(self.cases[number].corrupt.ids))

    def before(self, number: int, repeat: int) -> tuple[Op, ...]:
        """Return the edits shared by all runs of one repeat of a case's corrupt prompt."""
        return ()

    @functools.cached_property
    def shared(self) -> sources.CellWriter:
        """The writer shared by all cases, if values do not come from the other prompt."""
        assert self.source is not None
        lengths = {len(case.side(self.written).ids) for case in self.cases}
        writer = sources.opened(
            self.lm, self.source, self.rows, lengths.pop() if len(lengths) == 1 else None, self.mixing
        )
        self.open.callback(writer.close)
        return writer

    def writers(self, group: Sequence[int], until: ExitStack) -> list[OpenWriter]:
        """Return, for each case of a group, a function that opens a writer for places. `until` closes the sources."""
        if self.source is not None:
            return [lambda places: self.shared] * len(group)

        @functools.cache
        def runs() -> list[Run]:
            found = sources.captured_runs(self.lm, [self.cases[i].side(self.read).ids for i in group], self.sites)
            for run in found:
                until.callback(run.close)
            return found

        return [lambda places, n=n: sources.FromRun(runs()[n], self.mixing) for n in range(len(group))]

    # -- running

    def run(self, cells: Cells, listener: GridListener | None) -> Sweep:
        """Run the unpatched baselines, then every cell, and return the result."""
        graded = cells.graded([trial for i in range(len(self.cases)) for trial in self._unpatched(i)])
        both = np.array(graded).reshape(len(self.cases), -1).tolist()  # clean, then corrupt, before normalisation
        scales = [case.graded.scale(of[0], float(np.mean(of[1:] or 0.0)))
                  for case, of in zip(self.cases, both, strict=True)]  # fmt: skip
        scaled = [[(value - offset) * factor for value in of]
                  for of, (offset, factor) in zip(both, scales, strict=True)]  # fmt: skip
        bases = [value for of in scaled for value in self._patched(of)]
        begun = self._begun(scaled)
        if listener is not None:
            listener.start(begun, self.blocks.most_single)

        def patch(blocks: Sequence[_Span], tell: bool) -> Filled:
            places = [self.place(*block) for block in blocks]

            def told(which: list[int], values: np.ndarray) -> None:
                assert listener is not None
                at = [(self.rows[places[i].at[0]], self.columns[places[i].at[1]]) for i in which]
                listener.cells([Cell(row.site, row.layer, column, value, row.index)
                                for (row, column), value in zip(at, values.tolist(), strict=True)])  # fmt: skip

            told_of = told if tell and listener is not None else None
            return self._filled(cells, places, both, scales, Finished(len(places), self.units * self.draws, told_of))

        singles, filled, blocks = zoom_in(self.blocks, patch, begun.baseline)
        each = begun.each.copy()
        for column, (r, p) in enumerate(singles):
            each[:, r, p] = filled.values[:, column]
        effect = (each - np.array(bases)[:, None, None]).mean(0)
        return msgspec.structs.replace(
            begun, each=each, values=each.mean(0), effect=effect, noise_floor=filled.floor, blocks=tuple(blocks),
            computed=cells.computed, **self._spread(each, np.array(bases)),
        )  # fmt: skip

    def _spread(self, each: np.ndarray, base: np.ndarray) -> dict[str, np.ndarray]:
        """Return confidence intervals and p-values of the mean over prompts. Each prompt's seeds are averaged first,
        since they are not independent. For a single prompt, intervals are over its seeds, without p-values."""
        run = ~np.isnan(each.mean(0))
        if len(self.cases) > 1:
            each, base = each.reshape(-1, self.repeats, *run.shape).mean(1), base.reshape(-1, self.repeats).mean(1)
        if len(each) == 1 or not run.any():
            return {}
        found = spread(each[:, run], base, self.seeds[0])
        grids = {name: np.full(run.shape, np.nan) for name in found._fields[: None if len(self.cases) > 1 else 4]}
        for name, grid in grids.items():
            grid[run] = getattr(found, name)
        return grids

    def _unpatched(self, number: int) -> Iterator[Trial]:
        """Yield a trial of a case's clean prompt, then all repeats of its corrupt prompt, if any."""
        case = self.cases[number]
        yield Trial(case.clean.ids, (), case.graded)
        for repeat in range(self.repeats if case.corrupt.ids else 0):
            yield Trial(case.corrupt.ids, self.before(number, repeat), case.graded)

    def _patched(self, of_case: list[float]) -> list[float]:
        """Select the baselines of a case's patched runs from its unpatched metrics (clean, then corrupt repeats)."""
        return of_case[1:] if self.written == "corrupt" else of_case[:1]

    def _begun(self, scaled: list[list[float]]) -> Sweep:
        """Return the result before any cell is patched."""
        pairs = [case.pair(self.lm, of[0], float(np.mean(of[1:])) if of[1:] else None)
                 for case, of in zip(self.cases, scaled, strict=True)]  # fmt: skip
        corrupt = [value for of in scaled for value in of[1:]]
        empty = np.full((self.units, len(self.rows), len(self.columns)), np.nan)
        source = f"{self.read} activations" if self.source is None else sources.in_words(self.source)
        return self.result(
            provenance=provenance(self.lm, self.seeds), metric=self.cases[0].graded.metric, pairs=tuple(pairs),
            rows=tuple(self.rows), columns=self.columns, values=empty[0], each=empty,
            clean=float(np.mean([pair.clean for pair in pairs])), corrupt=float(np.mean(corrupt)) if corrupt else None,
            noise_floor=np.nan, direction=self.direction,  # pyright: ignore[reportArgumentType]
            source=source + self.mixing.in_words(self.lm), question=json_of(self.question), **self.extra,
        )  # fmt: skip

    def _filled(
        self, cells: Cells, places: Sequence[GridPlace], both: list[list[float]], scales: list[tuple[float, float]],
        finished: Finished,
    ) -> Filled:  # fmt: skip
        """Patch every place in every unit, one group of cases and one part of the places at a time."""
        values, floor = [], 0.0
        for group in self.groups():
            with ExitStack() as until:
                writers = dict(zip(group, self.writers(group, until), strict=True))
                units = [
                    Unit(self.cases[i].side(self.written).ids, self.before(i, repeat),
                         self.cases[i].graded, base, *scales[i], writers[i], i)
                    for i in group for repeat, base in enumerate(self._patched(both[i]))
                ]  # fmt: skip
                done, filled = 0, []
                for part in self.parts(places):
                    filled.append(self._fill(cells, units, part, done, finished))
                    done += len(part)
            values.append(np.concatenate([of.values for of in filled], axis=1))
            floor = max(floor, *(of.floor for of in filled))
        return Filled(np.concatenate(values), floor)

    def _fill(
        self, cells: Cells, units: Sequence[Unit], places: Sequence[GridPlace], begin: int, finished: Finished
    ) -> Filled:
        """Patch every place in `units`. A cell's value is the mean of its draws. `begin`: offset of `places` in
        `finished`."""

        def rounds() -> list[Round]:
            return [Round(unit, places, [self.sides(place, unit.number) for place in places]) for unit in units]

        def tell(number: int, which: np.ndarray, values: np.ndarray) -> None:
            unit = units[number]
            finished.add(begin + which // self.draws, (values - unit.offset) * unit.factor)

        counts = [len(places) * self.draws] * len(units)
        found = cells.run([unit.graded for unit in units], counts, rounds, tell, self.reruns)
        values = [(of.trials.reshape(-1, self.draws).mean(1) - unit.offset) * unit.factor
                  for unit, of in zip(units, found, strict=True)]  # fmt: skip
        floors = [np.max(np.abs(of.baselines - unit.base)) * abs(unit.factor)
                  for unit, of in zip(units, found, strict=True)]  # fmt: skip
        return Filled(np.array(values).reshape(len(units), len(places)), float(max(floors)))


def _joined(columns: list[Column]) -> Column:
    if len(columns) == 1:
        return columns[0]
    both = sorted({pair for column in columns for pair in zip(column.corrupt, column.clean, strict=True)})
    label = f"{columns[0].label} … {columns[-1].label}"
    return Column(label, tuple(clean for _, clean in both), tuple(corrupt for corrupt, _ in both))


BOUND = 512  # trials that are bound together, if they run as requests
BASELINES = 8  # reruns of an unpatched prompt, spread through its cells, that measure the noise floor


class Trial(NamedTuple):
    """One graded run: a prompt's token ids, its edits, and the graded tokens."""

    prompt: Sequence[int]
    edits: Sequence[Op]
    graded: Graded


class Round:
    """The trials that share one unpatched run: every place, once per draw of the writer.

    sides: each place's positions to read and to write
    """

    def __init__(self, unit: Unit, places: Sequence[GridPlace], sides: Sequence[sources.Sides]) -> None:
        self._unit, self._places, self._sides = unit, places, sides
        self._writer = unit.writer(places)

    @functools.cached_property
    def _edits(self) -> list[list[Op]]:
        """The edits of each trial."""
        unit, each = self._unit, zip(self._places, self._sides, strict=True)
        return [[*unit.before, *edits] for place, sides in each
                for edits in self._writer.edits(place.row, *sides, (unit.number, *place.at))]  # fmt: skip

    def job(self, lm: LM, which: Sequence[int | None]) -> GradeJob:
        """Return the job that grades trials `which`, by index; None reruns the unpatched prompt."""
        unit = self._unit

        def as_programs(some: Sequence[int | None]) -> GradeJob:
            programs = [unit.before if i is None else self._edits[i] for i in some]
            return job_of(lm, unit.prompt, programs, unit.graded)

        records = sources.cells_of_grid(lm, self._writer, [place.row for place in self._places], self._sides)
        if records is None:
            return as_programs(which)
        job, run = as_programs([None]), self._writer.run

        @functools.lru_cache(2)
        def bound(part: int) -> GradeJob:
            return as_programs(which[part * BOUND : (part + 1) * BOUND])

        return msgspec.structs.replace(
            job, count=len(which), cells=lambda: records.take(which).after(job.cells()),
            bound=lambda i: bound(i // BOUND).bound(i % BOUND), sources=(*job.sources, *([] if run is None else [run])),
        )  # fmt: skip


def job_of(lm: LM, prompt: Sequence[int], programs: Sequence[Sequence[Op]], graded: Graded) -> GradeJob:
    """Return the job that grades programs on a prompt."""
    job = lm.grade_job(prompt, programs, graded.scores, top=graded.top)
    return msgspec.structs.replace(job, has_baseline=False)


class Values(NamedTuple):
    """A round's trial values [n], and the values of its baseline reruns."""

    trials: np.ndarray
    baselines: np.ndarray


Tell = Callable[[int, np.ndarray, np.ndarray], None]
"""Receives finished trials: the index of the round, the trials' indices in the round [n], and their values [n]."""


class Cells:
    """Grades trials on `lm`, up to `batch` at a time if they run as requests. Values in `journal` are not recomputed.

    advance: called with the number of finished trials, excluding reruns
    """

    def __init__(self, lm: LM, batch: int, journal: Journal | None, advance: Callable[[int], None]) -> None:
        self._lm, self._batch, self._advance = lm, batch, advance
        self.journal: Journal | None = journal
        self._routes: set[str] = set()  # routes of cells that were computed, not read from the journal
        self._runs, self._cut = 0, 0  # requests for cells, and how many of them began at a cut

    @property
    def computed(self) -> str:
        """A description of how much of each run was computed: all, or from the first edit onward; "" if unknown."""
        if "bulk" in self._routes:
            return "in batches, from the first edited position onward"
        if self._cut:
            return f"recomputed from the first edit onward ({self._cut} of {self._runs} runs)"
        why = self._lm.engine.whole_because
        return f"computed whole: {why}" if why and self._routes else ""

    def graded(self, trials: Sequence[Trial]) -> list[float]:
        """Return the metric of a few trials before normalisation. They run as requests, which do not wait for other
        batches. Trials in the journal are not rerun."""
        values = [trial.graded.value(of) for trial, of in zip(trials, self._take(len(trials)), strict=False)]
        left = trials[len(values) :]
        if left:
            jobs = [job_of(self._lm, trial.prompt, [trial.edits], trial.graded) for trial in left]
            new = np.zeros(len(left))
            self._grade(jobs, [trial.graded for trial in left], lambda which, of: new.put(which, of), "requests")
            values += new.tolist()
        return values

    def run(
        self, graded: Sequence[Graded], counts: Sequence[int], rounds: Callable[[], Sequence[Round]], tell: Tell,
        reruns: int = BASELINES,
    ) -> list[Values]:  # fmt: skip
        """Return the value of every trial, by round.

        graded, counts: each round's metric and number of trials · rounds: makes the rounds, if values are missing
        tell: called as trials finish; an error it raises stops the rest
        reruns: the approximate number of baselines per round
        """
        plan = [(number, i) for number, count in enumerate(counts) for i in _spread(count, reruns)]
        values = np.full(len(plan), np.nan)

        def told(which: np.ndarray) -> None:
            by_round: dict[int, list[int]] = {}
            for at in which.tolist():
                if plan[at][1] is not None:
                    by_round.setdefault(plan[at][0], []).append(at)
            for number, of in by_round.items():
                tell(number, np.array([plan[at][1] for at in of]), values[of])
            self._advance(sum(map(len, by_round.values())))

        def read(which: np.ndarray, new: list[float]) -> None:
            values[len(known) + which] = new
            told(len(known) + which)

        known = self._take(len(plan))
        values[: len(known)] = [graded[number].value(of) for (number, _), of in zip(plan, known, strict=False)]
        told(np.arange(len(known)))
        if len(known) < len(plan):
            made = rounds()
            by_round = {number: [i for _, i in of]
                        for number, of in itertools.groupby(plan[len(known) :], lambda entry: entry[0])}  # fmt: skip
            jobs = [made[number].job(self._lm, which) for number, which in by_round.items()]
            for grades in self._grade(jobs, [graded[number] for number in by_round], read):
                self._routes.add(grades.route)
                self._cut += grades.from_cut
            self._runs += sum(graded[number].runs * len(which) for number, which in by_round.items())
        numbers, is_trial = np.array([number for number, _ in plan]), np.array([i is not None for _, i in plan])
        return [Values(values[(numbers == n) & is_trial], values[(numbers == n) & ~is_trial])
                for n in range(len(counts))]  # fmt: skip

    def _take(self, count: int) -> list[Recorded]:
        kind: Any = Recorded
        return self.journal.take(kind, count) if self.journal is not None else []

    def _grade(
        self, jobs: Sequence[GradeJob], graded: Sequence[Graded], read: Callable[[np.ndarray, list[float]], None],
        route: Literal["any", "requests"] = "any",
    ) -> list[Grades]:  # fmt: skip
        """Run jobs, and append their records to the journal in order. `read` receives finished trials in any order:
        their indices over all jobs, and their values."""
        firsts = [0, *itertools.accumulate(job.count for job in jobs)]
        records: list[Any] = [None] * firsts[-1]
        written = 0

        def tell(i: int, grades: Grades, programs: np.ndarray) -> None:
            nonlocal written
            which = firsts[i] + programs
            new = graded[i].records(grades, programs)
            for at, record in zip(which.tolist(), new, strict=True):
                records[at] = record
            end = next((at for at in range(written, len(records)) if records[at] is None), len(records))
            if self.journal is not None and end > written:
                self.journal.append(records[written:end])
            written = end
            read(which, [graded[i].value(record) for record in new])

        return self._lm.graded(jobs, tell, self._batch, route)


def _spread(count: int, reruns: int) -> Iterator[int | None]:
    """Yield a round's trial indices, with baselines (None) spread evenly among them and one at the end."""
    every_nth = max(count // reruns, 1)
    for i in range(count):
        if i % every_nth == 0:
            yield None
        yield i
    yield None


MIN_RERUNS = 2


class Filled(NamedTuple):
    """Values [N, C] by unit and place, and their noise floor."""

    values: np.ndarray
    floor: float


class Finished:
    """Collects the values of `count` places, and reports a place's mean once all of its `parts` values have arrived."""

    def __init__(self, count: int, parts: int, tell: Callable[[list[int], np.ndarray], None] | None) -> None:
        self._sum, self._left, self._parts, self._tell = np.zeros(count), np.full(count, parts), parts, tell

    def add(self, places: np.ndarray, values: np.ndarray) -> None:
        """Add one unit's value for one draw to each of `places`."""
        np.add.at(self._sum, places, values)
        np.subtract.at(self._left, places, 1)
        done = np.unique(places)
        done = done[self._left[done] == 0]
        if self._tell is not None and len(done):
            self._tell(done.tolist(), self._sum[done] / self._parts)


COARSEST = 8  # layers and positions of the first blocks
LEVELS = 3  # number of times that blocks are halved


class Zoom:
    """The blocks of a grid. `possible` [R, P] marks existing cells; the `keep` best blocks of each size are split.
    Without `keep` all blocks are single cells."""

    def __init__(self, possible: np.ndarray, rows: Sequence[Row], columns: int, keep: int | None) -> None:
        self.possible: np.ndarray = possible
        self.keep: int = min(keep or 0, possible.size)
        if keep is None:
            self.first: list[_Span] = [_Span((r,), (p,)) for r, p in np.argwhere(possible).tolist()]
            return
        panels = [[i for i, row in enumerate(rows) if row.panel == name] for name in inputs.panels_of(rows)]
        self.first = self._whole(
            _Span(some, part) for panel in panels for some in _cut(panel, -(-len(panel) // COARSEST))
            for part in _cut(range(columns), -(-columns // COARSEST))
        )  # fmt: skip

    def _whole(self, spans: Iterable[_Span]) -> list[_Span]:
        """Return the spans whose cells all exist; split other spans into their existing cells."""
        whole: list[_Span] = []
        for span in spans:
            some = self.possible[np.ix_(span.rows, span.columns)]
            if some.all():
                whole.append(span)
            else:
                whole += [_Span((r,), (p,)) for r in span.rows for p in span.columns if self.possible[r, p]]
        return whole

    def parts(self, span: _Span) -> list[_Span]:
        """Halve a block along both axes."""
        return [_Span(rows, columns) for rows in _cut(span.rows, 2) for columns in _cut(span.columns, 2)]

    @property
    def most_single(self) -> int:
        """An upper bound on the number of cells patched alone."""
        return min(int(self.possible.sum()), 4 * self.keep * LEVELS + sum(span.single for span in self.first))

    @property
    def most(self) -> int:
        """An upper bound on the number of places patched in each unit."""
        return len(self.first) + 4 * self.keep * LEVELS


class _Span(NamedTuple):
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def single(self) -> bool:
        return len(self.rows) == len(self.columns) == 1


Patch = Callable[[Sequence[_Span], bool], Filled]
"""Patches blocks; the flag is True if listeners are notified."""


def zoom_in(zoom: Zoom, patch: Patch, baseline: float) -> tuple[list[tuple[int, int]], Filled, list[Block]]:
    """Return the patched single cells (row, column), their values [N, C], and the larger blocks patched first."""
    singles: list[tuple[int, int]] = []
    values: list[np.ndarray] = []
    blocks: list[Block] = []
    floor = 0.0
    spans = zoom.first
    while spans:
        larger = []
        alone = [span for span in spans if span.single]
        joint = [span for span in spans if not span.single]
        for some, single in ((joint, False), (alone, True)):
            if not some:
                continue
            filled = patch(some, single)
            floor = max(floor, filled.floor)
            means = filled.values.mean(0)
            if single:
                singles += [(span.rows[0], span.columns[0]) for span in some]
                values.append(filled.values)
            else:
                blocks += [Block(*span, float(value)) for span, value in zip(some, means, strict=True)]
                best = np.argsort(-np.abs(means - baseline), kind="stable")[: zoom.keep]
                larger = [part for i in sorted(best.tolist()) for part in zoom.parts(some[i])]
        spans = larger
    return singles, Filled(np.concatenate(values, axis=1), floor), blocks


def _cut(items: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Split items into at most `count` non-empty parts of nearly equal size."""
    return [tuple(part.tolist()) for part in np.array_split(items, count) if len(part)]
