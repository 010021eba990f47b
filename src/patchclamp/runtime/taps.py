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
    """Hooks every tap whose module is in this process, but for those of sampled rows. Returns their points, and where
    each lies in its tensor. Raises `ModelError` for a module that is missing.

    Of a layer that another pipeline stage has, vLLM puts a `PPMissingLayer` in its place; it is not hooked.
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
            after_attention(module, _attention_hook(point))
        elif tap.moment == "in":
            module.register_forward_pre_hook(_input_hook(point, tap), with_kwargs=True)
        elif tap.rerun:
            module.register_forward_hook(_router_hook(point))
        else:
            module.register_forward_hook(_output_hook(point, tap))
        hooked[point.number] = view(tap)
    return hooked


def find(model: torch.nn.Module, path: str) -> torch.nn.Module:
    """The submodule at a path, or the `PPMissingLayer` on the way to it. Raises `ModelError` with the names there."""
    module, walked = model, []
    for name in path.split("."):
        children = dict(module.named_children())
        if name not in children:
            if type(module).__name__ == "PPMissingLayer":
                return module
            parent = ".".join(walked) or type(model).__name__
            raise ModelError(f"{parent} has no {name!r} (for {path}); it has: {', '.join(children) or 'no submodules'}")
        module = children[name]
        walked.append(name)
    return module


def _numbers(point: Point) -> tuple[int, int]:
    """A point's number, and its layer; −1 where it has none."""
    return point.number, -1 if point.layer is None else point.layer


def _input_hook(point: Point, tap: Tap) -> Callable[..., Any]:
    hidden, residual, copied = tap.hidden, tap.residual, tap.copied
    number, layer = _numbers(point)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        residual_in = None if residual is None else _argument(residual, args, kwargs)
        rows = kwargs[hidden] if isinstance(hidden, str) else args[hidden]
        rows = rows.clone() if copied else rows
        site(rows, residual_in, number, layer)
        return handed(args, kwargs, hidden, rows) if copied else None

    return hook


def _argument(at: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An argument of a call, by number or name; None if it was not given."""
    if isinstance(at, str):
        return kwargs.get(at)
    return args[at] if len(args) > at else None


def handed(
    args: tuple[Any, ...], kwargs: dict[str, Any], name: int | str, rows: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with `rows` in place of one of them, which is given by its number or its name."""
    if isinstance(name, str):
        return args, kwargs | {name: rows}
    return (*args[:name], rows, *args[name + 1 :]), kwargs


def _attention_hook(point: Point) -> Callable[[torch.Tensor], None]:
    number = point.number

    def hook(result: torch.Tensor) -> None:
        acting(result, None, number)

    return hook


def _router_hook(point: Point) -> Callable[..., Any]:
    """For a router that returns its logits, and the experts that it chose by them. If the logits are edited, it runs
    again on them, with weights that leave them as they are, and so chooses anew."""
    number, layer = _numbers(point)

    def hook(module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> Any:
        logits_RX = output[0].clone()
        site(logits_RX, None, number, layer)
        if torch.equal(logits_RX, output[0]):
            return None
        own_parameters = {}
        identity = torch.eye(logits_RX.shape[-1], dtype=logits_RX.dtype, device=logits_RX.device)
        for name, neutral in {"weight": identity, "bias": torch.zeros_like(identity[0])}.items():
            if name in module._parameters and module._parameters[name] is not None:
                own_parameters[name] = module._parameters[name]
                module._parameters[name] = torch.nn.Parameter(neutral, requires_grad=False)
        width = getattr(module, "hidden_dim", None)
        module.hidden_dim = logits_RX.shape[-1]
        try:
            rerun = type(module).forward(module, logits_RX, *args[1:])
        finally:
            module._parameters |= own_parameters
            module.hidden_dim = width
        return (logits_RX, *rerun[1:])

    return hook


def _output_hook(point: Point, tap: Tap) -> Callable[..., None]:
    index = tap.hidden
    number, layer = _numbers(point)
    assert isinstance(index, int)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        site(output[index] if isinstance(output, tuple) else output, None, number, layer)

    return hook
