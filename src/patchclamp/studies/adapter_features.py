"""The features of a sparse autoencoder under the base model and under a LoRA adapter, on the same prompts.

A feature's mean activation is over all rows, including rows where it is 0; its firing rate is the fraction of rows
where it is active. The SAE was trained on the base model, so it may miss features that the adapter adds.
Source: Kissane et al. 2024, "SAEs (usually) transfer between base and chat models"; Bricken et al. 2024, "Stage-wise
model diffing".

P prompts · K features
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from patchclamp.engines.base import adapters_of
from patchclamp.errors import ProgramError, TokensError
from patchclamp.language import Features, every
from patchclamp.language.values import as_file
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, TokenGrid, style
from patchclamp.run import Run
from patchclamp.studies import inputs
from patchclamp.studies.study import (
    Arg,
    StoredArray,
    Study,
    StudyResult,
    keeping,
    progress,
    provenance,
    recorded_runs,
)

if TYPE_CHECKING:
    import pandas

SHOWN = 30  # features in a picture
SIDES = ("base", "adapter")


class FeatureSums(msgspec.Struct, frozen=True, array_like=True):
    """One run's sums: the number of rows, the number of rows with `kept` active features and, for each active feature,
    its id, the sum of its values, and the number of rows where it is active."""

    rows: int
    full: int
    ids: StoredArray
    sums: StoredArray
    counts: StoredArray


class AdapterFeaturesResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """`means`, `rates` [2, K]: mean activation and firing rate of each of `features` [K] over `rows` rows, under the
    base model and under the adapter. `full` [2]: the fraction of rows with `kept` active features, whose smaller
    features may be missing; 0 if the caller chose the features.
    """

    sae: str
    lora: str
    features: np.ndarray
    means: np.ndarray
    rates: np.ndarray
    rows: int
    full: np.ndarray

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per feature active under either model, largest difference of means first: feature, mean_base,
        mean_adapter, mean_difference, rate_base, rate_adapter, rate_difference."""
        import pandas

        frame = pandas.DataFrame({"feature": self.features})
        for name, values in (("mean", self.means), ("rate", self.rates)):
            for side, of_side in zip((*SIDES, "difference"), (*values, values[1] - values[0]), strict=True):
                frame[f"{name}_{side}"] = of_side
        active = np.flatnonzero(self.rates.any(axis=0))
        order = np.argsort(-np.abs(self.means[1] - self.means[0])[active], kind="stable")
        return frame.iloc[active[order]].reset_index(drop=True)

    def picture(self) -> TokenGrid:
        """Return plot data: the features whose means differ most, as panels and as a table."""
        frame = self.to_frame().iloc[:SHOWN]
        cut = f" {style.percent(float(self.full.max()))} of rows may have more active features than were read."
        table = [(str(one.feature), *map(style.number, (one.mean_base, one.mean_adapter)),
                  style.signed(one.mean_difference), *map(style.percent, (one.rate_base, one.rate_adapter)))
                 for one in frame.itertuples()]  # fmt: skip
        return TokenGrid(
            title=f"Features of {self.sae} under an adapter", provenance=self.provenance.where,
            explained=f"Means over {self.rows:,} rows of the base model and of {self.lora}; the features whose means "
                      f"differ most.{cut if self.full.any() else ''}",
            panels=(self._panel(frame, "mean", style.number, SIDES),
                    self._panel(frame, "mean", style.signed, ("difference",), 0.0),
                    self._panel(frame, "rate", style.percent, SIDES)),
            table=(("feature", "base", "adapter", "difference", "rate, base", "rate, adapter"), *table),
        )  # fmt: skip

    @staticmethod
    def _panel(
        frame: pandas.DataFrame,
        name: str,
        text: Callable[[float], str],
        sides: Sequence[str],
        centre: float | None = None,
    ) -> GridPanel:
        values = frame[[f"{name}_{side}" for side in sides]].to_numpy()[::-1]  # the first row is at the bottom
        return GridPanel(
            name={"mean": "mean activation", "rate": "firing rate"}[name], row_name="feature", column_name="",
            rows=tuple(map(str, frame["feature"][::-1])), columns=tuple(sides), values=values, centre=centre,
            texts=tuple(tuple(map(text, row)) for row in values.tolist()),
            reaches=(None if centre is not None else 0.0, None),
        )  # fmt: skip

    def __repr__(self) -> str:
        best = self.to_frame().iloc[:1]
        most = f": feature {best['feature'][0]}, {best['mean_difference'][0]:+.3f}" if len(best) else ""
        return f"<AdapterFeaturesResult of {int(self.rates.any(axis=0).sum())} active features{most}>"


class AdapterFeatures(Study):
    """Compare an SAE's features under the base model and under a LoRA adapter: mean activation and firing rate.

    Raises: `EngineError` on an engine without LoRA adapters (vLLM needs `enable_lora=True`), `TokensError` if no token
    is selected, and the error of any run.
    """

    command = "adapter-features"
    positional = 3
    not_served = "it requires a LoRA adapter, which clients of a server cannot use"

    sae: inputs.SAEField
    """An SAE, or the name of an attached SAE; on the command line also an SAE's folder or file."""
    prompts: inputs.PromptFile
    """The data set: texts or token ids."""
    lora: Annotated[Any, Arg(as_file)]
    """Folder of a LoRA adapter in PEFT format."""
    at: inputs.SiteField = None
    """Site that the SAE reads, if its file does not name it."""
    features: inputs.FeatureIds = ()
    """Features to compare; all by default."""
    kept: inputs.Kept = inputs.MAX_TOP
    """If `features` is empty, number of features to read per token, largest first; all others count as 0."""
    tokens: inputs.Selected = every
    """Tokens whose rows are read; all by default."""

    def _run(
        self, lm: LM, *, batch: inputs.Positive = 256, show_progress: inputs.Progress = None,
        resume: inputs.ResumeFile = None,
    ) -> AdapterFeaturesResult:  # fmt: skip
        asked, lora = inputs.ask(lm, self.prompts), str(self.lora)
        adapter = adapters_of(lora, 1)[0]
        assert adapter is not None
        lm.engine.check_adapter(adapter)
        with (
            inputs.placed_sae(lm, self.sae, self.at) as where,
            keeping(lm, {**self.to_dict(), "content": where.card.content, "adapter": adapter.name}, resume) as journal,
            progress("reading features", 2 * len(asked), show_progress, "runs") as advance,
        ):
            card, ids = where.card, tuple(self.features) or None
            if ids and max(ids) >= card.features:
                raise ProgramError(f"feature {max(ids)} is out of range (0..{card.features - 1})", "features")
            if ids and self.kept != inputs.MAX_TOP:
                raise ProgramError("not supported with features=: omit it", "kept")
            top = None if ids else min(self.kept, card.features)
            read = Features(card.name, self.tokens, top, ids)

            def call(which: Sequence[tuple[int, str | None]]) -> dict[str, Any]:
                return {"prompt": [asked[i].prompt for i, _ in which], "lora": [folder for _, folder in which],
                        "max_tokens": 1, "capture": [read]}  # fmt: skip

            def sums(runs: Sequence[Run], _: Any) -> list[FeatureSums]:
                lm.lens(runs)
                found = []
                for run in runs:
                    features = run.features[card.name]
                    active = features.values > 0
                    known, of = np.unique(features.ids[active], return_inverse=True)
                    added = np.bincount(of, features.values[active].astype(np.float64), len(known))
                    full = int(active.all(axis=1).sum()) if top is not None and top < card.features else 0
                    found.append(FeatureSums(len(active), full, *map(StoredArray.of, (known, added, np.bincount(of)))))
                return found

            pairs = [(i, folder) for i in range(len(asked)) for folder in (None, lora)]
            records = recorded_runs(lm, journal, pairs, call, sums, FeatureSums, advance, batch)
        totals = np.zeros((2, 2, card.features))  # sums of values and row counts, by side
        for number, one in enumerate(records):
            totals[:, number % 2, one.ids.array()] += one.sums.array(), one.counts.array()
        if not (rows := sum(one.rows for one in records) // 2):
            raise TokensError(f"{self.tokens} selects no token in any prompt", "tokens")
        chosen = np.arange(card.features) if ids is None else np.array(ids)
        means, rates = totals[:, :, chosen] / rows
        full = [sum(one.full for one in records[side::2]) / rows for side in (0, 1)]
        return AdapterFeaturesResult(
            provenance=provenance(lm), sae=str(self.sae), lora=lora, features=chosen, means=means, rates=rates,
            rows=rows, full=np.array(full),
        )  # fmt: skip


adapter_features: Callable[..., AdapterFeaturesResult] = AdapterFeatures.short_form("adapter_features")
