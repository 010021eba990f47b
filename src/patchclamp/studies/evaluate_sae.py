"""Evaluate a sparse autoencoder on a data set: how much of the model's loss its reconstructions recover, and how sparse
its features are.

    loss recovered = (CE of the ablated model − CE with the SAE) / (CE of the ablated model − CE of the model)

CE is the mean negative log-probability of the prompts' tokens, in nats. With the SAE, every row is replaced by its
reconstruction; in the ablated model, by zero or the data set's mean row. 1 is a perfect SAE, 0 is no better than
ablation.
Source: Bricken et al. 2023, "Towards monosemanticity"; on its weaknesses, Rajamanoharan et al. 2024 (arXiv:2404.16014).

P prompts · F features · D width of the row that the SAE writes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from patchclamp.errors import TokensError
from patchclamp.language import Capture, Op, Reconstruct, Replace, Zero, every
from patchclamp.language.site import parse_site
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, TokenGrid, style
from patchclamp.run import Run
from patchclamp.studies import inputs
from patchclamp.studies.study import Study, StudyResult, keeping, progress, provenance, recorded_runs
from patchclamp.studies.teacher_forcing import Forced, forced_logprobs

if TYPE_CHECKING:
    import pandas

SHOWN = 40  # prompts in a picture
ROWS = 512  # rows encoded at a time


MEASURES = {"loss": "loss", "loss_sae": "loss with reconstructions", "loss_ablated": "loss with ablation",
            "loss_recovered": "loss recovered", "l0": "L0", "explained": "variance explained",
            "dead": "share of dead features"}  # fmt: skip


class EvaluateSAEResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """`losses` [P, 3]: mean negative log-probability of a prompt's tokens except the first, in nats: unedited, with the
    SAE, and ablated; `predicted` [P]: the number of these tokens. `l0` [P]: mean number of active features per row.
    `rows` [P]: the number of encoded rows; `error`, `variance` [P]: Σ |row − reconstruction|² and Σ |row − mean|² over
    encoded rows, with the mean over all prompts. `density` [F]: the fraction of all rows where a feature is active.
    """

    sae: str
    ablation: str
    prompts: tuple[str, ...]
    losses: np.ndarray
    predicted: np.ndarray
    l0: np.ndarray
    rows: np.ndarray
    error: np.ndarray
    variance: np.ndarray
    density: np.ndarray

    @property
    def totals(self) -> dict[str, float]:
        """Measures over all prompts' tokens: `loss`, `loss_sae`, `loss_ablated`, `loss_recovered`, `l0`, `explained`
        (the fraction of variance) and `dead` (the fraction of features that are never active)."""
        loss, with_sae, ablated = np.average(self.losses, axis=0, weights=self.predicted).tolist()
        return {
            "loss": loss, "loss_sae": with_sae, "loss_ablated": ablated,
            "loss_recovered": _share(ablated - with_sae, ablated - loss),
            "l0": float(np.average(self.l0, weights=self.rows)),
            "explained": 1 - _share(self.error.sum(), self.variance.sum()), "dead": float((self.density == 0).mean()),
        }  # fmt: skip

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per prompt, with the same measures as `totals`."""
        import pandas

        loss, with_sae, ablated = self.losses.T
        return pandas.DataFrame({
            "prompt": self.prompts, "tokens": self.rows, "loss": loss, "loss_sae": with_sae, "loss_ablated": ablated,
            "loss_recovered": list(map(_share, ablated - with_sae, ablated - loss)), "l0": self.l0,
            "explained": [1 - _share(*each) for each in zip(self.error, self.variance, strict=True)],
        })  # fmt: skip

    def picture(self) -> TokenGrid:
        """Return plot data: loss recovered, L0 and explained variance of the first prompts."""
        frame = self.to_frame().iloc[:SHOWN]
        totals = ", ".join(f"{MEASURES[name]} {style.number(value)}" for name, value in self.totals.items())
        return TokenGrid(
            title=f"Evaluation of {self.sae}", provenance=self.provenance.where,
            explained=f"Over {self.rows.sum():,} tokens of {len(self.prompts)} prompts, ablated to {self.ablation} for "
                      f"comparison: {totals}.",
            panels=tuple(
                GridPanel(name=MEASURES[name], row_name="prompt", column_name="", columns=("",),
                          values=frame[[name]].to_numpy(), rows=tuple(map(str, frame.index)),
                          texts=tuple((style.number(x),) for x in frame[name]),
                          notes=tuple((style.shorten(style.plain(text), 60),) for text in frame["prompt"]))
                for name in ("loss_recovered", "l0", "explained")
            ),
        )  # fmt: skip

    def __repr__(self) -> str:
        of = self.totals
        return (f"<EvaluateSAEResult of {self.sae}: loss recovered {of['loss_recovered']:.3f}, L0 {of['l0']:.1f}, "
                f"explained {of['explained']:.3f}>")  # fmt: skip


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else float("nan")


class EvaluateSAE(Study):
    """Measure a sparse autoencoder on prompts: loss recovered, L0, explained variance and dead features.

    Raises: `TokensError` for a prompt of one token, and the error of any run.
    """

    command = "evaluate-sae"
    positional = 2

    sae: inputs.SAEField
    """An SAE, or the name of an attached SAE; on the command line also an SAE's folder or file."""
    prompts: inputs.PromptFile
    """The data set: texts or token ids, of at least two tokens each."""
    at: inputs.SiteField = None
    """Site that the SAE reads, if its file does not name it."""
    ablation: Literal["zeros", "mean"] = "zeros"
    """Replacement for rows in the ablated model: zeros, or the data set's mean row."""
    tokens: inputs.Selected = every
    """Tokens whose rows are encoded, replaced and ablated; all by default. The loss covers all tokens but the first."""

    def _run(
        self, lm: LM, *, batch: inputs.Positive = 256, show_progress: inputs.Progress = None,
        resume: inputs.ResumeFile = None,
    ) -> EvaluateSAEResult:  # fmt: skip
        asked = inputs.ask(lm, self.prompts)
        chosen: list[Any] = []
        for i, one in enumerate(asked):
            if len(one.ids) < 2:
                raise TokensError("expected at least two tokens: the first is not predicted", f"prompts[{i}]")
            words = inputs.words_of(lm, one.prompt, f"prompts[{i}]")
            chosen.append(every[inputs.chosen_positions(lm, words, self.tokens, "tokens")])
        with (
            inputs.attached(lm, self.sae, self.at) as (sae, where),
            keeping(lm, {**self.to_dict(), "content": sae.content}, resume) as journal,
            progress("evaluating", 4 * len(asked), show_progress) as advance,
        ):
            at, to = parse_site(where.card.at), parse_site(where.card.to)
            active = np.zeros(sae.n_features, np.int64)

            def call(which: Sequence[int]) -> dict[str, Any]:
                capture = [[Capture(site, chosen[i], "float32") for site in {at, to}] for i in which]
                return {"prompt": [list(asked[i].ids) for i in which], "max_tokens": 1, "capture": capture}

            def measure(runs: Sequence[Run], _: Sequence[int]) -> list[tuple[int, int, float, float, np.ndarray]]:
                lm.fetch(runs)
                found = []
                for run in runs:
                    read, written = (np.asarray(run[site], np.float32) for site in (at, to))
                    count, error = 0, 0.0
                    for part in np.split(np.arange(len(read)), range(ROWS, len(read), ROWS)):
                        features = sae.encode(read[part])
                        active[:] += (features > 0).sum(0)
                        count += int((features > 0).sum())
                        error += np.square(written[part] - sae.decode(features, read[part]), dtype=np.float64).sum()
                    square = np.square(written, dtype=np.float64).sum()
                    found.append((len(read), count, float(error), float(square), written.sum(0, dtype=np.float64)))
                return found

            measured = recorded_runs(lm, None, range(len(asked)), call, measure, tuple, advance, batch)
            rows, counts, error, square, sums_PD = map(np.array, zip(*measured, strict=True))
            mean_D = sums_PD.sum(0) / rows.sum()
            variance = square - 2 * sums_PD @ mean_D + rows * (mean_D @ mean_D)

            def edits(tokens: Any) -> list[tuple[Op, ...]]:
                ablated = Zero(to, tokens) if self.ablation == "zeros" else Replace(mean_D, to, tokens)
                return [(), (Reconstruct(where.card.name, tokens),), (ablated,)]

            losses = []
            for programs in zip(*map(edits, chosen), strict=True):  # only the reconstructions run as requests
                items = [Forced(one.ids[:1], one.ids[1:], each) for one, each in zip(asked, programs, strict=True)]
                losses.append([-each.mean() for each in forced_logprobs(lm, items, batch, advance, journal)])
        return EvaluateSAEResult(
            provenance=provenance(lm), sae=repr(sae), ablation=self.ablation, prompts=tuple(one.shown for one in asked),
            losses=np.array(losses).T, predicted=np.array([len(one.ids) - 1 for one in asked]), l0=counts / rows,
            rows=rows, error=error, variance=variance, density=active / rows.sum(),
        )  # fmt: skip


evaluate_sae: Callable[..., EvaluateSAEResult] = EvaluateSAE.short_form("evaluate_sae")
