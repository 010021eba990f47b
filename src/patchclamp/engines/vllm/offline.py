"""A caller's `vllm.LLM`: an `LM` runs programs on it, and the caller's own requests may also have programs.

An `LLM` belongs to the thread that calls it, so patchclamp has no separate thread. `submit` steps the engine until its
requests have ended. Outputs of the caller's requests that arrive meanwhile are held until the caller's next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from patchclamp.engines.base import Answer, Request
from patchclamp.engines.vllm.compat import clients, configuration
from patchclamp.engines.vllm.compat.clients import SharedSteps, ask_core, core_here, extra_args, is_busy, verdict_in
from patchclamp.engines.vllm.compat.seams import require_all
from patchclamp.engines.vllm.frontend import confirm, drafts_of
from patchclamp.engines.vllm.monitors import Choices
from patchclamp.engines.vllm.sync_engine import VllmEngine, alive, as_own_error, one_at_a_time
from patchclamp.errors import EngineError, NameTaken, PatchclampError
from patchclamp.store.named import NamedBank

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

Ended = Callable[["CompletionOutput", Request, "Answer | PatchclampError"], None]


class CallersRequest(NamedTuple):
    """A request that the caller added to the `LLM`. `ended` is called for each of its completions."""

    request: Request
    carried: bytes | None
    scores: Choices
    ended: Ended


class OfflineEngine(VllmEngine):
    """Runs programs on the `LLMEngine` of a `vllm.LLM` created with `additional_config={"patchclamp": {}}`.

    front: the `LM` for programs in the caller's requests (`serve.llm_requests`)
    """

    front: Any = None
    proved_weights = -1  # not proved yet

    def __init__(self, engine: LLMEngine) -> None:
        config = engine.vllm_config
        if configuration.enabled(config) is None:
            raise EngineError(
                'this LLM runs without patchclamp: create it with additional_config={"patchclamp": {}}', "model"
            )
        require_all("")
        self._begin()
        self._engine, self._lock, self._weights = engine, threading.RLock(), 0
        self._callers: dict[str, CallersRequest] = {}
        self.bank = NamedBank()
        self.remote = core_here(engine) is None or config.parallel_config.world_size > 1
        self._steps = SharedSteps(engine, self._of_caller)
        if core_here(engine) is not None:
            alive.add(self)  # other engines must keep shared state when they close
        self._start_on(config)
        self._describe(config.model_config.model, config, engine.get_tokenizer, engine.output_processor)

    @property
    def weights(self) -> int:
        """The number of calls that may have changed the model's weights in place. If the core is in another process, it
        is asked only after such a call."""
        if self._steps.may_differ or core_here(self._engine) is not None:
            self._weights, self._steps.may_differ = ask_core(self._engine, "updates"), False
        return self._weights

    @property
    def proved(self) -> bool:
        return self.proved_weights == self.weights

    @property
    def batch_refusal(self) -> str:
        return "a caller's vllm.LLM runs programs as requests"

    def submit(self, requests: list[Request]) -> list[Future[Answer]]:
        with self._lock:
            futures = super().submit(requests)
            while not all(future.done() for future in futures):
                if not self._serve() or not (is_busy(self._engine) or self._held_back):
                    raise EngineError("vLLM is idle, but a request has no result")
                self._step()
        return futures

    def close(self) -> None:
        """Do nothing: the caller owns the engine and may continue to use it."""

    def sleep(self, level: int = 1) -> None:
        raise EngineError("the engine belongs to a vllm.LLM: call its sleep() instead")

    def wake(self) -> None:
        raise EngineError("the engine belongs to a vllm.LLM: call its wake_up() instead")

    def add(
        self, ours: CallersRequest, stock: Callable[..., str], name: str, prompt: Any, params: SamplingParams,
        *args: Any, **kwargs: Any,
    ) -> str:  # fmt: skip
        """Add one of the caller's requests, with its program, through vLLM's `add_request`."""
        with self._lock:
            self._hold([ours.request])
            self._callers[name] = ours
            if self.monitors:
                self.monitor_log.runs[name] = ours.scores
            params.extra_args = {**(params.extra_args or {}), **extra_args(ours.carried, self.proved_weights)}
            try:
                return stock(name, prompt, params, *args, **kwargs)
            except BaseException:
                self._forget_caller(name)
                raise

    def is_own(self, name: str) -> bool:
        """True if `submit` added the request."""
        return name in self._waiting

    def check_unused(self, name: str, has_run: bool) -> None:
        """Raise `NameTaken` if `name` is the id of an unfinished request and either request has a run: their outputs
        would be indistinguishable."""
        if not clients.is_unfinished(self._engine, name):
            self._forget_caller(name)  # if it was aborted
        elif has_run or name in self._callers:
            raise NameTaken(f"{name!r} is the id of an unfinished request: choose another", "request_id")

    def _call(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(as_own_error(error))
        return future

    def _step(self) -> None:
        with one_at_a_time:
            self._steps.own_step()

    def _of_caller(self, outputs: list[Any]) -> list[Any]:
        """Read a step's outputs, end the runs of finished requests, and return the caller's outputs."""
        theirs = self._take(outputs)
        for output in theirs:
            if output.finished and output.request_id in self._callers:
                self._end_caller(output)
        if not self._engine.output_processor.has_unfinished_requests():
            for name in list(self._callers):  # the caller aborted their requests
                self._forget_caller(name)
        if self._released:
            self._release([self._released.popleft() for _ in range(len(self._released))])
        return theirs

    def _end_caller(self, output: RequestOutput) -> None:
        ours = self._callers[output.request_id]
        error, verdict = None, verdict_in(output)
        try:
            if ours.carried is not None:
                confirm(ours.request.run, verdict, ours.carried)
        except PatchclampError as failure:
            error = failure
        if error is not None:
            output.prompt_logprobs = None
        for completion in output.outputs:
            if error is not None:  # no unedited text under an edited label
                completion.token_ids, completion.text, completion.logprobs = [], "", None
                completion.cumulative_logprob, completion.finish_reason = None, "error"
            scores = ours.scores.get(completion.index)
            ours.ended(completion, ours.request, error or _answer(ours.request, output, completion, scores))
        self._forget_caller(output.request_id)

    def _forget_caller(self, name: str) -> None:
        ours = self._callers.pop(name, None)
        if ours is not None:
            self._drop([ours.request])


def _answer(request: Request, output: RequestOutput, completion: CompletionOutput, scores: Any) -> Answer:
    ids, prompt = list(completion.token_ids), (output.prompt_token_ids or [])[1:]
    logprobs, top = _logprobs_of(completion.logprobs, ids, request.logprobs)
    table = output.prompt_logprobs and output.prompt_logprobs[1:]
    prompt_logprobs, prompt_top = _logprobs_of(table, prompt, request.prompt_logprobs)
    return Answer(
        ids, completion.text, logprobs, {}, completion.finish_reason, output.num_cached_tokens or 0, top,
        drafts=drafts_of(completion), monitored=None if scores is None else scores.products(),
        prompt_logprobs=prompt_logprobs, prompt_top_logprobs=prompt_top,
    )  # fmt: skip


def _logprobs_of(
    table: Iterable[Mapping[int, Logprob] | None] | None, ids: Sequence[int], top: int | None
) -> tuple[list[float] | None, list[dict[int, float]]]:
    """Return each token's log-probability, and those of the `top` likeliest tokens at its position (−1: all)."""
    if table is None:
        return None, []
    rows = [{token: each.logprob for token, each in (row or {}).items()} for row in table]
    most = len(rows[0]) if rows and top == -1 else top
    likeliest = [dict(sorted(row.items(), key=lambda one: -one[1])[:most]) for row in rows] if most else []
    return [row[token] for row, token in zip(rows, ids, strict=True)], likeliest


def offline_of(engine: LLMEngine) -> OfflineEngine:
    """Return an `LLMEngine`'s `OfflineEngine`, created by the first call."""
    found = vars(engine).get("patchclamp")
    if found is None:
        found = vars(engine)["patchclamp"] = OfflineEngine(engine)
    return found
