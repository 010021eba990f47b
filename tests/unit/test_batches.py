"""Batches of runs: two are under way, their runs are read in order, and an error or an interrupt stops both."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from typing import Any

import numpy as np
import pytest

import patchclamp as pc
from patchclamp import grade
from patchclamp.grade import BATCH_S, UNDER_WAY, Pace
from patchclamp.studies import patch_sweep
from patchclamp.studies.study import run_batches


class Closing(str):
    """A run, which notes that it was closed."""

    log: Log

    def close(self) -> None:
        self.log.events.append(f"close {self}")


class Log:
    """Stands for an LM: notes when a call begins, ends and is stopped. A call takes a few turns of the event loop."""

    def __init__(self, **errors: Exception) -> None:
        self.errors, self.events, self.most, self.running = errors, [], 0, 0

    async def arun(self, prompt: str) -> Any:
        self.events.append(f"begin {prompt}")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if prompt in self.errors:
                raise self.errors[prompt]
            for _ in range(3):
                await asyncio.sleep(0)
            while prompt == "endless":
                await asyncio.sleep(0.001)
            run = Closing(prompt)
            run.log = self
            return [run]
        except asyncio.CancelledError:
            self.events.append(f"stop {prompt}")
            raise
        finally:
            self.running -= 1


def calls(*prompts: str):
    return [{"prompt": prompt} for prompt in prompts]


def test_two_are_under_way_and_read_in_order():
    lm, runs = Log(), []
    run_batches(lm, calls(*"abcde"), runs.extend)
    assert runs == [*"abcde"]
    assert lm.most == UNDER_WAY == 2
    assert [event for event in lm.events if event.startswith("begin")] == [f"begin {c}" for c in "abcde"]


def test_the_first_error_in_order_is_raised_and_the_rest_stopped():
    lm, runs = Log(b=ValueError("b"), c=ValueError("c")), []
    with pytest.raises(ValueError, match=r"^b$"):
        run_batches(lm, calls("a", "b", "endless", "c"), runs.extend)
    assert runs == ["a"]
    assert lm.events[-1] == "stop endless"
    assert "begin c" not in lm.events


def test_what_reading_raises_stops_the_other_batch():
    lm = Log()

    def read(runs: list[str]) -> None:
        raise pc.RunError("it failed")

    with pytest.raises(pc.RunError, match="it failed"):
        run_batches(lm, calls("a", "endless", "b"), read)
    assert lm.events == ["begin a", "begin endless", "close a", "stop endless"]


@pytest.mark.parametrize("_", range(20))  # it comes while the thread starts, or later
def test_an_interrupt_stops_what_is_under_way(_: int):
    lm = Log()

    def read(runs: list[str]) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    gc.disable()  # what is raised in a callback of the collector, such as Hypothesis has, is lost
    try:
        with pytest.raises(KeyboardInterrupt):
            run_batches(lm, calls("a", "endless", "endless"), read)
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, handler)
    assert lm.events.count("stop endless") == 2
    assert not lm.running


def test_it_runs_where_an_event_loop_runs_already():
    runs = []

    async def cell() -> None:
        run_batches(Log(), calls("a", "b"), runs.extend)

    asyncio.run(cell())
    assert runs == ["a", "b"]


def test_a_sweep_in_small_batches_is_the_same_to_the_bit():
    with pc.LM("fake") as lm:
        asked = dict(clean="The Eiffel is in the", corrupt="The Colosseum is in the", answer=7, foil=9)
        whole, parts = patch_sweep(lm, **asked), patch_sweep(lm, **asked, batch=5)
        assert whole.grid.size > 3 * 5
        assert np.array_equal(whole.grid, parts.grid, equal_nan=True)
        assert (whole.clean, whole.corrupt, whole.noise_floor) == (parts.clean, parts.corrupt, parts.noise_floor)
        assert lm.engine.status()["programs"] == 0


@pytest.mark.parametrize("per_second", [0.4, 7.0, 1e5])
def test_batches_grow_to_what_the_measured_speed_allows(monkeypatch, per_second: float):
    now = [0.0]
    monkeypatch.setattr(grade.time, "monotonic", lambda: now[0])
    pace, sizes, seen = Pace(512), [], []
    items = range(4000 if per_second > 100 else 540)
    for part in pace.parts(items):
        now[0] += len(part) / per_second
        sizes.append(len(part))
        seen += part
        pace.done()
    assert seen == [*items]
    assert sizes[0] == grade.FIRST
    assert max(sizes) == (512 if per_second > 100 else max(grade.FIRST, int(per_second * BATCH_S)))
    assert max(sizes[1:]) / per_second <= max(BATCH_S, 1 / per_second)


def test_an_item_that_is_larger_than_a_batch_is_one():
    pace = Pace(8, first=8)
    assert [*pace.parts([3, 20, 4, 4, 1], lambda size: size)] == [[3], [20], [4, 4], [1]]
