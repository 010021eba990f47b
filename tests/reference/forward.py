"""One plain forward pass of a Llama-shaped model with a program carried out by hooks, row by row, from its formulas.

T positions that are inputs · W width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import patchclamp as pc

from .formulas import by_formula
from .hooks import PlainModel


class Act(NamedTuple):
    """An op at a site of one layer, and the positions it acts on, in its selection's order. A `Capture` keeps rows."""

    op: Any
    positions: Sequence[int]


class Forward(NamedTuple):
    """`kept[i]`: what act i kept, if it is a `Capture`, [n, W]; `logits_nV`: of the positions from `first` on."""

    kept: dict[int, torch.Tensor]
    logits_nV: torch.Tensor


@torch.no_grad()
def forward(plain: PlainModel, ids: list[int], first: int, acts: Sequence[Act]) -> Forward:
    """Carries acts out in order, at each place as the pass comes to it; logits are made of positions `first` on."""
    kept: dict[int, torch.Tensor] = {}
    places: dict[tuple[str, int], list[int]] = {}
    for i, act in enumerate(acts):
        places.setdefault(_place(act.op.at, plain.layers), []).append(i)

    def change(numbers: list[int], start: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
        def changed(h_TW: torch.Tensor) -> torch.Tensor:
            h_TW = h_TW.clone()
            for i in numbers:
                op, rows = acts[i].op, [p - start for p in acts[i].positions]
                if isinstance(op, pc.Capture):
                    kept[i] = h_TW[rows].clone()
                else:
                    h_TW[rows] = by_formula(op, h_TW[rows], acts[i].positions, plain.layers).float()
            return h_TW

        return changed

    handles = [
        _hook(*plain._module(*place), change(numbers)) for place, numbers in places.items() if place[0] != "logits"
    ]
    try:
        logits_TV = plain.net(torch.tensor([ids])).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return Forward(kept, change(places.get(("logits", 0), []), first)(logits_TV[first:]))


def _place(at: pc.Site, layers: int) -> tuple[str, int]:
    """Where a site of one layer is read: two words for one tensor must give one place."""
    if at.name == "embed":
        return "resid_pre", 0
    if at.name == "resid_post" and at.layers + 1 < layers:
        return "resid_pre", at.layers + 1
    return at.name, at.layers or 0


def _hook(module: torch.nn.Module, before: bool, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A hook that changes a tensor [1, T, W] at a module's border; its input in place, which the residual is too."""

    def pre(m: Any, args: Any) -> None:
        args[0][0] = change(args[0][0])

    def post(m: Any, args: Any, out: Any) -> Any:
        hidden = change((out[0] if isinstance(out, tuple) else out)[0])[None]
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    return module.register_forward_pre_hook(pre) if before else module.register_forward_hook(post)
