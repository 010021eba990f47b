"""Clients that live: what one that died has left is freed."""

from __future__ import annotations

import asyncio
import contextlib
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

    def renew(self, session: str) -> None:
        """A client is alive."""
        self._engine.renew(session)

    def lost(self, session: str) -> None:
        """The connection that said that a client is alive has closed: unless it comes back soon, it is dead."""
        self._engine.renew(session, self._lease_s - GRACE_S)
        task = asyncio.ensure_future(self._free_soon())
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    async def _free_soon(self) -> None:
        await asyncio.sleep(GRACE_S + 0.1)
        with contextlib.suppress(Exception):
            await self._engine.free_dead(self._lease_s)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            with contextlib.suppress(Exception):  # an engine that ended says so elsewhere
                await self._engine.free_dead(self._lease_s)
                await self._engine.counts()  # for the metrics
                await self._hear()
