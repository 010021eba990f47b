"""The Triton kernel in Triton's interpreter: what it computes, without a GPU. The compiled one is checked in tests.gpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_triton_equals_the_torch_kernel_bit_for_bit():
    asked = [sys.executable, "-W", "ignore", "-m", "tests.reference.triton", "--rounds", "24"]
    made = subprocess.run(asked, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    compared = json.loads(made.stdout)
    for what in ("hidden float32", "residual float32", "hidden float16", "captures float32", "rows not finite"):
        assert compared.get(what, 0) > 0, compared
