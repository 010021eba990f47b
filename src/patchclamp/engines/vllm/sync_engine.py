"""The vLLM engine: an `LLMEngine` created and stepped on its own thread, with a thread-safe job queue."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from patchclamp.engines.base import (
    ABORTED,
    MAX_SCORES,
    Adapter,
    Answer,
    Captured,
    Expanded,
    Finding,
    Request,
    TopTokens,
    Wanted,
    settle,
    settle_if_failed,
)  # fmt: skip
from patchclamp.engines.grading import GradeJob, GradeTable, arrived
from patchclamp.engines.vllm import setup
from patchclamp.engines.vllm.compat import configuration, images
from patchclamp.engines.vllm.compat.clients import (
    Submitter,
    ask_core,
    core_here,
    is_busy,
    mark_own,
    notice_death,
    shut_down,
    tell_core,
    verdict_in,
)
from patchclamp.engines.vllm.compat.connectors import check_alone
from patchclamp.engines.vllm.compat.lora import Adapters
from patchclamp.engines.vllm.compat.seams import require_all
from patchclamp.engines.vllm.frontend import (
    Grading,
    Underway,
    VllmFrontEnd,
    confirm,
    first_values,
    join_captured,
    merged,
    no_room,
    results_of,
    top_tokens_of,
    verdict_of,
)
from patchclamp.engines.vllm.report import running
from patchclamp.engines.vllm.worker import too_deep
from patchclamp.engines.weights import join_shards
from patchclamp.errors import EngineError, PatchclampError, RunError, describe_error, unknown
from patchclamp.kernels.code import check_outside
from patchclamp.language.ops import Translator
from patchclamp.runtime import Limits

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

LIMITS = Limits.__struct_fields__[1:]  # the number of programs follows from vLLM's own options
PARTS = ("probes", "saes", "sae_precision", "check_rate")  # of our part of `additional_config`
OURS = (*LIMITS, "numerics", *PARTS, "multiprocess_mode")
COALESCE_S = 0.001
MAX_SLEEP_S = 0.5  # of an idle engine's thread: a release that finds the lock taken does not wake it


one_at_a_time = threading.Lock()  # vLLM keeps the current step in globals, so engines of one process take turns

alive: weakref.WeakSet[VllmEngine] = weakref.WeakSet()  # engines of this process, those of callers' LLMs included


def known_options() -> list[str]:
    """Return the names of the engine options: vLLM's engine arguments, and patchclamp's."""
    from vllm.engine.arg_utils import EngineArgs

    return [*(field.name for field in dataclasses.fields(EngineArgs)), *OURS]


class VllmEngine(VllmFrontEnd):
    """Stock vLLM in this process. `options` are vLLM's engine arguments by name, and patchclamp's:

    `cells`, `max_records`, `bank_bytes`, `sae_bytes`, `batch_share`, `kept_bytes`, `ring_bytes`, `pinned_bytes`,
    `active_sizes`: `Limits` of the worker; `numerics`: the code for steps without programs, "uniform" (the same as with
    programs) or "stock"; `probes`: probes that score every token of every request; `saes`, a list of
    "NAME=PATH@SITE", and `sae_precision`, "float32" or "model": SAEs to attach; `check_rate`: check the labels of every
    N-th request with captures, 0 for none; `multiprocess_mode`: True to run the engine core in a separate process.
    """

    _engine: LLMEngine

    def __init__(self, name: str, **options: Any) -> None:
        self._begin()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(name, options, started), name="patchclamp", daemon=True
        )
        self._thread.start()
        started.result()

    def _begin(self) -> None:
        """Create the engine's own state, before it has an `LLMEngine`."""
        super().__init__()
        self._queue: collections.deque[tuple[Callable[..., Any], Future[Any]]] = collections.deque()
        self._released: collections.deque[str] = collections.deque()
        self._asleep = False
        self._wake = threading.Condition()
        self._stop, self._ended = False, EngineError("the engine is closed")
        self._held_back: collections.deque[tuple[Request, Future[Answer]]] = collections.deque()
        self._gradings: collections.deque[RunningGrading] = collections.deque()
        self._waiting: dict[str, tuple[Underway, Future[Answer], bytes | None]] = {}  # with the program, by run

    # -- from any thread

    def submit(self, requests: list[Request]) -> list[Future[Answer]]:
        futures: list[Future[Answer]] = [Future() for _ in requests]
        added = self._call(lambda: self._add(requests, futures))
        added.add_done_callback(lambda done: settle_if_failed(futures, done))
        return futures

    def fetch_many(self, wanted: list[Wanted]) -> list[Captured]:
        def ask(*receiver: Any) -> list[Any]:
            return self._call(lambda: self._ask("fetch", wanted, *receiver)).result()

        return join_captured(self._receiver.fetch(ask) if self.remote else ask(), len(wanted))

    def gather(self, runs: list[str], point: int, op: int | None = None) -> tuple[np.ndarray, np.ndarray, Any]:
        if self.remote:
            return super().gather(runs, point, op)
        [gathered] = self._call(lambda: self._ask("gather", runs, point, op)).result()
        return gathered

    unembeds = True

    def read_streams(
        self, streams: list[Wanted], rows: list[int], top: int, chosen: list[int]
    ) -> dict[str, np.ndarray]:  # fmt: skip
        def ask() -> list[Any]:
            self._check_awake()
            return self._ask("read_streams", streams, rows, top, chosen)

        return first_values(self._call(ask).result())

    def lens_many(self, wanted: list[Wanted], top: int, translator: Translator | None = None) -> list[TopTokens]:
        def ask() -> list[Any]:
            self._check_awake()
            return self._ask("lens", wanted, top, msgspec.msgpack.encode(translator))

        return top_tokens_of(self._call(ask).result(), top)

    def release(self, runs: list[str]) -> None:
        # the garbage collector may call this on any thread, so it must not wait for a lock
        self._released.extend(runs)
        if self._wake.acquire(blocking=False):
            self._wake.notify()
            self._wake.release()

    def abort(self, runs: list[str]) -> None:
        """Stop unfinished runs and free their captures."""
        if not self._stop:
            self._call(lambda: self._abort(set(runs)))

    def end(self, requests: list[Request]) -> None:
        if requests and not self._stop:
            self._call(lambda: self._end([request.run for request in requests]))

    @property
    def weights(self) -> int:
        """The number of calls that may have changed the model's weights in place; 0 if the core is in another process.
        Only code that bypasses `pc.LM` makes such calls."""
        return 0 if core_here(self._engine) is None else ask_core(self._engine, "updates")

    def status(self) -> dict[str, Any]:
        """Return the workers' and core's counts: programs, runs, records, vectors, and waiting requests."""
        return self._call(lambda: {**merged(self._ask("status")), **ask_core(self._engine, "counts")}).result()

    def weight(self, name: str, layer: int | None) -> np.ndarray | None:
        shards = self._call(lambda: self._ask("weight", name, layer)).result()
        return join_shards(name, shards, self.sites.tensor_parallel)

    def grade(self, jobs: Sequence[GradeJob], tables: Sequence[GradeTable]) -> Iterator[tuple[int, np.ndarray]]:
        found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        calls = self._grading(jobs, tables, lambda number, programs: found.put((number, programs)))
        grading = RunningGrading(jobs[0].name, calls, found.put)
        self._call(lambda: self._begin_grading(grading)).result()
        try:
            while isinstance(news := arrived(found), tuple):
                yield news
        finally:
            grading.is_cancelled = True
        if news is not None:
            raise news

    def _ask_now(self, verb: str, *args: Any) -> list[Any]:
        return self._call(lambda: self._ask(verb, *args)).result()

    def report(self) -> list[Finding]:
        """Return the doctor's findings about this engine."""
        return self._call(lambda: running(self.config, merged(self._ask("examine")))).result()

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights and cache until `wake`; vectors and captures stay. Raises `EngineError` for
        a level above 1, without `enable_sleep_mode=True`, and while runs are unfinished."""
        self._call(lambda: self._sleep(level)).result()

    def wake(self) -> None:
        """Reallocate the memory and restore the weights; the prefix cache starts empty."""
        self._call(self._wake_up).result()

    def expand(self, prompt: Mapping[str, Any] | None, messages: list[Any] | None, options: dict[str, Any]) -> Expanded:
        return self._call(lambda: images.expand(self._engine, prompt, messages, options)).result()

    def check_adapter(self, adapter: Adapter) -> None:
        """Raise `EngineError` or `CapacityError` for an adapter that this engine cannot run."""
        self._adapters.check(adapter)

    def close(self) -> None:
        with self._wake:
            self._stop = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:  # the garbage collector may close an engine from anywhere
            self._thread.join()

    def _call(self, job: Callable[[], Any]) -> Future[Any]:
        check_outside()
        future: Future[Any] = Future()
        with self._wake:
            if self._stop:
                raise self._ended
            self._queue.append((job, future))
            self._wake.notify()
        return future

    # -- on the engine's thread

    def _live(self, name: str, options: dict[str, Any], started: Future[None]) -> None:
        try:
            with one_at_a_time:
                self._build(name, options)
                alive.add(self)
        except BaseException as error:
            self._stop = True
            if "_engine" in vars(self):
                shut_down(self._engine, alone=not alive)
            started.set_exception(as_own_error(error, EngineError))
            return
        started.set_result(None)
        try:
            while self._serve():
                self._step()
                self._grade_on()
            self._fail(EngineError("the engine is closed"))
        except BaseException as error:
            stopped = EngineError(f"vLLM stopped: {describe_error(error)}")
            stopped.__cause__ = error
            self._fail(stopped)
        finally:
            if not self.remote:  # a worker in another process ends with it
                with suppress(Exception):  # the engine may have failed
                    self._ask("close")
            with one_at_a_time:
                alive.discard(self)
                shut_down(self._engine, alone=not alive)

    def _build(self, name: str, options: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs

        require_all("")
        setup.register()
        if setup.problem is not None:
            raise setup.problem
        for option in options:
            if option not in (known := known_options()):
                raise unknown("engine option", option, known, option)
        limits = {option: options.pop(option) for option in LIMITS if option in options}
        ours = {"limits": limits, "numerics": options.pop("numerics", "uniform")}
        ours |= {part: options.pop(part) for part in PARTS if part in options}
        separate = bool(options.pop("multiprocess_mode", False))
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        extra = {**options.pop("additional_config", {}), configuration.KEY: ours}
        arguments = {"model": name, "disable_log_stats": True, "max_logprobs": MAX_SCORES, **options}
        configuration.spare_memory(arguments)
        configuration.choose_dtype(arguments)
        with configuration.surroundings(separate):
            engine_args = EngineArgs(**configuration.counted_drafts(arguments), additional_config=extra)
            config = engine_args.create_engine_config(configuration.usage())
            self._make(config, separate)
        self._describe(name, config, self._engine.get_tokenizer, self._engine.output_processor)

    def _make(self, config: VllmConfig, separate: bool) -> None:
        """Create the engine and its workers from a configuration."""
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        if config.parallel_config.data_parallel_size > 1:
            raise EngineError("this engine runs one replica of the model: for data_parallel_size above 1, use a server "
                              "(patchclamp serve --data-parallel-size ...)")  # fmt: skip
        executor = Executor.get_class(config)
        self.remote = separate or config.parallel_config.world_size > 1 or not issubclass(executor, UniProcExecutor)
        if not self.remote:
            check_alone(config, bool(alive))
            configuration.share_groups(config)
        self._engine = LLMEngine(config, executor, log_stats=False, multiprocess_mode=separate)
        mark_own(self._engine)
        notice_death(self._engine)
        self._start_on(config)

    def _start_on(self, config: VllmConfig) -> None:
        """Prepare the workers of the `LLMEngine`, and create its submitter and adapters."""
        self._ask("started", self.remote)
        self._submitter = Submitter(self._engine, has_text=not config.model_config.skip_tokenizer_init)
        self._adapters = Adapters(self._engine, lambda number: self._ask("unfit", number), config.lora_config)

    def _ask(self, verb: str, *args: Any) -> list[Any]:
        """Call every worker between steps; return the results."""
        return results_of(self._engine.collective_rpc("patchclamp_rpc", args=(verb, *args)))

    def _tell(self, method: str, *args: Any) -> None:
        tell_core(self._engine, method, *args)

    def _serve(self) -> bool:
        """Run queued jobs; wait for a job if there is nothing to step. Return False once the engine must stop."""
        with self._wake:
            while not (self._stop or self._queue or self._held_back or self._released or self._gradings
                       or is_busy(self._engine)):  # fmt: skip
                self._wake.wait(MAX_SLEEP_S)
            jobs = [self._queue.popleft() for _ in range(len(self._queue))]
        if self._released:
            if not jobs and not is_busy(self._engine):
                with self._wake:  # releases come in bursts, and each batch of them costs an engine step
                    self._wake.wait_for(lambda: self._queue or self._stop, COALESCE_S)
            self._release([self._released.popleft() for _ in range(len(self._released))])
        for job, future in jobs:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(as_own_error(error))
        if self._held_back and not self._stop:
            self._start_held_back()
        return not self._stop

    def _step(self) -> None:
        if not is_busy(self._engine):
            return
        with one_at_a_time:
            outputs: list[Any] = self._engine.step()
        self._take(outputs)

    def _take(self, outputs: list[Any]) -> list[Any]:
        """Read the outputs of requests from `submit`, and return all other outputs."""
        ended: list[Request] = []
        others: list[Any] = []
        for output in outputs:
            if output.request_id not in self._waiting:
                others.append(output)
            else:
                underway, future, carried = self._waiting[output.request_id]
                if output.finished:
                    self._forget(underway.request)
                    ended.append(underway.request)
                    settle(future, _finished(output, underway, carried))
                else:
                    verdict_in(output)  # a request may end at a stop text, so some come early
                    underway.take(output)
        self._drop(ended)
        return others

    def _check_awake(self) -> None:
        if self._asleep:
            raise EngineError("the engine is asleep: call lm.wake()")

    def _begin_grading(self, grading: RunningGrading) -> None:
        self._check_awake()
        self._gradings.append(grading)

    def _grade_on(self) -> None:
        """Execute the next call of the oldest grading job."""
        if not self._gradings:
            return
        grading, busy = self._gradings[0], is_busy(self._engine)
        try:
            if grading.is_cancelled:
                raise EngineError(ABORTED)
            if grading.advance(self._ask, functools.partial(ask_core, self._engine), busy):
                return
            error = None
        except Exception as failure:
            error = as_own_error(failure)
        self._gradings.popleft()
        self._end_grading(grading, error)

    def _end_grading(self, grading: RunningGrading, error: PatchclampError | None) -> None:
        with suppress(Exception):  # the engine may have failed
            self._ask("bulk", "close", grading.name)
        with suppress(Exception):
            ask_core(self._engine, "give", grading.name)
        grading.end(error)

    def _forget(self, request: Request) -> None:
        """Drop an ended request's state, except for its vectors."""
        if self._waiting.pop(request.run, None) is not None:
            self._forget_tables(request.run)
        self._adapters.give(request)

    def _sleep(self, level: int) -> None:
        deep = too_deep(level)
        if deep is not None:
            raise deep
        if not self.config.model_config.enable_sleep_mode:
            raise EngineError("this engine cannot sleep: start it with enable_sleep_mode=True")
        runs = len(self._waiting) + len(self._held_back) + len(self._gradings)
        if runs:
            raise EngineError(f"the engine cannot sleep with {runs} unfinished runs")
        self._asleep = True  # set first: an engine whose sleep failed does not schedule until `wake` either
        self._engine.sleep(level)

    def _wake_up(self) -> None:
        if self._asleep:
            self._engine.wake_up()
        self._asleep = False

    def _add(self, requests: list[Request], futures: list[Future[Answer]]) -> None:
        self._check_awake()
        accepted: list[tuple[Request, Future[Answer]]] = []
        for request, future in zip(requests, futures, strict=True):
            if request.abandoned:  # before it was submitted
                settle(future, EngineError(ABORTED))
            else:
                accepted.append((request, future))
        self._hold(request for request, _ in accepted)
        for request, _ in accepted:
            if request.code:
                self._ask("hold_code", request.run, request.code)
        self._held_back.extend(accepted)

    def _release(self, runs: list[str]) -> None:
        """Free captures, and abort runs whose stream was abandoned."""
        unfinished = [self._waiting[run][0].request for run in runs if run in self._waiting]
        unfinished += [request for request, _ in self._held_back if request.run in set(runs)]
        if abandoned := {request.run for request in unfinished if request.listener is not None}:
            self._abort(abandoned)
        self._tell("release", runs)

    def _start_held_back(self) -> None:
        """Submit held-back requests to vLLM, in order, while their adapters fit."""
        for _ in range(self._adapters.admits(request for request, _ in self._held_back)):
            self._start(*self._held_back.popleft())

    def _start(self, request: Request, future: Future[Answer]) -> None:
        try:
            adapter = self._adapters.take(request)
            carried = self._carried(request)
            self._waiting[request.run] = self._underway(request), future, carried
            self._submitter.add(request, carried, adapter, self.proved_weights)
        except Exception as error:
            self._refuse(request, future, as_own_error(error, RunError))  # vLLM rejected only this request

    def _refuse(self, request: Request, future: Future[Answer], error: PatchclampError) -> None:
        self._forget(request)
        self._drop([request])
        settle(future, error)

    def _abort(self, runs: set[str]) -> None:
        """Abort runs, whether held back or started."""
        aborted = EngineError(ABORTED)
        for request, future in [pair for pair in self._held_back if pair[0].run in runs]:
            self._held_back.remove((request, future))
            self._refuse(request, future, aborted)
        waiting = [self._waiting[run] for run in runs if run in self._waiting]
        self._engine.abort_request([underway.request.run for underway, _, _ in waiting])
        for underway, future, _ in waiting:
            self._refuse(underway.request, future, aborted)
        self._tell("release", list(runs))

    def _end(self, runs: list[str]) -> None:
        """End unfinished runs, with their answers so far. Captures are kept."""
        for underway, future, carried in [self._waiting[run] for run in runs if run in self._waiting]:
            request, error = underway.request, None
            verdict = verdict_of(self._ask("verdict", request.run))
            if verdict is None or carried is None:  # it has ended there, and its last output is in flight
                continue
            try:
                confirm(request.run, verdict, carried)
            except PatchclampError as failure:
                error = failure
            self._engine.abort_request([request.run])
            self._forget(request)
            self._drop([request])
            settle(future, error or underway.answer())

    def _fail(self, error: EngineError) -> None:
        """Stop accepting calls: pending futures and later calls raise this error."""
        with self._wake:
            self._stop, self._ended = True, error
            jobs, self._queue = list(self._queue), collections.deque()
        waiting = [future for _, future, _ in self._waiting.values()]
        for future in [*waiting, *(future for _, future in self._held_back), *(future for _, future in jobs)]:
            settle(future, error)
        self._held_back.clear()
        self._waiting.clear()
        for grading in self._gradings:
            self._end_grading(grading, error)
        self._gradings.clear()


class RunningGrading:
    """A grading job in progress. `end` is called with its error, or None on success."""

    def __init__(self, name: str, calls: Grading, end: Callable[[PatchclampError | None], None]) -> None:
        self.name, self._calls, self.end = name, calls, end
        self.is_cancelled = False
        self._since = 0.0  # when the current wait began
        self._next = next(calls)

    def advance(self, ask: Callable[..., list[Any]], core: Callable[..., Any], busy: bool) -> bool:
        """Execute the next call; return False after the last. `busy`: True if the engine has requests."""
        verb, args = self._next
        if verb == "wait":
            self._since = self._since or time.monotonic()
            if busy and time.monotonic() < self._since + args[0]:
                return True
            found, self._since = None, 0.0
        elif verb == "lease":
            found = core("lease", self.name, *args)
            if found is None and busy:
                return True  # retry when a request has ended
            if found is None:
                raise no_room(args)
        elif verb == "end":
            ask("bulk", "close", self.name)
            found = core("give", self.name)
        else:
            found = ask("bulk", verb, self.name, *args)
        try:
            self._next = self._calls.send(found)
        except StopIteration:
            return False
        return True


def _finished(output: RequestOutput, underway: Underway, carried: bytes | None) -> Answer | PatchclampError:
    """Return a request's answer after its last output, or the error that invalidates it."""
    verdict = verdict_in(output)
    try:
        if carried is not None:
            confirm(underway.request.run, verdict, carried)
    except PatchclampError as error:
        return error
    underway.take(output)
    return underway.answer(output)


def as_own_error(error: BaseException, kind: type[PatchclampError] | None = None) -> PatchclampError:
    if isinstance(error, PatchclampError):
        return error
    kind = kind or (RunError if isinstance(error, (ValueError, TypeError)) else EngineError)
    wrapped = kind(describe_error(error))
    wrapped.__cause__ = error
    return wrapped
