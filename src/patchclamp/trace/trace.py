"""The objects of `with lm.trace(...)` and `with lm.edit(...)`, and the execution of their recordings."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from patchclamp.call import is_token_id
from patchclamp.engines.base import Part
from patchclamp.engines.tokenizer import has_images
from patchclamp.errors import EngineError, PatchclampError, ProgramError
from patchclamp.language import Capture, From, Op, Program, Site, Vector
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import Tokens, every, generated, parse_tokens, prompt
from patchclamp.language.values import as_flag, as_plain, check_name
from patchclamp.run import Run
from patchclamp.trace.hints import OF_INVOKE, OF_TRACE, check_options
from patchclamp.trace.proxies import (
    Cache,
    NonTensor,
    Pending,
    Saved,
    Steps,
    TokenGroup,
    check_to_come,
    rows_of,
    value_of,
)
from patchclamp.trace.recording import (
    Entry,
    Line,
    Planned,
    Recording,
    Schedule,
    at_line,
    callers_line,
    same_run,
    written,
)

if TYPE_CHECKING:
    from patchclamp.lm import LM
    from patchclamp.stream import Stream


class Invoke(TokenGroup):
    """One prompt in a trace. Its tensors cover the prompt; `generated`, `all()` and `prompt` select other groups."""

    def __init__(self, recording: Recording, tokens: Tokens = prompt) -> None:
        super().__init__(recording, tokens, False)

    @property
    def generated(self) -> Steps:
        """The generated tokens, each at the step that takes it as input: one, as in `t.generated[3].layers[5].output`,
        or all, as in `t.generated.layers[5].output`."""
        return Steps(self._recording, generated)

    @property
    def prompt(self) -> Steps:
        """The tokens of the prompt as an explicit group: a selection in brackets is restricted to them."""
        return Steps(self._recording, prompt)

    def all(self) -> TokenGroup:
        """Return all tokens: the prompt's and the generated tokens."""
        return TokenGroup(self._recording, every, True)

    def cache(self, *sites: Site | str, tokens: Tokens | str | None = None) -> Cache:
        """Save many sites at once (by default every site), with their values after all writes of the trace. `tokens`: a
        selection, by default the prompt's tokens."""
        recording = self._recording
        recording.check_open()
        chosen = [parse_site(site) for site in sites] or [Site(name) for name in recording.lm.sites.names]
        for site in chosen:
            recording.lm.sites.resolve(site)
        cache = Cache(chosen, prompt if tokens is None else parse_tokens(tokens), callers_line(), recording)
        if tokens is None and any(site.name == "logits" for site in chosen):
            cache.tokens = every & prompt
        recording.caches.append(cache)
        return cache

    @property
    def run(self) -> Run:
        """The `Run`, after the trace: `run.text`, `run.token_ids`, and scores and logprobs if requested."""
        recording = self._recording
        if recording.failure is not None:
            raise recording.failure
        if recording.run is None:
            check_to_come(recording, "the run")
            raise ProgramError("the trace has not run yet: its run is available after the `with`")
        return recording.run

    @property
    def error(self) -> PatchclampError | None:
        """This prompt's error, or None."""
        return self._recording.failure

    @property
    def text(self) -> str:
        return self.run.text

    @property
    def token_ids(self) -> list[int]:
        return self.run.token_ids

    def __enter__(self) -> Invoke:
        return self

    def __exit__(self, kind: Any, error: Any, *_: Any) -> None:
        if kind is not None:
            self._recording.drop(error)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "all", "cache", "error", "generated", "prompt", "run", "text", "token_ids"]


class Trace(NonTensor):
    """The object of `with lm.trace(...)`. With a prompt it acts as that prompt's `Invoke`; without one, `invoke` adds
    prompts. Everything runs at the end of the `with` block, in as few batches as its reads allow. With `stream=True` it
    runs when the trace is iterated, after the block."""

    def __init__(
        self, lm: LM, prompt: Any = None, *, messages: Any = None, max_tokens: int = 1, edits: Any = (),
        sampling: Any = None, score: Sequence[int] = (), logprobs: bool | int = False, lora: Any = None,
        stream: bool = False, **others: Any,
    ) -> None:  # fmt: skip
        check_options(others, "lm.trace", OF_TRACE)
        if not is_token_id(max_tokens) or max_tokens < 1:
            raise ProgramError(f"expected a positive integer, got {max_tokens!r}", "max_tokens")
        self._lm, self._max_tokens, self._sampling, self._entered = lm, max_tokens, sampling, False
        self._edits = list(Program.of(edits).edits)
        self._options: RunArguments = {"logprobs": logprobs, "lora": lora}
        self._streamed, self._state, self._invokes = as_flag(stream, "stream"), "open", []
        self._stream: Stream | None = None
        self._only = None if prompt is None and messages is None else self._new(prompt, messages, sampling, score)
        if self._only is None and len(score):
            raise ProgramError("score= requires a prompt: t.invoke(prompt, score=...)", "score")

    def __repr__(self) -> str:
        count = len(self._invokes) if self._only is None else 1
        return f"<trace of {count} prompt{'' if count == 1 else 's'}, {self._state}>"

    def _new(self, prompt: Any, messages: Any, sampling: Any, score: Sequence[int]) -> Invoke:
        read = read_prompt(self._lm, prompt, messages)
        if sampling is not None and not isinstance(sampling, Mapping):
            raise ProgramError(f"expected a mapping of sampling options, got {type(sampling).__name__}", "sampling")
        if sampling is not None and not all(isinstance(name, str) for name in sampling):
            raise ProgramError(f"expected names such as 'temperature', got {list(sampling)!r:.100}", "sampling")
        if sampling is not None and sampling.get("n", 1) not in (None, 1):
            raise ProgramError(f"expected n=1, got {sampling['n']!r}: use one invoke per sample", "sampling.n")
        score = self._lm.scored(score)
        recording = Recording(self._lm, read, self._max_tokens, self)
        recording.state = "open" if self._entered else "new"
        recording.sampling, recording.score = None if sampling is None else dict(sampling), list(score)
        self._invokes.append(invoke := Invoke(recording))
        return invoke

    def invoke(
        self, prompt: Any = None, *, messages: Any = None, sampling: Any = None, score: Sequence[int] = (),
        **others: Any,
    ) -> Invoke:  # fmt: skip
        """Add a prompt to the batch: `with t.invoke("…") as a:`. One prompt's values can be written into another."""
        check_options(others, "t.invoke", OF_INVOKE)
        if not self._entered:
            raise ProgramError("a trace is a `with` block: `with lm.trace() as t:`, with invokes inside it")
        if self._state != "open":
            raise ProgramError("the trace has ended: invokes belong inside its `with`")
        if self._only is not None:
            raise ProgramError("this trace already has a prompt: use lm.trace() without one for invokes")
        if self._streamed:
            raise ProgramError("only one prompt can be streamed: lm.trace(prompt, stream=True)")
        return self._new(prompt, messages, self._sampling if sampling is None else sampling, score)

    @property
    def invokes(self) -> list[Invoke]:
        """The invokes, in order."""
        return list(self._invokes)

    def _attribute(self, name: str) -> Any:
        if self._only is None:
            raise ProgramError(f"this trace has no prompt of its own: use an invoke's, a.{name}, or lm.trace(prompt)")
        return getattr(self._only, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif self._only is None:
            raise ProgramError(f"this trace has no prompt of its own: write to an invoke's, a.{name}")
        else:
            setattr(self._only, name, value)

    def __getitem__(self, key: Any) -> NoReturn:
        raise ProgramError(
            f"a trace cannot be indexed: for prompts use t.invokes, for tokens t.layers[5].output[{written(key)}]"
        )

    def __dir__(self) -> list[str]:
        return ["invoke", "invokes", "so_far", *(dir(self._only) if self._only is not None else ())]

    # -- the end of the `with`

    def __enter__(self) -> Trace:
        if self._entered:
            raise ProgramError("a trace is one `with` block: call lm.trace again for another")
        self._entered = True
        if self._only is not None:
            self._only._recording.state = "open"
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        for call in self._end(kind is not None):
            self._call(call)

    async def __aenter__(self) -> Trace:
        return self.__enter__()

    async def __aexit__(self, kind: Any, *_: Any) -> None:
        for call in self._end(kind is not None):
            try:
                self._execution.answer = await self._lm.arun(**call)
            except PatchclampError as error:
                self._execution.answer = error

    def _call(self, call: RunArguments) -> None:
        try:
            self._execution.answer = self._lm.run(**call)
        except PatchclampError as error:
            self._execution.answer = error

    def _end(self, left: bool) -> Iterable[RunArguments]:
        """Close the recordings and return the `lm.run` calls to make now, if any."""
        recordings = [invoke._recording for invoke in self._invokes]
        self._state = "left" if left else "ended"
        for recording in recordings:
            if left or recording.state != "left":  # keep "left": the caller caught its error
                recording.state = "waiting" if self._streamed and not left else self._state
        if left:
            return ()
        if not recordings:
            raise ProgramError("this trace has no prompt: lm.trace(prompt), or `with t.invoke(prompt) as a` inside it")
        self._execution = Execution(recordings, self._edits, self._options)
        return () if self._streamed else self._execution.calls

    # -- streams

    def so_far(self, value: Any) -> Any:
        """Return the current content of a saved value or a cache while the trace streams, for the tokens received so
        far. Raises `ProgramError` if the trace is not streaming, and `MissingSource` for a token not generated yet."""
        if self._stream is None:
            raise ProgramError("the trace is not streaming: use t.so_far(value) in the loop `for part in t`")
        run = self._stream.so_far
        if isinstance(value, Cache):
            cache = Cache(value.sites, value.tokens, value.line, value.recording)
            cache.fill(run)
            return cache
        if not isinstance(value, Pending):
            raise ProgramError(f"expected a value from .save() or t.cache(...), got {type(value).__name__}")
        return self._execution.value_so_far(value.saved, run)

    def __iter__(self) -> Iterator[Part]:
        with self._streaming() as stream, stream:
            yield from stream

    async def __aiter__(self) -> AsyncIterator[Part]:
        with self._streaming() as stream:
            async with stream:
                async for part in stream:
                    yield part

    @contextlib.contextmanager
    def _streaming(self) -> Iterator[Stream]:
        """Make all calls but the last, then start the last one (the prompt's own run) as a stream, and yield it. At its
        end, fill in the saved values. If the stream is abandoned, reading the saved values raises an error."""
        if not self._streamed:
            raise ProgramError("only a trace with stream=True can be iterated: lm.trace(prompt, stream=True)")
        if self._state != "ended":
            raise ProgramError("a trace can be iterated once, after its `with`")
        self._state = "streamed"
        self._set_state("streaming")
        execution = self._execution
        call = next(execution.calls)
        while not execution.is_last_call:
            self._call(call)
            call = next(execution.calls)
        try:
            self._stream = self._lm.stream(**{k: v[0] if isinstance(v, list) else v for k, v in call.items()})
            yield self._stream
        except PatchclampError as error:
            execution.finish(error)
        except BaseException:
            with contextlib.suppress(PatchclampError):
                execution.finish(EngineError("the stream was closed before its end"))
            raise
        else:
            execution.finish([self._stream.run])
        finally:
            self._stream = None
            self._set_state("ended")

    def _set_state(self, state: str) -> None:
        for invoke in self._invokes:
            invoke._recording.state = state


class Edit(Invoke):
    """The object of `with lm.edit(name)`: a program without a prompt. Its tensors cover every token."""

    def __init__(self, lm: LM, name: str) -> None:
        super().__init__(Recording(lm, None, 1, self), every)
        vars(self).update(_name=check_name(name))
        self._recording.state = "new"

    def __enter__(self) -> Edit:
        self._recording.state = "open"
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        recording = self._recording
        recording.state = "ended" if kind is None else "left"
        if kind is not None:
            return
        edits = [entry.op for entry in recording.entries if not entry.is_read]
        if not edits:
            raise ProgramError(f"nothing was written, so program {self._name!r} is empty")
        recording.lm.bank[self._name] = edits

    def cache(self, *sites: Site | str, tokens: Tokens | str | None = None) -> Cache:
        raise ProgramError("a named program cannot read: cache in a trace")


def read_prompt(lm: LM, prompt: Any, messages: Any) -> tuple[list[int], str | None]:
    """Return the token ids of one prompt, and its text if it was given as text."""
    if messages is not None and prompt is None:
        if not isinstance(messages, (list, tuple)) or any(isinstance(m, (list, tuple)) for m in messages):
            raise ProgramError("expected one chat, a list of {'role': ..., 'content': ...}", "messages")
        if has_images(messages):
            raise ProgramError(
                "a trace does not support chats with images: use lm.run with messages and a program", "messages"
            )
        return list(lm._chat(messages).ids), None
    if isinstance(prompt, str):
        return lm._prompt(prompt, "prompt").ids, prompt
    if isinstance(prompt, Mapping):
        raise ProgramError("a trace supports only text or token ids: use lm.run for a prompt with images", "prompt")
    prompt = as_plain(prompt, "prompt")
    if prompt is None or messages is not None:
        raise ProgramError("expected either a prompt or messages")
    if not isinstance(prompt, (list, tuple)) or not prompt or isinstance(prompt[0], (str, list, tuple)):
        raise ProgramError(
            "expected one prompt (text or token ids): for several, use `with lm.trace() as t:` and an invoke for each, "
            "`with t.invoke(prompt) as a:`; for token ids [1, T] pass ids[0]",
            "prompt",
        )
    return lm._prompt(prompt, "prompt").ids, None


def is_shared(run: Planned, read: Entry) -> bool:
    """True if a run captures a read's tensor again after a write to it, so that `From` would take the later value."""
    after = [entry for entry in run.entries if entry.number > read.number and entry.points & read.points]
    written = next((entry.number for entry in after if not entry.is_read), None)
    if written is None:
        return False
    resolve = run.recording.lm.sites.resolve
    cached = (ref.point for cache in run.recording.caches for site in cache.sites for ref in resolve(site))
    again = any(entry.is_read and entry.number > written for entry in after)
    return again or (run.is_last and not read.points.isdisjoint(cached))


def runnable(recordings: Iterable[Recording]) -> list[Recording]:
    """Return the recordings that can run: they have not failed, and take no rows from a failed recording."""
    whole = [recording for recording in recordings if recording.failure is None]
    for recording in whole:
        lost = (entry.source.recording.failure for entry in recording.entries if entry.source is not None)
        recording.failure = next((failure for failure in lost if failure is not None), None)
    return whole if all(recording.failure is None for recording in whole) else runnable(whole)


RunArguments = dict[str, Any]  # arguments of `lm.run` for a list of prompts


class Execution:
    """The execution of one trace: runs its recordings batch by batch, and fills in the saved values.

    The caller makes each of `calls`, with `lm.run`, `await lm.arun(...)` or a stream, and stores its runs or error in
    `answer`. After the last call, the values are filled in. An error in a prompt fails that prompt and the prompts
    that read from it. Other prompts keep their values, and the first error is raised at the end. `edits` come before
    the trace's own ops in every program; `options` are arguments of `lm.run` for the prompts' own runs.
    """

    answer: list[Run] | PatchclampError

    def __init__(self, recordings: list[Recording], edits: list[Op], options: RunArguments) -> None:
        self._edits, self._options, self._recordings = edits, options, recordings
        for recording in recordings:
            for saved in recording.saved if recording.state == "left" else ():
                saved.failure = recording.failure
        self._schedule = Schedule(runnable(recordings), bool(edits))
        self._batches = self._schedule.batches()
        self._last = {run.recording: run for batch in self._batches for run in batch if run.is_last}
        self.is_last_call: bool = False  # True if the current call belongs to the last batch
        self._runs: dict[Planned, Run] = {}
        self.calls: Iterator[RunArguments] = self._calls()

    def finish(self, answer: list[Run] | PatchclampError) -> None:
        """Store the last call's answer. Raises the trace's first error."""
        self.answer = answer
        next(self.calls, None)

    def _calls(self) -> Iterator[RunArguments]:
        for number, batch in enumerate(self._batches, 1):
            self.is_last_call = number == len(self._batches)
            while batch := self._ready(batch):
                yield self._call(batch, [self._program(run) for run in batch])
                if not isinstance(self.answer, PatchclampError):
                    self._take(batch, self.answer)
                    break
                self._blame(batch, self.answer)
        self._finish()

    def _ready(self, batch: list[Planned]) -> list[Planned]:
        """Return the runs of a batch that can still run."""
        ready = runnable(self._recordings)
        return [run for run in batch if run.recording in ready]

    def value_so_far(self, saved: Saved, run: Run) -> Any:
        """Return the current value of a saved expression in an unfinished run of the last batch."""
        rows = {read: self._rows(read, run) for read in saved.expression.terms}
        return value_of(saved.expression, rows).clone()

    # -- calls

    def _program(self, run: Planned) -> list[Op]:
        ops: list[Op] = list(self._edits)
        for entry in run.entries:
            if entry.source is None:
                ops.append(entry.op)
            else:
                value = same_run(entry, entry.source) if entry.within else self._value(entry, entry.source)
                ops.append(msgspec.structs.replace(entry.op, value=value))
        return ops

    def _value(self, write: Entry, read: Entry) -> From | Vector:
        """Return the value of a write whose read has run: a `From`, or the array itself if `From` would take a
        different read of the tensor or different columns of the row."""
        planned, source = next(pair for pair in self._runs.items() if self._schedule.gives(pair[0], read, write))
        columns = {ref.columns for ref in (*read.refs, *write.refs)}
        if len(columns) == 1 and not is_shared(planned, read):
            return From(source, read.op.at, read.op.tokens)
        rows = rows_of(read, source, self._path(planned, read))
        count = 1 if read.spot.single else rows.shape[1] if read.spot.batched else rows.shape[0]
        flat = rows.reshape(count, -1)
        return Vector.of(flat[0] if count == 1 else flat)

    def _call(self, batch: list[Planned], programs: list[list[Op]]) -> RunArguments:
        call: RunArguments = {
            "prompt": [_prompt(run) for run in batch],
            "edits": programs,
            "max_tokens": batch[0].max_tokens,
        }
        last = [run.is_last for run in batch]
        call["capture"] = [
            [Capture(site, cache.tokens) for cache in run.recording.caches for site in cache.sites] if own else []
            for run, own in zip(batch, last, strict=True)
        ]
        call["sampling"] = [_sampling(run) for run in batch]
        if any(run.recording.score and own for run, own in zip(batch, last, strict=True)):
            call["score"] = [run.recording.score if own else [] for run, own in zip(batch, last, strict=True)]
        return call | (self._options if any(last) else {k: v for k, v in self._options.items() if k == "lora"})

    def _take(self, batch: list[Planned], runs: list[Run]) -> None:
        for planned, run in zip(batch, runs, strict=True):
            self._runs[planned] = run
            if planned.is_last:
                planned.recording.run = run
            if run.error is not None:
                self._fail(planned, run.error)

    def _path(self, planned: Planned, entry: Entry) -> str:
        return f"edits[{len(self._edits) + planned.entries.index(entry)}]"

    # -- errors

    def _blame(self, batch: list[Planned], error: PatchclampError) -> None:
        """Fail the prompt whose index is in the error's path or, if the path has no index, all prompts of the call."""
        match = re.match(r"prompt (\d+)\.?", error.path or "")
        if match is not None:
            error = type(error)(error.message, (error.path or "")[match.end() :] or None)
            batch = [batch[int(match[1])]]
        for planned in batch:
            self._fail(planned, error)

    def _fail(self, planned: Planned, error: PatchclampError) -> None:
        """Mark the recording of a failed run as failed. The first error is kept."""
        recording = planned.recording
        recording.failure = recording.failure or at_line(error, self._line(planned, error))

    def _line(self, planned: Planned, error: PatchclampError) -> Line:
        """Return the line of the op that caused an error, found by its path or by the site it names."""
        match = re.match(r"(edits|capture)\[(\d+)\]", error.path or "")
        recording = planned.recording
        if match is not None and match[1] == "edits" and int(match[2]) >= len(self._edits):
            return planned.entries[int(match[2]) - len(self._edits)].line
        if match is not None and match[1] == "capture":
            return [cache.line for cache in recording.caches for _ in cache.sites][int(match[2])]
        labels = recording.lm.sites.labels
        at = [e for e in planned.entries if not e.is_read and
              any(re.search(rf"(?<!\w){re.escape(word)}(?![\w\[])", error.message)
                  for point in e.points for word in labels(point))]  # fmt: skip
        return at[-1].line if at else recording.line

    # -- results

    def _finish(self) -> None:
        """Fill in every available value, then raise the first error."""
        errors = [rec.failure for rec in self._recordings if rec.failure is not None and rec.state != "left"]
        saved = [*(each for rec in self._recordings for each in rec.saved),
                 *(cache for rec in self._recordings for cache in rec.caches)]  # fmt: skip
        errors += [error for each in saved if (error := self._fill(each))]
        for planned, run in self._runs.items():
            if not planned.is_last:
                run.close()
        self._runs.clear()
        if errors:
            raise errors[0]

    def _fill(self, saved: Saved | Cache) -> PatchclampError | None:
        """Fill in a saved value. Returns its error, if any, unless its recording has already failed."""
        saved.failure = next((rec.failure for rec in saved.recordings if rec.failure is not None), None)
        if saved.failure is not None:
            return None
        try:
            if isinstance(saved, Cache):
                saved.fill(saved.recording.run)
            else:
                rows = {read: self._rows(read, read.recording.run) for read in saved.expression.terms}
                saved.fill(value_of(saved.expression, rows))
        except PatchclampError as error:
            saved.failure = at_line(error, saved.line)
        return saved.failure

    def _rows(self, read: Entry, run: Run | None) -> Any:
        assert run is not None
        return rows_of(read, run, self._path(self._last[read.recording], read))


def _sampling(run: Planned) -> dict[str, Any]:
    """Return a run's sampling parameters. An early run of one token keeps only `extra_args`."""
    sampling = run.recording.sampling or {}
    kept = sampling if run.is_last or run.max_tokens > 1 else {"extra_args": sampling.get("extra_args")}
    return {name: value for name, value in kept.items() if value is not None}


def _prompt(run: Planned) -> str | list[int]:
    assert run.recording.prompt is not None
    ids, text = run.recording.prompt
    return ids if text is None else text
