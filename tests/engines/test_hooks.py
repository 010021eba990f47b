"""What is called around a runner's steps: everything in steps with programs, and in others nothing but `before` and the
context that they run in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm.v1.sample.sampler import Sampler

from patchclamp.engines.vllm import shared, worker
from patchclamp.engines.vllm.compat import runner as compat
from patchclamp.engines.vllm.compat import variants as compat_graphs
from patchclamp.errors import EngineError
from patchclamp.plan.bound import MAX_RANK
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
    vllm_config = SimpleNamespace(speculative_config=None)

    def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> str:
        if dummy_run:
            return "dummy"
        self.prepare_inputs(scheduler_output)
        if self.fails:
            raise RuntimeError("out of memory")
        return "executed"

    def prepare_inputs(self, scheduler_output: Any) -> Any:
        return PREPARED

    def sample_tokens(self, grammar_output: Any) -> str:
        return "sampled"


class V1:
    fails = False
    vllm_config = SimpleNamespace(speculative_config=None)
    input_batch = SimpleNamespace(req_ids=["r"], num_computed_tokens_cpu=np.zeros(4))

    def __init__(self) -> None:
        self.sampler = Sampler()

    def execute_model(self, scheduler_output: Any) -> str:
        self._prepare_inputs(scheduler_output, np.ones(1, np.int32))
        if self.fails:
            raise RuntimeError("out of memory")
        return "executed"

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> str:
        return "prepared"


@pytest.fixture
def called() -> list[str]:
    return []


@pytest.fixture
def hooks(called) -> compat.Hooks:
    def before(scheduler_output: Step) -> tuple[bool, bool]:
        called.append("before")
        return scheduler_output.active, True

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


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("kind", [V1, V2])
def test_a_model_that_drafts_replays_graphs_without_taps(hooks, monkeypatch, kind, drafts):
    """It runs while tokens are sampled, after the step; its graphs are exchanged with the model's."""
    for name in ("record_variants", "record_variants_v1", "_profile_variants"):
        monkeypatch.setattr(compat, name, lambda runner, graphs: None)
    monkeypatch.setattr(compat, "on_dispatch", lambda: None)
    used: list[bool] = []
    runner, graphs = kind(), SimpleNamespace(use=lambda active: used.append(active), has=lambda mode, tokens: True)
    runner.vllm_config = SimpleNamespace(speculative_config=object() if drafts else None)
    drafted: list[bool] = []
    runner.sample_tokens = lambda grammar_output: drafted.append(used[-1])
    (compat._hook_v1 if kind is V1 else compat._hook_v2)(runner, hooks, graphs)  # type: ignore[arg-type]
    for active in (True, False, True):
        runner.execute_model(Step(active))
        runner.sample_tokens(None)
    assert drafted == ([False] * 3 if drafts else [True, False, True])


def a_worker(uniform: bool) -> Any:
    """A worker's bookkeeping without programs, whose steps are what `_take_in` says."""
    attached: Any = worker.Attached.__new__(worker.Attached)
    runtime = Runtime(SiteMap(LLAMA, Sizes(2, 4, 6)), Limits(max_programs=4, max_records=64, bank_bytes=1 << 12))
    vars(attached).update(kind="v1", runtime=runtime, _sender=shared.CaptureSender(), _uniform=uniform, _compiled=True, _steps=[0, 0], _checks=[0, 0], _preemptions=0,
                          _graphs=None, _take_in=lambda output: (output.active, True))  # fmt: skip
    return attached


def test_steps_that_are_scheduled_before_drafts_are_checked_are_planned_where_the_device_says_they_begin():
    attached = a_worker(uniform=False)
    computed = SimpleNamespace(gpu=torch.tensor([0, 9, 7, 0, 5], dtype=torch.int32))
    states = SimpleNamespace(num_computed_tokens=computed, req_id_to_index={"late": 1, "edited": 2, "back": 4})
    running = SimpleNamespace(
        req_ids=["edited", "back", "late"], resumed_req_ids={"back"}, num_computed_tokens=[10, 3, 12]
    )
    output = SimpleNamespace(
        scheduled_cached_reqs=running, scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=16)],
        num_scheduled_tokens={"edited": 4, "back": 2, "late": 4, "new": 8}, total_num_scheduled_tokens=18,
        finished_req_ids=set(), preempted_req_ids=None,
    )  # fmt: skip
    vars(attached).update(_runner=SimpleNamespace(req_states=states), _most_ahead=6, _begins={}, _most_kept=1 << 20, _settled=set(),
                          _graphs=None)  # fmt: skip
    del attached._take_in
    attached.runtime._stop_of = {"edited": 8}  # ten positions, were all drafts right: too late for its program
    attached.runtime.table = SimpleNamespace(version=0)
    attached.runtime._admitted = {"edited": SimpleNamespace(token_bytes=0)}
    planned = []
    attached.runtime.begin_step = lambda requests, row, position, *others: planned.append((requests, position.tolist()))
    assert attached._look(output)[0] == (True, True)
    optimistic = np.array([10, 12, 16, 3])
    attached.planned(["edited", "late", "new", "back"], np.arange(4), optimistic, np.ones(4), None)
    assert planned == [(["edited", "late", "new", "back"], [7, 9, 16, 3])]
    computed.gpu[2] = 8
    assert attached._look(output)[0] == (False, True)
    running.num_computed_tokens[0], computed.gpu = 14, None  # it is past its program, however many drafts were wrong
    assert attached._look(output)[0] == (False, True)


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


class Desc(NamedTuple):
    """What a graph is recorded for."""

    num_tokens: int
    cg_mode: Mode


MIXED, DECODES = Mode("PIECEWISE"), Mode("FULL")


class Piece:
    """A wrapper of a compiled part's graphs, as vLLM's. `lazy`: it records none."""

    runtime_mode = MIXED

    def __init__(self, engine: Any, lazy: bool = False) -> None:
        self.vllm_config, self.lazy = engine, lazy
        self.concrete_cudagraph_entries: dict[Desc, Any] = {}

    def run(self, desc: Desc) -> None:
        if not self.lazy:
            self.concrete_cudagraph_entries.setdefault(desc, SimpleNamespace(cudagraph=object()))


class Manager:
    """A V2 runner's: it has some wrappers record mixed steps, and records whole decode steps itself. `tapped`: the
    wrappers of the code with taps, where that is other code."""

    def __init__(self, engine: Any, pieces: list[Piece], whole: bool = True, tapped: list[Piece] | None = None) -> None:
        self.vllm_config, self.pieces, self.whole = engine, pieces, whole
        self.tapped = pieces if tapped is None else tapped
        self.graphs: dict[Desc, Any] = {}
        self._capture_descs = {mode: [Desc(tokens, mode) for tokens in (4, 8)] for mode in (MIXED, DECODES)}
        self.rounds = 0

    def capture(self) -> None:
        self.rounds += 1
        for piece in self.tapped if compat_graphs._step.active else self.pieces:
            for desc in self._capture_descs[MIXED]:
                piece.run(desc)
        if self.whole or self.rounds == 1:
            self.graphs |= {desc: object() for desc in self._capture_descs[DECODES]}


@pytest.fixture
def pieces_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the wrappers that vLLM has, on a machine without a GPU."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    known: list[Piece] = []
    monkeypatch.setattr(CUDAGraphWrapper, "_all_instances", known)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30))
    return lambda *owners, **how: known.extend(Piece(owner, **how) for owner in owners) or known


def an_engine(numerics: str = "uniform") -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(), parallel_config=SimpleNamespace(tensor_parallel_size=1),
        additional_config={"patchclamp": {"numerics": numerics}},
    )  # fmt: skip


def recording(sizes: tuple[int, ...] | None = None) -> compat_graphs.Graphs:
    return compat_graphs.Graphs(sizes, nullcontext, nullcontext, lambda graph: ("tapped", graph), lambda: None)


def test_both_variants_of_every_graph_are_recorded(pieces_of):
    """Of a part that was compiled with a copy of the engine's configuration, too; other engines' are left alone."""
    engine, other = an_engine(), an_engine()
    known = pieces_of(engine, SimpleNamespace(**vars(engine)), other)
    manager, graphs = Manager(engine, known[:2]), recording()
    graphs.record(manager, manager.capture, profile=False)
    idle, whole = [dict(piece.concrete_cudagraph_entries) for piece in known], dict(manager.graphs)
    assert [len(entries) for entries in idle] == [2, 2, 0]
    graphs.use(True)
    for piece, entries in zip(known[:2], idle, strict=False):
        assert piece.concrete_cudagraph_entries.keys() == entries.keys()
        assert all(piece.concrete_cudagraph_entries[desc] is not entries[desc] for desc in entries)
    assert manager.graphs == {desc: ("tapped", graph[1]) for desc, graph in manager.graphs.items()} != whole
    graphs.use(False)
    assert [piece.concrete_cudagraph_entries for piece in known] == idle
    assert graphs.has(MIXED, 4)
    assert graphs.active == graphs.idle == 2


def test_a_graph_that_has_none_with_taps_beside_it_is_an_error(pieces_of):
    """Its steps would run unedited: a part of the model that is not known to be the engine's, or one that records once."""
    engine = an_engine()
    manager, graphs = Manager(engine, pieces_of(engine, an_engine())), recording()
    with pytest.raises(EngineError, match=r"PIECEWISE steps of 4 tokens.*enforce_eager=True"):
        graphs.record(manager, manager.capture, profile=False)
    manager, graphs = Manager(engine, manager.pieces[:1], whole=False), recording()
    with pytest.raises(EngineError, match="FULL steps of 4 tokens"):
        graphs.record(manager, manager.capture, profile=False)


def test_code_with_taps_that_has_wrappers_of_its_own_records_in_these(pieces_of):
    """So it is with stock numerics; the wrappers of the idle code have no graphs with taps, and are not run then."""
    engine = an_engine("stock")
    known = pieces_of(*[engine] * 4)
    manager, graphs = Manager(engine, known[:2], tapped=known[2:]), recording()
    graphs.record(manager, manager.capture, profile=False)
    assert [len(piece.concrete_cudagraph_entries) for piece in known] == [2, 2, 0, 0]
    graphs.use(True)
    assert [len(piece.concrete_cudagraph_entries) for piece in known] == [0, 0, 2, 2]
    graphs.use(False)
    assert [len(piece.concrete_cudagraph_entries) for piece in known] == [2, 2, 0, 0]


def test_code_with_taps_of_which_nothing_is_recorded_is_an_error(pieces_of):
    """With stock numerics, too: and where a wrapper that has an idle graph is not known to be the engine's."""
    engine = an_engine("stock")
    whole = pieces_of(engine)[0]
    whole.runtime_mode = DECODES  # the wrapper of the whole model is the same for both
    graphs, sizes = recording(), [Desc(4, DECODES)]
    rounds = iter([[whole], []])
    with pytest.raises(EngineError, match="FULL steps of 4 tokens"):
        graphs.record_mode(engine, DECODES, sizes, lambda descs: [piece.run(descs[0]) for piece in next(rounds)])
    known = pieces_of(engine, engine, an_engine("stock"))[1:]
    for pieces, tapped in ((known[:1], []), (known[2:], known[1:2])):
        manager, graphs = Manager(engine, pieces, tapped=tapped), recording()
        with pytest.raises(EngineError, match="PIECEWISE steps of 4 tokens"):
            graphs.record(manager, manager.capture, profile=False)


def test_sizes_of_which_vllm_records_nothing_run_the_code_that_has_taps(pieces_of):
    """As where it was compiled for whole graphs alone; and sizes that nobody wants active have no graph with taps."""
    engine = an_engine()
    manager, graphs = Manager(engine, pieces_of(engine, lazy=True)), recording()
    graphs.record(manager, manager.capture, profile=False)
    assert graphs.has(MIXED, 4)
    manager, graphs = Manager(engine, pieces_of(engine)[1:]), recording((8,))
    graphs.record(manager, manager.capture, profile=False)
    assert not graphs.has(MIXED, 4)
    assert graphs.has(MIXED, 8)
    assert graphs.has(DECODES, 8)


def test_a_v1_runner_records_both_variants_mode_by_mode(pieces_of):
    engine = an_engine()
    known, graphs = pieces_of(engine, SimpleNamespace(**vars(engine))), recording()
    sizes = [Desc(tokens, MIXED) for tokens in (4, 8)]

    def capture(descs: list[Desc], parts: list[Piece]) -> None:
        for piece in parts:
            for desc in descs:
                piece.run(desc)

    graphs.record_mode(engine, MIXED, sizes, lambda descs: capture(descs, known))
    assert graphs.has(MIXED, 8)
    assert [len(piece.concrete_cudagraph_entries) for piece in known] == [2, 2]
    later = [Desc(16, MIXED)]
    rounds = iter([known, known[:1]])  # one part records its idle graph alone
    with pytest.raises(EngineError, match="PIECEWISE steps of 16 tokens"):
        graphs.record_mode(engine, MIXED, later, lambda descs: capture(descs, next(rounds)))


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
    keys: Any = SimpleNamespace(cache=None, is_output=attached.runtime.is_query)
    attached._keys = keys
    attached._on_cuda(runner, limits)
    step = attached.runtime.step
    assert runner.model_memory_usage == 1000 + limits.bank_bytes + step.bytes
    gates = 64 * MAX_RANK * 4  # of low-rank edits: a number for each factor of each row
    assert limits.ring_bytes + gates < step.bytes < limits.ring_bytes + gates + (1 << 18)
    assert attached._most_kept == step.max_graph_bytes == least
    assert step.tables.position_of_row.shape == (64,)
    assert attached._graphs.has(None, 1) is False
