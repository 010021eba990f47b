"""The engine of a server: patchclamp requests beside others on an `AsyncLLM`, in one API process."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import threading
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import safetensors.numpy

from patchclamp.engines.base import (
    ABORTED,
    Answer,
    Captured,
    Engine,
    Model,
    Request,
    Tokenizer,
    Wanted,
    Window,
    carry,
    receipt_of,
    settle,
)
from patchclamp.engines.tokenizer import HubTokenizer, NoTokenizer
from patchclamp.engines.vllm import requests as sampling_of_vllm
from patchclamp.engines.vllm import shared
from patchclamp.engines.vllm.admission import Verdict
from patchclamp.engines.vllm.architecture import site_map
from patchclamp.engines.vllm.compat import configuration, front
from patchclamp.engines.vllm.compat.core import decoded
from patchclamp.engines.vllm.compat.seams import version
from patchclamp.engines.vllm.metrics import Metrics
from patchclamp.engines.vllm.requests import Parameters, PartialAnswer
from patchclamp.engines.vllm.workers import join_captured, with_rows
from patchclamp.errors import EngineError, as_patchclamp_error, unpack
from patchclamp.plan import CAPTURE
from patchclamp.plan.bound import source_of
from patchclamp.store.captures import StoredRows

FETCHES = 4  # concurrent fetches of captures
NOTHING = contextlib.nullcontext()


class AsyncEngine(Engine):
    """Runs requests on an `AsyncLLM`. Construct it on the event loop; call it from any other thread.

    client: the `AsyncLLM`
    metrics: the metrics to update, if set
    """

    remote = True

    def __init__(self, client: Any, name: str) -> None:
        self.client, self._loop = client, asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        config = self.config = client.vllm_config
        facts = configuration.model_facts(config)
        self.sites = site_map(config)
        skipped = config.model_config.skip_tokenizer_init
        self.tokenizer: Tokenizer = NoTokenizer() if skipped else HubTokenizer(client.get_tokenizer())
        self.model = Model(
            name, "vllm", version(), self.sites.family.name, facts["layers"], facts["d_model"], facts["d_vocab"],
            facts["dtype"], facts["max_model_len"], configuration.settings(config),
        )  # fmt: skip
        self.metrics: Metrics | None = None
        self._parameters = Parameters(not skipped)
        self._receiver = shared.Receiver(self.release)
        # a separate pool: all threads of the loop's own pool may be waiting for these fetches
        self._fetching = ThreadPoolExecutor(FETCHES, "patchclamp fetch")
        self._vectors: collections.Counter[str] = collections.Counter()  # the number of requests that use each vector
        self._dropped: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by run

    # -- from any thread

    @property
    def has_views(self) -> bool:
        return self._receiver.has_views

    def submit(self, requests: list[Request]) -> list[Future[Answer]]:
        futures: list[Future[Answer]] = [Future() for _ in requests]
        self._loop.call_soon_threadsafe(self._start, requests, futures, {})
        return futures

    def fetch(self, run: str, point: int, op: int | None = None) -> tuple[np.ndarray, Any]:
        return self.fetch_many([(run, point, op)])[0]

    def fetch_many(self, wanted: list[Wanted]) -> list[Captured]:
        return self._wait(self.fetch_async(wanted))

    def release(self, runs: list[str]) -> None:
        self._soon(lambda: self._release(runs))

    def abort(self, runs: list[str]) -> None:
        self._soon(lambda: self._abort(runs))

    def check_sampling(self, sampling: dict[str, Any]) -> None:
        sampling_of_vllm.check(sampling)

    def status(self) -> dict[str, Any]:
        return self._wait(self.status_async())

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

        try:
            self._loop.call_soon_threadsafe(unless_ended)
        except RuntimeError:
            return

    def _wait(self, job: Coroutine[Any, Any, Any]) -> Any:
        if threading.get_ident() == self._loop_thread:
            job.close()
            raise EngineError("this would wait on the server's own thread for itself: call it from another one")
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()

    # -- on the loop's thread

    async def outputs(
        self, request: Request, prompt: Any, params: Any, name: str, generate: Callable[..., Any],
        carried: bytes | None = None, ended: Callable[[Any, list[int]], None] | None = None,
        within: contextlib.AbstractContextManager[None] = NOTHING, **others: Any,
    ) -> AsyncGenerator[Any, None]:  # fmt: skip
        """Yield vLLM's outputs of a request with a program.

        The program is encoded from `request.bound`, or given as `carried`. `params` is modified. `ended(output, ids)`
        is called with the last output and all generated ids, before that is yielded. `within` is entered meanwhile.

        Raises the run's error in place of the last output, or `EngineError` if that has no receipt.
        """
        assert request.bound is not None
        with within:
            carried = carry(request, self.sites) if carried is None else carried
            params.extra_args = {**(params.extra_args or {}), configuration.KEY: carried}
            self._hold(request)
            core = self._core_of(request)
            if core is not None:
                others["data_parallel_rank"] = core
            if self.metrics is not None:
                self.metrics.started(request.bound)
            in_parts, ids = params.output_kind.name == "DELTA", list[int]()
            try:
                async for output in generate(prompt, params, name, **others):
                    verdict = None if output.kv_transfer_params is None else front.verdict_in(output)
                    if in_parts or output.finished:
                        ids += output.outputs[0].token_ids
                    if output.finished:
                        self._end(request, verdict, carried, ids)
                        if ended is not None:
                            ended(output, ids)
                    yield output
            finally:
                self._drop(request)

    def _end(self, request: Request, verdict: Verdict | None, carried: bytes, ids: list[int]) -> None:
        """Raise the error that invalidates a request's answer, or count it in the metrics. `ids`: the generated ids."""
        assert request.bound is not None
        if self.metrics is not None and verdict is not None and verdict.waited_s is not None:
            self.metrics.admitted(verdict.waited_s)
        _check(request, verdict, receipt_of(carried))
        if self.metrics is not None:
            self.metrics.ended(request.bound, [*request.prompt_token_ids, *ids], request.vectors, self.sites)

    def start(self, requests: list[Request], carried: Mapping[str, bytes]) -> list[Future[Answer]]:
        """Like `submit`. `carried`: encoded programs by run, for requests that arrived with one."""
        futures: list[Future[Answer]] = [Future() for _ in requests]
        self._start(requests, futures, carried)
        return futures

    def renew(self, session: str, ago_s: float = 0.0) -> None:
        """Renew the lease of the client whose runs are named `session-…`, as of `ago_s` seconds ago (`free_dead`)."""
        front.tell_cores(self.client, "patchclamp_renew", session, ago_s)

    @property
    def api_processes(self) -> int:
        """The number of API processes of the server."""
        return front.process_count(self.client)

    def say(self, key: str, note: bytes) -> None:
        """Publish the latest note on a key to the server's other API processes."""
        front.tell_cores(self.client, "patchclamp_say", key, note, only=0)

    async def said_since(self, number: int) -> tuple[int, list[bytes]]:
        """Return the latest sequence number, and the notes published after `number`."""
        [answer] = front.tell_cores(self.client, "patchclamp_said_since", number, only=0)
        number, notes = await answer
        return number, notes

    async def free_dead(self, lease_s: float) -> None:
        """Free the runs of clients whose last heartbeat is older than `lease_s`."""
        await asyncio.gather(*front.tell_cores(self.client, "patchclamp_free_dead", lease_s))

    def _core_of(self, request: Request) -> int | None:
        """Return the engine core that has the rows a request reads and keeps its captures; None: vLLM balances."""
        assert request.bound is not None
        ops = request.bound.ops
        if front.core_count(self.client) == 1 or not any(
            op.kind == CAPTURE or any(map(source_of, op.keys)) for op in ops
        ):
            return None
        return self._core_of_run(request.run)

    def _core_of_run(self, run: str) -> int:
        """Return the core that keeps a run's captures: the same for all runs of a client, which may read each other."""
        return zlib.crc32(run.rpartition("-")[0].encode()) % front.core_count(self.client)

    async def ask(self, verb: str, *args: Any, only: int | None = None) -> list[Any]:
        """Call every worker of every engine core, or of core `only`; return their results."""
        call = ("collective_rpc", "patchclamp_rpc", None, (verb, *args), {})
        calls = front.tell_cores(self.client, *call, only=only)
        answers = [answer for engine in await asyncio.gather(*calls) for answer in engine]
        errors = [error for _, error in answers if error is not None]
        if errors:
            raise unpack(tuple(errors[0]))
        return [result for result, _ in answers]

    async def fetch_async(self, wanted: list[Wanted]) -> list[Captured]:
        """Like `fetch_many`."""

        async def fetch(core: int, some: list[Any]) -> list[Captured]:
            return await self._loop.run_in_executor(self._fetching, self._receive, "fetch", some, core)

        return await self._of_cores(wanted, fetch)

    async def fetch_windows(self, windows: list[Window]) -> list[Captured]:
        """Like `fetch_many`, for a window of the rows."""

        async def fetch(core: int, some: list[Any]) -> list[Captured]:
            return await self._loop.run_in_executor(self._fetching, self._receive, "fetch_windows", some, core)

        return await self._of_cores(windows, fetch)

    async def measure(self, wanted: list[Wanted]) -> list[StoredRows]:
        """Like `fetch_many`, without the rows' bytes."""

        async def measure(core: int, some: list[Any]) -> list[StoredRows]:
            answers = [shared.without_bytes(answer) for answer in await self.ask("measure", some, only=core)]
            shards = [[answer[i] for answer in answers if i in answer] for i in range(len(some))]
            shards = [with_rows(each, [len(rows.positions) for rows in each]) for each in shards]
            widths = [sum(rows.width for rows in each) for each in shards]
            return [
                StoredRows(each[0].positions, [], each[0].dtype, width)
                for each, width in zip(shards, widths, strict=True)
            ]

        return await self._of_cores(wanted, measure)

    async def _of_cores(self, wanted: list[Any], ask: Callable[[int, list[Any]], Awaitable[list[Any]]]) -> list[Any]:
        """Ask the engine cores that keep the runs' captures; return the answers in the order of `wanted`."""
        by_core: dict[int, list[int]] = {}
        for i, (run, *_) in enumerate(wanted):
            by_core.setdefault(self._core_of_run(run), []).append(i)
        told: dict[int, Any] = {}
        for core, places in by_core.items():
            told |= zip(places, await ask(core, [wanted[i] for i in places]), strict=True)
        return [told[i] for i in range(len(wanted))]

    def _receive(self, verb: str, wanted: list[Any], core: int) -> list[Captured]:
        """Fetch captures from the workers of one core; not on the loop's thread."""

        def ask(*receiver: Any) -> list[Any]:
            return self._wait(self.ask(verb, wanted, *receiver, only=core))

        return join_captured(self._receiver.fetch(ask), len(wanted))

    async def status_async(self) -> dict[str, Any]:
        """Like `status`; counts are summed over all engine cores."""
        by_core = [await self.ask("status", only=core) for core in range(front.core_count(self.client))]
        statuses = [status for core in by_core for status in core]
        summed = await self.counts()
        captured = sum(status["captured_bytes"] for status in statuses)
        planned = [core[0]["steps_planned"] for core in by_core]
        return {**statuses[0], **summed, "captured_bytes": captured, "under_way": len(self._tasks),
                "steps_planned_by_core": planned}  # fmt: skip

    async def counts(self) -> dict[str, int]:
        """Return resource counts, summed over all engine cores."""
        counts = await asyncio.gather(*front.tell_cores(self.client, "patchclamp_counts"))
        summed = {name: sum(count[name] for count in counts) for name in counts[0]}
        if self.metrics is not None:
            self.metrics.held(summed)
        return summed

    def _start(
        self, requests: list[Request], futures: list[Future[Answer]], carried: Mapping[str, bytes]
    ) -> None:  # fmt: skip
        for request, future in zip(requests, futures, strict=True):
            if request.abandoned:
                settle(future, EngineError(ABORTED))
                continue
            task = asyncio.ensure_future(self._run(request, future, carried.get(request.run)))
            self._tasks[request.run] = task
            task.add_done_callback(functools.partial(self._ended, request.run, future))

    def _ended(self, run: str, future: Future[Answer], task: asyncio.Task[None]) -> None:
        self._tasks.pop(run, None)
        if task.cancelled():
            settle(future, EngineError(ABORTED))
        elif (error := task.exception()) is not None:
            settle(future, as_patchclamp_error(error))

    async def _run(self, request: Request, future: Future[Answer], carried: bytes | None) -> None:
        """Run a request to its answer."""
        tables: list[Any] = []
        params = self._parameters.of(request, None)
        if params.logprobs is not None:
            front.tables_of_client(self.client)[request.run] = tables
        prompt = {"type": "token", "prompt_token_ids": request.prompt_token_ids}  # the format of vLLM's renderers
        generate = front.stock_generate(self.client)
        outputs = (
            generate(prompt, params, request.run)
            if request.bound is None
            else self.outputs(request, prompt, params, request.run, generate, carried)
        )
        answer = PartialAnswer(request)
        try:
            async for output in outputs:
                new, tables[:] = tables[:], []
                answer.take(output, new)
                if output.finished:
                    decode = None if params.detokenize else self._decoder(request)
                    settle(future, answer.answer(output, decode))
        finally:
            front.tables_of_client(self.client).pop(request.run, None)

    def _decoder(self, request: Request) -> Any:
        """Return the function that decodes a request's ids when the text is read."""
        from vllm import SamplingParams

        if isinstance(self.tokenizer, NoTokenizer):
            return None
        processor, prompt, sampling = self.client.output_processor, request.prompt_token_ids, request.sampling
        return lambda ids, stopped: decoded(processor, prompt, SamplingParams(**sampling), ids, stopped)

    def _hold(self, request: Request) -> None:
        """Send the cores the vectors that a request needs and they lack, ahead of the request."""
        vectors = {key: np.ascontiguousarray(rows) for key, rows in request.vectors.items() if not self._vectors[key]}
        self._vectors.update(request.vectors.keys())
        if vectors:
            front.tell_cores(self.client, "patchclamp_hold", safetensors.numpy.save(vectors), list(vectors), [])

    def _drop(self, request: Request) -> None:
        """Drop the vectors of an ended request that no other request uses."""
        self._vectors.subtract(request.vectors.keys())
        unused = [key for key in request.vectors if self._vectors[key] == 0]
        for key in unused:
            del self._vectors[key]
        if unused:
            front.tell_cores(self.client, "patchclamp_hold", b"", [], unused)

    def _release(self, runs: list[str]) -> None:
        for run in runs:
            if run in self._tasks:  # an abandoned stream
                self._tasks[run].cancel()
        front.tell_cores(self.client, "patchclamp_release", runs)

    def _abort(self, runs: list[str]) -> None:
        for run in runs:
            if run in self._tasks:
                self._tasks[run].cancel()
        elsewhere = [run for run in runs if run not in self._tasks]
        if elsewhere:  # possibly in another API process
            front.tell_cores(self.client, "patchclamp_abort", elsewhere)
        front.tell_cores(self.client, "patchclamp_release", runs)


def _check(request: Request, verdict: Verdict | None, receipt: str) -> None:
    """Raise the error that invalidates an answer: its program failed, or vLLM did not confirm that it ran."""
    if verdict is not None and verdict.error is not None:
        raise unpack(verdict.error)
    if verdict is None or verdict.receipt != receipt:
        raise EngineError(
            f"run {request.run} came back without the receipt of its program, so that nobody knows whether it was "
            "edited; its answer is thrown away"
        )
