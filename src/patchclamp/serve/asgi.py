"""Routes on vLLM's app: vLLM's completion routes, extended with programs, and the routes under `/v1/patchclamp`.

Shutdown takes bounded time: every client gets a response or a closed connection, and the process exits. Stock vLLM
cancels its output handler before it notifies running requests, and uvicorn waits for their connections indefinitely.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse

from patchclamp.engines.vllm.compat import clients
from patchclamp.engines.vllm.compat.configuration import enabled
from patchclamp.errors import EngineError, MissingSource, NoKey, PatchclampError, ProgramError
from patchclamp.serve import engine, openai, routes, schema, served_studies
from patchclamp.serve.openai import PATHS
from patchclamp.serve.program_call import in_request, split_variant
from patchclamp.serve.schema import error_object
from patchclamp.serve.server_state import OPEN, Front, front_of, owner_of

LOOK_EVERY_S = 0.2
GRACE_S = 3  # for unfinished responses after the engine ends, before their connections are closed
EXIT_S = 8.0  # then the process exits, even with tasks still running


async def bound_shutdown(client: Any, state: Any) -> None:
    """Wait until the server or engine stops, then fail the running requests and ensure that the process exits."""
    while (server := getattr(state, "server", None)) is None:
        await asyncio.sleep(LOOK_EVERY_S)
    config = server.config
    if config.timeout_graceful_shutdown is None:
        config.timeout_graceful_shutdown = GRACE_S
    while not (client.errored or server.should_exit):
        await asyncio.sleep(LOOK_EVERY_S)
    clients.fail_all(client)
    while not server.should_exit:  # vLLM can be configured to outlive its engine
        await asyncio.sleep(LOOK_EVERY_S)
        clients.fail_all(client)
    timer = threading.Timer(config.timeout_graceful_shutdown + EXIT_S, os._exit, (1 if client.errored else 0,))
    timer.daemon = True
    timer.start()


def attach(app: Any) -> None:
    """Add the routes to an app. They work once `start` has run."""
    app.exception_handler(PatchclampError)(answer_error)
    app.add_middleware(NoPrograms)
    openai.attach(app)
    app.include_router(routes.router)
    app.include_router(routes.model_router)
    app.include_router(served_studies.router)
    app.include_router(routes.page_router)
    schema.attach(app)
    app.state.patchclamp_page = app.openapi if app.openapi_url else None
    app.include_router(engine.router)


async def start(client: Any, state: Any, args: Any) -> None:
    """Prove the sites at startup. Raises `EngineError` if the engine lacks patchclamp and would ignore programs."""
    if enabled(client.vllm_config) is None:
        raise EngineError(
            "this server's engine was started without patchclamp: use `patchclamp serve`, or pass "
            "--additional-config '{\"patchclamp\": {}}'"
        )
    state.patchclamp = front_of(client)
    state.patchclamp.has_keys = any(getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")])
    if state.patchclamp_page is not None:  # built now, because it takes seconds
        state.patchclamp_page = asyncio.ensure_future(asyncio.to_thread(state.patchclamp_page))
    state.patchclamp_ending = asyncio.ensure_future(bound_shutdown(client, state))
    await state.patchclamp.ready()


async def answer_error(request: Any, error: Exception) -> Any:
    """Respond to a `PatchclampError` with its HTTP status and an error object in OpenAI's format."""
    assert isinstance(error, PatchclampError)
    front: Front = request.app.state.patchclamp
    authorization = request.headers.get("Authorization")
    if request.url.path in PATHS:
        error = in_request(error)
    front.failed(error, OPEN if isinstance(error, NoKey) else owner_of(authorization, front.has_keys))
    return JSONResponse(error_object(error), status_code=error.status)


class _RequestBody(msgspec.Struct):
    model: Any = None
    patchclamp: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class NoPrograms:
    """Middleware that refuses a `patchclamp` object, and the model `MODEL:NAME`, on POST routes that would ignore the
    program."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "POST" or path in PATHS or path.startswith("/v1/patchclamp"):
            return await self._app(scope, receive, send)
        messages, body = [], bytearray()
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            body += messages[-1].get("body", b"")
        asked = _RequestBody()
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # reported by the route
            asked = msgspec.json.decode(body, type=_RequestBody)
        error: PatchclampError | None = None
        refusal = f"programs are not supported on {path}; use {' or '.join(PATHS)}"
        if await split_variant(asked.model, scope["app"].state.openai_serving_models) is not None:
            error = MissingSource(f"{refusal} for {asked.model}", "model")
        elif asked.patchclamp is not msgspec.UNSET:
            error = ProgramError(refusal, "patchclamp")
        if error is not None:
            response = await answer_error(Request(scope), error)
            return await response(scope, receive, send)

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        return await self._app(scope, again, send)
