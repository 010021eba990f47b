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
    body, values = bytearray(), 0
    async for chunk in request.stream():
        limits.check(limit, len(body) + len(chunk), "bytes of the body", "body")
        values += chunk.count(b",") if limit == "json_bytes" else 0
        limits.check("json_values", values, "values of the body", "body")
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

    limit, mark = "json_bytes", b""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            limits: ServeLimits = request.app.state.patchclamp.limits
            limits.check(self.limit, said_bytes(request), "bytes of the body", "body")
            return await handle(Request(request.scope, _counted(request, limits, self.limit, self.mark)))

        return bounded


class OpenAIRoute(BoundedRoute):
    """One of vLLM's own."""

    limit, mark = "openai_body_bytes", b"patchclamp"


def _counted(request: Request, limits: ServeLimits, limit: str, mark: bytes) -> Callable[[], Awaitable[Any]]:
    """Receive a request's body as far as it may go, before anything is parsed. Values are counted where `mark` is in
    it. FastAPI passes only its own errors on."""
    received, values, marked, tail = 0, 0, not mark, b""

    async def receive() -> Any:
        nonlocal received, values, marked, tail
        message = await request.receive()
        part = message.get("body", b"")
        received, values, marked = received + len(part), values + part.count(b","), marked or mark in tail + part
        tail = (tail + part)[-len(mark) :]
        try:
            limits.check(limit, received, "bytes of the body", "body")
            if marked:
                limits.check("json_values", values, "values of a body with a program", "body")
                if mark:
                    limits.check("program_bytes", received, "bytes of a body with a program", "body")
        except TooLarge as error:
            raise HTTPException(error.status, str(error)) from None
        return message

    return receive
