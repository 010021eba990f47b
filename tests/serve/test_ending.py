"""A server that ends, with requests under way: every client gets a response or a closed connection, and it exits."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from .conftest import start, stop
from .test_openai import CAPTURED, PROMPT, STEERED, program

ENDS_WITHIN_S = 15
LONG = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True, "temperature": 0}


def ask(server, path: str, body) -> str:
    """All that came of a request."""
    text = ""
    try:
        with httpx.stream("POST", server.url + path, json={"model": server.model, **body}, timeout=120) as response:
            for part in response.iter_text():
                text += part
    except httpx.HTTPError:
        pass
    return text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "dead core"])
def test_everybody_is_answered_and_the_process_exits(model, tmp_path, how):
    server = start(model, tmp_path / "log")
    try:
        edited = {**LONG, **program([STEERED], CAPTURED)}
        bodies = [
            LONG,
            {**LONG, "stream": True},
            edited,
            {**edited, "stream": True},
            {**edited, "stream": True, "n": 2, "temperature": 1},
        ]
        with ThreadPoolExecutor() as pool, socket.create_connection(("127.0.0.1", int(server.url[17:]))):
            asked = [pool.submit(ask, server, "/v1/completions", body) for body in bodies * 2]
            time.sleep(1.5)
            assert [each.result() for each in asked if each.done()] == []
            if how == "dead core":
                cores = [
                    each for each in psutil.Process(server.process.pid).children() if "Core" in " ".join(each.cmdline())
                ]
                os.kill(cores[0].pid, signal.SIGKILL)
            else:
                server.process.send_signal(getattr(signal, how))
            server.process.wait(ENDS_WITHIN_S)
            for each in asked:
                assert '"fingerprint"' not in each.result(timeout=2)
        assert "Exception in callback" not in server.log.read_text()
    finally:
        stop(server)
