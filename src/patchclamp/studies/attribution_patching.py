"""Attribution patching: an estimate of every cell of a patch sweep from one gradient, and the best of them patched
exactly.

The effect of giving an activation a of the corrupt run its clean value is, to first order, (clean − corrupt) · ∂m/∂a.
With `steps` the gradient is averaged over the way from the corrupt prompt's embedding to the clean one's, which finds
cells whose gradient vanishes at the corrupt run.

Source: Nanda 2023, "Attribution patching: activation patching at industrial scale"; Syed et al. 2023
(arXiv:2310.10348); integrated gradients of inputs as in Hanna et al. 2024 (arXiv:2403.17806), equation 3; Sundararajan
et al. 2017 (arXiv:1703.01365). On how far such estimates can be trusted, Kramár et al. 2024 (arXiv:2403.00745).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from patchclamp.engines.base import Gradients
from patchclamp.errors import PatchclampError, ProgramError, UnsupportedSite
from patchclamp.language import From, Replace, Site, every
from patchclamp.language import prompt as whole_prompt
from patchclamp.language.site import parse_site
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies.align import align
from patchclamp.studies.attribution_result import AttributionPatching, Row
from patchclamp.studies.batches import run_batches
from patchclamp.studies.metric import Graded, grade, single_token
from patchclamp.studies.progress import progress
from patchclamp.studies.result import provenance
from patchclamp.studies.selected import layers_of
from patchclamp.studies.sweep_result import Column

SITES = ("resid_pre", "attn_out", "mlp_out")
HEADED = ("q", "k", "v", "z")  # sites whose heads are patched one by one


def attribution_patching(
    lm: LM,
    *,
    clean: Any,
    corrupt: Any,
    answer: str | int,
    foil: str | int | None = None,
    sites: Sequence[Any] = SITES,
    layers: Any = None,
    steps: int = 0,
    verify: int = 32,
    sample: int = 32,
    seed: int = 0,
    on: LM | None = None,
    batch: int = 256,
    show_progress: bool | None = None,
) -> AttributionPatching:
    """Estimates the effect of every patch of a clean run into a corrupt one, and makes the best of them exactly.

    lm: on Transformers, for the gradients; `on`: where the exact patches run, such as the serving engine; `lm` itself
        if not given
    clean, corrupt: prompts, as text or token ids. answer, foil: one token each; the metric is logit(answer) −
        logit(foil), or log p(answer) without a foil
    sites: site words; of q, k, v and z every head is a row of its own. layers: a number, a list, or text such as "0:12"
    steps: 0 for the gradient of the corrupt run, else how many gradients to average on the way to the clean prompt
    verify: how many cells of the largest estimates to patch exactly; sample: how many others, drawn with `seed`, for an
        honest correlation
    batch: exact patches submitted at a time

    Raises: `EngineError` for an engine without gradients, `TokensError` for prompts that cannot be aligned,
    `UnsupportedSite` for sites without a gradient, and the error of any run.
    """
    graded = grade("logit_diff" if foil is not None else "logprob", single_token(lm, answer, "answer"),
                   None if foil is None else single_token(lm, foil, "foil"))  # fmt: skip
    for name, value in (("steps", steps), ("verify", verify), ("sample", sample)):
        if not isinstance(value, int) or value < 0:
            raise ProgramError(f"a number from 0 on is needed, not {value!r}", name)
    rows = _rows(lm, [sites] if isinstance(sites, (str, Site)) else sites, layers)
    ids = [_ids(lm, prompt) for prompt in (clean, corrupt)]
    pairs = align(*ids).pairs
    tokens = [tuple(lm.tokenizer.token_strings(one)) for one in ids]
    columns = tuple(Column(tokens[1][b], (a,), (b,)) for a, b in pairs)
    work = _Estimates(lm, graded, ids, pairs, rows)
    estimates = work.estimate(steps)
    chosen, drawn = _chosen(estimates, verify, sample, seed)
    serving = on or lm
    _check_same(lm, serving)
    cells = [(rows[i // len(columns)], columns[i % len(columns)]) for i in chosen]
    effects, floor = _verify(serving, ids, graded, cells, batch, show_progress) if cells else (np.zeros(0), 0.0)
    exact, sampled = np.full(estimates.shape, np.nan), np.zeros(estimates.shape, bool)
    exact.flat[chosen], sampled.flat[drawn] = effects, True
    return AttributionPatching(
        provenance=provenance(lm, (seed,) if sample else ()), metric=graded.metric, clean_tokens=tokens[0],
        corrupt_tokens=tokens[1], answer=lm.tokenizer.token_strings([graded.answer])[0],
        foil=None if graded.foil is None else lm.tokenizer.token_strings([graded.foil])[0], steps=steps,
        rows=tuple(rows), columns=columns, estimates=estimates, exact=exact, sampled=sampled,
        clean=work.value(0), corrupt=work.value(1), verified_on=provenance(serving), noise_floor=floor,
    )  # fmt: skip


class _Estimates:
    """Gradients of a metric, and the differences of two runs that they are multiplied by."""

    def __init__(
        self, lm: LM, graded: Graded, ids: list[list[int]], pairs: tuple[tuple[int, int], ...], rows: list[Row]
    ) -> None:
        self._lm, self._graded, self._ids, self._rows = lm, graded, ids, rows
        self._clean_at, self._corrupt_at = (np.array(side) for side in zip(*pairs, strict=True))
        self._weights = {graded.answer: 1.0} | ({} if graded.foil is None else {graded.foil: -1.0})
        self._ref = {row: lm.sites.resolve(Site(row.site, row.layer, row.head))[0] for row in rows}
        self._points = sorted({ref.point for ref in self._ref.values()})
        self._first = lm.sites.resolve(Site("resid_pre", 0))[0].point
        self._runs = [self._at(one) for one in ids]

    def value(self, side: int) -> float:
        """The metric of the clean run (0) or the corrupt one (1)."""
        return self._graded.read(self._runs[side].scores)

    def _at(self, ids: list[int], stream: np.ndarray | None = None) -> Gradients:
        return self._lm.engine.gradients(ids, [*self._points, self._first], self._weights, stream)

    def estimate(self, steps: int) -> np.ndarray:
        """The estimate of every cell, [rows, aligned positions]."""
        clean, corrupt = (run.rows for run in self._runs)
        slopes = self._slopes(steps)
        estimates = np.zeros((len(self._rows), len(self._clean_at)))
        for r, row in enumerate(self._rows):
            point = self._ref[row].point
            products = clean[point][self._clean_at] - corrupt[point][self._corrupt_at]
            products = products * slopes[point][self._corrupt_at]
            first, end = self._ref[row].columns or (0, products.shape[1])
            estimates[r] = products[:, first:end].sum(-1)
        return estimates

    def _slopes(self, steps: int) -> dict[int, np.ndarray]:
        """Gradients by point: of the corrupt run, or the mean of `steps` places, each in the middle of its part of the
        way from the corrupt prompt's first stream to the clean one's."""
        if not steps:
            return self._runs[1].gradients
        begin, end = self._runs[1].rows[self._first], self._runs[1].rows[self._first].copy()
        end[self._corrupt_at] = self._runs[0].rows[self._first][self._clean_at]
        total: dict[int, np.ndarray] = {}
        for step in range(steps):
            share = (step + 0.5) / steps
            gradients = self._at(self._ids[1], begin + np.float32(share) * (end - begin)).gradients
            total = {point: total.get(point, 0.0) + slope / steps for point, slope in gradients.items()}
        return total


def _chosen(estimates: np.ndarray, verify: int, sample: int, seed: int) -> tuple[list[int], list[int]]:
    """The cells to verify, by number: those of the largest estimates, and those drawn from the others; and the
    drawn."""
    order = np.argsort(-np.abs(estimates), axis=None, kind="stable")
    rest = order[verify:]
    drawn = np.random.default_rng(seed).choice(rest, min(sample, len(rest)), replace=False)
    return [*order[:verify].tolist(), *drawn.tolist()], drawn.tolist()


def _verify(
    lm: LM, ids: list[list[int]], graded: Graded, cells: list[tuple[Row, Column]], batch: int, show: bool | None
) -> tuple[np.ndarray, float]:
    """How far each cell's patch moves the metric, and how far unpatched runs beside them are apart."""
    capture = [Site(*place) @ whole_prompt for place in dict.fromkeys((row.site, row.layer) for row, _ in cells)]
    source: Run = lm.run(ids[0], max_tokens=1, capture=capture)
    programs: list[list[Replace]] = [[], *([_patch(source, row, column)] for row, column in cells), []]
    calls = (
        {"prompt": [ids[1]] * len(part), "max_tokens": 1, "score": graded.score, "edits": part}
        for part in (programs[i : i + batch] for i in range(0, len(programs), batch))
    )
    values: list[float] = []
    with progress("verifying", len(programs), show) as advance:

        def read(runs: list[Run]) -> None:
            values.extend(graded.read(run.scores) for run in runs)
            advance(len(runs))

        try:
            run_batches(lm, calls, read)
        finally:
            source.close()
    return np.array(values[1:-1]) - values[0], abs(values[-1] - values[0])


def _patch(source: Run, row: Row, column: Column) -> Replace:
    at = Site(row.site, row.layer, row.head)
    return Replace(From(source, at, every[column.clean]), at=at, tokens=every[column.corrupt])


def _rows(lm: LM, sites: Sequence[Any], layers: Any) -> list[Row]:
    rows: dict[Row, None] = {}
    for i, text in enumerate(sites):
        try:
            site = parse_site(text)
            refs = lm.sites.resolve(site)
        except PatchclampError as error:
            raise error.under(f"sites[{i}]") from None
        if site.name in ("logits", "router"):
            raise UnsupportedSite(f"there are no gradients at {site.name}", f"sites[{i}]")
        kept = None if site.layers is not None or refs[0].layer is None else set(layers_of(lm, site.name, layers))
        parts = lm.sites.parts(site.name)
        heads = range(parts[0]) if parts and site.name in HEADED and site.index is None else [site.index]
        if site.index is not None and not isinstance(site.index, int):
            raise UnsupportedSite(f"{site}: name one head, or none for each", f"sites[{i}]")
        for ref in refs:
            if kept is None or ref.layer in kept:
                rows |= dict.fromkeys(Row(site.name, ref.layer, head) for head in heads)  # pyright: ignore
    return list(rows)


def _ids(lm: LM, prompt: Any) -> list[int]:
    return lm.tokens(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]


def _check_same(lm: LM, serving: LM) -> None:
    """Raises `ProgramError` if two `LM`s are of models of different sizes."""
    ours, theirs = ((m.layers, m.d_model, m.d_vocab) for m in (lm.model, serving.model))
    if ours != theirs:
        raise ProgramError(
            f"the estimates are of a model with (layers, width, vocabulary) {ours}, and the exact patches would run on "
            f"one with {theirs}", "on"
        )  # fmt: skip
