"""Where the edits of a run acted, once its tokens are known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from patchclamp.plan.bound import BoundOp, BoundProgram


def acted_on(op: BoundOp, ids: np.ndarray, ids_of: Mapping[str, np.ndarray]) -> np.ndarray:
    """The positions that an op acted on, in the order of its ranges.

    ids: of the tokens that had activations
    ids_of: by bank key, the token ids of a condition
    """
    positions = [np.arange(start, min(stop, len(ids))) for start, stop, *_ in op.ranges if start < len(ids)]
    joined = np.concatenate(positions) if positions else np.zeros(0, np.int64)
    if op.condition is None:
        return joined
    return joined[np.isin(ids[joined], ids_of[op.condition.ids]) != op.condition.others]


def acted(bound: BoundProgram, ids: np.ndarray, ids_of: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By path, the positions that each edit acted on, ascending."""
    positions: dict[str, np.ndarray] = {}
    for op in bound.ops:
        if op.is_edit:
            positions[op.path] = np.union1d(positions.get(op.path, np.zeros(0, np.int64)), acted_on(op, ids, ids_of))
    return positions
