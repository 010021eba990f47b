"""Batches of the Transformers engine (`Generation`) and their forward passes (`Passes`): the padded prompts, then one
token each.

B prompts of the batch · T longest prompt · V vocabulary
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from patchclamp.engines.base import Answer, Request, Tokenizer
from patchclamp.engines.sampling import Asked, Writer
from patchclamp.errors import RunError
from patchclamp.kernels.transfer import to_device
from patchclamp.plan import Batch
from patchclamp.plan.cuts import Cut


class Passes:
    """The padded inputs of the current pass: the prompts first, then one token each."""

    def __init__(self, prompts: Sequence[Sequence[int]], pads_left: bool, device: str) -> None:
        length = np.array([len(prompt) for prompt in prompts])
        widest = int(length.max())
        self.start = widest - length if pads_left else np.zeros(len(prompts), np.int64)
        ids, mask, positions = np.zeros((3, len(prompts), widest), np.int64)
        for b, prompt in enumerate(prompts):
            row = slice(self.start[b], self.start[b] + len(prompt))
            ids[b, row], mask[b, row], positions[b, row] = prompt, 1, np.arange(len(prompt))
        self.ids_BT, self.mask_BT, self.positions_BT = to_device(np.stack((ids, mask, positions)), device)
        self.cache: Any = None
        last = self.start + length - 1
        self.keep = int(widest - last.min())
        self.last_row = to_device(last - (widest - self.keep), device)
        self._first, self._count = np.zeros(len(prompts), np.int64), length

    def batch(self, slots: np.ndarray) -> Batch:
        widest = self.ids_BT.shape[1]
        row = np.arange(len(slots)) * widest + self.start
        return Batch(slots, row, self._first, self._count, len(slots) * widest)

    def run(self, net: Any) -> torch.Tensor:
        """Run the model on the current inputs; return the logits to sample from, [B, V]."""
        name = cache_name(type(net))
        # with states cached, a model without keys takes one token and no mask: the first Mamba would repeat the token
        # along a longer mask
        has_states = name == "cache_params" and self.cache is not None
        out = net(
            input_ids=self.ids_BT, attention_mask=None if has_states else self.mask_BT, position_ids=self.positions_BT,
            use_cache=True, logits_to_keep=self.keep, **{name: self.cache},
        )  # fmt: skip
        self.cache = out[name]
        logits_BKV = out.logits[:, -self.keep :]  # some classes ignore `logits_to_keep`
        return logits_BKV[torch.arange(len(self.ids_BT), device=logits_BKV.device), self.last_row].contiguous()

    def advance(self, tokens: list[int]) -> None:
        """Make the sampled tokens the next inputs."""
        self._first = self._first + self._count
        self._count = np.ones_like(self._count)
        self.start = np.zeros_like(self.start)
        device = self.ids_BT.device
        self.ids_BT = to_device(np.array(tokens), device)[:, None]
        self.positions_BT = to_device(self._first, device)[:, None]
        self.mask_BT = torch.nn.functional.pad(self.mask_BT, (0, 1), value=1)
        self.keep, self.last_row = 1, torch.zeros(len(tokens), dtype=torch.long, device=device)


@functools.cache
def cache_name(kind: type) -> str:
    """Return the name of a model class's cache argument; classes that keep only states have their own."""
    return "cache_params" if "cache_params" in inspect.signature(kind.forward).parameters else "past_key_values"


class Generation:
    """A batch of requests. Some may have failed already.

    errors: the error of each request, if any
    computed_from: the cut at which the first step begins; None: everything is computed
    asked: the values read from the last step's logits
    has_failed: True if an error ended the whole batch
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
        """The indices of the requests that have not failed."""
        return [i for i, error in enumerate(self.errors) if error is None]

    def start(self, tokenizer: Tokenizer, eos: set[int]) -> list[Request]:
        """Create writers for the ready requests; return these requests."""
        requests = [self.requests[i] for i in self.ready]
        self.writers = [Writer(request, tokenizer, eos) for request in requests]
        return requests

    @property
    def may_wait(self) -> bool:
        """True if the only step is still on the device, and everything to read from it was requested at its launch."""
        return self.asked is not None and not self.asked.has_arrived and all(
            writer.sampler.is_greedy and writer.request.max_tokens == 1 and not writer.request.logprobs
            and writer.request.listener is None for writer in self.writers
        )  # fmt: skip

    def forget_cache(self) -> None:
        """Free the keys and values for the next batch; no step follows."""
        if self.passes is not None:
            self.passes.cache = None

    def fail(self, error: Exception) -> None:
        """End all ready requests with an error."""
        self.has_failed = True
        for i in self.ready:
            self.errors[i] = error

    def answers(self) -> list[Answer | Exception]:
        """Return the answer or error of every request."""
        answers = iter([writer.answer(self.computed_from) for writer in self.writers])
        return [error or next(answers, RunError("not run")) for error in self.errors]
