"""Normal random numbers that are identical on every engine, device, batch and rank: integer arithmetic, rounded once.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", doi:10.1145/2063384.2063405) maps
(seed, position, site, index) to 32 bits. The lowest bit is the sign. The other 31 bits, m, index a table: ε is the
half-normal quantile at the tail (m + ½) / 2³¹, tabulated by octaves of m with 2⁷ bins each, linear within a bin, in
integers of 2⁻²⁷. The error against the exact quantile is at most 4·10⁻⁶; the largest ε is 6.4. Box-Muller would not be
reproducible, since libraries differ in the last bits of sine and logarithm.

    W row width
"""

from __future__ import annotations

import functools
from statistics import NormalDist

import numpy as np

PARTS, FRACTION = 7, 27  # 2^PARTS bins per octave; the table is in units of 2^-FRACTION
OCTAVES = 31  # octaves of m starting at 1; m = 0 has a separate row after them
MASK, MULTIPLIERS, STEPS = 0xFFFFFFFF, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


@functools.cache
def quantiles() -> np.ndarray:
    """Return the half-normal quantiles at the bin edges, [OCTAVES + 1, 2^PARTS + 1] int32, decreasing along rows."""
    exact = np.vectorize(NormalDist().inv_cdf)
    table = np.zeros((OCTAVES + 1, (1 << PARTS) + 1), np.int32)
    for octave in range(OCTAVES):
        m = (1 << octave) + np.arange((1 << PARTS) + 1) * 2.0 ** (octave - PARTS)
        table[octave] = np.rint(-exact(np.minimum((m + 0.5) / 2.0**32, 0.5)) * 2.0**FRACTION)
    table[OCTAVES] = np.rint(-exact(0.5 / 2.0**32) * 2.0**FRACTION)
    return table


def philox(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> list[np.ndarray]:
    """Compute Philox4x32-10: four 32-bit words, stored as uint64, from a four-word counter and a two-word key."""
    mask, half = np.uint64(MASK), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        low, high = np.uint64(MULTIPLIERS[0]) * c0, np.uint64(MULTIPLIERS[1]) * c2
        c0, c2 = (high >> half) ^ c1 ^ np.uint64(k0), (low >> half) ^ c3 ^ np.uint64(k1)
        c1, c3 = high & mask, low & mask
        k0, k1 = (k0 + STEPS[0]) & MASK, (k1 + STEPS[1]) & MASK
    return [c0, c1, c2, c3]


def normals(seed: int, position: int, site: int, width: int) -> np.ndarray:
    """Return a row's noise ε, fp32 [W]. This is the plain version."""
    group = np.arange(-(-width // 4), dtype=np.uint64)
    zero = np.zeros_like(group)
    words = philox((group, zero + np.uint64(position), zero + np.uint64(site), zero), (seed & MASK, seed >> 32))
    table = quantiles().astype(np.int64)
    row_W = np.empty(width, np.float32)
    for i, word in enumerate(np.stack(words, 1).reshape(-1)[:width].tolist()):
        sign, m = word & 1, word >> 1
        octave = m.bit_length() - 1 if m else OCTAVES
        rest, fine = m - (1 << octave) if m else 0, max(octave - PARTS, 0)
        part = rest >> fine if octave >= PARTS else rest << (PARTS - octave)
        if m == 0:
            part = fine = 0
        upper, lower = int(table[octave, part]), int(table[octave, part + 1])
        magnitude = upper - (((upper - lower) * (rest & ((1 << fine) - 1))) >> fine)
        row_W[i] = np.float32(-magnitude if sign else magnitude) * np.float32(2.0**-FRACTION)
    return row_W
