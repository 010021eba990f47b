"""Many runs in batches of which several are under way: while one is read, others are queued and computed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from patchclamp.engines import base
from patchclamp.lm import LM
from patchclamp.run import Run

UNDER_WAY = 2
LOOK_EVERY_S = 0.2
BATCH_S = 2.0  # time a batch should take: a process that is killed loses the batches under way
FIRST, GROWTH = 4, 4  # items of the first batch; how many times as large the next may be

Item = TypeVar("Item")


class Pace:
    """Cuts items into batches that take about `BATCH_S`, by the measured speed of the batches before them. The first
    ones are small. Order does not depend on speed.

    most, first: units in a batch at most, and in the first batch; an item is one unit, unless `parts` has `units`
    """

    def __init__(self, most: int, first: int = FIRST) -> None:
        self._most, self._size = most, min(first, most)
        self._under_way: collections.deque[int] = collections.deque()
        self._done: collections.deque[tuple[float, int]] = collections.deque(maxlen=UNDER_WAY + 1)  # times, total units

    def parts(self, items: Iterable[Item], units: Callable[[Item], int] = lambda item: 1) -> Iterator[list[Item]]:
        """Yields consecutive items, as many as a batch has when it is asked for, and at least one."""
        part: list[Item] = []
        size = 0
        for item in items:
            more = units(item)
            if part and size + more > self._size:
                yield self._begin(part, size)
                part, size = [], 0
            part.append(item)
            size += more
        if part:
            yield self._begin(part, size)

    def _begin(self, part: list[Item], size: int) -> list[Item]:
        if not self._done:
            self._done.append((time.monotonic(), 0))
        self._under_way.append(size)
        return part

    def done(self) -> None:
        """Notes that the oldest batch under way is finished."""
        now, units = time.monotonic(), self._done[-1][1] + self._under_way.popleft()
        self._done.append((now, units))
        began, before = self._done[0]
        in_time = int((units - before) / max(now - began, 1e-6) * BATCH_S)
        self._size = max(1, min(in_time, GROWTH * self._size, self._most))


def run_batches(
    lm: LM,
    calls: Iterable[Mapping[str, Any]],
    read: Callable[[list[Run]], None],
    under_way: int = UNDER_WAY,
    pace: Pace | None = None,
) -> None:
    """Makes every call, the arguments of an `lm.arun` of a list, and has `read` take its runs, in the calls' order.
    Up to `under_way` calls are in flight. `pace` is notified of each batch that has been read.

    `read` is called on another thread. The first error of a call or of `read`, and an interrupt, stop what is under way
    and are raised.
    """
    stopped: Future[None] = Future()

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(task.cancel)

        stopped.add_done_callback(cancel)
        await _run_batches(lm, calls, read, under_way, pace)

    # a thread, for a notebook has an event loop on this one already
    with base.rarely(), ThreadPoolExecutor(1, thread_name_prefix="patchclamp batches") as thread:
        # the thread starts before anything is under way: an interrupt would not wait for it
        thread.submit(int).result()
        ended = thread.submit(lambda: asyncio.run(main()))
        try:
            # Python misses a signal that comes just before it blocks, until it looks again
            while not wait([ended], timeout=LOOK_EVERY_S).done:
                pass
        except BaseException:
            stopped.set_result(None)
            raise
        ended.result()


async def _run_batches(
    lm: LM, calls: Iterable[Mapping[str, Any]], read: Callable[[list[Run]], None], most: int, pace: Pace | None
) -> None:
    under_way: collections.deque[asyncio.Task[list[Run]]] = collections.deque()

    async def read_one() -> None:
        read(await under_way.popleft())
        if pace is not None:
            pace.done()

    try:
        for call in calls:
            under_way.append(asyncio.create_task(lm.arun(**call)))
            await asyncio.sleep(0)  # the task submits its runs
            if len(under_way) == most:
                await read_one()
        while under_way:
            await read_one()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
