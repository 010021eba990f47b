"""`lm.trace` and `lm.edit`: the objects of their `with` blocks, which run or store what was recorded at its end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from patchclamp.call import is_token_id
from patchclamp.engines.base import Part
from patchclamp.engines.tokenizer import has_images
from patchclamp.errors import EngineError, PatchclampError, ProgramError, TokensError
from patchclamp.language import Program, Site
from patchclamp.language.site import parse_site
from patchclamp.language.tokens import Tokens, every, generated, parse_tokens, prompt
from patchclamp.language.values import as_flag, as_plain, check_name
from patchclamp.run import Run
from patchclamp.trace.execute import Call, Calls, Execution
from patchclamp.trace.hints import OF_INVOKE, OF_TRACE, check_options
from patchclamp.trace.proxies import Cache, Group, Pending, Place, Steps, check_to_come
from patchclamp.trace.recording import Recording, callers_line
from patchclamp.trace.spots import written

if TYPE_CHECKING:
    from patchclamp.lm import LM
    from patchclamp.stream import Stream


class Invoke(Group):
    """One prompt in a trace. Its tensors cover the prompt; `generated`, `all()` and `prompt` select other groups."""

    def __init__(self, recording: Recording, tokens: Tokens = prompt) -> None:
        super().__init__(recording, tokens, False)

    @property
    def generated(self) -> Steps:
        """The generated tokens, each at the step that takes it as input: `t.generated[3].layers[5].output`, or all of
        them, `t.generated.layers[5].output`."""
        return Steps(self._recording, generated)

    @property
    def prompt(self) -> Steps:
        """The tokens of the prompt as an explicit group: a selection in brackets is restricted to them."""
        return Steps(self._recording, prompt)

    def all(self) -> Group:
        """All tokens: the prompt's and the generated ones."""
        return Group(self._recording, every, True)

    def cache(self, *sites: Site | str, tokens: Tokens | str | None = None) -> Cache:
        """Saves many sites at once, with their values after all writes of the trace; every site by default. `tokens` is
        a selection, by default the prompt's tokens."""
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
            raise ProgramError("the trace has not run yet: its run is there after the `with`")
        return recording.run

    @property
    def error(self) -> PatchclampError | None:
        """The error of this prompt, or None."""
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


class Trace(Place):
    """The object of `with lm.trace(...)`. With a prompt it acts as its `Invoke`; without one, `invoke` adds prompts.
    Everything runs at the end of the `with` block, in as few batches as its reads allow. With `stream=True` it runs
    when the trace is iterated, after the block."""

    def __init__(
        self, lm: LM, prompt: Any = None, *, messages: Any = None, max_tokens: int = 1, edits: Any = (),
        sampling: Any = None, score: Sequence[int] = (), logprobs: bool | int = False, lora: Any = None,
        stream: bool = False, **others: Any,
    ) -> None:  # fmt: skip
        check_options(others, "lm.trace", OF_TRACE)
        if not is_token_id(max_tokens) or max_tokens < 1:
            raise ProgramError(f"at least one token must be generated, not {max_tokens!r}", "max_tokens")
        self._lm, self._max_tokens, self._sampling, self._entered = lm, max_tokens, sampling, False
        self._edits = list(Program.of(edits).edits)
        self._options: Call = {"logprobs": logprobs, "lora": lora}
        self._streamed, self._state, self._invokes = as_flag(stream, "stream"), "open", []
        self._stream: Stream | None = None
        self._only = None if prompt is None and messages is None else self._new(prompt, messages, sampling, score)
        if self._only is None and score:
            raise ProgramError("score= goes with a prompt: t.invoke(prompt, score=...)", "score")

    def _new(self, prompt: Any, messages: Any, sampling: Any, score: Sequence[int]) -> Invoke:
        read = read_prompt(self._lm, prompt, messages)
        if sampling is not None and not isinstance(sampling, Mapping):
            raise ProgramError(f"expected names and values, got {type(sampling).__name__}", "sampling")
        if sampling is not None and not all(isinstance(name, str) for name in sampling):
            raise ProgramError(f"expected names such as 'temperature', got {list(sampling)!r:.100}", "sampling")
        if sampling is not None and sampling.get("n", 1) not in (None, 1):
            raise ProgramError("a trace has one run a prompt: use an invoke for each", "sampling.n")
        score = as_plain(score, "score")
        if not isinstance(score, (list, tuple)) or not all(map(is_token_id, score)):
            raise TokensError(f"expected a list of token ids, got {score!r:.100}", "score")
        recording = Recording(self._lm, read, self._max_tokens, self)
        recording.state = "open" if self._entered else "new"
        recording.sampling, recording.score = None if sampling is None else dict(sampling), list(score)
        self._invokes.append(invoke := Invoke(recording))
        return invoke

    def invoke(
        self, prompt: Any = None, *, messages: Any = None, sampling: Any = None, score: Sequence[int] = (),
        **others: Any,
    ) -> Invoke:  # fmt: skip
        """Adds a prompt to the batch: `with t.invoke("…") as a:`. Values of one prompt can be written into another."""
        check_options(others, "t.invoke", OF_INVOKE)
        if not self._entered:
            raise ProgramError("a trace is a `with` block: `with lm.trace() as t:`, and invokes inside it")
        if self._state != "open":
            raise ProgramError("the trace has ended: invokes belong inside its `with`")
        if self._only is not None:
            raise ProgramError("this trace has its prompt: lm.trace() without one takes invokes")
        if self._streamed:
            raise ProgramError("one prompt is streamed at a time: lm.trace(prompt, stream=True)")
        return self._new(prompt, messages, self._sampling if sampling is None else sampling, score)

    @property
    def invokes(self) -> list[Invoke]:
        """The invokes, in order."""
        return list(self._invokes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._only is None:
            raise ProgramError(f"this trace has no prompt of its own: use an invoke's, a.{name}, or lm.trace(prompt)")
        return getattr(self._only, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif self._only is None:
            raise ProgramError(f"this trace has no prompt of its own: write into an invoke's, a.{name}")
        else:
            setattr(self._only, name, value)

    def __getitem__(self, key: Any) -> NoReturn:
        raise ProgramError(
            "a trace is no list: its prompts are t.invokes, and tokens are chosen of a tensor, "
            f"t.layers[5].output[{written(key)}]"
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
        execution = self._end(kind is not None)
        if execution is not None:
            drive(execution, self._lm)

    async def __aenter__(self) -> Trace:
        return self.__enter__()

    async def __aexit__(self, kind: Any, *_: Any) -> None:
        execution = self._end(kind is not None)
        if execution is not None:
            await drive_async(execution, self._lm)

    def _end(self, left: bool) -> Execution | None:
        """Closes the recordings and returns the execution to run now, if any."""
        recordings = [invoke._recording for invoke in self._invokes]
        self._state = "left" if left else "ended"
        for recording in recordings:
            if left or recording.state != "left":  # keep "left": the caller caught its error
                recording.state = "waiting" if self._streamed and not left else self._state
        if left:
            return None
        if not recordings:
            raise ProgramError("this trace has no prompt: lm.trace(prompt), or `with t.invoke(prompt) as a` inside it")
        self._execution = Execution(recordings, self._edits, self._options)
        return None if self._streamed else self._execution

    # -- streams

    def so_far(self, value: Any) -> Any:
        """The current content of a saved value or a cache while the trace streams: the tokens whose parts were read.
        Raises `ProgramError` if the trace is not streaming, and `MissingSource` for a token not generated yet."""
        if self._stream is None:
            raise ProgramError("nothing streams: t.so_far(value) is for the loop `for part in t`")
        run = self._stream.so_far
        if isinstance(value, Cache):
            cache = value.empty()
            cache.fill(run, self._lm.fetch([run], cache.sites, copy=False)[0])
            return cache
        if not isinstance(value, Pending):
            raise ProgramError(f"expected a value of .save() or t.cache(...), got {type(value).__name__}")
        return self._execution.value_so_far(value.saved, run)

    def __iter__(self) -> Iterator[Part]:
        calls, call = self._before_the_stream()
        try:
            with self._lm.stream(**call) as self._stream:
                yield from self._stream
        except PatchclampError as error:
            _answer(calls, error)
        except BaseException:
            _abandon(calls)
            raise
        else:
            _answer(calls, [self._stream.run])
        finally:
            self._stream = None
            self._set_state("ended")

    async def __aiter__(self) -> AsyncIterator[Part]:
        calls, call = self._before_the_stream()
        try:
            async with self._lm.stream(**call) as self._stream:
                async for part in self._stream:
                    yield part
        except PatchclampError as error:
            _answer(calls, error)
        except BaseException:
            _abandon(calls)
            raise
        else:
            _answer(calls, [self._stream.run])
        finally:
            self._stream = None
            self._set_state("ended")

    def _set_state(self, state: str) -> None:
        for invoke in self._invokes:
            invoke._recording.state = state

    def _before_the_stream(self) -> tuple[Calls, Call]:
        """Makes all calls except the last, the prompt's own, and returns that one to be streamed."""
        if not self._streamed:
            raise ProgramError("only a trace with stream=True is iterated: lm.trace(prompt, stream=True)")
        if self._state != "ended":
            raise ProgramError("a trace streams once, after its `with`")
        self._state = "streamed"
        self._set_state("streaming")
        calls = self._execution.calls()
        call = next(calls)
        while not self._execution.is_last_call():
            answered = _answer(calls, _called(self._lm, call))
            assert answered is not None  # the last call is still to come
            call = answered
        return calls, {name: value[0] if isinstance(value, list) else value for name, value in call.items()}


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
            raise ProgramError(f"nothing was written, so there is no program to be named {self._name!r}")
        recording.lm.bank[self._name] = edits

    def cache(self, *sites: Site | str, tokens: Tokens | str | None = None) -> Cache:
        raise ProgramError("a named program edits and reads nothing: cache in a trace")


def drive(execution: Execution, lm: LM) -> None:
    """Makes the calls of an execution."""
    calls = execution.calls()
    call = next(calls, None)
    while call is not None:
        call = _answer(calls, _called(lm, call))


async def drive_async(execution: Execution, lm: LM) -> None:
    """The asyncio version of `drive`."""
    calls = execution.calls()
    call = next(calls, None)
    while call is not None:
        try:
            answer = await lm.arun(**call)
        except PatchclampError as error:
            answer = error
        call = _answer(calls, answer)


def _called(lm: LM, call: Call) -> list[Run] | PatchclampError:
    try:
        return lm.run(**call)
    except PatchclampError as error:
        return error


def _answer(calls: Calls, answer: list[Run] | PatchclampError) -> Call | None:
    """Sends a call's runs or error to the generator, and returns the next call, or None after the last."""
    try:
        return calls.throw(answer) if isinstance(answer, PatchclampError) else calls.send(answer)
    except StopIteration:
        return None


def _abandon(calls: Calls) -> None:
    """Ends the calls of an abandoned stream, so that its saved values raise an error when read."""
    with contextlib.suppress(PatchclampError):
        calls.throw(EngineError("the stream was left before its end"))


def read_prompt(lm: LM, prompt: Any, messages: Any) -> tuple[list[int], str | None]:
    """The token ids of one prompt, and its text if it was given as text."""
    if messages is not None and prompt is None:
        if not isinstance(messages, (list, tuple)) or any(isinstance(m, (list, tuple)) for m in messages):
            raise ProgramError("expected one chat, a list of {'role': ..., 'content': ...}", "messages")
        if has_images(messages):
            raise ProgramError("a trace takes no chat with images: give lm.run the messages, and a program", "messages")
        return list(lm._chat(messages).ids), None
    if isinstance(prompt, str):
        return lm._prompt(prompt, "prompt").ids, prompt
    if isinstance(prompt, Mapping):
        raise ProgramError("a trace takes text or token ids: give lm.run a prompt with images, and a program", "prompt")
    prompt = as_plain(prompt, "prompt")
    if prompt is None or messages is not None:
        raise ProgramError("give either a prompt or messages")
    if not isinstance(prompt, (list, tuple)) or not prompt or isinstance(prompt[0], (str, list, tuple)):
        raise ProgramError(
            "a trace has one prompt, text or token ids: for several, `with lm.trace() as t:` and an invoke for each, "
            "`with t.invoke(prompt) as a:`; of token ids [1, T] give ids[0]",
            "prompt",
        )
    return lm._prompt(prompt, "prompt").ids, None
