"""Where every row of a shuffled data set goes: a keyed permutation that is computed for each row alone.

No table of places is kept, so a resumed harvest and one on another machine put every row at the same place.

Source: the generalised Feistel cipher with cycle walking of Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002, section 5; its round function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math

import numpy as np

ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Permutation:
    """A permutation of 0 … size − 1, drawn by `seed`."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._low = max(1, math.isqrt(max(size - 1, 0)) + 1)  # a number is low + self._low · high
        self._high = max(1, -(-size // self._low))
        numbers = np.array([(seed + (i + 1) * _GOLDEN) & _MASK for i in range(ROUNDS)], np.uint64)
        self._keys = scrambled(numbers)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """The place [n] of each of these rows [n]."""
        return self._walk(rows, self._forward)

    def rows(self, places: np.ndarray) -> np.ndarray:
        """The row [n] at each of these places [n]."""
        return self._walk(places, self._backward)

    def _walk(self, numbers: np.ndarray, step) -> np.ndarray:
        """One step for each number, and further ones for those that leave 0 … size − 1."""
        numbers = step(np.asarray(numbers).astype(np.uint64))
        while len(outside := np.flatnonzero(numbers >= np.uint64(self.size))):
            numbers[outside] = step(numbers[outside])
        return numbers.astype(np.int64)

    def _forward(self, numbers: np.ndarray) -> np.ndarray:
        low, high = numbers % np.uint64(self._low), numbers // np.uint64(self._low)
        for number, key in enumerate(self._keys):
            if number % 2:
                high = _added(high, _below(self._high, scrambled(low ^ key)), self._high)
            else:
                low = _added(low, _below(self._low, scrambled(high ^ key)), self._low)
        return low + np.uint64(self._low) * high

    def _backward(self, numbers: np.ndarray) -> np.ndarray:
        low, high = numbers % np.uint64(self._low), numbers // np.uint64(self._low)
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2:
                high = _added(high, np.uint64(self._high) - _below(self._high, scrambled(low ^ key)), self._high)
            else:
                low = _added(low, np.uint64(self._low) - _below(self._low, scrambled(high ^ key)), self._low)
        return low + np.uint64(self._low) * high


def scrambled(numbers: np.ndarray) -> np.ndarray:
    """A hash of 64 bits of each number, uint64 [n]."""
    x = numbers.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _below(size: int, hashes: np.ndarray) -> np.ndarray:
    """A number from 0 to size − 1 for each hash, by its upper half; `size` is at most 2³²."""
    return ((hashes >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)


def _added(a: np.ndarray, b: np.ndarray, size: int) -> np.ndarray:
    """(a + b) mod size, for a and b that add up to less than twice `size`."""
    total = a + b
    return np.where(total >= np.uint64(size), total - np.uint64(size), total)
