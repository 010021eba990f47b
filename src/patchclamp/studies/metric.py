"""Metrics of a run, their spread over prompt pairs, and divergences of next-token distributions.

A metric is one number, computed from the log-probabilities of an answer and a foil, each of one or several tokens.

    prob        p(answer)
    logprob     log p(answer)
    logit_diff  log p(answer) − log p(foil); for one token each, logit(answer) − logit(foil)
    recovered   (logit_diff − corrupt) / (clean − corrupt): 0 is the corrupt run, 1 the clean one

Use `Metric` to define your own.

For an answer of n tokens, log p is the sum of log p(answer[i] | prompt + answer[:i]) over n runs. The edits select
positions of the prompt, so they are the same in every run. A run grades all tokens requested after the same prefix.
Source: logit difference and its normalisation, Wang et al. 2022 (arXiv:2211.00593), section 3; probability, Meng et al.
2022 (arXiv:2202.05262), section 2; on the choice of metric, Zhang and Nanda 2023 (arXiv:2309.16042).

Divergences are in nats. KL takes the unedited run's distribution first. JS is symmetric and at most log 2.

    KL(p ‖ q) = Σ p log(p / q)            JS(p, q) = ½ KL(p ‖ m) + ½ KL(q ‖ m), where m = ½ (p + q)

Source: Kullback and Leibler 1951, equation 2.2; Lin 1991 ("Divergence measures based on the Shannon entropy"), equation
4.1 with equal weights.

N pairs · C cells
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from patchclamp.call import is_token_id
from patchclamp.engines.grading import Grades, kl
from patchclamp.errors import PatchclampError, ProgramError, TokensError, unknown
from patchclamp.language.structs import PublicStruct
from patchclamp.lm import LM, MAX_SCORES

Recorded = float | tuple[list[float], dict[int, float]]


METRICS = ("logit_diff", "recovered", "logprob", "prob")
ALONE = ("logprob", "prob")  # metrics of the answer without a foil


class Logprobs(PublicStruct, frozen=True):
    """The log-probabilities of one run, for a `Metric`.

    answer, foil: log-probabilities of answer and foil, each summed over its tokens; `foil` is NaN without a foil
    tokens: the metric's own tokens, by text and by id · top: the likeliest next tokens, by id, likeliest first
    """

    answer: float
    foil: float
    tokens: dict[str | int, float]
    top: dict[int, float]

    def __getitem__(self, token: str | int) -> float:
        if token not in self.tokens:
            raise unknown("token", str(token), map(str, self.tokens), "metric.tokens")
        return self.tokens[token]


class Metric(PublicStruct, frozen=True):
    """Your own metric, for `metric=` of the sweeps: a Python function of a run's log-probabilities. A plain function is
    short for `Metric(function)`.

        def entropy(logprobs):
            return -sum(math.exp(p) * p for p in logprobs.top.values())

        pc.studies.patch_sweep(lm, clean=..., corrupt=..., answer=" Paris", metric=pc.studies.Metric(entropy, top=50))

    function: called with a `Logprobs` for every run; returns a number
    tokens: tokens to grade besides answer and foil, as single-token texts or ids: `logprobs[" Berlin"]`
    top: the number of likeliest next tokens to report, at most 128. Each cell then takes one more run
    name: label in tables and figures; the function's name by default
    """

    function: Callable[[Logprobs], Any]
    tokens: tuple[str | int, ...] = ()
    top: int = 0
    name: str = ""

    @classmethod
    def of(cls, metric: Any, path: str) -> str | Metric:
        """Read a name, a function, or a `Metric`. Raises `ProgramError` for anything else."""
        if isinstance(metric, str):
            return metric
        metric = metric if isinstance(metric, cls) else cls(metric)
        if not callable(metric.function):
            raise ProgramError(f"expected the name of a metric or a function, got {metric.function!r:.100}", path)
        own = getattr(metric.function, "func", metric.function)  # unwraps a functools.partial
        name = metric.name or getattr(own, "__name__", type(own).__name__)
        if not isinstance(name, str) or name in METRICS:
            raise ProgramError(f"expected a name other than {', '.join(METRICS)}, got {name!r:.100}", f"{path}.name")
        tokens = metric.tokens if isinstance(metric.tokens, (list, tuple)) else (metric.tokens,)
        if not is_token_id(metric.top) or not 0 <= metric.top <= MAX_SCORES:
            raise ProgramError(f"expected a number from 0 to {MAX_SCORES}, got {metric.top!r}", f"{path}.top")
        return Metric(metric.function, tuple(tokens), metric.top, name)

    def value(self, logprobs: Logprobs) -> float:
        """Call the function. Raises `ProgramError` if it fails or does not return a finite number."""
        try:
            value = float(self.function(logprobs))
        except PatchclampError:
            raise
        except Exception as error:
            raise ProgramError(f"{self.name} raised {type(error).__name__}: {error}", "metric") from error
        if not math.isfinite(value):
            raise ProgramError(f"expected a finite number from {self.name}, got {value}", "metric")
        return value


class Graded(msgspec.Struct, frozen=True):
    """A metric and the exact tokens that it grades.

    custom: the user's metric · tokens: its own tokens, by text and by id
    """

    metric: str
    answer: tuple[int, ...]
    foil: tuple[int, ...] | None
    custom: Metric | None = None
    tokens: dict[str | int, int] = {}

    @property
    def key(self) -> dict[str, Any]:
        """Everything that determines the records, as plain data. A custom metric is computed from the records."""
        plain: dict[str, Any] = {"metric": self.metric, "answer": self.answer, "foil": self.foil}
        if self.custom is not None:
            # not "tokens", the name in journals whose records had another form
            plain |= {"metric": "custom", "scored": self._own, "top": self.custom.top}
        return plain

    @property
    def compared(self) -> tuple[tuple[int, ...], ...]:
        """The token sequences whose probabilities enter the metric."""
        return (self.answer,) if self.foil is None or self.metric in ALONE else (self.answer, self.foil)

    @property
    def scores(self) -> list[list[tuple[tuple[int, ...], int]]]:
        """The scores of a `GradeJob`: the sequences that the metric compares, then the custom metric's own tokens, in
        the order of their ids."""
        compared = [[(tokens[:i], token) for i, token in enumerate(tokens)] for tokens in self.compared]
        return compared + [[((), token)] for token in self._own]

    @property
    def _own(self) -> list[int]:
        return sorted({*self.tokens.values()})

    @property
    def runs(self) -> int:
        """The number of requests per program, when run as requests."""
        return len({suffix for score in self.scores for suffix, _ in score}) + (self.top > 0)

    @property
    def top(self) -> int:
        """The number of likeliest tokens that the metric needs."""
        return self.custom.top if self.custom is not None else 0

    def records(self, grades: Grades, programs: np.ndarray) -> list[Recorded]:
        """Return the records of `programs`, given by index in the job. Raises the error of the first failed program."""
        if grades.errors:
            raise grades.errors[min(grades.errors)]
        logprobs = grades.logprobs[programs].astype(np.float64)
        if self.custom is None:
            return self.of_logprobs(logprobs).tolist()
        pairs = zip(grades.top_ids[programs].tolist(), grades.top_logprobs[programs].tolist(), strict=True)
        tops = [dict(zip(ids, values, strict=True)) for ids, values in pairs]
        return list(zip(logprobs.tolist(), tops, strict=True))

    def of_logprobs(self, logprobs_NS: np.ndarray) -> np.ndarray:
        """Return a named metric before normalisation, given the log-probabilities of its `scores`."""
        if self.metric in ALONE:
            return np.exp(logprobs_NS[:, 0]) if self.metric == "prob" else logprobs_NS[:, 0]
        return logprobs_NS[:, 0] - logprobs_NS[:, 1]

    def value(self, recorded: Recorded) -> float:
        """Return a record's metric before normalisation."""
        if not isinstance(recorded, tuple):
            return recorded
        assert self.custom is not None
        logprobs, top = recorded
        own = dict(zip(self._own, logprobs[len(self.compared) :], strict=True))
        foil = logprobs[1] if len(self.compared) > 1 else math.nan
        tokens = {name: own[token] for name, token in self.tokens.items()}
        return self.custom.value(Logprobs(logprobs[0], foil, tokens, top))

    def scale(self, clean: float, corrupt: float) -> tuple[float, float]:
        """Return (offset, factor) that normalise a metric: (value − offset) · factor."""
        if self.metric != "recovered":
            return 0.0, 1.0
        if clean == corrupt:
            raise ProgramError("recovered is undefined: the clean and corrupt prompts have the same logit difference")
        return corrupt, 1.0 / (clean - corrupt)


def grade(
    metric: str | Metric, answer: Sequence[int], foil: Sequence[int] | None, tokens: Mapping[str | int, int] = {}
) -> Graded:
    """Combine a metric with its tokens, and check them. `tokens`: a custom metric's tokens, by text and by id."""
    if isinstance(metric, Metric):
        return Graded(metric.name, tuple(answer), None if foil is None else tuple(foil), metric, dict(tokens))
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS, "metric")
    if metric not in ALONE and foil is None:
        raise ProgramError(f"{metric} requires a foil: pass foil=, or use metric='logprob'", "foil")
    if metric in ALONE and foil is not None:
        raise ProgramError(f"{metric} scores only the answer: omit foil=, or use metric='logit_diff'", "foil")
    if foil is not None and tuple(answer) == tuple(foil):
        raise ProgramError("answer and foil are identical", "foil")
    return Graded(metric, tuple(answer), None if foil is None else tuple(foil))


def answer_tokens(lm: LM, answer: Any, path: str) -> tuple[int, ...]:
    """Return the token ids of an answer, given as text, one id, or several.

    Raises: `TokensError` for text without tokens, or text of several tokens that a leading space would make one token;
    `ProgramError` for any other type.
    """
    several = answer if isinstance(answer, (list, tuple)) else [answer]
    if several and all(is_token_id(token) for token in several):
        for token in several:
            if not 0 <= token < lm.model.d_vocab:
                raise TokensError(f"token id {token} is out of range for a vocabulary of {lm.model.d_vocab}", path)
        return tuple(int(token) for token in several)
    if not isinstance(answer, str):
        raise ProgramError(f"expected text or token ids, got {type(answer).__name__} {answer!r}", path)
    ids = bare_ids(lm, answer, path)
    if not ids:
        raise TokensError(f"{answer!r} has no tokens", path)
    if len(ids) > 1 and not answer.startswith(" ") and len(lm.tokenizer.bare(" " + answer)) == 1:
        raise TokensError(
            f"{answer!r} is {len(ids)} tokens ({lm.tokenizer.token_strings(ids)}); did you mean {' ' + answer!r}, a "
            "single token? If not, pass token ids",
            path,
        )
    return tuple(ids)


def bare_ids(lm: LM, text: str, path: str) -> list[int]:
    """Return the token ids of a text without special tokens. Raises `ProgramError` for an unpaired surrogate."""
    try:
        return lm.tokenizer.bare(text)
    except (TypeError, ValueError) as error:
        raise ProgramError(f"cannot tokenise this text: {error}", path) from None


def single_token(lm: LM, answer: Any, path: str) -> int:
    """Return the token id of a one-token answer. Raises as `answer_tokens` does, and for several tokens."""
    ids = answer_tokens(lm, answer, path)
    if len(ids) != 1:
        tokens = lm.tokenizer.token_strings(list(ids))
        raise TokensError(f"expected a single token, got {len(ids)} tokens in {answer!r} ({tokens})", path)
    return ids[0]


def text_of(lm: LM, tokens: Sequence[int]) -> str:
    """Return an answer as text."""
    return "".join(lm.tokenizer.token_strings(list(tokens)))


LEVEL = 0.95
BOOTSTRAPS, FLIPS = 2_000, 10_000
EXACT = 13  # largest number of pairs for which all sign combinations are tried: 2 ** 13 is below FLIPS
_AT_ONCE = 1 << 22  # entries of one matrix


class Spread(NamedTuple):
    """For each cell [C]: the ends of the 95 % intervals of its mean and of its mean effect, and the effect's p-values,
    uncorrected and corrected for testing all cells."""

    low: np.ndarray
    high: np.ndarray
    effect_low: np.ndarray
    effect_high: np.ndarray
    p: np.ndarray
    p_family: np.ndarray


def spread(values_NC: np.ndarray, base_N: np.ndarray, seed: int) -> Spread:
    """Return intervals and p-values of the mean over pairs.

    values_NC: each pair's values · base_N: each pair's unpatched metric, the baseline of its effects
    Both intervals are the percentile bootstrap over pairs, from the same draws. An effect is a pair's value minus that
    pair's base, so the spread of the bases does not widen its interval. The test flips the signs of pairs' effects,
    because under the null hypothesis an effect and its opposite are equally likely. `p_family` compares with the
    largest statistic of all cells, which controls the family-wise error rate.

    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, 13.3; sign flips with the largest statistic,
    Nichols and Holmes 2002 (Human Brain Mapping 15), and Westfall and Young 1993.
    """
    effects_NC = values_NC - base_N[:, None]
    intervals = [_interval(of, np.random.default_rng((seed, 0))) for of in (values_NC, effects_NC)]
    return Spread(*intervals[0], *intervals[1], *_p_values(effects_NC, np.random.default_rng((seed, 1))))


def _interval(values_NC: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    pairs, cells = values_NC.shape
    weights_BN = draw.multinomial(pairs, np.full(pairs, 1 / pairs), BOOTSTRAPS) / pairs
    low, high = np.empty(cells), np.empty(cells)
    step = max(_AT_ONCE // BOOTSTRAPS, 1)
    for begin in range(0, cells, step):
        means_BC = weights_BN @ values_NC[:, begin : begin + step]
        tails = np.quantile(means_BC, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        low[begin : begin + step], high[begin : begin + step] = tails
    return low, high


def _p_values(effects_NC: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return (p, p_family): fractions of sign flips, including none, whose statistic is at least the observed one."""
    size = np.sqrt((effects_NC**2).sum(0))
    unit_NC = np.divide(effects_NC, size, out=np.zeros_like(effects_NC), where=size > 0)
    observed = np.abs(unit_NC.sum(0)) - 1e-12  # sums of equal terms in another order
    pairs = len(effects_NC)
    drawn = int(pairs > EXACT)  # otherwise all combinations of signs are tried
    signs_FN = (draw.choice((-1.0, 1.0), (FLIPS, pairs)) if drawn
                else 1.0 - 2.0 * ((np.arange(2**pairs)[:, None] >> np.arange(pairs)) & 1))  # fmt: skip
    more, more_family = np.zeros(len(observed)), np.zeros(len(observed))
    step = max(_AT_ONCE // max(len(observed), 1), 1)
    for begin in range(0, len(signs_FN), step):
        flipped_FC = np.abs(signs_FN[begin : begin + step] @ unit_NC)
        more += (flipped_FC >= observed).sum(0)
        largest = np.sort(flipped_FC.max(1, initial=0))
        more_family += len(largest) - np.searchsorted(largest, observed)
    total = len(signs_FN) + drawn
    return (more + drawn) / total, (more_family + drawn) / total


def js(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """Return JS(p, q) of two distributions, given as log-probabilities [V]."""
    log_m = np.logaddexp(log_p, log_q) - np.log(2.0)
    return 0.5 * (kl(log_p, log_m) + kl(log_q, log_m))


def with_rest(logprobs: Sequence[float]) -> np.ndarray:
    """Append the combined log-probability of all other tokens, for a distribution over n + 1 outcomes.

    Divergences of two such distributions are lower bounds of the full ones (data processing inequality).
    """
    some = np.asarray(logprobs, np.float64)
    rest = max(1.0 - float(np.exp(some).sum()), np.finfo(np.float64).tiny)
    return np.append(some, np.log(rest))
