"""Programs in requests to vLLM's `generate`: binds them to each prompt, runs them, and collects the results."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from patchclamp.engines.base import Answer, Request
from patchclamp.engines.tokenizer import prompt_of
from patchclamp.engines.vllm.compat import images
from patchclamp.engines.vllm.compat.clients import http_error
from patchclamp.engines.vllm.frontend import drafts_of
from patchclamp.errors import PatchclampError, ProgramError
from patchclamp.language.ops import is_ours
from patchclamp.plan.bind import Binding
from patchclamp.plan.bound import of_sample
from patchclamp.plan.room import captured_bytes
from patchclamp.plan.table import record_count
from patchclamp.run import Run
from patchclamp.serve.call import Call, current, in_request, of_extra_args
from patchclamp.serve.front import OPEN, Front, front_of, log


def edited(client: Any, stock: Any, prompt: Any, params: Any, request_id: str, **others: Any) -> AsyncIterator[Any]:
    """Runs vLLM's `generate` with a program. Called in the order of an HTTP request's prompts. On patchclamp's routes,
    errors of a program are raised immediately: vLLM logs later errors of a stream, and they may quote the prompt. On
    vLLM's own routes an error is converted to one of vLLM's, with the same status."""
    call, front = current.get(), front_of(client)
    if call is not None:
        number = call.next_prompt()
        with _forgetting(client, prompt):
            try:
                return _bound(front, stock, prompt, params, request_id, call, number, others)
            except PatchclampError as error:
                call.error = error
                raise
    with _forgetting(client, prompt):
        try:
            call = _stock_call(front, params, request_id)
        except PatchclampError as error:
            front.failed(error, OPEN)
            raise http_error(str(in_request(error)), error.status) from error
    outputs = _edited(front, stock, prompt, params, request_id, call, others)
    return _as_vllm_errors(outputs, client, prompt, front, call)


@contextlib.contextmanager
def _forgetting(client: Any, prompt: Any) -> Iterator[None]:
    """After a failure, makes vLLM resend the prompt's images, which the engine core may not have received."""
    try:
        yield
    except Exception:
        if isinstance(prompt, dict):
            images.forget(client, prompt)
        raise


async def _as_vllm_errors(
    outputs: AsyncIterator[Any], client: Any, prompt: Any, front: Front, call: Call
) -> AsyncIterator[Any]:
    with _forgetting(client, prompt):
        try:
            async for output in outputs:
                yield output
            log("program", OPEN, **call.facts())
        except PatchclampError as error:
            front.failed(error, OPEN)
            raise http_error(str(in_request(error)), error.status) from error


async def _edited(
    front: Front, stock: Any, prompt: Any, params: Any, request_id: str, call: Call, others: dict[str, Any]
) -> AsyncIterator[Any]:
    """The outputs of a request on one of vLLM's own routes, with the `patchclamp` object in the last one."""
    await front.ready()
    async for output in _bound(front, stock, prompt, params, request_id, call, 0, others):
        if output.finished and call.program:
            output.kv_transfer_params = {"patchclamp": await call.answer(front.kept)}
        yield output


def _bound(
    front: Front, stock: Any, prompt: Any, params: Any, request_id: str, call: Call, number: int, others: dict[str, Any]
) -> AsyncIterator[Any]:  # fmt: skip
    """vLLM's outputs for prompt `number` of a call, each run with its program. Raises the errors of binding."""
    extra = params.extra_args or {}
    params.extra_args = {name: value for name, value in extra.items() if not is_ours(name)} or None
    if not call.program:
        return stock(prompt, params, request_id, **others)
    tokens = len(_prompt_of(prompt)[0]) + params.max_tokens
    bind = _binder(front, call, prompt, params)

    def runs(binding: Binding) -> AsyncGenerator[Any, None]:
        children = [_child(front, call, binding, prompt, params, i, number * params.n) for i in range(params.n)]
        names = [request_id] if params.n == 1 else [f"{i}_{request_id}" for i in range(params.n)]
        streams = [child.outputs(stock, name, others) for child, name in zip(children, names, strict=True)]
        return streams[0] if len(streams) == 1 else _joined(streams, params)

    if call.is_quick(tokens):
        return runs(bind())
    return _when_bound(call, call.bind_later(bind), runs)


async def _when_bound(
    call: Call, place: int, runs: Callable[[Binding], AsyncGenerator[Any, None]]
) -> AsyncIterator[Any]:  # fmt: skip
    """The outputs of a prompt whose program is bound off the event loop's thread."""
    bindings = await call.bound()
    async with contextlib.aclosing(runs(bindings[place])) as outputs:
        async for output in outputs:
            yield output


def _binder(front: Front, call: Call, prompt: Any, params: Any) -> Callable[[], Binding]:
    """Returns a function that binds a call's program to a prompt, safe on any thread. Equal prompts are bound once."""
    ids, text, images_of_prompt = _prompt_of(prompt)
    whole = prompt_of(front.lm.tokenizer, ids, text, call.chat, images_of_prompt)
    count = call.records.of_prompt(params.n)
    job = front.bindings.job(call.owner, call.program, whole, params.max_tokens, count)

    def bind() -> Binding:
        key = tuple(ids), text, tuple(map(tuple, images_of_prompt)), params.max_tokens
        known = call.bindings.get(key)
        if known is None:
            known = call.bindings[key] = job("")
        elif known.bound is not None:
            count(record_count(known.bound.ops))
        return known

    return bind


def _stock_call(front: Front, params: Any, request_id: str) -> Call:
    """The call in the `extra_args` of a request on one of vLLM's own routes."""
    call = of_extra_args(dict(params.extra_args or {}), OPEN, front.kept)
    _check_stock_route(front, call, params, request_id)
    return call


def _check_stock_route(front: Front, call: Call, params: Any, request_id: str) -> None:
    """Raises `ProgramError` for options that vLLM's responses have no room for, and for any program if the server has
    API keys: vLLM leaves some of its routes unguarded, and none identifies the owner of a request."""
    if front.has_keys:
        raise ProgramError(
            "on this server programs go through /v1/completions and /v1/chat/completions", "vllm_xargs.patchclamp"
        )
    if call.name is not None:
        raise ProgramError("a program in vllm_xargs cannot name its run", "vllm_xargs.patchclamp.run")
    streamed = getattr(params.output_kind, "name", "") != "FINAL_ONLY"
    several = params.n != 1 or (request_id.startswith("cmpl-") and not request_id.endswith("-0"))
    for wrong, what in ((streamed, "stream"), (several, "several prompts or n > 1"), (call.compare, "compare")):
        if wrong:
            raise ProgramError(
                f"{what}: a program in vllm_xargs goes with one prompt, n=1, not streamed; start the server with "
                "`patchclamp serve` and give the patchclamp object for more",
                "vllm_xargs.patchclamp",
            )


class _Child:
    """One run of a prompt."""

    def __init__(self, front: Front, call: Call, request: Request, prompt: Any, params: Any, choice: int) -> None:
        self._front, self._call, self._request = front, call, request
        self._prompt, self._params, self._choice = prompt, params, choice
        self._is_taken = False

    def outputs(self, generate: Callable[..., Any], name: str, others: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """vLLM's outputs. The run is added to the call before the last one is yielded."""
        return self._front.engine.outputs(
            self._request, self._prompt, self._params, name, generate, ended=self._take, within=self._under_way(),
            **others,
        )  # fmt: skip

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        """Reserves memory for the run's captures, records an error in the call, and frees a run that did not finish."""
        engine, request = self._front.engine, self._request
        assert request.bound is not None
        room = self._front.kept.room_for(self._call.owner, captured_bytes(request.bound, engine.sites))
        try:
            with _forgetting(engine.client, self._prompt), room:
                yield
        except PatchclampError as error:
            self._call.error = error
            raise
        finally:
            if not self._is_taken:
                engine.release([request.run])

    def _take(self, output: Any, ids: list[int]) -> None:
        last = output.outputs[0]
        answer = Answer(ids, last.text, None, {}, last.finish_reason, output.num_cached_tokens or 0,
                        drafts=drafts_of(last))  # fmt: skip
        run = Run(self._front.lm, self._request, self._call.program, answer)
        self._is_taken = True
        self._call.add(self._choice, run, self._request, self._front.kept)


def _child(
    front: Front, call: Call, binding: Binding, prompt: Any, params: Any, index: int, first_choice: int
) -> _Child:  # fmt: skip
    """Run `index` of a prompt to which the call's program is bound."""
    params = copy.copy(params)
    params.n = 1
    if params.seed is not None:
        params.seed += index
    ids, text, images_of_prompt = _prompt_of(prompt)
    key = f"{call.owner}-http-{secrets.token_hex(8)}"
    bound = None if binding.bound is None else of_sample(msgspec.structs.replace(binding.bound, run=key), index)
    request = Request(
        key, ids, params.max_tokens, bound, binding.vectors, text=text, sources=binding.sources, chat=call.chat,
        images=images_of_prompt,
    )  # fmt: skip
    call.began += 1
    return _Child(front, call, request, prompt, params, first_choice + index)


def _prompt_of(prompt: Any) -> tuple[list[int], str | None, list[list[int]]]:
    """The token ids, text (or None) and image positions of a prompt in the form that vLLM's routes pass."""
    if not isinstance(prompt, dict) or not isinstance(prompt.get("prompt_token_ids"), list):
        raise ProgramError("a program needs a prompt of text or token ids")
    kind = prompt.get("type", "token")
    if kind == "multimodal":
        return prompt["prompt_token_ids"], None, images.images_in(prompt)
    if kind != "token":
        raise ProgramError(f"programs act on text and images, and this prompt is {kind}: leave out one of the two")
    return prompt["prompt_token_ids"], prompt.get("prompt"), []


async def _joined(streams: Sequence[AsyncIterator[Any]], params: Any) -> AsyncGenerator[Any, None]:
    """Joins the outputs of several runs of a prompt as vLLM does for `n`: each part with its run's index, or all final
    outputs in one."""
    whole = params.output_kind.name == "FINAL_ONLY"
    arrived: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[Any]) -> None:
        try:
            async for output in stream:
                arrived.put_nowait((index, output, None))
        except Exception as error:
            arrived.put_nowait((index, None, error))

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    left, finals = len(streams), [None] * len(streams)
    try:
        while left:
            index, output, error = await arrived.get()
            if error is not None:
                raise error
            output.outputs[0].index = index
            left -= output.finished
            finals[index] = output
            if whole:
                continue
            output.finished = not left
            yield output
        if whole:
            first: Any = finals[0]
            first.outputs = [final.outputs[0] for final in finals if final is not None]
            yield first
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
