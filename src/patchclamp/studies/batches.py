"""Many runs in batches of which several are under way: while one is read, others are queued and computed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from patchclamp.engines import collecting
from patchclamp.lm import LM
from patchclamp.run import Run

UNDER_WAY = 2
LOOK_EVERY_S = 0.2


def run_batches(
    lm: LM, calls: Iterable[Mapping[str, Any]], read: Callable[[list[Run]], None], under_way: int = UNDER_WAY
) -> None:
    """Makes every call, the arguments of an `lm.arun` of a list, and has `read` take its runs, in the calls' order.
    So many calls are `under_way` until one is read.

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
        await _run_batches(lm, calls, read, under_way)

    # a thread, for a notebook has an event loop on this one already
    with collecting.rarely(), ThreadPoolExecutor(1, thread_name_prefix="patchclamp batches") as thread:
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
    lm: LM, calls: Iterable[Mapping[str, Any]], read: Callable[[list[Run]], None], most: int
) -> None:
    under_way: collections.deque[asyncio.Task[list[Run]]] = collections.deque()
    try:
        for call in calls:
            under_way.append(asyncio.create_task(lm.arun(**call)))
            await asyncio.sleep(0)  # the task submits its runs
            if len(under_way) == most:
                read(await under_way.popleft())
        while under_way:
            read(await under_way.popleft())
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
