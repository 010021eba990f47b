"""How heads and neurons write into the stream: the matrix behind them, read from the checkpoint and proved on what the
live model wrote.

N rows · D model width · W width of what is read: all heads' results, or all neurons
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from patchclamp.errors import ModelError
from patchclamp.lm import LM
from patchclamp.studies.checkpoint import Checkpoint
from patchclamp.studies.norm import Norm, possible_norms, relative_gap, tolerance

if TYPE_CHECKING:
    import torch

Word = Literal["z", "neurons"]
WRITES: dict[Word, str] = {"z": "attn_out", "neurons": "mlp_out"}


class Writer(msgspec.Struct, frozen=True, eq=False):
    """rows [N, W] ↦ (rows · matrix + bias) · factor [N, D], and then through a norm where the model has one there."""

    matrix_WD: torch.Tensor
    bias_D: torch.Tensor | None
    factor: float
    norm: Norm | None

    def __call__(self, rows_NW: torch.Tensor) -> torch.Tensor:
        written_ND = self._before_norm(rows_NW) * self.factor
        return written_ND if self.norm is None else self.norm(written_ND)

    def _before_norm(self, rows_NW: torch.Tensor) -> torch.Tensor:
        written_ND = rows_NW @ self.matrix_WD
        return written_ND if self.bias_D is None else written_ND + self.bias_D

    def shares(self, rows_NW: torch.Tensor, directions_ND: torch.Tensor) -> torch.Tensor:
        """What each number of the rows adds to ⟨direction, written row⟩, [N, W], the norm frozen at its scale."""
        return rows_NW * (self._pulled(rows_NW, directions_ND) @ self.matrix_WD.T) * self.factor

    def rest(self, rows_NW: torch.Tensor, directions_ND: torch.Tensor) -> torch.Tensor:
        """What biases add to it, [N]."""
        rest_N = 0.0 * directions_ND[:, 0]
        if self.norm is not None and self.norm.bias is not None:
            rest_N = rest_N + directions_ND @ self.norm.bias
        if self.bias_D is not None:
            rest_N = rest_N + self._pulled(rows_NW, directions_ND) @ self.bias_D * self.factor
        return rest_N

    def _pulled(self, rows_NW: torch.Tensor, directions_ND: torch.Tensor) -> torch.Tensor:
        """The directions before the norm."""
        if self.norm is None:
            return directions_ND
        return self.norm.pulled(directions_ND, self._before_norm(rows_NW) * self.factor)


def proved_writer(
    lm: LM, checkpoint: Checkpoint, word: Word, layer: int, rows_NW: torch.Tensor,
    written_ND: torch.Tensor,
) -> Writer:  # fmt: skip
    """The writer of a layer that makes what the live model wrote of what it had at a site.

    Raises: `ModelError` if none does: the files are another model's, or the layer is not of this form.
    """
    points = lm.sites.family.points
    module = points[word].transformers.module.format(l=layer)
    after = points[WRITES[word]].transformers
    weight, bias_D = checkpoint.matrix(module), checkpoint.tensor(f"{module}.bias")
    shape = (rows_NW.shape[1], written_ND.shape[1])
    matrices = [matrix for matrix in (weight.T, weight) if matrix.shape == shape]  # as Linear has it, and as GPT-2's
    end = after.module.format(l=layer)
    norms: list[Norm | None] = [None]
    if checkpoint.tensor(f"{end}.weight") is not None:
        norms += possible_norms(checkpoint, end)
    factor = lm.sites.sizes.factor(after.scale)
    candidates = [Writer(matrix, bias_D, factor, norm) for matrix, norm in itertools.product(matrices, norms)]
    gaps = [relative_gap(candidate(rows_NW), written_ND) for candidate in candidates]
    if not gaps or not min(gaps) <= tolerance(lm.model.dtype):
        told = f"{min(gaps):.2g} off" if gaps else f"{list(weight.shape)}, and [{shape[1]}, {shape[0]}] is needed"
        raise ModelError(
            f"what {module}.weight in {checkpoint.folder} makes of {word}[{layer}] is not this model's "
            f"{WRITES[word]}[{layer}]: it is {told}. Are these another model's files?"
        )
    return candidates[int(np.argmin(gaps))]
