"""The Triton kernel in Triton's interpreter: what it computes, without a GPU. The compiled one is checked in tests.gpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st


def test_triton_equals_the_torch_kernel_bit_for_bit():
    asked = [sys.executable, "-W", "ignore", "-m", "tests.reference.triton", "--rounds", "24"]
    made = subprocess.run(asked, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    compared = json.loads(made.stdout)
    for what in ("hidden float32", "residual float32", "hidden float16", "captures float32", "rows not finite"):
        assert compared.get(what, 0) > 0, compared


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.integers(0, 1 << 30))
def test_what_changed_is_packed_in_blocks_that_put_it_in_place(sizes, seed):
    from patchclamp.kernels.cuda import SCATTER_BLOCK
    from patchclamp.runtime.device import blocks_of, pack

    rng = np.random.default_rng(seed)
    begins = np.cumsum([0, *sizes[:-1]]) + 7 * np.arange(len(sizes))
    segments = [(int(b), rng.integers(0, 1 << 30, n).astype(np.int32)) for b, n in zip(begins, sizes, strict=True)]
    blocks, total = blocks_of(segments)
    sent, words = np.full(total + 5, -1, np.int32), np.full(begins[-1] + sizes[-1] + 5, -1)
    pack(segments, sent, blocks)
    expected = words.copy()
    for to, given_words in segments:
        expected[to : to + len(given_words)] = given_words
    for to, source, count in sent[: 3 * blocks].reshape(-1, 3):  # what the scatter kernel does
        assert 0 < count <= SCATTER_BLOCK
        assert source >= 3 * blocks
        words[to : to + count] = sent[source : source + count]
    assert words.tolist() == expected.tolist()
    assert (sent[total:] == -1).all()
