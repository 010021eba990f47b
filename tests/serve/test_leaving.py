"""A client that leaves, at moments that are known: what ran for it stops, and nothing of it is left."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import patchclamp as pc

from .conftest import KEYS, Server, becomes
from .test_openai import CAPTURED, PROMPT, STEERED, complete, program

HELD = ("programs", "records", "vectors", "requests", "waiting", "captured_bytes")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the connection is not closed but broken off


def held(server: Server) -> dict[str, Any]:
    """What the engine holds, and the runs that are kept."""
    with server.http() as http:
        status = http.get("/v1/patchclamp/engine/status").json()
        runs = http.get("/v1/patchclamp/runs").json()["runs"]
    return {name: status[name] for name in HELD if status[name]} | ({"runs": runs} if runs else {})


def ended(server: Server) -> float:
    """How many requests have generated all that they were asked for."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics/", timeout=60).text)
    return sum(
        sample.value for family in families for sample in family.samples
        if sample.name == "vllm:request_success_total" and sample.labels["finished_reason"] == "length"
    )  # fmt: skip


def asked(server: Server, stream: bool) -> bytes:
    """A request of minutes: 64 runs of 400 tokens, with programs."""
    body = json.dumps({
        "model": server.model, "prompt": [PROMPT] * 16, "n": 4, "max_tokens": 400, "ignore_eos": True, "stream": stream,
        "temperature": 1, "seed": 1, **program([STEERED], CAPTURED),
    })  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def test_a_client_that_is_closed_leaves_nothing_at_once(server):
    with pc.LM(server.url, api_key=KEYS[0]) as lm, pc.LM(server.url, api_key=KEYS[0]) as other:
        others = other.run(PROMPT, capture=[pc.resid_post], max_tokens=2)
        before = server.held()
        run = lm.run(PROMPT, capture=[pc.resid_post], max_tokens=2)
        assert server.held()["captured_bytes"] == 2 * before["captured_bytes"] > 0
        lm.close()
        assert server.held() == before
        with pytest.raises(pc.EngineError, match="closed"):
            run[pc.resid_post]
        assert len(others[pc.resid_post[0]]) == 6  # of 5 + 2 tokens, the last of which is not read
    assert server.held() == {}


class Leaving:
    """A connection on which a request is sent."""

    def __init__(self, server: Server, stream: bool) -> None:
        self.server, self.said = server, b""
        self._request = asked(server, stream)
        self._raw = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))

    def send(self, part: float = 1.0) -> None:
        self._raw.sendall(self._request[: round(part * len(self._request))])

    def read_chunks(self, number: int) -> None:
        """Reads until so many parts of the stream have come."""
        while self.said.count(b"data: {") < number:
            self.said += self._read()

    def shut(self) -> None:
        """Says that nothing more comes, and waits until the server has closed the connection: then it knows."""
        self._raw.shutdown(socket.SHUT_WR)
        while data := self._read():
            self.said += data
        self._raw.close()

    def reset(self) -> None:
        """Breaks off, as a process that is killed with unread data does."""
        self._raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._raw.close()

    def _read(self) -> bytes:
        return self._raw.recv(1 << 16)

    def runs(self) -> bool:
        return "programs" in held(self.server)

    def has_captured(self) -> bool:
        return "captured_bytes" in held(self.server)


def until_runs(client: Leaving) -> None:
    client.send()
    assert becomes(client.runs)


def until_captured(client: Leaving) -> None:
    client.send()
    assert becomes(client.has_captured)


def until_chunk(number: int):
    def wait(client: Leaving) -> None:
        client.send()
        client.read_chunks(number)

    return wait


MOMENTS = {
    "half of the request": lambda client: client.send(0.5),
    "the request": Leaving.send,
    "it runs": until_runs,
    "it has captured": until_captured,
}
OF_STREAMS = {"the first chunk": until_chunk(1), "the tenth chunk": until_chunk(10)}


@pytest.mark.parametrize(
    ("stream", "moment"), [*((False, name) for name in MOMENTS), *((True, name) for name in MOMENTS | OF_STREAMS)]
)
def test_a_client_that_leaves_leaves_nothing(server, stream, moment):
    """None of its runs goes on to its end, and the log has no word of an error."""
    log, before = len(server.log.read_text()), ended(server)
    assert becomes(lambda: held(server) == {}), held(server)  # of clients before, that have a few seconds to come back
    client = Leaving(server, stream)
    (MOMENTS | OF_STREAMS)[moment](client)
    client.shut()
    assert becomes(lambda: held(server) == {}), held(server)
    assert ended(server) == before
    assert b"[DONE]" not in client.said
    if not stream:
        assert client.said == b""
    assert complete(server, program([STEERED])).choices[0].text
    assert "Traceback" not in server.log.read_text()[log:]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_breaks_off_leaves_nothing(server, stream):
    log, before = len(server.log.read_text()), ended(server)
    assert becomes(lambda: held(server) == {}), held(server)
    client = Leaving(server, stream)
    until_captured(client)
    client.reset()
    assert becomes(lambda: held(server) == {}), held(server)
    assert ended(server) == before
    assert "Traceback" not in server.log.read_text()[log:]
