"""Sampling for the Transformers engine: from a step's logits to tokens, log-probabilities and text.

Supports some of vLLM's sampling parameters, under vLLM's names.

B requests of the batch · V vocabulary
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from patchclamp.engines.base import Answer, Part, Request, Tokenizer, check_sampling
from patchclamp.engines.tokenizer import complete_text
from patchclamp.errors import PatchclampError, RunError
from patchclamp.kernels.transfer import Arriving, to_device
from patchclamp.plan.cuts import Cut

UNSEEDED = -1  # means no seed, as in vLLM
MIN_TEMPERATURE = 0.01  # lower temperatures above 0 are raised to this, as in vLLM
NAMES = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos")


class Sampler:
    """Picks tokens, greedily unless a temperature is set; stops at an EOS token, stop token or stop text."""

    def __init__(self, sampling: dict[str, Any], eos: set[int]) -> None:
        temperature = float(sampling.get("temperature", 0.0))
        self.temperature = max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0
        self.top_k = int(sampling.get("top_k") or 0)
        self.top_p = float(sampling.get("top_p", 1.0))
        self.min_p = float(sampling.get("min_p", 0.0))
        stop = sampling.get("stop") or []
        self.stop: list[str] = [stop] if isinstance(stop, str) else list(stop)
        self.ends = set(sampling.get("stop_token_ids") or ()) | (set() if sampling.get("ignore_eos") else eos)
        self._seed = sampling.get("seed")

    @functools.cached_property
    def generator(self) -> torch.Generator:
        """The random generator of this request."""
        generator = torch.Generator()
        if self._seed in (None, UNSEEDED):
            generator.seed()
        else:
            generator.manual_seed(int(self._seed))
        return generator

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @staticmethod
    def check(sampling: dict[str, Any]) -> None:
        """Raise `UnknownName` for an unsupported parameter, `ProgramError` for an invalid value."""
        check_sampling(sampling, NAMES, "Transformers")

    def pick(self, logits_V: torch.Tensor) -> int:
        """Choose the next token."""
        if self.is_greedy:
            return int(logits_V.argmax())
        return int(torch.multinomial(self.probabilities(logits_V), 1, generator=self.generator))

    def probabilities(self, logits_V: torch.Tensor) -> torch.Tensor:
        """Return the probabilities [V] to sample from; min_p, top_k and top_p apply in this order, as in vLLM."""
        probs_V = (logits_V.cpu().float() / self.temperature).softmax(-1)
        probs_V = probs_V * (probs_V >= self.min_p * probs_V.max())
        if 0 < self.top_k < len(probs_V):
            probs_V = probs_V * (probs_V >= probs_V.topk(self.top_k).values[-1])
        ranked, order = (probs_V / probs_V.sum()).sort(descending=True)
        keep = ranked.cumsum(-1) - ranked < self.top_p
        return torch.zeros_like(probs_V).scatter_(0, order, ranked * keep)

    def finish(self, ids: list[int], max_tokens: int, text: Callable[[], str]) -> str | None:
        """Return the finish reason after these generated tokens; None to continue. `text` decodes them."""
        if ids[-1] in self.ends or (self.stop and any(word in text() for word in self.stop)):
            return "stop"
        return "length" if len(ids) >= max_tokens else None

    def safe(self, text: str) -> str:
        """Return the text without a suffix that may be the beginning of a stop text."""
        held_back = (n for word in self.stop for n in range(1, len(word)) if text.endswith(word[:n]))
        return text[: len(text) - max(held_back, default=0)]

    def cut(self, text: str) -> str:
        """Return the text before the first stop text."""
        return text[: min((text.index(word) for word in self.stop if word in text), default=len(text))]


class Writer:
    """Collects one request's tokens, passes new ones to its listener, and decides when it is done."""

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
        self._sent = ""  # text already passed to the listener

    @property
    def done(self) -> bool:
        return self.reason is not None or self.error is not None

    def fail(self, error: PatchclampError) -> None:
        self.error = error

    @property
    def scored(self) -> Sequence[int]:
        """The token ids to grade in this step."""
        return () if self.ids else self.request.score

    @property
    def wants_logprobs(self) -> bool:
        return self.request.logprobs is not None or bool(self.scored)

    def take(self, token: int, values: Sequence[float], logprobs_V: torch.Tensor | None) -> None:
        """Append the next token. `values`: its log-probability and those of `scored`; `logprobs_V`: all of them. Both
        are empty or None if not requested."""
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
        """Return the text that no later token changes and that was not yet passed to the listener."""
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
    """The values read from a step's fp32 logits [B, V] for unfinished requests, copied to the host asynchronously."""

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
        """Append the next token to every request that is not done by now."""
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
        """True if the step has been computed."""
        return self._last.has_arrived

    def wait(self) -> None:
        """Block until the step has been computed."""
        self._last.result()
