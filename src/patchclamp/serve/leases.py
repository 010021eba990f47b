"""Clients that live: what one that died has left is freed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable

from patchclamp.engines.vllm.async_engine import AsyncEngine

LOOK_EVERY_S = 5.0
GRACE_S = 3.0  # that a client whose connection closed has to come back


class Leases:
    """Sessions of our clients, `owner-session` each. The engine cores remember when each was last heard of, so that any
    API process may hear it. `hear` takes what other processes say, now and then."""

    def __init__(self, engine: AsyncEngine, lease_s: float, hear: Callable[[], Awaitable[None]]) -> None:
        self._engine, self._lease_s, self._hear = engine, lease_s, hear
        self._looking = asyncio.ensure_future(self._look())
        self._freeing: set[asyncio.Task[None]] = set()
        self._connections: Counter[str] = Counter()  # by session: those that say that its client is alive
        self._lost: set[str] = set()  # sessions whose last connection has closed a moment ago

    def renew(self, session: str) -> None:
        """A client is alive."""
        self._lost.discard(session)
        self._engine.renew(session)

    def renew_unless_lost(self, session: str) -> None:
        """A client said something that may be its last word, and may come after its connection has closed."""
        if session not in self._lost:
            self._engine.renew(session)

    def opened(self, session: str) -> None:
        """A connection says from now on that a client is alive."""
        self._connections[session] += 1
        self.renew(session)

    def lost(self, session: str) -> None:
        """A connection that said so has closed. If it was the last one and none comes soon, the client is dead."""
        self._connections[session] -= 1
        if self._connections[session] > 0:
            return
        del self._connections[session]
        self._lost.add(session)
        self._engine.renew(session, self._lease_s - GRACE_S)
        task = asyncio.ensure_future(self._free_soon(session))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    async def _free_soon(self, session: str) -> None:
        await asyncio.sleep(GRACE_S + 0.1)
        with contextlib.suppress(Exception):
            await self._engine.free_dead(self._lease_s)
        self._lost.discard(session)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            with contextlib.suppress(Exception):  # an engine that ended says so elsewhere
                await self._engine.free_dead(self._lease_s)
                await self._engine.counts()  # for the metrics
                await self._hear()
