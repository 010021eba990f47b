"""Engines are made once and shared; stock vLLM runs in a process of its own, with no plugin in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import patchclamp as pc

VLLM = {"block_size": 32, "max_model_len": 512, "max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 28}
EMULATE = {"inductor_compile_config": {"emulate_precision_casts": True}}
PROMPTS = (
    "The capital of France is",
    "When John and Mary went to the store, John gave a drink to",
    "Water boils at a temperature of one hundred degrees, and it freezes at a temperature of",
)


class Engines:
    """`get("vllm", "float32")` is an `LM`, the same one each time."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._made: dict[str, pc.LM] = {}

    def get(self, engine: str, dtype: str, compiled: bool = False, **options) -> pc.LM:
        if engine == "vllm":
            options = {**VLLM, "enforce_eager": not compiled, **options}
        if compiled and dtype == "bfloat16":
            options["compilation_config"] = EMULATE
        key = json.dumps([engine, dtype, compiled, options], sort_keys=True)
        if key not in self._made:
            self._made[key] = pc.LM(self.folder, engine=engine, dtype=dtype, **options)
        return self._made[key]

    def close(self) -> None:
        for lm in self._made.values():
            lm.close()


@pytest.fixture(scope="session")
def engines(smollm2):
    made = Engines(str(smollm2))
    yield made
    made.close()


@pytest.fixture(scope="session")
def stock(smollm2):
    """`stock("float32", compiled=False)` gives tokens and logprobs of stock vLLM without the plugin, for `PROMPTS`."""
    done: dict[tuple, list] = {}

    def run(dtype: str, compiled: bool = False, emulate: bool = False, max_tokens: int = 8) -> list:
        key = (dtype, compiled, emulate, max_tokens)
        if key not in done:
            options = {**VLLM, "dtype": dtype, "enforce_eager": not compiled}
            if emulate:
                options["compilation_config"] = EMULATE
            asked = {"model": str(smollm2), "options": options, "prompts": PROMPTS, "max_tokens": max_tokens}
            environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            script = Path(__file__).with_name("stock.py")
            made = subprocess.run(
                [sys.executable, str(script), json.dumps(asked)], env=environment, capture_output=True, text=True
            )
            assert made.returncode == 0, made.stderr[-4000:]
            done[key] = json.loads(made.stdout.splitlines()[-1])
        return done[key]

    return run
