"""Metrics of a patched run: one number from the next token's log-probabilities.

    logprob      log p(answer)
    logit_diff   logit(answer) − logit(foil), which is log p(answer) − log p(foil)
    recovered    (logit_diff − corrupt) / (clean − corrupt): 0 is the corrupt run, 1 the clean one

Source: logit difference and its normalisation, Wang et al. 2022 (arXiv:2211.00593), section 3; on the choice of metric,
Zhang and Nanda 2023 (arXiv:2309.16042).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from patchclamp.call import is_token_id
from patchclamp.errors import ProgramError, TokensError, unknown
from patchclamp.lm import LM

METRICS = ("logprob", "logit_diff", "recovered")


class Graded(msgspec.Struct, frozen=True):
    """What is graded: the metric's name and the exact tokens."""

    metric: str
    answer: int
    foil: int | None

    @property
    def score(self) -> tuple[int, ...]:
        """The token ids that a run must score."""
        return (self.answer,) if self.foil is None else (self.answer, self.foil)

    def read(self, scores: Mapping[int, float]) -> float:
        """The metric before normalisation."""
        if self.foil is None or self.metric == "logprob":
            return scores[self.answer]
        return scores[self.answer] - scores[self.foil]

    def scale(self, clean: float, corrupt: float) -> tuple[float, float]:
        """(offset, factor) such that the metric is (value − offset) · factor."""
        if self.metric != "recovered":
            return 0.0, 1.0
        if clean == corrupt:
            raise ProgramError("clean and corrupt prompt give the same logit difference: there is nothing to recover")
        return corrupt, 1.0 / (clean - corrupt)


def grade(metric: str, answer: int, foil: int | None) -> Graded:
    """Checks a metric against what is given for it."""
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS, "metric")
    if metric != "logprob" and foil is None:
        raise ProgramError(f"{metric} compares the answer with a foil; give foil=, or use metric='logprob'", "foil")
    if answer == foil:
        raise ProgramError("answer and foil are the same token", "foil")
    return Graded(metric, answer, foil)


def single_token(lm: LM, text: str | int, path: str) -> int:
    """The token id of a text that is one token; an id is returned as it is.

    Raises: `TokensError` naming the tokens of a text that is several, `ProgramError` for what is neither.
    """
    if is_token_id(text):
        return int(text)
    if not isinstance(text, str):
        raise ProgramError(f"a text or a token id is needed, not {type(text).__name__} {text!r}", path)
    ids = lm.tokenizer.bare(text)
    if len(ids) != 1:
        tokens = lm.tokenizer.token_strings(ids)
        hint = (
            f"; did you mean {' ' + text!r}?"
            if not text.startswith(" ") and len(lm.tokenizer.bare(" " + text)) == 1
            else ""
        )
        raise TokensError(f"{text!r} is {len(ids)} tokens ({tokens}); an answer or foil is one token{hint}", path)
    return ids[0]
