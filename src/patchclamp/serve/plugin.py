"""Entry points for vLLM's plugin loader: wrappers in every process, and routes in servers that enable patchclamp."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from patchclamp.errors import SeamMoved
from patchclamp.language.ops import is_ours


def register() -> None:
    """Entry point of `vllm.general_plugins`. Programs act only in engines that enable patchclamp."""
    from patchclamp.engines.vllm import setup
    from patchclamp.engines.vllm.compat import clients

    setup.register()
    try:
        clients.on_generate(_edited, is_ours, _entered)
        clients.on_add_request(_added)
    except SeamMoved as moved:
        setup.problem = setup.problem or moved


def _edited(client: Any, stock: Any, prompt: Any, params: Any, request_id: str, **others: Any) -> AsyncIterator[Any]:
    from patchclamp.serve.program_call import edited

    return edited(client, stock, prompt, params, request_id, **others)


def _added(engine: Any, *args: Any, **kwargs: Any) -> str:
    from patchclamp.serve.llm_requests import added

    return added(engine, *args, **kwargs)


def _entered(request_id: str, choices: int) -> str:
    from patchclamp.serve import monitoring

    call = monitoring.current.get()
    return request_id if call is None else call.enter(request_id, choices)


class Endpoints:
    """Entry point of `vllm.endpoint_plugins`: the routes, in servers whose engine has patchclamp enabled."""

    name = "patchclamp"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        from patchclamp.serve.asgi import attach

        attach(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        from patchclamp.serve.asgi import start

        await start(engine_client, state, args)
