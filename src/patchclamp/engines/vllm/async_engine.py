"""The engine of a server's API process: runs patchclamp requests on an `AsyncLLM` that also serves other requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import secrets
import threading
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from patchclamp.engines.base import ABORTED, Answer, Captured, Request, TopTokens, Wanted, Window, settle
from patchclamp.engines.grading import GradeJob, GradeTable, arrived
from patchclamp.engines.vllm import shared
from patchclamp.engines.vllm.compat import clients
from patchclamp.engines.vllm.compat.clients import tell_cores, verdict_in
from patchclamp.engines.vllm.frontend import (
    Grading,
    VllmFrontEnd,
    confirm,
    first_values,
    join_captured,
    merged,
    next_call,
    no_room,
    results_of,
    top_tokens_of,
    verdict_of,
    with_rows,
)
from patchclamp.engines.weights import join_shards
from patchclamp.errors import EngineError, NameTaken, as_patchclamp_error
from patchclamp.language.ops import Translator
from patchclamp.plan import CAPTURE
from patchclamp.plan.bound import source_of
from patchclamp.store.captures import StoredRows

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from patchclamp.engines.vllm.server import Metrics

FETCHES, GRADINGS = 4, 4  # concurrent fetches of captures, and gradings that prepare a batch
LEASE_S, RETRY_S = 600.0, 0.05  # the longest wait for a lease, and the time between two requests
NOTHING = contextlib.nullcontext()


class AsyncEngine(VllmFrontEnd):
    """Runs requests on an `AsyncLLM`. Construct it on the event loop; call it from any other thread.

    client: the `AsyncLLM`
    metrics: the metrics to update, if set
    """

    client: AsyncLLM

    remote = True
    keeps_scores = False  # they are added to responses

    def __init__(self, client: AsyncLLM, name: str) -> None:
        super().__init__()
        self.client, self._loop = client, asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._describe(name, client.vllm_config, client.get_tokenizer, client.output_processor)
        self.metrics: Metrics | None = None
        self._weights = 0
        clients.on_new_weights(client, self.count_updates)
        # a separate pool: all threads of the loop's own pool may be waiting for these fetches
        self._fetching = ThreadPoolExecutor(FETCHES, "patchclamp fetch")
        self._preparing = ThreadPoolExecutor(GRADINGS, "patchclamp batch")
        self._batch = asyncio.Lock()  # one grading at a time runs a batch and leaves time to requests
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by run
        self._requests: dict[str, Request] = {}  # of these, by run

    @property
    def weights(self) -> int:
        return self._weights

    async def count_updates(self) -> None:
        """Ask the cores for their counts of possible weight updates. Any API process may have updated the weights."""
        self._weights = max(await asyncio.gather(*tell_cores(self.client, "updates")))

    # -- from any thread

    def submit(self, requests: list[Request]) -> list[Future[Answer]]:
        futures: list[Future[Answer]] = [Future() for _ in requests]
        self._loop.call_soon_threadsafe(self._start, requests, futures, {})
        return futures

    def fetch_many(self, wanted: list[Wanted]) -> list[Captured]:
        return self._wait(self._fetch("fetch", wanted))

    unembeds = True

    def read_streams(
        self, streams: list[Wanted], rows: list[int], top: int, chosen: list[int]
    ) -> dict[str, np.ndarray]:  # fmt: skip
        core = self._core_of_run(streams[0].run)
        return first_values(self._wait(self.ask("read_streams", streams, rows, top, chosen, only=core)))

    def lens_many(self, wanted: list[Wanted], top: int, translator: Translator | None = None) -> list[TopTokens]:
        return self._wait(self.lens_async(wanted, top, translator))

    def release(self, runs: list[str]) -> None:
        self._soon(lambda: self._release(runs))

    def abort(self, runs: list[str]) -> None:
        self._soon(lambda: self._abort(runs))

    def status(self) -> dict[str, Any]:
        return self._wait(self.status_async())

    def weight(self, name: str, layer: int | None) -> np.ndarray | None:
        shards = self._wait(self.ask("weight", name, layer, only=0))
        return join_shards(name, shards, self.sites.tensor_parallel)

    def _ask_now(self, verb: str, *args: Any) -> list[Any]:
        return self._wait(self.ask(verb, *args))

    def grade(self, jobs: Sequence[GradeJob], tables: Sequence[GradeTable]) -> Iterator[tuple[int, np.ndarray]]:
        found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        calls = self._grading(jobs, tables, lambda number, programs: found.put((number, programs)))
        beat = functools.partial(found.put, (0, np.zeros(0, np.int64)))
        task = asyncio.run_coroutine_threadsafe(self._grade(calls, beat), self._loop)
        task.add_done_callback(lambda done: found.put(None))
        try:
            while isinstance(news := arrived(found), tuple):
                if self.metrics is not None and len(news[1]):
                    self.metrics.graded(len(news[1]))
                yield news
        finally:
            task.cancel()
        try:
            task.result()
        except Exception as error:
            raise as_patchclamp_error(error) from error

    async def _grade(self, calls: Grading, beat: Callable[[], None]) -> None:
        """Run a grading job's calls. The core steps other requests between batches. `beat` is called while the job
        waits for room, to detect a disconnected caller."""
        name = secrets.token_hex(8)  # clients may use one name for two jobs
        tries = int(LEASE_S / RETRY_S)  # other requests may hold its resources

        async def after(result: Any) -> tuple[str, tuple[Any, ...]]:
            return await self._loop.run_in_executor(self._preparing, next_call, calls, result)

        try:
            verb, args = await after(None)
            while verb:
                if verb == "run":
                    async with self._batch:
                        verb, args = await after(await self.ask("bulk", verb, name, *args, only=0))
                        if verb == "wait":
                            verb, args = await after(await asyncio.sleep(*args))
                    continue
                if verb == "wait":
                    result = await asyncio.sleep(*args)
                elif verb == "end":
                    result = await self._end_grading(name)
                elif verb == "lease":
                    [answer] = tell_cores(self.client, "lease", name, *args, only=0)
                    result = await answer
                    if result is None:
                        tries -= 1
                        if not tries:
                            raise no_room(args)
                        beat()
                        await asyncio.sleep(RETRY_S)
                        continue
                else:
                    result = await self.ask("bulk", verb, name, *args, only=0)
                verb, args = await after(result)
        finally:
            await asyncio.shield(self._end_grading(name))

    async def _end_grading(self, name: str) -> None:
        with contextlib.suppress(Exception):  # the core may have failed
            await self.ask("bulk", "close", name, only=0)
        with contextlib.suppress(Exception):
            await asyncio.gather(*tell_cores(self.client, "give", name, only=0))

    def close(self) -> None:
        """Abort active requests; the `AsyncLLM` belongs to its server."""
        self._soon(lambda: self._abort(list(self._tasks)))

    def _soon(self, job: Callable[[], None]) -> None:
        """Schedule a job on the loop's thread, unless the loop is closed. The garbage collector may call this."""

        def unless_ended() -> None:
            try:
                job()
            except Exception:
                if not self.client.errored:
                    raise

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(unless_ended)

    def _wait(self, job: Coroutine[Any, Any, Any]) -> Any:
        if threading.get_ident() == self._loop_thread:
            job.close()
            raise EngineError("cannot wait on the server's event loop: call this from another thread")
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()

    # -- on the loop's thread: requests

    def start(self, requests: list[Request], carried: Mapping[str, bytes]) -> list[Future[Answer]]:
        """Start requests, as `submit` does. `carried`: encoded programs by run, for requests that arrived with one."""
        futures: list[Future[Answer]] = [Future() for _ in requests]
        self._start(requests, futures, carried)
        return futures

    def _start(self, requests: list[Request], futures: list[Future[Answer]], carried: Mapping[str, bytes]) -> None:
        for request, future in zip(requests, futures, strict=True):
            if request.abandoned:
                settle(future, EngineError(ABORTED))
                continue
            if request.run in self._tasks:
                settle(future, NameTaken(f"run {request.run} has not finished: choose another name"))
                continue
            task = asyncio.ensure_future(self._run(request, future, carried.get(request.run)))
            self._tasks[request.run], self._requests[request.run] = task, request
            task.add_done_callback(functools.partial(self._ended, request.run, future))

    def _ended(self, run: str, future: Future[Answer], task: asyncio.Task[None]) -> None:
        self._tasks.pop(run, None)
        self._requests.pop(run, None)
        if task.cancelled():
            settle(future, EngineError(ABORTED))
        elif (error := task.exception()) is not None:
            settle(future, as_patchclamp_error(error))

    async def _run(self, request: Request, future: Future[Answer], carried: bytes | None) -> None:
        """Run a request, and set its answer on the future."""
        underway, generate = self._underway(request), clients.stock_generate(self.client)
        params = clients.sampling_params(request, None, self._has_text)
        prompt = {"type": "token", "prompt_token_ids": request.prompt_token_ids}  # the format of vLLM's renderers
        if request.bound is None:
            outputs = generate(prompt, params, request.run)
        else:
            outputs = self.outputs(request, prompt, params, request.run, generate, carried)
        try:
            async for output in outputs:
                underway.take(output)
                if output.finished:
                    settle(future, underway.answer(output))
            if request.ended:
                settle(future, underway.answer())
        finally:
            self._forget_tables(request.run)

    async def outputs(
        self, request: Request, prompt: Any, params: SamplingParams, name: str, generate: Callable[..., Any],
        carried: bytes | None = None, ended: Callable[[RequestOutput, list[int]], None] | None = None,
        within: contextlib.AbstractContextManager[None] = NOTHING, **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        """Yield vLLM's outputs of a request with a program.

        The program is encoded from `request.bound`, or given as `carried`. `params` is modified. Before the last output
        is yielded, `ended(output, ids)` is called with it and all generated ids. `within` is entered while the
        request runs. If the caller sets `request.ended` before it asks for the next output, the request is aborted.

        Raises the run's error in place of the last output, or `EngineError` if vLLM did not confirm the program.
        """
        assert request.bound is not None
        with within:
            carried = self._carried(request) if carried is None else carried
            assert carried is not None
            params.extra_args = {**(params.extra_args or {}), **clients.extra_args(carried, self.proved_weights)}
            self._hold([request])
            if (core := self._core_of(request)) is not None:
                others["data_parallel_rank"] = core
            if self.metrics is not None:
                self.metrics.started(request.bound)
            in_parts, ids = params.output_kind.name == "DELTA", list[int]()
            try:
                outputs = generate(prompt, params, name, **others)
                async for output in outputs:
                    verdict = verdict_in(output)
                    if not in_parts:
                        ids.clear()
                    ids += output.outputs[0].token_ids
                    if output.finished:
                        if self.metrics is not None and verdict is not None:
                            self.metrics.settled(verdict)
                        confirm(request.run, verdict, carried)
                        self._count(request, ids)
                        if ended is not None:
                            ended(output, ids)
                    yield output
                    if request.ended and not output.finished:
                        core = self._core_of_run(request.run)
                        verdict = verdict_of(await self.ask("verdict", request.run, only=core))
                        if verdict is not None:  # else it has ended there, and its last output is in flight
                            confirm(request.run, verdict, carried)
                            self._count(request, ids)
                            if ended is not None:
                                ended(output, ids)
                            await outputs.aclose()  # aborts it
                            return
            finally:
                self._drop([request])

    def _count(self, request: Request, ids: list[int]) -> None:
        """Add an ended run to the metrics, if it had a program. `ids`: its generated token ids."""
        if self.metrics is not None and request.bound is not None:
            self.metrics.ended(request.bound, [*request.prompt_token_ids, *ids], request.vectors, self.sites)

    def _tell(self, method: str, *args: Any) -> None:
        tell_cores(self.client, method, *args)

    def _release(self, runs: list[str]) -> None:
        for run in runs:
            if run in self._tasks:  # an abandoned stream
                self._tasks[run].cancel()
        self._tell("release", runs)

    def _abort(self, runs: list[str]) -> None:
        elsewhere = [run for run in runs if run not in self._tasks]
        if elsewhere:  # possibly in another API process
            self._tell("abort", elsewhere)
        self._release(runs)

    def end_runs(self, runs: list[str]) -> None:
        """End these runs early, as `end` does. Ignores runs that `submit` did not start."""
        self.end([self._requests[run] for run in runs if run in self._requests])

    # -- on the loop's thread: calls of the cores

    def renew(self, session: str, ago_s: float = 0.0, extend: bool = False) -> None:
        """Renew the lease of the client with runs named `session-…`, as of `ago_s` seconds ago (`free_dead`)."""
        self._tell("renew", session, ago_s, extend)

    async def free_dead(self, lease_s: float) -> None:
        """Free the runs of clients whose last heartbeat is more than `lease_s` seconds old."""
        await asyncio.gather(*tell_cores(self.client, "free_dead", lease_s))

    @property
    def process_index(self) -> int:
        """The index of this process among the server's API processes."""
        return clients.process_index(self.client)

    @property
    def api_processes(self) -> int:
        """The number of the server's API processes."""
        return clients.process_count(self.client)

    def tokens_of(self, name: str, first: int, count: int) -> tuple[str, int, list[int | None]]:
        """Return the client's request name, the choice index, and `count` token ids starting at `first`
        (`clients.request_tokens`)."""
        return clients.request_tokens(self._processor, name, first, count)

    def say(self, key: str, note: bytes) -> None:
        """Publish a note to the server's other API processes, replacing the last note under its key."""
        tell_cores(self.client, "say", key, note, only=0)

    async def said_since(self, number: int) -> tuple[int, list[bytes]]:
        """Return the latest sequence number, and the notes published after `number`."""
        [answer] = tell_cores(self.client, "said_since", number, only=0)
        number, notes = await answer
        return number, notes

    async def counts(self) -> dict[str, int]:
        """Return resource counts, summed over all engine cores."""
        counts = await asyncio.gather(*tell_cores(self.client, "counts"))
        summed = {name: sum(count[name] for count in counts) for name in counts[0]}
        if self.metrics is not None:
            self.metrics.held(summed)
        return summed

    def _core_of(self, request: Request) -> int | None:
        """Return the index of the client's core if a request reads or captures rows; None if any core will do."""
        assert request.bound is not None
        ops = request.bound.ops
        is_bound = any(op.kind == CAPTURE or any(map(source_of, op.keys)) for op in ops)
        return self._core_of_run(request.run) if clients.core_count(self.client) > 1 and is_bound else None

    def _core_of_run(self, run: str) -> int:
        """Return the index of a run's core. A client's runs share a core, because they may read each other's rows."""
        return zlib.crc32(run.rpartition("-")[0].encode()) % clients.core_count(self.client)

    # -- on the loop's thread: calls of the workers

    async def ask(self, verb: str, *args: Any, only: int | None = None) -> list[Any]:
        """Call every worker of every engine core, or of core `only`; return the results."""
        by_core = await asyncio.gather(*clients.tell_workers(self.client, verb, *args, only=only))
        return results_of(answer for core in by_core for answer in core)

    async def status_async(self) -> dict[str, Any]:
        """Return the workers' `merged` statuses, the cores' counts, and this process's number of active requests."""
        by_core = [await self.ask("status", only=core) for core in range(clients.core_count(self.client))]
        return {
            **merged([status for core in by_core for status in core]), **await self.counts(),
            "under_way": len(self._tasks), "steps_planned_by_core": [core[0]["steps_planned"] for core in by_core],
        }  # fmt: skip

    async def fetch_windows(self, windows: list[Window]) -> list[Captured]:
        """Fetch a window of rows for each item, as `fetch_many` does."""
        return await self._fetch("fetch_windows", windows)

    async def measure(self, wanted: list[Wanted]) -> list[StoredRows]:
        """Describe captures as `fetch_many` would return them, without the rows' bytes."""

        async def measure(core: int, some: list[Any]) -> list[StoredRows]:
            answers = [shared.without_bytes(answer) for answer in await self.ask("measure", some, only=core)]
            shards = [[answer[i] for answer in answers if i in answer] for i in range(len(some))]
            shards = [with_rows(each, [len(rows.positions) for rows in each]) for each in shards]
            return [
                StoredRows(each[0].positions, [], each[0].dtype, sum(rows.width for rows in each)) for each in shards
            ]

        return await self._of_cores(wanted, measure)

    async def lens_async(self, wanted: list[Wanted], top: int, translator: Translator | None) -> list[TopTokens]:
        """Compute lenses, as `lens_many` does."""
        encoded = msgspec.msgpack.encode(translator)

        async def read(core: int, some: list[Wanted]) -> list[TopTokens]:
            return top_tokens_of(await self.ask("lens", some, top, encoded, only=core), top)

        return await self._of_cores(wanted, read)

    async def _fetch(self, verb: str, wanted: list[Any]) -> list[Captured]:
        def receive(core: int, some: list[Any]) -> list[Captured]:
            """Fetch captures from the workers of one core. Must not run on the loop's thread."""
            fetched = self._receiver.fetch(lambda *receiver: self._wait(self.ask(verb, some, *receiver, only=core)))
            return join_captured(fetched, len(some))

        return await self._of_cores(wanted, functools.partial(self._loop.run_in_executor, self._fetching, receive))

    async def _of_cores(self, wanted: list[Any], ask: Callable[[int, list[Any]], Awaitable[list[Any]]]) -> list[Any]:
        """Ask the engine cores that keep the runs' captures; return the answers in the order of `wanted`."""
        by_core: dict[int, list[int]] = {}
        for i, (run, *_) in enumerate(wanted):
            by_core.setdefault(self._core_of_run(run), []).append(i)
        answers: dict[int, Any] = {}
        for core, places in by_core.items():
            answers |= zip(places, await ask(core, [wanted[i] for i in places]), strict=True)
        return [answers[i] for i in range(len(wanted))]
