"""The Triton kernel in Triton's interpreter: what it computes, without a GPU; the compiled one is checked in tests.gpu.
And how the tables that it reads are brought up to date."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchclamp.kernels import cuda
from patchclamp.plan import ProgramTable
from patchclamp.runtime.device import DEPTH
from tests.reference import cuda_on_cpu
from tests.reference.compiled import resources


def test_triton_equals_the_torch_kernel_bit_for_bit():
    asked = [sys.executable, "-W", "ignore", "-m", "tests.reference.triton", "--rounds", "24"]
    made = subprocess.run(asked, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    compared = json.loads(made.stdout)
    for what in (
        "hidden float32",
        "residual float32",
        "hidden float16",
        "captures float32",
        "rows not finite",
        "calls of code",
        "sums float32",
    ):
        assert compared.get(what, 0) > 0, compared


@pytest.mark.parametrize(("width", "dtype", "pair", "capability", "most", "stack"), [
    (1024, "bf16", True, 90, 96, 0), (4096, "bf16", True, 90, 128, 32), (4096, "bf16", False, 90, 128, 0),
    (12_288, "bf16", True, 90, 64, 64), (5120, "fp16", False, 80, 255, 0),
])  # fmt: skip
def test_triton_compiles_for_gpus_and_hardly_spills(width, dtype, pair, capability, most, stack):
    used = resources(width, dtype, pair, False, capability)
    assert 0 < used["REG"] <= most
    assert used["STACK"] <= stack


def test_triton_compiles_for_rows_in_several_passes():
    assert cuda.launched(128_256, False, True)["PASSES"] > 1
    assert resources(128_256, "fp32", False, True, 90)["REG"] <= 255


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 90_000), min_size=1, max_size=8), seed=st.integers(0, 1 << 30))
def test_what_changed_is_put_in_place_and_nothing_else(monkeypatch, sizes, seed):
    """Segments of any size, larger than what staging begins with too."""
    cuda_on_cpu.stub(monkeypatch)
    rng, tables = np.random.default_rng(seed), cuda_on_cpu.Tables(ProgramTable(4, 3, 60_000), 64, 16, np.zeros(64, int))
    words = tables._words.numpy()
    words[:] = rng.integers(0, 1 << 30, len(words))
    expected, room = words.copy(), len(words) // len(sizes)
    for _ in range(DEPTH + 1):
        segments = []
        for i, size in enumerate(sizes):
            size = min(size, room)
            begin = i * room + int(rng.integers(0, room - size + 1))
            segments.append((begin, rng.integers(0, 1 << 30, size).astype(np.int32)))
            expected[begin : begin + size] = segments[-1][1]
        tables._send(segments)
        assert np.array_equal(words, expected)
