"""What vLLM's outputs come to: parts as they are made, and the answer that they make up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patchclamp.engines.base import Answer, Drafts, Part, Request
from patchclamp.engines.vllm.compat.core import Table, draft_counts

Decode = Callable[[list[int], bool], str]


class PartialAnswer:
    """What a request has answered so far; each of vLLM's outputs has what is new in it, which is everything where
    nobody listens. Its text is vLLM's own, which keeps back what may become a stop text."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []
        self._scores: dict[int, float] = {}

    def take(self, output: Any, tables: list[Table]) -> None:
        """Adds an output, with the log-probabilities that came since the last one, and gives it to the listener."""
        new = output.outputs[0]
        ids = list(new.token_ids)
        logprobs = [float(number) for _, numbers in tables for number in numbers[:, 0]] if self._has_logprobs else []
        part = Part(new.text, ids, logprobs[: len(ids)])
        if tables and self._request.score and not self._ids:
            first = dict(zip(tables[0][0][0].tolist(), tables[0][1][0].tolist(), strict=True))
            self._scores = {token: first[token] for token in self._request.score}
        if self._request.logprobs:
            last = 1 + self._request.logprobs
            for tokens, numbers in tables:
                likeliest = zip(tokens[:, 1:last].tolist(), numbers[:, 1:last].tolist(), strict=True)
                self._top_logprobs += [dict(zip(*row, strict=True)) for row in likeliest]
        self._texts.append(part.text)
        self._ids += part.token_ids
        self._logprobs += part.logprobs
        if self._request.listener is not None and (part.text or part.token_ids):
            self._request.listener(part)

    @property
    def _has_logprobs(self) -> bool:
        return self._request.logprobs is not None

    def answer(self, output: Any, decode: Decode | None) -> Answer:
        """The answer, after the last output was taken. `decode(ids, stopped)` gives its text, if it has none yet."""
        ids, logprobs = self._ids, self._logprobs if self._has_logprobs else None
        reason, cached = output.outputs[0].finish_reason, output.num_cached_tokens or 0
        text = "".join(self._texts) if decode is None else functools.partial(decode, ids, reason == "stop")
        top_logprobs, drafts = self._top_logprobs[: len(ids)], drafts_of(output.outputs[0])
        return Answer(ids, text, logprobs, self._scores, reason, cached, top_logprobs, drafts=drafts)


def drafts_of(completion: Any) -> Drafts | None:
    """What vLLM counted of a completion's drafted tokens, where it was asked to."""
    counts = draft_counts(completion)
    return None if counts is None else Drafts(*counts)
