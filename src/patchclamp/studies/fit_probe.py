"""Fit linear probes of two classes, one per layer, on prompts' activations or on a harvest's rows.

A probe gives a row h the log-odds w · h + b of the positive class. It is measured out of fold: every row is scored by a
probe that was fitted without the row's document. The returned probe is fitted on all rows. `FitProbeResult.probe`
returns it as a `Probe`, which runs with the model.

Source: Alain and Bengio 2016 (arXiv:1610.01644); Marks and Tegmark 2023 (arXiv:2310.06824), difference of means;
Goldowsky-Dill et al. 2025 (arXiv:2502.03407), recall at a false positive rate.

N rows · T rows of a document · D row width · L layers · K folds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from patchclamp.errors import ProgramError, ShapeError, TokensError, UnsupportedSite, unknown
from patchclamp.language import Capture, Probe, Site
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import TokensLike, prompt, read_tokens
from patchclamp.language.values import as_array, as_items, as_plain
from patchclamp.lm import LM
from patchclamp.plots import Chart, Curve, Curves
from patchclamp.plots.style import percent
from patchclamp.run import Run
from patchclamp.studies import inputs
from patchclamp.studies.harvest import Filters, Harvested, as_harvested
from patchclamp.studies.harvest.shards import INDEX_COLUMNS
from patchclamp.studies.linear_fit import auroc, fit_rows, sigmoid, split_folds
from patchclamp.studies.study import (
    Arg,
    Provenance,
    Resumable,
    Show,
    StoredArray,
    Study,
    StudyResult,
    keeping,
    model_identity,
    progress,
    provenance,
    recorded_runs,
)
from patchclamp.version import __version__

if TYPE_CHECKING:
    import pandas

RATES = (0.0, 0.01, 0.02, *(n / 20 for n in range(1, 20)))  # false positive rates in the figure


class FitProbeResult(StudyResult, frozen=True, eq=False, kw_only=True):
    """Probes at the `layers` of a `site`, and their out-of-fold log-odds of the N rows.

    tokens, pool: the rows' selection and pooling; tokens is "" if no selection matches the harvest's filters
    classes: labels of the negative and the positive class
    weight [L, D], bias [L]: w and b of the log-odds w · h + b, fitted on all rows
    log_odds [L, N]: each row's log-odds from the probe fitted without the row's fold
    fold_auroc [L, K]: AUROC of each fold's rows
    positive [N]: True for rows of the positive class
    document, fold [N]: each row's document and fold; identical prompts count as one document
    """

    layers: tuple[int, ...]
    site: str
    tokens: str
    pool: str | None
    method: str
    classes: tuple[str, str]
    weight: np.ndarray
    bias: np.ndarray
    log_odds: np.ndarray
    fold_auroc: np.ndarray
    positive: np.ndarray
    document: np.ndarray
    fold: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """Out-of-fold probabilities of the positive class [L, N]."""
        return sigmoid(self.log_odds)

    @property
    def auroc(self) -> np.ndarray:
        """The AUROC, averaged over folds, [L]."""
        return self.fold_auroc.mean(1)

    @property
    def accuracy(self) -> np.ndarray:
        """The out-of-fold accuracy at a probability threshold of 0.5, [L]."""
        return ((self.log_odds > 0) == self.positive).mean(1)

    @property
    def log_loss(self) -> np.ndarray:
        """The out-of-fold log loss in nats, [L]: the mean of −log p(class of the row)."""
        return np.logaddexp(0, np.where(self.positive, -1, 1) * self.log_odds).mean(1)

    @property
    def best(self) -> int:
        """The layer with the highest AUROC; ties are broken by log loss."""
        return self.layers[np.lexsort((self.log_loss, -self.auroc))[0]]

    def threshold(self, false_positive_rate: float = 0.01, layer: int | None = None) -> float:
        """Return the lowest threshold with at most this false positive rate, out of fold. With n negative rows, a rate
        below 1/n gives their largest score."""
        rate = inputs.as_float(false_positive_rate, "false_positive_rate")
        if not 0 <= rate < 1:
            raise ProgramError(f"expected a rate in [0, 1), got {rate:g}", "false_positive_rate")
        negative = np.sort(self.log_odds[self._at(layer), ~self.positive])[::-1]
        return float(sigmoid(negative[int(rate * len(negative) + 1e-9)]))

    def recall(self, false_positive_rate: float = 0.01, layer: int | None = None) -> float:
        """Return the fraction of positive rows whose out-of-fold score exceeds the `threshold`."""
        scores = sigmoid(self.log_odds[self._at(layer), self.positive])
        return float((scores > self.threshold(false_positive_rate, layer)).mean())

    def calibration(self, layer: int | None = None, bins: int = 10) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each non-empty score bin, the mean score, fraction of positive rows, and number of rows."""
        scores, bins = sigmoid(self.log_odds[self._at(layer)]), inputs.check_whole(bins, "bins", 1)
        bin_N = np.minimum((scores * bins).astype(int), bins - 1)
        counts = np.bincount(bin_N, minlength=bins)
        sums = [np.bincount(bin_N, of, bins)[counts > 0] for of in (scores, self.positive)]
        counts = counts[counts > 0]
        return sums[0] / counts, sums[1] / counts, counts

    def score(self, rows: Any, layer: int | None = None) -> np.ndarray:
        """Return the probability of the positive class for new rows [..., D], from the probe fitted on all rows."""
        at, rows = self._at(layer), as_array(rows, "rows").astype(np.float64)
        if rows.shape[-1:] != self.weight.shape[1:]:
            raise ShapeError(f"expected rows [..., {self.weight.shape[1]}], got {list(rows.shape)}", "rows")
        return sigmoid(rows @ self.weight[at] + self.bias[at])

    def probe(
        self, layer: int | None = None, *, name: str = "probe", tokens: TokensLike | None = None,
        pool: str | None = "fitted",
    ) -> Probe:  # fmt: skip
        """Return a layer's probe, by default the best layer's, for `lm.run(..., capture=[result.probe()])`.

        tokens, pool: by default as in the fit; pool=None scores every token
        """
        at, pool = self._at(layer), self.pool if isinstance(pool, str) and pool == "fitted" else pool
        if tokens is None and not self.tokens and pool is not None:
            raise ProgramError("the harvest's filters cannot be expressed as a selection: pass tokens=", "tokens")
        chosen = read_tokens((self.tokens or prompt) if tokens is None else tokens, "tokens")
        place = Site(self.site, self.layers[at])
        return Probe(self.weight[at : at + 1], place, chosen, [float(self.bias[at])], "sigmoid", pool, name)

    def _at(self, layer: int | None) -> int:
        """Return the index of a layer, by default the best one."""
        layer = self.best if layer is None else inputs.check_whole(layer, "layer")
        if layer not in self.layers:
            raise ProgramError(f"expected one of the layers {list(self.layers)}, got {layer}", "layer")
        return self.layers.index(layer)

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per layer: AUROC with its standard deviation over folds, accuracy, log loss, and recall at a
        false positive rate of 1 %."""
        import pandas

        return pandas.DataFrame({
            "layer": self.layers, "auroc": self.auroc, "auroc_std": self.fold_auroc.std(1), "accuracy": self.accuracy,
            "log_loss": self.log_loss, "recall_at_1%": [self.recall(0.01, layer) for layer in self.layers],
        })  # fmt: skip

    @property
    def summary(self) -> str:
        """A sentence with the best layer's measures."""
        at = self._at(None)
        return (
            f"{self.site}[{self.best}]: AUROC {self.auroc[at]:.3f} ± {self.fold_auroc[at].std():.3f} over "
            f"{self.fold_auroc.shape[1]} folds, accuracy {self.accuracy[at]:.3f}, log loss {self.log_loss[at]:.3f} "
            f"nats, recall {self.recall():.3f} at 1 % false positives"
        )

    def picture(self, layer: int | None = None) -> Curves:
        """Return plot data: AUROC and log loss by layer; calibration and ROC of a layer, by default the best one."""
        layer, folds, base = self.layers[self._at(layer)], self.fold_auroc, float(self.positive.mean())
        layers, ends, share = np.array(self.layers, np.float64), np.array([0.0, 1.0]), (-0.02, 1.02)
        scores, positive, _ = self.calibration(layer)
        recalls = np.array([*(self.recall(rate, layer) for rate in RATES), 1.0])
        charts = (
            Chart("AUROC", "share of pairs", (Curve("AUROC", layers, self.auroc, folds.min(1), folds.max(1)),),
                  y_range=(min(0.45, float(folds.min()) - 0.03), 1.02), level=0.5, level_label="chance",
                  note="The band spans all folds."),
            Chart("Log loss", "nats", (Curve("log loss", layers, self.log_loss),),
                  level=-base * np.log(base) - (1 - base) * np.log(1 - base), level_label="base rate"),
            Chart(f"Calibration at layer {layer}", "share of positive rows", x_label="score", y_range=share,
                  lines=(Curve("probe", scores, positive), Curve("calibrated", ends, ends))),
            Chart(f"ROC at layer {layer}", "recall", x_label="false positive rate", y_range=share,
                  lines=(Curve("probe", np.array([*RATES, 1.0]), recalls), Curve("chance", ends, ends))),
        )  # fmt: skip
        documents, rows = len(np.unique(self.document)), len(self.positive)
        pooled = f"{self.pool} of {self.tokens or 'the kept tokens'}" if self.pool else "each token"
        count = f"{documents} documents" if documents == rows else f"{rows} rows of {documents} documents"
        return Curves(
            title=f"Probes for {self.classes[1]} against {self.classes[0]}: {self.method.replace('_', ' ')}",
            x_label="layer", charts=charts, provenance=self.provenance.where,
            notes=(f"{self.site}, {pooled}; {count}, {percent(base)} positive, scored out of fold.",
                   f"{self.summary}."),
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<FitProbeResult of {self.classes[1]} against {self.classes[0]}: {self.summary}>"


class Examples(NamedTuple):
    """Training data: `rows(i)` returns the rows [N, D] at `layers[i]`; each row has a label and a document.

    tokens: the rows' selection, or "" · made: the rows' provenance · path: template for a document's path in errors
    """

    layers: list[int]
    rows: Callable[[int], np.ndarray]
    labels: list[Any]
    document: np.ndarray
    tokens: str
    made: Provenance
    path: str


def _labels(value: Any, path: str) -> Any:
    """Check labels: a column name, or a list of numbers and texts."""
    labels = value if isinstance(value, str) else [as_plain(one) for one in as_items(value, path)]
    for i, one in enumerate(labels if isinstance(labels, list) else ()):
        if not isinstance(one, (str, int, float)) or one != one:
            raise ProgramError(f"expected text or a number, got {type(one).__name__} {one!r:.100}", f"{path}[{i}]")
    return labels


def _labels_in(text: str) -> Any:
    """Return a file's lines or, if there is no such file, the text as a column name."""
    return inputs.prompts_in(text) if Path(text).is_file() else text


def _pool(pool: Any, path: str) -> str | None:
    pool = pool if isinstance(pool, str) else repr(pool)[:100]
    if pool == "max":
        raise ProgramError(
            "max pools a probe's scores, not rows: fit with pool=None and use result.probe(pool='max')", path
        )
    if pool not in ("mean", "last", "none"):
        raise unknown("pool", pool, ("mean", "last", "none"), path)
    return None if pool == "none" else pool


class FitProbe(Study):
    """Fit a linear probe of two classes at each layer, and measure it on held-out documents.

    The rows come from prompts or from a harvest, which is loaded one layer at a time, in fp64. Folds are stratified,
    and keep documents whole.

    Raises: `ProgramError` for a wrong argument, and the error of any run.
    """

    command = "fit-probe"
    not_served = "it fits many rows on the host; run it in the client with pc.LM(url)"

    labels: Annotated[Any, Arg(_labels, _labels_in)]
    """Labels of two classes, one per prompt or document: a list (on the command line a file with one label per line),
    or the name of a column that the harvest kept. With pool=None, also a list with one label per row of the harvest, in
    reading order."""
    prompts: inputs.PromptFile = None
    """Prompts: texts or token ids, or with `chat` texts or lists of messages."""
    harvest: Annotated[Any, Arg(as_harvested, served=False)] = None
    """Harvest to use instead of prompts: its folder or a `Harvested`. No model is needed: `run(None)`."""
    positive_label: Annotated[Any, Arg()] = None
    """Label of the positive class; by default the larger one: True, 1, or the alphabetically later text."""
    site: inputs.SiteField = "resid_post"
    """Site whose rows are read."""
    layers: inputs.Layers = None
    """Layers to fit: a number, a list, or a range such as "0:12"; all by default."""
    tokens: inputs.Selected | None = None
    """Tokens to read in each prompt; all by default. A harvest's tokens are fixed."""
    pool: Annotated[str | None, Arg(_pool)] = "mean"
    """Pooling of a document's rows: mean, or last for the last token's row; none keeps one row per token."""
    chat: inputs.Flag = False
    """Send each prompt as the user turn of a chat."""
    method: Literal["logistic", "mean_difference"] = "logistic"
    """logistic (regression), or mean_difference (of the two classes, with the threshold at the midpoint)."""
    l2: Annotated[float, Arg(inputs.as_positive)] = 1.0
    """L2 penalty of the logistic regression on standardised rows: 1/C in scikit-learn."""
    folds: inputs.Positive = 5
    """Number of folds of the cross-validation."""
    seed: inputs.Whole = 0
    """Seed that assigns documents to folds."""

    def needs_lm(self) -> bool:
        return self.harvest is None

    def check(self) -> None:
        """Raise errors that can be detected without a model."""
        if (self.prompts is None) == (self.harvest is None):
            raise ProgramError("expected either prompts or a harvest", "prompts")
        inputs.check_whole(self.folds, "folds", 2)
        if self.harvest is None and isinstance(self.labels, str):
            raise ProgramError(f"expected one label per prompt, got text {self.labels!r:.100}", "labels")
        for name in ("tokens", "chat") if self.harvest is not None else ():
            if getattr(self, name):
                raise ProgramError("not supported with a harvest, whose rows are fixed", name)

    def _run(
        self, lm: LM, *, batch: inputs.Positive = 64, show_progress: inputs.Progress = None,
        resume: inputs.ResumeFile = None,
    ) -> FitProbeResult:  # fmt: skip
        self.check()
        site = inputs.layered_site(self.site).name
        if self.harvest is None:
            examples = self._read_prompts(lm, site, batch, show_progress, resume)
        elif resume is None:
            examples = self._read_harvest(lm, site)
        else:
            raise ProgramError("not supported with a harvest, which is already on disk", "resume")
        layers, (negative, positive) = examples.layers, self._classes(examples.labels)
        positive_N = np.array([one == positive for one in examples.labels])
        fold_N = split_folds(examples.document, positive_N, self.folds, self.seed)
        fits = list[tuple[np.ndarray, float]]()
        log_odds_LN = np.empty((len(layers), len(positive_N)))
        with progress("fitting", len(layers) * (self.folds + 1), show_progress, "fits") as advance:
            for i, layer in enumerate(layers):
                rows_ND = examples.rows(i).astype(np.float64)
                if not (finite := np.isfinite(rows_ND).all(1)).all():
                    path = examples.path.format(examples.document[~finite][0])
                    raise ProgramError(f"expected finite rows at layer {layer}, got NaN or infinity", path)
                for k in (*range(self.folds), None):  # None: all rows
                    train_N = fold_N != (-1 if k is None else k)
                    weight, bias = fit_rows(self.method, rows_ND[train_N], positive_N[train_N], self.l2)
                    log_odds_LN[i, ~train_N] = rows_ND[~train_N] @ weight + bias
                    advance(1)
                fits.append((weight, bias))  # fitted on all rows
        fold_auroc = [[auroc(of[fold_N == k], positive_N[fold_N == k]) for k in range(self.folds)]
                      for of in log_odds_LN]  # fmt: skip
        return FitProbeResult(
            provenance=msgspec.structs.replace(examples.made, seeds=(self.seed,)), layers=tuple(layers), site=site,
            tokens=examples.tokens, pool=self.pool, method=self.method,
            classes=(str(negative), str(positive)), weight=np.stack([weight for weight, _ in fits]),
            bias=np.array([bias for _, bias in fits]), log_odds=log_odds_LN, fold_auroc=np.array(fold_auroc),
            positive=positive_N, document=examples.document, fold=fold_N,
        )  # fmt: skip

    def _classes(self, labels: Sequence[Any]) -> tuple[Any, Any]:
        """Return the negative and the positive label."""
        found = sorted(set(labels), key=lambda one: (isinstance(one, str), one))
        texts = [str(one) for one in found]
        if len(found) != 2:
            raise ProgramError(f"expected labels of two classes, got {len(found)}: {', '.join(texts[:5])}", "labels")
        if self.positive_label is not None and str(self.positive_label) not in texts:
            raise unknown("label", str(self.positive_label), texts, "positive_label")
        return (found[1], found[0]) if str(self.positive_label) == texts[0] else (found[0], found[1])

    def _read_prompts(self, lm: LM, site: str, batch: int, show: Show, resume: Resumable | None) -> Examples:
        asked = inputs.ask(lm, self.prompts, self.chat)
        if len(self.labels) != len(asked):
            raise ProgramError(f"expected one label for each of {len(asked)} prompts, got {len(self.labels)}", "labels")
        layers = inputs.layers_of(lm, site, self.layers)
        tokens = prompt if self.tokens is None else read_tokens(self.tokens, "tokens")
        captures = [Capture(Site(site, layer), tokens, pool=self.pool) for layer in layers]
        sites = [str(capture.at) for capture in captures]

        def call(part: Sequence[inputs.EncodedPrompt]) -> dict[str, Any]:
            return {"prompt": [one.prompt for one in part], "max_tokens": 1, "capture": captures}

        def record(runs: Sequence[Run], part: Sequence[inputs.EncodedPrompt]) -> list[StoredArray]:
            return [StoredArray.of(np.stack([rows_TD(tensors[name]) for name in sites]))
                    for tensors in lm.fetch(runs, sites)]  # fmt: skip

        def rows_TD(captured: Any) -> np.ndarray:
            rows = np.asarray(captured, np.float32)
            rows = rows[None] if self.pool else rows
            return rows.reshape(len(rows), np.prod(rows.shape[1:], dtype=int))  # flattens heads

        question = {"study": "fit_probe", "prompts": [one.ids for one in asked], "sites": sites, "tokens": str(tokens),
                    "pool": self.pool}  # fmt: skip
        with keeping(lm, question, resume) as journal, progress("reading", len(asked), show, "prompts") as advance:
            read_LTD = [one.array() for one in
                        recorded_runs(lm, journal, asked, call, record, StoredArray, advance, batch)]  # fmt: skip
        counts = [rows.shape[1] for rows in read_LTD]
        if 0 in counts:
            raise TokensError(f"{tokens} selects no token in this prompt", f"prompts[{counts.index(0)}]")
        first = dict[tuple[int, ...], int]()
        documents = [first.setdefault(one.ids, i) for i, one in enumerate(asked)]
        labels = [label for label, count in zip(self.labels, counts, strict=True) for _ in range(count)]
        return Examples(layers, lambda i: np.concatenate([rows[i] for rows in read_LTD]), labels,
                        np.repeat(documents, counts), str(tokens), provenance(lm), "prompts[{}]")  # fmt: skip

    def _read_harvest(self, lm: LM | None, site: str) -> Examples:
        data: Harvested = self.harvest
        recipe, windows = data.manifest.recipe, data.manifest.recipe.filters.positions
        if lm is not None and (recipe.model, recipe.weights) != model_identity(lm):
            raise ProgramError(f"expected a harvest of {lm.model.name}, got one of {recipe.model}", "harvest")
        if data.missing:
            raise ProgramError(f"{len(data.missing)} shards are missing: run the harvest again", "harvest")
        if recipe.sums or any(one.projection for one in recipe.sites):
            raise ProgramError("expected whole rows, got sums or projections", "harvest")
        parsed = [(parse_site(name), name) for name in data.sites]
        stored = {of.layers: name for of, name in parsed
                  if of.name == site and of.index is None and isinstance(of.layers, int)}  # fmt: skip
        if not stored:
            raise UnsupportedSite(f"expected one of {', '.join(data.sites)}, got {site}", "site")
        layers = sorted(stored if self.layers is None else inputs.which_layers(self.layers, max(stored) + 1))
        if missing := [layer for layer in layers if layer not in stored]:
            raise UnsupportedSite(f"layers {missing} are not in the harvest; available: {sorted(stored)}", "layers")
        index = data.index()
        document_N = index["document"].to_numpy()
        labels = self._labels_of_rows(index, document_N)
        order_N = np.lexsort((index["position"].to_numpy(), document_N))
        starts = np.flatnonzero(np.diff(document_N[order_N], prepend=-1))  # first row of each document
        counts = np.diff(starts, append=len(order_N))
        last = order_N[starts + counts - 1]

        def rows(i: int) -> np.ndarray:
            rows_ND = np.concatenate(list(data.blocks(stored[layers[i]])))
            if self.pool == "mean":
                return np.add.reduceat(rows_ND[order_N], starts, dtype=np.float64) / counts[:, None]
            return rows_ND[last] if self.pool == "last" else rows_ND

        if self.pool is not None:
            document_N, labels = document_N[last], [labels[i] for i in last]
        tokens = str(prompt[slice(*windows[0])] if windows else prompt)
        if len(windows) > 1 or recipe.filters != Filters(positions=windows):
            tokens = ""
        made = Provenance(recipe.model, recipe.engine, recipe.weights_dtype, __version__, recipe.settings)
        return Examples(layers, rows, labels, document_N, tokens, made, "harvest, document {}")

    def _labels_of_rows(self, index: Any, document_N: np.ndarray) -> list[Any]:
        """Return the labels of a harvest's rows, in reading order."""
        if isinstance(self.labels, str):
            columns = [name for name in index.column_names if name not in INDEX_COLUMNS]
            if self.labels not in columns:
                raise unknown("kept column", self.labels, columns, "labels")
            return _labels(index[self.labels].to_pylist(), "labels")
        documents, rows, given = self.harvest.manifest.documents, len(document_N), len(self.labels)
        if given == documents == rows and self.pool is None:
            raise ProgramError(f"ambiguous labels: the harvest has {rows} documents and {rows} rows; use a kept "
                               "column, or pool='last' for one label per document", "labels")  # fmt: skip
        if given == documents:
            return [self.labels[i] for i in document_N]
        if given != rows or self.pool is not None:
            per_row = f", or {rows}, one per row" if self.pool is None else ""
            raise ProgramError(f"expected {documents} labels, one per document{per_row}, got {given}", "labels")
        return self.labels


fit_probe: Callable[..., FitProbeResult] = FitProbe.short_form("fit_probe")
