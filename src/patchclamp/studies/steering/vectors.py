"""Steering vectors from contrasting prompts, and the layer whose vector tells held-out prompts apart best.

Source: contrastive activation addition, Rimsky et al. 2023 (arXiv:2312.06681); representation engineering, Zou et al.
2023 (arXiv:2310.01405).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from patchclamp.errors import PatchclampError, ProgramError, TokensError, UnsupportedSite
from patchclamp.language import Add, Capture, Site
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import TokensLike, parse_tokens, prompt, read_tokens
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.studies.grid import check_seed
from patchclamp.studies.inputs import Asked, as_float, ask, check_batch, checked, content_hash, layers_of
from patchclamp.studies.steering.behaviour import Behaviour, Scored, check_behaviour
from patchclamp.studies.steering.directions import Check, check, check_method, direction
from patchclamp.studies.steering.result import PromptSet, SteeringVectors
from patchclamp.studies.study import Journal, Resumable, Stored, keeping, progress, provenance, recorded_runs

NO_CHECK = Check(float("nan"), float("nan"))


@checked
def steering_vectors(
    lm: LM,
    positive: Sequence[Any],
    negative: Sequence[Any],
    *,
    method: str = "mean",
    site: str | Site = "resid_post",
    layers: Any = None,
    tokens: TokensLike = prompt[-1],
    chat: bool = False,
    held_out: float = 0.25,
    seed: int = 0,
    answer: Any = None,
    foil: Any = None,
    batch: int = 64,
    show_progress: bool | None = None,
    resume: Resumable | None = None,
) -> SteeringVectors:
    """A direction a layer from what `site` has in positive and in negative prompts, and the layer where it is best.

    positive, negative: texts or token ids, or with `chat` texts or lists of messages; as many of both are pairs
    method: "mean" (difference of means), "pca" (of pairs' differences) or "probe" (logistic regression)
    site: one whose rows are the width of the stream: `resid_post`, `attn_out`, …
    layers: a number, a list, or text such as "8:20"; all layers if not given
    tokens: which of each prompt are read; of several the mean
    held_out: the share of the prompts that the vectors are not made of but checked on, drawn by `seed`, pairs together
        (`directions.check`); 0 for no check, and no best layer
    answer, foil: continuations as of `strength_curve`, which the positive class calls for, and the negative one. With
        them the best layer is the one whose vector, added once to every token of the held-out negative prompts, moves
        log p(answer) − log p(foil) most; without them the one that tells held-out prompts apart best
    batch: runs submitted at a time, at most; two batches are under way
    resume: a file to which each prompt's rows, and scores, are appended as they are computed, and from which an
        interrupted call of the same arguments goes on

    Raises: `ProgramError` and its kind for arguments that cannot be, and the error of any run.
    """
    batch, seed = check_batch(batch), check_seed(seed)
    sides = ask(lm, positive, chat, "positive"), ask(lm, negative, chat, "negative")
    check_method(method, len(sides[0]), len(sides[1]))
    check_behaviour(lm, answer, foil, held_out)
    named = _site(lm, site)
    numbers = layers_of(lm, named.name, layers)
    tests = _held_out(len(sides[0]), len(sides[1]), held_out, seed)
    captures = [Capture(Site(named.name, layer), read_tokens(tokens, "tokens")) for layer in numbers]
    behaviour = None if answer is None else Behaviour.of(lm, answer, foil, len(tests[1]))
    question = {
        "study": "steering_vectors", "prompts": [[one.ids for one in side] for side in sides], "method": method,
        "site": named.name, "layers": numbers, "tokens": str(parse_tokens(tokens)), "held_out": held_out, "seed": seed,
        "behaviour": None if behaviour is None else behaviour.question(()),
    }  # fmt: skip
    with keeping(lm, question, resume) as journal:
        with progress("reading", sum(map(len, sides)), show_progress) as advance:
            rows_NLD, norms = _read(lm, journal, [*sides[0], *sides[1]], captures, batch, advance)
        vectors, checks = _fit(method, rows_NLD[: len(sides[0])], rows_NLD[len(sides[0]) :], tests)
        kept = [sides[1][i] for i in tests[1]]
        effects = np.full(len(numbers), np.nan)
        if behaviour is not None:
            adding = [(Add(of, at=Site(named.name, layer)),) for layer, of in zip(numbers, vectors, strict=True)]
            effects = _effects(behaviour.score(lm, kept, [(), *adding], batch, show_progress, journal))
    best = max(range(len(numbers)), key=lambda i: (effects[i] if len(kept) and answer is not None else 0.0,
                                                   checks[i].accuracy, checks[i].separation, -i))  # fmt: skip
    sets = [PromptSet(len(side), len(test), content_hash(side)) for side, test in zip(sides, tests, strict=True)]
    return SteeringVectors(
        provenance=provenance(lm, (seed,)), method=method, site=named.name, tokens=str(parse_tokens(tokens)),
        layers=tuple(numbers), vectors=vectors.astype(np.float32),
        accuracy=np.array([one.accuracy for one in checks]), separation=np.array([one.separation for one in checks]),
        effect=effects, row_norm=norms, best=numbers[best] if len(tests[0]) else None, positive=sets[0],
        negative=sets[1], chat=chat, family=lm.model.family,
    )  # fmt: skip


def _fit(
    method: str, positive_NLD: np.ndarray, negative_NLD: np.ndarray, tests: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, list[Check]]:
    """Vectors [L, D] of the rows that are not held out, and their checks on those that are."""
    classes = positive_NLD, negative_NLD
    made_of = [np.delete(rows, test, axis=0) for rows, test in zip(classes, tests, strict=True)]
    held_out = [rows[test] for rows, test in zip(classes, tests, strict=True)]
    vectors, checks = [], []
    for layer in range(positive_NLD.shape[1]):
        first, second = (rows[:, layer] for rows in made_of)
        vectors.append(direction(method, first, second))
        kept = held_out[0][:, layer], held_out[1][:, layer]
        checks.append(check(vectors[-1], (first, second), kept) if len(tests[0]) else NO_CHECK)
    return np.stack(vectors), checks


def _effects(scored: Scored) -> np.ndarray:
    """How much each vector, added once, moves the score: [L], the mean over prompts. The first edits are none."""
    scores = scored.scores.mean(0)
    return scores[1:] - scores[0]


def _site(lm: LM, site: str | Site) -> Site:
    try:
        named = parse_site(site)
    except PatchclampError as error:
        raise error.under("site") from None
    if named.layers is not None or named.index is not None:
        raise ProgramError(f"a site's word is needed, such as {named.name!r}: layers= says which", "site")
    refs = lm.sites.resolve(named)
    if any(ref.layer is None for ref in refs):
        raise UnsupportedSite(f"{named} has no layers, and vectors are made for each layer", "site")
    if any(lm.sites.points[ref.point].width != lm.model.d_model for ref in refs):
        raise UnsupportedSite(f"the rows of {named} are not as wide as the stream ({lm.model.d_model})", "site")
    return named


def _held_out(positive: int, negative: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the held-out prompts of each class; of pairs the same. At least one of each is held out, and one is
    not, unless the share is 0."""
    if not 0 <= (share := as_float(share, "held_out")) < 1:
        raise ProgramError(f"a share from 0 to below 1 is needed, not {share!r}", "held_out")
    counts = [round(share * n) for n in (positive, negative)]
    if share and (min(counts) < 1 or counts[0] == positive or counts[1] == negative):
        raise ProgramError(
            f"{share:g} of {positive} positive and {negative} negative prompts leaves a class nothing to be made of or "
            "checked on: give more prompts, or held_out=0 for no check", "held_out"
        )  # fmt: skip
    draws = np.random.default_rng(seed)
    first = draws.permutation(positive)
    second = first if positive == negative else draws.permutation(negative)
    return np.sort(first[: counts[0]]), np.sort(second[: counts[1]])


class _Read(msgspec.Struct, frozen=True):
    """What is kept of a prompt: its mean row at each layer [L, D], and the mean length of its rows [L]."""

    mean: Stored
    lengths: Stored


def _read(
    lm: LM, journal: Journal | None, asked: list[Asked], captures: list[Capture], batch: int, advance: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The mean row of each prompt at each layer [N, L, D], and the mean length [L] of all rows."""
    sites = [str(capture.at) for capture in captures]

    def calls(batches: Iterable[Sequence[int]]) -> Iterator[dict[str, Any]]:
        for part in batches:
            yield {"prompt": [asked[i].prompt for i in part], "max_tokens": 1, "capture": captures}

    def record(runs: Sequence[Run], numbers: Sequence[int]) -> list[_Read]:
        fetched = lm.fetch(runs, sites)
        return [mean_rows(number, tensors) for number, tensors in zip(numbers, fetched, strict=True)]

    def mean_rows(number: int, tensors: dict[str, Any]) -> _Read:
        rows_LTD = [np.asarray(tensors[site], np.float64) for site in sites]
        if not len(rows_LTD[0]):
            raise TokensError(f"{captures[0].tokens} selects nothing of prompt {number}", "tokens")
        rows_LTD = [rows.reshape(len(rows), -1) for rows in rows_LTD]  # of heads too
        lengths = [np.linalg.norm(rows, axis=1).mean() for rows in rows_LTD]
        return _Read(Stored.of(np.stack([rows.mean(0) for rows in rows_LTD])), Stored.of(np.array(lengths)))

    read = recorded_runs(lm, journal, range(len(asked)), calls, record, _Read, advance, batch)
    return np.stack([of.mean.array() for of in read]), np.mean([of.lengths.array() for of in read], axis=0)
