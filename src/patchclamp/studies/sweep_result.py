"""Results of sweeps: a grid of metric values with its spread over prompt pairs, its rows and columns, and its heatmap.

R rows (parts of the model) · P columns (positions, spans, or receivers) · N pairs of prompts · S panels · L layers
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from patchclamp.language.site import SITES, SPECS
from patchclamp.language.structs import PublicStruct
from patchclamp.plots import Anchor, Heatmap, HeatmapColumn, Mark, Panel, Strip
from patchclamp.plots.heatmap import EFFECT_FROM, EFFECT_TO, P_FAMILY, Side
from patchclamp.plots.style import number, quoted, visible
from patchclamp.studies.inputs import Column, Row, check_whole, layers_in, matched_label, panels_of
from patchclamp.studies.metric import METRICS
from patchclamp.studies.study import StudyResult

if TYPE_CHECKING:
    import pandas


class Cell(PublicStruct, frozen=True):
    """One patched run: its place, and its metric, averaged over pairs; `effect` is the change caused by the patch."""

    site: str
    layer: int | None
    column: Column
    value: float
    index: str = ""
    effect: float | None = None

    @property
    def panel(self) -> str:
        """The panel's name: `resid_pre`, or `z[:, 3]`."""
        return Row(self.site, self.layer, self.index).panel

    @property
    def where(self) -> str:
        """The cell's site: `resid_pre[8]`, or `z[8, 3]`."""
        return str(Row(self.site, self.layer, self.index))

    def __repr__(self) -> str:
        change = "" if self.effect is None else f" ({self.effect:+.2f})"
        return f"{self.where} @ {self.column.label!r}: {self.value:.2f}{change}"


class Pair(PublicStruct, frozen=True):
    """Two prompts, the graded tokens, and the metric of both unpatched runs.

    answer_ids, foil_ids: the graded tokens
    alignment: (clean, corrupt) positions; skipped: (side, position, token) of tokens without a partner; columns: the
    grid's columns in these prompts. In a study of one prompt the corrupt side is empty.
    """

    clean_prompt: str
    corrupt_prompt: str
    clean_tokens: tuple[str, ...]
    corrupt_tokens: tuple[str, ...]
    answer: str
    foil: str | None
    clean: float
    corrupt: float | None
    columns: tuple[Column, ...]
    alignment: tuple[tuple[int, int], ...] = ()
    skipped: tuple[tuple[Side, int, str], ...] = ()
    answer_ids: tuple[int, ...] = ()
    foil_ids: tuple[int, ...] | None = None


class Block(msgspec.Struct, frozen=True):
    """Several cells patched at once by a zoom: indices of their rows and columns in the grid."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    value: float


class Sweep(StudyResult, frozen=True, eq=False, kw_only=True):
    """The base of sweeps. `values` [R, P] is the metric of the runs with one cell patched, NaN for cells not run.

    pairs: the prompts; rows, columns: the grid's rows, and its columns with the first pair's positions
    each: [N, R, P], the metric in every pair (and for every seed); `values` is its mean
    clean, corrupt: the metric of the unpatched runs, means over the pairs
    noise_floor: the largest change of the metric in reruns of the unpatched prompts, which are spread through the
        batches; smaller effects are not meaningful
    effect: [R, P], `values` minus the unpatched run's metric; None before the sweep has finished
    low, high: [R, P], the ends of the 95 % confidence interval of `values`: percentile bootstrap over pairs; None for
        one pair
    effect_low, effect_high: the same for `effect`, from differences within each pair; excludes 0 for a clear effect
    p, p_family: [R, P], p-values of the effect from sign flips over pairs: uncorrected, and corrected for all cells
    blocks: the blocks patched before the grid's cells, if the sweep zoomed in
    source: description of the values written into the cells and of their mixing; empty in results of older versions
    question: everything that determines the values, as JSON; `asked` reads it
    computed: description of how much of each run was computed, on engines that skip parts that edits cannot change
    """

    metric: str
    pairs: tuple[Pair, ...]
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    values: np.ndarray
    each: np.ndarray
    clean: float
    corrupt: float | None
    noise_floor: float
    direction: Literal["denoising", "noising"] = "denoising"
    effect: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    effect_low: np.ndarray | None = None
    effect_high: np.ndarray | None = None
    p: np.ndarray | None = None
    p_family: np.ndarray | None = None
    blocks: tuple[Block, ...] = ()
    source: str = ""
    question: str = ""
    computed: str = ""

    # words of plots, filled in by `in_words`
    done: ClassVar[str] = ""  # the intervention on the runs
    cell: ClassVar[str] = ""  # the content of a cell
    unpatched: ClassVar[str] = "{patched}"  # the name of the baseline
    axis: ClassVar[str] = "token"

    @property
    def asked(self) -> dict[str, Any]:
        """Everything that determines the values: the prompts' token ids, graded tokens, columns, rows, and the study's
        own settings, such as source, alpha, mask and zoom; entries of the bank by content. Empty in results of older
        versions."""
        return msgspec.json.decode(self.question) if self.question else {}

    @property
    def patched(self) -> Side:
        """The side whose prompt is run with patches; its unpatched run is the baseline of every cell."""
        return "corrupt" if self.direction == "denoising" else "clean"

    def in_words(self, template: str) -> str:
        """Fill a template with the names of both sides and the source of the values."""
        other = "clean" if self.patched == "corrupt" else "corrupt"
        own = f"{other} activations"  # the default source
        origin = f"from the {other} run" if self.source in ("", own) else f"with {self.source}"
        by = f" by {self.source}" if self.source else ""
        return template.format(patched=self.patched, other=other, source=self.source or own, by=by, origin=origin)

    @property
    def baseline(self) -> float:
        """The metric without a patch."""
        value = getattr(self, self.patched)
        assert value is not None
        return value

    @property
    def goal(self) -> float | None:
        """The other prompt's metric, which patches should approach; None without another prompt."""
        return self.clean if self.patched == "corrupt" else self.corrupt

    # -- shorthands for the provenance and the first pair

    @property
    def model(self) -> str:
        return self.provenance.model

    @property
    def engine(self) -> str:
        return self.provenance.engine

    @property
    def dtype(self) -> str:
        return self.provenance.dtype

    @property
    def clean_tokens(self) -> tuple[str, ...]:
        return self.pairs[0].clean_tokens

    @property
    def corrupt_tokens(self) -> tuple[str, ...]:
        return self.pairs[0].corrupt_tokens

    @property
    def answer(self) -> str:
        return self.pairs[0].answer

    @property
    def foil(self) -> str | None:
        return self.pairs[0].foil

    @property
    def alignment(self) -> tuple[tuple[int, int], ...]:
        return self.pairs[0].alignment

    @property
    def skipped(self) -> tuple[tuple[Side, int, str], ...]:
        return self.pairs[0].skipped

    # -- the grid

    @property
    def sites(self) -> tuple[str, ...]:
        """The panels: sites, or for groups of heads, neurons or experts the site with its index, such as `z[:, 3]`."""
        return tuple(panels_of(self.rows))

    @property
    def layers(self) -> tuple[int, ...]:
        return layers_in(self.rows)

    @property
    def grid(self) -> np.ndarray:
        """`values` as [S, L, P] of `sites`, `layers` and `columns`. A site without layers has its values in the first
        layer's row and NaN in the others."""
        return self.as_grid(self.values)

    def as_grid(self, values: np.ndarray) -> np.ndarray:
        """Reshape cells' values [R, P] to [S, L, P]."""
        panels, layers = self.sites, self.layers
        grid = np.full((len(panels), len(layers), len(self.columns)), np.nan)
        for row, of_row in zip(self.rows, values, strict=True):
            grid[panels.index(row.panel), 0 if row.layer is None else layers.index(row.layer)] = of_row
        return grid

    def _run(self) -> list[tuple[int, int]]:
        """Return the row and column of every cell that was run, in grid order."""
        in_order = sorted(range(len(self.rows)), key=lambda r: self.sites.index(self.rows[r].panel))
        return [(r, p) for r in in_order for p in np.flatnonzero(~np.isnan(self.values[r])).tolist()]

    def cells(self) -> list[Cell]:
        """Return every cell that was run, in grid order."""
        cells = []
        for r, p in self._run():
            row, value = self.rows[r], float(self.values[r, p])
            cells.append(Cell(row.site, row.layer, self.columns[p], value, row.index, value - self.baseline))
        return cells

    def best(self, count: int = 5) -> list[Cell]:
        """Return the cells that moved the metric furthest from the baseline towards the other prompt's, best first;
        without another prompt, the cells that moved it furthest either way."""
        count = check_whole(count, "count")
        if self.goal is None:
            return sorted(self.cells(), key=lambda cell: -abs(cell.value - self.baseline))[:count]
        towards = 1.0 if self.goal >= self.baseline else -1.0
        return sorted(self.cells(), key=lambda cell: -towards * cell.value)[:count]

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per cell: site, layer, index, column, clean and corrupt positions, value, effect over the
        baseline, and for several pairs both intervals and both p-values."""
        import pandas

        names = ("low", "high", "effect_low", "effect_high", "p", "p_family")
        spread = {name: getattr(self, name) for name in names}
        rows = [
            {
                "site": cell.site, "layer": cell.layer, "index": cell.index, "column": cell.column.label,
                "clean_positions": cell.column.clean, "corrupt_positions": cell.column.corrupt,
                "value": cell.value, "effect": cell.effect,
                **{name: float(of[at]) for name, of in spread.items() if of is not None},
            }
            for at, cell in zip(self._run(), self.cells(), strict=True)
        ]  # fmt: skip
        return pandas.DataFrame(rows)

    # -- pictures

    def picture(self) -> Heatmap:
        """Return plot data: one panel per site, sites without layers last. With few columns, heads, neurons and experts
        are on the horizontal axis."""
        # parts go across if every row is a part of a site, and there are few columns, no more than parts
        parts_across = all(row.index for row in self.rows) and len(self.columns) <= min(ACROSS, len(self.sites))
        panels, columns, axis = _by_part(self) if parts_across else _by_site(self)
        base, goal, words = self.patched, self.goal, metric_words(self)
        other = "clean" if base == "corrupt" else "corrupt"
        title = f"{self.in_words(self.done)}: {words.quantity}"
        largest = np.nanmax(np.abs(self.values - self.baseline), initial=-1.0)  # below 0: no cell was run
        if goal is not None and 0 <= largest < WEAK * abs(goal - self.baseline):
            title += f" (all effects below {WEAK * 100:.0f} % of the way to {other})"
        return Heatmap(
            title=title, metric=self.metric, formula=words.formula,
            explained=words.explained, provenance=self.provenance.where, panels=panels, columns=columns,
            baseline=Anchor(self.in_words(self.unpatched), base, self.baseline),
            goal=None if goal is None else Anchor(other, other, goal), noise_floor=self.noise_floor,
            strips=_strips(self), cell=self.in_words(self.cell), axis=axis, note=_note(self),
        )  # fmt: skip

    def __repr__(self) -> str:
        best = self.best(1)
        where = f", best {best[0].value:.3f} at {place(best[0])}" if best else ""
        known = {"clean": self.clean, "corrupt": self.corrupt}
        runs = ", ".join(f"{side} {known[side]:.3f}" for side in ("corrupt", "clean") if known[side] is not None)
        return f"<{type(self).__name__} {self.metric}: {runs}{where}>"


class PatchSweepResult(Sweep, frozen=True, eq=False, kw_only=True):
    """A patch sweep: cells of one prompt's run replaced by the other's (`patch_sweep`)."""

    done: ClassVar[str] = "Patching {source} into the {patched} run"
    cell: ClassVar[str] = "the {patched} run with one place patched {origin}"
    axis: ClassVar[str] = "token of the {patched} prompt"


class AblationSweepResult(Sweep, frozen=True, eq=False, kw_only=True):
    """An ablation sweep: cells of a prompt's run are ablated (`ablation_sweep`). `corrupt` is None."""

    done: ClassVar[str] = "Ablating one place at a time{by}"
    cell: ClassVar[str] = "the run with one place ablated{by}"
    unpatched: ClassVar[str] = "unablated"


class CausalTraceResult(Sweep, frozen=True, eq=False, kw_only=True):
    """A causal trace: the subject's embeddings are noised, and cells are restored to clean values (`causal_trace`).

    subjects: the noised positions of each pair; std: standard deviation of the added noise
    low, high: for several prompts the interval over prompts, after averaging each one's seeds; for one prompt the
        interval over its seeds, without p-values
    """

    subjects: tuple[tuple[int, ...], ...]
    std: float

    done: ClassVar[str] = "Restoring clean activations in runs with a noised subject"
    cell: ClassVar[str] = "a run with the subject noised and one place restored"
    unpatched: ClassVar[str] = "noised"


class PathPatchResult(Sweep, frozen=True, eq=False, kw_only=True):
    """Path patching: rows are senders, columns receivers (`path_patch`).

    frozen: the sites between sender and receiver that were frozen to the unpatched run
    notice: the reason why the effect on the logits is 0 by construction, if it is
    """

    frozen: tuple[str, ...]
    notice: str = ""

    done: ClassVar[str] = "Patching the paths from senders to receivers"
    cell: ClassVar[str] = "the {patched} run with the way from a sender to a receiver patched from the {other} run"
    axis: ClassVar[str] = "receiver"


def place(cell: Cell) -> str:
    """Return a cell's place: `resid_pre[8] @ ' Tower'`"""
    return f"{cell.where} @ {cell.column.label!r}"


WEAK = 0.01  # fraction of the way to the goal; the title states if no effect reaches it
ACROSS = 4  # with up to this many columns, parts of a site (heads, …) go across, in a panel for each column
EFFECT = ((EFFECT_FROM, "effect_low"), (EFFECT_TO, "effect_high"))
DETAILS = (("95 % interval from", "low"), ("to", "high"), *EFFECT, ("p", "p"), (P_FAMILY, "p_family"))
OVER_SEEDS = (("95 % interval over seeds from", "low"), ("to", "high"), *EFFECT)  # one prompt has no p-values


# -- the grid


def _by_site(sweep: Sweep) -> tuple[tuple[Panel, ...], tuple[HeatmapColumn, ...], str]:
    """Return a panel for each site or part of a site, the sweep's columns for the horizontal axis, and its label."""

    def panel(s: int, name: str) -> Panel:
        layers = (None,) if name in SITES and not SPECS[name].layered else sweep.layers
        return Panel(name, layers, *_cut(sweep, lambda grid: grid[s, : len(layers)]))

    panels = [panel(s, name) for s, name in enumerate(sweep.sites)]
    columns = tuple(HeatmapColumn(column.label, column.clean, column.corrupt) for column in sweep.columns)
    return tuple(sorted(panels, key=lambda panel: panel.rows == (None,))), columns, sweep.in_words(sweep.axis)


def _cut(
    sweep: Sweep, pick: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray | None, tuple[tuple[str, np.ndarray], ...]]:
    """Return a panel's values, its blocks' values, and its details. `pick` selects the panel from a grid [S, L, P]."""
    coarse = _coarse(sweep)
    details = [(label, getattr(sweep, field)) for label, field in (OVER_SEEDS if sweep.p is None else DETAILS)]
    return (
        pick(sweep.grid),
        None if coarse is None else pick(sweep.as_grid(coarse)),
        tuple((label, pick(sweep.as_grid(of))) for label, of in details if of is not None),
    )


def _by_part(sweep: Sweep) -> tuple[tuple[Panel, ...], tuple[HeatmapColumn, ...], str]:
    """Return a panel for each site and column of the sweep, the sites' parts for the horizontal axis, and its label."""
    parts = tuple(dict.fromkeys(row.index for row in sweep.rows))
    names = tuple(dict.fromkeys(row.site for row in sweep.rows))
    number = {panel: s for s, panel in enumerate(sweep.sites)}
    join = "→" if isinstance(sweep, PathPatchResult) else "@"

    def pick(name: str, p: int, grid: np.ndarray) -> np.ndarray:
        there = [number.get(f"{name}[:, {part}]") for part in parts]
        nothing = np.full(len(sweep.layers), np.nan)
        return np.stack([nothing if s is None else grid[s, :, p] for s in there], axis=1)

    panels = [
        Panel(f"{name} {join} {visible(column.label)}", sweep.layers, *_cut(sweep, functools.partial(pick, name, p)),
              part_of=(name, column.label))
        for p, column in enumerate(sweep.columns) for name in names
    ]  # fmt: skip
    first = sweep.columns[0]
    positions = (first.clean, first.corrupt) if len(sweep.columns) == 1 else ((), ())
    kinds = {SPECS[name].index for name in names}
    columns = tuple(HeatmapColumn(part, *positions) for part in parts)
    return tuple(panels), columns, kinds.pop() if len(kinds) == 1 else "part"


def _coarse(sweep: Sweep) -> np.ndarray | None:
    """Return the value of the smallest block around each cell, [R, P]; None without blocks."""
    if not sweep.blocks:
        return None
    coarse = np.full(sweep.values.shape, np.nan)
    for block in sorted(sweep.blocks, key=lambda block: -len(block.rows) * len(block.columns)):
        coarse[np.ix_(block.rows, block.columns)] = block.value
    return coarse


# -- prompts


def _strips(sweep: Sweep) -> tuple[Strip, ...]:
    if sweep.corrupt is None or isinstance(sweep, CausalTraceResult):
        subject = sweep.subjects[0] if isinstance(sweep, CausalTraceResult) else ()
        side = "corrupt" if isinstance(sweep, CausalTraceResult) else "clean"
        own: list[Mark] = ["differs" if p in subject else "same" for p in range(len(sweep.clean_tokens))]
        return (Strip(side, sweep.clean_tokens, tuple(own), "noised" if side == "corrupt" else "prompt"),)
    return (
        Strip("clean", sweep.clean_tokens, marks(sweep, 0)),
        Strip("corrupt", sweep.corrupt_tokens, marks(sweep, 1)),
    )


def marks(sweep: Sweep, own: int) -> tuple[Mark, ...]:
    """Mark each clean (`own` 0) or corrupt (`own` 1) token by comparison with its partner: same, differs or skipped."""
    tokens = (sweep.clean_tokens, sweep.corrupt_tokens)
    skipped = {position for side, position, _ in sweep.skipped if side == ("clean", "corrupt")[own]}
    same = {pair[own] for pair in sweep.alignment if tokens[0][pair[0]] == tokens[1][pair[1]]}
    return tuple(
        "skipped" if position in skipped else "same" if position in same else "differs"
        for position in range(len(tokens[own]))
    )


# -- words


def _note(sweep: Sweep) -> str:
    notes = []
    units, pairs = len(sweep.each), len(sweep.pairs)
    trace = sweep if isinstance(sweep, CausalTraceResult) else None
    if trace is not None:
        notes.append(f"Noise of standard deviation {number(trace.std)} on the embeddings of the subject.")
    if (window := max(len(row.layers) for row in sweep.rows)) > 1:
        notes.append(f"Each cell covers {window} adjacent layers around its own, fewer at the ends.")
    if units > 1:
        of = f"{pairs} prompts" if sweep.corrupt is None or trace is not None else f"{pairs} pairs of prompts"
        if trace is not None:
            of = f"{of} and {units // pairs} noise seeds each" if pairs > 1 else f"{units} noise seeds"
        notes.append(f"Means over {of}" + ("; the first is shown." if pairs > 1 else "."))
    if isinstance(sweep, PathPatchResult):
        at, sides = sweep.columns[0], (sweep.corrupt_tokens, sweep.clean_tokens)
        if len(at.clean) < max(map(len, sides)):
            texts = ["".join(tokens[p] for p in of) for tokens, of in zip(sides, (at.corrupt, at.clean), strict=True)]
            notes.append(f"Senders are patched at {matched_label(*texts[:: 1 if sweep.patched == 'corrupt' else -1])}.")
        notes += [sweep.notice] if sweep.notice else []
    return " ".join(notes)


class MetricWords(NamedTuple):
    """A metric in words: `logit difference ' Paris' − ' Rome'`, its formula, and one sentence."""

    quantity: str
    formula: str
    explained: str


def metric_words(sweep: Sweep) -> MetricWords:
    """Return the metric in words, with the tokens of the first pair. If pairs differ, the quantity names no tokens."""
    answer, foil = quoted(sweep.answer), quoted(sweep.foil or "")
    one, difference = answer, f"{answer} − {foil}"
    if len({(pair.answer, pair.foil) for pair in sweep.pairs}) > 1:
        one, difference = "the answer", "answer − foil"
    if sweep.metric not in METRICS:
        return MetricWords(sweep.metric, f"{sweep.metric}(log-probabilities)",
                           f"{sweep.metric} is a function of log-probabilities, given with the study.")  # fmt: skip
    if sweep.metric == "prob":
        return MetricWords(f"probability of {one}", f"p({answer} | prompt)",
                           f"The probability that the prompt continues with {answer}.")  # fmt: skip
    if sweep.metric == "logprob" or sweep.foil is None:
        certainty = f"The log-probability that the prompt continues with {answer}; 0 would be certainty."
        return MetricWords(f"log-probability of {one}", f"log p({answer} | prompt)", certainty)
    # log-probabilities of answers of several tokens are sums, not logits
    several = any(len(ids or ()) > 1 for pair in sweep.pairs for ids in (pair.answer_ids, pair.foil_ids))
    quantity = f"{'log-probability' if several else 'logit'} difference {difference}"
    if sweep.metric == "recovered":
        delta = f"log p({answer}) − log p({foil})" if several else f"logit({answer}) − logit({foil})"
        back = "brings back" if sweep.direction == "denoising" else "leaves"
        return MetricWords(
            f"recovered share of the {quantity}",
            f"(Δ patched − Δ corrupt) / (Δ clean − Δ corrupt), where Δ = {delta}",
            f"The part of the logit difference between {answer} and {foil} that the patch {back}: 0 is the corrupt "
            "run, 1 the clean one.",
        )
    difference = f"log p({answer} | prompt) − log p({foil} | prompt)"
    return MetricWords(
        quantity,
        difference if several else f"logit({answer}) − logit({foil}) = {difference}",
        f"How much the model favours {answer} over {foil}; below 0 it favours {foil}.",
    )
