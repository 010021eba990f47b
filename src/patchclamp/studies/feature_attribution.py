"""Feature attribution: which features of a sparse autoencoder does an answer need?

A prompt's active features are ablated one by one: each becomes 0, and the SAE's reconstruction error is kept. The
effect is the unedited run's metric minus the ablated run's. To first order it is f · (∂m/∂h · d), for a feature with
value f and decoder row d, so one gradient estimates all effects. The largest are verified exactly. The faithfulness of
n features is the fraction of the metric that remains when all other active features are ablated.

Source: Marks et al. 2024, "Sparse feature circuits" (arXiv:2403.19647), with ablation to 0; Nanda 2023, "Attribution
patching: activation patching at industrial scale".

C cells (a feature, or a feature at a token) · N (token, active feature) pairs · K sizes of the curve
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from patchclamp.errors import ProgramError, TokensError, UnsupportedStudy
from patchclamp.language import Capture, Op, SetFeature, every
from patchclamp.language.ops import MAX_FEATURES
from patchclamp.language.site import parse_site
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, TokenGrid, style
from patchclamp.studies import inputs
from patchclamp.studies.between import GradedAnswer
from patchclamp.studies.study import Provenance, Study, StudyResult, progress, provenance

if TYPE_CHECKING:
    import pandas

SHOWN = 20  # features in a picture
Cell = tuple[int, tuple[int, ...]]  # a feature, and the positions where it is ablated


class FeatureAttributionResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """`features`, `positions` [C]: each cell's feature and position, −1 for all tokens; `values` [C]: its largest
    value. `estimates`, `exact` [C]: the effect on the metric, from the gradient and from an ablation; NaN if not
    computed. `active` [N, 2], `active_values` [N]: active features as (position, id), and their values.

    kept [K]: the metric with all but the n best cells ablated, n from `sizes` [K]; ranked by estimates if available
    clean: the unedited run's metric · noise_floor: its change in a second run · verified_on: engine of the ablations
    """

    sae: str
    metric: str
    answer: str
    foil: str | None
    prompt_tokens: tuple[str, ...]
    features: np.ndarray
    positions: np.ndarray
    values: np.ndarray
    estimates: np.ndarray
    exact: np.ndarray
    active: np.ndarray
    active_values: np.ndarray
    sizes: np.ndarray
    kept: np.ndarray
    clean: float
    noise_floor: float
    verified_on: Provenance

    @property
    def faithfulness(self) -> np.ndarray:
        """The fraction of the metric that the n best cells preserve, [K]: 0 if all are ablated, 1 if none is."""
        return (self.kept - self.kept[0]) / (self.clean - self.kept[0])

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per cell, largest effects first: feature, position, value, estimate, exact effect."""
        import pandas

        frame = pandas.DataFrame({"feature": self.features, "position": self.positions, "value": self.values,
                                  "estimate": self.estimates, "exact": self.exact})  # fmt: skip
        effect = frame["exact"].fillna(frame["estimate"])
        return frame.iloc[np.argsort(-effect.abs().to_numpy(), kind="stable")].reset_index(drop=True)

    def picture(self) -> TokenGrid:
        """Return plot data: the values of the best features at the prompt's tokens, the faithfulness of the n best
        cells, and a table of these cells."""
        frame, tokens = self.to_frame().iloc[:SHOWN], tuple(map(style.visible, self.prompt_tokens))
        best = list(dict.fromkeys(frame["feature"].tolist()))[::-1]
        values = np.full((len(best), len(tokens)), np.nan)
        for (position, feature), value in zip(self.active.tolist(), self.active_values.tolist(), strict=True):
            if feature in best:
                values[best.index(feature), position] = value
        rows = [(str(each.feature), "all" if each.position < 0 else tokens[each.position], style.number(each.value),
                 style.signed(each.estimate), style.signed(each.exact)) for each in frame.itertuples()]  # fmt: skip
        words = {"logit_diff": "logit difference", "logprob": "log-probability", "prob": "probability"}
        foil = "" if self.foil is None else f" − {style.quoted(self.foil)}"
        of = f"{words.get(self.metric, self.metric)} of {style.quoted(self.answer)}{foil}"
        shares = self.faithfulness[None]
        return TokenGrid(
            title=f"Features by their effect on the {of}", provenance=self.verified_on.where, prompt=self.prompt_tokens,
            explained=(f"The features of {self.sae} with the largest effects; grey: not active. The unedited run has "
                       f"{style.number(self.clean)}, and {style.number(float(self.kept[0]))} with all "
                       f"{len(self.features)} ablated."),
            panels=(
                GridPanel(name="feature activation", row_name="feature", column_name="token", reaches=(0.0, None),
                          rows=tuple(map(str, best)), columns=tokens, values=values),
                GridPanel(name="faithfulness of the n best features", row_name="", column_name="n", rows=("",),
                          columns=tuple(map(str, self.sizes)), values=shares,
                          texts=(tuple(map(style.percent, shares[0].tolist())),)),
            ),
            table=(("feature", "token", "value", "estimate", "exact"), *rows),
        )  # fmt: skip

    def __repr__(self) -> str:
        best = self.to_frame().iloc[0]
        return (f"<FeatureAttributionResult of {len(self.features)} cells: feature {best['feature']:.0f}, estimate "
                f"{best['estimate']:+.3f}, exact {best['exact']:+.3f}>")  # fmt: skip


class FeatureAttribution(Study):
    """Estimate every active feature's effect on an answer (on Transformers), and ablate the best ones exactly.

    Without `estimate` it is an ablation sweep of all active features, on any engine. `run(lm, on=...)` ablates on
    another engine.

    Raises: `UnsupportedStudy` for estimates without gradients, `TokensError` if no feature or too many are active, and
    the error of any run.
    """

    command = "features"

    sae: inputs.SAEField
    """An SAE, or the name of an attached SAE; on the command line also an SAE's folder or file."""
    prompt: inputs.Prompt
    """Prompt, as text or token ids."""
    answer: inputs.Answer
    """Answer: one token, with its leading space."""
    foil: inputs.Answer = None
    """Another answer to compare with: one token."""
    metric: inputs.MetricField = None
    """Metric: logit_diff, logprob or prob, or a Python function of log-probabilities. By default the logit difference,
    or log p(answer) without a foil."""
    at: inputs.SiteField = None
    """Site that the SAE reads, if its file does not name it."""
    tokens: inputs.Selected = every
    """Tokens of the prompt whose features are ablated; all by default."""
    by_token: inputs.Flag = False
    """Ablate each feature at one token at a time, instead of at all tokens together."""
    estimate: inputs.Flag = True
    """Estimate all effects from a gradient, and ablate only the largest; otherwise ablate every feature."""
    verify: inputs.Whole = 32
    """Number of largest estimates to verify by ablation."""

    def _run(
        self, lm: LM, *, on: inputs.OnLM = None, batch: inputs.Positive = 256, show_progress: inputs.Progress = None
    ) -> FeatureAttributionResult:
        if self.estimate and not lm.engine.has_gradients:
            raise UnsupportedStudy(
                f"gradients are not available on {lm.model.engine}: set estimate=False to ablate all features, or run "
                "on an LM with engine='transformers' and pass this one as on=", "estimate"
            )  # fmt: skip
        serving = on or lm
        metric = GradedAnswer(lm, self.answer, self.foil, self.metric)
        if metric.graded.metric == "recovered":
            raise ProgramError("recovered requires a corrupt prompt: use logit_diff, logprob or prob", "metric")
        words = inputs.words_of(lm, self.prompt, "prompt")
        ids, chosen = list(words.ids), inputs.chosen_positions(lm, words, self.tokens, "tokens")
        with inputs.attached(serving, self.sae, self.at) as (sae, where):
            name, at = where.card.name, parse_site(where.card.at)
            run = serving.run(ids, max_tokens=1, capture=[Capture(at, every[chosen], "float32")])
            rows = np.asarray(run[at], np.float32)
            run.close()
            features_TF = sae.encode(rows)
            which, numbers = np.nonzero(features_TF)
            if not len(which):
                raise TokensError("no feature is active at these tokens", "tokens")
            most = max(np.count_nonzero(features_TF, 1)) if self.by_token else len(np.unique(numbers))
            if most > MAX_FEATURES:  # one edit ablates all, for the start of the curve
                raise TokensError(
                    f"expected at most {MAX_FEATURES} active features, got {most}: use fewer tokens, or by_token=True",
                    "tokens",
                )
            cells: list[Cell] = [(int(f), (chosen[t],)) for t, f in zip(which, numbers, strict=True)]
            if not self.by_token:
                cells = [(int(f), chosen) for f in np.unique(numbers)]

            estimates = np.full(len(cells), np.nan)
            if self.estimate:
                ref = lm.sites.resolve(parse_site(where.card.to))[0]
                first, end = ref.columns or (0, None)
                slopes_TD = metric.gradients(ids, [ref.point]).gradients[ref.point][list(chosen), first:end]
                scale = sae.moments(rows)[1]
                slopes_TD = slopes_TD if scale is None else slopes_TD * scale
                shares_TF = features_TF * (slopes_TD @ sae.decoder.T)
                estimates = shares_TF[which, numbers] if self.by_token else shares_TF.sum(0)[np.unique(numbers)]
            verified = np.argsort(-np.abs(estimates), kind="stable")[: self.verify if self.estimate else None]
            sizes = np.array([0, *(1 << i for i in range((len(cells) - 1).bit_length())), len(cells)])
            with progress("ablating", len(verified) + 2 + len(sizes), show_progress) as advance:  # 2 unedited runs

                def graded(programs: list[list[Op]]) -> np.ndarray:
                    job = serving.grade_job(ids, programs, metric.graded.scores)
                    [grades] = serving.graded([job], lambda _, __, done: advance(len(done)), batch)
                    records = metric.graded.records(grades, np.arange(len(programs)))
                    return np.array([metric.graded.value(record) for record in records])

                values = graded([[], *(_ablation(name, [cells[n]]) for n in verified), []])
                exact = np.full(len(cells), np.nan)
                exact[verified] = values[0] - values[1:-1]
                best = np.argsort(-np.abs(estimates if self.estimate else exact), kind="stable")
                kept = graded([_ablation(name, [cells[n] for n in best[size:]]) for size in sizes.tolist()])
        strings = lm.tokenizer.token_strings
        return FeatureAttributionResult(
            provenance=provenance(lm), verified_on=provenance(serving), sae=repr(sae), metric=metric.graded.metric,
            answer=strings([metric.answer])[0], foil=None if metric.foil is None else strings([metric.foil])[0],
            prompt_tokens=words.tokens, features=np.array([feature for feature, _ in cells]),
            positions=np.array([at[0] if self.by_token else -1 for _, at in cells]),
            values=features_TF[which, numbers] if self.by_token else features_TF.max(0)[np.unique(numbers)],
            estimates=estimates, exact=exact, active=np.stack([np.array(chosen)[which], numbers], 1),
            active_values=features_TF[which, numbers], sizes=sizes, kept=kept, clean=float(values[0]),
            noise_floor=float(abs(values[-1] - values[0])),
        )  # fmt: skip


feature_attribution: Callable[..., FeatureAttributionResult] = FeatureAttribution.short_form("feature_attribution")


def _ablation(name: str, cells: Sequence[Cell]) -> list[Op]:
    """Return edits that ablate `cells`, grouped by positions, because every edit encodes its rows again."""
    by_positions: dict[tuple[int, ...], list[int]] = {}
    for feature, positions in cells:
        by_positions.setdefault(positions, []).append(feature)
    return [SetFeature(name, ids, 0.0, every[positions]) for positions, ids in by_positions.items()]
