"""Requests in vLLM: their sampling parameters, their images, and their answers from vLLM's outputs."""

from __future__ import annotations

import copy
import functools
import math
import typing
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from patchclamp.engines.base import Answer, Drafts, Expanded, Part, Request
from patchclamp.engines.vllm.admission import Verdict
from patchclamp.engines.vllm.compat import configuration, images
from patchclamp.engines.vllm.compat.core import Table, draft_counts
from patchclamp.errors import EngineError, PatchclampError, ProgramError, describe_error, unknown, unpack

Decode = Callable[[list[int], bool], str]


class PartialAnswer:
    """The answer of a request so far. Each of vLLM's outputs contains only the new part; without a listener there is
    one output. The text is vLLM's own, which holds back possible stop texts."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[dict[int, float]] = []
        self._scores: dict[int, float] = {}

    def take(self, output: Any, tables: list[Table]) -> None:
        """Add an output, with the log-probabilities since the last one, and pass it to the listener."""
        new = output.outputs[0]
        ids = list(new.token_ids)
        logprobs = [float(number) for _, numbers in tables for number in numbers[:, 0]] if self._has_logprobs else []
        part = Part(new.text, ids, logprobs[: len(ids)])
        if tables and self._request.score and not self._ids:
            first = dict(zip(tables[0][0][0].tolist(), tables[0][1][0].tolist(), strict=True))
            self._scores = {token: first[token] for token in self._request.score}
        if self._request.logprobs:
            last = 1 + self._request.logprobs
            for tokens, numbers in tables:
                likeliest = zip(tokens[:, 1:last].tolist(), numbers[:, 1:last].tolist(), strict=True)
                self._top_logprobs += [dict(zip(*row, strict=True)) for row in likeliest]
        self._texts.append(part.text)
        self._ids += part.token_ids
        self._logprobs += part.logprobs
        if self._request.listener is not None and (part.text or part.token_ids):
            self._request.listener(part)

    @property
    def _has_logprobs(self) -> bool:
        return self._request.logprobs is not None

    def answer(self, output: Any, decode: Decode | None) -> Answer:
        """Return the answer, after the last output. `decode(ids, stopped)` makes the text, if vLLM did not."""
        ids, logprobs = self._ids, self._logprobs if self._has_logprobs else None
        reason, cached = output.outputs[0].finish_reason, output.num_cached_tokens or 0
        text = "".join(self._texts) if decode is None else functools.partial(decode, ids, reason == "stop")
        top_logprobs, drafts = self._top_logprobs[: len(ids)], drafts_of(output.outputs[0])
        return Answer(ids, text, logprobs, self._scores, reason, cached, top_logprobs, drafts=drafts)


def drafts_of(completion: Any) -> Drafts | None:
    """Return vLLM's counts of a completion's drafted tokens; None if it did not count."""
    counts = draft_counts(completion)
    return None if counts is None else Drafts(*counts)


NOT_RETURNED = (
    "prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "flat_logprobs",
    "routed_experts_prompt_start",
)  # fmt: skip
SET_BY_US = (
    "max_tokens",
    "logprobs",
    "logprob_token_ids",
    "extra_args",
    "output_kind",
    "n",
    "detokenize",
    "skip_clone",
)


def check(sampling: dict[str, Any]) -> None:
    """Raise `UnknownName` for an unknown parameter, `ProgramError` for a reserved, unsupported or invalid one."""
    from vllm import SamplingParams

    types = _types()
    for name, value in sampling.items():
        if name in SET_BY_US:
            raise ProgramError(f"{name} is set by patchclamp and cannot be given here", f"sampling.{name}")
        if name in NOT_RETURNED:
            raise ProgramError(f"{name} is not given back by a Run yet, so it cannot be asked for", f"sampling.{name}")
        if name not in types:
            names = [name for name in types if name not in SET_BY_US]
            raise unknown("sampling parameter", name, names, f"sampling.{name}")
        _check_type(name, value, types[name])
    try:
        SamplingParams(**{"temperature": 0.0, "max_tokens": None, **sampling})
    except Exception as error:  # including vLLM's own validation error, which is not a ValueError
        raise ProgramError(str(error) or f"vLLM does not take {sampling}", "sampling") from None


@functools.cache
def _types() -> dict[str, Any]:
    from vllm import SamplingParams

    return {name: kind for name, kind in typing.get_type_hints(SamplingParams).items() if not name.startswith("_")}


def _check_type(name: str, value: Any, kind: Any) -> None:
    classes = tuple(part for part in typing.get_args(kind) if getattr(part, "__module__", "").startswith("vllm"))
    if classes:
        if value is not None and not isinstance(value, classes):
            raise ProgramError(f"expected {classes[0].__name__} of vLLM, got {value!r}", f"sampling.{name}")
        return
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ProgramError(f"{str(error).replace('`', '')}: {value!r}", f"sampling.{name}") from None
    is_table = isinstance(converted, dict)
    numbers = {f"[{key}]": number for key, number in converted.items()} if is_table else {"": converted}
    for entry, number in numbers.items():
        if isinstance(number, float) and math.isnan(number):
            raise ProgramError("expected a number, got nan", f"sampling.{name}{entry}")


DATA, TEXT = "multi_modal_data", ("prompt", "prompt_token_ids")
PARTS = (*TEXT, DATA, "mm_processor_kwargs")


def expand(engine: Any, prompt: Mapping[str, Any] | None, messages: list[Any] | None) -> Expanded:
    """Implement `Engine.expand` for an `LLMEngine`. Call it on the thread that steps the engine, because vLLM's
    processors temporarily change PyTorch's number of threads."""
    if prompt is not None:
        _check(prompt)
    try:
        inputs = images.render_chat(engine, messages or []) if prompt is None else images.render(engine, prompt)
    except PatchclampError:
        raise
    except Exception as error:
        raise ProgramError(f"vLLM does not take this prompt: {describe_error(error)}") from error
    return Expanded(list(inputs["prompt_token_ids"]), images.images_in(inputs), inputs)


def _check(prompt: Mapping[str, Any]) -> None:
    for part in prompt:
        if part not in PARTS:
            raise unknown("part of a prompt with images", str(part), PARTS, str(part))
    if sum(part in prompt for part in TEXT) != 1:
        raise ProgramError(f"a prompt with images has either {TEXT[0]!r} or {TEXT[1]!r} in it")
    if not isinstance(prompt.get(DATA), Mapping) or not prompt[DATA]:
        raise ProgramError(
            f'a prompt with images has {{"image": ...}} under {DATA!r}; without any, give the text or the token ids'
        )
    images.check_modalities(prompt[DATA])


class Underway(NamedTuple):
    """A request that was submitted to vLLM.

    name: vLLM's name of it
    receipt: the receipt expected with its answer
    tables: log-probabilities that have arrived and are unread
    decode: decodes (ids, True if the last one stopped the run) when the text is read; None if vLLM makes the text
    """

    request: Request
    future: Future[Answer]
    answer: PartialAnswer
    name: str
    receipt: str
    tables: list[Table]
    decode: Decode | None

    def new_tables(self) -> list[Table]:
        new = self.tables.copy()
        self.tables.clear()
        return new


def judged(underway: Underway, verdict: Verdict | None) -> PatchclampError | None:
    """Return the error that invalidates an answer: its program failed, or vLLM did not confirm that it ran."""
    if underway.request.bound is None:
        return None
    if verdict is not None and verdict.error is not None:
        return unpack(verdict.error)
    if verdict is None or verdict.receipt != underway.receipt:
        return EngineError(
            f"run {underway.request.run} came back without the receipt of its program, so that nobody knows whether it "
            "was edited; its answer is thrown away"
        )
    return None


class Parameters:
    """Creates vLLM's `SamplingParams` for requests. Consecutive requests with the same settings get copies of one.

    vLLM detokenizes during generation only if needed: for stop texts, and for a listener.
    """

    def __init__(self, has_text: bool) -> None:
        self._has_text = has_text
        self.settings: tuple[object, ...] = ()  # of the last request: the same object while they are equal
        self._template: Any = None  # the last request's parameters

    def of(self, request: Request, carried: bytes | None) -> Any:
        """Return a request's parameters, with its encoded program."""
        settings = (request.sampling, request.max_tokens, request.score, request.logprobs, request.listener is None)
        if settings != self.settings:
            self.settings, self._template = settings, self._make(request)
        params = copy.copy(self._template)
        if carried is not None:
            params.extra_args = {configuration.KEY: carried}
        return params

    def _make(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        arguments: dict[str, Any] = {"temperature": 0.0, **request.sampling}
        logprobs = request.logprobs
        if request.score:
            arguments["logprob_token_ids"] = list(dict.fromkeys(request.score))
            logprobs = len(arguments["logprob_token_ids"])
        return SamplingParams(
            max_tokens=request.max_tokens,
            logprobs=logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY if request.listener is None else RequestOutputKind.DELTA,
            skip_clone=True,  # `of` makes a copy for each request
            detokenize=self._has_text and (request.listener is not None or bool(request.sampling.get("stop"))),
            **arguments,
        )
