"""Gradings of several clients in one server: they take turns, leave time to requests, and wait for room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from patchclamp.engines.vllm import async_engine
from patchclamp.engines.vllm.async_engine import AsyncEngine
from patchclamp.errors import CapacityError

LEASE = (((1, 2), (2, 4), (1, 2), {}),)


class Gradings(AsyncEngine):
    """`AsyncEngine._grade` with a core that answers at once. `happened`: what the workers were asked, in order."""

    def __init__(self) -> None:
        self._loop, self._preparing = asyncio.get_running_loop(), ThreadPoolExecutor(4)
        self._batch, self.client = asyncio.Lock(), None
        self.happened: list[str] = []
        self.ended: list[str] = []

    async def ask(self, method: str, *args: Any, only: int | None = None) -> Any:
        verb, name, *_ = args
        self.happened.append(verb)
        await asyncio.sleep(0)
        if verb == "close":
            self.ended.append(name)
        return [verb]


def calls(batches: int, happened: list[str]) -> Iterator[Any]:
    yield "lease", LEASE[0]
    yield "open", (b"",)
    for _ in range(batches):
        yield "run", (512,)
        happened.append("wait")
        yield "wait", (0.002,)
        happened.append("waited")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The answers of the core to "lease", in order; then it always has room."""
    answers: list[Any] = []

    def tell(client: Any, verb: str, *args: Any, only: int) -> list[Any]:
        future: Any = asyncio.get_running_loop().create_future()
        future.set_result(answers.pop(0) if answers and verb == "lease" else b"lease")
        return [future]

    monkeypatch.setattr(async_engine, "tell_cores", tell)
    monkeypatch.setattr(async_engine, "RETRY_S", 0.001)
    return answers


def test_no_batch_runs_in_the_time_that_another_leaves_to_requests(cores):
    async def several() -> list[str]:
        engine = Gradings()
        await asyncio.gather(*(engine._grade(calls(5, engine.happened), lambda: None) for _ in range(3)))
        assert len(set(engine.ended)) == 3
        return engine.happened

    turns = [each for each in asyncio.run(several()) if each in ("run", "wait", "waited")]
    assert turns == ["run", "wait", "waited"] * 15


def test_a_caller_that_leaves_while_its_grading_waits_for_room_is_noticed(cores):
    cores += [None] * 10_000
    beats: list[None] = []

    async def one() -> Gradings:
        engine = Gradings()
        task = asyncio.ensure_future(engine._grade(calls(1, engine.happened), lambda: beats.append(None)))  # type: ignore
        async with asyncio.timeout(10):
            while len(beats) < 5:  # it waits, and says so
                await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return engine

    engine = asyncio.run(one())
    assert "open" not in engine.happened
    assert len(engine.ended) == 1


def test_who_waits_too_long_for_room_is_told(cores, monkeypatch):
    monkeypatch.setattr(async_engine, "LEASE_S", 0.02)
    cores += [None] * 10_000

    async def one() -> None:
        engine = Gradings()
        try:
            await engine._grade(calls(1, engine.happened), lambda: None)
        finally:
            assert len(engine.ended) == 1

    with pytest.raises(CapacityError, match="cache blocks"):
        asyncio.run(one())
