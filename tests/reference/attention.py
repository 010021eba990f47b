"""Attention as Transformers' eager implementation computes it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch


@torch.no_grad()
def eager(net: Any, token_ids: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The pattern of each layer, and its scores before the softmax with −∞ where they are masked, both [T, H, T]. `net`
    has the implementation "eager"."""
    scores, softmax = list[torch.Tensor](), torch.nn.functional.softmax

    def seen(found: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        length = len(token_ids)
        if found.dim() == 4 and found.shape[-2] == length:
            kept = found[0, :, :, :length].transpose(0, 1).float().clone()  # a last column may be a sink
            scores.append(torch.where(kept < -1e30, -torch.inf, kept))
        return softmax(found, *args, **named)

    with mock.patch.object(torch.nn.functional, "softmax", seen):
        given = net(torch.tensor([token_ids]), output_attentions=True).attentions
    return [each[0].transpose(0, 1) for each in given], scores
