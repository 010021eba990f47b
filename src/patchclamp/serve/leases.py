"""Clients that live: what one that died has left is freed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from patchclamp.engines.vllm.async_engine import AsyncEngine

LOOK_EVERY_S = 5.0


class Leases:
    """Sessions of our clients, `owner-session` each. The engine cores remember when each was last heard of, so that any
    API process may hear it. `hear` takes what other processes say, now and then."""

    def __init__(self, engine: AsyncEngine, lease_s: float, hear: Callable[[], Awaitable[None]]) -> None:
        self._engine, self._lease_s, self._hear = engine, lease_s, hear
        self._looking = asyncio.ensure_future(self._look())

    def renew(self, session: str) -> None:
        """A client is alive."""
        self._engine.renew(session)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            with contextlib.suppress(Exception):  # an engine that ended says so elsewhere
                await self._engine.free_dead(self._lease_s)
                await self._engine.counts()  # for the metrics
                await self._hear()
