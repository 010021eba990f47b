"""The edge sweep: which attention edges does an answer depend on?

A prompt is run many times. Each run knocks out one cell: in a window of layers, its queries cannot attend to its keys.
If the answer suffers, it needed information that these layers moved from the keys to the queries.

Source: attention knockout, Geva et al. 2023 (arXiv:2304.14767), section 5, with windows of 9 to 11 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from patchclamp.errors import ProgramError, TokensError
from patchclamp.language import Knockout, Op
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import every
from patchclamp.lm import LM
from patchclamp.studies import inputs, sources
from patchclamp.studies.grid import GridCase, GridPlan, PromptGrid
from patchclamp.studies.inputs import Alignment, Column, Row, Words
from patchclamp.studies.sweep_result import Sweep


class EdgeSweepResult(Sweep, frozen=True, eq=False, kw_only=True):
    """Result of knocking out attention edges in a prompt's run (`edge_sweep`). `corrupt` is None; a column stores its
    queries as `clean` positions and its keys as `corrupt` positions."""

    done: ClassVar[str] = "Knocking out attention edges"
    cell: ClassVar[str] = "the run with some edges knocked out"
    unpatched: ClassVar[str] = "unedited"
    axis: ClassVar[str] = "key"


class EdgeSweep(PromptGrid):
    """Knock out attention from queries to keys, by layers and heads, and show where the answer suffers.

    A cell combines a window of layers, a group of heads (or all), and a column's queries and keys. A cell includes a
    query only if it can attend to at least one of the cell's keys and to another token; `skipped` lists queries that no
    cell includes. Effects are relative to the unedited run.

    Raises: `ProgramError` for a wrong argument, `TokensError` for an empty selection, and the error of any run.
    """

    command = "edge-sweep"

    queries: inputs.Positions = ("prompt[-1]",)
    """Query tokens: selections of the prompt, each knocked out as a whole; the last token by default."""
    positions: inputs.Positions = None
    """Columns of the grid: selections of key tokens, each knocked out as a whole, or a mapping of labels to selections;
    by default one per token."""
    window: inputs.Positive = 9
    """Number of adjacent layers knocked out together, centred on the cell's layer; 9 in the paper for GPT-2 XL."""
    metric: inputs.MetricField = "logit_diff"
    """logit_diff, logprob or prob."""
    seed: inputs.Whole = 0
    """Seed for the bootstrap interval and the significance test over prompts."""

    def plan(self, lm: LM) -> GridPlan:
        if self.metric == "recovered":
            raise ProgramError("recovered requires a corrupt prompt: use logit_diff, logprob or prob", "metric")
        prompts = self.read(lm, self.metric)
        read = [self._columns(lm, words, i, len(prompts)) for i, (words, _) in enumerate(prompts)]
        if any(each.keys() != read[0][0].keys() for each, _ in read):
            raise TokensError("expected every prompt to have the same (query, key) columns", "queries")
        cases = [GridCase(words, Words((), (), ""), graded, Alignment((), (*sorted(skipped),), ()), tuple(of.values()))
                 for (words, graded), (of, skipped) in zip(prompts, read, strict=True)]  # fmt: skip
        rows = inputs.rows_of(lm, "pattern", self.layers, self.group, self.window, parse_site)
        return _EdgePlan(lm, self, EdgeSweepResult, cases, rows, direction="noising", source=sources.Zeros(),
                         seed=self.seed, verb="knocking out")  # fmt: skip

    def _columns(self, lm: LM, words: Words, number: int, count: int) -> tuple[dict[tuple[int, int], Column], set[int]]:
        """Return a prompt's columns by (query, key) selection index, and the queries that no column includes."""
        keys = inputs.columns_of(lm, words, range(len(words.ids)), self.positions, number, count,
                                 lambda label, at, _: Column(label, (), at))  # fmt: skip
        listed = list(self.queries) if isinstance(self.queries, (list, tuple)) else [self.queries]
        columns, skipped = dict[tuple[int, int], Column](), set[int]()
        for i, selection in enumerate(listed):
            skipped.update(queries := inputs.chosen_positions(lm, words, selection, f"queries[{i}]"))
            arrow = "" if len(listed) == 1 else f" → {selection}"
            for j, key in enumerate(keys):
                if seeing := tuple(query for query in queries if 0 < sum(k <= query for k in key.corrupt) <= query):
                    columns[i, j] = Column(key.label + arrow, seeing, key.corrupt)
        unseen = {*range(len(keys))} - {j for _, j in columns}
        if not columns or (unseen and self.positions is not None):
            raise TokensError("no query attends to both these keys and others: use fewer keys", "positions")
        return columns, skipped.difference(*(column.clean for column in columns.values()))


edge_sweep: Callable[..., EdgeSweepResult] = EdgeSweep.short_form("edge_sweep")


class _EdgePlan(GridPlan):
    """A grid whose cells hold queries as positions to write, and keys as positions to read."""

    def writers(self, group: Sequence[int], until: object) -> list[Callable[..., sources.CellWriter]]:
        return [lambda places: _KnockoutWriter(self.mixing, None)] * len(group)


class _KnockoutWriter(sources.CellWriter):
    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        return [[Knockout(every[read], at, every[write]) for at in row.sites]]
