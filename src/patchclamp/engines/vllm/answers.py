"""What vLLM's outputs come to: parts as they are made, and the answer that they make up."""

from __future__ import annotations

from typing import Any

from patchclamp.engines.base import Answer, Part, Request


class PartialAnswer:
    """What a request has answered so far; each of vLLM's outputs has what is new in it, which is everything where
    nobody listens. Its text is vLLM's own, which keeps back what may become a stop text."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._scores: dict[int, float] = {}

    def take(self, output: Any) -> None:
        """Adds an output, and tells it to who listens."""
        new = output.outputs[0]
        ids = list(new.token_ids)
        tables = (new.logprobs or []) if ids else []  # 0.26 repeats all of them beside no token
        part = Part(new.text, ids, [float(table[token].logprob) for table, token in zip(tables, ids, strict=True)])
        if ids and not self._ids:
            self._scores = {token: float(tables[0][token].logprob) for token in self._request.score}
        self._texts.append(part.text)
        self._ids += part.token_ids
        self._logprobs += part.logprobs
        if self._request.listener is not None and (part.text or part.token_ids):
            self._request.listener(part)

    def answer(self, output: Any) -> Answer:
        """Of the last output, which was taken."""
        reason, cached = output.outputs[0].finish_reason, output.num_cached_tokens or 0
        return Answer(self._ids, "".join(self._texts), self._logprobs, self._scores, reason, cached)
