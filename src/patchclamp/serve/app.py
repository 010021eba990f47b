"""Our routes on vLLM's app: vLLM's own completion routes with room for programs, and what stands under
`/v1/patchclamp`."""

from __future__ import annotations

import asyncio
from typing import Any

from patchclamp.errors import NoKey, PatchclampError
from patchclamp.serve.front import Front, front_of
from patchclamp.serve.owners import OPEN, owner_of

MAX_MESSAGE = 2000  # characters of an error that are sent back: what was asked may be in it


def attach(app: Any) -> None:
    """Puts our routes on an app. They answer once `start` has run."""
    from patchclamp.serve import schema
    from patchclamp.serve.no_variants import NoVariants
    from patchclamp.serve.routes import bank, engine, model, openai, page, runs, sweeps

    app.exception_handler(PatchclampError)(answer_error)
    app.add_middleware(NoVariants)
    openai.attach(app)
    app.include_router(runs.router)
    app.include_router(bank.router)
    app.include_router(model.model_router)
    app.include_router(sweeps.sweep_router)
    app.include_router(page.page_router)
    schema.attach(app)
    app.state.patchclamp_page = app.openapi if app.openapi_url else None
    app.include_router(engine.router)


async def start(client: Any, state: Any, args: Any) -> None:
    """Proves the sites of the server's engine.

    Raises `EngineError` for an engine that is not ours, which would ignore every program.
    """
    from patchclamp.engines.vllm.compat.configuration import enabled
    from patchclamp.errors import EngineError
    from patchclamp.serve.ending import bound_shutdown

    if enabled(client.vllm_config) is None:
        raise EngineError(
            "this server's engine was started without patchclamp: use `patchclamp serve`, or give "
            "--additional-config '{\"patchclamp\": {}}'"
        )
    state.patchclamp = front_of(client)
    state.patchclamp.has_keys = bool(_api_keys(args))
    if state.patchclamp_page is not None:  # vLLM makes its page when it is first asked for, which takes seconds
        state.patchclamp_page = asyncio.ensure_future(asyncio.to_thread(state.patchclamp_page))
    state.patchclamp_ending = asyncio.ensure_future(bound_shutdown(client, state))
    await state.patchclamp.ready()


def _api_keys(args: Any) -> list[str]:
    """The server's API keys, as vLLM finds them."""
    import os

    return [key for key in (getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]) if key]


async def answer_error(request: Any, error: Exception) -> Any:
    """An error of ours as OpenAI's error object, with its own status."""
    from fastapi.responses import JSONResponse

    from patchclamp.serve.call import in_request
    from patchclamp.serve.routes import openai

    assert isinstance(error, PatchclampError)
    front: Front = request.app.state.patchclamp
    authorization = request.headers.get("Authorization")
    if request.url.path in openai.PATHS:
        error = in_request(error)
    front.failed(error, OPEN if isinstance(error, NoKey) else owner_of(authorization, front.has_keys))
    return JSONResponse(error_object(error), status_code=error.status)


def error_object(error: PatchclampError) -> dict[str, Any]:
    """What the body of an error says."""
    message, path = (_sendable(text) for text in (str(error), error.path or ""))
    return {"error": {"message": message, "type": type(error).__name__, "param": path or None, "code": error.status}}


def _sendable(text: str) -> str:
    """Text that can be sent as UTF-8, and not longer than errors are."""
    return text[:MAX_MESSAGE].encode(errors="backslashreplace").decode()
