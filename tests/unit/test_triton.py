"""The Triton kernel in Triton's interpreter: what it computes, without a GPU; the compiled one is checked in tests.gpu.
And how the tables that it reads are brought up to date."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchclamp.kernels import cuda, relaunch
from patchclamp.plan import ProgramTable
from patchclamp.runtime.cuda_step import DEPTH
from tests.reference import cuda_on_cpu
from tests.reference.compiled import resources


def test_triton_equals_the_torch_kernel_bit_for_bit():
    asked = [sys.executable, "-W", "ignore", "-m", "tests.reference.triton", "--rounds", "4", "--seed", "1"]
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
        "sampled rows of drafts",
        "words put in place",
        "stored",
        "products",
        "attention scores float32",
        "removed keys float32",
    ):
        assert compared.get(what, 0) > 0, compared


class Launched:
    """A compiled kernel that notes what its launcher is given, and by which way."""

    function, packed_metadata = "function", "about"

    def __init__(self, launcher: type) -> None:
        self.run, self.told = launcher(), []
        self.run.told = self.told

    def __getitem__(self, grid):
        return lambda *args: self.told.append(("kernel", grid, args))


class Old:
    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        about, *hooks, kernel_args = args[0], *args[1:4], args[4:]
        self.told.append(("launcher", (gridX, gridY, gridZ, stream, function, about, *hooks), kernel_args))


class New:
    def __call__(self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
                 launch_exit_hook, *args):  # fmt: skip
        hooks = launch_metadata, launch_enter_hook, launch_exit_hook
        self.told.append(("launcher", (gridX, gridY, gridZ, stream, function, kernel_metadata, *hooks), args))


class Unknown:
    def __call__(self, gridX, gridY, gridZ, stream, function, something, *args):
        raise AssertionError("a launcher that is not known is not called")


@pytest.mark.parametrize("launcher", [Old, New, Unknown])
def test_a_kernel_is_launched_again_with_the_same_arguments_by_any_launcher(monkeypatch, launcher):
    monkeypatch.setattr(relaunch.torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    kernel = Launched(launcher)
    again, gone = relaunch.relauncher(kernel, (11, 12), ("yes", "no"), 2), weakref.ref(kernel)
    again(5, 1, 2, 3)
    args = (11, 12, 1, 2, 3, "yes", "no")
    if launcher is Unknown:
        assert kernel.told == [("kernel", (5, 1, 1), args)]
    else:
        assert kernel.told == [("launcher", (5, 1, 1, 72, "function", "about", None, None, None), args)]
    del kernel
    assert gone() is not None, "the kernel is held, so that it is not unloaded"


@pytest.mark.parametrize(("width", "dtype", "pair", "capability", "most", "stack"), [
    (1024, "bf16", True, 90, 105, 0), (4096, "bf16", True, 90, 128, 56), (4096, "bf16", False, 90, 128, 40),
    (12_288, "bf16", True, 90, 64, 104), (5120, "fp16", False, 80, 255, 0),
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
    rng, tables = np.random.default_rng(seed), cuda_on_cpu.tables(ProgramTable(4, 3, 60_000), 64, 16)
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
