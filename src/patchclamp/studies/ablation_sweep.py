"""The ablation sweep: which parts of the model does an answer need?

A prompt is run many times. Each run replaces one cell with zeros, a mean over prompts, or the row of a randomly drawn
prompt. If the answer suffers, the cell contributed to it. Zeros and means take the model off distribution; a resampled
row does not, but adds sampling noise, which averaging over `draws` reduces.

Source: mean ablation, Wang et al. 2022 (arXiv:2211.00593), section 2.2; resample ablation, Chan et al. 2022, "Causal
scrubbing" (Alignment Forum); when to use which, Heimersheim and Nanda 2024 (arXiv:2404.15255).
"""

from __future__ import annotations

from collections.abc import Callable

from patchclamp.errors import ProgramError, UnsupportedSite
from patchclamp.lm import LM
from patchclamp.studies import inputs
from patchclamp.studies.grid import GridCase, GridPlan, PromptGrid
from patchclamp.studies.inputs import Alignment, Column, Words
from patchclamp.studies.sources import as_source
from patchclamp.studies.sweep_result import AblationSweepResult

ALL = "all tokens"
NO_WORDS, NO_ALIGNMENT = Words((), (), ""), Alignment((), (), ())


class AblationSweep(PromptGrid):
    """Ablate every site, layer and head in a prompt's run, and show where the answer suffers.

    Effects are relative to the unedited run. The answer's tokens are never ablated.

    Raises: `ProgramError` for a wrong argument, `TokensError` for an empty selection, and the error of any run.
    """

    command = "ablate"

    sites: inputs.Sites = ("attn_out", "mlp_out")
    """Sites, optionally with indices of layers, heads, neurons or experts: attn_out, mlp_out, z."""
    positions: inputs.Positions = None
    """Columns of the grid: selections of the prompt, each ablated as a whole, or a mapping of labels to selections;
    "each" makes one column per token. By default one column, the whole prompt."""
    metric: inputs.MetricField = "logit_diff"
    """logit_diff, logprob or prob."""
    source: inputs.SourceField = "zeros"
    """Values to write: zeros, bank:NAME, `studies.MeanOf(prompts)` or `studies.Resampled(prompts)`."""
    seed: inputs.Whole = 0
    """Seed for the bootstrap interval and the significance test over prompts."""

    def plan(self, lm: LM) -> GridPlan:
        if self.metric == "recovered":
            raise ProgramError("recovered requires a corrupt prompt: use logit_diff, logprob or prob", "metric")
        prompts = self.read(lm, self.metric)
        cases = [
            GridCase(words, NO_WORDS, graded, NO_ALIGNMENT, self._columns(lm, words, i, len(prompts)))
            for i, (words, graded) in enumerate(prompts)
        ]
        rows = inputs.rows_of(lm, self.sites, self.layers, self.group, self.window)
        if any(row.site == "logits" for row in rows):
            raise UnsupportedSite("logits cannot be ablated: the answer is graded from them", "sites")
        return GridPlan(lm, self, AblationSweepResult, cases, rows, direction="noising", source=as_source(self.source),
                        seed=self.seed, verb="ablating")  # fmt: skip

    def _columns(self, lm: LM, words: Words, number: int, count: int) -> tuple[Column, ...]:
        whole = tuple(range(len(words.ids)))
        if self.positions is None:
            return (Column(ALL, whole, ()),)
        positions = None if isinstance(self.positions, str) and self.positions == "each" else self.positions
        return tuple(
            inputs.columns_of(lm, words, whole, positions, number, count, lambda label, at, _: Column(label, at, ()))
        )


ablation_sweep: Callable[..., AblationSweepResult] = AblationSweep.short_form("ablation_sweep")
