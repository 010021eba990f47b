"""Batches of `pc.LM(url)`: how many of their requests a server runs at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import patchclamp as pc
from patchclamp.engines import wire
from patchclamp.engines.base import Answer, Request
from patchclamp.engines.vllm.server import ServeLimits
from patchclamp.language import Program
from patchclamp.plan import Prompt, bind
from patchclamp.plan.table import record_count
from patchclamp.serve.engine import ARGUMENTS, _Running

IDS = [5, 6, 7, 8]


class Engine:
    """Starts requests, and ends them when it is told."""

    def __init__(self):
        self.futures, self.started, self.aborted = {}, [], []

    def start(self, requests, carried):
        self.started += [request.run for request in requests]
        self.futures |= {request.run: Future() for request in requests}
        return [self.futures[request.run] for request in requests]

    def abort(self, runs):
        self.aborted += runs

    def end(self, run):
        self.futures.pop(run).set_result(Answer([1], "a", None, {}, "stop", 0))


@pytest.fixture(scope="module")
def bound():
    """A program of 3 records."""
    with pc.LM("fake") as lm:
        made = bind(Program.of([], [pc.resid_post]), "r", Prompt(IDS, lambda: ("", [])), 1, lm.sites, lm._source)
    assert record_count(made.ops) == 3
    return made


def running(bound, engine, programs, most):
    requests = [
        Request(f"a-b-{i}", IDS, 1, msgspec.structs.replace(bound, run=f"a-b-{i}") if has else None, {})
        for i, has in enumerate(programs)
    ]
    asked = [wire.WireRequest(each.run, IDS, 1, None, [], {}, [], None, False) for each in requests]
    front = SimpleNamespace(
        engine=engine, limits=ServeLimits(program_records=most), waiting={}, failed=lambda error, owner: None
    )
    return _Running(front, "a", wire.WireBatch(asked, b""), requests), front


def test_as_many_run_as_have_no_more_records_than_one_request_may(bound):
    async def check():
        engine = Engine()
        batch, front = running(bound, engine, [True] * 7 + [False] * 3, 8)
        seen, most = [], []

        async def read():
            async for frame in batch.frames():
                seen.append(frame)

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        while engine.futures:
            most.append(len(engine.futures))
            engine.end(next(iter(engine.futures)))
            await asyncio.sleep(0)
        await reading
        assert engine.started == [f"a-b-{i}" for i in range(10)]  # in order
        assert most == [2, 2, 2, 2, 2, 5, 4, 3, 2, 1]  # what has no program needs no room, but its turn
        assert engine.aborted == []
        assert front.waiting == {}

    asyncio.run(check())


def test_what_waits_is_aborted_and_what_is_left_of_a_connection_never_starts(bound):
    async def check():
        engine = Engine()
        batch, front = running(bound, engine, [True] * 5, 3)
        frames = batch.frames()
        ahead = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0)
        assert list(front.waiting) == ["a-b-1", "a-b-2", "a-b-3", "a-b-4"]
        front.waiting["a-b-1"]("a-b-1")
        (event,) = wire.Frames().feed(await ahead)
        assert (event.i, event.error[0]) == (1, "EngineError")
        engine.end("a-b-0")
        assert engine.started == ["a-b-0", "a-b-2"]
        await anext(frames)
        await frames.aclose()
        batch.stop()
        assert front.waiting == {}
        assert sorted(engine.aborted) == ["a-b-2", "a-b-3", "a-b-4"]
        engine.end("a-b-2")
        assert engine.started == ["a-b-0", "a-b-2"]

    asyncio.run(check())


@pytest.mark.parametrize("method", ARGUMENTS)
def test_arguments_of_the_tokenizer_are_not_converted(method):
    right = {str: "a", list[int]: [5, 6], str | None: None, list[dict[str, Any]]: [{"role": "user", "content": "a"}],
             dict[str, Any]: {"tools": None}}  # fmt: skip
    wrong = {str: [5, None, b"a"], list[int]: [[True], [1.0], ["5"], 5, None], str | None: [5],
             list[dict[str, Any]]: [["a"], {"role": "user"}, None], dict[str, Any]: [[], None]}  # fmt: skip
    kinds = ARGUMENTS[method].__args__
    given = [right[kind] for kind in kinds]
    assert list(msgspec.convert(given, ARGUMENTS[method])) == given
    bad = [[*given[:i], each, *given[i + 1 :]] for i, kind in enumerate(kinds) for each in wrong[kind]]
    for arguments in (*bad, [], [*given, 1]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(arguments, ARGUMENTS[method])
