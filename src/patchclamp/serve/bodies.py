"""Reads request bodies within the server's limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from patchclamp.engines.vllm.server import ServeLimits
from patchclamp.errors import ProgramError, TooLarge

KEY = re.compile(rb'"patchclamp"\s*:\s*')
# a string (terminated or not) or a separator of values; possessive quantifiers, so that nothing is scanned twice
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{},]', re.DOTALL)
QUICK_BYTES = 1 << 16  # longest body that is parsed within milliseconds


async def read_body(request: Request, limits: ServeLimits, limit: str = "body_bytes") -> bytes:
    """Read a request's body. Raises `TooLarge` at once if its Content-Length exceeds a limit, or once the data does.
    Raises `ProgramError` for a body with a Content-Encoding."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ProgramError("Content-Encoding is not supported: send the body unencoded", "body")
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
    """Return a request's Content-Length, or 0 if it is missing or invalid."""
    length = request.headers.get("Content-Length", "")
    return int(length[:20]) if length.isdecimal() and length.isascii() else 0


class OpenAIRoute(APIRoute):
    """A vLLM route with body limits. The limit on a program's values excludes the prompt and vLLM's other fields."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            limits: ServeLimits = request.app.state.patchclamp.limits
            limits.check("openai_body_bytes", said_bytes(request), "bytes of the body", "body")
            receive = _counted(request, limits, "openai_body_bytes", b"patchclamp")
            return await handle(Request(request.scope, receive))

        return bounded


def _counted(request: Request, limits: ServeLimits, limit: str, mark: bytes) -> Callable[[], Awaitable[Any]]:
    """Wrap a request's `receive` to check limits before the body is parsed. The limit on values applies once the body
    contains `mark`. Errors are raised as `HTTPException`, because FastAPI propagates no others."""
    body, values, is_marked = bytearray(), 0, False

    async def receive() -> Any:
        nonlocal body, values, is_marked
        message = await request.receive()
        part, begin = message.get("body", b""), max(len(body) - len(mark), 0)
        body += part
        values += part.count(b",")
        is_marked = is_marked or body.find(mark, begin) >= 0
        try:
            limits.check(limit, len(body), "bytes of the body", "body")
            if is_marked:
                limits.check("program_bytes", len(body), "bytes of a body with a program", "body")
                limits.check("program_body_values", values, "values of a body with a program", "body")
                if not message.get("more_body", False):
                    await check_values(bytes(body), limits)
        except TooLarge as error:
            raise HTTPException(error.status, str(error)) from None
        return message

    return receive


async def check_values(body: bytes, limits: ServeLimits, has_object: bool = False) -> None:
    """Raise `TooLarge` if a body has too many values under its key "patchclamp". With `has_object`, count all commas of
    a body without the key, because the key may be escaped."""
    most, values = limits.json_values, body.count(b",")
    if values <= most and len(body) <= QUICK_BYTES:
        return
    found = await asyncio.to_thread(program_values, body, most)
    if found is None:
        found = values if has_object else 0
    limits.check("json_values", found, "values of a program", "patchclamp")


def program_values(body: bytes, most: int) -> int | None:
    """Estimate the number of values under the key "patchclamp" of a JSON body by counting commas (and brackets and
    strings, in case the JSON is invalid); None without the key. Stops above `most`. A prompt's text cannot contain the
    key, because JSON escapes its quotes."""
    place, has_key, commas, opened, strings = 0, False, 0, 0, 0
    while key := KEY.search(body, place):
        place, depth, has_key = key.end(), 0, True
        for token in TOKEN.finditer(body, place):
            place, first = token.end(), body[token.start()]
            if first == ord('"'):
                strings += 1
                commas += token[0].count(b",") if depth == 0 else 0  # a program as text, in `vllm_xargs`
            elif first in b"[{":
                depth, opened = depth + 1, opened + 1
            elif first == ord(","):
                commas += depth > 0
            else:
                depth -= 1
            if depth <= 0:
                break
            if max(commas, opened, strings // 4) > most:  # an object's field has at most two strings
                return most + 1
    return max(commas, opened) if has_key else None
