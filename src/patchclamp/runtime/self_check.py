"""Check capture labels while serving, by comparing captured rows at `embed` with the embedding matrix.

A row at `embed` is its token's embedding, times a factor that is the same for all tokens (Gemma's is the square root of
its width). A row captured under the wrong position belongs to another token, and rows that were never written are zero.
Rows of equal tokens are indistinguishable.
"""

from __future__ import annotations

import numpy as np
import torch

from patchclamp.errors import Mislabelled

TOLERANCE = 0.02  # relative to a row's norm: bfloat16 rounds by 0.4 %; different tokens differ by about a norm
FACTORS = 2.0**-10, 2.0**10  # bounds on the fitted factor; models scale embeddings by 1 to about 130


def mislabelled(
    captured: np.ndarray, rows_TD: torch.Tensor, positions: np.ndarray, expected_TD: torch.Tensor
) -> Mislabelled | None:
    """Return an error if the captured positions are not `positions`, or the rows are not the tokens' embeddings; else
    None."""
    if not np.array_equal(captured, positions):
        wrong = np.setxor1d(captured, positions)
        return Mislabelled(_message(len(wrong), len(positions), int(wrong[0])))
    rows_TD, expected_TD = rows_TD.double(), expected_TD.double()
    factor = (rows_TD * expected_TD).sum() / expected_TD.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    expected_TD = factor.clamp(*FACTORS) * expected_TD
    gap_T = (rows_TD - expected_TD).norm(dim=1)
    fits_T = gap_T <= TOLERANCE * torch.maximum(rows_TD.norm(dim=1), expected_TD.norm(dim=1))  # false if NaN
    wrong = positions[~fits_T.numpy()]
    return Mislabelled(_message(len(wrong), len(positions), int(wrong[0]))) if len(wrong) else None


def _message(wrong: int, count: int, first: int) -> str:
    return (
        f"self-check: {wrong} of {count} captured rows do not match their tokens, the first at position {first}; "
        "restart the engine, and report this with the output of `patchclamp doctor`"
    )
