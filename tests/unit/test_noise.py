"""Noise: the right bits, the right distribution, and the same numbers by every way."""

from __future__ import annotations

import hashlib
from statistics import NormalDist

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchclamp.kernels import fused, noise

WORDS = st.integers(0, (1 << 32) - 1)


def test_philox_gives_its_known_answers():
    """Random123's kat_vectors, philox4x32 with 10 rounds."""
    answers = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]  # fmt: skip
    for counter, key, expected in answers:
        assert tuple(int(word) for word in noise.philox(counter, key)) == expected


def test_the_table_is_the_same_on_every_machine():
    digest = hashlib.sha256(noise.quantiles().astype("<i4").tobytes()).hexdigest()
    assert digest == "141e784f08b9df8e44c35cca031c7fc00760bb420c9e0be90234b046273c8fa7"


def epsilon(words: np.ndarray) -> np.ndarray:
    """What the plain version makes of given words."""
    kept = noise.philox
    noise.philox = lambda counter, key: [words[i::4] for i in range(4)]
    try:
        return noise.normals(0, 0, 0, len(words))
    finally:
        noise.philox = kept


def test_each_word_is_looked_up_as_the_quantile_of_its_tail():
    """At the borders of octaves and parts, and at random; off by 4e-6 at most, symmetric, and falling."""
    edges = [max((1 << octave) + d, 0) for octave in range(31) for d in (-1, 0, 1)] + [(1 << 31) - 1]
    drawn = np.random.default_rng(0).integers(0, 1 << 31, 3000).tolist() + [1 << k for k in range(31)]
    m = np.array(sorted({*edges, *drawn}), np.uint64)
    m = np.concatenate([m, m[: -len(m) % 4]])
    found = epsilon(m << np.uint64(1)).astype(np.float64)
    exact = np.array([-NormalDist().inv_cdf((int(each) + 0.5) / 2.0**32) for each in m])
    assert np.abs(found - exact).max() < 4e-6
    assert np.array_equal(epsilon(m << np.uint64(1) | np.uint64(1)), -found.astype(np.float32))
    order = np.argsort(m, kind="stable")
    assert (np.diff(found[order]) <= 0).all()
    assert found.max() < 6.5


@given(st.integers(0, (1 << 63) - 1), st.integers(0, 1 << 20), st.integers(0, (1 << 31) - 1), st.integers(1, 70))
def test_the_fast_way_gives_the_same_bits(seed, position, site, width):
    rows = fused.normals_of(*(torch.tensor([0, value]) for value in (seed, position, site)), width)
    expected = noise.normals(seed, position, site, width)
    assert np.array_equal(rows[1].numpy().view(np.int32), expected.view(np.int32))
    assert np.array_equal(rows[0].numpy().view(np.int32), noise.normals(0, 0, 0, width).view(np.int32))
    longer = noise.normals(seed, position, site, width + 5)
    assert np.array_equal(longer[:width], expected)  # an index's number does not depend on the width


def test_a_million_draws_are_normal():
    """Moments, tails, and Kolmogorov and Smirnov's distance; and rows of other seeds, positions and sites do not go
    together with these."""
    seed, rows, width = int(np.random.default_rng(0).integers(1 << 62)), 256, 4096

    def draws(seed: int, site: int, first: int) -> np.ndarray:
        one = torch.ones(rows, dtype=torch.int64)
        return fused.normals_of(one * seed, torch.arange(first, first + rows), one * site, width).double().numpy()

    drawn = draws(seed, 5, 0)
    flat, count = np.sort(drawn, axis=None), drawn.size
    assert abs(flat.mean()) < 5 / count**0.5
    assert abs((flat**2).mean() - 1) < 5 * (2 / count) ** 0.5
    assert abs((flat**3).mean()) < 5 * (15 / count) ** 0.5
    assert abs((flat**4).mean() - 3) < 5 * (96 / count) ** 0.5
    for beyond in (2.0, 3.0, 4.0):
        share = 2 * NormalDist().cdf(-beyond)
        assert abs((np.abs(flat) > beyond).mean() - share) < 5 * (share / count) ** 0.5
    cdf = torch.special.ndtr(torch.from_numpy(flat)).numpy()
    assert np.abs(cdf - (np.arange(count) + 0.5) / count).max() < 1.95 / count**0.5  # 0.1 %
    for other in (draws(seed + 1, 5, 0), draws(seed, 6, 0), draws(seed, 5, rows), np.roll(drawn, 1, 1)):
        assert abs((drawn * other).mean()) < 5 / count**0.5
