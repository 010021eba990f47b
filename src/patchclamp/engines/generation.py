"""A batch of the Transformers engine while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from patchclamp.engines.base import Answer, Request, Tokenizer
from patchclamp.engines.passes import Passes
from patchclamp.engines.writer import Asked, Writer
from patchclamp.errors import RunError
from patchclamp.plan.cuts import Cut


class Generation:
    """Requests that are computed together, of which some may have failed before.

    errors: of each request, if it failed before its first step
    computed_from: the cut that its first step begins at; None: everything is computed
    asked: what is read of the last step's logits
    has_failed: whether something failed that ended all of them
    """

    def __init__(
        self, requests: Sequence[Request], futures: Sequence[Future[Answer]], errors: Sequence[Exception | None]
    ) -> None:
        self.requests, self.futures, self.errors = requests, futures, list(errors)
        self.writers: list[Writer] = []
        self.computed_from: Cut | None = None
        self.passes: Passes | None = None
        self.asked: Asked | None = None
        self.has_failed = False

    @property
    def ready(self) -> list[int]:
        """The requests that have not failed, by their numbers."""
        return [i for i, error in enumerate(self.errors) if error is None]

    def start(self, tokenizer: Tokenizer, eos: set[int]) -> list[Request]:
        """Makes the writers of the requests that are ready; returns these."""
        requests = [self.requests[i] for i in self.ready]
        self.writers = [Writer(request, tokenizer, eos) for request in requests]
        return requests

    @property
    def may_wait(self) -> bool:
        """Whether one step is all, which the device still computes, and all that is read of it was asked for when it
        began."""
        return self.asked is not None and not self.asked.has_arrived and all(
            writer.sampler.is_greedy and writer.request.max_tokens == 1 and not writer.request.logprobs
            and writer.request.listener is None for writer in self.writers
        )  # fmt: skip

    def forget_cache(self) -> None:
        """No step follows; the next batch may have the memory of its keys and values."""
        if self.passes is not None:
            self.passes.cache = None

    def fail(self, error: Exception) -> None:
        """Ends all requests that are ready with an error."""
        self.has_failed = True
        for i in self.ready:
            self.errors[i] = error

    def answers(self) -> list[Answer | Exception]:
        """Of every request its answer or error."""
        answers = iter([writer.answer(self.computed_from) for writer in self.writers])
        return [error or next(answers, RunError("not run")) for error in self.errors]
