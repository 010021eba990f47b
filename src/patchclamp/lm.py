"""`LM`: a model on an engine, and the calls that run prompts on it."""

from __future__ import annotations

import asyncio
import collections
import functools
import inspect
import itertools
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, overload

import msgspec
import numpy as np

from patchclamp.call import (
    CallArguments,
    GradeArguments,
    as_list,
    conditions_of,
    count_of,
    fuzz_of,
    is_token_id,
    per_prompt,
    plain,
    samplings_of,
    seeded,
    top_logprobs_of,
)
from patchclamp.engines import base, open_engine
from patchclamp.engines.base import (
    MAX_SCORES,
    Adapter,
    Answer,
    Engine,
    Expanded,
    Model,
    Request,
    Tokenizer,
    VllmLLM,
    adapters_of,
)
from patchclamp.engines.grading import GradeJob, Grades, GradeTable
from patchclamp.engines.tokenizer import Chat, chat_of, has_images, prompt_of, template_options
from patchclamp.engines.weights import WEIGHTS, checked_layers, short_name
from patchclamp.errors import (
    CapacityError,
    EngineError,
    MissingSource,
    PatchclampError,
    ProgramError,
    TokensError,
    UnsupportedSite,
    unknown,
)
from patchclamp.grade import AT_ONCE, bound_job, by_requests, read_program, read_scores, read_top
from patchclamp.language import Capture, Probe, Program, Site, every
from patchclamp.language import prompt as prompt_tokens
from patchclamp.language.conditions import ProbeCondition
from patchclamp.language.dictionaries import PRECISIONS
from patchclamp.language.ops import Knockout, Scale
from patchclamp.language.probes import activated
from patchclamp.language.sae import SAE
from patchclamp.language.site import DERIVED, is_stacked, parse_site
from patchclamp.language.values import as_flag, as_items, as_kept, as_plain
from patchclamp.plan.bind import Bindings
from patchclamp.plan.bound import of_sample
from patchclamp.plan.prompt import Prompt
from patchclamp.run import Captures, LensResult, Rows, Run, check_range, kinds_of, pooled_by_run, read_lenses
from patchclamp.sites import SiteMap, SiteRef, placed
from patchclamp.store.named import NamedBank, runs_of
from patchclamp.store.system import available_bytes
from patchclamp.store.tensors import cast
from patchclamp.stream import RunWatch, Stream, WatchedRuns, answer_of, wake

if TYPE_CHECKING:
    import torch

MAX_FETCH_BYTES = 1 << 26  # of captures fetched per engine call; the last point may exceed it
MAX_VIEWED_BYTES = 1 << 30  # the same limit on engines where large captures are views, not copies
KEYS_DRAWN = 256
MEMORY_SHARE = 0.8  # fraction of the available memory that the captures of one call may use
MIN_CHECKED_BYTES = 1 << 26  # smaller captures skip that check
PROOF_TOKENS = 37  # length of the prompt that proves batches
CAPTURED_AT_ONCE = 64  # runs submitted at a time by `grade(capture=...)`
BATCH_TOLERANCE = {"float32": 1e-2, "other": 0.3}  # of log-probabilities: above rounding, below any error
logger: logging.Logger = logging.getLogger(__name__)


class LM:
    """A model on an engine, with the sites of its table. The subclass `ProvedLM` (`proving.prove`) proves them first;
    `pc.LM` is its subclass `TracedLM` (`trace`), which adds traces."""

    bank: NamedBank
    allows_code: bool

    def __init__(
        self, model: str | VllmLLM, engine: str | Engine | None = None, *, allow_code: bool = False,
        capture_bytes: int | None = None, probes: Sequence[Probe] = (), **options: Any,
    ) -> None:  # fmt: skip
        for i, probe in enumerate(probes):
            if not isinstance(probe, Probe):
                raise ProgramError(f"expected a Probe, got {type(probe).__name__}", f"probes[{i}]")
        if capture_bytes is not None and (not is_token_id(capture_bytes) or capture_bytes < 1):
            raise ProgramError(f"expected a number of bytes, got {capture_bytes!r}", "capture_bytes")
        self._capture_bytes = capture_bytes
        # options that change the results of a batch, and therefore the proofs (`proving.prove`)
        as_flag(allow_code, "allow_code")
        self.batching: dict[str, Any | None] = {name: options.get(name) for name in ("max_num_seqs", "padding_side")}
        self.engine: Engine = open_engine(model, engine, options, probes)
        self._always_on: list[Probe] = [each.probe for each in self.engine.monitors] or list(probes)
        self.bank = NamedBank() if self.engine.bank is None else self.engine.bank
        self.allows_code = allow_code
        self._runs: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()
        self._close = weakref.finalize(self, self.engine.close) if self.engine is not engine else self.engine.close
        if allow_code and self.engine.remote:
            if self.engine is not engine:
                self.close()
            raise EngineError("allow_code requires the engine in this process: one worker, no multiprocess_mode")

    @property
    def model(self) -> Model:
        """Properties of the model: name, engine, layers, d_model, d_vocab, dtype, max_model_len."""
        return self.engine.model

    @property
    def sites(self) -> SiteMap:
        """The model's site map."""
        return self.engine.sites

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @overload
    def run(
        self, prompt: str | Mapping[str, Any] | Sequence[int], *, n: None = None, **arguments: Unpack[CallArguments]
    ) -> Run: ...
    @overload
    def run(
        self, prompt: Sequence[str | Mapping[str, Any] | Sequence[int]], *, n: None = None,
        **arguments: Unpack[CallArguments],
    ) -> list[Run]: ...  # fmt: skip
    @overload
    def run(
        self, prompt: str | Mapping[str, Any] | Sequence[int], *, n: int, **arguments: Unpack[CallArguments]
    ) -> list[Run]: ...
    @overload
    def run(
        self, prompt: Sequence[str | Mapping[str, Any] | Sequence[int]], *, n: int, **arguments: Unpack[CallArguments]
    ) -> list[list[Run]]: ...
    @overload
    def run(
        self, *, messages: Sequence[Mapping[str, Any]], n: None = None, **arguments: Unpack[CallArguments]
    ) -> Run: ...
    @overload
    def run(
        self, prompt: Any = None, *, messages: Any = None, n: int | None = None, **arguments: Unpack[CallArguments]
    ) -> Any: ...
    def run(self, prompt: Any = None, **arguments: Any) -> Any:
        """Run one prompt and return its `Run`, or run a list of prompts as one batch and return a list of `Run`.

        prompt: text or token ids, or a list of either. On vLLM a prompt may have images, in vLLM's own format:
            `{"prompt": text, "multi_modal_data": {"image": image}}`, or with `"prompt_token_ids"`
        messages: a chat in place of a prompt, or a list of chats; on vLLM also with images as OpenAI content parts. A
            final assistant message is continued
        chat_template_kwargs: further arguments of the chat template, such as `{"enable_thinking": False}`
        max_tokens: the maximum number of generated tokens
        edits, capture: one program for all prompts, or a list of lists, one per prompt
        temperature: the sampling temperature; greedy by default
        n: the number of samples per prompt; more than one requires a temperature. A prompt then returns a list of `n`
            runs, each with its own captures. Sample i has the seed `seed` + i, also for `Noise`
        sampling: further sampling parameters by vLLM's names, or a list of them, one per prompt. `extra_args` may have
            `fuzz_strength`, `fuzz_seed` and `fuzz_mode` (`language.ops`), applied after the edits
        score: candidates for the first generated token, as ids or single-token texts, or a list of such lists, one per
            prompt. `run.scores` has their log-probabilities
        logprobs: True for the log-probability of each generated token (`run.logprobs`); a number k to add the top k
            tokens (`run.top_logprobs`), not with `score`; or a list of these, one per prompt
        prompt_logprobs: the same for each token of the prompt, given the tokens before it (`run.prompt_logprobs` and
            `run.prompt_top_logprobs`). The whole prompt is computed, even if its prefix is cached
        stop_when: a condition on probes, such as `probe > 0.8`, that ends the run at the first generated token where it
            holds, with `finish_reason` "stop" and `stop_reason` "probe:NAME"; or a list with a condition or None per
            prompt. Its probes are added to the captures
        lora: the folder of a PEFT adapter to apply (vLLM with `enable_lora=True`), or a list with a folder or None per
            prompt

        If the call returns a single run, a failed run raises its error; in a list, failed runs have `error` set. An
        invalid program raises before anything runs.
        """
        with base.rarely():
            call = self._read_call(prompt, **arguments)
            watching = self._watching(call)
            futures = self.engine.submit(call.requests)
            try:
                wait = _wait_all if watching is None else watching.answers
                answers = wait(futures)
            except BaseException:
                self.engine.abort(call.keys)  # interrupted: stop computing and free the captures
                raise
            return self._runs_of(call, answers)

    async def arun(self, prompt: Any = None, **arguments: Any) -> Any:
        """Run prompts as `run` does, on asyncio: calls awaited together run concurrently, on vLLM in the same batches.
        Cancelling a call aborts its requests."""
        with base.rarely():
            call = self._read_call(prompt, **arguments)
            watching = self._watching(call)
            futures = self.engine.submit(call.requests)  # no await before `try`, so that a cancelled call is aborted
            try:
                if watching is None:
                    answers = await _all_answers(futures)
                else:  # on its own thread, because asyncio's pool has few
                    pool = ThreadPoolExecutor(1, "patchclamp watch")
                    answered = asyncio.get_running_loop().run_in_executor(pool, watching.answers, futures)
                    pool.shutdown(wait=False)
                    answers = await answered
            except BaseException:
                self.engine.abort(call.keys)
                raise
            return self._runs_of(call, answers)

    def stream(self, prompt: Any = None, *, messages: Any = None, **arguments: Unpack[CallArguments]) -> Stream:
        """Run one prompt as `run` does and stream its output: `for part in lm.stream(...)`, or `async for`. After the
        last part `stream.run` is the `Run`. Invalid arguments raise in this call, before anything runs."""
        call = self._read_call(prompt, messages=messages, **arguments)
        if call.listed:
            raise ProgramError("expected one prompt, got a list", "prompt" if messages is None else "messages")
        if call.counts != [1]:
            raise ProgramError(f"expected one sample, got n={call.counts[0]}; start several streams", "sampling.n")
        [request], [program], [condition] = call.requests, call.programs, call.conditions
        look_at = self._look_at(request, program)
        watch = RunWatch(request, condition, look_at, program)
        watch = watch if watch.has_readouts else None
        return Stream(self.engine, request, lambda answer: self._runs_of(call, [answer]), look_at, watch)

    def _look_at(self, request: Request, program: Program) -> Callable[..., Run]:
        """Return a function that creates a `Run` from a partial answer; its rows start at position `first`."""
        return lambda answer, first=0: Run(self, request, program, answer, is_kept_elsewhere=True, first=first)

    def _watching(self, call: _Call) -> WatchedRuns | None:
        """Return the `WatchedRuns` of a call, or None if no run has a stopping condition."""
        if not any(condition is not None for condition in call.conditions):
            return None
        parts = zip(call.requests, call.programs, call.conditions, strict=True)
        return WatchedRuns(self.engine, [
            None if condition is None else RunWatch(request, condition, self._look_at(request, program))
            for request, program, condition in parts
        ])  # fmt: skip

    @overload
    def grade(
        self, prompt: str | Sequence[int], programs: Sequence[Any], **arguments: Unpack[GradeArguments]
    ) -> Grades: ...
    @overload
    def grade(
        self, prompt: Sequence[str | Sequence[int]], programs: Sequence[Sequence[Any]],
        **arguments: Unpack[GradeArguments],
    ) -> list[Grades]: ...  # fmt: skip
    @overload
    def grade(
        self, prompt: Any = None, programs: Any = (), *, messages: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None, **arguments: Unpack[GradeArguments],
    ) -> Any: ...  # fmt: skip
    def grade(
        self, prompt: Any = None, programs: Any = (), *, score: Any = (), kl: bool = False, top: int = 0,
        capture: Any = (), messages: Any = None, chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Grade many programs on one prompt, and return its `Grades`: for each program, the log-probabilities of the
        same next tokens. There are no `Run` objects; on vLLM, programs share the engine's batches, which is faster
        than separate requests.

        prompt: text or token ids; for a list of either, with a list of programs for each, a list is returned
        programs: a list; each is an op, a list of ops, or a `Program`
        score: a list of answers, each a text, a token id, or a list of ids. An answer's score is the sum of its tokens'
            log-probabilities, each given the tokens before it
        kl: True for KL(unedited ‖ edited) of the next token over the whole vocabulary, in nats
        top: the number of likeliest next tokens to return, with their log-probabilities
        capture: sites whose rows on the prompt are returned, as in `run`; each program then takes one more request
        messages, chat_template_kwargs: as in `run`

        A failed program has NaN grades, and its error is in `errors`. An invalid program raises before anything runs.
        """
        prompts, listed = self._prompts(prompt, messages, chat_template_kwargs)
        lists = as_items(programs, "programs") if listed else [programs]
        if len(lists) != len(prompts):
            raise ProgramError(f"expected one list of programs per prompt, for {len(prompts)} prompts", "programs")
        kl, top = as_flag(kl, "kl"), read_top(top)
        scores = read_scores(score, self.tokenizer.bare, self.model.d_vocab)
        terms = [[(each[:i], token) for i, token in enumerate(each)] for each in scores]
        bindings = self.bindings()
        jobs: list[GradeJob] = []
        for i, (one, of) in enumerate(zip(prompts, lists, strict=True)):
            try:
                jobs.append(self._grade_job(one, as_items(of, "programs"), terms, kl, top, bindings))
            except PatchclampError as error:
                raise error.under(f"prompt {i}") if listed else error from None
        rows: list[Capture] = []
        if capture is not None and (not isinstance(capture, (list, tuple)) or len(capture) > 0):
            wanted = Program.of((), capture)
            for path, op in wanted.ops:
                if not isinstance(op, Capture) or op.at.name in DERIVED:
                    message = "lm.grade captures only rows of sites: use lm.run for probes, lenses and attention"
                    raise ProgramError(message, path)
                rows.append(msgspec.structs.replace(op, tokens=op.tokens & prompt_tokens))
            for one in prompts:  # before anything runs
                given = prompt_of(self.tokenizer, one.ids, one.text, one.chat, [])
                bindings.of(wanted, self.engine.run_prefix + _key(), given, 1)
        grades = self.graded(jobs)
        if rows:
            given = messages if prompt is None else prompt
            name, options = ("messages", chat_template_kwargs) if prompt is None else ("prompt", None)
            calls = [{name: one, "chat_template_kwargs": options} for one in (given if listed else [given])]
            # a program may edit the tokens of a score alone: it runs as long as the longest score
            longest = max((len(each) for each in scores), default=1)
            grades = [msgspec.structs.replace(of, captured=self._captured(call, as_items(programs, ""), rows, longest))
                      for of, call, programs in zip(grades, calls, lists, strict=True)]  # fmt: skip
        return grades if listed else grades[0]

    def _captured(
        self, call: Mapping[str, Any], programs: Sequence[Any], capture: Sequence[Capture], max_tokens: int
    ) -> list[Captures | None]:
        """Run each program on a prompt and return its captures, or None if it failed."""
        found: list[Captures | None] = []
        for begin in range(0, len(programs), CAPTURED_AT_ONCE):
            part = programs[begin : begin + CAPTURED_AT_ONCE]
            edits = [list(read_program(each, "programs").edits) for each in part]
            several: dict[str, Any] = {
                name: of if name == "chat_template_kwargs" else [of] * len(part) for name, of in call.items()
            }
            runs: list[Run] = self.run(**several, max_tokens=max_tokens, edits=edits, capture=capture)
            try:
                fetched = iter(self.fetch([run for run in runs if run.error is None]))
                found += [None if run.error is not None else next(fetched) for run in runs]
            finally:
                for run in runs:
                    run.close()
        return found

    @overload
    def loglikelihood(
        self, prompt: str | Sequence[int], continuation: str | Sequence[int], *, edits: Any = ()
    ) -> float: ...
    @overload
    def loglikelihood(
        self, prompt: str | Sequence[int], continuation: Sequence[str | Sequence[int]], *, edits: Any = ()
    ) -> list[float]: ...
    @overload
    def loglikelihood(
        self, prompt: Sequence[str | Sequence[int]], continuation: Sequence[Any], *, edits: Any = ()
    ) -> list[Any]: ...
    def loglikelihood(self, prompt: Any, continuation: Any, *, edits: Any = ()) -> Any:
        """Return a continuation's log-probability after a prompt, in nats: the sum over its tokens, each given the
        tokens before it (teacher forcing).

        prompt: text or token ids; for a list of either, a list is returned
        continuation: text or token ids; for a list of either, such as a question's choices, a list is returned. With
            a list of prompts: a list with one of these per prompt
        edits: the edits of every run; `generated` selects the continuation

        All continuations are graded together (`grade`). Prompt and continuation are tokenised separately.
        """
        prompts, listed = self._prompts(prompt, None, None)
        continuation, edits = as_kept(continuation), as_kept(edits)
        continuations = [as_kept(one) for one in as_items(continuation, "continuation")] if listed else [continuation]
        if len(continuations) != len(prompts):
            raise ProgramError(f"expected one continuation per prompt, for {len(prompts)} prompts", "continuation")
        bindings = self.bindings()
        jobs: list[GradeJob] = []
        are_several = [isinstance(given, (list, tuple)) and any(isinstance(each, (str, list, tuple)) for each in given)
                       for given in continuations]  # fmt: skip
        for i, (one, given) in enumerate(zip(prompts, continuations, strict=True)):
            try:
                scores = read_scores(given if are_several[i] else [given], self.tokenizer.bare, self.model.d_vocab)
            except PatchclampError as error:
                raise type(error)(error.message, f"continuation[{i}]" if listed else "continuation") from None
            terms = [[(ids[:n], token) for n, token in enumerate(ids)] for ids in scores]
            try:
                job = self._grade_job(one, [edits], terms, False, 0, bindings)
            except PatchclampError as error:  # the one program is `edits` here
                named = type(error)(error.message, (error.path or "").removeprefix("programs[0].") or None)
                raise named.under(f"prompt {i}") if listed else named from None
            jobs.append(msgspec.structs.replace(job, has_baseline=False))
        found: list[Any] = []
        for grades, several in zip(self.graded(jobs), are_several, strict=True):
            for error in grades.errors.values():
                raise error
            values = grades.logprobs[0].tolist()
            found.append(values if several else values[0])
        return found if listed else found[0]

    def _grade_job(
        self, prompt: _Prompt, programs: Sequence[Any], scores: list[list[tuple[tuple[int, ...], int]]], kl: bool,
        top: int, bindings: Bindings,
    ) -> GradeJob:  # fmt: skip
        longest = max((len(suffix) for score in scores for suffix, _ in score), default=0) + 1
        if len(prompt.ids) + longest > self.model.max_model_len:
            raise TokensError(f"{len(prompt.ids)} prompt tokens and {longest} further tokens exceed max_model_len="
                              f"{self.model.max_model_len}")  # fmt: skip
        if prompt.expanded is not None:
            raise ProgramError("grading prompts with images is not supported", "prompt")
        given = prompt_of(self.tokenizer, prompt.ids, prompt.text, prompt.chat, [])
        name = self.engine.run_prefix + _key()
        return bound_job(self.engine, name, given, programs, scores, longest, kl, top, bindings)

    def grade_job(
        self, prompt: Sequence[int], programs: Sequence[Any], scores: list[list[tuple[tuple[int, ...], int]]],
        top: int = 0, kl: bool = False, bindings: Bindings | None = None,
    ) -> GradeJob:  # fmt: skip
        """Create a grading job of programs on a prompt of token ids. `scores`: as in `sequences_of`; `bindings`: shared
        by prompts with the same programs."""
        return self._grade_job(_Prompt(list(prompt)), programs, scores, kl, top, bindings or self.bindings())

    def bindings(self) -> Bindings:
        """Create a `Bindings`, which binds programs to prompts of this model."""
        return Bindings(self.sites, self._source, self.bank, self.allows_code)

    @property
    def batch_refusal(self) -> str:
        """The reason why graded programs run as requests; "" if they run in the engine's own batches. The first access
        checks on the live model that batches and requests agree, for unedited runs and edits at several positions."""
        engine = self.engine
        if engine.batch_difference is None and not engine.batch_refusal:
            try:
                engine.batch_difference = self._difference_of_batches()
            except PatchclampError as error:  # such as a full table, which may be temporary
                return f"a batch failed: {error}"
            if engine.batch_difference:
                logger.warning("patchclamp: grading programs as individual requests, which is slower: %s",
                               engine.batch_difference)  # fmt: skip
        return engine.batch_refusal or engine.batch_difference or ""

    def jobs_refusal(self, jobs: Sequence[GradeJob]) -> str:
        """Return the reason why these jobs run as requests; "" if they run in batches."""
        reasons = (self.engine.job_refusal(job) or next(iter(job.refused.values()), "") for job in jobs)
        return self.batch_refusal or next(filter(None, reasons), "")

    def _difference_of_batches(self) -> str:
        """Describe the difference between batches and requests; "" if they are equal."""
        length = max(2, min(PROOF_TOKENS, self.model.max_model_len - 2))
        while self.engine.job_refusal(self._proof(length, 3)) and length > 2:
            length = max(2, length // 2)
        off = 0.0
        for scores in (3, 2):  # with two, batches may begin at a later layer
            found = []
            for run in (self._in_batches, functools.partial(by_requests, self.engine)):
                job = self._proof(length, scores)
                table = GradeTable(job)
                run([job], [table], lambda *_: None)
                grades = table.grades("")
                found.append(np.concatenate([grades.baseline[None], grades.logprobs]))
            off = float(np.maximum(off, np.abs(found[0] - found[1]).max()))  # NaN if any difference is
        most = BATCH_TOLERANCE["float32" if self.model.dtype == "float32" else "other"]
        return "" if off <= most else f"log-probabilities differ by {off:.1e} between a batch and requests"

    def _proof(self, length: int, scores: int) -> GradeJob:
        """Create a job of edited and unedited programs on a random prompt. The third answer has two tokens."""
        ids = np.random.default_rng(0).integers(self.model.d_vocab, size=length).tolist()
        stream = [self.sites.label(point.number) for point in self.sites.points if point.kind == "stream"]
        edits: list[Scale | Knockout] = [
            Scale(1.5, at=stream[len(stream) // 2], tokens=every[p]) for p in (0, length // 2, length - 1)
        ]
        if self.engine.removes_keys and "pattern" in self.sites.names:
            edits.append(Knockout(keys=every[0], at="pattern", tokens=every[length - 1]))
        terms = [[((), ids[0])], [((), ids[1])], [((), ids[1]), ((ids[1],), ids[0])]]
        return self.grade_job(ids, [[], *edits, []], terms[:scores])

    def _in_batches(
        self, jobs: Sequence[GradeJob], tables: Sequence[GradeTable], tell: Callable[[int, np.ndarray], None]
    ) -> None:
        """Grade programs in the engine's batches. Programs that it refuses stay ungraded in their tables."""
        try:
            for i, programs in self.engine.grade(jobs, tables):
                tell(i, programs[~np.isin(programs, list(jobs[i].refused))])
        finally:
            for job, table in zip(jobs, tables, strict=True):
                table.done[[number + 1 for number in job.refused]] = False

    def graded(
        self, jobs: Sequence[GradeJob], tell: Callable[[int, Grades, np.ndarray], None] = lambda *_: None,
        batch: int = AT_ONCE, route: Literal["any", "bulk", "requests"] = "any",
    ) -> list[Grades]:  # fmt: skip
        """Grade jobs together in the engine's own batches, or else as requests, at most `batch` at a time. `tell` is
        called with a job's index, its grades so far, and the indices of the programs just graded. With the route
        "bulk", raises `CapacityError` unless all jobs run in batches."""
        reason = "requested by the caller" if route == "requests" else self.batch_refusal
        refusals = [next(iter(job.refused.values())) if 0 < job.count == len(job.refused) else "" for job in jobs]
        reasons = [reason or self.engine.job_refusal(job) or of_all for job, of_all in zip(jobs, refusals, strict=True)]
        tables = [GradeTable(job) for job in jobs]
        grades = [table.grades(route) for table in tables]

        def run(way: Callable[..., None], which: Sequence[int], *args: Any) -> None:
            """Grade the jobs at indices `which` by one of the two routes."""

            def graded(i: int, programs: np.ndarray) -> None:
                tell(which[i], grades[which[i]], programs)

            if which:
                way([jobs[i] for i in which], [tables[i] for i in which], graded, *args)

        with base.rarely():
            if route == "bulk" and (refusal := self.jobs_refusal(jobs)):
                raise CapacityError(refusal)
            try:
                run(self._in_batches, [i for i, refusal in enumerate(reasons) if not refusal])
            except CapacityError as error:  # one program may fit where a batch does not
                if route == "bulk":
                    raise
                reasons = [refusal or str(error) for refusal in reasons]
            left = [i for i, of in enumerate(reasons) if of or not tables[i].done[1:].all()]
            run(functools.partial(by_requests, self.engine), left, batch)
        return [table.grades("requests" if refusal else "bulk", refusal or ", ".join(sorted({*job.refused.values()})))
                for table, job, refusal in zip(tables, jobs, reasons, strict=True)]  # fmt: skip

    def _read_call(
        self, prompt: Any = None, *, messages: Any = None, max_tokens: int = 16, edits: Any = (), capture: Any = (),
        temperature: float | None = None, n: int | None = None, sampling: Any = None, score: Any = (),
        logprobs: bool | int | Sequence[bool | int] = False,
        prompt_logprobs: bool | int | Sequence[bool | int] = False, stop_when: Any = None, lora: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> _Call:  # fmt: skip
        """Validate the arguments of a call, and create one request per run."""
        prompts, listed = self._prompts(prompt, messages, chat_template_kwargs)
        parts = (per_prompt(edits, len(prompts), "edits"), per_prompt(capture, len(prompts), "capture"))
        by_lists: dict[tuple[int, int], Program] = {}  # a list shared by all prompts is parsed once
        programs = [by_lists.get((id(edit), id(keep)))
                    or by_lists.setdefault((id(edit), id(keep)), Program.of(edit, keep))
                    for edit, keep in zip(*parts, strict=True)]  # fmt: skip
        samplings = [plain(one) for one in samplings_of(sampling, len(prompts), temperature=temperature, n=n)]
        fuzzes = [fuzz_of(one.pop("extra_args", None)) for one in samplings]
        programs = [msgspec.structs.replace(program, edits=program.edits + fuzz) if fuzz else program
                    for program, fuzz in zip(programs, fuzzes, strict=True)]  # fmt: skip
        conditions = conditions_of(stop_when, len(prompts))
        for i, condition in enumerate(conditions):
            path = "stop_when" if condition is stop_when else f"stop_when[{i}]"
            programs[i] = programs[i].stopped_by(condition, self._always_on, path)
            if self._always_on and not self.engine.monitors:
                named, captures = programs[i].probes, programs[i].capture
                added = [probe for probe in self._always_on if probe.name not in named]
                programs[i] = msgspec.structs.replace(programs[i], capture=(*captures, *added))
        counts = [count_of(one) for one in samplings]
        for one in samplings if isinstance(sampling, (list, tuple)) else samplings[:1]:
            self.engine.check_sampling(one)
        scores = per_prompt(() if score is None else score, len(prompts), "score")
        adapters = self._adapters(lora, len(prompts))
        tops = top_logprobs_of(logprobs, scores)
        of_prompts = top_logprobs_of(prompt_logprobs, [()] * len(prompts), "prompt_logprobs")
        bindings = self.bindings()
        requests = [
            self._request(prompts[i], programs[i], scores[i], seeded(one, number), max_tokens, adapters[i],
                          f"prompt {i}" if listed else None, (tops[i], of_prompts[i]), bindings, number)
            for i, one in enumerate(samplings)
            for number in range(counts[i])
        ]  # fmt: skip
        programs = [program for program, count in zip(programs, counts, strict=True) for _ in range(count)]
        conditions = [condition for condition, count in zip(conditions, counts, strict=True) for _ in range(count)]
        if self.engine.keeps_captures_here:
            points = self.sites.points
            bounds = [request.bound for request in requests if request.bound is not None]
            self._check_memory(sum(
                len(positions) * (bound.captured_width[i] or points[i].width) * bound.captured_item_bytes[i]
                for bound in bounds for i, positions in bound.captured.items()
            ) + sum(bound.private_bytes(self.sites) for bound in bounds))  # fmt: skip
        return _Call(requests, programs, counts, listed, n is not None, conditions)

    def _check_memory(self, size: int) -> None:
        """Raise `CapacityError` if captures of this size exceed `capture_bytes` or, by default, available memory."""
        if self._capture_bytes is None and size < MIN_CHECKED_BYTES:
            return
        room = self._capture_bytes or int(MEMORY_SHARE * available_bytes())
        if size > room:
            raise CapacityError(
                f"the captures take {size / 1e9:.3g} GB, over the limit of {room / 1e9:.3g} GB: capture fewer sites "
                "or positions (`@ pc.prompt[-1]`), use project= or dtype='float16', split the call, or write them "
                "to disk with pc.studies.harvest; pc.LM(capture_bytes=) sets another limit", "capture"
            )  # fmt: skip

    def _runs_of(self, call: _Call, answers: list[Answer | PatchclampError]) -> Any:
        """Return the runs of a call, as `run` returns them."""
        runs = [Run(self, *parts) for parts in zip(call.requests, call.programs, answers, strict=True)]
        self._runs.update((run.key, run) for run in runs)
        for run, after in itertools.pairwise(runs):
            run.next_of_call = weakref.ref(after)
        if call.counts == [1] and not call.listed and not call.sampled and runs[0].error is not None:
            runs[0].close()  # the caller never receives it
            raise runs[0].error
        rest = iter(runs)
        grouped = [next(rest) if n == 1 and not call.sampled else list(itertools.islice(rest, n)) for n in call.counts]
        return grouped if call.listed else grouped[0]

    def fetch(self, runs: Iterable[Run], sites: Any = None, *, copy: bool = True) -> list[Captures]:
        """Fetch the captures of many runs in few engine calls, at `sites` or (None) at all captured sites. Returns a
        mapping for each run, from site names such as "resid_post[3]" or sites to tensors: `fetched[0][pc.resid_post]`
        is [L, T, W], with the layers that the run captured. The tensors equal `run.read(site, copy=copy)`; names of the
        same rows, such as "resid_post[0]" and "resid_pre[1]", share one tensor. Raises `MissingSource` for a site that
        a run did not capture, and a failed run's own error."""
        runs, chunk, size = runs_of(runs), [], 0
        as_flag(copy, "copy")
        refs = self.sites.refs() if sites is None else []
        asked = [] if sites is None else self._sites_of(sites)
        wanted = [
            run.captured_of(refs) if sites is None else [ref for at in asked for ref in run.captured_layers(at)]
            for run in runs
        ]
        if copy or not self.engine.has_views:
            self._check_memory(sum(
                run.stored_bytes_at(point) for run, of_run in zip(runs, wanted, strict=True)
                for point, _ in run.unread({ref.point for ref in of_run})
            ))  # fmt: skip
        places = {ref: (str(ref), parse_site(str(ref))) for ref in set(itertools.chain(*wanted))}
        for run, of_run in zip(runs, wanted, strict=True):
            unread = run.unread({ref.point for ref in of_run})
            chunk += [(run, key) for key in unread]
            size += sum(run.bytes_at(point) for point, _ in unread)
            if size > (MAX_VIEWED_BYTES if self.engine.has_views else MAX_FETCH_BYTES):
                self._fetch(chunk)
                chunk, size = [], 0
        self._fetch(chunk)
        same = {ref: (ref.point, ref.index, ref.columns, self.sites.parts(ref.name)) for ref in places}
        found: list[Captures] = []
        for run, of_run in zip(runs, wanted, strict=True):
            chosen = {same[ref]: ref for ref in of_run}
            rows = {key: run.rows_of(*places[ref], ref, copy=copy) for key, ref in chosen.items()}
            found.append(Captures({places[ref][0]: rows[same[ref]] for ref in of_run}, self.sites, run.pools))
        return found

    def rows(self, runs: Iterable[Run], sites: Any = None) -> dict[str, Rows]:
        """Read the captures of many runs as one array per site, at `sites` or (None) the first run's sites, in one
        engine call per site: `lm.rows(runs)["resid_post[3]"].values` is [R, D], with the run and the position of each
        row. Do not change it in place: it may be the captured memory itself. Raises `MissingSource` for a site that a
        run did not capture, or captured by token id or differently from the first run, and a failed run's own error."""
        runs = _distinct(runs)
        if not runs:
            return {}
        asked = self._sites_of(sites) if sites is not None else []
        refs = [ref for at in asked for ref in runs[0].captured_layers(at)]
        if sites is None:  # each point once: resid_post[3] is resid_pre[4]
            refs = list({ref.point: ref for ref in runs[0].captured_of(self.sites.refs())}.values())
        found, kinds = dict[str, Rows](), kinds_of(runs)
        for ref in refs:
            rows, pool = self._gathered(runs, kinds, ref)
            values = np.asarray(runs[0].shaped(parse_site(str(ref)), ref, rows.values))
            rows = msgspec.structs.replace(rows, values=values)
            found[str(ref)] = pooled_by_run(rows, pool, len(runs), str(ref)) if pool else rows
        return found

    def probes(self, runs: Iterable[Run]) -> dict[str, Rows]:
        """Read the scores of many runs with the same probes, as one array per probe name: [R, k], or [R, L, k] for
        several layers, in one engine call per layer. Raises the same errors as `rows`."""
        runs = _distinct(runs)
        found, kinds = self._monitored(runs), kinds_of(runs)
        for name, probe in runs[0].program.probes.items() if runs else ():
            layers = [self._gathered(runs, kinds, ref, name)[0] for ref in self.sites.resolve(probe.at)]
            rows = msgspec.structs.replace(layers[0], values=np.stack([each.values for each in layers], 1))
            if probe.bias is not None:
                rows = msgspec.structs.replace(rows, values=rows.values + probe.bias.array())
            rows = pooled_by_run(rows, probe.pool, len(runs), name) if probe.pool else rows
            values = np.asarray(activated(rows.values, probe.activation))
            found[name] = msgspec.structs.replace(rows, values=values if is_stacked(probe.at) else values[:, 0])
        return found

    def _monitored(self, runs: Sequence[Run]) -> dict[str, Rows]:
        """Return the scores of the engine's own probes, by name; empty unless all runs have them."""
        products = [rows for run in runs if (rows := run.answer.monitored) is not None]
        if not products or len(products) < len(runs):
            return {}
        counts, joined = [len(rows) for rows in products], np.concatenate(products)
        run = np.repeat(np.arange(len(runs)), counts)
        position = np.concatenate([np.arange(count) for count in counts])
        scores = [(each.probe, each.scores(joined)) for each in self.engine.monitors]
        return {probe.name: Rows(of.swapaxes(0, 1) if is_stacked(probe.at) else of, run, position)
                for probe, of in scores}  # fmt: skip

    def _gathered(
        self, runs: Sequence[Run], kinds: tuple[list[int], np.ndarray], ref: SiteRef, probe: str = ""
    ) -> tuple[Rows, str]:
        """Return the rows of a site or probe over many runs, and the pooling to apply. `kinds`: from `kinds_of`."""
        name, point, (firsts, kind) = probe or str(ref), ref.point, kinds
        way = runs[0].capture_way(ref, probe)
        other = next((i for i in firsts if runs[i].capture_way(ref, probe) != way), None)
        if other is not None:
            raise MissingSource(f"runs[0] and runs[{other}] captured {name} differently: read the runs one at a time")
        run, position, rows = self.engine.gather([each.key for each in runs], point, way.number)
        rows = rows if len(rows) else rows.reshape(0, way.width)
        computed = position < np.array([runs[i].positions_computed for i in firsts])[kind][run]
        if not computed.all():
            kept = np.flatnonzero(computed)
            run, position, rows = run[kept], position[kept], rows[kept]
        expected = np.array([runs[i].expected_rows(point, way.number) for i in firsts])[kind]
        if not np.array_equal(np.bincount(run, minlength=len(runs)), expected):
            raise PatchclampError(f"{name}: captured positions differ from the requested ones")
        rows = cast(rows, way.dtype) if way.dtype != "float32" else rows
        check_range(rows, position, name)
        if not isinstance(rows, np.ndarray):
            from patchclamp.store.host_memory import floats

            rows = floats(rows)
        return Rows(rows, run, position), way.pool

    def attach(
        self, sae: SAE, at: Site | str | None = None, *, name: str, to: Site | str | None = None,
        precision: Literal["float32", "model"] = "float32",
    ) -> None:  # fmt: skip
        """Attach a sparse autoencoder or transcoder under a name, for `Features`, `SetFeature` and `Reconstruct`. It is
        copied to the device; on vLLM, `pc.LM(sae_bytes=)`, if given, reserves the memory.

        at: the site of one layer that the SAE reads; default: the site in its file
        to: the site that it writes; default: `at`, or for a transcoder the site in its file
        precision: the dtype of its matrices, "float32" or "model" (the model's dtype); products are summed in fp32

        Raises `ShapeError` if the site's width differs, `UnsupportedSite` for a site sharded across workers, and
        `CapacityError` if there is no room.
        """
        if not isinstance(precision, str) or precision not in PRECISIONS:
            raise unknown("precision", str(precision), PRECISIONS, "precision")
        dtype = self.model.dtype if precision == "model" else "float32"
        dictionary = placed(sae, self.sites, name, at, to, dtype)
        if name in self.sites.dictionaries:
            raise ProgramError(f"duplicate SAE name {name!r}: detach that SAE first", "name")
        self.engine.attach(name, sae, precision)
        self.sites.dictionaries[name] = dictionary

    def detach(self, name: str) -> None:
        """Detach an SAE and free its memory, once no running program uses it."""
        if not isinstance(name, str) or name not in self.sites.dictionaries:
            raise unknown("SAE", str(name), self.sites.dictionaries, "name")
        self.engine.detach(name)
        del self.sites.dictionaries[name]

    def lens(self, runs: Iterable[Run]) -> list[Mapping[Site | str, LensResult]]:
        """Compute the lenses and features of many runs in few engine calls, and return each `run.lens`. Accessing a
        non-finite result raises `NotFinite`."""
        runs = runs_of(runs)
        read_lenses(self.engine, runs)
        return [run.lens for run in runs]

    def _sites_of(self, sites: Any) -> list[Site]:
        try:
            asked = [parse_site(site) for site in as_list(sites)]
            for site in asked:
                self.sites.resolve(site)
                if site.name in DERIVED:
                    raise ProgramError(f"attention must be read one run at a time, as in run[pc.{site}]")
            return asked
        except PatchclampError as error:
            raise error.under("sites") from None

    def _fetch(self, chunk: Sequence[tuple[Run, tuple[int, int | None]]]) -> None:
        """Fetch the captures of (run, (point, op)) pairs and store them in their runs."""
        captured = self.engine.fetch_many([base.Wanted(run.key, *key) for run, key in chunk]) if chunk else []
        for (run, key), rows in zip(chunk, captured, strict=True):
            run.take_fetched({key: rows})

    def tokens(
        self, text: str | None = None, *, messages: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:  # fmt: skip
        """Return the token ids of a text, with the tokenizer's special tokens, or of a chat, as `run` encodes them."""
        if messages is not None and text is None:
            return self._chat(messages, chat_template_kwargs).ids
        if not isinstance(text, str):
            raise ProgramError(f"expected text, got {type(text).__name__} {text!r:.100}", "text")
        try:
            return self.tokenizer.encode(text)
        except (TypeError, ValueError) as error:  # a lone surrogate, for example
            raise ProgramError(f"tokenising the text failed: {error}", "text") from None

    def weights(self, name: str, layer: int | None = None, head: int | None = None) -> torch.Tensor:
        """Return one of the model's weights, by its TransformerLens name, as an fp32 copy on the host. Matrices
        multiply rows from the right: `z[3, 5] @ lm.weights("W_O", 3, 5)` is what that head adds to the stream.

        name: "W_E" [V, D], "W_pos" [P, D], "W_U" [D, V], "b_U", "ln_final.w", "ln_final.b"; per layer "W_Q", "W_K",
            "W_V" [H, D, E] and "W_O" [H, E, D], with keys and values per KV head; "W_in", "W_gate" [D, M] and "W_out"
            [M, D]; their biases "b_Q", …; the norms "ln1.w", "ln2.w", and "ln1_post.w", "ln2_post.w" after attention
            and MLP. Nothing is folded: norms are as the checkpoint stores them
        layer: the layer, negative from the end; None: all layers that have the weight, stacked [L, …]
        head: one head of a per-head weight, such as "W_Q" or "b_Q"

        Weights that vLLM fused, sharded across workers or packed are reassembled. Quantized weights are dequantized to
        the model's compute precision.

        Raises: `UnknownName` for an unknown name, `UnsupportedSite` for a weight that this model lacks, `EngineError`
        for an engine that returns no weights.
        """
        import torch

        name, layer = short_name(name, layer)
        layers = checked_layers(self.sites, name, layer)
        by_head = WEIGHTS[name].shape.startswith("H")
        if head is not None and not by_head:
            raise UnsupportedSite(f"{name} has no heads, got head {head!r}", "head")
        found = [self.engine.weight(name, one) for one in layers or [None]]
        present = [weight for weight in found if weight is not None]
        if not present:
            raise UnsupportedSite(f"{self.sites.family.name} models have no {name}", "name")
        if len(present) < len(found):
            having = [one for one, weight in zip(layers, found, strict=True) if weight is not None]
            raise UnsupportedSite(f"{name} exists only in layers {having}: choose one of them", "layer")
        if head is not None and (not is_token_id(head) or not -len(present[0]) <= head < len(present[0])):
            raise UnsupportedSite(f"expected a head from 0 to {len(present[0]) - 1}, got {head!r}", "head")
        chosen = [torch.tensor(weight if head is None else weight[head]) for weight in present]
        return chosen[0] if layer is not None or not layers else torch.stack(chosen)

    def close(self) -> None:
        """Stop the engine. An `LM` that is garbage-collected is closed too, unless it was given an engine object."""
        self._close()

    def sleep(self, level: int = 1) -> None:
        """Free the GPU memory of weights and KV cache until `wake`; captures and vectors stay. Raises `EngineError` on
        engines other than vLLM, for levels above 1 (which discard the weights), without `enable_sleep_mode=True`, and
        while runs are in progress."""
        if not is_token_id(level) or level < 0:
            raise ProgramError(f"expected a sleep level, 0 or 1, got {level!r:.200}", "level")
        self.engine.sleep(int(level))

    def wake(self) -> None:
        """Reallocate the memory and restore the weights. No effect on an engine that is awake."""
        self.engine.wake()

    def __enter__(self) -> LM:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        m = self.model
        return f"<LM {m.name} on {m.engine} {m.version}, {m.layers} layers, {m.dtype}>"

    def _prompts(self, prompt: Any, messages: Any, options: Any) -> tuple[list[_Prompt], bool]:
        """Return the prompts, and True if they were given as a list."""
        if (prompt is None) == (messages is None):
            raise ProgramError("expected either prompt or messages")
        if messages is not None:
            listed = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))
            return [self._chat(chat, options) for chat in (messages if listed else [messages])], listed
        if options is not None:
            raise ProgramError("chat template options require messages=, got a prompt", "chat_template_kwargs")
        prompt = as_plain(prompt, "prompt")
        if not isinstance(prompt, (str, list, tuple, Mapping)):
            raise ProgramError(f"expected a prompt as text or token ids, got {type(prompt).__name__}", "prompt")
        if isinstance(prompt, (str, Mapping)) or (len(prompt) > 0 and isinstance(prompt[0], (int, np.integer))):
            return [self._prompt(prompt, "prompt")], False
        return [self._prompt(one, f"prompt[{i}]") for i, one in enumerate(prompt)], True

    def _adapters(self, lora: Any, prompts: int) -> list[Adapter | None]:
        adapters = adapters_of(lora, prompts)
        for adapter in {adapter for adapter in adapters if adapter is not None}:
            self.engine.check_adapter(adapter)
        return adapters

    def _chat(self, messages: Any, options: Mapping[str, Any] | None = None) -> _Prompt:
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ProgramError(f"expected a list of messages, got {messages!r:.100}", "messages")
        options = template_options(messages, options)
        if has_images(messages):
            expanded = self._expand(None, list(messages), options, "messages")
            return _Prompt(expanded.ids, chat=chat_of(messages, options), expanded=expanded)
        try:
            return _Prompt(self.tokenizer.chat(list(messages), options), chat=chat_of(messages, options))
        except PatchclampError:
            raise
        except Exception as error:
            raise ProgramError(f"invalid chat messages: {type(error).__name__}: {error}", "messages") from None

    def _expand(
        self, prompt: Mapping[str, Any] | None, messages: list[Any] | None, options: dict[str, Any], path: str
    ) -> Expanded:
        try:
            return self.engine.expand(prompt, messages, options)
        except PatchclampError as error:
            raise error.under(path) from None

    def _prompt(self, prompt: Any, path: str) -> _Prompt:
        prompt = as_plain(prompt, path)
        if isinstance(prompt, Mapping):
            if prompt.keys().isdisjoint(("prompt", "prompt_token_ids", "multi_modal_data")):
                raise ProgramError('expected text, a list of token ids or, with images, {"prompt": ..., '
                                   '"multi_modal_data": {"image": ...}}', path)  # fmt: skip
            expanded = self._expand(prompt, None, {}, path)
            return _Prompt(expanded.ids, expanded=expanded)
        if isinstance(prompt, str):
            try:
                ids, text = self.tokenizer.encode(prompt), prompt
            except (TypeError, ValueError) as error:
                raise ProgramError(f"tokenising the text failed: {error}", path) from None
        elif isinstance(prompt, (list, tuple)) and set(map(type, prompt)) <= {int}:
            ids, text = list(prompt), None
        elif isinstance(prompt, (list, tuple)) and all(is_token_id(i) for i in prompt):  # NumPy integers
            ids, text = [int(i) for i in prompt], None
        else:
            raise ProgramError("expected text or a list of token ids", path)
        if not ids:
            raise TokensError("expected a non-empty prompt", path)
        if min(ids) < 0 or max(ids) >= self.model.d_vocab:
            outside = next(i for i in ids if not 0 <= i < self.model.d_vocab)
            raise TokensError(f"token id {outside} is out of range for a vocabulary of {self.model.d_vocab}", path)
        return _Prompt(ids, text)

    def _request(
        self, prompt: _Prompt, program: Program, score: Any, sampling: dict[str, Any], max_tokens: int,
        adapter: Adapter | None, path: str | None, logprobs: tuple[int | None, int | None], bindings: Bindings,
        number: int,
    ) -> Request:  # fmt: skip
        """Return one run's request. `path`: prefix for the paths of errors, such as "prompt 2" in a list of prompts;
        `logprobs`: top-token counts for generated and prompt tokens; `number`: the sample's index."""
        key, (ids, text, chat, expanded) = self.engine.run_prefix + _key(), prompt
        images = [] if expanded is None else expanded.images
        if not is_token_id(max_tokens) or max_tokens < 1:
            raise ProgramError(f"expected at least 1 token, got {max_tokens!r}", "max_tokens")
        if len(ids) + max_tokens > self.model.max_model_len:
            raise TokensError(
                f"{len(ids)} prompt tokens and max_tokens={max_tokens} exceed max_model_len={self.model.max_model_len}"
            )
        max_tokens, score = int(max_tokens), self.scored(score)
        try:
            binding = bindings.of(program, key, prompt_of(self.tokenizer, ids, text, chat, images), max_tokens)
        except PatchclampError as error:
            raise error if path is None else error.under(path) from None
        bound = None if binding.bound is None else of_sample(binding.bound, number)
        return Request(
            key, ids, max_tokens, bound, binding.vectors, sampling, tuple(score), logprobs[0],
            binding.code, text, binding.sources, adapter=adapter, chat=chat, images=images,
            inputs=None if expanded is None else expanded.inputs, prompt_logprobs=logprobs[1],
        )  # fmt: skip

    def bound_request(self, program: Program, prompt: Prompt, max_tokens: int) -> Request:
        """Return a request that runs a program on a prompt, for callers that submit it to a vLLM engine themselves."""
        key = self.engine.run_prefix + _key()
        binding = self.bindings().of(program, key, prompt, max_tokens)
        return Request(key, list(prompt.ids), max_tokens, binding.bound, binding.vectors, code=binding.code,
                       sources=binding.sources)  # fmt: skip

    def remember(self, run: Run) -> None:
        """Make a run available to later programs (`From`)."""
        self._runs[run.key] = run

    def scored(self, score: Any) -> list[int]:
        """Return the token ids of `score=`. Each text must encode to a single token."""
        items = [score] if isinstance(score, str) else as_items(score, "score")
        ids = [self.tokenizer.bare(item) if isinstance(item, str) else [item] for item in items]
        for item, tokens in zip(items, ids, strict=True):
            if len(tokens) != 1:
                raise TokensError(
                    f"expected text of one token, got {item!r}, which has {len(tokens)}: "
                    f"{self.tokenizer.token_strings(tokens)}; pc.studies.teacher_forcing scores longer texts", "score"
                )  # fmt: skip
            if not is_token_id(tokens[0]) or not 0 <= tokens[0] < self.model.d_vocab:
                raise TokensError(f"expected a token id from 0 to {self.model.d_vocab - 1}, got {tokens[0]!r}", "score")
        scored = [int(token) for [token] in ids]
        if len(set(scored)) > MAX_SCORES:
            raise ProgramError(f"expected at most {MAX_SCORES} tokens, got {len(set(scored))}", "score")
        return scored

    def _source(self, key: str) -> Run:
        """Return the run that a program reads with `From`. Raises `MissingSource` if it failed or no longer exists."""
        run = self._runs.get(key)
        if run is None:
            raise MissingSource(f"unknown run {key}: it was closed or dropped, or ran on another LM")
        if run.error is not None:
            raise MissingSource(f"run {key} failed: {run.error}")
        if run.closed:
            raise MissingSource(f"run {key} was closed")
        return run


# Show a call's arguments and defaults in the methods' signatures.
for _method in (LM.run, LM.arun, LM.stream):
    _method.__signature__ = inspect.signature(LM._read_call).replace(  # pyright: ignore[reportFunctionMemberAccess]
        return_annotation=inspect.signature(_method).return_annotation
    )


class _Prompt(NamedTuple):
    ids: list[int]
    text: str | None = None
    chat: Chat | None = None
    expanded: Expanded | None = None


class _Call(NamedTuple):
    """The requests of one call.

    requests, programs: one per run; the runs of a prompt are adjacent
    counts: the number of runs of each prompt
    listed: True if the prompts were given as a list
    sampled: True if each prompt returns a list of runs, even for a single run
    conditions: each run's stopping condition, or None
    """

    requests: list[Request]
    programs: list[Program]
    counts: list[int]
    listed: bool
    sampled: bool
    conditions: list[ProbeCondition | None]

    @property
    def keys(self) -> list[str]:
        return [request.run for request in self.requests]


async def _all_answers(futures: list[Future[Answer]]) -> list[Answer | PatchclampError]:
    """Await the results of all runs with a single wake-up of the event loop. Cancelling does not cancel the futures."""
    loop = asyncio.get_running_loop()
    done, left, count = loop.create_future(), itertools.count(1), len(futures)

    def end(_: Future[Answer]) -> None:
        if next(left) == count:
            wake(loop, done)

    for future in futures:
        future.add_done_callback(end)
    if futures:
        await done
    return _wait_all(futures)


_drawn: collections.deque[str] = collections.deque()  # keys for future runs


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drawn.clear)


def _distinct(runs: Iterable[Run]) -> list[Run]:
    """Return runs as a list. Raises `ProgramError` if a run occurs twice."""
    runs = runs_of(runs)
    if len({run.key for run in runs}) < len(runs):
        raise ProgramError("expected distinct runs, got a duplicate", "runs")
    return runs


def _key() -> str:
    """Return an unguessable key. Keys are drawn in bulk: each draw releases the GIL, and regaining it may be slow."""
    while True:
        try:
            return _drawn.popleft()
        except IndexError:
            drawn: str = secrets.token_hex(8 * KEYS_DRAWN)
            _drawn.extend(drawn[begin : begin + 16] for begin in range(0, len(drawn), 16))


def _wait_all(futures: Sequence[Future[Answer]]) -> list[Answer | PatchclampError]:
    return [answer_of(future) for future in futures]
