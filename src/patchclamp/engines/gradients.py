"""Gradients at points of a Transformers model: one forward pass with autograd on, and one backward pass.

T tokens of the prompt · D model width · W width of a point
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from patchclamp.engines.base import Gradients
from patchclamp.errors import UnsupportedSite
from patchclamp.runtime.taps import find, handed
from patchclamp.sites import SiteMap, Tap, View

Read = Callable[[torch.Tensor], None]


def gradients(
    net: Any, sites: SiteMap, prompt_token_ids: list[int], points: list[int], weights: dict[int, float],
    stream: np.ndarray | None = None,
) -> Gradients:  # fmt: skip
    """What `Engine.gradients` says. Call it where nothing else runs the model.

    Raises: `UnsupportedSite` for a router, whose choice of experts has no gradient, and for logits.
    """
    taps = {point.number: tap for point, tap in sites.taps("transformers")}
    for number in points:
        if taps[number].rerun or sites.points[number].rows == "sampled":
            raise UnsupportedSite(f"there are no gradients at {sites.label(number)}")
    tensors: dict[int, torch.Tensor] = {}
    net.requires_grad_(False)  # gradients are of activations alone
    device = next(net.parameters()).device
    ids_1T = torch.tensor([prompt_token_ids], device=device)
    with contextlib.ExitStack() as hooks, torch.inference_mode(False), torch.enable_grad():
        hooks.callback(net.get_input_embeddings().register_forward_hook(_leaf).remove)
        if stream is not None:
            first = next(point.number for point in sites.points if point.kind == "stream")
            rows_1TD = torch.tensor(stream, device=device, dtype=net.dtype)[None]
            hooks.callback(_replace(net, taps[first], rows_1TD).remove)
        for number in dict.fromkeys(points):
            copied = sites.points[number].kind != "mid"  # which the layer adds to, beside the module that takes it
            hooks.callback(_read(net, taps[number], _keeper(tensors, number), copied).remove)
        logits_V = net(
            input_ids=ids_1T, position_ids=torch.arange(len(prompt_token_ids), device=device)[None], use_cache=False,
            logits_to_keep=1,
        ).logits[0, -1]  # fmt: skip
        logprobs_V = logits_V.float().log_softmax(-1)
        value = sum(weight * logprobs_V[token] for token, weight in weights.items())
        assert isinstance(value, torch.Tensor)
        found = torch.autograd.grad(value, list(tensors.values()), allow_unused=True)
    scores = {token: float(logprobs_V.detach()[token]) for token in weights}
    rows, slopes = {}, {}
    for (number, tensor), gradient in zip(tensors.items(), found, strict=True):
        view, width = sites.view(taps[number]), sites.points[number].width
        slope = torch.zeros_like(tensor) if gradient is None else gradient
        factor = 1.0 if view is None else view.factor
        rows[number] = _columns(tensor, view, width) * factor
        slopes[number] = _columns(slope, view, width) / factor
    return Gradients(scores, rows, slopes)


def _leaf(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    """The embedding, from which on gradients are kept."""
    return output.detach().requires_grad_()


def _keeper(tensors: dict[int, torch.Tensor], number: int) -> Read:
    def keep(tensor: torch.Tensor) -> None:
        tensors[number] = tensor

    return keep


def _read(net: Any, tap: Tap, read: Read, copied: bool) -> Any:
    """Hooks a tap: `read` gets its tensor.

    copied: the module is handed a copy of an input that other modules may read too. A result is always returned as a
        copy: the model may add to it in place.
    """

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = kwargs[tap.hidden] if isinstance(tap.hidden, str) else args[tap.hidden]
        rows = rows.clone() if copied else rows
        read(rows)
        return handed(args, kwargs, tap.hidden, rows) if copied else None

    def after(module: Any, args: Any, output: Any) -> Any:
        assert isinstance(tap.hidden, int)
        if not isinstance(output, tuple):
            read(output)
            return output.clone()
        read(output[tap.hidden])
        return (*output[: tap.hidden], output[tap.hidden].clone(), *output[tap.hidden + 1 :])

    module = find(net, tap.module)
    if tap.moment == "in":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)


def _replace(net: Any, tap: Tap, rows_1TD: torch.Tensor) -> Any:
    """Hooks an input: the rows take its place, and gradients go on to what was there."""

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = kwargs[tap.hidden] if isinstance(tap.hidden, str) else args[tap.hidden]
        return handed(args, kwargs, tap.hidden, own + (rows_1TD - own).detach())

    return find(net, tap.module).register_forward_pre_hook(before, with_kwargs=True)


def _columns(tensor: torch.Tensor, view: View | None, width: int) -> np.ndarray:
    """A point's rows [T, W] in the tensor of its tap."""
    tensor = tensor.detach().float().cpu()
    if view is not None and view.by_head:  # [1, H, T, E]
        return tensor[0].transpose(0, 1).reshape(-1, width).numpy()
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() == 3 else tensor.reshape(-1, width)
    if view is not None and view.heads:
        by_head = rows.reshape(len(rows), view.heads, -1)
        rows = by_head[:, :, view.first : view.first + view.size].reshape(len(rows), width)
    elif view is not None and view.tensor_width != width:
        rows = rows[:, view.first : view.first + width]
    return rows.reshape(-1, width).numpy()
