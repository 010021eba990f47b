"""What each op does to rows, in double precision, from its docstring.

T rows · W width · n rows of a value
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import patchclamp as pc
from patchclamp.kernels.noise import normals
from patchclamp.plan.bound import noise_stream


def by_formula(op: Any, before_TW: torch.Tensor, positions: Sequence[int], layers: int,
               rows_nW: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """The selected rows after an op, [T, W], of a model with so many `layers`; `rows_nW`: those that `From` reads or
    a name in the bank means, one for all or one a row. `positions` are the rows' own, in the selection's order."""
    value = rows_nW if rows_nW is not None else _numbers(op, "value")
    made = [
        _row(op, h_W, value if value is None or value.dim() == 1 else value[i if len(value) > 1 else 0], p, layers)
        for i, (h_W, p) in enumerate(zip(before_TW.double(), positions, strict=True))
    ]
    return torch.stack(made)


def _numbers(op: Any, field: str) -> torch.Tensor | None:
    found = getattr(op, field, None)
    return None if not hasattr(found, "array") else torch.from_numpy(np.array(found.array(), np.float64))


def _row(op: Any, h: torch.Tensor, v: torch.Tensor | None, position: int, layers: int) -> torch.Tensor:
    if isinstance(op, pc.Add):
        return h + op.scale * v.double()
    if isinstance(op, pc.Replace):
        if op.basis is not None:
            return h + op.alpha * _within(_numbers(op, "basis"), v.double() - h)
        mask = _numbers(op, "mask")
        a = op.alpha if mask is None else op.alpha * mask
        return (1 - a) * h + a * v.double()
    if isinstance(op, pc.Mean):
        return v.double()
    if isinstance(op, pc.Zero):
        return 0 * h
    if isinstance(op, pc.Scale):
        return op.factor * h
    if isinstance(op, pc.Ablate):
        return h - op.strength * _within(_numbers(op, "directions"), h)
    if isinstance(op, pc.LowRank):
        weight, rotation = (torch.atleast_2d(_numbers(op, name)) for name in ("weight", "rotation"))
        return h + rotation.T @ (weight @ h + _numbers(op, "bias") - rotation @ h)
    if isinstance(op, pc.Clamp):
        unit = _numbers(op, "direction")
        unit = unit / unit.norm()
        low, high = (-np.inf if op.low is None else op.low), (np.inf if op.high is None else op.high)
        return h + ((h @ unit).clamp(low, high) - h @ unit) * unit
    assert isinstance(op, pc.Noise), op
    e = torch.from_numpy(normals(op.seed, position, noise_stream(*point(op.at, layers)), len(h))).double()
    return h + op.std * (h.square().mean().sqrt() if op.relative else 1.0) * e


def _within(directions: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """The component of h in the span of some directions."""
    directions = torch.atleast_2d(directions)
    return torch.linalg.lstsq(directions.T, h[:, None], rcond=1e-5, driver="gelsd").solution[:, 0] @ directions


def point(at: pc.Site, layers: int) -> tuple[str, int | None]:
    """The place in a model that a site of one layer names: a kind of tensor and its layer."""
    layer = at.layers
    stream = {"embed": 0, "resid_pre": layer, "resid_post": None if layer is None else layer + 1}
    if at.name in stream:
        found = stream[at.name]
        return ("stream_end", None) if found == layers else ("stream", found)
    return ("mid" if at.name == "resid_mid" else at.name), layer
