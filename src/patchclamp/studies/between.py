"""The base of studies that estimate effects from gradients at a clean prompt, a corrupt prompt and points between them,
patch some cells exactly, and report the correlation between estimated and exact effects.

T tokens of the corrupt prompt · D model width
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np

from patchclamp.engines.base import Gradients
from patchclamp.errors import ProgramError
from patchclamp.language import Replace, Site
from patchclamp.language import prompt as whole_prompt
from patchclamp.lm import LM
from patchclamp.plots import GridPanel, TokenGrid, style
from patchclamp.run import Run
from patchclamp.studies import inputs
from patchclamp.studies.grid import graded_of
from patchclamp.studies.inputs import Column
from patchclamp.studies.metric import ALONE, METRICS, single_token
from patchclamp.studies.study import Provenance, Study, StudyResult, progress, provenance

Verified = Literal["all", "best", "sampled"]
STEP = 1e-3  # nats: step of the finite differences that give a metric's derivative
BEST = 20  # verified cells in the picture's table


Proposed = TypeVar("Proposed", bound=Any)  # a cell with `ends`, `estimate`, and `exact` (None if not verified)


class Proposal(StudyResult, Generic[Proposed], frozen=True, eq=False, kw_only=True):
    """Base of results with estimated effects, verified for a subset of cells. The three arrays have the same shape.

    estimates: first-order change of the corrupt run's metric if the cell had its clean value
    exact: measured change; NaN for cells that were not patched
    sampled: True for cells that were drawn at random for verification, not chosen for a large estimate
    metric: name of the metric; `clean` and `corrupt` are its values in the unpatched runs · steps: number of gradients
        averaged from corrupt to clean; 0: the gradient of the corrupt run alone · verified_on: model and engine of the
        exact patches · noise_floor: difference between two unpatched runs on that engine
    """

    kind: ClassVar[str]  # the kind of study, in titles
    heads: ClassVar[tuple[str, str]]  # names of a cell's two ends
    effect: ClassVar[str]  # the clean run's action on a cell

    metric: str
    clean_tokens: tuple[str, ...]
    corrupt_tokens: tuple[str, ...]
    answer: str
    foil: str | None
    steps: int
    estimates: np.ndarray
    exact: np.ndarray
    sampled: np.ndarray
    clean: float
    corrupt: float
    verified_on: Provenance
    noise_floor: float

    def pearson(self, which: Verified = "all") -> float:
        """Return the Pearson correlation of estimated and exact effects over the verified cells selected by `which`.
        NaN for fewer than three cells."""
        return _correlation(*self._pairs(which))

    def spearman(self, which: Verified = "all") -> float:
        """Return the rank correlation over the same cells as `pearson`."""
        return _correlation(*map(_ranks, self._pairs(which)))

    def _pairs(self, which: Verified) -> tuple[np.ndarray, np.ndarray]:
        verified = np.isfinite(self.exact)
        chosen = verified & (self.sampled if which == "sampled" else ~self.sampled if which == "best" else True)
        return self.estimates[chosen], self.exact[chosen]

    def proposals(self, count: int = 10) -> list[Proposed]:
        """Return the cells with the largest absolute estimates, largest first."""
        order = np.argsort(-np.abs(self.estimates), axis=None, kind="stable")
        return [self.at(number) for number in order[: min(count, int(np.isfinite(self.estimates).sum()))].tolist()]

    def best(self, count: int = 5) -> list[Proposed]:
        """Return the verified cells that moved the metric furthest from corrupt towards clean, best first."""
        towards = 1.0 if self.clean >= self.corrupt else -1.0
        verified = np.flatnonzero(np.isfinite(self.exact)).tolist()
        return [self.at(n) for n in sorted(verified, key=lambda n: -towards * self.exact.flat[n])[:count]]

    def at(self, number: int) -> Proposed:
        """Return the cell with this index in the flattened estimates."""
        raise NotImplementedError

    def panels(self) -> Iterator[GridPanel]:
        """Yield the panels of the plot."""
        raise NotImplementedError

    def marks(self, exact: np.ndarray) -> dict[str, Any]:
        """Return the outlines and hover notes that mark a panel's verified cells."""
        notes = [["" if np.isnan(value) else f"exact patch: {style.signed(float(value))}" for value in row]
                 for row in exact]  # fmt: skip
        return {"notes": tuple(map(tuple, notes)),
                "outlined": tuple((int(r), int(c)) for r, c in np.argwhere(np.isfinite(exact)))}  # fmt: skip

    def picture(self) -> TokenGrid:
        """Return plot data: the estimates, with verified cells outlined, and a table of the verified cells."""
        rows = [(*map(style.visible, cell.ends), style.signed(cell.estimate), style.signed(cell.exact or 0.0))
                for cell in self.best(BEST)]  # fmt: skip
        steps = f"{self.steps} step{'s' if self.steps > 1 else ''}"
        way = f"gradients at {steps} between the two runs" if self.steps else "one gradient of the corrupt run"
        ours, theirs = self.provenance.where, self.verified_on.where
        return TokenGrid(
            title=f"{self.kind}: {self._quantity()}",
            explained=(f"Each cell estimates, from {way}, how far the corrupt run's {style.number(self.corrupt)} would "
                       f"move if {self.effect} the clean run ({style.number(self.clean)}). {self._verified()}"),
            provenance=ours if ours == theirs else f"{ours}; verified on {theirs}", panels=tuple(self.panels()),
            table=((*self.heads, "estimate", "exact patch"), *rows) if rows else (),
        )  # fmt: skip

    def _quantity(self) -> str:
        if self.metric not in METRICS:
            return self.metric
        if self.foil is None or self.metric in ALONE:
            return f"{'' if self.metric == 'prob' else 'log-'}probability of {style.quoted(self.answer)}"
        difference = f"logit difference {style.quoted(self.answer)} − {style.quoted(self.foil)}"
        return f"recovered share of the {difference}" if self.metric == "recovered" else difference

    def _verified(self) -> str:
        """Return a sentence on how well estimates match exact patches."""
        count = int(np.isfinite(self.exact).sum())
        if not count:
            return "No cell was verified."
        parts: list[str] = []
        kinds: dict[Verified, str] = {"best": "largest estimates", "sampled": "others, drawn at random"}
        for which, name in kinds.items():
            number, pearson = len(self._pairs(which)[0]), self.pearson(which)
            if np.isfinite(pearson):
                parts.append(f"r {style.number(pearson)}, ρ {style.number(self.spearman(which))} "
                             f"over the {number} {name}")  # fmt: skip
        patched = f"{count} outlined cell{'s were' if count > 1 else ' was'} patched exactly."
        return f"{patched} Estimates and exact effects correlate: {'; '.join(parts)}." if parts else patched


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value; ties share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((2 * last - counts - 1) / 2)[inverse]


class GradedAnswer:
    """A metric of the next token, its value, and its gradients.

    answer, foil: token ids · graded: the metric and its graded tokens
    """

    def __init__(self, lm: LM, answer: Any, foil: Any, metric: Any) -> None:
        self._lm = lm
        self.answer: int = single_token(lm, answer, "answer")
        self.foil: int | None = None if foil is None else single_token(lm, foil, "foil")
        metric = metric or ("logprob" if self.foil is None else "logit_diff")
        [self.graded] = graded_of(lm, self.answer, self.foil, metric, 1)
        if self.graded.top:
            raise ProgramError(f"expected top=0 for gradients, got {self.graded.top}: list the metric's tokens instead",
                               "metric.top")  # fmt: skip
        self._tokens: list[int] = [token for [(_, token)] in self.graded.scores]

    def value(self, run: Gradients) -> float:
        """Return a run's metric before normalisation."""
        return self._value(np.array([run.scores[token] for token in self._tokens]))

    def _value(self, logprobs: np.ndarray) -> float:
        """Return the metric, given its tokens' log-probabilities."""
        if self.graded.custom is None:
            return float(self.graded.of_logprobs(logprobs[None])[0])
        return self.graded.value((logprobs.tolist(), {}))

    def _slopes(self, logprobs: np.ndarray) -> dict[int, float]:
        """Return the metric's derivative with respect to each token's log-probability, by central differences, or
        one-sided differences at 0 (certainty). Steps shrink near 0, where log-odds and similar metrics curve."""
        up = np.minimum(STEP, -logprobs / 16)
        down = np.where(up > 0, up, STEP)
        slopes = [(self._value(logprobs + above) - self._value(logprobs - below)) / (above + below).sum()
                  for above, below in zip(np.diag(up), np.diag(down), strict=True)]  # fmt: skip
        return {token: sum(of for other, of in zip(self._tokens, slopes, strict=True) if other == token)
                for token in self._tokens}  # fmt: skip

    def gradients(self, ids: list[int], points: list[int], stream: np.ndarray | None = None) -> Gradients:
        """Return the rows at `points`, and the metric's gradients with respect to them. A metric that is nonlinear in
        log-probabilities takes a second run. Raises `EngineError` if the engine has no gradients."""
        engine, linear = self._lm.engine, self.graded.custom is None and self.graded.metric != "prob"
        scores = dict.fromkeys(self._tokens, 0.0)
        if not linear:
            scores = engine.gradients(ids, points[:1], dict.fromkeys(self._tokens, 1.0), stream).scores
        slopes = self._slopes(np.array([scores[token] for token in self._tokens]))
        return engine.gradients(ids, points, slopes, stream)


class Candidates(GradedAnswer):
    """A study's cells, its two aligned prompts, and the graded tokens. A cell's number is its index in the flattened
    estimates.

    result: the study's result class · fields: values of the fields that it adds to `Proposal`
    ids: token ids of the clean and the corrupt prompt · tokens: their texts · columns: the aligned positions ·
    clean_at, corrupt_at: the same positions as arrays · clean, corrupt: rows and gradients of both runs
    sources: number of prompts captured for exact patches: 1 (the clean prompt) or 2 (both)
    """

    result: type[Proposal]
    fields: dict[str, Any]
    clean: Gradients
    corrupt: Gradients
    sources = 1

    def __init__(self, lm: LM, study: GradientStudy) -> None:
        super().__init__(lm, study.answer, study.foil, study.metric)
        one, other = inputs.words_of(lm, study.clean, "clean"), inputs.words_of(lm, study.corrupt, "corrupt")
        self.ids: list[list[int]] = [list(of.ids) for of in (one, other)]
        self.tokens: list[tuple[str, ...]] = [of.tokens for of in (one, other)]
        matched = () if study.match is None else study.match.pairs(lm, one, other, "match")
        alignment = inputs.with_pairs(inputs.align(one.ids, other.ids, study.match is not None), matched)
        pairs = sorted(alignment.pairs, key=lambda pair: pair[1])
        labels = {(a, b): inputs.matched_label(self.tokens[1][b], self.tokens[0][a]) for a, b in matched}
        self.columns: tuple[Column, ...] = tuple(
            Column(labels.get((a, b), self.tokens[1][b]), (a,), (b,)) for a, b in pairs
        )
        self.clean_at, self.corrupt_at = (np.array(side) for side in zip(*pairs, strict=True))

    def estimates(self, steps: int) -> np.ndarray:
        """Return the estimate of every cell; NaN for cells that do not exist."""
        raise NotImplementedError

    def sites(self, number: int) -> list[Site]:
        """Return the sites that a cell's exact patch reads from the source runs."""
        raise NotImplementedError

    def edit(self, number: int, runs: list[Run]) -> Replace:
        """Return a cell's exact patch."""
        raise NotImplementedError

    def read(self, points: Sequence[int]) -> None:
        """Run both prompts, and keep rows and gradients at `points`. Raises the errors of `gradients`."""
        self._first = self._lm.sites.resolve(Site("resid_pre", 0))[0].point
        self._points = sorted({*points, self._first})
        self.clean, self.corrupt = (self.gradients(ids, self._points) for ids in self.ids)

    def difference(self, point: int) -> np.ndarray:
        """Return clean − corrupt at a point, at the aligned positions."""
        return self.clean.rows[point][self.clean_at] - self.corrupt.rows[point][self.corrupt_at]

    def along(self, steps: int) -> Iterator[Gradients]:
        """Yield the corrupt run's gradients if `steps` is 0, otherwise gradients at the midpoints of `steps` equal
        steps from the corrupt prompt's embedding to the clean prompt's."""
        if not steps:
            yield self.corrupt
        begin = self.corrupt.rows[self._first]
        end = begin.copy()
        end[self.corrupt_at] = self.clean.rows[self._first][self.clean_at]
        for step in range(steps):
            stream = begin + np.float32((step + 0.5) / steps) * (end - begin)
            yield self.gradients(self.ids[1], self._points, stream)

    @property
    def scale(self) -> tuple[float, float]:
        """(offset, factor) that normalise a metric: (value − offset) · factor."""
        return self.graded.scale(self.value(self.clean), self.value(self.corrupt))

    @property
    def texts(self) -> dict[str, Any]:
        """The result fields that describe the prompts and the metric."""
        strings, (offset, factor) = self._lm.tokenizer.token_strings, self.scale
        return {
            "metric": self.graded.metric, "clean_tokens": self.tokens[0], "corrupt_tokens": self.tokens[1],
            "answer": strings([self.answer])[0], "foil": None if self.foil is None else strings([self.foil])[0],
            "clean": factor * (self.value(self.clean) - offset),
            "corrupt": factor * (self.value(self.corrupt) - offset),
        }  # fmt: skip


class GradientStudy(Study):
    """The base of studies that estimate effects from gradients, and patch the largest ones exactly."""

    not_served = "it requires gradients, which only the Transformers engine computes"
    candidates: ClassVar[type[Candidates]]

    clean: inputs.Prompt
    """Prompt whose activations are patched in, as text or token ids."""
    corrupt: inputs.Prompt
    """Prompt that the activations are patched into."""
    answer: inputs.Answer
    """Expected answer of the clean prompt: one token, with its leading space."""
    foil: inputs.Answer = None
    """Answer of the corrupt prompt: one token."""
    metric: inputs.MetricField = None
    """Metric: logit_diff, recovered, logprob or prob, or a Python function of log-probabilities (`Metric`, with top=0).
    By default the logit difference, or log p(answer) without a foil."""
    match: inputs.Matched = None
    """Tokens to pair if the prompts differ in length; other tokens are aligned automatically. A `Match` or, as text,
    JSON with clean, corrupt and align."""
    steps: inputs.Whole = 0
    """Number of gradients to average on the path from the corrupt to the clean prompt; 0: the corrupt run's alone."""
    verify: inputs.Whole = 32
    """Number of largest estimates to verify by exact patches."""
    sample: inputs.Whole = 32
    """Number of other cells to verify, drawn at random for an unbiased correlation."""
    seed: inputs.Whole = 0
    """Seed of the random draw."""

    def _run(
        self, lm: LM, *, on: inputs.OnLM = None, batch: inputs.Positive = 256, show_progress: inputs.Progress = None
    ) -> Proposal:
        serving = on or lm
        ours, theirs = ((m.layers, m.d_model, m.d_vocab) for m in (lm.model, serving.model))
        if ours != theirs:
            raise ProgramError(
                f"expected a model with (layers, width, vocabulary) {ours}, as for the estimates, got {theirs}", "on"
            )  # fmt: skip
        cells = self.candidates(lm, self)
        _, factor = cells.scale
        estimates = factor * cells.estimates(self.steps)
        if cells.graded.custom is not None and cells.ids[0] != cells.ids[1] and not np.nan_to_num(estimates).any():
            raise ProgramError(
                f"every estimate is 0: {cells.graded.metric} is constant near these runs; "
                "use a smooth metric, such as a difference of log-probabilities", "metric"
            )  # fmt: skip
        by_size = np.argsort(-np.abs(estimates), axis=None, kind="stable")[: int(np.isfinite(estimates).sum())]
        rest = by_size[self.verify :]
        drawn = np.random.default_rng(self.seed).choice(rest, min(self.sample, len(rest)), replace=False)
        chosen = [*by_size[: self.verify].tolist(), *drawn.tolist()]
        exact, sampled, floor = np.full(estimates.shape, np.nan), np.zeros(estimates.shape, bool), 0.0
        sampled.flat[drawn] = True
        if chosen:
            captures = [site @ whole_prompt for site in {site for n in chosen for site in cells.sites(n)}]
            sources = [serving.run(ids, max_tokens=1, capture=captures) for ids in cells.ids[: cells.sources]]
            try:
                programs = [[], *([cells.edit(number, sources)] for number in chosen), []]
                job = serving.grade_job(cells.ids[1], programs, cells.graded.scores)
                with progress("verifying", len(chosen), show_progress) as advance:
                    patched = range(1, len(chosen) + 1)  # the first and the last are reruns of the corrupt prompt
                    [grades] = serving.graded(
                        [job], lambda i, grades, which: advance(int(np.isin(which, patched).sum())), batch
                    )
            finally:
                for run in sources:
                    run.close()
            records = cells.graded.records(grades, np.arange(len(programs)))
            values = factor * np.array([cells.graded.value(record) for record in records])
            exact.flat[chosen] = values[1:-1] - values[0]
            floor = float(abs(values[-1] - values[0]))  # the difference of two unpatched runs
        return cells.result(
            provenance=provenance(lm, (self.seed,) if self.sample else ()), verified_on=provenance(serving),
            steps=self.steps, estimates=estimates, exact=exact, sampled=sampled, noise_floor=floor, **cells.texts,
            **cells.fields,
        )  # fmt: skip
