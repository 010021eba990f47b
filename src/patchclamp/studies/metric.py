"""Metrics of a run: one number from the log-probabilities of an answer, of one token or of several, and of a foil.

    prob        p(answer)
    logprob     log p(answer)
    logit_diff  log p(answer) − log p(foil); of one token each, logit(answer) − logit(foil)
    recovered   (logit_diff − corrupt) / (clean − corrupt): 0 is the corrupt run, 1 the clean one

log p of an answer of n tokens is the sum of log p(answer[i] | prompt + answer[:i]): n runs, whose edits name the
prompt's positions and so act alike in each. A run grades every token that is asked of its prompt.

Source: logit difference and its normalisation, Wang et al. 2022 (arXiv:2211.00593), section 3; probability, Meng et al.
2022 (arXiv:2202.05262), section 2; on the choice of metric, Zhang and Nanda 2023 (arXiv:2309.16042).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from patchclamp.call import is_token_id
from patchclamp.errors import ProgramError, TokensError, unknown
from patchclamp.lm import LM

METRICS = ("logit_diff", "recovered", "logprob", "prob")
ALONE = ("logprob", "prob")  # those that grade the answer without a foil


class Question(NamedTuple):
    """One run that grades a part of an answer: what follows the prompt, and the tokens to score after it."""

    suffix: tuple[int, ...]
    score: tuple[int, ...]


class Graded(msgspec.Struct, frozen=True, dict=True):
    """What is graded: the metric's name and the exact tokens."""

    metric: str
    answer: tuple[int, ...]
    foil: tuple[int, ...] | None

    @property
    def compared(self) -> tuple[tuple[int, ...], ...]:
        """The token sequences whose probability counts."""
        return (self.answer,) if self.foil is None or self.metric in ALONE else (self.answer, self.foil)

    @property
    def questions(self) -> tuple[Question, ...]:
        """The runs that grade it, by their suffixes."""
        if "questions" not in vars(self):
            score: dict[tuple[int, ...], dict[int, None]] = {}
            for tokens in self.compared:
                for i, token in enumerate(tokens):
                    score.setdefault(tokens[:i], {})[token] = None
            vars(self)["questions"] = tuple(Question(suffix, tuple(ids)) for suffix, ids in score.items())
        return vars(self)["questions"]

    def read(self, scores: Sequence[Mapping[int, float]]) -> float:
        """The metric before normalisation, from the scores of the run of each question."""
        by_suffix = {question.suffix: of for question, of in zip(self.questions, scores, strict=True)}
        logprobs = [sum(by_suffix[tokens[:i]][token] for i, token in enumerate(tokens)) for tokens in self.compared]
        if self.metric in ALONE:
            return math.exp(logprobs[0]) if self.metric == "prob" else logprobs[0]
        return logprobs[0] - logprobs[1]

    def scale(self, clean: float, corrupt: float) -> tuple[float, float]:
        """(offset, factor) such that the metric is (value − offset) · factor."""
        if self.metric != "recovered":
            return 0.0, 1.0
        if clean == corrupt:
            raise ProgramError("clean and corrupt prompt give the same logit difference: there is nothing to recover")
        return corrupt, 1.0 / (clean - corrupt)


def grade(metric: str, answer: Sequence[int], foil: Sequence[int] | None) -> Graded:
    """Checks a metric against what is given for it."""
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS, "metric")
    if metric not in ALONE and foil is None:
        raise ProgramError(f"{metric} compares the answer with a foil; give foil=, or use metric='logprob'", "foil")
    if foil is not None and tuple(answer) == tuple(foil):
        raise ProgramError("answer and foil are the same tokens", "foil")
    return Graded(metric, tuple(answer), None if foil is None else tuple(foil))


def answer_tokens(lm: LM, answer: Any, path: str) -> tuple[int, ...]:
    """The token ids of an answer: of a text, of one id, or of several.

    Raises: `TokensError` for a text that has no tokens, or that is several where it would be one with a space before
    it; `ProgramError` for what is none of these.
    """
    several = answer if isinstance(answer, (list, tuple)) else [answer]
    if several and all(is_token_id(token) for token in several):
        for token in several:
            if not 0 <= token < lm.model.d_vocab:
                raise TokensError(f"token id {token} is outside the vocabulary of {lm.model.d_vocab}", path)
        return tuple(int(token) for token in several)
    if not isinstance(answer, str):
        raise ProgramError(f"a text or token ids are needed, not {type(answer).__name__} {answer!r}", path)
    ids = bare_ids(lm, answer, path)
    if not ids:
        raise TokensError(f"{answer!r} has no tokens", path)
    if len(ids) > 1 and not answer.startswith(" ") and len(lm.tokenizer.bare(" " + answer)) == 1:
        raise TokensError(
            f"{answer!r} is {len(ids)} tokens ({lm.tokenizer.token_strings(ids)}), and {' ' + answer!r} is one; did "
            "you mean that? If not, give the token ids",
            path,
        )
    return tuple(ids)


def bare_ids(lm: LM, text: str, path: str) -> list[int]:
    """The token ids of a text without special tokens. Raises `ProgramError` for half a surrogate pair."""
    try:
        return lm.tokenizer.bare(text)
    except (TypeError, ValueError) as error:
        raise ProgramError(f"this text cannot be tokenised: {error}", path) from None


def single_token(lm: LM, answer: Any, path: str) -> int:
    """The token id of an answer that must be one token. Raises as `answer_tokens`, and `TokensError` for several."""
    ids = answer_tokens(lm, answer, path)
    if len(ids) != 1:
        tokens = lm.tokenizer.token_strings(list(ids))
        raise TokensError(f"{answer!r} is {len(ids)} tokens ({tokens}); an answer or foil is one token here", path)
    return ids[0]


def text_of(lm: LM, tokens: Sequence[int] | None) -> str | None:
    """An answer for people."""
    return None if tokens is None else "".join(lm.tokenizer.token_strings(list(tokens)))
