"""One API process's part of patchclamp: the server's engine, an `LM` on it whose sites are proved, and what is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from patchclamp.engines.vllm.async_engine import AsyncEngine
from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.metrics import metrics_of
from patchclamp.engines.wire import LEASE_S
from patchclamp.errors import PatchclampError
from patchclamp.lm import LM
from patchclamp.proving.prove import ensure_proved
from patchclamp.serve.bindings import KnownBindings
from patchclamp.serve.journal import Journal
from patchclamp.serve.kept import Kept
from patchclamp.serve.kept_sweeps import KeptSweeps
from patchclamp.serve.leases import Leases
from patchclamp.serve.log import log, of_error
from patchclamp.serve.owners import OPEN


class Front:
    """Made on the event loop of an `AsyncLLM`, once.

    engine, lm: what carries programs beside the server's other requests. `lm` reads captures and blocks: use it on
        another thread than the loop's
    leases: which clients of ours are alive
    limits: what one caller may ask for, and leave here
    kept: runs, vectors and programs that requests left here, by whose they are
    bindings: programs bound to prompts
    waiting: by run, what aborts a request of a client of ours that has not started
    kept_sweeps: what sweeps computed, from which they can go on
    has_keys: whether our own routes know each caller by an API key
    """

    def __init__(self, client: Any) -> None:
        name = client.vllm_config.model_config.model
        self.model_name: str = client.vllm_config.model_config.served_model_name
        self.engine = AsyncEngine(client, name)
        self.lm = LM(name, engine=self.engine)
        self.limits = configuration.serving(client.vllm_config)
        self._metrics = metrics_of(self.model_name)
        self._journal = Journal(self.engine)
        self.kept, self.has_keys = Kept(self.limits, journal=self._journal), False
        self.bindings = KnownBindings(self.lm, self.kept)
        self.waiting: dict[str, Callable[[str], None]] = {}
        self.kept_sweeps = KeptSweeps(self.limits)
        self.leases = Leases(self.engine, LEASE_S, self.hear)
        self._proving = asyncio.ensure_future(self._prove())

    async def ready(self) -> None:
        """Returns when the sites are proved. Raises what starting or proving raised."""
        await asyncio.shield(self._proving)

    async def hear(self) -> None:
        """Takes what the server's other API processes have kept and dropped. A server of one has none."""
        for note in await self._journal.news():
            self.kept.hear(note, self.lm)

    def failed(self, error: PatchclampError, owner: str) -> None:
        """A request of an owner is answered with an error."""
        self._metrics.failed(error)
        log("error", owner, **of_error(error))

    async def _prove(self) -> None:
        began = time.monotonic()
        await self.engine.ask("started", True)
        await asyncio.to_thread(ensure_proved, self.lm)
        sites = self.lm.sites
        log("proved", OPEN, took_s=round(time.monotonic() - began, 2), sites=len(sites.names),
            withdrawn=list(sites.withdrawn))  # fmt: skip
        self.engine.metrics = self._metrics  # the proofs are nobody's requests


def front_of(client: Any) -> Front:
    """The front of an `AsyncLLM`, made when it is first asked for."""
    front = getattr(client, "patchclamp", None)
    if front is None:
        front = client.patchclamp = Front(client)
    return front
