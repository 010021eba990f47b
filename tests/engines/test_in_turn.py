"""On Transformers a batch of one step is finished after the next one began, and nothing of either shows in the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.engines import transformers
from patchclamp.engines.base import Request
from patchclamp.engines.generation import StepReadout

from ..models import of_family

OPTIONS = {"engine": "transformers", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 4, "prove": False}
PROMPTS = [list(range(5 + i, 14 + 2 * i)) for i in range(11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return of_family(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def lm(folder):
    with pc.LM(folder, **OPTIONS) as lm:
        yield lm


@pytest.fixture
def busy(monkeypatch) -> None:
    """As on a GPU that has much to do: whatever is asked of it has not arrived."""
    monkeypatch.setattr(StepReadout, "has_arrived", False)


@pytest.fixture
def told(lm, monkeypatch) -> list[str]:
    """When batches begin and are finished: "begins 4" and "ends 4" of four requests."""
    engine, events = lm.engine, []
    begin, generate = engine._begin, engine._generate
    monkeypatch.setattr(engine, "_begin", lambda generation, cut: (
        events.append(f"begins {len(generation.requests)}"), begin(generation, cut)))  # fmt: skip
    monkeypatch.setattr(engine, "_generate", lambda generation: (
        generate(generation), events.append(f"ends {len(generation.requests)}")))  # fmt: skip
    return events


def steers(lm: pc.LM, count: int = len(PROMPTS)) -> list[list[pc.Op]]:
    draw = np.random.default_rng(0)
    return [[pc.Add(draw.standard_normal(lm.model.d_model).astype(np.float32), pc.resid_post[1])] for _ in range(count)]


@contextlib.contextmanager
def held_back(lm: pc.LM) -> Iterator[None]:
    """The engine's thread begins when all jobs of a call are queued."""
    engine, go_on = lm.engine, threading.Event()
    submit = engine.submit
    engine._call(go_on.wait)

    def submitted(requests):
        try:
            return submit(requests)
        finally:
            go_on.set()

    engine.submit = submitted
    try:
        yield
    finally:
        del engine.submit
        go_on.set()


def test_one_batch_is_finished_after_the_next_began(lm, told, busy):
    edits, asked = steers(lm), {"max_tokens": 1, "score": [3, 4], "logprobs": True}
    with held_back(lm):
        runs = lm.run(PROMPTS, edits=edits, **asked)
    assert told == ["begins 4", "begins 4", "ends 4", "begins 3", "ends 4", "ends 3"]
    for prompt, edit, run in zip(PROMPTS, edits, runs, strict=True):
        alone = lm.run(prompt, edits=edit, **asked)
        assert run.token_ids == alone.token_ids
        assert run.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert run.scores == pytest.approx(alone.scores, abs=1e-5)
    counts = lm.engine.status()
    assert (counts["programs"], counts["records"], counts["runs"]) == (0, 0, 0)


@pytest.mark.parametrize("asked", [
    {"max_tokens": 2}, {"max_tokens": 1, "logprobs": 2},
    {"max_tokens": 1, "sampling": {"temperature": 1.0, "seed": 1}},
])  # fmt: skip
def test_what_reads_more_of_a_step_is_finished_at_once(lm, told, busy, asked):
    with held_back(lm):
        runs = lm.run(PROMPTS[:8], edits=steers(lm, 8), **asked)
    assert told == ["begins 4", "ends 4", "begins 4", "ends 4"]
    assert all(len(run.token_ids) == asked["max_tokens"] for run in runs)


def test_what_has_arrived_is_finished_at_once(lm, told):
    with held_back(lm):
        lm.run(PROMPTS[:8], edits=steers(lm, 8), max_tokens=1)
    assert told == ["begins 4", "ends 4", "begins 4", "ends 4"]


def test_programs_for_which_two_batches_leave_no_room_wait_for_the_first(folder, lm, busy):
    edits = steers(lm)
    expected = lm.run(PROMPTS, edits=edits, max_tokens=1, logprobs=True)
    with pc.LM(folder, **OPTIONS, max_records=5) as narrow, held_back(narrow):
        runs = narrow.run(PROMPTS, edits=edits, max_tokens=1, logprobs=True)
        assert narrow.engine.status()["records"] == 0
    assert [run.logprobs for run in runs] == [run.logprobs for run in expected]


def test_a_large_program_finds_the_room_that_it_would_find_without_the_batch_before(folder, busy):
    """Small ones after it must not lie in the middle when the batch before is gone."""
    options = {**OPTIONS, "max_num_seqs": 2, "max_records": 10, "recompute": "all"}
    with pc.LM(folder, **options) as lm, held_back(lm):
        edits = [[pc.Scale(0.9, pc.resid_post[1], pc.prompt[i]) for i in range(size)] for size in (4, 0, 8, 2)]
        runs = lm.run(PROMPTS[:4], edits=edits, max_tokens=1)
        assert [run.error for run in runs] == [None] * 4


def test_a_job_that_could_not_be_queued_holds_nothing_up(folder, busy, monkeypatch):
    def interrupted(job):
        raise KeyboardInterrupt

    with pc.LM(folder, **OPTIONS) as lm:
        with monkeypatch.context() as during:
            during.setattr(lm.engine._thread, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                lm.engine._call(int)
        assert len(lm.run(PROMPTS[0], max_tokens=1).token_ids) == 1


def test_what_a_failed_batch_would_have_told_is_not_said_of_the_next_in_its_slots(lm, monkeypatch):
    monkeypatch.setattr(lm.engine.runtime.step, "_is_late", True)
    huge = [pc.Scale(3e38, pc.resid_post[1]), pc.Scale(3e38, pc.resid_post[2])]
    with monkeypatch.context() as broken:
        broken.setattr(transformers, "StepReadout", lambda *_: 1 / 0)
        runs = lm.run(PROMPTS[:4], edits=[huge] * 4, max_tokens=1)
        assert all("ZeroDivisionError" in str(run.error) for run in runs)
    assert [run.error for run in lm.run(PROMPTS[:4], edits=steers(lm, 4), max_tokens=1)] == [None] * 4


def test_batches_that_are_queued_are_finished_before_an_engine_closes(folder):
    with pc.LM(folder, **OPTIONS) as lm:
        requests = [Request(f"run {i}", prompt, 1) for i, prompt in enumerate(PROMPTS)]
        futures = lm.engine.submit(requests)
    assert all(future.done() and len(future.result().token_ids) == 1 for future in futures)


@pytest.mark.parametrize("tokens", [1, 3])
def test_edits_that_are_not_finite_fail_their_own_runs_also_if_the_device_tells_it_late(lm, monkeypatch, tokens):
    """As on a GPU, where these taps do not wait for the device."""
    edits = steers(lm)
    huge = [2, 4, 9]
    for i in huge:
        edits[i] = [pc.Scale(3e38, pc.resid_post[1], pc.prompt[1]), pc.Scale(3e38, pc.resid_post[2], pc.prompt[-1])]
    expected = lm.run(PROMPTS, edits=edits, max_tokens=tokens, logprobs=True)
    monkeypatch.setattr(lm.engine.runtime.step, "_is_late", True)
    runs = lm.run(PROMPTS, edits=edits, max_tokens=tokens, logprobs=True)
    assert [i for i, run in enumerate(runs) if run.error] == huge
    assert [str(run.error) for run in runs] == [str(run.error) for run in expected]
    assert all(isinstance(runs[i].error, pc.RunError) and "not finite" in str(runs[i].error) for i in huge)
    assert all(a.logprobs == b.logprobs for i, (a, b) in enumerate(zip(runs, expected, strict=True)) if i not in huge)
    assert lm.engine.runtime.step.failed() == []
