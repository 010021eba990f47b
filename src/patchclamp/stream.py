"""`pc.Stream`: the output of a run, part by part as it is generated. `RunWatch`: the readouts of a running request."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import queue
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import msgspec

from patchclamp.engines.base import Answer, Engine, Part, PartScores, Request
from patchclamp.errors import EngineError, PatchclampError, ProgramError, RunError, TokensError, as_patchclamp_error
from patchclamp.language.conditions import ProbeCondition, comparisons
from patchclamp.language.ops import Features, Lens
from patchclamp.language.program import Program
from patchclamp.plan.bound import Keep
from patchclamp.run import Run, fetch_probes, read_lenses


class RunWatch:
    """The readouts of a run in progress (each token's probe scores, lens results and features), and the token at which
    its stopping condition holds.

    A token has readouts once it has been an input, one step after it was sampled. A run's last token has none.

    ids: the generated tokens so far
    names: the probes to read: those of the condition, and in a stream all probes without pooling
    has_lenses: True in a stream with lenses or features
    read_to: the first position whose scores have not been read
    end: the number of tokens to keep and the stop reason, once the condition has held; else None
    report: called after each part, if the watch is the request's listener
    """

    closed = False

    def __init__(
        self, request: Request, condition: ProbeCondition | None, look_at: Callable[..., Run],
        streamed: Program | None = None,
    ) -> None:  # fmt: skip
        """`streamed`: the program of a run whose parts include readouts."""
        self.request: Request = request
        self.ids: list[int] = []
        self.read_to: int = 0
        self.end: tuple[int, str] | None = None
        self._condition, self._look_at = condition, look_at
        self._run: Run | None = None  # the run at the last look
        self._first, self._is_streamed = 0, streamed is not None  # first position to read, or in a stream to return
        self.report: Callable[[], None] = lambda: None
        compared = [] if condition is None else comparisons(condition)
        scored = {} if streamed is None else streamed.probes
        self._scored = [name for name, probe in scored.items() if probe.pool is None]  # available before the end
        self.names: list[str] = list(dict.fromkeys([*(each.probe.name for each in compared), *self._scored]))
        self.has_lenses: bool = streamed is not None and any(isinstance(op, (Lens, Features)) for _, op in streamed.ops)
        actions = () if request.bound is None else request.bound.ops
        keeps = {op.action.probe: op for op in actions if isinstance(op.action, Keep) and op.action.probe}
        for each in compared:
            name, op = each.probe.name, keeps[each.probe.name]
            assert isinstance(op.action, Keep)
            if not -op.action.products <= each.output < op.action.products:
                raise ProgramError(
                    f"output {each.output} is out of range for probe {name!r} with {op.action.products} outputs",
                    "stop_when",
                )
            if request.max_tokens > 1 and not any(each.stop > len(request.prompt_token_ids) for each in op.ranges):
                raise TokensError(f"probe {name!r} reads no generated tokens: {each.probe.tokens}", "stop_when")

    def __call__(self, part: Part) -> None:
        self.ids += part.token_ids
        self.report()

    @property
    def has_readouts(self) -> bool:
        """True if parts of the run have readouts."""
        return bool(self._scored) or self.has_lenses

    def run(self, answer: Answer | None = None) -> Run:
        """Return the run so far, or with its final `answer`. Its rows start at the first unread position."""
        return self._look_at(answer or Answer(list(self.ids), "", None, {}, None), self._first)

    def take(self, run: Run) -> None:
        """Take the readouts that were fetched into `run`, and test the condition on them."""
        self.read_to, self._run = run.positions_computed, run
        if self._condition is not None and self.end is None:
            self.end = run.stopped_at(self._condition)
        if not self._is_streamed:
            self._first = self.read_to

    def with_readouts(self, part: Part, tokens: int) -> Part:
        """Return a part with the readouts since the last call, up to generated token number `tokens`."""
        assert self._run is not None
        first, self._first = self._first, len(self.request.prompt_token_ids) + tokens
        scores = self._run.scores_between(self.names, first, self._first)
        part = msgspec.structs.replace(part, scores={**part.scores, **scores})
        if not self.has_lenses:
            return part
        lens, features = (read(first, self._first) for read in (self._run.lens_between, self._run.features_between))
        return msgspec.structs.replace(part, lens=lens, features=features)

    def cut(self, answer: Answer, engine: Engine) -> Answer:
        """Cut the answer at the token where the condition held."""
        if self.end is None:
            return answer
        (count, reason), prompt, scored = self.end, self.request.prompt_token_ids, answer.monitored
        return msgspec.structs.replace(
            answer, token_ids=(ids := answer.token_ids[:count]), top_logprobs=answer.top_logprobs[:count],
            finish_reason="stop", stop_reason=reason,
            monitored=None if scored is None else scored[: len(prompt) + count],
            logprobs=None if answer.logprobs is None else answer.logprobs[:count],
            text=functools.partial(engine.text_of, prompt, self.request.sampling, ids),
        )  # fmt: skip


def look(engine: Engine, watches: Sequence[tuple[RunWatch, Answer | None]]) -> list[PatchclampError | None]:
    """Fetch the readouts of runs: those so far, or all if the run's answer is given. Makes one engine call for all
    probes and one for each kind of lens and each SAE. Blocks. Returns each run's error, or None."""
    try:
        runs = [watch.run(answer) for watch, answer in watches]
        fetch_probes(engine, [(run, watch.names) for run, (watch, _) in zip(runs, watches, strict=True)])
        read_lenses(engine, [run for run, (watch, _) in zip(runs, watches, strict=True) if watch.has_lenses])
        for run in runs:  # check all runs before any is taken
            run.check_lenses()
        for run, (watch, _) in zip(runs, watches, strict=True):
            watch.take(run)
    except Exception as error:
        if len(watches) == 1:
            return [as_patchclamp_error(error)]
        return [failure for each in watches for failure in look(engine, [each])]
    return [None] * len(watches)


class WatchedRuns:
    """Requests submitted together. A request with a `RunWatch` ends at the token where its condition first holds.
    Construct this object before submitting the requests."""

    def __init__(self, engine: Engine, watches: Sequence[RunWatch | None]) -> None:
        self._engine, self._watches = engine, watches
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()  # indices of requests with new tokens or an end
        for i, watch in enumerate(watches):
            if watch is not None:
                watch.report = functools.partial(self._news.put, i)
                watch.request.listener = watch

    def answers(self, futures: Sequence[Future[Answer]]) -> list[Answer | PatchclampError]:
        """Return the answers or errors of the submitted requests. Blocks until all have ended."""
        answers: dict[int, Answer | PatchclampError] = {}
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: self._news.put(i))
        while len(answers) < len(futures):
            numbers = {self._news.get()}
            while not self._news.empty():
                numbers.add(self._news.get_nowait())
            looks: dict[int, tuple[RunWatch, Answer | None]] = {}
            for i in sorted(numbers - answers.keys()):
                watch, answer = self._watches[i], answer_of(futures[i]) if futures[i].done() else None
                if answer is not None:
                    answers[i] = answer
                if watch is not None and watch.end is None and not isinstance(answer, PatchclampError):
                    looks[i] = watch, answer
            for i, failure in zip(looks, look(self._engine, list(looks.values())), strict=True):
                if failure is not None and i in answers:  # otherwise the run failed, or is read again
                    answers[i] = failure
            self._engine.end([watch.request for watch, _ in looks.values() if watch.end is not None])
        pairs = [(answers[i], watch) for i, watch in enumerate(self._watches)]
        return [answer if watch is None or isinstance(answer, PatchclampError) else watch.cut(answer, self._engine)
                for answer, watch in pairs]  # fmt: skip


def answer_of(future: Future[Answer]) -> Answer | PatchclampError:
    """Return the answer of a request, or its error."""
    try:
        return future.result()
    except PatchclampError as error:
        return error


class Stream:
    """The output of one run as it is generated: `for part in stream`, or `async for`, yields each `Part`.

    Joined, the parts equal the output of `lm.run`. After the last one, `stream.run` is the `Run` with its captures.
    Before that, `stream.so_far` is the run up to the parts read, with its captures so far. In a run with probes,
    lenses or features each part has its tokens' readouts, and arrives one step later, once they exist. An error of
    the run is raised in place of the next part. An error detected only at the end, such as non-finite edits on vLLM, is
    raised after parts that were already read.

    The run stops and its memory is freed when the stream is closed (also by leaving its `with` or `async with` block)
    or garbage-collected, or its reader is cancelled. After the end, the run is kept until it is dropped or closed.
    """

    def __init__(
        self, engine: Engine, request: Request, make_run: Callable[[Answer | PatchclampError], Run],
        look_at: Callable[[Answer], Run], watch: RunWatch | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._key, self._watch = engine, request.run, watch
        self._held: Part | None = None  # the newest part, until its readouts exist
        self._look_at: Callable[[Answer], Run] | None = look_at
        self._has_logprobs, self._parts = request.logprobs is not None, list[Part]()
        self._make_run: Callable[[Answer | PatchclampError], Run] | None = make_run
        self._mailbox = request.listener = mailbox = _Mailbox(watch)
        self._run: Run | None = None
        self._error: PatchclampError | None = None
        self._unread = weakref.finalize(self, _drop, mailbox, engine, request.run)  # alive until the end was read
        self._unread.atexit = False
        [future] = engine.submit([request])
        future.add_done_callback(mailbox.end)

    @property
    def run(self) -> Run:
        """The run, once the last part was read. Raises the error of a failed run, and `ProgramError` before the end."""
        if self._error is not None:
            raise self._error
        if self._run is None:
            raise ProgramError(
                "the stream has not ended: read all of its parts before its run"
                if self._unread.alive
                else "the stream was closed before it ended, so it has no run"
            )
        return self._run

    @property
    def so_far(self) -> Run:
        """The run up to the parts read, with its captures so far; after the last part, `run`. Each access returns a
        new object, whose captures can be read until the stream ends. Programs cannot use it in `From`. Raises
        `ProgramError` before the first part and after `close`."""
        if not self._unread.alive:
            return self.run
        if not self._parts:
            raise ProgramError("no part of the stream has been read yet: captures arrive with the first part")
        token_ids = [token for part in self._parts for token in part.token_ids]
        logprobs = [each for part in self._parts for each in part.logprobs] if self._has_logprobs else None
        assert self._look_at is not None
        return self._look_at(Answer(token_ids, "".join(part.text for part in self._parts), logprobs, {}, None))

    def close(self) -> None:
        """Stop the run and free its memory. No effect after the end of the stream."""
        if self._unread.detach() is None:
            return
        self._mailbox.closed = True
        self._mailbox.post(EngineError("the stream was closed"))  # wakes a reader in another thread
        with contextlib.suppress(EngineError):  # the engine is closed and holds no memory
            self._engine.abort([self._key])

    async def aclose(self) -> None:
        """Close the stream, as `close` does; neither method blocks."""
        self.close()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Part:
        try:
            while (part := self._read(self._mailbox.take())) is HELD:
                pass
        except BaseException:  # for example KeyboardInterrupt
            self.close()
            raise
        if part is None:
            raise StopIteration
        return part

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Part:
        try:
            part: Part | None = HELD
            while part is HELD:
                item = await self._mailbox.awaited()
                part = self._read(item) if self._watch is None else await asyncio.to_thread(self._read, item)
        except BaseException:  # for example a cancelled task
            self.close()
            raise
        if part is None:
            raise StopAsyncIteration
        return part

    def _read(self, item: Part | Answer | PatchclampError) -> Part | None:
        """Return a part, `HELD` if it waits for its readouts, or None at the end. Raises the run's error, once."""
        if isinstance(item, Part):
            if not self._unread.alive:
                return None
            if self._watch is not None:
                held, self._held = self._held, item
                return HELD if held is None else self._readable(held, self._watch, None)
            self._parts.append(item)
            return item
        self._mailbox.post(item)  # keep the end for further reads
        if self._held is not None and self._watch is not None and isinstance(item, Answer):
            held, self._held = self._held, None
            return self._readable(held, self._watch, item)
        if self._unread.detach() is None:
            return None
        make_run, self._make_run, self._look_at = self._make_run, None, None  # these hold vectors
        self._parts.clear()
        assert make_run is not None
        try:
            self._run = make_run(item)
        except PatchclampError as error:
            self._error = error
            raise
        return None

    def _readable(self, part: Part, watch: RunWatch, answer: Answer | None) -> Part | None:
        """Return a part with its readouts, cut at the token where the condition held. `answer`: the run's answer, if
        received."""
        prompt, before = len(watch.request.prompt_token_ids), sum(len(each.token_ids) for each in self._parts)
        end = before + len(part.token_ids)
        if watch.end is None and (answer is not None or watch.read_to < prompt + end):
            [failure] = look(self._engine, [(watch, answer)])
            if failure is not None:
                raise failure
            if watch.end is not None:
                self._engine.end([watch.request])
        if watch.end is not None and end >= watch.end[0]:
            while not isinstance(item := self._mailbox.take(), (Answer, PatchclampError)):
                pass
            self._held = None
            if isinstance(item, PatchclampError):
                return self._read(item)
            self._mailbox.post(cut := watch.cut(item, self._engine))
            part, end = self._last(part, cut, before), watch.end[0]
        self._parts.append(part := watch.with_readouts(part, end))
        return part

    def _last(self, part: Part, cut: Answer, before: int) -> Part:
        """Return the last part, starting at token `before`, of a run that a condition ended."""
        assert not isinstance(cut.text, str)
        cut.text, sent = cut.text(), "".join(each.text for each in self._parts)
        if not cut.text.startswith(sent):
            raise RunError(f"expected text that begins with {sent!r}, got {cut.text!r}: run it without streaming")
        logprobs, scores = [] if cut.logprobs is None else cut.logprobs[before:], dict[str, PartScores]()
        if (products := cut.monitored) is not None:
            for each in self._engine.monitors:
                sent_scores = (one.scores.get(each.probe.name) for one in self._parts)  # may not have arrived yet
                first = sum(len(one.positions) for one in sent_scores if one is not None)
                positions = list(range(first, len(products)))
                scores[each.probe.name] = PartScores(positions, each.scores(products[first:]))
        return Part(cut.text[len(sent) :], cut.token_ids[before:], logprobs, scores)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ProgramError("a Stream belongs to its engine and cannot be copied or pickled; take its parts instead")

    def __repr__(self) -> str:
        ended = self._error or self._run
        state = "under way" if self._unread.alive else "closed" if ended is None else repr(ended)
        return f"<Stream {self._key}: {state}>"


HELD = Part("", [], [])  # placeholder for a part that waits for its readouts


class _Mailbox:
    """An unbounded queue from the engine's thread to the reader: parts, then the answer or the run's error. `watch`
    also receives the parts."""

    def __init__(self, watch: RunWatch | None) -> None:
        self.closed, self._watch = False, watch
        self._items: queue.SimpleQueue[Part | Answer | PatchclampError] = queue.SimpleQueue()
        self._wakers: collections.deque[Callable[[], None]] = collections.deque()

    def __call__(self, part: Part) -> None:
        if not self.closed:
            if self._watch is not None:
                self._watch(part)
            self.post(part)

    def end(self, future: Future[Answer]) -> None:
        """Post the answer or the run's error."""
        try:
            self.post(future.result())
        except Exception as error:
            self.post(as_patchclamp_error(error))

    def post(self, item: Part | Answer | PatchclampError) -> None:
        self._items.put(item)
        for _ in range(len(self._wakers)):
            with contextlib.suppress(IndexError):  # another thread took it
                self._wakers.popleft()()

    def take(self) -> Part | Answer | PatchclampError:
        """Take the next item. Blocks until there is one."""
        return self._items.get()

    async def awaited(self) -> Part | Answer | PatchclampError:
        """Take the next item; awaits it on asyncio."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._items.get_nowait()
            posted = loop.create_future()
            self._wakers.append(functools.partial(wake, loop, posted))
            if self._items.empty():  # an item posted before the waker was set would not wake it
                await posted


def wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Complete an asyncio future from another thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no reader
        loop.call_soon_threadsafe(lambda: future.done() or future.set_result(None))


def _drop(mailbox: _Mailbox, engine: Engine, run: str) -> None:
    """Free a dropped stream. The garbage collector calls this, so it must not wait for a lock."""
    mailbox.closed = True
    engine.release([run])
