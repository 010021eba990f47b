"""What programs capture, and where it lies in a step's buffer.

A span is what one piece of a capture op keeps: the rows of some positions of a request, at several points.  Spans kept
at the same points in the same dtype, as of many requests with the same program, are of one spread; a spread has an area
of the buffer for each of its points, in which the rows of its spans lie one after the other.  So a step is planned by
spans and areas, not by records, which are as many as spans times points.  (Not to be confused with the selection
`span("text")`, which names tokens by what they say.)

    C spans · G spreads · A areas
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np


class Spans(msgspec.Struct, dict=True, eq=False):
    """All spans and areas of a moment; never changed.

    Span c keeps positions `start[c]` … `stop[c]`−1 of the request in slot `slot[c]`, for the op of ordinal `op[c]`, at
    every point of spread `spread[c]`; of sampled rows if `sampled[c]`.  Area a belongs to spread `owner[a]` and holds
    rows of point `point[a]` in `dtype[a]`, a number into `DTYPES`; areas are by point.  `number` [C] and `area` [A] are
    what records call them.
    """

    number: np.ndarray
    slot: np.ndarray
    op: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    spread: np.ndarray
    sampled: np.ndarray
    area: np.ndarray
    owner: np.ndarray
    point: np.ndarray
    dtype: np.ndarray
    spreads: int

    def __len__(self) -> int:
        return len(self.number)

    def area_of(self, c: int, point: int) -> int | None:
        """The area of a span's rows at a point, if it is kept there."""
        return self._areas.get((int(self.spread[c]), point))

    def of(self, mine: np.ndarray) -> Spans:
        """Some of the spans, with all areas."""
        columns = ("number", "slot", "op", "start", "stop", "spread", "sampled")
        return msgspec.structs.replace(self, **{name: getattr(self, name)[mine] for name in columns})

    @functools.cached_property
    def _areas(self) -> dict[tuple[int, int], int]:
        return {pair: a for a, pair in enumerate(zip(self.owner.tolist(), self.point.tolist(), strict=True))}

    @functools.cached_property
    def any_sampled(self) -> bool:
        """Whether any span is of sampled rows."""
        return bool(np.count_nonzero(self.sampled))

    @functools.cached_property
    def spans_by_number(self) -> np.ndarray:
        """Which of the spans a number is."""
        return _inverse(self.number)

    @functools.cached_property
    def areas_by_number(self) -> np.ndarray:
        """Which of the areas a number is."""
        return _inverse(self.area)


def _inverse(numbers: np.ndarray) -> np.ndarray:
    found = np.full(int(numbers.max(initial=-1)) + 1, -1, np.int64)
    found[numbers] = np.arange(len(numbers))
    return found
