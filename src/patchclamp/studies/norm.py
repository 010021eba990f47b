"""A model's norms, read from its checkpoint: as they are, and frozen at one row's scale, where they are linear.

N rows · D model width
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from patchclamp.errors import ModelError
from patchclamp.studies.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch


class Norm(msgspec.Struct, frozen=True, eq=False):
    """x ↦ (x − mean) / √(variance + ε) · weight + bias, where `centres`; without the mean otherwise (RMS norm).

    Source: Ba et al. 2016 (arXiv:1607.06450), equation 4; Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4.
    """

    centres: bool
    epsilon: float
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, rows_ND: torch.Tensor) -> torch.Tensor:
        normed_ND = self.frozen(rows_ND, rows_ND)
        return normed_ND if self.bias is None else normed_ND + self.bias

    def frozen(self, parts_ND: torch.Tensor, rows_ND: torch.Tensor) -> torch.Tensor:
        """What the norm, without its bias, makes of parts that add up to rows: each is divided by its row's scale.
        This is linear in the parts."""
        if self.centres:
            parts_ND = parts_ND - parts_ND.mean(-1, keepdim=True)
            rows_ND = rows_ND - rows_ND.mean(-1, keepdim=True)
        scale_N1 = (rows_ND.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        return parts_ND / scale_N1 * self.weight

    def pulled(self, directions_ND: torch.Tensor, rows_ND: torch.Tensor) -> torch.Tensor:
        """The directions g for which ⟨g, part⟩ is ⟨direction, `frozen` part⟩, whatever the part."""
        directions_ND = directions_ND * self.weight
        if self.centres:
            directions_ND = directions_ND - directions_ND.mean(-1, keepdim=True)
            rows_ND = rows_ND - rows_ND.mean(-1, keepdim=True)
        return directions_ND / (rows_ND.square().mean(-1, keepdim=True) + self.epsilon).sqrt()


def possible_norms(checkpoint: Checkpoint, module: str) -> list[Norm]:
    """What the norm that a checkpoint calls `module` may be: with or without the mean, and its weight as stored or
    around 1, as Gemma stores it. Which one it is, its rows on the live model show. None without a weight [D]."""
    import torch

    weight, bias = checkpoint.tensor(f"{module}.weight"), checkpoint.tensor(f"{module}.bias")
    if weight is None:
        weight = torch.ones(checkpoint.config.hidden_size)
    if weight.dim() != 1:
        return []
    return [
        Norm(centres, epsilon, stored, bias)
        for centres, epsilon, stored in itertools.product((False, True), checkpoint.epsilons, (weight, 1 + weight))
    ]


def relative_gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """How far two tensors are apart, as a share of the second one's spread around its mean; 1 if it has none."""
    spread = float((theirs - theirs.mean()).norm())
    gap = float((ours - theirs).norm())
    return gap / spread if spread > 0 and gap == gap else float(gap > 0)


def tolerance(dtype: str) -> float:
    """How far apart what we compute in fp32 and what a model computes in its dtype may be, as a `relative_gap`."""
    return {"float32": 1e-3, "float16": 2e-2}.get(dtype, 5e-2)


def proved_norm(
    checkpoint: Checkpoint, modules: list[str], before_ND: torch.Tensor, after_ND: torch.Tensor, dtype: str
) -> Norm:
    """The norm of a checkpoint, one of some modules, that makes rows of the live model of the rows before it.

    Raises: `ModelError` if none does.
    """
    stored = [module for module in modules if checkpoint.tensor(f"{module}.weight") is not None] or modules[:1]
    norms = [norm for module in stored for norm in possible_norms(checkpoint, module)]
    gaps = [relative_gap(norm(before_ND), after_ND) for norm in norms]
    if not gaps or not min(gaps) <= tolerance(dtype):
        raise ModelError(
            f"what {', '.join(stored)} in {checkpoint.folder} makes of this model's stream is not what the model has "
            f"behind it: it is {min(gaps, default=1.0):.2g} off. Are these another model's files?"
        )
    return norms[gaps.index(min(gaps))]
