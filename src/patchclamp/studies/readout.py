"""Readouts: what a model's final norm and unembedding make of any row of the stream, in one of two ways.

From the checkpoint: the norm and the matrix are read from the model's files, and are taken only if they give the live
model's own logits from its own last stream.  From the engine: the row is put in the place of the last stream, and the
engine makes the logits; this is exact for every model, needs no files, and costs a request a row.

N rows · D model width · V vocabulary · K rows of a matrix
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np

from patchclamp.errors import ModelError, unknown
from patchclamp.language import Replace, Site, Vector, prompt
from patchclamp.lm import LM
from patchclamp.studies.checkpoint import Checkpoint
from patchclamp.studies.norm import Norm, possible_norms, relative_gap, tolerance

if TYPE_CHECKING:
    import torch

Way = Literal["checkpoint", "engine"]
WAYS: tuple[Way, ...] = ("checkpoint", "engine")
LAST, FINAL_NORM, LOGITS = Site("resid_post", -1), Site("final_norm"), Site("logits")
PROOF_TOKENS = 8  # of the prompt that proves a readout, at most
MAX_FLOATS = 1 << 25  # of logits at a time


class Readout(Protocol):
    """way: where its numbers come from · about: that in words, for results"""

    way: Way
    about: str

    def logits(self, rows_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        """The logits [n, V] of rows of the stream, a few rows at a time, in order."""
        ...

    def normed(self, rows_ND: torch.Tensor) -> torch.Tensor:
        """What the final norm makes of rows of the stream, [N, D]."""
        ...


class Unembedding(msgspec.Struct, frozen=True, eq=False):
    """The last of a model: norm, matrix and bias, then the logits' scale and cap.

    Source of the cap: Gemma 2 (arXiv:2408.00118), section 2: cap · tanh(logits / cap).
    """

    norm: Norm
    matrix_VD: torch.Tensor
    bias_V: torch.Tensor | None
    scale: float
    cap: float | None

    def __call__(self, rows_ND: torch.Tensor) -> torch.Tensor:
        logits_NV = self.norm(rows_ND) @ self.matrix_VD.T
        logits_NV = (logits_NV if self.bias_V is None else logits_NV + self.bias_V) * self.scale
        return logits_NV if self.cap is None else self.cap * (logits_NV / self.cap).tanh()

    def uncapped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits as they were before the cap."""
        return logits if self.cap is None else self.cap * (logits / self.cap).atanh()


def proved_unembedding(lm: LM, checkpoint: Checkpoint, ids: list[int]) -> Unembedding:
    """The unembedding of a checkpoint that gives the live model's logits for a prompt.

    Raises: `ModelError` if none does: the files are another model's, or its last step is not of this form.
    """
    import torch

    run = lm.run(ids[-PROOF_TOKENS:], max_tokens=1, capture=[LAST @ prompt[-1], LOGITS])
    row_1D, theirs_1V = (torch.as_tensor(run[site]).float() for site in (LAST, LOGITS))
    run.close()
    matrix_VD, bias_V = checkpoint.unembedding()
    size = theirs_1V.shape[1]
    if matrix_VD.shape[0] < size or matrix_VD.shape[1] != row_1D.shape[1]:
        raise ModelError(
            f"{checkpoint.folder} has an unembedding {list(matrix_VD.shape)}, and this model's is "
            f"[{size}, {row_1D.shape[1]}]: are these another model's files? readout='engine' needs none"
        )
    matrix_VD, bias_V = matrix_VD[:size], None if bias_V is None else bias_V[:size]
    scale = (checkpoint.number("logit_scale", "lm_head_multiplier") or 1.0) / (checkpoint.number("logits_scaling") or 1)
    candidates = [
        Unembedding(norm, matrix_VD, bias_V, scale, checkpoint.number("final_logit_softcapping"))
        for norm in possible_norms(checkpoint, _final_norm(lm))
    ]
    gaps = [relative_gap(candidate(row_1D), theirs_1V) for candidate in candidates]
    best = int(np.argmin(gaps))
    if not gaps[best] <= tolerance(lm.model.dtype):
        raise ModelError(
            f"what the checkpoint in {checkpoint.folder} makes of this model's last stream is {gaps[best]:.2g} off the "
            f"model's own logits (at most {tolerance(lm.model.dtype):g} of their spread is allowed): its last step is "
            "not a norm and a matrix that we know, or these are another model's files; readout='engine' needs none"
        )
    return candidates[best]


def _final_norm(lm: LM) -> str:
    return lm.sites.family.points["final_norm"].transformers.module


class FromCheckpoint:
    """A readout that was read from the model's files and proved on the live model, in fp32."""

    way: Way = "checkpoint"

    def __init__(self, lm: LM, checkpoint: Checkpoint, ids: list[int]) -> None:
        self.unembedding = proved_unembedding(lm, checkpoint, ids)
        self.about = "norm and unembedding of the checkpoint, proved on the live model"

    def logits(self, rows_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        count = max(MAX_FLOATS // len(self.unembedding.matrix_VD), 1)
        for rows in rows_ND.split(count):
            yield self.unembedding(rows)

    def normed(self, rows_ND: torch.Tensor) -> torch.Tensor:
        return self.unembedding.norm(rows_ND)


class FromEngine:
    """A readout that the engine makes: each row is a run of one token, whose last stream the row replaces."""

    way: Way = "engine"

    def __init__(self, lm: LM, token: int, why: str) -> None:
        self._lm, self._token = lm, token
        self.about = f"each row was put in the place of the last stream, and the engine made its logits{why}"

    def logits(self, rows_ND: torch.Tensor) -> Iterator[torch.Tensor]:
        return self._read(rows_ND, LOGITS, max(MAX_FLOATS // self._lm.model.d_vocab, 1))

    def normed(self, rows_ND: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat(list(self._read(rows_ND, FINAL_NORM, 256)))

    def _read(self, rows_ND: torch.Tensor, site: Site, count: int) -> Iterator[torch.Tensor]:
        """What is at a site when each row is the last stream, so many runs at a time."""
        import torch

        for rows in rows_ND.split(min(count, 256)):
            runs = self._lm.run(
                [[self._token]] * len(rows), max_tokens=1, capture=[site],
                edits=[[Replace(Vector.of(row.numpy()), at=LAST)] for row in rows],
            )  # fmt: skip
            read = self._lm.fetch(runs, site)
            yield torch.cat([torch.as_tensor(of_run[site.name]).float() for of_run in read])
            for run in runs:
                run.close()


def readout_of(lm: LM, way: str | None, weights: Any, ids: list[int]) -> FromCheckpoint | FromEngine:
    """The readout that is asked for; None is the checkpoint where its files are at hand, else the engine. `weights`: a
    folder or hub id with the model's files, if they are not under its own name.

    Raises: `UnknownName` for another way, `ModelError` for files that are not there or not this model's.
    """
    if way not in (*WAYS, None):
        raise unknown("readout", str(way), WAYS, "readout")
    if way == "engine":
        return FromEngine(lm, ids[-1], "")
    try:
        checkpoint = Checkpoint(str(weights or lm.model.name))
    except ModelError as error:
        if way == "checkpoint" or weights is not None:
            raise
        return FromEngine(lm, ids[-1], f", for {error}")
    return FromCheckpoint(lm, checkpoint, ids)
