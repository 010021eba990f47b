"""The engine for a remote server: `pc.LM("http://host:8000")`. `engines.wire` defines the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import queue
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import numpy as np
import safetensors.numpy

from patchclamp.engines import wire
from patchclamp.engines.base import (
    ABORTED,
    Answer,
    Captured,
    Engine,
    Expanded,
    PackedTokens,
    Part,
    Request,
    TopTokens,
    Wanted,
    carry,
    receipt_of,
    settle,
)
from patchclamp.engines.grading import GradeJob, GradeTable, JobPart, arrived
from patchclamp.engines.tokenizer import Turn
from patchclamp.errors import TREE, EngineError, ModelError, PatchclampError, as_patchclamp_error, unpack
from patchclamp.language.dictionaries import FeatureRows
from patchclamp.language.ops import Translator
from patchclamp.plan.bound import source_of
from patchclamp.plan.table import RECORD

MAX_POSTS = 16  # concurrent batches
MAX_BATCH_BYTES = 1 << 24  # of a batch's vectors and token ids; the batch's last request may exceed it
CONNECT_S = 5.0  # timeout of the first connection
TRIES = 3  # of idempotent requests
Result = TypeVar("Result")


LARGE = ("fetch", "lens", "dictionary", "weight")  # routes whose response may take long


class HttpEngine(Engine):
    """A client of `patchclamp serve`.

    url: the server's address, such as "http://host:8000"
    api_key: the server's API key; default: the environment variable VLLM_API_KEY
    timeout_s: timeout for connecting, and for requests that do not run the model

    Raises `ModelError` if the server does not respond, `EngineError` if it is not a patchclamp server.
    """

    remote = True
    proved = True  # type: ignore[assignment]
    keeps_captures_here = False

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        try:
            import httpx
        except ImportError:
            raise EngineError("pc.LM(url) requires httpx: pip install 'patchclamp[http]'") from None
        self.url: str = url.rstrip("/").removesuffix("/v1")
        self._session, self._timeout_s, self._httpx = uuid.uuid4().hex[:16], timeout_s, httpx
        key = api_key or os.environ.get("VLLM_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._closed = False
        self.batch_difference, self._takes_jobs = "", False  # the server proves its batches
        self._checked: set[str] = set()  # sampling parameters that the server has accepted, as JSON
        self._batches: dict[str, _SentBatch] = {}  # by run
        self._freed: tuple[list[str], list[str]] = [], []  # to release, and to abort
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="patchclamp http", daemon=True)
        self._thread.start()
        try:
            info = self._wait(self._start())
        except (httpx.InvalidURL, httpx.TransportError) as error:
            self.close()
            raise ModelError(
                f"no response from {url} ({type(error).__name__}: {error}); expected the URL of a running "
                "`patchclamp serve`, http://host:port", "model"
            ) from None  # fmt: skip
        except BaseException:
            self.close()
            raise
        self.model, self.sites = info.model, info.site_map(self._feature_rows)
        self.run_prefix = f"{info.owner}-{self._session}-"
        self.tokenizer = HttpTokenizer(self)

    # -- from any thread

    def submit(self, requests: list[Request]) -> list[Future[Answer]]:
        self._check_open()
        futures: list[Future[Answer]] = [Future() for _ in requests]
        pairs = list(zip(requests, futures, strict=True))
        for batch in _batches(pairs, self.sites):
            self._loop.call_soon_threadsafe(self._post, batch)
        return futures

    def fetch(self, run: str, point: int, op: int | None = None, first: int = 0) -> Captured:
        return self.fetch_many([Wanted(run, point, op, first)])[0]

    def fetch_many(self, wanted: list[Wanted]) -> list[Captured]:
        async def take(response: Any) -> list[Captured]:
            file = wire.CapturedFile(len(wanted))
            async for data in response.aiter_bytes():
                file.feed(data)
            return file.captured()

        return self._wait(self._ask("POST", "fetch", wire.Fetch(wanted), again=True, take=take))

    def lens_many(self, wanted: list[Wanted], top: int, translator: Translator | None = None) -> list[TopTokens]:
        data = self._wait(self._ask("POST", "lens", wire.LensWanted(wanted, top, translator), again=True))
        return msgspec.msgpack.decode(data, type=PackedTokens).read(top)

    def _feature_rows(self, name: str, ids: Sequence[int]) -> FeatureRows:
        data = self._wait(self._ask("POST", "dictionary", wire.DictionaryWanted(name, list(ids)), again=True))
        return FeatureRows(**safetensors.numpy.load(data))

    @property
    def batch_refusal(self) -> str:
        if self._takes_jobs:
            return ""
        reason = msgspec.msgpack.decode(self._wait(self._ask("GET", "batches", again=True)))
        self._takes_jobs = not reason  # a refusal may be temporary
        return reason

    def grade(self, jobs: Sequence[GradeJob], tables: Sequence[GradeTable]) -> Iterator[tuple[int, np.ndarray]]:
        for parts in _posts(jobs):
            yield from self._grade_parts(parts, tables)

    def _grade_parts(self, parts: Sequence[JobPart], tables: Sequence[GradeTable]) -> Iterator[tuple[int, np.ndarray]]:
        """Grade parts of jobs in one HTTP request."""
        self._check_open()
        found: queue.SimpleQueue[wire.GradedPart | None] = queue.SimpleQueue()
        left = sum(part.cells.count + 1 for part in parts)
        task = asyncio.run_coroutine_threadsafe(self._grade(_encoded_jobs(parts), found), self._loop)
        task.add_done_callback(lambda done: found.put(None))
        try:
            while (event := arrived(found)) is not None:
                part = parts[event.i]
                number = event.read(tables[part.number], part.first)
                left -= len(number)
                yield part.number, number[number >= 0]
        finally:
            task.cancel()
        task.result()
        if left:
            raise EngineError(f"{self.url} closed the response before all programs were graded")

    def release(self, runs: list[str]) -> None:
        self._soon(self._free, runs, [])

    def abort(self, runs: list[str]) -> None:
        self._soon(self._free, [], runs)

    def end(self, requests: list[Request]) -> None:
        if runs := [request.run for request in requests]:
            with contextlib.suppress(PatchclampError):  # if the server is gone, so are the runs
                self._wait(self._ask("POST", "free", wire.Free(end=runs), again=True))

    def text_of(self, *args: Any) -> str:
        return self.ask_tokenizer("text_of", *args)

    def check_sampling(self, sampling: dict[str, Any]) -> None:
        """Have the server check sampling parameters, once per distinct set."""
        key = json.dumps(sampling, sort_keys=True, default=str)
        if sampling and key not in self._checked:
            self._wait(self._ask("POST", "sampling", sampling, again=True))
            self._checked.add(key)

    def expand(self, prompt: Mapping[str, Any] | None, messages: list[Any] | None, options: dict[str, Any]) -> Expanded:
        raise EngineError(
            "pc.LM(url) supports only text prompts: send images in an OpenAI chat request, with a patchclamp object "
            "next to the messages"
        )

    def weight(self, name: str, layer: int | None) -> np.ndarray | None:
        data = self._wait(self._ask("POST", "weight", wire.Weight(name, layer), again=True))
        return safetensors.numpy.load(data)[name] if data else None

    def status(self) -> dict[str, Any]:
        return json.loads(self._wait(self._ask("GET", "status", again=True)))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def ask_tokenizer(self, method: str, *args: Any) -> Any:
        """Call a method of the server's tokenizer."""
        body = wire.Tokenize(method, list(args))
        return msgspec.msgpack.decode(self._wait(self._ask("POST", "tokenizer", body, again=True)))

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _soon(self, job: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing to free
            self._loop.call_soon_threadsafe(job, *args)

    def _wait(self, job: Coroutine[Any, Any, Result]) -> Result:
        if self._closed:
            job.close()
            self._check_open()
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()

    # -- on the thread of the event loop

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _start(self) -> wire.Info:
        limits = self._httpx.Limits(max_connections=2 * MAX_POSTS + 1, max_keepalive_connections=MAX_POSTS)
        # no read timeout: a batch takes as long as the model needs
        timeout = self._httpx.Timeout(self._timeout_s, read=None)
        self._client = self._httpx.AsyncClient(
            base_url=self.url + wire.PREFIX, headers=self._headers, limits=limits, timeout=timeout
        )
        self._posts, self._freeing = asyncio.Semaphore(MAX_POSTS), None
        # one attempt with a short timeout first, so that a wrong URL is reported at once
        await self._client.head("/info", timeout=self._httpx.Timeout(self._timeout_s, connect=CONNECT_S))
        info = msgspec.msgpack.decode(await self._ask("GET", "info", again=True))
        if not isinstance(info, dict) or info.get("wire") != wire.WIRE:
            raise EngineError(
                f"expected wire format {wire.WIRE}, got {info.get('wire')!r} from a server with patchclamp "
                f"{info.get('version')!r}: install the same version on both sides"
            )
        self._living = asyncio.ensure_future(self._live())
        return msgspec.convert(info, wire.Info)

    async def _end(self) -> None:
        """Cancel active batches and free remaining captures."""
        closed = EngineError("the engine is closed")
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for batch in set(self._batches.values()):
            batch.fail(closed)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self, "_client"):
            with contextlib.suppress(Exception):
                await self._ask("POST", "free", wire.Free(*self._freed, session=self._session))
            await self._client.aclose()

    async def _ask(
        self, verb: str, route: str, body: Any = None, again: bool = False,
        take: Callable[[Any], Awaitable[Any]] = lambda response: response.aread(),
    ) -> Any:  # fmt: skip
        """Send a request; return the response's body or the result of `take`. `again`: True if it may be retried.
        Raises the server's error, or `EngineError` if there is no response."""
        content = None if body is None else msgspec.msgpack.encode(body)
        for left in reversed(range(TRIES if again else 1)):
            try:
                async with self._client.stream(
                    verb, f"/{route}", content=content, timeout=None if route in LARGE else self._timeout_s
                ) as response:
                    if response.status_code < 400:
                        return await take(response)
                    error_body = await response.aread()
            except self._httpx.TransportError as error:
                if left:
                    await asyncio.sleep(0.2)
                    continue
                raise EngineError(f"no response from {self.url}: {type(error).__name__}: {error}") from None
            if response.status_code == 503 and left:
                await asyncio.sleep(1.0)
                continue
            raise self._error(response.status_code, error_body)
        raise AssertionError(route)

    def _error(self, status: int, body: bytes) -> PatchclampError:
        """Return the error that an HTTP error response describes."""
        try:
            error = json.loads(body)["error"]
            kind, message, path = TREE.get(error["type"]), str(error["message"]), error.get("param")
        except (ValueError, KeyError, TypeError):
            kind, message, path = None, body[:200].decode(errors="replace"), None
        if kind is not None:
            return kind(message.removeprefix(f"{path}: ") if path else message, path)
        if status == 404:
            return EngineError(f"{self.url} has no route {wire.PREFIX}: is it a `patchclamp serve` server? ({message})")
        if status == 401:
            return EngineError(f"{self.url} rejected the API key: pass api_key=… to pc.LM, or set VLLM_API_KEY")
        return EngineError(f"{self.url} returned status {status}: {message}")

    def _post(self, batch: _SentBatch) -> None:
        for request, _ in batch.pairs:
            self._batches[request.run] = batch
        batch.task = asyncio.ensure_future(self._run(batch))

    async def _run(self, batch: _SentBatch) -> None:
        """Run a batch without retries: runs that have started may already have captures on the server."""
        try:
            async with (
                self._posts,
                self._client.stream("POST", "/run", content=msgspec.msgpack.encode(batch.body())) as response,
            ):
                if response.status_code >= 400:
                    raise self._error(response.status_code, await response.aread())
                frames = wire.Frames()
                async for data in response.aiter_raw():
                    for event in frames.feed(data):
                        batch.take(event)
            batch.fail(EngineError(f"{self.url} closed the response before all runs had finished"))
        except asyncio.CancelledError:
            batch.fail(EngineError(ABORTED))
            raise
        except self._httpx.TransportError as error:
            batch.fail(EngineError(f"{self.url} disconnected: {type(error).__name__}: {error}"))
        except Exception as error:
            batch.fail(as_patchclamp_error(error))
        finally:
            for request, _ in batch.pairs:
                self._batches.pop(request.run, None)

    async def _grade(self, body: bytes, found: queue.SimpleQueue[wire.GradedPart | None]) -> None:
        """Send jobs, and pass on their results as they arrive."""
        try:
            async with self._posts, self._client.stream("POST", "/grade", content=body) as response:
                if response.status_code >= 400:
                    raise self._error(response.status_code, await response.aread())
                frames = wire.Frames()
                async for data in response.aiter_raw():
                    for event in frames.feed(data):
                        if isinstance(event, wire.Failed):
                            raise unpack(event.error)
                        assert isinstance(event, wire.GradedPart)
                        found.put(event)
        except self._httpx.TransportError as error:
            raise EngineError(f"{self.url} disconnected: {type(error).__name__}: {error}") from None

    def _free(self, release: list[str], abort: list[str]) -> None:
        """Queue runs to be freed. Runs queued within 10 ms share one HTTP request."""
        for run in [*abort, *release]:
            batch = self._batches.get(run)
            if batch is not None and batch.stop(run, run in abort):
                abort = [*abort, run]
        self._freed[0].extend(release)
        self._freed[1].extend(abort)
        if self._freeing is None:
            self._freeing = asyncio.ensure_future(self._free_soon())

    async def _free_soon(self) -> None:
        await asyncio.sleep(0.01)
        (release, abort), self._freed, self._freeing = self._freed, ([], []), None
        with contextlib.suppress(PatchclampError):  # if the server is gone, so are its captures
            await self._ask("POST", "free", wire.Free(release, abort), again=True)

    async def _live(self) -> None:
        """Hold open the connection that marks this client as alive; reconnect when it closes."""
        timeout = self._httpx.Timeout(self._timeout_s, read=4 * wire.BEAT_S)
        while True:
            with contextlib.suppress(self._httpx.TransportError):
                async with self._client.stream("GET", f"/live/{self._session}", timeout=timeout) as response:
                    async for _ in response.aiter_raw():
                        pass
            await asyncio.sleep(1.0)


class _SentBatch:
    """Requests sent to the server in one batch."""

    def __init__(self, pairs: list[tuple[Request, Future[Answer]]], carried: list[bytes | None]) -> None:
        self.pairs, self.carried = pairs, carried
        self.task: asyncio.Task[None] | None = None

    def body(self) -> wire.WireBatch:
        vectors = {key: rows for request, _ in self.pairs for key, rows in request.vectors.items()}
        requests = [
            wire.WireRequest(
                request.run, request.prompt_token_ids, request.max_tokens, carried, list(request.vectors),
                request.sampling, list(request.score), request.logprobs, request.listener is not None,
                request.prompt_logprobs,
            )
            for (request, _), carried in zip(self.pairs, self.carried, strict=True)
        ]  # fmt: skip
        return wire.WireBatch(requests, _packed(vectors))

    def take(self, event: wire.Event) -> None:
        """Pass a server event to its request. An answer without its program's receipt becomes an error."""
        request, future = self.pairs[event.i]
        if isinstance(event, wire.Generated):
            if request.listener is not None and not future.done():
                request.listener(Part(event.text, event.token_ids, event.logprobs))
        elif isinstance(event, wire.Failed):
            settle(future, unpack(event.error))
        elif isinstance(event, wire.Answered):
            carried = self.carried[event.i]
            if carried is not None and event.receipt != receipt_of(carried):
                settle(future, EngineError(
                    f"the server did not confirm that run {request.run} ran its program; the output was discarded"
                ))  # fmt: skip
            else:
                settle(future, event.answer())

    def stop(self, run: str, aborted: bool) -> bool:
        """End a run that was aborted or whose listener is closed; return True if it was ended. After the last run,
        close the connection to stop the server's computation."""
        ended = [future for request, future in self.pairs if request.run == run and (aborted or request.abandoned)]
        for future in ended:
            settle(future, EngineError(ABORTED))
        if ended and self.task is not None and all(future.done() for _, future in self.pairs):
            self.task.cancel()
        return bool(ended)

    def fail(self, error: PatchclampError) -> None:
        """Set the error on every unfinished request."""
        for _, future in self.pairs:
            settle(future, error)


def _packed(vectors: Mapping[str, np.ndarray]) -> bytes:
    """Encode vectors as safetensors, fp32."""
    rows = {key: np.ascontiguousarray(rows, np.float32) for key, rows in vectors.items()}
    return safetensors.numpy.save(rows) if rows else b""


def _encoded_jobs(parts: Sequence[JobPart]) -> bytes:
    """Encode the body of a request to grade parts of jobs."""
    bodies, vectors, rows = [], dict[str, np.ndarray](), dict[str, int]()
    for job, _, _, cells in parts:
        sources = {source.key: source for source in job.sources}
        for key in cells.keys:
            read = source_of(key)
            if read is None:
                vectors[key] = job.vectors[key]
            elif key not in rows:
                rows[key] = len(sources[read[0]].positions_of(read[1]))
        suffixes = [list(suffix) for suffix in job.suffixes]
        bodies.append(wire.WireJob(job.name, job.prompt, suffixes, job.terms, cells.to_bytes(), job.kl, job.top))
    return msgspec.msgpack.encode(wire.WireJobs(bodies, _packed(vectors), rows))


def _posts(jobs: Sequence[GradeJob]) -> Iterator[list[JobPart]]:
    """Split jobs' programs into lists of parts. Each list fits into one HTTP request."""
    post, programs, size = list[JobPart](), 0, 0
    for i, job in enumerate(jobs):
        cells = job.cells()
        of_keys = np.array([job.vectors[key].nbytes if key in job.vectors else 0 for key in cells.keys])
        records = max((group.records.shape[1] for group in cells.groups), default=1)
        size_of_record = RECORD.itemsize + 3 * 8  # with its point and two keys
        step = max(1, min(wire.MAX_PROGRAMS, MAX_BATCH_BYTES // (records * size_of_record)))
        for begin, end in cells.splits(of_keys, MAX_BATCH_BYTES) if job.count else [(0, 0)]:
            for first in range(begin, max(end, begin + 1), step):
                some = cells.take(range(first, min(first + step, end)))
                more = sum(each.nbytes for group in some.groups for each in msgspec.structs.astuple(group))
                more += sum(job.vectors[key].nbytes for key in some.keys if key in job.vectors)
                if post and (programs + some.count > wire.MAX_PROGRAMS or size + more > wire.MAX_BODY_BYTES // 2):
                    yield post
                    post, programs, size = [], 0, 0
                post.append(JobPart(job, i, first, some))
                programs, size = programs + some.count, size + more
    if post:
        yield post


def _batches(pairs: list[tuple[Request, Future[Answer]]], sites: Any) -> list[_SentBatch]:
    """Split requests, in order, into batches within the size limits."""
    batches: list[_SentBatch] = []
    size = 0
    for request, future in pairs:
        carried = None if request.bound is None else carry(request, sites)
        if not batches or len(batches[-1].pairs) == wire.MAX_REQUESTS or size > MAX_BATCH_BYTES:
            batches.append(_SentBatch([], []))
            size = 0
        batches[-1].pairs.append((request, future))
        batches[-1].carried.append(carried)
        size += sum(rows.nbytes for rows in request.vectors.values()) + 8 * len(request.prompt_token_ids)
    return batches


class HttpTokenizer:
    """The server's tokenizer, called over HTTP, with an LRU cache."""

    def __repr__(self) -> str:
        return "<tokenizer of the server>"

    def __init__(self, engine: HttpEngine) -> None:
        ask = engine.ask_tokenizer
        self._encode = functools.lru_cache(4096)(lambda method, text: tuple(ask(method, text)))
        self._spell = functools.lru_cache(1024)(lambda ids, text: ask("spell", ids, text))
        self._decode = functools.lru_cache(4096)(lambda method, ids: ask(method, ids))
        self._ask = ask

    def encode(self, text: str) -> list[int]:
        return list(self._encode("encode", text))

    def bare(self, text: str) -> list[int]:
        return list(self._encode("bare", text))

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode("decode", tuple(map(int, ids)))

    def settled(self, ids: Sequence[int]) -> str:
        return self._decode("settled", tuple(map(int, ids)))

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return list(self._decode("token_strings", tuple(map(int, ids))))

    def spell(self, ids: Sequence[int], text: str | None) -> tuple[str, list[tuple[int, int]]]:
        spelled, offsets = self._spell(tuple(map(int, ids)), text)
        return spelled, [(first, end) for first, end in offsets]

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        return list(self._ask("chat", messages, options))

    def turns(self, ids: Sequence[int], messages: list[dict[str, Any]], options: dict[str, Any]) -> list[Turn]:
        return [(role, list(positions)) for role, positions in self._ask("turns", list(ids), messages, options)]
