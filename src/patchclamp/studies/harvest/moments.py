"""Mean, variance and norms of a data set's rows, summed in one order, so that the same rows give the same bytes.

n rows · D width
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import numpy as np

from patchclamp.studies.harvest.dtypes import as_float32, put_float32
from patchclamp.studies.harvest.shard_file import ReadRows

BLOCK_BYTES = 1 << 20  # of fp32 rows that are summed at a time; they stay in the processor's cache


class SiteStatistics(msgspec.Struct, frozen=True, eq=False):
    """Of the rows of one site.

    rows: how many
    mean, variance: of each number of a row (the population's variance), float64 [D]
    norm_mean, norm_rms, norm_min, norm_max: of the rows' norms (L2); NaN without rows
    """

    rows: int
    mean: np.ndarray
    variance: np.ndarray
    norm_mean: float
    norm_rms: float
    norm_min: float
    norm_max: float


@np.errstate(all="ignore")  # rows that are not finite have such statistics
def statistics_of(rows: np.ndarray | ReadRows, dtype: str) -> tuple[SiteStatistics, np.ndarray]:
    """The statistics of stored rows [n, D], and their norms [n], float32.

    Sums are of what is left when the first rows' mean is taken off (Chan, Golub and LeVeque 1983, section 3), over a
    block in fp32, and over blocks in float64.
    """
    count, width = rows.shape
    if not count:
        return nothing(width), np.zeros(0, np.float32)
    size = max(1, BLOCK_BYTES // (4 * max(width, 1)))
    norms, first, squares = np.empty(count, np.float32), np.zeros(width), np.zeros(width)
    shift = as_float32(rows[:size], dtype).mean(axis=0)
    room = np.empty((min(size, count), width), np.float32)  # used again: the system takes long to give and take memory
    for begin in range(0, count, size):
        block = room[: min(size, count - begin)]
        put_float32(rows[begin : begin + size], dtype, block)
        np.sqrt(np.einsum("nd,nd->n", block, block), out=norms[begin : begin + size])
        np.subtract(block, shift, out=block)
        first += block.sum(axis=0)
        np.multiply(block, block, out=block)
        squares += block.sum(axis=0)
    left, wide = first / count, norms.astype(np.float64)
    return SiteStatistics(
        count, shift + left, squares / count - left**2, float(wide.mean()), math.sqrt(float((wide**2).mean())),
        float(wide.min()), float(wide.max()),
    ), norms  # fmt: skip


def nothing(width: int) -> SiteStatistics:
    """The statistics of no rows."""
    return SiteStatistics(0, np.zeros(width), np.zeros(width), math.nan, math.nan, math.nan, math.nan)


def joined(parts: Iterable[SiteStatistics]) -> SiteStatistics:
    """The statistics of all rows, from those of parts; the order matters to the last bits."""
    total, *others = parts
    for part in others:
        total = part if not total.rows else _two(total, part) if part.rows else total
    return total


def _two(a: SiteStatistics, b: SiteStatistics) -> SiteStatistics:
    rows = a.rows + b.rows
    share = b.rows / rows
    apart = b.mean - a.mean
    return SiteStatistics(
        rows, a.mean + share * apart,
        (1 - share) * a.variance + share * b.variance + share * (1 - share) * apart**2,
        (1 - share) * a.norm_mean + share * b.norm_mean,
        math.sqrt((1 - share) * a.norm_rms**2 + share * b.norm_rms**2),
        min(a.norm_min, b.norm_min), max(a.norm_max, b.norm_max),
    )  # fmt: skip


def encoded(sites: dict[str, SiteStatistics]) -> bytes:
    """`statistics.json`, by site; numbers that are not finite are null."""
    return msgspec.json.encode(sites, enc_hook=lambda array: array.tolist())


def decoded(content: bytes) -> dict[str, SiteStatistics]:
    """What `encoded` wrote."""
    return {
        site: SiteStatistics(
            values["rows"], _array(values["mean"]), _array(values["variance"]),
            *(math.nan if values[name] is None else values[name]
              for name in ("norm_mean", "norm_rms", "norm_min", "norm_max")),
        )
        for site, values in msgspec.json.decode(content).items()
    }  # fmt: skip


def _array(values: list[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], np.float64)
