"""Attention as Transformers' eager implementation computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import transformers


def eager_model(folder: Any) -> Any:
    """A model in fp32 with the implementation "eager"."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


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


@torch.no_grad()
def edited(
    net: Any, token_ids: list[int], removed: Any = None, change: Callable[[int, torch.Tensor], None] | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits [T, V] of a model whose attention is edited, and the pattern of each layer, [T, H, T].

    removed: layer → heads → queries and keys, as index arrays, that do not attend to each other
    change: called with each layer and its pattern [H, T, T], which it changes in place
    """
    patterns, softmax, length = list[torch.Tensor](), torch.nn.functional.softmax, len(token_ids)

    def changed(scores: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        if scores.dim() != 4 or scores.shape[-2] != length:
            return softmax(scores, *args, **named)
        scores, layer = scores.clone(), len(patterns)
        for head, queries, keys in (removed or {}).get(layer, ()):
            scores[0, head, torch.as_tensor(queries)[:, None], torch.as_tensor(keys)] = torch.finfo(scores.dtype).min
        found = softmax(scores, *args, **named)
        if change is not None:
            change(layer, found[0, :, :, :length])
        patterns.append(found[0, :, :, :length].transpose(0, 1).float())
        return found

    with mock.patch.object(torch.nn.functional, "softmax", changed):
        logits = net(torch.tensor([token_ids], device=net.device)).logits[0]
    return logits, patterns
