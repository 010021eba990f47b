"""vLLM's completion routes with a `patchclamp` object in their requests and responses, and programs as models.

Other requests, and their responses, pass through vLLM's functions unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute

from patchclamp.engines.tokenizer import TOLD, Chat, chat_of
from patchclamp.engines.vllm.compat.clients import ROUTES
from patchclamp.errors import PatchclampError, ProgramError, unknown
from patchclamp.language.ops import FUZZ_NAMES, check_words, is_ours
from patchclamp.language.program import parse_json
from patchclamp.serve import monitoring
from patchclamp.serve.bodies import QUICK_BYTES, OpenAIRoute, check_values
from patchclamp.serve.capture_files import MAX_LINE, StoppedResponse, data_event
from patchclamp.serve.program_call import (
    ProgramCall,
    Variant,
    current,
    of_extra_args,
    readouts_of,
    variant_of,
    with_variants,
)
from patchclamp.serve.routes import caller
from patchclamp.serve.server_state import Front, log

PATHS, MODELS = ("/v1/completions", "/v1/chat/completions"), "/v1/models"
SEAMS = dict(zip((*PATHS, MODELS), ROUTES, strict=True))
DONE, FAILED = "data: [DONE]", 'data: {"error"'
Endpoint = Callable[..., Awaitable[Response]]


def attach(app: Any) -> None:
    """Add routes, ahead of vLLM's own, that call its functions. Raises `SeamMoved` if a signature differs."""
    stock = {route.path: route for route in app.routes if isinstance(route, APIRoute)}
    for path, seam in SEAMS.items():
        seam.compare(inspect.signature(stock[path].endpoint) if path in stock else None)
    router = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])
    for path in PATHS:
        route = stock[path]
        router.post(path, dependencies=route.dependencies, responses=route.responses, summary=route.summary)(
            _with_programs(route.endpoint)
        )
    router.get(MODELS, summary=stock[MODELS].summary)(_with_variants(stock[MODELS].endpoint))
    app.include_router(router)


def _with_variants(stock: Endpoint) -> Endpoint:
    async def route(raw_request: Request) -> Response:
        front, owner = caller(raw_request)
        response = await stock(raw_request)
        if not front.kept.entries(owner, "program"):
            return response
        body = json.loads(bytes(response.body))
        return JSONResponse({**body, "data": with_variants(body["data"], front.kept, owner)})

    return route


def _with_programs(stock: Endpoint) -> Endpoint:
    body = inspect.signature(stock, eval_str=True).parameters["request"].annotation

    async def route(request: Any, raw_request: Request) -> Response:
        call = await read_call(request, raw_request)
        if call is None:
            return await stock(request=request, raw_request=raw_request)
        if call.compare and request.stream:
            raise ProgramError("compare is not supported with stream=true", "patchclamp.compare")
        front: Front = raw_request.app.state.patchclamp
        await front.ready()
        twin = asyncio.ensure_future(_twin(stock, request, raw_request)) if call.compare else None
        is_answered = False
        try:
            response = await _called(call, stock(request=request, raw_request=raw_request))
            if isinstance(response, StreamingResponse):
                stream = await _streamed(response, raw_request, call, front)
                is_answered = True
                return stream
            twin_body = None if twin is None else await twin
            if response is None or (twin is not None and twin_body is None):  # the client disconnected
                return response
            answer = await _whole(response, call, front, twin_body)
            is_answered = answer.status_code == 200 and not await raw_request.is_disconnected()
            return answer
        except PatchclampError as error:
            raise error if call.variant is None else call.variant.said_of(error) from None
        finally:
            if twin is not None:
                twin.cancel()
            if not is_answered:
                call.leave(front.kept)

    async def scored(request: Any, raw_request: Request) -> Response:
        """Return the response with the scores of the server's own probes."""
        front: Front = raw_request.app.state.patchclamp
        if not front.shows_scores or getattr(request, "use_beam_search", False):
            return await route(request, raw_request)
        call = monitoring.MonitoredCall(front.engine.monitor_log)
        token = monitoring.current.set(call)
        try:
            response = await route(request, raw_request)
        finally:
            monitoring.current.reset(token)
        return response if response is None else await call.told(response)

    scored.__annotations__["request"] = body
    return scored


async def read_call(request: Any, raw_request: Request) -> ProgramCall | None:
    """Return the call from a request's model name, `patchclamp` object or `vllm_xargs`; None without a program."""
    extra, xargs = request.model_extra or {}, request.vllm_xargs or {}
    has_object, variant = "patchclamp" in extra, None
    front, owner = caller(raw_request)
    check_words(xargs)
    _check_fields(extra)
    is_fuzzed = any(map(is_ours, xargs))
    may_be_variant = ":" in (request.model or "")
    if has_object or may_be_variant or is_fuzzed:
        await front.hear()
    if may_be_variant:
        variant = await variant_of(request.model, raw_request.app.state.openai_serving_models, front.kept, owner)
    if not has_object and variant is None and not is_fuzzed:
        return None
    if has_object and "patchclamp" in xargs:
        raise ProgramError("given both in the request and in vllm_xargs: use one of them", "patchclamp")
    if getattr(request, "use_beam_search", False):
        raise ProgramError("programs are not supported with beam search", "patchclamp")
    body = await raw_request.body()
    front.limits.check("program_bytes", len(body), "bytes of a body with a program", "body")
    await check_values(body, front.limits, has_object)
    is_long = len(body) > QUICK_BYTES

    def parse() -> ProgramCall:
        try:
            fields = parse_json(body)  # FastAPI keeps the last of duplicate keys
        except ProgramError as error:
            raise error.under("body") from None
        if has_object:
            call = ProgramCall(extra.pop("patchclamp"), owner, xargs, front.kept, variant)
        else:
            call = of_extra_args(xargs, owner, front.kept, variant, on_own_route=True)
        call.chat = _chat_of(fields) if hasattr(request, "messages") else call.chat
        return call

    call = await asyncio.to_thread(parse) if is_long else parse()
    call.is_long = is_long
    request.vllm_xargs = {**xargs, "patchclamp": ""}  # makes `generate` look up the call
    if variant is not None:
        request.model = variant.model
    return call


def _check_fields(extra: dict[str, Any]) -> None:
    """Raise `ProgramError` for a field that vLLM would ignore although it was meant for patchclamp."""
    for word in extra:
        if word in FUZZ_NAMES:
            raise ProgramError(f"expected {word} in vllm_xargs", word)
        if word != "patchclamp" and is_ours(word):
            raise unknown("field", word[:64], ("patchclamp", "vllm_xargs"), word[:64])
    nested = extra.get("extra_body")
    if isinstance(nested, dict) and any(word == "vllm_xargs" or is_ours(word) for word in nested):
        raise ProgramError("extra_body is an argument of OpenAI's Python client: put its fields into the body itself",
                           "extra_body")  # fmt: skip


def _chat_of(body: dict[str, Any]) -> Chat:
    """Return the messages and template options of a chat request."""
    options = {name: body[name] for name in (*TOLD, "reasoning_effort") if body.get(name) is not None}
    return chat_of(body["messages"], {**(body.get("chat_template_kwargs") or {}), **options})


async def _called(call: ProgramCall | None, response: Awaitable[Response]) -> Response:
    """Await vLLM's response, with the call in the context variable `current`, where `generate` reads it."""
    token = current.set(call)
    try:
        return await response
    finally:
        current.reset(token)


async def _twin(stock: Endpoint, request: Any, raw_request: Request) -> Any:
    """Return the unedited answer, or None if the client disconnected."""
    monitoring.current.set(None)  # in this task only: responses have the edited answer's scores
    response = await stock(request=request.model_copy(update={"vllm_xargs": None}), raw_request=raw_request)
    return None if response is None else json.loads(bytes(response.body))


async def _whole(response: Response, call: ProgramCall, front: Front, twin: Any) -> Response:
    if response.status_code != 200:
        return response
    body = json.loads(bytes(response.body))
    body["patchclamp"] = await call.answer(front.kept)
    log("program", call.owner, **call.facts())
    if twin is not None:
        body["patchclamp"]["unedited"] = twin
    if call.variant is not None:
        body["model"] = call.variant.asked
    headers = {name: value for name, value in response.headers.items() if name.startswith("endpoint-load")}
    return JSONResponse(body, headers=headers)


async def _streamed(response: StreamingResponse, raw_request: Request, call: ProgramCall, front: Front) -> Response:
    """Return a stream whose last chunk is the `patchclamp` object. Program errors are detected before the first chunk,
    and returned as error responses."""
    await call.bound()
    chunks: Any = response.body_iterator
    first = _text(await anext(chunks, ""))
    if call.error is not None:
        await chunks.aclose()
        raise call.error
    facts = _facts_of(first)  # common to all chunks
    if call.variant is not None:
        facts = {name: call.variant.asked if name == "model" else fact for name, fact in facts.items()}

    async def last() -> AsyncIterator[str]:
        if call.is_complete:
            answer = await call.answer(front.kept, MAX_LINE - 1024)
            log("program", call.owner, **call.facts())
            yield data_event({**facts, "choices": [], "patchclamp": answer})

    is_delivered = False

    async def body() -> AsyncGenerator[str, None]:
        nonlocal is_delivered
        is_broken = first.startswith(FAILED)
        async with contextlib.aclosing(chunks):
            if first.startswith(DONE):
                async for chunk in last():
                    yield chunk
            if first:
                yield await _with_readouts(_of_model(first, call.variant), call)
            async for chunk in chunks:  # one per token: keep this loop cheap
                text = chunk if type(chunk) is str else _text(chunk)
                is_broken = is_broken or text.startswith(FAILED)
                if text.startswith(DONE) and not is_broken:
                    async for each in last():
                        yield each
                text = text if call.variant is None else _of_model(text, call.variant)
                yield await _with_readouts(text, call) if call.parts else text
        if call.error is not None:
            front.failed(call.error, call.owner)
        is_delivered = not is_broken and call.is_complete and not await raw_request.is_disconnected()

    def leave() -> None:
        if not is_delivered:
            call.leave(front.kept)

    return StoppedResponse(leave, body(), "text/event-stream")


async def _with_readouts(chunk: str, call: ProgramCall) -> str:
    """Add readouts to each choice of a stream chunk: readouts of the tokens since the choice's previous chunk."""
    if not call.parts or not chunk.startswith("data: {"):
        return chunk
    said = json.loads(chunk[6:])
    for choice in said.get("choices", ()):
        if (choice.get("delta") or {}).get("role") is None and (parts := call.parts.pop(choice["index"], None)):
            # the first chunk includes the prompt: thousands of tokens to decode and features to list
            is_long = parts[0].lens or parts[0].features
            told = await asyncio.to_thread(readouts_of, parts) if is_long else readouts_of(parts)
            choice["patchclamp"] = told
    return data_event(said)


def _text(chunk: str | bytes | memoryview) -> str:
    return chunk if isinstance(chunk, str) else bytes(chunk).decode()


def _facts_of(chunk: str) -> dict[str, Any]:
    """Return the fields that all chunks of an answer share."""
    whole = json.loads(chunk[6:]) if chunk.startswith("data: {") else {}
    return {name: whole[name] for name in ("id", "object", "created", "model") if name in whole}


def _of_model(chunk: str, variant: Variant | None) -> str:
    """Set the `model` field of a stream's chunk to the name that the client requested."""
    if variant is None or not chunk.startswith("data: {"):
        return chunk
    said = json.loads(chunk[6:])
    return f"data: {json.dumps({**said, 'model': variant.asked} if 'model' in said else said)}\n\n"
