"""The passes of the Transformers engine: prompts side by side, padded, then one token each.

B prompts of the batch · T longest prompt · V vocabulary
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from patchclamp.kernels.transfer import to_device
from patchclamp.plan import Batch


class Passes:
    """The padded inputs of the pass at hand: the prompts first, then one token each."""

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
        """The model's pass over the inputs at hand; returns the logits to sample from, [B, V]."""
        name = cache_name(type(net))
        # once it has its states, a model without keys takes one token and no mask: the first Mamba would repeat the
        # token along a longer one
        has_states = name == "cache_params" and self.cache is not None
        out = net(
            input_ids=self.ids_BT, attention_mask=None if has_states else self.mask_BT, position_ids=self.positions_BT,
            use_cache=True, logits_to_keep=self.keep, **{name: self.cache},
        )  # fmt: skip
        self.cache = out[name]
        logits_BKV = out.logits[:, -self.keep :]  # also of a class that keeps them all
        return logits_BKV[torch.arange(len(self.ids_BT), device=logits_BKV.device), self.last_row].contiguous()

    def advance(self, tokens: list[int]) -> None:
        """Makes the sampled tokens the next inputs."""
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
    """What a model class calls its cache: states alone have a name of their own."""
    return "cache_params" if "cache_params" in inspect.signature(kind.forward).parameters else "past_key_values"
