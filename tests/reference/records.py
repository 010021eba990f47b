"""Records written out by hand: fields at the end that are 0 may be left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from patchclamp.plan import ALL, LATCH, RECORD, SPAN, TEST, WHEN
from patchclamp.plan.bound import pack_columns


def record_array(rows: Sequence[tuple]) -> np.ndarray:
    """Rows (start, stop, kind, step, value, x, y, other, found, columns) as `RECORD`."""
    return np.array([(*row, *[0] * (len(RECORD) - len(row))) for row in rows], RECORD)


def decisions(rng: np.random.Generator, point: int, start: int, stop: int, width: int, bank: int) -> list[tuple]:
    """Records that set bits of a row or latch its position, perhaps with one that makes the next record conditional.
    A latch is read at later points alone, and that of delimiters written there: within one, rows are in no order."""
    bit, mask = int(rng.integers(0, 5)), int(rng.integers(0, 32))
    value, latch = int(rng.integers(0, bank // width)) * width, point * 2 + int(rng.integers(0, 2))
    columns = pack_columns(tuple(sorted(rng.choice(width + 1, 2, replace=False).tolist()))) if rng.random() < 0.3 else 0
    made = [(start, stop, TEST, 0, value, float(rng.choice([0.0, 1.0])), float(rng.integers(0, 2)), bit, 0, columns)]
    made += [
        (
            start,
            stop,
            ALL,
            int(rng.integers(0, 5)),
            mask,
            float(rng.integers(0, 2)),
            0.0,
            int(rng.integers(0, 32)) & mask,
        )
    ]
    made += [(start, stop, LATCH, int(rng.integers(0, 5)), latch)]
    if point:
        made += [(start, stop, LATCH, int(rng.integers(0, 5)), 4 + start % 4, 1.0)]
    elif start < 4:  # of several with one latch, all have one start
        opening, closing = rng.permutation(4)[:2]
        made += [(start, stop, SPAN, int(rng.integers(0, 4)), 4 + start, opening, closing, int(rng.integers(0, 2)))]
    made = [record for record in made if rng.random() < 0.5]
    if rng.random() < 0.5:
        earlier = int(rng.integers(0, 2 * point)) if point and rng.random() < 0.6 else -1
        made.append((start, stop, WHEN, int(rng.integers(0, 5)), earlier))
    return made
