"""Refuses the model `MODEL:NAME` on routes that would run MODEL without the program."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request

from patchclamp.errors import MissingSource
from patchclamp.serve.app import answer_error
from patchclamp.serve.routes.openai import PATHS


class _Named(msgspec.Struct):
    model: Any = None


class NoVariants:
    """Middleware around every POST of vLLM's own routes but the two that run programs."""

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
        try:
            asked = msgspec.json.decode(body, type=_Named).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            asked = None  # the route says what is wrong with it
        if isinstance(asked, str) and ":" in asked:
            models = scope["app"].state.openai_serving_models
            known = {card.id for card in (await models.show_available_models()).data}
            if asked not in known and asked.rpartition(":")[0] in known:
                error = MissingSource(f"{path} does not run programs; ask {' or '.join(PATHS)} for {asked}", "model")
                response = await answer_error(Request(scope), error)
                return await response(scope, receive, send)

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        return await self._app(scope, again, send)
