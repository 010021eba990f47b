"""Values of bodies are counted before they are parsed: those of a program, whatever the prompt beside it."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from patchclamp.engines.vllm.server import ServeLimits
from patchclamp.errors import TooLarge
from patchclamp.serve import bodies
from patchclamp.serve.bodies import check_values, program_values

IDS = list(range(1000))
EDIT = {"type": "add", "at": "embed", "value": [1.5] * 10}  # 11 commas
COUNTED = {  # by name: a body, and how many values of a program it has
    "none": ({"prompt": IDS}, None),
    "a prompt that quotes": ({"prompt": 'she said "patchclamp": [1,2,3,4], and left'}, None),
    "beside a prompt": ({"prompt": IDS, "patchclamp": {"edits": [EDIT]}}, 11),
    "before a prompt": ({"patchclamp": {"edits": [EDIT, EDIT]}, "prompt": IDS}, 23),
    "with text": ({"patchclamp": {"edits": [{"tokens": 'span("a, b, \\", ]}")', "at": "embed"}]}, "prompt": IDS}, 3),
    "as text": ({"vllm_xargs": {"patchclamp": json.dumps({"edits": [EDIT]}), "seed": 1}, "prompt": IDS}, 11),
    "empty": ({"patchclamp": {}, "prompt": IDS}, 1),
    "no object": ({"patchclamp": 1, "prompt": IDS}, 0),
    "null": ({"prompt": IDS, "patchclamp": None}, 0),
    "brackets": ({"patchclamp": [[[[]]]], "prompt": IDS}, 4),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("space", [None, 2])
def test_values_of_the_program_are_counted(name, space):
    body, values = COUNTED[name]
    assert program_values(json.dumps(body, indent=space).encode(), 1 << 16) == values


def test_of_several_objects_all_count():
    body = b'{"patchclamp":{"edits":[1,2]},"prompt":[1,2,3],"patchclamp" : [3,4,5]}'
    assert program_values(body, 1 << 16) == 3


@pytest.mark.parametrize(
    "body",
    [
        b'{"patchclamp":{"edits":[' + b"{}," * 300_000,
        b'{"patchclamp":{"edits":' + b"[" * 300_000,
        b'{"patchclamp":{"edits":' + b"[]" * 300_000,
        b'{"patchclamp":{"edits":' + b'["a",' * 300_000,
        b'{"patchclamp":{"edits":' + b'"a"' * 300_000,
    ],
)
def test_counting_stops_at_the_limit(body):
    assert program_values(body, 100) == 101


@pytest.mark.parametrize(
    ("body", "values"),
    [
        (b'{"patchclamp":{"' + b'\\"' * 3_000_000, 1),
        (b'{"patchclamp":{' + b'"' * 3_000_001, 101),
        (b'{"patchclamp":"' + b"\\" * 3_000_001, 0),
        (b'"patchclamp"' + b" " * 3_000_000, None),
        (b'"patchclamp":1 ' * 100_000, 0),
    ],
)
def test_no_text_is_read_twice(body, values):
    """A scan that began again at every quote would not end."""
    assert program_values(body, 100) == values


def send(body: bytes, size: int, limits: ServeLimits) -> bytes:
    """A body as an OpenAI route receives it, in parts."""
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    messages = iter([{"body": part, "more_body": i < len(parts) - 1} for i, part in enumerate(parts)])

    async def receive():
        return next(messages)

    async def read():
        counted = bodies._counted(SimpleNamespace(receive=receive), limits, "openai_body_bytes", b"patchclamp")
        return b"".join([(await counted())["body"] for _ in parts])

    return asyncio.run(read())


@pytest.mark.parametrize("size", [7, 1 << 16, 1 << 30])
def test_a_long_prompt_goes_with_a_program(size):
    body = json.dumps({"prompt": IDS * 2, "patchclamp": {"edits": [EDIT]}}).encode()
    assert send(body, size, ServeLimits(json_values=20)) == body
    with pytest.raises(HTTPException) as caught:
        send(body, size, ServeLimits(json_values=10))
    assert (caught.value.status_code, "json_values" in caught.value.detail) == (413, True)
    with pytest.raises(HTTPException) as caught:
        send(body, size, ServeLimits(program_body_values=2000))
    assert (caught.value.status_code, "program_body_values" in caught.value.detail) == (413, True)


def test_a_body_without_a_program_is_stocks():
    body = json.dumps({"prompt": IDS * 100}).encode()
    assert send(body, 1 << 14, ServeLimits(json_values=1, program_body_values=1, program_bytes=1)) == body


def test_a_long_body_is_scanned_on_another_thread(monkeypatch):
    names, here = [], threading.current_thread().name

    def scan(body, most):
        names.append(threading.current_thread().name)
        return program_values(body, most)

    monkeypatch.setattr(bodies, "program_values", scan)
    send(json.dumps({"prompt": "a" * (1 << 17), "patchclamp": {}}).encode(), 1 << 30, ServeLimits())
    assert len(names) == 1
    assert here not in names
    send(json.dumps({"prompt": "a", "patchclamp": {}}).encode(), 1 << 30, ServeLimits())
    assert len(names) == 1


def test_a_key_that_is_written_in_another_way_counts_with_all_of_its_body():
    body = b'{"prompt":[1,2,3,4],"patch\\u0063lamp":{}}'
    assert "patchclamp" in json.loads(body)
    limits = ServeLimits(json_values=3)
    with pytest.raises(TooLarge):
        asyncio.run(check_values(body, limits, has_object=True))
    asyncio.run(check_values(body, limits))
