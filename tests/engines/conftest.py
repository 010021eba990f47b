"""Engines are made once and shared by the files of a group; stock vLLM runs in a process of its own, without the plugin."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import patchclamp as pc
from patchclamp.engines.vllm import sync_engine

from ..conftest import ends_of, group_of, settle, thaw
from ..models import with_weights
from ..reference.hooks import PlainModel
from ..without_torchvision import stand_ins

VLLM = {"block_size": 32, "max_model_len": 512, "max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 26}
CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": False}
EMULATE = {"inductor_compile_config": {"emulate_precision_casts": True}}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 512}  # fmt: skip
SHALLOW = 8  # layers of `shortened`
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
        self._common: set[str] = set()

    def get(self, engine: str, dtype: str, compiled: bool = False, **options) -> pc.LM:
        common = dtype == "float32" and (not options or options == CHUNKED)
        if engine == "vllm":
            options = {**VLLM, "enforce_eager": not compiled, **options}
        if compiled and dtype == "bfloat16":
            options["compilation_config"] = EMULATE
        key = json.dumps([engine, dtype, compiled, options], sort_keys=True)
        if common:
            self._common.add(key)
        if key not in self._made:
            self._made[key] = pc.LM(self.folder, engine=engine, dtype=dtype, **options)
            settle()
        return self._made[key]

    def close(self, rare: bool = False) -> None:
        """Closes them; `rare`: but for those that most files use, in fp32 and without options or in chunks."""
        for key in [key for key in self._made if not rare or key not in self._common]:
            self._made.pop(key).close()


_made: list[Engines] = []


@pytest.fixture(scope="session")
def engines(smollm2):
    yield from open_engines(str(smollm2))


@pytest.fixture(scope="session")
def shallow(shortened):
    """`engines` of `SHALLOW` of the model's layers, for what does not depend on depth: a third of the time a step."""
    yield from open_engines(shortened)


@pytest.fixture(scope="session")
def narrow(narrowed):
    """`shallow` of a third of the width, for what does not depend on the model: a third of the time again."""
    yield from open_engines(narrowed)


@pytest.fixture(scope="module")
def plain(smollm2):
    """The real model on Transformers, with hooks alone."""
    return PlainModel(str(smollm2))


def open_engines(folder: str) -> Iterator[Engines]:
    made = Engines(folder)
    _made.append(made)
    yield made
    _made.remove(made)
    made.close()


def room_of(lm: pc.LM) -> tuple[Any, ...]:
    """What an engine has to lease: free blocks, slots, and records; and its counts, of leases and others."""
    admission = lm.engine._engine.engine_core.engine_core.patchclamp.admission
    room, status = admission._room, lm.engine.status()
    names = ("programs", "records", "pinned", "leases", "waiting")
    return admission.pool.free, len(room._cell_slots), room._records.free, *(status[name] for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """Engines that one file alone uses end with it, and the others with their group: each holds half a gigabyte."""
    yield
    if nextitem is None or nextitem.path != item.path:
        same_group = nextitem is not None and group_of(item.nodeid) == group_of(nextitem.nodeid)
        for made in _made:
            made.close(rare=same_group)
        if not same_group:
            thaw()
        settle()
        if not same_group:
            # an engine of a caller's LLM is left until that is collected, as the test's own arguments are
            left = [engine.model.name for engine in sync_engine.alive if type(engine) is sync_engine.VllmEngine]
            assert not left, f"open after the last test of its group: {left}"
        if sys.platform == "linux":
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed goes back


@pytest.fixture(scope="session")
def shortest(smollm2, tmp_path_factory) -> str:
    """The first and the last layer of SmolLM2, for processes that compile it anew each time."""
    return ends_of(smollm2, tmp_path_factory.mktemp("shortest"), 2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """A Llama of three layers with random weights and no tokenizer: thousands of requests take seconds."""
    return with_weights(tmp_path_factory.mktemp("tiny"), "8b", 3, **TINY)


@pytest.fixture(scope="module")
def inspected_here():
    """vLLM looks at a model class it has not seen before in a process of its own, so as not to start CUDA: seven seconds
    each, and here is no CUDA."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@contextlib.contextmanager
def without_amx() -> Iterator[None]:
    """With AMX, stock vLLM has neither latent attention nor int8 products in fp32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        yield


@pytest.fixture(scope="module")
def _torchvision():
    """Nothing in place of torchvision, for models that read images."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_ins().items():
            patch.setitem(sys.modules, name, module)
        yield


@pytest.fixture(scope="session")
def stock(narrowed):
    """`stock("float32")` is what `PROMPTS` give on stock vLLM without the plugin: tokens and logprobs. One engine after the
    other, in a process that starts before the test and is waited for when the test calls this."""
    dtypes = ["float32", "bfloat16"]
    process = _start("stock.py", [{"model": narrowed, "dtype": dtype, "enforce_eager": True} for dtype in dtypes])
    answers = functools.cache(lambda: dict(zip(dtypes, _finish(process), strict=True)))
    yield lambda dtype: answers()[dtype]
    process.kill()


@pytest.fixture(scope="session")
def on_stock():
    """`on_stock(engines, prompts)` is what prompts give on stock vLLM, as with `stock`, of other models."""
    return lambda engines, prompts: _finish(_start("stock.py", engines, prompts))


@pytest.fixture(scope="session")
def compiled(shortest):
    """`compiled("float32")` is that of compiled engines, and the same of patchclamp without a program, in a process too."""
    dtypes = {"bfloat16": {"compilation_config": EMULATE}, "float32": {}}
    engines = [{"model": shortest, "dtype": dtype, **options} for dtype, options in dtypes.items()]
    processes = [_start(script, engines) for script in ("stock.py", "ours.py")]
    both = [_finish(process) for process in processes]
    return dict(zip(dtypes, zip(*both, strict=True), strict=True)).__getitem__


def _start(script: str, engines: list[dict], prompts: Sequence = PROMPTS) -> subprocess.Popen:
    asked = {"engines": [VLLM | engine for engine in engines], "prompts": prompts, "max_tokens": 8}
    command = [sys.executable, str(Path(__file__).with_name(script)), json.dumps(asked)]
    plugins = {"VLLM_PLUGINS": ""} if script == "stock.py" else {}
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **plugins}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen) -> list:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])
