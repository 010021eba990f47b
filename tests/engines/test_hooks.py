"""What is called around a runner's steps: everything in steps with programs, nothing but `before` in others."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from patchclamp.engines.vllm import worker
from patchclamp.engines.vllm.compat import runner as compat
from patchclamp.runtime import Limits, Runtime
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import LLAMA
from tests.reference import cuda_on_cpu

PREPARED = SimpleNamespace(
    num_reqs=1, query_start_loc_np=np.zeros(2), num_computed_tokens_np=np.zeros(2), req_ids=["r"],
    num_scheduled_tokens=np.ones(1),
)  # fmt: skip
WHOLE = ["before", "planned", "after"]


class V2:
    """A runner that notes nothing and computes nothing, or raises."""

    fails = False

    def execute_model(self, step: Any, dummy_run: bool = False) -> str:
        if dummy_run:
            return "dummy"
        self.prepare_inputs(step)
        if self.fails:
            raise RuntimeError("out of memory")
        return "executed"

    def prepare_inputs(self, step: Any) -> Any:
        return PREPARED

    def sample_tokens(self, grammar: Any) -> str:
        return "sampled"


class V1:
    fails = False
    input_batch = SimpleNamespace(req_ids=["r"], num_computed_tokens_cpu=np.zeros(4))

    def execute_model(self, step: Any) -> str:
        self._prepare_inputs(step, np.ones(1, np.int32))
        if self.fails:
            raise RuntimeError("out of memory")
        return "executed"

    def _prepare_inputs(self, step: Any, scheduled: np.ndarray) -> str:
        return "prepared"


@pytest.fixture
def called() -> list[str]:
    return []


@pytest.fixture
def hooks(called) -> compat.Hooks:
    """A step is what `before` is to say of it."""

    def before(step: bool) -> tuple[bool, bool]:
        called.append("before")
        return step, True

    noted = [lambda *args, name=name: called.append(name) for name in ("planned", "logits", "after")]
    return compat.Hooks(before, *noted, nullcontext)


@pytest.fixture
def v2(monkeypatch, hooks) -> Any:
    monkeypatch.setattr(compat, "record_variants", lambda runner, graphs: None)
    monkeypatch.setattr(compat, "on_dispatch", lambda: None)
    runner, graphs = V2(), SimpleNamespace(use=lambda active: None, has=lambda mode, tokens: True)
    compat._hook_v2(runner, hooks, graphs)  # type: ignore[arg-type]
    return runner


@pytest.fixture
def v1(hooks) -> Any:
    runner = V1()
    compat._hook_v1(runner, hooks, None)
    return runner


def test_v2_calls_everything_in_steps_with_programs_alone(v2, called):
    for active, expected in ((True, WHOLE), (False, ["before"]), (True, WHOLE)):
        called.clear()
        assert v2.execute_model(active) == "executed"
        assert v2.sample_tokens(None) == "sampled"
        assert called == expected


def test_v2_calls_nothing_for_a_dummy_step(v2, called):
    v2.execute_model(True)
    called.clear()
    assert v2.execute_model(True, dummy_run=True) == "dummy"
    assert called == []


def test_v2_keeps_nothing_of_a_step_that_failed(v2, called):
    """vLLM asks for samples all the same, and raises the error after that."""
    v2.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        v2.execute_model(True)
    assert v2.sample_tokens(None) == "sampled"
    assert called == ["before", "planned"]


def test_v1_calls_everything_in_steps_with_programs_alone(v1, called):
    for active, expected in ((True, WHOLE), (False, ["before"]), (True, WHOLE)):
        called.clear()
        assert v1.execute_model(active) == "executed"
        assert called == expected


def test_v1_keeps_nothing_of_a_step_that_failed(v1, called):
    v1.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        v1.execute_model(True)
    assert called == ["before", "planned"]


@pytest.mark.parametrize(("kept", "ring", "least"), [(1 << 12, 1 << 14, 1 << 12), (1 << 12, 1 << 12, 1 << 11)])
def test_a_worker_on_a_gpu_counts_what_lies_on_the_device(monkeypatch, kept, ring, least):
    """And a step with a graph captures no more than half of what leaves at once."""
    cuda_on_cpu.stub(monkeypatch)
    limits = Limits(max_programs=4, max_records=64, bank_bytes=1 << 12, kept_bytes=kept, ring_bytes=ring)
    attached: Any = worker.Attached.__new__(worker.Attached)
    attached.runtime, attached.kind = Runtime(SiteMap(LLAMA, Sizes(2, 4, 6)), limits), "v2"
    rows = SimpleNamespace(positions=torch.zeros(64, dtype=torch.int64), input_ids=torch.zeros(64, dtype=torch.int32))
    runner = SimpleNamespace(max_num_tokens=64, max_num_reqs=16, input_buffers=rows, model_memory_usage=1000)
    attached._on_cuda(runner, limits)
    step = attached.runtime.step
    assert runner.model_memory_usage == 1000 + limits.bank_bytes + step.bytes
    assert limits.ring_bytes < step.bytes < limits.ring_bytes + (1 << 18)
    assert attached._most_kept == step.max_graph_bytes == least
    assert step.tables.position_of_row.shape == (64,)
    assert attached._graphs.has(None, 1) is False
