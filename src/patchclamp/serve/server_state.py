"""The state of one API process: its engine with a proved `LM`, kept objects, client leases, bindings, and the log.

Objects stored by a request belong to an owner: the hash of its API key. The log has one JSON object per line, among
vLLM's lines. No line contains a prompt, an answer, a name chosen by a caller, or an error message, which may quote the
prompt.
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
from typing import Any, ClassVar

import msgspec

from patchclamp.engines.vllm.async_engine import AsyncEngine
from patchclamp.engines.vllm.server import ServeLimits, metrics_of, serving
from patchclamp.engines.wire import BEAT_S, LEASE_S
from patchclamp.errors import NoKey, PatchclampError, RunError, as_patchclamp_error, pack, unpack
from patchclamp.language import Lens, Program
from patchclamp.lm import LM
from patchclamp.plan.bind import Binding, Bindings, is_of_length_alone
from patchclamp.plan.prompt import Prompt
from patchclamp.plan.table import record_work
from patchclamp.proving import ensure_proved
from patchclamp.serve.kept import KeptObjects, NoteChannel, SweepJournals
from patchclamp.serve.monitoring import watch_of
from patchclamp.stream import RunWatch, look

OPEN = "open"  # the owner on servers without API keys: anyone who knows the name of an object can use it


def owner_of(authorization: str | None, has_keys: bool) -> str:
    """Return the owner of a request with this `Authorization` header. vLLM itself validates keys, but not on
    every route. Raises `NoKey` if the server has keys and the request has none."""
    if not has_keys:
        return OPEN
    if not authorization:
        raise NoKey("this server requires an API key: Authorization: Bearer KEY")
    key = authorization.partition(" ")[2]
    return hashlib.sha256(key.encode()).hexdigest()[:32]


logger: logging.Logger = logging.getLogger("vllm.patchclamp")  # a child of vLLM's logger, for its handlers and level
OP = re.compile(r"(edits|capture)\[\d+\]")
MAX_OWNER = 8  # characters: enough to distinguish a few keys, too few to construct the name of a run


def log(event: str, owner: str, **facts: Any) -> None:
    """Log a line. `owner` is the owner of the request."""
    if logger.isEnabledFor(logging.INFO):
        whose = owner if owner == OPEN else owner[:MAX_OWNER]
        logger.info("%s", msgspec.json.encode({"event": event, "owner": whose, **facts}).decode())


def of_error(error: PatchclampError) -> dict[str, Any]:
    """Return the loggable fields of an error: its class, its status, and the op that caused it."""
    op = OP.search(error.path or "")
    return {"error": type(error).__name__, "status": error.status, "op": op[0] if op else None}


LOOK_EVERY_S = 2.0
GRACE_S = 3.0  # for a client to reconnect after its connection closes


class Leases:
    """Leases of client sessions (`owner-session`): a client's captures are freed when its heartbeat stops. The engine
    cores store the time of the last heartbeat, so any API process can receive a heartbeat. `hear` is called
    periodically to receive other processes' notes."""

    def __init__(self, engine: AsyncEngine, lease_s: float, hear: Callable[[], Awaitable[None]]) -> None:
        self._engine, self._lease_s, self._hear = engine, lease_s, hear
        self._looking = asyncio.ensure_future(self._look())
        self._connections: Counter[str] = Counter()  # open heartbeat connections by session

    def renew(self, session: str) -> None:
        """Renew a client's lease after a heartbeat."""
        self._engine.renew(session)

    def extend(self, session: str) -> None:
        """Extend a client's lease to at least `BEAT_S`: a batch may arrive before the client's first heartbeat, or
        after the client was killed."""
        self._engine.renew(session, self._lease_s - BEAT_S, extend=True)

    def opened(self, session: str) -> None:
        """Register a heartbeat connection and renew the lease."""
        self._connections[session] += 1
        self.renew(session)

    def lost(self, session: str) -> None:
        """Remove a heartbeat connection. After the last one, the lease expires unless the client reconnects soon."""
        self._connections[session] -= 1
        if self._connections[session] > 0:
            return
        del self._connections[session]
        self._engine.renew(session, self._lease_s - GRACE_S)

    async def end(self, session: str) -> None:
        """End a client's lease now."""
        self._engine.renew(session, self._lease_s + 1)
        await self._engine.free_dead(self._lease_s)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            with contextlib.suppress(Exception):  # an engine that ended is reported elsewhere
                await self._engine.free_dead(self._lease_s)
                await self._engine.counts()  # for the metrics
                await self._hear()


MAX_KNOWN = 256
MAX_VECTOR_BYTES = 1 << 17  # largest vectors of a cached binding


class KnownBindings:
    """Binds programs to prompts with their owners' banks and runs, and caches the bindings of repeated programs, one
    per prompt length. A change to the owner's bank invalidates its entries. Programs that read runs are
    not cached."""

    def __init__(self, lm: LM, kept: KeptObjects) -> None:
        self._lm, self._kept, self._lock = lm, kept, threading.Lock()
        self._known: dict[tuple[str, int, Program, int, int], Binding] = {}

    def of(self, owner: str, program: Program, run: str, prompt: Prompt, max_tokens: int) -> Binding:
        """Bind a program to a prompt for the run with this key. Raises as `bind` does."""
        return self.job(owner, program, prompt, max_tokens)(run)

    def job(
        self, owner: str, program: Program, prompt: Prompt, max_tokens: int,
        count: Callable[[int], None] = lambda records: None,
    ) -> Callable[[str], Binding]:  # fmt: skip
        """Return a function from a run's key to its binding, safe on any thread. Names are resolved in a
        snapshot of the owner's objects. `count` receives each op's number of records; raising aborts binding."""
        owned = self._kept.owned(owner)
        version = self._kept.bank_version(owner)

        def bind(run: str) -> Binding:
            key = owner, version, program, len(prompt.ids), max_tokens
            with self._lock:
                known = self._known.get(key)
            if known is not None and known.bound is not None:
                count(record_work(known.bound.ops))
                return msgspec.structs.replace(known, bound=msgspec.structs.replace(known.bound, run=run))
            binding = Bindings(self._lm.sites, owned.source, owned, False, count).of(program, run, prompt, max_tokens)
            small = sum(rows.nbytes for rows in binding.vectors.values()) <= MAX_VECTOR_BYTES
            small = small and not any(isinstance(op, Lens) and op.translators for _, op in program.ops)
            if small and not binding.sources and is_of_length_alone(program):
                with self._lock:
                    self._known[key] = binding
                    if len(self._known) > MAX_KNOWN:
                        del self._known[next(iter(self._known))]
            return binding

        return bind


class ReadoutReader:
    """Reads all due readouts of running requests together, about once per step."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine, self._due = engine, list[tuple[RunWatch, asyncio.Future[None]]]()
        self._task: asyncio.Task[None] | None = None

    async def look(self, watch: RunWatch) -> None:
        """Wait until the readouts that a request has produced so far have been read."""
        read = asyncio.get_running_loop().create_future()
        self._due.append((watch, read))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._read())
        await read

    async def _read(self) -> None:
        while self._due:
            due, self._due = [pair for pair in self._due if not pair[1].done()], []
            errors = await asyncio.to_thread(look, self._engine, [(watch, None) for watch, _ in due])
            for (_, read), error in zip(due, errors, strict=True):
                if not read.done():  # else its client has disconnected
                    read.set_result(None) if error is None else read.set_exception(error)


class Front:
    """The state of one API process, created once on the event loop of an `AsyncLLM`.

    engine, lm: run programs alongside the server's other requests. `lm` blocks when it reads captures: use it off the
        event loop's thread
    leases: the leases of client sessions
    limits: the limits on one caller's requests and stored objects
    kept: stored runs, vectors and programs, by owner
    bindings: binds programs to prompts, with a cache
    readouts: reads the probes, lenses and features of running requests
    waiting: by run, a function that aborts a client's request before it starts
    journals: journals for resuming sweeps
    shows_scores: True if responses include the scores of the server's own probes
    under_way: the number of running studies and grading jobs, by owner
    has_keys: True if callers are identified by API keys
    """

    kept: KeptObjects
    has_keys: bool

    def __init__(self, client: Any) -> None:
        name = client.vllm_config.model_config.model
        self.model_name: str = client.vllm_config.model_config.served_model_name
        self.engine: AsyncEngine = AsyncEngine(client, name)
        self.lm: LM = LM(name, engine=self.engine)
        self.limits: ServeLimits = serving(client.vllm_config)
        self._metrics = metrics_of(self.model_name)
        self.shows_scores: bool = bool(self.engine.monitors) and self.limits.show_scores
        self._channel = NoteChannel(self.engine)
        always_on = [each.probe for each in self.engine.monitors]
        self.kept, self.has_keys = KeptObjects(self.limits, channel=self._channel, always_on=always_on), False
        self.bindings: KnownBindings = KnownBindings(self.lm, self.kept)
        self.readouts: ReadoutReader = ReadoutReader(self.engine)
        self.waiting: dict[str, Callable[[str], None]] = {}
        self.journals: SweepJournals = SweepJournals(self.limits)
        self.under_way: Counter[str] = Counter()
        self.leases: Leases = Leases(self.engine, LEASE_S, self.hear)
        self._proving = asyncio.ensure_future(self._prove())

    async def ready(self) -> None:
        """Wait until the sites are proved for the model's current weights. Raises any startup or proving error."""
        if self._proving.done() and self.engine.weights != self.engine.proved_weights:
            self._proving = asyncio.ensure_future(self._prove_sites())
        await asyncio.shield(self._proving)

    async def hear(self) -> None:
        """Apply changes that the server's other API processes made to kept objects and weights."""
        for note in await self._channel.news():
            self.kept.hear(note, self.lm)
        await self.engine.count_updates()

    def check_under_way(self, owner: str) -> None:
        """Raise `CapacityError` if the owner is already running the maximum number of studies and grading jobs."""
        wait = "wait until one has finished, or cancel one"
        self.limits.check_room("sweeps", self.under_way[owner], 1, "concurrent studies", fix=wait)

    def failed(self, error: PatchclampError, owner: str) -> None:
        """Count and log an error response to an owner's request."""
        self._metrics.failed(error)
        log("error", owner, **of_error(error))

    async def _prove(self) -> None:
        await self.engine.ask("started", True)
        await self.engine.count_updates()
        await self._prove_sites()
        if self.engine.monitors:
            watch_of(self.engine, self.model_name, self.limits.probe_log)

    async def _prove_sites(self) -> None:
        began, self.engine.metrics = time.monotonic(), None
        await asyncio.to_thread(ensure_proved, self.lm)
        sites = self.lm.sites
        log("proved", OPEN, took_s=round(time.monotonic() - began, 2), sites=len(sites.names),
            withdrawn=list(sites.withdrawn))  # fmt: skip
        self.engine.metrics = self._metrics  # set last: the proofs are not counted as requests


class ClientWork:
    """A request's work on its own thread, for a response that sends results as they arrive. It counts towards the
    owner's limit until the thread ends. `stop` makes the next report raise `RunError`.

    event: the name of its log line · events: queue of the results or an error, then None
    """

    event: ClassVar[str]
    events: asyncio.Queue[Any]
    front: Front
    owner: str

    def __init__(self, front: Front, owner: str) -> None:
        self.front, self.owner, self._is_stopped = front, owner, False
        self.events, self._loop, self._began_s = asyncio.Queue(), asyncio.get_running_loop(), time.perf_counter()
        threading.Thread(target=self._run, name=f"patchclamp {self.event}", daemon=True).start()
        front.under_way[owner] += 1

    def work(self) -> None:
        """Do the work on the thread, and report results with `put`."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return the fields of its log line."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ask the thread to stop, after the client disconnected."""
        self._is_stopped = True

    def raise_if_stopped(self) -> None:
        if self._is_stopped:
            raise RunError("the client disconnected")

    def put(self, result: Any) -> None:
        """Send a result; called on the thread."""
        self._on_loop(self.events.put_nowait, result)

    def ended(self) -> None:
        """Close the event queue and log the work; called on the event loop's thread after the work has ended."""
        self.events.put_nowait(None)
        self.front.under_way[self.owner] -= 1
        log(self.event, self.owner, **self.facts(), took_s=round(time.perf_counter() - self._began_s, 6))

    def _run(self) -> None:
        try:
            self.work()
        except Exception as error:
            self.put(unpack(pack(as_patchclamp_error(error))))  # drops the traceback, whose frames reference the runs
        self._on_loop(self.ended)

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(call, *args)


def front_of(client: Any) -> Front:
    """Return the `Front` of an `AsyncLLM`, created at the first call."""
    front = getattr(client, "patchclamp", None)
    if front is None:
        front = client.patchclamp = Front(client)
    return front
