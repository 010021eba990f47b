"""Taps: hooks on a model's modules that hand tensors to the custom op. Attached once, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from patchclamp.errors import ModelError
from patchclamp.runtime.op import acting, site
from patchclamp.sites import Point, Tap, View


def attach(
    model: torch.nn.Module, taps: list[tuple[Point, Tap]], view: Callable[[Tap], View | None],
    after_attention: Callable[[torch.nn.Module, Callable[[torch.Tensor], None]], None] | None = None,
) -> dict[int, View | None]:  # fmt: skip
    """Hooks every tap of tokens' rows whose module is here; returns their points, and where each lies in its tensor.
    Raises `ModelError` for a module that is missing.

    A module without submodules and parameters of its own kind stands for a layer that another pipeline stage holds.
    """
    hooked = {}
    for point, tap in taps:
        if point.rows != "tokens":
            continue
        module = find(model, tap.module)
        if type(module).__name__ == "PPMissingLayer":
            continue
        if tap.moment == "attention":
            assert after_attention is not None
            after_attention(module, _computed(point.number))
        elif tap.moment == "in":
            module.register_forward_pre_hook(_before(point.number, tap), with_kwargs=True)
        elif tap.rerun:
            module.register_forward_hook(_rerun(point.number))
        else:
            module.register_forward_hook(_after(point.number, tap))
        hooked[point.number] = view(tap)
    return hooked


def find(model: torch.nn.Module, path: str) -> torch.nn.Module:
    """The submodule at a path. Raises `ModelError` with the names that are there."""
    module, walked = model, []
    for name in path.split("."):
        children = dict(module.named_children())
        if name not in children:
            if type(module).__name__ == "PPMissingLayer":
                return module
            place = ".".join(walked) or type(model).__name__
            raise ModelError(f"{place} has no {name!r} (for {path}); it has: {', '.join(children) or 'no submodules'}")
        module = children[name]
        walked.append(name)
    return module


def _before(point: int, tap: Tap) -> Callable[..., None]:
    hidden, residual = tap.hidden, tap.residual

    def hook(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        other = args[residual] if residual is not None and len(args) > residual else None
        site(named[hidden] if isinstance(hidden, str) else args[hidden], other, point)  # type: ignore[index]

    return hook


def _computed(point: int) -> Callable[[torch.Tensor], None]:
    def tap(computed: torch.Tensor) -> None:
        acting(computed, None, point)

    return tap


def _rerun(point: int) -> Callable[..., Any]:
    """Of a router that gives its logits and what it chose by them: what it would have chosen by those that are edited.
    Its weights stand aside for ones that leave the logits as they are."""

    def hook(module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> Any:
        logits_RX = output[0].clone()
        site(logits_RX, None, point)
        if torch.equal(logits_RX, output[0]):
            return None
        stood, forward = {}, type(module).forward
        same = torch.eye(logits_RX.shape[-1], dtype=logits_RX.dtype, device=logits_RX.device)
        for name, aside in {"weight": same, "bias": torch.zeros_like(same[0])}.items():
            if name in module._parameters and module._parameters[name] is not None:
                stood[name] = module._parameters[name]
                module._parameters[name] = torch.nn.Parameter(aside, requires_grad=False)
        width = getattr(module, "hidden_dim", None)
        module.hidden_dim = logits_RX.shape[-1]
        try:
            made = forward(module, logits_RX)
        finally:
            module._parameters |= stood
            module.hidden_dim = width
        return (logits_RX, *made[1:])

    return hook


def _after(point: int, tap: Tap) -> Callable[..., None]:
    place = tap.hidden
    assert isinstance(place, int)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        site(output[place] if isinstance(output, tuple) else output, None, point)

    return hook
