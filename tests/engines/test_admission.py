"""Admission in the engine core: who waits, who passes, who ends with which error, and that nothing is left of anybody."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.request_queue import SchedulingPolicy

import patchclamp as pc
from patchclamp.engines.base import Carried, decode, receipt_of
from patchclamp.engines.vllm.admission import Verdict
from patchclamp.engines.vllm.compat import clients
from patchclamp.plan.bound import BoundOp, BoundProgram, Keep, Linear, PositionRange
from tests.models import with_weights, with_words

from .conftest import TINY

D, LAYERS, SEQS, RECORDS, ROWS = TINY["hidden_size"], 3, 4, 60, 12
SLOTS = 2 * SEQS
PROMPT = [3, 5, 7, 11, 13, 17, 19, 23]
ENDLESS = {"sampling": {"ignore_eos": True}}
POINT = 1  # of the site map: a layer's stream
COUNTS = ("programs", "runs", "captured_bytes", "pinned", "vectors", "waiting", "requests", "records")
HOT = pc.Add([3e38] * D, at=pc.resid_post[0], scale=1e30)
OPTIONS = dict(max_model_len=128, max_num_seqs=SEQS, kv_cache_memory_bytes=1 << 24, block_size=32, enforce_eager=True,
               max_records=RECORDS, bank_bytes=4 * D * ROWS, prove=False)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = with_weights(tmp_path_factory.mktemp("words"), "8b", LAYERS, **TINY)
    with_words(path, TINY["vocab_size"])
    return path


@pytest.fixture(scope="module")
def lm(folder):
    """Eight slots, and room for twelve vectors."""
    with pc.LM(folder, engine="vllm", dtype="float32", **OPTIONS) as lm:
        assert lm.engine.sites.points[POINT].kind == "stream"
        yield lm


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test of the shared engine, whatever it did: all counts are 0."""
    yield
    if "lm" in request.fixturenames:
        check_nothing_left(request.getfixturevalue("lm"))


def check_nothing_left(lm: pc.LM) -> None:
    gc.collect()
    lm.run([5], max_tokens=1)
    status = lm.engine.status()
    assert {name: status[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0)
    engine = lm.engine
    assert not clients.tables_of(engine._engine.output_processor)
    assert [len(held) for held in (engine._waiting, engine._held_back)] == [0, 0]
    assert not +engine._readers
    if not engine.remote:
        attached, admission, admitting = worker(lm), admission_of(lm), engine_core(lm).patchclamp
        kept = [attached._settled, attached.runtime._errors, attached.runtime._admitted, admission.errors,
                admission._capturing, admission._under_way, engine_core(lm).scheduler.requests, admitting._ended, admitting._withheld]  # fmt: skip
        assert [len(held) for held in kept] == [0] * len(kept)


def engine_core(lm: pc.LM) -> Any:
    return lm.engine._engine.engine_core.engine_core


def admission_of(lm: pc.LM) -> Any:
    return engine_core(lm).patchclamp.admission


def worker(lm: pc.LM) -> Any:
    return engine_core(lm).model_executor.driver_worker.worker.patchclamp


def vector(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (D,)), generator=torch.Generator().manual_seed(seed))


def at_once(lm: pc.LM, *calls: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """What calls of `arun` give or raise, and the order in which they end; all of them come before a step is made."""
    order: list[int] = []

    async def one(i: int, call: dict[str, Any]) -> Any:
        try:
            return await lm.arun(call.pop("prompt", PROMPT), **call)
        finally:
            order.append(i)

    async def together() -> list[Any]:
        with held(lm):
            tasks = [asyncio.create_task(one(i, dict(call))) for i, call in enumerate(calls)]
            while len(lm.engine._queue) < len(calls):  # the gate has left it
                await asyncio.sleep(0.001)
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(together()), order


@contextmanager
def held(lm: pc.LM) -> Iterator[None]:
    """The engine's thread waits meanwhile: what comes within comes at once."""
    arrived, gate = threading.Event(), threading.Event()
    lm.engine._call(lambda: (arrived.set(), gate.wait(60)))
    arrived.wait(60)
    try:
        yield
    finally:
        gate.set()


# -- requests as vLLM itself makes them


def scaled(run: str, by: float = -1.0, keeps: bool = False, point: int = POINT) -> bytes:
    """A program without vectors, as it travels: one layer's stream times a number."""
    ops = [BoundOp("edits[0]", Linear(by, 0.0), (point,), (), (PositionRange(0, 8),), True)]
    if keeps:
        ops.append(BoundOp("capture[0]", Keep(0), (POINT,), (), (PositionRange(0, 8),)))
    return msgspec.msgpack.encode(Carried(BoundProgram(run, len(PROMPT), tuple(ops)), {}))


def raw(
    lm: pc.LM, act: Callable[[Any, Callable[..., str]], Any], release: bool = True
) -> tuple[dict[str, Any], dict[str, Verdict]]:
    """Last outputs and verdicts, by vLLM's names, of requests that `act(engine, add)` adds; all on the engine's thread."""
    runs: list[str] = []

    def job() -> tuple[dict[str, Any], dict[str, Verdict]]:
        engine, outputs, verdicts = lm.engine._engine, {}, {}
        get_output = engine.engine_core.get_output

        def watched() -> Any:
            given = get_output()
            for output in given.outputs:
                if output.kv_transfer_params is not None:
                    verdicts[output.request_id] = Verdict(*output.kv_transfer_params["patchclamp"])
            return given

        engine.engine_core.get_output = watched

        def add(name: str, program: Any, prompt: Any = PROMPT, **more: Any) -> str:
            params = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, **more})
            params.output_kind = RequestOutputKind.FINAL_ONLY
            params.extra_args = None if program is None else {"patchclamp": program}
            with suppress(msgspec.DecodeError, TypeError):
                runs.append(decode(program).bound.run)
            prompt = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
            return engine.add_request(name, prompt, params) or name

        act(engine, add)
        for _ in range(200):
            if not clients.is_busy(engine):
                break
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
        del engine.engine_core.get_output
        if release:
            clients.tell_core(engine, "release", runs)
        return outputs, verdicts

    return lm.engine._call(job).result(120)


# -- how runs end


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("fails_at", "fails"), [(0, True), (1, True), (2, False), (None, False)])
def test_a_run_that_ends_at_a_stop_text_is_told_its_error_and_its_receipt(lm, streamed, fails_at, fails):
    """The front end ends it, on the step that made its third token of the second as an input; the core hears of it
    later."""
    only = {"allowed_token_ids": [7], "stop": "w7 w7 w7", "include_stop_str_in_output": True, "ignore_eos": True}
    tokens = pc.prompt[-1] if fails_at is None else pc.generated[fails_at]
    edit = pc.Scale(0.5, pc.resid_post[0], tokens) if fails_at is None else msgspec.structs.replace(HOT, tokens=tokens)
    call = {"max_tokens": 20, "sampling": only, "edits": [edit]}
    if fails:
        with pytest.raises(pc.RunError, match="not finite"):
            list(lm.stream(PROMPT, **call)) if streamed else lm.run(PROMPT, **call)
        return
    if streamed:
        stream = lm.stream(PROMPT, **call)
        parts = list(stream)
        assert len(parts) == 3
        run = stream.run
    else:
        run = lm.run(PROMPT, **call)
    assert (run.token_ids, run.finish_reason) == ([7, 7, 7], "stop")


STOPS = {"temperature": 1.0, "seed": 3, "stop": "w7 w7 w7 w7", "ignore_eos": True}


def test_what_workers_say_late_comes_in_order(lm, monkeypatch):
    """Workers in processes of their own answer after the next step, or two answers at once; the outputs that wait for
    them come before those that were made since."""
    executor, steer = engine_core(lm).model_executor, [pc.Scale(0.5, pc.resid_post[0])]
    call, step = executor.collective_rpc, executor.execute_model
    late: list[tuple[Future[Any], Any]] = []
    expected = [list(lm.stream(PROMPT, max_tokens=9, sampling=STOPS, edits=edits)) for edits in (steer, [])]
    plain = lm.run(PROMPT, max_tokens=9, sampling=STOPS, edits=steer)

    def execute(*args: Any, **more: Any) -> Any:
        if len(late) >= 2 or not args[0].total_num_scheduled_tokens:
            while late:
                future, answers = late.pop(0)
                future.set_result(answers)
        return step(*args, **more)

    monkeypatch.setattr(executor, "collective_rpc", verdicts_later(call, late))
    monkeypatch.setattr(executor, "execute_model", execute)
    streams = [lm.stream(PROMPT, max_tokens=9, sampling=STOPS, edits=edits) for edits in (steer, [], [HOT])]
    got = [list(stream) for stream in streams[:2]]
    assert [[part.token_ids for part in parts] for parts in got] == [
        [part.token_ids for part in parts] for parts in expected
    ]
    with pytest.raises(pc.RunError, match="not finite"):
        list(streams[2])
    assert lm.run(PROMPT, max_tokens=9, sampling=STOPS, edits=steer).token_ids == plain.token_ids
    with lm.stream(PROMPT, max_tokens=9, sampling=STOPS, edits=steer) as stream:
        next(stream)
    monkeypatch.undo()
    while late:
        future, answers = late.pop(0)
        future.set_result(answers)


def test_of_several_runs_of_a_prompt_one_fails(lm):
    sampling = {"n": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    plain = lm.run(PROMPT, logprobs=True, max_tokens=4, sampling=sampling)
    own = next(token for token in plain[1].token_ids[:-1] if token not in plain[0].token_ids + plain[2].token_ids)
    hot = msgspec.structs.replace(HOT, tokens=pc.generated & pc.token(own))
    steer = pc.Add(vector(0), pc.resid_post[2], pc.generated[2])
    fine = lm.run(PROMPT, logprobs=True, max_tokens=4, sampling=sampling, edits=[steer])
    runs = lm.run(
        PROMPT, logprobs=True, max_tokens=4, sampling=sampling, edits=[hot, steer], capture=[pc.resid_post[1]]
    )
    assert [type(run.error) for run in runs] == [type(None), pc.NotFinite, type(None)]
    assert "not finite" in str(runs[1].error)
    for i in (0, 2):
        assert runs[i].token_ids == fine[i].token_ids
        assert runs[i].logprobs == pytest.approx(fine[i].logprobs, abs=1e-4)
        assert len(runs[i][pc.resid_post[1]]) == len(PROMPT) + 3
    streams = [lm.stream(PROMPT, max_tokens=4, sampling={**sampling, "n": 1, "seed": 5 + i}, edits=[hot, steer])
               for i in range(3)]  # fmt: skip
    for i in (0, 2):
        assert [token for part in streams[i] for token in part.token_ids] == fine[i].token_ids
    with pytest.raises(pc.RunError, match="not finite"):
        list(streams[1])


def test_children_of_vllms_own_parent_have_errors_of_their_own(lm):
    """They share one program, and with it the name of its run: what fails one says nothing of another, and none that
    failed passes for fine because its sibling ended first."""
    hot = scaled("shared", float("inf"))

    def act(engine: Any, add: Any) -> None:
        add("children", hot, n=3, temperature=1.0, seed=3, max_tokens=2)

    runtime = worker(lm).runtime
    outputs, verdicts = raw(lm, act)
    (output,) = outputs.values()
    assert len(output.outputs) == len(verdicts) == 3
    assert [verdict.error[0] for verdict in verdicts.values()] == ["NotFinite"] * 3
    assert [verdict.receipt for verdict in verdicts.values()] == [receipt_of(hot)] * 3

    fail, failed = runtime.fail, []

    def fails_twice(slots: Any, error: Exception) -> None:
        fail(slots, error)
        failed.append(len(runtime._errors))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "fail", fails_twice)
        _, verdicts = raw(lm, lambda engine, add: [add("short", hot, max_tokens=1), add("long", hot, max_tokens=5)])
    assert max(failed) == 2
    assert all(verdict.error is not None for verdict in verdicts.values())


def test_children_that_capture_under_one_name_are_told_so(lm):
    program = scaled("captured once", 1.0, keeps=True)
    _, verdicts = raw(lm, lambda engine, add: add("children", program, n=3, temperature=1.0), False)
    errors = [verdict.error for verdict in verdicts.values()]
    assert errors.count(None) == 1
    assert all("already captured" in error[1] for error in errors if error)
    _, verdicts = raw(lm, lambda engine, add: add("later", program), False)
    (verdict,) = verdicts.values()
    assert verdict.error[0] == "ProgramError"
    lm.engine.release(["captured once"])
    lm.engine.status()
    _, verdicts = raw(lm, lambda engine, add: add("after", program))
    assert [verdict.error for verdict in verdicts.values()] == [None]


# -- waiting


def test_programs_as_large_as_the_room_run_one_after_the_other(lm, monkeypatch):
    """In records and in the bank; and all come back edited."""
    runtime, most = worker(lm).runtime, []
    install_all = runtime.install_all

    def counted(arrivals: Any, vectors: Any) -> Any:
        errors = install_all(arrivals, vectors)
        if arrivals:
            most.append(len(runtime))
        return errors

    monkeypatch.setattr(runtime, "install_all", counted)
    single = [pc.Zero(pc.attn_out, [0, 2, 4, 6])]
    large = [pc.Scale(1.0 + i, pc.resid_post[1], pc.prompt[::2]) for i in range(RECORDS // 4)]
    wide = [[pc.Add(vector(i, len(PROMPT), D), pc.resid_post[1], pc.prompt), pc.Add(vector(9 + i, ROWS - len(PROMPT), D),
             pc.resid_post[2], pc.prompt[:4])] for i in range(3)]  # fmt: skip
    alone = [lm.run(PROMPT, logprobs=True, max_tokens=2, edits=edits) for edits in (large, *wide, single)]
    assert len({tuple(run.logprobs) for run in alone}) == 5
    most.clear()
    runs = lm.run([PROMPT] * 8, logprobs=True, max_tokens=2, edits=[large, *wide, large, *wide])
    assert most == [1] * 8
    for run, same in zip(runs, [*alone[:4], *alone[:4]], strict=True):
        assert run.logprobs == pytest.approx(same.logprobs, abs=1e-4)
    runs = lm.run([PROMPT] * 2, logprobs=True, max_tokens=2, edits=[single, single])
    assert most[8:] == [2]  # for these there is room beside each other


def test_plain_requests_pass_those_that_wait_and_programs_do_not(lm):
    whole = {"edits": [pc.Scale(1.5, pc.resid_post[1], pc.prompt[::2])] * (RECORDS // 4), **ENDLESS}
    small = {"edits": [pc.Scale(1.5, pc.resid_post[1])], **ENDLESS}
    calls = [{**whole, "max_tokens": 6}, {**whole, "max_tokens": 2}, {**small, "max_tokens": 1}, {"max_tokens": 3}]
    runs, order = at_once(lm, *calls)
    assert [len(run.token_ids) for run in runs] == [6, 2, 1, 3]
    assert order == [3, 0, 2, 1] or order == [3, 0, 1, 2]  # the two that wait come in one step
    runs, order = at_once(lm, {**small, "max_tokens": 6}, {**small, "max_tokens": 2}, {"max_tokens": 3})
    assert order == [1, 2, 0]  # with room for all


def test_whoever_waits_goes_by_priority(lm, monkeypatch):
    whole = {"edits": [pc.Scale(1.5, pc.resid_post[1], pc.prompt[::2])] * (RECORDS // 4), "max_tokens": 2, **ENDLESS}
    client = lm.engine._engine.engine_core
    add = client.add_request

    def ends(*priorities: int) -> list[int]:
        left = iter(priorities)

        def prioritised(request) -> None:
            request.priority = next(left)
            add(request)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "add_request", prioritised)
            runs, order = at_once(lm, *[whole] * len(priorities))
        assert all(isinstance(run, pc.Run) for run in runs)
        return order

    assert ends(0, 3, 2, 1) == [0, 1, 2, 3]
    monkeypatch.setattr(engine_core(lm).scheduler, "policy", SchedulingPolicy.PRIORITY)
    assert ends(0, 3, 2, 1) == [0, 3, 2, 1]
    assert ends(0, 1, 1, 0) == [0, 3, 1, 2]


class Steps:
    """In place of an engine's steps: once a program is admitted, it makes as many as it is allowed. It goes on taking
    requests meanwhile, so that a run outlasts what a test does beside it on any machine."""

    def __init__(self, lm: pc.LM) -> None:
        self.allowed: float = 0
        self._step, self._counts = lm.engine._step, admission_of(lm).counts

    def __call__(self) -> None:
        at_work = self._counts()["programs"] > 0
        if at_work and self.allowed < 1:
            time.sleep(0.001)
            return
        self.allowed -= at_work
        self._step()

    async def make(self, number: int) -> None:
        """Returns when so many steps were made."""
        self.allowed = number
        while self.allowed:
            await asyncio.sleep(0.001)


@pytest.fixture
def steps(lm, monkeypatch) -> Steps:
    made = Steps(lm)
    monkeypatch.setattr(lm.engine, "_step", made)
    return made


def test_who_is_aborted_while_waiting_lets_the_queue_move_on(lm, steps):
    whole = {"edits": [pc.Scale(1.5, pc.resid_post[1], pc.prompt[::2])] * (RECORDS // 4), **ENDLESS}

    async def go() -> None:
        running = asyncio.create_task(lm.arun(PROMPT, max_tokens=60, **whole))
        while not admission_of(lm).counts()["programs"]:
            await asyncio.sleep(0.001)
        first, second, third = (asyncio.create_task(lm.arun(PROMPT, max_tokens=2, **whole)) for _ in range(3))
        stream = lm.stream(PROMPT, max_tokens=2, **whole)
        while admission_of(lm).counts()["waiting"] < 4:
            await asyncio.sleep(0.001)
        first.cancel()
        stream.close()
        third.cancel()
        running.cancel()
        steps.allowed = math.inf
        assert len((await second).token_ids) == 2
        for task in (first, third, running):
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(go())


def test_who_comes_leaves_and_is_released_before_a_step_leaves_nothing(lm):
    """In a core beside its front end all of this may be read between two steps; what it brought to the bank stays."""
    runtime = worker(lm).runtime

    def act(inner: Any, add: Any) -> None:
        add("gone", scaled("gone", keeps=True))
        inner.abort_requests(["gone"])
        inner.patchclamp_call("release", [["gone"]])

    before = runtime.status()["runs"]
    assert raw_sessions(lm, act) == {}
    assert runtime.status()["runs"] == before


def test_who_is_released_on_the_way_leaves_nothing(lm):
    """As when a client leaves and nobody aborts its request: what it captures after its release goes when it ends."""
    runtime, kept = worker(lm).runtime, []
    ops = (BoundOp("capture[0]", Keep(0), (POINT,), (), (PositionRange(0, 64),)),)

    def act(inner: Any, add: Any) -> None:
        add("on", msgspec.msgpack.encode(Carried(BoundProgram("on", len(PROMPT), ops), {})))
        inner.step_fn()
        kept.append(runtime.status()["captured_bytes"])
        inner.patchclamp_call("release", [["on"]])

    before = runtime.status()["captured_bytes"]
    assert raw_sessions(lm, act) == {"on": None}
    assert kept[0] > before
    check_nothing_left(lm)


def test_who_leaves_before_a_step_leaves_its_vector_for_the_next(lm, monkeypatch):
    """The room counts it as brought: the worker installs who has left already, too."""
    runtime, rows, key = worker(lm).runtime, vector(50).reshape(1, D), "v:left"
    ops = (BoundOp("edits[0]", Linear(1.0, 1.0), (POINT,), (key,), (PositionRange(0, 8),), True),)
    first, second = (
        msgspec.msgpack.encode(Carried(BoundProgram(run, 8, ops), {key: (1, D)})) for run in ("first", "second")
    )
    write, written = runtime.bank.write, []
    monkeypatch.setattr(runtime.bank, "write", lambda begin, rows: written.append(begin) or write(begin, rows))

    def act(inner: Any, add: Any) -> None:
        inner.patchclamp_call("hold", [safetensors.numpy.save({key: rows.numpy()}), [key], []])
        add("first", first)
        inner.abort_requests(["first"])
        add("second", second)
        assert inner.patchclamp.admission.programs["second"].placement.load == ()

    assert raw_sessions(lm, act) == {"second": None}
    (begin,) = written
    assert torch.equal(runtime.bank.data[begin : begin + D], rows[0])
    lm.engine._call(lambda: engine_core(lm).patchclamp_call("hold", [b"", [], [key, "never held"]])).result()
    lm.engine.release(["first", "second"])


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_paused_scheduler_admits_when_it_goes_on(lm, mode):
    """What came meanwhile waits, in the queue and for room; a pause that aborts leaves nothing of those that waited."""
    whole = {"edits": [pc.Scale(1.5, pc.resid_post[1], pc.prompt[::2])] * (RECORDS // 4), **ENDLESS}
    inner = engine_core(lm)

    def act(core_of_engine: Any, add: Any) -> None:
        heavy = [BoundOp("edits[0]", Linear(2.0, 0.0), (POINT,), (), (PositionRange(0, 8),), True)] * (RECORDS - 1)
        programs = [msgspec.msgpack.encode(Carried(BoundProgram(f"run {i}", 8, tuple(heavy)), {})) for i in range(3)]
        for i, program in enumerate(programs):
            add(f"before {i}", program)
        core_of_engine.pause_scheduler(mode, clear_cache=False)
        assert admission_of(lm).counts()["waiting"] == (2 if mode == "keep" else 0)
        add("meanwhile", programs[0])
        for _ in range(3):
            core_of_engine.step_fn()
        assert not core_of_engine.scheduler.running
        core_of_engine.resume_scheduler()

    told = raw_sessions(lm, act)
    names = {"meanwhile", *(f"before {i}" for i in range(3) if mode == "keep")}
    assert told == dict.fromkeys(names)
    lm.engine.release([f"run {i}" for i in range(3)])
    assert inner.scheduler.pause_state.name == "UNPAUSED"
    assert len(lm.run(PROMPT, max_tokens=2, **whole).token_ids) == 2


def test_a_queue_that_cannot_move_costs_nothing_and_does_not_grow(lm, monkeypatch, steps):
    """Behind a program that takes the whole room: nobody is tried again before somebody leaves, and those who give up
    are not kept."""
    whole = {"edits": [pc.Scale(1.5, pc.resid_post[1], pc.prompt[::2])] * (RECORDS // 4), **ENDLESS}
    admission, tried = admission_of(lm), []
    place = admission._room.place
    monkeypatch.setattr(admission._room, "place", lambda *sizes: tried.append(1) or place(*sizes))

    async def go() -> None:
        running = asyncio.create_task(lm.arun(PROMPT, max_tokens=110, **whole))
        while not admission.counts()["programs"]:
            await asyncio.sleep(0.001)
        waits = asyncio.create_task(lm.arun(PROMPT, max_tokens=1, **whole))
        for _ in range(6):
            leaving = [asyncio.create_task(lm.arun(PROMPT, max_tokens=1, **whole)) for _ in range(8)]
            while admission.counts()["waiting"] < 9:
                await asyncio.sleep(0.001)
            assert len(admission._queue) <= 2 * 9 + 17
            await steps.make(15)
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            while admission.counts()["waiting"] > 1:
                await asyncio.sleep(0.001)
        assert not running.done()
        running.cancel()
        steps.allowed = math.inf
        await waits

    asyncio.run(go())
    assert len(tried) <= 6  # not at every step


# -- what is not as it should be


@pytest.mark.parametrize("waits", [False, True])
def test_a_run_that_is_let_go_of_before_it_is_installed_leaves_nothing(lm, waits):
    """As when a client leaves at once: its release comes before the step that installs its program."""
    first = [pc.Add(vector, at=pc.resid_post[0]) for vector in np.eye(ROWS, D, dtype=np.float32)] if waits else []
    calls = [lm._read_call(PROMPT, max_tokens=3, edits=edits, capture=capture, sampling=ENDLESS["sampling"])
             for edits, capture in ((first, ()), (first and [pc.Add([1.0] * D, at=pc.resid_post[1])], [pc.resid_post]))]  # fmt: skip
    requests, futures = [call.requests[0] for call in calls], [Future(), Future()]
    waiting = []

    def come_and_go() -> None:
        lm.engine._add(requests, futures)
        lm.engine._start_held_back()
        waiting.append(engine_core(lm).patchclamp.admission.counts()["waiting"])
        lm.engine._release([requests[1].run])

    lm.engine._call(come_and_go).result()
    assert [future.result().token_ids for future in futures]
    assert waiting == [waits]
    check_nothing_left(lm)


@pytest.mark.parametrize("spoil", [
    lambda output: None,
    lambda output: {"patchclamp": ["", None, 0.0]},
    lambda output: {"patchclamp": ["0" * 32, None, 0.0]},
], ids=["dropped", "empty", "another's"])  # fmt: skip
def test_a_result_without_its_receipt_is_an_error(lm, monkeypatch, spoil):
    admitting = engine_core(lm).patchclamp
    attach = admitting._attach

    def attach_wrongly(answers: Any, asked: Any, proofs: Any) -> None:
        attach(answers, asked, proofs)
        for _, output, _ in asked:
            output.kv_transfer_params = spoil(output)

    monkeypatch.setattr(admitting, "_attach", attach_wrongly)
    edited, plain = lm.run([PROMPT] * 2, logprobs=True, max_tokens=2, edits=[[pc.Scale(0.5, pc.resid_post[0])], []])
    assert isinstance(edited.error, pc.EngineError)
    assert "did not confirm" in str(edited.error)
    assert plain.error is None
    with pytest.raises(pc.EngineError, match="did not confirm"):
        list(lm.stream(PROMPT, max_tokens=2, edits=[pc.Scale(0.5, pc.resid_post[0])]))


def test_bytes_that_are_no_program_end_their_request_alone(lm):
    ops = (BoundOp("edits[0]", Linear(1.0, 1.0), (POINT,), ("v:lost",), (PositionRange(0, 8),), True),)
    programs = {
        "no msgpack": b"\xc1 no program at all", "empty": b"", "cut": scaled("cut")[:-3], "text": "a program, as text",
        "another type": msgspec.msgpack.encode({"bound": 3}), "point": scaled("point", point=10_000),
        "before the first point": scaled("point", point=-3),
        "sizes": msgspec.msgpack.encode(Carried(BoundProgram("sizes", 8, ops), {"v:lost": (-5, D)})),
        "no width": msgspec.msgpack.encode(Carried(BoundProgram("width", 8, ops), {"v:lost": (1, 0)})),
        "no sizes": msgspec.msgpack.encode(Carried(BoundProgram("none", 8, ops), {})),
        "a point to read": msgspec.msgpack.encode(Carried(BoundProgram("read", 8, ops), {"r:run:77777": (1, D)})),
        "a key that is none": msgspec.msgpack.encode(Carried(BoundProgram("key", 8, ops), {"r:run": (1, D)})),
    }  # fmt: skip
    lost = msgspec.msgpack.encode(Carried(BoundProgram("lost", 8, ops), {"v:lost": (1, D)}))

    def act(engine: Any, add: Any) -> None:
        for name, program in {**programs, "lost": lost, "fine": scaled("fine")}.items():
            add(name, program)

    outputs, verdicts = raw(lm, act)
    by_name = {name: next(v for key, v in verdicts.items() if key.startswith(f"{name}-") or key == name)
               for name in [*programs, "lost", "fine"]}  # fmt: skip
    assert len(outputs) == len(by_name)
    kinds = {name: verdict.error and verdict.error[0] for name, verdict in by_name.items()}
    assert kinds == {**dict.fromkeys(programs, "ProgramError"), "no sizes": kinds["no sizes"], "lost": "MissingSource",
                     "fine": None}  # fmt: skip
    assert kinds["no sizes"] in ("ProgramError", "EngineError")
    assert by_name["fine"].receipt == receipt_of(scaled("fine"))
    assert lm.run(PROMPT, logprobs=True, max_tokens=2, edits=[pc.Add(vector(1), pc.resid_post[1])]).error is None


def test_a_vector_that_is_not_held_is_missing_for_that_run_alone(lm, monkeypatch):
    v, hold = vector(2), admission_of(lm).hold

    def forgetful(vectors: Any, keys: list[str], drop: list[str]) -> None:
        hold(vectors, keys, drop)
        for key in keys if lost else ():
            admission_of(lm)._vectors.pop(key)

    lost = True
    monkeypatch.setattr(admission_of(lm), "hold", forgetful)
    edits = [[pc.Add(v, pc.resid_post[1])], [pc.Scale(0.5, pc.resid_post[1])], []]
    bad, scaled_run, plain = lm.run([PROMPT] * 3, logprobs=True, max_tokens=2, edits=edits)
    assert isinstance(bad.error, pc.MissingSource)
    assert (scaled_run.error, plain.error) == (None, None)


def test_what_one_program_misses_is_not_missing_for_the_next(lm):
    """The rows that it could have brought into the bank are there for whoever reads them next."""
    v = vector(3)
    source = lm.run(PROMPT, logprobs=True, max_tokens=1, capture=[pc.resid_post[0]])
    row, runtime = pc.From(source, pc.resid_post[0], 2), worker(lm).runtime
    expected = lm.run(PROMPT, logprobs=True, max_tokens=2, edits=[pc.Add(vector(4), pc.resid_post[1])])
    lm.engine._call(lambda: runtime.store.release(source.key)).result()
    bad, good = lm.run([PROMPT] * 2, logprobs=True, max_tokens=2, edits=[
        [pc.Replace(row, pc.resid_post[0], pc.prompt[2]), pc.Add(v, pc.resid_post[1])], [pc.Add(v, pc.resid_post[1])]
    ])  # fmt: skip
    assert isinstance(bad.error, pc.MissingSource)
    assert good.error is None
    assert good.logprobs != expected.logprobs
    plain = lm.run(PROMPT, logprobs=True, max_tokens=2)
    assert good.logprobs != plain.logprobs


def test_who_is_aborted_before_the_first_step_leaves_its_vector_for_the_next(lm, monkeypatch):
    v, runtime = vector(5), worker(lm).runtime
    write, written = runtime.bank.write, []
    monkeypatch.setattr(runtime.bank, "write", lambda begin, rows: written.append(begin) or write(begin, rows))
    steer = [pc.Add(v, pc.resid_post[1])]
    before = lm.run(PROMPT, logprobs=True, max_tokens=2)

    async def go() -> pc.Run:
        with held(lm):
            gone = asyncio.create_task(lm.arun(PROMPT, max_tokens=2, edits=steer))
            while not lm.engine._queue:
                await asyncio.sleep(0.001)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            queued = len(lm.engine._queue)
            kept = asyncio.create_task(lm.arun(PROMPT, logprobs=True, max_tokens=2, edits=steer))
            while len(lm.engine._queue) == queued:
                await asyncio.sleep(0.001)
        return await kept

    run = asyncio.run(go())
    assert len(written) == 1
    cold = lm.run(PROMPT, logprobs=True, max_tokens=2, edits=steer, sampling={"skip_reading_prefix_cache": True})
    assert run.logprobs == pytest.approx(cold.logprobs, abs=1e-5)
    assert run.logprobs != pytest.approx(before.logprobs, abs=1e-3)
    assert len(written) == 1


def test_more_of_a_streamed_input_never_ends_the_core(lm):
    """vLLM takes a request whose name it knows for more of the same input: also while that one is being refused, or
    where it began without a program."""

    def refused(engine: Any, add: Any) -> None:
        for _ in range(2):
            add("session", scaled("session"), resumable=True)
        add("plain", scaled("plain"))

    errors = raw_sessions(lm, refused)
    assert {name: error and error[0] for name, error in errors.items()} == {"session": "ProgramError", "plain": None}


def raw_sessions(lm: pc.LM, act: Any) -> dict[str, Any]:
    """What requests are told, straight at the core, whose requests keep the names they are given."""
    from vllm.v1.engine import EngineCoreRequest

    def job() -> dict[str, Any]:
        inner, errors = engine_core(lm), {}

        def add(name: str, program: Any, resumable: bool = False) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
            params.extra_args = None if program is None else {"patchclamp": program}
            request = EngineCoreRequest(
                request_id=name, prompt_token_ids=list(PROMPT), mm_features=None, sampling_params=params,
                pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
                resumable=resumable,
            )  # fmt: skip
            inner.add_request(*inner.preprocess_add_request(request))

        act(inner, add)
        for _ in range(50):
            if not inner.scheduler.has_requests():
                break
            outputs, _ = inner.step_fn()
            for part in (outputs or {}).values():
                for output in part.outputs:
                    if output.finish_reason is not None and output.kv_transfer_params:
                        errors[output.request_id] = output.kv_transfer_params["patchclamp"][1]
        inner.patchclamp_call("release", [["plain"]])
        return errors

    return lm.engine._call(job).result(60)


def test_a_program_that_comes_with_more_of_an_input_ends_the_session(lm):
    def later(engine: Any, add: Any) -> None:
        add("session", None, resumable=True)
        add("session", scaled("late"), resumable=True)

    errors = raw_sessions(lm, later)
    assert errors["session"][0] == "ProgramError"


# -- faults


@pytest.mark.parametrize("where", ["apply", "begin_step", "end", "steps_left"])
def test_what_goes_wrong_in_a_worker_is_the_error_of_its_programs(lm, monkeypatch, where):
    runtime = worker(lm).runtime
    plain = lm.run(PROMPT, logprobs=True, max_tokens=2)

    def broken(*args: Any, **more: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")

    steer = [pc.Add(vector(6), pc.resid_post[1])]
    with monkeypatch.context() as patch:
        patch.setattr(runtime.step if where == "apply" else runtime, where, broken)
        keeps = [pc.resid_post[1]] if where == "end" else []
        bad, good = lm.run([PROMPT, PROMPT], logprobs=True, max_tokens=2, edits=[steer, []], capture=keeps)
    if where == "end":
        assert good.error is not None  # it captured, too
    else:
        assert good.error is None
        assert good.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert isinstance(bad.error, pc.PatchclampError)
    assert "broken on purpose" in str(bad.error)
    after = lm.run([PROMPT, PROMPT], logprobs=True, max_tokens=2, edits=[steer, []])
    assert [run.error for run in after] == [None, None]
    assert after[0].logprobs != after[1].logprobs


# -- blocks that a failed run left


def verdicts_later(call: Any, late: list[tuple[Future[Any], Any]]) -> Any:
    """An executor's `collective_rpc` whose verdicts stay open: `late` gets each one's future and what it should be."""

    def rpc(method: Any, *args: Any, **more: Any) -> Any:
        answers = call(method, *args, **more)
        if more.get("args", ("",))[0] != "settle":
            return answers
        late.append((Future(), answers.result()))
        return late[-1][0]

    return rpc


def prompt_of_blocks(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, TINY["vocab_size"], 80).tolist()


def test_a_program_that_was_not_installed_leaves_others_no_blocks(lm, monkeypatch):
    """The second run has the same blocks as the first, and starts before or after its failure; the third has them from
    the second."""
    runtime, scheduler = worker(lm).runtime, engine_core(lm).scheduler
    many = [pc.Scale(1.0, pc.resid_post[2], pc.prompt[::2])] * ((RECORDS - 1) // 40)  # room for one such program
    for seed, more in ((0, []), (1, many)):
        prompt, edit = prompt_of_blocks(seed), [pc.Scale(-2.0, pc.resid_post[0], pc.prompt[3]), *more]
        call = {"logprobs": True, "max_tokens": 6, **ENDLESS}
        expected = lm.run(prompt, edits=edit, **call)
        scheduler.reset_prefix_cache()
        with monkeypatch.context() as patch:
            fail_first(patch, runtime)
            failed, beside = lm.run([prompt, prompt], edits=[edit, edit], **call)
        assert "broken on purpose" in str(failed.error)
        again = lm.run(prompt, edits=edit, **call)
        assert [beside.cached_tokens, again.cached_tokens] == [0, 64]
        for run in (beside, again):
            assert run.token_ids == expected.token_ids
            assert run.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def fail_first(monkeypatch: pytest.MonkeyPatch, runtime: Any) -> None:
    """The next program that comes is not installed."""
    install_all, failed = runtime.install_all, []

    def fails(arrivals: Any, vectors: Any) -> Any:
        if failed or not arrivals:
            return install_all(arrivals, vectors)
        failed.append(arrivals[0].request)
        return install_all(arrivals[1:], vectors) | {failed[0]: ZeroDivisionError("broken on purpose")}

    monkeypatch.setattr(runtime, "install_all", fails)


def test_when_nothing_can_be_installed_no_program_of_the_step_runs_unedited(lm, monkeypatch):
    runtime, edit = worker(lm).runtime, [pc.Scale(-2.0, pc.resid_post[0], pc.prompt[3])]
    plain, edited = lm.run([PROMPT] * 2, max_tokens=2, edits=[[], edit], logprobs=True)
    with monkeypatch.context() as patch:
        patch.setattr(runtime.resident, "write", lambda: 1 // 0)
        runs = lm.run([PROMPT] * 3, max_tokens=2, edits=[edit, [], edit], logprobs=True)
    assert ["division" in str(run.error) for run in runs] == [True, False, True]
    assert runs[1].logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    again = lm.run(PROMPT, max_tokens=2, edits=edit, logprobs=True)
    assert again.logprobs == pytest.approx(edited.logprobs, abs=1e-4)
    assert edited.logprobs != pytest.approx(plain.logprobs, abs=1e-4)


def test_a_preempted_run_is_proved_again(lm, monkeypatch):
    """Its first blocks are gone; what it computes again enters the prefix cache after another verdict only."""
    scheduler, admitting = engine_core(lm).scheduler, engine_core(lm).patchclamp
    prompt, edit = prompt_of_blocks(7), [pc.Scale(-2.0, pc.resid_post[0], pc.prompt[3])]
    call = {"edits": edit, "logprobs": True, "max_tokens": 30, **ENDLESS}
    expected, resets, attach = lm.run(prompt, **call), [], admitting._attach
    scheduler.reset_prefix_cache()

    def preempt(answers: Any, judged: Any, proofs: Any) -> None:
        attach(answers, judged, proofs)
        if not resets:
            (proof,) = proofs
            assert (proof.tokens, proof.held, proof.request.patchclamp.proved) == (len(prompt), False, len(prompt))
            resets.append(scheduler.reset_prefix_cache(reset_running_requests=True))
            assert proof.request.patchclamp.proved == 3

    monkeypatch.setattr(admitting, "_attach", preempt)
    run = lm.run(prompt, **call)
    assert resets == [True]
    assert run.token_ids == expected.token_ids
    assert run.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    again = lm.run(prompt + run.token_ids, **{**call, "max_tokens": 2})
    assert again.cached_tokens == 96  # of 80 in the prompt, and 29 that were generated


@pytest.mark.parametrize("running", [False, True])
def test_a_reset_frees_blocks_that_are_held_for_a_verdict(lm, monkeypatch, running):
    """vLLM empties its prefix cache only when no request has blocks; what was held never enters it."""
    executor, scheduler, admitting = (
        engine_core(lm).model_executor,
        engine_core(lm).scheduler,
        engine_core(lm).patchclamp,
    )
    call, step, resets, late = executor.collective_rpc, executor.execute_model, [], list[tuple[Future[Any], Any]]()
    prompt, edit = prompt_of_blocks(11), [pc.Scale(-2.0, pc.resid_post[0], pc.prompt[3])]
    expected = lm.run(prompt, edits=edit, max_tokens=1)
    scheduler.reset_prefix_cache()

    def execute(*args: Any, **more: Any) -> Any:
        if late:
            ((proof,),) = [withheld.proofs for withheld in admitting._withheld]
            assert proof.held
            resets.append(scheduler.reset_prefix_cache(reset_running_requests=running))
            future, answers = late.pop()
            future.set_result(answers)
        return step(*args, **more)

    monkeypatch.setattr(executor, "collective_rpc", verdicts_later(call, late))
    monkeypatch.setattr(executor, "execute_model", execute)
    run = lm.run(prompt, edits=edit, max_tokens=1)
    monkeypatch.undo()
    assert resets == [True]
    assert run.token_ids == expected.token_ids
    assert [lm.run(prompt, edits=edit, max_tokens=1).cached_tokens for _ in range(2)] == [0, 64]
    assert scheduler.reset_prefix_cache()


def test_without_a_prefix_cache_workers_are_asked_once_and_no_block_is_held(folder, lm, monkeypatch):
    edit = [pc.Scale(-2.0, pc.resid_post[0], pc.prompt[3])]
    with pc.LM(folder, engine="vllm", dtype="float32", **OPTIONS, enable_prefix_caching=False) as cold:
        for engine, times, most in ((lm, 2, 1), (cold, 1, 0)):
            engine.engine.status()  # the first call attaches the admission
            executor, admitting = engine_core(engine).model_executor, engine_core(engine).patchclamp
            call, settled, proved = executor.collective_rpc, [], []
            attach = admitting._attach

            def ask(method: Any, *args: Any, call=call, settled=settled, **more: Any) -> Any:
                settled.append(more.get("args", ("",))[0] == "settle")
                return call(method, *args, **more)

            def attaching(answers: Any, judged: Any, proofs: Any, attach=attach, proved=proved) -> None:
                proved.append(sum(proof.held for proof in proofs))
                attach(answers, judged, proofs)

            monkeypatch.setattr(executor, "collective_rpc", ask)
            monkeypatch.setattr(admitting, "_attach", attaching)
            engine.run(prompt_of_blocks(12), edits=edit, max_tokens=4, **ENDLESS)
            monkeypatch.undo()
            assert (sum(settled), max(proved)) == (times, most)


def test_runs_that_share_edited_blocks_with_one_that_overflows_go_on(lm):
    """It shares their prompt and their edit, and overflows at a later token; they run before it, beside it and after."""
    scheduler = engine_core(lm).scheduler
    prompt, steer = prompt_of_blocks(8), pc.Add(vector(3), pc.resid_post[0], pc.prompt[3:40])
    call = {"prompt": prompt, "max_tokens": 20, "logprobs": True, **ENDLESS}
    expected = lm.run(**call, edits=[steer])
    for at in (pc.prompt[70], pc.generated[2], pc.prompt[3]):
        hot = [steer, msgspec.structs.replace(HOT, tokens=at)]
        for is_cold in (True, False):
            if is_cold:
                scheduler.reset_prefix_cache()
            calls = [{**call, "edits": edits} for edits in (hot, [steer], hot, [steer], [])]
            (bad, first, worse, second, _), _ = at_once(lm, *calls)
            after, failed = lm.run(**call, edits=[steer]), lm.run([prompt], max_tokens=20, edits=hot, **ENDLESS)[0]
            assert [type(run) for run in (bad, worse)] == [pc.NotFinite] * 2
            assert isinstance(failed.error, pc.NotFinite)
            assert after.cached_tokens == 64
            for run in (first, second, after):
                assert run.token_ids == expected.token_ids
                assert run.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_edited_blocks_are_shared_as_soon_as_the_prompt_is_proved(lm):
    """The first of them goes on for long after its prompt."""
    edits = [pc.Scale(-2.0, pc.resid_post[0], pc.prompt[3])]
    with lm.stream(prompt_of_blocks(9), max_tokens=40, edits=edits, **ENDLESS) as stream:
        next(stream)
        next(stream)
        assert lm.run(prompt_of_blocks(9), max_tokens=1, edits=edits).cached_tokens == 64
        list(stream)


# -- many


@pytest.mark.slow
def test_two_thousand_programs_at_random_leave_every_count_as_it_was(lm):
    storm(lm, 2_000, seed=0)


def storm(lm: pc.LM, number: int, seed: int) -> None:
    """Programs that are admitted, wait, are refused, fail, stop at a text, or are taken back at any moment."""
    rng = random.Random(seed)
    vectors = [vector(100 + i) for i in range(40)]
    seen: dict[str, int] = {}

    def call() -> dict[str, Any]:
        tokens = pc.prompt[:: rng.randint(1, 3)]
        edits = [
            pc.Add(rng.choice(vectors), pc.resid_post[rng.randrange(LAYERS)], tokens) for _ in range(rng.randint(0, 3))
        ]
        kind = rng.random()
        if kind < 0.05:
            edits = [pc.Zero(pc.resid_post, [0, 2, 4, 6])] * (RECORDS // 12 + 1)  # never fits
        elif kind < 0.15:
            edits = [pc.Scale(1.5, pc.resid_post[1], pc.prompt[::2])] * (RECORDS // 4)  # fits alone
        elif kind < 0.25:
            edits = [*edits, msgspec.structs.replace(HOT, tokens=pc.prompt[-1])]
        sampling = {"ignore_eos": True}
        if not lm.engine.config.model_config.skip_tokenizer_init and rng.random() < 0.2:
            sampling |= {"allowed_token_ids": [7], "stop": "w7 w7"}
        capture = [pc.resid_post[1]] if rng.random() < 0.3 else []
        prompt = [rng.randrange(3, 30) for _ in range(rng.choice([7, 8, 40]))]
        return {
            "prompt": prompt,
            "max_tokens": rng.randint(1, 4),
            "edits": edits,
            "capture": capture,
            "sampling": sampling,
        }

    async def one(gate: asyncio.Semaphore) -> None:
        async with gate:
            asked = call()
            task = asyncio.create_task(lm.arun(asked.pop("prompt"), **asked))
            if rng.random() < 0.15:
                await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01]))
                task.cancel()
            try:
                await task
                what = "ended"
            except asyncio.CancelledError:
                what = "taken back"
            except (pc.CapacityError, pc.RunError) as error:
                what = "RunError" if isinstance(error, pc.RunError) else type(error).__name__
        seen[what] = seen.get(what, 0) + 1

    async def everything() -> None:
        gate = asyncio.Semaphore(24)
        await asyncio.gather(*(one(gate) for _ in range(number)))

    asyncio.run(everything())
    assert sum(seen.values()) == number
    assert min(seen.get(what, 0) for what in ("ended", "taken back", "CapacityError", "RunError")) >= number // 50, seen


@pytest.fixture
def elsewhere(folder):
    with pc.LM(folder, engine="vllm", dtype="float32", multiprocess_mode=True, **OPTIONS) as lm:
        yield lm


@pytest.mark.slow
def test_a_core_in_its_own_process_does_the_same_and_its_end_is_everyones(elsewhere):
    lm = elsewhere
    v = vector(0)
    steered, plain = lm.run(
        [PROMPT] * 2, logprobs=True, max_tokens=3, edits=[[pc.Add(v, pc.resid_post[1])], []], **ENDLESS
    )
    assert steered.logprobs != plain.logprobs
    only = {"allowed_token_ids": [7], "stop": "w7 w7", "include_stop_str_in_output": True, "ignore_eos": True}
    for edit, fails in ((pc.Scale(0.5, pc.resid_post[0]), False), (HOT, True)):
        if fails:
            with pytest.raises(pc.RunError, match="not finite"):
                lm.run(PROMPT, logprobs=True, max_tokens=20, sampling=only, edits=[edit])
        else:
            assert lm.run(PROMPT, logprobs=True, max_tokens=20, sampling=only, edits=[edit]).token_ids == [7, 7]
    del steered, plain
    storm(lm, 150, seed=1)
    check_nothing_left(lm)
    streams = [lm.stream(PROMPT, max_tokens=100, **ENDLESS) for _ in range(2)]
    next(streams[0])
    (process,) = lm.engine._engine.engine_core.resources.engine_manager.processes

    async def go() -> list[Any]:
        tasks = [asyncio.create_task(lm.arun(PROMPT, max_tokens=100, edits=edits, **ENDLESS))
                 for edits in ([], [pc.Scale(1.5, pc.resid_post[1], pc.prompt[::2])] * (RECORDS // 4)) * 2]  # fmt: skip
        while len(lm.engine._waiting) < 5:
            await asyncio.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in asyncio.run(go()):
        assert isinstance(error, pc.EngineError), error
    with pytest.raises(pc.EngineError):
        list(streams[1])
    with pytest.raises(pc.EngineError):
        lm.run(PROMPT, logprobs=True, max_tokens=1)
