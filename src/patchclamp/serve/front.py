"""One API process's part of patchclamp: the server's engine, an `LM` on it whose sites are proved, and what is kept.

Whose a request is: what it leaves on the server belongs to the hash of the API key that it came with.

The server's log of what it did with programs: an object of JSON a line, among vLLM's lines.

No line has a prompt, an answer, a name that a caller chose, or the text of an error, which may quote the prompt.

Clients that live: what one that died has left is freed.

Programs that requests bring again and again, each bound once for all prompts of one length.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from patchclamp.engines.vllm.async_engine import AsyncEngine
from patchclamp.engines.vllm.compat import configuration
from patchclamp.engines.vllm.metrics import metrics_of
from patchclamp.engines.wire import LEASE_S
from patchclamp.errors import NoKey, PatchclampError
from patchclamp.language import Program
from patchclamp.lm import LM
from patchclamp.plan.bind import Binding, Bindings, is_of_length_alone
from patchclamp.plan.prompt import Prompt
from patchclamp.plan.table import record_count
from patchclamp.proving.prove import ensure_proved
from patchclamp.serve.kept import Kept, KeptSweeps, NoteChannel

OPEN = "open"  # of servers without API keys: what is there belongs to whoever knows its name


def owner_of(authorization: str | None, has_keys: bool) -> str:
    """The owner of a request with that `Authorization` header. vLLM has compared it with the server's keys.

    Raises `NoKey` where there are keys and the request has none: a route that vLLM does not guard would let it in.
    """
    if not has_keys:
        return OPEN
    if not authorization:
        raise NoKey("this server wants an API key: Authorization: Bearer KEY")
    key = authorization.partition(" ")[2]
    return hashlib.sha256(key.encode()).hexdigest()[:32]


logger = logging.getLogger("vllm.patchclamp")  # below vLLM's, whose handlers and level it has
OP = re.compile(r"(edits|capture)\[\d+\]")
MAX_OWNER = 8  # characters: enough to tell a few keys apart, too few to be the first part of anybody's names


def log(event: str, owner: str, **facts: Any) -> None:
    """A line. owner: whose request it was, by the hash of its key."""
    if logger.isEnabledFor(logging.INFO):
        whose = owner if owner == OPEN else owner[:MAX_OWNER]
        logger.info("%s", msgspec.json.encode({"event": event, "owner": whose, **facts}).decode())


def of_error(error: PatchclampError) -> dict[str, Any]:
    """What a line may say of an error: its class, its status, and the op of the program that it speaks of."""
    op = OP.search(error.path or "")
    return {"error": type(error).__name__, "status": error.status, "op": op[0] if op else None}


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


MAX_KNOWN = 256
MAX_VECTOR_BYTES = 1 << 17  # of a binding that is remembered


class KnownBindings:
    """Binds programs to prompts, with what their owners have kept. What it remembers of an owner's program holds until
    something else is in the owner's bank; a program that reads runs is bound anew each time."""

    def __init__(self, lm: LM, kept: Kept) -> None:
        self._lm, self._kept, self._lock = lm, kept, threading.Lock()
        self._known: dict[tuple[str, int, Program, int, int], Binding] = {}

    def of(self, owner: str, program: Program, run: str, prompt: Prompt, max_tokens: int) -> Binding:
        """A program bound to a prompt, as a run of that key. Raises what `bind` raises."""
        return self.job(owner, program, prompt, max_tokens)(run)

    def job(
        self, owner: str, program: Program, prompt: Prompt, max_tokens: int,
        count: Callable[[int], None] = lambda records: None,
    ) -> Callable[[str], Binding]:  # fmt: skip
        """A function from a run's key to its binding, safe on any thread. Names refer to what the owner keeps now.

        count: called with the number of records of each op; an exception that it raises ends binding
        """
        owned = self._kept.owned(owner)
        version = self._kept.bank_version(owner)

        def bind(run: str) -> Binding:
            key = owner, version, program, len(prompt.ids), max_tokens
            with self._lock:
                known = self._known.get(key)
            if known is not None and known.bound is not None:
                count(record_count(known.bound.ops))
                return msgspec.structs.replace(known, bound=msgspec.structs.replace(known.bound, run=run))
            binding = Bindings(self._lm.sites, owned.source, owned, False, count).of(program, run, prompt, max_tokens)
            small = sum(rows.nbytes for rows in binding.vectors.values()) <= MAX_VECTOR_BYTES
            if small and not binding.sources and is_of_length_alone(program):
                with self._lock:
                    self._known[key] = binding
                    if len(self._known) > MAX_KNOWN:
                        del self._known[next(iter(self._known))]
            return binding

        return bind


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
        self._channel = NoteChannel(self.engine)
        self.kept, self.has_keys = Kept(self.limits, channel=self._channel), False
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
        for note in await self._channel.news():
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
