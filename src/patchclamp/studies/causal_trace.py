"""The causal trace: which states carry a fact about a subject to the answer?

Noise on the embeddings of the subject's tokens destroys the answer. Then one state at a time (a site, a layer, a
position, or a window of layers) is restored to its value without the noise. If the answer returns, the fact passes
through that state.

Source: Meng et al. 2022 (arXiv:2202.05262), section 2.1 and appendix B.1: noise of three times the standard deviation
of the subjects' embeddings, 10 noise seeds, windows of 10 layers for attention and MLP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from patchclamp.call import is_token_id
from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language import Noise, Op, Site
from patchclamp.language.tokens import TextSpan, every, parse_tokens
from patchclamp.lm import LM
from patchclamp.studies import inputs
from patchclamp.studies.grid import Cells, GridCase, GridListener, GridPlan, PromptGrid
from patchclamp.studies.inputs import Column
from patchclamp.studies.sources import captured_runs
from patchclamp.studies.study import recorded
from patchclamp.studies.sweep_result import CausalTraceResult, Sweep

MAX_SEEDS = 10_000
TIMES = 3.0  # standard deviations of the subjects' embeddings


class CausalTrace(PromptGrid):
    """Add noise to the subject, restore one site, layer and token at a time, and show where the answer comes back.

    Values are means over the noise seeds; the result's `each` has one value per prompt and seed, ordered by prompt. The
    interval and the p-values are over prompts; for a single prompt the interval is over its seeds.

    Raises: `TokensError` for a subject that is not in its prompt, `ProgramError` for a wrong argument, and the error of
    any run.
    """

    command = "causal-trace"

    subject: inputs.Subject
    """Text in the prompt, or a selection, whose embeddings are noised; a list gives one per prompt."""
    sites: inputs.Sites = ("resid_post",)
    """Sites to restore: resid_post, attn_out, mlp_out."""
    positions: inputs.Positions = None
    """Columns of the grid; one per token by default."""
    metric: inputs.MetricField = "prob"
    """prob, logprob, logit_diff or recovered (0 is the noised run, 1 the clean one)."""
    window: inputs.Positive = 1
    """Number of adjacent layers restored together; 10 in the paper for attn_out and mlp_out."""
    std: inputs.Std = None
    """Standard deviation of the noise; by default 3 times that of all subject tokens' embeddings."""
    seeds: inputs.Seeds = 10
    """Noise seeds: a count n for the seeds 0 to n − 1, or a list."""

    def plan(self, lm: LM) -> GridPlan:
        prompts = self.read(lm, self.metric)
        given, cases, subjects = inputs.one_each(self.subject, len(prompts), "subject"), [], []
        for i, (words, graded) in enumerate(prompts):
            path = f"subject[{i}]" if len(prompts) > 1 else "subject"
            subjects.append(inputs.chosen_positions(lm, words, _selection(given[i], path), path))
            columns = inputs.columns_of(lm, words, range(len(words.ids)), self.positions, i, len(prompts),
                                 lambda label, at, _: Column(label, at, at))  # fmt: skip
            cases.append(GridCase(words, words, graded, inputs.align(words.ids, words.ids), tuple(columns)))
        rows = inputs.rows_of(lm, self.sites, self.layers, self.group, self.window)
        if any(row.site == "logits" for row in rows):
            raise ProgramError("logits cannot be traced: the answer is graded from them", "sites")
        seeds = (tuple(range(inputs.check_whole(self.seeds, "seeds", 1, MAX_SEEDS))) if is_token_id(self.seeds)
                 else inputs.as_seeds(self.seeds, "seeds"))  # fmt: skip
        settings = {"subjects": subjects, "std": self.std, "seeds": seeds}
        return _TracePlan(lm, self, CausalTraceResult, cases, rows, verb="tracing", seeds=seeds, repeats=len(seeds),
                          settings=settings)  # fmt: skip


causal_trace: Callable[..., CausalTraceResult] = CausalTrace.short_form("causal_trace")


class _TracePlan(GridPlan):
    """A grid whose corrupt runs are the clean prompt with the subject noised, once per seed."""

    def run(self, cells: Cells, listener: GridListener | None) -> Sweep:
        subjects, std = self.settings["subjects"], self.settings["std"]
        [self.std] = recorded(cells.journal, 1, float, lambda: [std or TIMES * self._embedding_std()])
        self.extra = {"subjects": tuple(subjects), "std": self.std}
        return super().run(cells, listener)

    def before(self, number: int, repeat: int) -> tuple[Op, ...]:
        tokens = every[self.settings["subjects"][number]]
        return (Noise(self.std, at="embed", tokens=tokens, seed=self.settings["seeds"][repeat]),)

    def _embedding_std(self) -> float:
        """Return the standard deviation over all entries of the subject tokens' embeddings."""
        runs = captured_runs(self.lm, [case.clean.ids for case in self.cases], [Site("embed")])
        rows = [np.asarray(run["embed"], np.float64)[list(subject)]
                for run, subject in zip(runs, self.settings["subjects"], strict=True)]  # fmt: skip
        for run in runs:
            run.close()
        return float(np.concatenate(rows).std())


def _selection(subject: Any, path: str) -> Any:
    """Parse a selection; text that is not a selection selects its occurrence in the prompt."""
    if not isinstance(subject, str):
        return subject
    with contextlib.suppress(PatchclampError):
        return parse_tokens(subject)
    try:
        return TextSpan(subject)
    except PatchclampError as error:
        raise error.under(path) from None
