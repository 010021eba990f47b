"""Ends a server in bounded time: every client gets a response or a closed connection, and the process exits.

vLLM cancels its output handler before it notifies the requests under way, and uvicorn waits for their connections
without a limit.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from patchclamp.engines.vllm.compat import front

LOOK_EVERY_S = 0.2
GRACE_S = 3  # for responses under way, once the engine has ended; then their connections are closed
EXIT_S = 8.0  # after which the process exits whatever still runs


async def bound_shutdown(client: Any, state: Any) -> None:
    """Wait until the server or its engine ends; then fail what is under way, and see that the process exits."""
    while (server := getattr(state, "server", None)) is None:
        await asyncio.sleep(LOOK_EVERY_S)
    config = server.config
    config.timeout_graceful_shutdown = (
        GRACE_S if config.timeout_graceful_shutdown is None else (config.timeout_graceful_shutdown)
    )
    while not (client.errored or server.should_exit):
        await asyncio.sleep(LOOK_EVERY_S)
    front.fail_all(client)
    while not server.should_exit:  # vLLM may be asked to outlive its engine
        await asyncio.sleep(LOOK_EVERY_S)
        front.fail_all(client)
    timer = threading.Timer(config.timeout_graceful_shutdown + EXIT_S, os._exit, (1 if client.errored else 0,))
    timer.daemon = True
    timer.start()
