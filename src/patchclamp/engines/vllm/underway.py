"""Requests that vLLM has under way: the parameters they go with, and whether their answers can stand."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from typing import Any, NamedTuple

from patchclamp.engines.base import Answer, Request
from patchclamp.engines.vllm.admission import Verdict
from patchclamp.engines.vllm.answers import Decode, PartialAnswer
from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.compat.core import Table
from patchclamp.errors import EngineError, PatchclampError, unpack


class Underway(NamedTuple):
    """A request that vLLM has.

    name: what vLLM calls it
    receipt: what must come back with its answer
    tables: log-probabilities that have come and were not read yet
    decode: makes the text of (ids, whether the last one stopped the run) when it is read; None where vLLM makes it
    """

    request: Request
    future: Future[Answer]
    answer: PartialAnswer
    name: str
    receipt: str
    tables: list[Table]
    decode: Decode | None

    def new_tables(self) -> list[Table]:
        new = self.tables.copy()
        self.tables.clear()
        return new


def judged(underway: Underway, verdict: Verdict | None) -> PatchclampError | None:
    """The error of an answer that cannot stand: its program failed, or no receipt says that it was carried out."""
    if underway.request.bound is None:
        return None
    if verdict is not None and verdict.error is not None:
        return unpack(verdict.error)
    if verdict is None or verdict.receipt != underway.receipt:
        return EngineError(
            f"run {underway.request.run} came back without the receipt of its program, so that nobody knows whether it "
            "was edited; its answer is thrown away"
        )
    return None


class Parameters:
    """Makes vLLM's `SamplingParams` of requests. Requests with the same settings get copies of one.

    vLLM makes text as tokens come only where somebody needs it then: for stop texts, and for a listener.
    """

    def __init__(self, has_text: bool) -> None:
        self._has_text = has_text
        self.settings: tuple[object, ...] = ()  # of the last request: the same object as long as they are the same
        self._template: Any = None  # its parameters

    def of(self, request: Request, carried: bytes | None) -> Any:
        """A request's parameters, with the program that it carries."""
        settings = (request.sampling, request.max_tokens, request.score, request.logprobs, request.listener is None)
        if settings != self.settings:
            self.settings, self._template = settings, self._make(request)
        params = copy.copy(self._template)
        if carried is not None:
            params.extra_args = {configuration.KEY: carried}
        return params

    def _make(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        arguments: dict[str, Any] = {"temperature": 0.0, **request.sampling}
        logprobs = request.logprobs
        if request.score:
            arguments["logprob_token_ids"] = list(dict.fromkeys(request.score))
            logprobs = len(arguments["logprob_token_ids"])
        return SamplingParams(
            max_tokens=request.max_tokens,
            logprobs=logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY if request.listener is None else RequestOutputKind.DELTA,
            skip_clone=True,  # it is this request's alone
            detokenize=self._has_text and (request.listener is not None or bool(request.sampling.get("stop"))),
            **arguments,
        )
