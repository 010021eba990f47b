"""What becomes of a step's logits in an engine that samples by itself: tokens, log-probabilities and text.

B requests of the batch · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from patchclamp.engines.base import Answer, Part, Request, Tokenizer
from patchclamp.engines.sampling import Sampler
from patchclamp.engines.tokenizer import complete_text
from patchclamp.errors import PatchclampError, RunError
from patchclamp.kernels.transfer import Arriving, to_device
from patchclamp.plan.cuts import Cut


class Writer:
    """Collects one request's tokens, gives its listener the new ones, and decides when it is done."""

    def __init__(self, request: Request, tokenizer: Tokenizer, eos: set[int]) -> None:
        self.request, self.tokenizer = request, tokenizer
        self.sampler = Sampler(request.sampling, eos)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.scores: dict[int, float] = {}
        self.reason: str | None = None
        self.error: PatchclampError | None = None
        self.last = 0
        self._sent = ""  # text that the listener has

    @property
    def done(self) -> bool:
        return self.reason is not None or self.error is not None

    def fail(self, error: PatchclampError) -> None:
        self.error = error

    @property
    def scored(self) -> Sequence[int]:
        """The tokens whose log-probabilities are asked for in this step."""
        return () if self.ids else self.request.score

    @property
    def wants_logprobs(self) -> bool:
        return self.request.logprobs is not None or bool(self.scored)

    def take(self, token: int, values: Sequence[float], logprobs_V: torch.Tensor | None) -> None:
        """The next token. `values`: its log-probability, and those of `scored`; `logprobs_V`: all of them. Neither is
        there in a step of which nobody wants any."""
        if self.scored:
            self.scores = dict(zip(self.scored, values[1:], strict=False))
        self.last = token
        self.ids.append(token)
        if self.request.logprobs is not None:
            self.logprobs.append(values[0])
        if self.request.logprobs:
            assert logprobs_V is not None
            top = logprobs_V.topk(self.request.logprobs)
            self.top_logprobs.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        self.reason = self.sampler.finish(self.ids, self.request.max_tokens, self._text)
        if self.request.listener is not None:
            self.request.listener(Part(self._new_text(), [self.last], self.logprobs[-1:]))

    def _new_text(self) -> str:
        """The text that no later token changes and that the listener does not have yet."""
        text = self._final() if self.done else self.sampler.safe(self.tokenizer.settled(self.ids))
        if not text.startswith(self._sent):
            if self.done:
                self.fail(RunError(f"the tokenizer took back text that was given already: {text!r} is no longer "
                                   f"{self._sent!r} and more; run this prompt without streaming"))  # fmt: skip
            return ""
        sent, self._sent = self._sent, text
        return text[len(sent) :]

    def _text(self) -> str:
        return complete_text(self.tokenizer.decode, self.ids)

    def _final(self) -> str:
        return self.sampler.cut(self._text())

    def answer(self, computed_from: Cut | None) -> Answer | PatchclampError:
        if self.error is not None:
            return self.error
        logprobs = None if self.request.logprobs is None else self.logprobs
        return Answer(
            self.ids, self._final, logprobs, self.scores, self.reason, 0, self.top_logprobs, computed_from
        )  # fmt: skip


class Asked:
    """What is read of a step's logits [B, V], float32, for all requests that are not done. It is on its way to host
    memory."""

    def __init__(self, writers: Sequence[Writer], logits_BV: torch.Tensor) -> None:
        self._rows = [(b, writer) for b, writer in enumerate(writers) if not writer.done]
        device = logits_BV.device
        token_B = logits_BV.argmax(-1)
        picked = {b: writer.sampler.pick(logits_BV[b]) for b, writer in self._rows if not writer.sampler.is_greedy}
        if picked:
            token_B[to_device(np.array(list(picked)), device)] = to_device(np.array(list(picked.values())), device)
        self._tokens, self._values = Arriving(token_B), None
        self._logprobs_BV: torch.Tensor | None = None
        if any(writer.wants_logprobs for _, writer in self._rows):
            logprobs_BV = logits_BV.log_softmax(-1)
            self._logprobs_BV = logprobs_BV if any(writer.request.logprobs for _, writer in self._rows) else None
            scored = {b: writer.scored for b, writer in self._rows}
            columns = np.zeros((len(writers), max(map(len, scored.values()))), np.int64)
            for b, ids in scored.items():
                columns[b, : len(ids)] = list(ids)
            columns_BK = torch.cat((token_B[:, None], to_device(columns, device)), 1)
            self._values = Arriving(logprobs_BV.gather(1, columns_BK))

    def take(self) -> None:
        """Gives every request that is not done by now its next token."""
        tokens = self._tokens.result().tolist()
        values = None if self._values is None else self._values.result().tolist()
        for b, writer in self._rows:
            if not writer.done:
                logprobs_V = None if self._logprobs_BV is None else self._logprobs_BV[b]
                writer.take(tokens[b], [] if values is None else values[b], logprobs_V)

    @property
    def _last(self) -> Arriving:
        return self._tokens if self._values is None else self._values

    @property
    def has_arrived(self) -> bool:
        """Whether the step has been computed."""
        return self._last.has_arrived

    def wait(self) -> None:
        """Returns when the step has been computed."""
        self._last.result()
