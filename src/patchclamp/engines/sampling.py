"""Sampling for engines that have none of their own: some of vLLM's parameters, by vLLM's names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from patchclamp.engines.base import check_sampling

UNSEEDED = -1  # the seed that stands for no seed, as in vLLM
MIN_TEMPERATURE = 0.01  # a lower one above 0 counts as this, as in vLLM
NAMES = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos")


class Sampler:
    """Greedy unless a temperature says otherwise; ends at an end-of-sequence token, a stop token or a stop text."""

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
        """What tokens are drawn by."""
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
        """Raises for a name this engine does not have, or a value out of range."""
        check_sampling(sampling, NAMES, "Transformers")

    def pick(self, logits_V: torch.Tensor) -> int:
        """The next token."""
        if self.is_greedy:
            return int(logits_V.argmax())
        return int(torch.multinomial(self.probabilities(logits_V), 1, generator=self.generator))

    def probabilities(self, logits_V: torch.Tensor) -> torch.Tensor:
        """The probabilities [V] to draw a token by: min_p, top_k and top_p act one after the other, as in vLLM."""
        probs_V = (logits_V.cpu().float() / self.temperature).softmax(-1)
        probs_V = probs_V * (probs_V >= self.min_p * probs_V.max())
        if 0 < self.top_k < len(probs_V):
            probs_V = probs_V * (probs_V >= probs_V.topk(self.top_k).values[-1])
        ranked, order = (probs_V / probs_V.sum()).sort(descending=True)
        keep = ranked.cumsum(-1) - ranked < self.top_p
        return torch.zeros_like(probs_V).scatter_(0, order, ranked * keep)

    def finish(self, ids: list[int], max_tokens: int, text: Callable[[], str]) -> str | None:
        """Why a request with these generated tokens ends now; None if it goes on. `text` decodes them."""
        if ids[-1] in self.ends or (self.stop and any(word in text() for word in self.stop)):
            return "stop"
        return "length" if len(ids) >= max_tokens else None

    def safe(self, text: str) -> str:
        """The text without an end that may be the beginning of a stop text."""
        held_back = (n for word in self.stop for n in range(1, len(word)) if text.endswith(word[:n]))
        return text[: len(text) - max(held_back, default=0)]

    def cut(self, text: str) -> str:
        """The text before the first stop text."""
        return text[: min((text.index(word) for word in self.stop if word in text), default=len(text))]
