"""vLLM's completion routes with a `patchclamp` object in their requests and responses.

Requests without one go to vLLM's own functions as they came, and so do their answers.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute

from patchclamp.errors import ProgramError
from patchclamp.serve.call import Call, current, of_extra_args
from patchclamp.serve.front import Front
from patchclamp.serve.owners import owner_of
from patchclamp.serve.plugin import NAMES

PATHS = ("/v1/completions", "/v1/chat/completions")
Endpoint = Callable[..., Awaitable[Response]]


def attach(app: Any) -> None:
    """Puts routes of ours before vLLM's; they call vLLM's functions."""
    stock = {route.path: route for route in app.routes if isinstance(route, APIRoute) and route.path in PATHS}
    for path, route in stock.items():
        app.post(
            path, dependencies=route.dependencies, responses=route.responses, summary=route.summary, tags=["OpenAI"]
        )(_with_programs(route.endpoint))


def _with_programs(stock: Endpoint) -> Endpoint:
    body = inspect.signature(stock, eval_str=True).parameters["request"].annotation

    async def route(request: Any, raw_request: Request) -> Response:
        call = read_call(request, raw_request)
        if call is None:
            return await stock(request=request, raw_request=raw_request)
        if call.compare and request.stream:
            raise ProgramError("an answer that is streamed has no unedited one beside it", "patchclamp.compare")
        front: Front = raw_request.app.state.patchclamp
        twin = asyncio.ensure_future(_twin(stock, request, raw_request)) if call.compare else None
        try:
            response = await _called(call, stock(request=request, raw_request=raw_request))
            if isinstance(response, StreamingResponse):
                return await _streamed(response, call, front)
            return await _whole(response, call, front, None if twin is None else await twin)
        finally:
            if twin is not None:
                twin.cancel()

    route.__annotations__["request"] = body
    return route


def read_call(request: Any, raw_request: Request) -> Call | None:
    """What a request asks of us, in its `patchclamp` object or in `vllm_xargs`; None: nothing."""
    extra, xargs = request.model_extra or {}, request.vllm_xargs or {}
    if "patchclamp" not in extra and NAMES.isdisjoint(xargs):
        return None
    if "patchclamp" in extra and "patchclamp" in xargs:
        raise ProgramError("it stands in the request and in vllm_xargs: give one of them", "patchclamp")
    state = raw_request.app.state
    owner = owner_of(raw_request.headers.get("Authorization"), state.patchclamp_has_keys)
    call = Call(extra.pop("patchclamp"), owner, xargs) if "patchclamp" in extra else of_extra_args(xargs, owner)
    if getattr(request, "use_beam_search", False):
        raise ProgramError("programs do not go with beam search", "patchclamp")
    call.on_own_route = True
    request.vllm_xargs = {**xargs, "patchclamp": ""}  # has `generate` ask the call
    return call


async def _called(call: Call | None, response: Awaitable[Response]) -> Response:
    """vLLM's response, with the call at hand for `generate`."""
    token = current.set(call)
    try:
        return await response
    finally:
        current.reset(token)


async def _twin(stock: Endpoint, request: Any, raw_request: Request) -> Any:
    """The unedited answer."""
    plain = request.model_copy(update={"vllm_xargs": None})
    response = await contextvars.copy_context().run(lambda: stock(request=plain, raw_request=raw_request))
    return json.loads(bytes(response.body))


async def _whole(response: Response, call: Call, front: Front, twin: Any) -> Response:
    if response.status_code != 200:
        return response
    body = json.loads(bytes(response.body))
    body["patchclamp"] = await asyncio.to_thread(call.answer, front.kept)
    if twin is not None:
        body["patchclamp"]["unedited"] = twin
    headers = {name: value for name, value in response.headers.items() if name.startswith("endpoint-load")}
    return JSONResponse(body, headers=headers)


async def _streamed(response: StreamingResponse, call: Call, front: Front) -> Response:
    """A stream with the `patchclamp` object in a last chunk of its own. What is wrong with the program is known before
    the first chunk, and is an error's response."""
    chunks: Any = response.body_iterator
    first = await anext(chunks, None)
    if call.error is not None:
        raise call.error

    async def body() -> AsyncIterator[Any]:
        last: dict[str, Any] = {}
        chunk = first
        while chunk is not None:
            text = chunk if isinstance(chunk, str) else bytes(chunk).decode()
            if text.startswith("data: [DONE]"):
                if call.error is None:
                    answer = await asyncio.to_thread(call.answer, front.kept)
                    yield f"data: {json.dumps({**last, 'choices': [], 'patchclamp': answer})}\n\n"
            elif text.startswith("data: {") and not last:
                whole = json.loads(text[6:])
                last = {name: whole[name] for name in ("id", "object", "created", "model") if name in whole}
            yield chunk
            chunk = await anext(chunks, None)

    return StreamingResponse(body(), media_type="text/event-stream")
