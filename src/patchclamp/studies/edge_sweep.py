"""The edge sweep: along which edges of attention does an answer need information?

A prompt is run many times. Each run knocks out one cell: in a window of layers, some queries do not attend to some
keys. If the answer suffers, it needed what these layers moved from the keys to the queries.

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
    """An edge sweep: edges of attention in a prompt's run are knocked out (`edge_sweep`). `corrupt` is None; `clean` of
    a column has its queries, `corrupt` its keys."""

    done: ClassVar[str] = "Knocking out edges of attention"
    cell: ClassVar[str] = "the run with some edges knocked out"
    unpatched: ClassVar[str] = "unedited"
    axis: ClassVar[str] = "key"


class EdgeSweep(PromptGrid):
    """Knock out attention from queries to keys, by layers and heads, and show where the answer suffers.

    A cell is a window of layers, all heads or a group of them, some queries, and some keys. Effects are measured
    against the run without a knockout.

    Raises: `ProgramError` for a wrong argument, `TokensError` for an empty selection or a query that would be left with
    no key, and the error of any run.
    """

    command = "edge-sweep"

    queries: inputs.Positions = ("prompt[-1]",)
    """Selections of the prompt whose attention is cut, each together; the last token by default."""
    positions: inputs.Positions = None
    """Columns of the grid: selections of keys, each knocked out together, or a mapping of labels to selections; one per
    token by default."""
    window: inputs.Positive = 9
    """Adjacent layers knocked out together, around the layer of a cell; 9 in the paper for GPT-2 XL."""
    metric: inputs.MetricField = "logit_diff"
    """logit_diff, logprob or prob."""
    seed: inputs.Whole = 0
    """Seed of the confidence interval and of the test over prompts."""

    def plan(self, lm: LM) -> GridPlan:
        if self.metric == "recovered":
            raise ProgramError("a knockout has no other prompt to recover; take logit_diff, logprob or prob", "metric")
        prompts = self.read(lm, self.metric)
        cases = [
            GridCase(words, Words((), (), ""), graded, Alignment((), (), ()), self._columns(lm, words, i, len(prompts)))
            for i, (words, graded) in enumerate(prompts)
        ]
        rows = inputs.rows_of(lm, "pattern", self.layers, self.group, self.window, parse_site)
        return _EdgePlan(lm, self, EdgeSweepResult, cases, rows, direction="noising", source=sources.Zeros(),
                         seed=self.seed, verb="knocking out")  # fmt: skip

    def _columns(self, lm: LM, words: Words, number: int, count: int) -> tuple[Column, ...]:
        keys = inputs.columns_of(lm, words, range(len(words.ids)), self.positions, number, count,
                                 lambda label, at, _: Column(label, (), at))  # fmt: skip
        listed = [self.queries] if isinstance(self.queries, str) else list(self.queries or ())
        columns = list[Column]()
        for i, selection in enumerate(listed):
            queries = inputs.chosen_positions(lm, words, selection, f"queries[{i}]")
            arrow = "" if len(listed) == 1 else f" → {''.join(words.tokens[p] for p in queries)}"
            for key in keys:
                seeing = tuple(query for query in queries if query >= min(key.corrupt))
                columns += [Column(key.label + arrow, seeing, key.corrupt)] if seeing else []
        if not columns:
            raise TokensError("no query sees one of the keys, so nothing would be knocked out", "queries")
        return tuple(columns)


edge_sweep: Callable[..., EdgeSweepResult] = EdgeSweep.short_form("edge_sweep")


class _EdgePlan(GridPlan):
    """The queries of a cell are on the written side, its keys on the other."""

    def writers(self, group: Sequence[int], until: object) -> list[Callable[..., sources.CellWriter]]:
        return [lambda places: _KnockoutWriter(self.mixing, None)] * len(group)


class _KnockoutWriter(sources.CellWriter):
    def edits(
        self, row: Row, read: tuple[int, ...], write: tuple[int, ...], cell: tuple[int, int, int]
    ) -> list[list[Op]]:
        return [[Knockout(every[read], at, every[write]) for at in row.sites]]
