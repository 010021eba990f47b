"""What is called around a runner's steps: everything in steps with programs, and in others nothing but `before` and the
context that they run in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from patchclamp.engines.vllm import shared, worker
from patchclamp.engines.vllm.compat import graphs as compat_graphs
from patchclamp.engines.vllm.compat import runner as compat
from patchclamp.errors import EngineError
from patchclamp.runtime import Limits, Runtime, op
from patchclamp.sites import SiteMap, Sizes
from patchclamp.sites.tables import LLAMA
from tests.reference import cuda_on_cpu

PREPARED = SimpleNamespace(
    num_reqs=1, query_start_loc_np=np.zeros(2), num_computed_tokens_np=np.zeros(2), req_ids=["r"],
    num_scheduled_tokens=np.ones(1),
)  # fmt: skip
WHOLE = ["before", "at work", "planned", "after"]
IDLE = ["before", "at rest"]


class Step(NamedTuple):
    """A step without drafted tokens; `active` is what `before` is to say of it."""

    active: bool
    scheduled_spec_decode_tokens: dict[str, list[int]] = {}  # noqa: RUF012


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
    def before(step: Step) -> tuple[bool, bool]:
        called.append("before")
        return step.active, True

    noted = [lambda *args, name=name: called.append(name) for name in ("planned", "logits", "after")]

    @contextmanager
    def context(name: str) -> Iterator[None]:
        called.append(name)
        yield

    return compat.Hooks(before, *noted, lambda: context("at work"), lambda: context("at rest"))


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
    for active, expected in ((True, WHOLE), (False, IDLE), (True, WHOLE)):
        called.clear()
        assert v2.execute_model(Step(active)) == "executed"
        assert v2.sample_tokens(None) == "sampled"
        assert called == expected


def test_v2_calls_nothing_for_a_dummy_step(v2, called):
    v2.execute_model(Step(True))
    called.clear()
    assert v2.execute_model(Step(True), dummy_run=True) == "dummy"
    assert called == []


def test_v2_keeps_nothing_of_a_step_that_failed(v2, called):
    """vLLM asks for samples all the same, and raises the error after that."""
    v2.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        v2.execute_model(Step(True))
    assert v2.sample_tokens(None) == "sampled"
    assert called == ["before", "at work", "planned"]


def test_v1_calls_everything_in_steps_with_programs_alone(v1, called):
    for active, expected in ((True, WHOLE), (False, IDLE), (True, WHOLE)):
        called.clear()
        assert v1.execute_model(Step(active)) == "executed"
        assert called == expected


def test_v1_keeps_nothing_of_a_step_that_failed(v1, called):
    v1.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        v1.execute_model(Step(True))
    assert called == ["before", "at work", "planned"]


def test_v1_replays_graphs_without_taps_in_dummy_steps(hooks, monkeypatch):
    """Whatever the last step was: the tables still say whose its rows were."""
    monkeypatch.setattr(compat, "record_variants_v1", lambda runner, graphs: None)
    used: list[bool] = []
    runner, graphs = V1(), SimpleNamespace(use=lambda active: used.append(active), has=lambda mode, tokens: True)
    runner._dummy_run = lambda: used[-1]
    compat._hook_v1(runner, hooks, graphs)  # type: ignore[arg-type]
    runner.execute_model(Step(True))
    assert used == [True]
    assert runner._dummy_run() is False


def a_worker(uniform: bool) -> Any:
    """A worker's bookkeeping without programs, whose steps are what `_take_in` says."""
    attached: Any = worker.Attached.__new__(worker.Attached)
    runtime = Runtime(SiteMap(LLAMA, Sizes(2, 4, 6)), Limits(max_programs=4, max_records=64, bank_bytes=1 << 12))
    vars(attached).update(kind="v1", runtime=runtime, _sender=shared.Sender(), _uniform=uniform, _compiled=True, _steps=[0, 0], _preemptions=0,
                          _graphs=None, _take_in=lambda output: (output.active, True))  # fmt: skip
    return attached


@pytest.mark.parametrize(("uniform", "counts"), [(True, (5, 0)), (False, (2, 3))])
def test_idle_steps_run_code_with_taps_if_numerics_are_uniform_alone(uniform, counts):
    attached = a_worker(uniform)
    steps = [(False, 5), (True, 1), (False, 1), (False, 0), (True, 1), (False, 2)]  # one of them computes nothing
    for active, tokens in steps:
        output = SimpleNamespace(active=active, num_scheduled_tokens={}, total_num_scheduled_tokens=tokens)
        assert attached.before(output) == (active, True)
    status = attached.do_status()
    assert (status["steps_with_taps"], status["steps_without_taps"]) == counts


@pytest.mark.parametrize("uniform", [True, False])
def test_taps_of_idle_steps_do_nothing_and_take_the_short_way_where_there_are_any(uniform):
    attached, hidden = a_worker(uniform), torch.zeros(2, 3)
    attached.runtime.apply = lambda *args: pytest.fail("a tap acted in an idle step")
    with attached.at_rest():
        tap: Any = torch.ops.patchclamp.site.default
        assert (tap is op.acting) == uniform
        tap(hidden, None, 1)
    assert torch.ops.patchclamp.site.default is not op.acting
    attached.runtime.apply = lambda *args: hidden.fill_(1.0)
    with attached.at_work():
        op.site(hidden, None, 1)
    assert hidden.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(("numerics", "lacks"), [("stock", True), ("uniform", False)])
def test_a_model_that_was_compiled_elsewhere_has_no_code_without_taps_and_only_stock_numerics_need_it(numerics, lacks):
    compilation = SimpleNamespace(mode=SimpleNamespace(name="VLLM_COMPILE"))
    ours = {"patchclamp": {"numerics": numerics}}
    config = SimpleNamespace(additional_config=ours, compilation_config=compilation)
    assert compat_graphs.lacks_idle_variant(config) is lacks


class Mode(NamedTuple):
    """Of CUDA graphs."""

    name: str


MIXED, DECODES = Mode("PIECEWISE"), Mode("FULL")


def a_store(full: dict[int, object], pieces: dict[int, object]) -> Any:
    """Full graphs as a V2 runner's manager has them, by tokens, and those of one piece."""
    wrapper = SimpleNamespace(runtime_mode=MIXED)
    entries = {Desc(tokens): SimpleNamespace(cudagraph=graph) for tokens, graph in pieces.items()}
    return {Desc(tokens, DECODES): graph for tokens, graph in full.items()}, [(wrapper, entries)]


class Desc(NamedTuple):
    """What a graph is recorded for."""

    num_tokens: int
    cg_mode: Any = None


def test_a_size_of_step_without_a_graph_with_taps_is_an_error():
    keys = {(mode, tokens) for mode in (MIXED, DECODES) for tokens in (4, 8)} - {(DECODES, 8)}
    compat_graphs._check_recorded(a_store({4: "graph"}, {4: "graph", 8: "graph"}), keys)
    for pieces in ({}, {4: "graph"}, {4: "graph", 8: None}):
        with pytest.raises(
            EngineError, match=r"no graph with taps of PIECEWISE steps of [48] tokens.*enforce_eager=True"
        ):
            compat_graphs._check_recorded(a_store({4: "graph"}, pieces), keys)
    with pytest.raises(EngineError, match="of FULL steps of 4 tokens"):
        compat_graphs._check_recorded(a_store({}, {4: "graph", 8: "graph"}), keys)


@pytest.mark.parametrize(("kept", "ring", "least"), [(1 << 12, 1 << 14, 1 << 12), (1 << 12, 1 << 12, 1 << 11)])
def test_a_worker_on_a_gpu_counts_what_lies_on_the_device(monkeypatch, kept, ring, least):
    """And a step with a graph captures no more than half of what leaves at once."""
    cuda_on_cpu.stub(monkeypatch)
    limits = Limits(max_programs=4, max_records=64, bank_bytes=1 << 12, kept_bytes=kept, ring_bytes=ring)
    attached: Any = worker.Attached.__new__(worker.Attached)
    attached.runtime, attached.kind = Runtime(SiteMap(LLAMA, Sizes(2, 4, 6)), limits), "v2"
    attached._config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1, data_parallel_size_local=1))
    rows = SimpleNamespace(positions=torch.zeros(64, dtype=torch.int64), input_ids=torch.zeros(64, dtype=torch.int32))
    runner = SimpleNamespace(max_num_tokens=64, max_num_reqs=16, input_buffers=rows, model_memory_usage=1000,
                             vllm_config=SimpleNamespace(speculative_config=None))  # fmt: skip
    attached._on_cuda(runner, limits)
    step = attached.runtime.step
    assert runner.model_memory_usage == 1000 + limits.bank_bytes + step.bytes
    assert limits.ring_bytes < step.bytes < limits.ring_bytes + (1 << 18)
    assert attached._most_kept == step.max_graph_bytes == least
    assert step.tables.position_of_row.shape == (64,)
    assert attached._graphs.has(None, 1) is False
