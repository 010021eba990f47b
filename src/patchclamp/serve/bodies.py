"""Bodies of requests, read as far as they are allowed to go and no further."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from patchclamp.engines.vllm.serve_limits import ServeLimits
from patchclamp.errors import ProgramError, TooLarge


async def read_body(request: Request, limits: ServeLimits, limit: str = "body_bytes") -> bytes:
    """The body. Raises `TooLarge` for one over a limit: before any of it is read where it says how long it is, else as
    soon as it is longer. Raises `ProgramError` for one that is packed."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ProgramError("a body is sent as it is, without a Content-Encoding", "body")
    limits.check(limit, said_bytes(request), "bytes of the body", "body")
    body = bytearray()
    async for chunk in request.stream():
        limits.check(limit, len(body) + len(chunk), "bytes of the body", "body")
        body += chunk
    return bytes(body)


def is_json(request: Request) -> bool:
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower() == "application/json"


def said_bytes(request: Request) -> int:
    """How long a request says that its body is; 0 where it does not."""
    length = request.headers.get("Content-Length", "")
    return int(length[:20]) if length.isdecimal() and length.isascii() else 0


class BoundedRoute(APIRoute):
    """A route of ours whose bodies FastAPI reads, none over a limit."""

    limit = "json_bytes"

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            limits: ServeLimits = request.app.state.patchclamp.limits
            if getattr(limits, self.limit) is None:
                return await handle(request)
            limits.check(self.limit, said_bytes(request), "bytes of the body", "body")
            return await handle(Request(request.scope, _counted(request, limits, self.limit)))

        return bounded


class OpenAIRoute(BoundedRoute):
    """One of vLLM's own."""

    limit = "openai_body_bytes"


def _counted(request: Request, limits: ServeLimits, limit: str) -> Callable[[], Awaitable[Any]]:
    """What receives a request's body as far as it may go. FastAPI passes only its own errors on."""
    received = 0

    async def receive() -> Any:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        try:
            limits.check(limit, received, "bytes of the body", "body")
        except TooLarge as error:
            raise HTTPException(error.status, str(error)) from None
        return message

    return receive
