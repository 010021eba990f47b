"""The capture layout, plainly: one loop over every captured row, without groups, numbers or regions."""

from __future__ import annotations

import msgspec

from patchclamp.plan import Batch


class PlainCapture(msgspec.Struct, frozen=True, order=True):
    """One capture record of a slot: it keeps positions start … stop−1 at a point, in a dtype, for an op."""

    slot: int
    op: int
    point: int
    dtype: int
    start: int
    stop: int


def captured_positions(capture: PlainCapture, batch: Batch, sampled: bool) -> list[int]:
    """The positions that a record keeps of a step: those computed, or of them the last where rows are the sampled ones."""
    positions: list[int] = []
    for n in range(len(batch.slot)):
        if batch.slot[n] == capture.slot:
            computed = range(int(batch.position[n]), int(batch.position[n] + batch.count[n]))
            positions += computed[-1:] if sampled else computed
    return [position for position in positions if capture.start <= position < capture.stop]
