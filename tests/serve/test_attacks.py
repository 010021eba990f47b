"""Requests that mean harm: every one is refused with its own status, none costs the server its life or its memory."""

from __future__ import annotations

import base64
import itertools
import json
import re
import reprlib
import socket
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import psutil
import pytest
from safetensors.numpy import save

import patchclamp as pc
from patchclamp.engines import wire
from patchclamp.engines.base import Carried
from patchclamp.engines.vllm.server import OF_OPERATOR, ServeLimits
from patchclamp.plan.bind import vector_key
from patchclamp.plan.bound import BoundOp, BoundProgram, Linear, PositionRange
from patchclamp.plan.cells import cells_of
from tests.attacks.requests import ENGINE, FILES, NUMBERS, OBJECTS
from tests.soak.blocking import LONG, refusal

from .conftest import KEYS, LIMITS
from .test_openai import PROMPT, VECTOR, complete

pytestmark = pytest.mark.slow
JSON = {"Content-Type": "application/json"}
named = pytest.mark.parametrize("attack", [*FILES, *NUMBERS], ids=lambda attack: attack.name)


def message(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


@named
def test_a_body_that_lies_is_refused(http, attack):
    headers = JSON if attack in NUMBERS else {}
    response = http.put(attack.path, content=attack.body, headers=headers)
    assert response.status_code in attack.statuses, response.text[:500]
    assert len(message(response)) <= 2000
    assert http.get(attack.path).status_code == 404


@pytest.mark.parametrize("attack", OBJECTS, ids=lambda attack: attack.name)
@pytest.mark.parametrize("way", ["an object", "text"])
def test_an_object_that_lies_is_refused(server, http, attack, way):
    plain = {"model": server.model, "prompt": PROMPT, "max_tokens": 1}
    if way == "an object":
        body = json.dumps(plain)[:-1].encode() + b', "patchclamp": ' + attack.body + b"}"
    else:
        body = json.dumps({**plain, "vllm_xargs": {"patchclamp": attack.body.decode()}}).encode()
    response = http.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code in attack.statuses, response.text[:500]
    if response.status_code != 200:
        assert len(message(response)) <= 2000


@pytest.mark.parametrize(
    "name",
    ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "a%2fb", "a%00b", "%ff", "a%20b", "a:b", "x" * 65, "%2e", "~", "a\\b"],
)
@pytest.mark.parametrize("kind", ["vectors", "programs", "runs"])
def test_a_name_cannot_leave_its_folder(server, kind, name):
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:  # as it is, not tidied
        head = f"PUT /v1/patchclamp/{kind}/{name} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n"
        raw.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: 3\r\nConnection: close\r\n\r\n[1]".encode()
        )
        status = int(raw.recv(1 << 16).split()[1])
    assert status in (400, 404, 405)


def send(server, head: str, *chunks: bytes, most: int = 1 << 30) -> tuple[int, int]:
    """A response's status, and how many bytes of the body were sent by then."""
    sent = 0
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        raw.sendall(f"{head} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\n".encode() + chunks[0])
        raw.settimeout(0.01)
        while sent < most:
            try:
                return int(raw.recv(1 << 16).split()[1]), sent
            except TimeoutError:
                pass
            raw.settimeout(60 if len(chunks) == 1 else 0.001)
            for chunk in chunks[1:]:
                try:
                    raw.sendall(chunk)
                    sent += len(chunk)
                except (BrokenPipeError, ConnectionResetError, TimeoutError):
                    raw.settimeout(30)
        raise AssertionError("no answer")


@pytest.mark.parametrize(
    ("head", "limit"),
    [
        ("PUT /v1/patchclamp/vectors/x", "body_bytes"), ("PUT /v1/patchclamp/programs/x", "json_bytes"),
        ("POST /v1/patchclamp/studies/patch_sweep", "json_bytes"), ("POST /v1/completions", "openai_body_bytes"), ("POST /v1/chat/completions", "openai_body_bytes"),
    ],
)  # fmt: skip
def test_a_body_over_the_limit_is_refused_before_it_is_read(server, head, limit):
    kind = b"" if limit == "body_bytes" else b"Content-Type: application/json\r\n"
    said, sent = send(server, head, kind + f"Content-Length: {1 << 40}\r\n\r\n".encode())
    assert (said, sent) == (413, 0)
    chunk = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
    said, sent = send(server, head, kind + b"Transfer-Encoding: chunked\r\n\r\n", chunk, most=1 << 26)
    assert said == 413
    assert sent < LIMITS[limit] + (1 << 24)  # with what lay in sockets on the way


def test_packed_bodies_are_not_unpacked(http):
    response = http.put("/v1/patchclamp/vectors/x", content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert response.status_code == 400
    assert "Content-Encoding" in message(response)


@pytest.mark.parametrize("key", [None, "", "Bearer", "Bearer nobody", "Basic one-key", "one-key"])
def test_without_a_key_nothing_of_ours_answers(server, key):
    headers = {} if key is None else {"Authorization": key}
    with httpx.Client(base_url=server.url, headers=headers) as stranger:
        paths = stranger.get("/openapi.json", timeout=60).json()["paths"]
        ours = [(path, method) for path, methods in paths.items() for method in methods if "patchclamp" in path]
        assert len(ours) >= 12
        for path, method in [*ours, ("/v1/completions", "post"), ("/v1/models", "get")]:
            assert stranger.request(method, path.replace("{name}", "x").replace("{run}", "x")).status_code == 401


def test_routes_of_vllm_that_are_open_carry_no_program(server, http):
    """`/invocations` runs the model for anybody, with a key or without."""
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    assert httpx.post(f"{server.url}/invocations", json=body).status_code == 200
    for xargs in ({"fuzz_strength": 1.0}, {"patchclamp": '{"capture": [{"type": "capture", "at": "embed"}]}'}):
        response = httpx.post(f"{server.url}/invocations", json={**body, "vllm_xargs": xargs})
        assert response.status_code == 400
        assert "/v1/completions" in message(response)


def test_the_page_on_security_names_every_route_that_is_open(server):
    guarded = ("/v1", "/v2", "/inference", "/cohere")
    open_routes = {
        path
        for path in httpx.get(f"{server.url}/openapi.json", timeout=60).json()["paths"]
        if not path.startswith(guarded)
    }
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    listed = text.partition("## What vLLM leaves open")[2].partition("without one:")[2].partition("With `VLLM")[0]
    assert set(re.findall(r"`(/[a-z_]+)`", listed)) == open_routes


def test_the_page_on_security_names_every_limit():
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    table = text.partition("## Limits")[2].partition("\n## ")[0]
    limits = set(ServeLimits.__struct_fields__) - set(OF_OPERATOR)
    assert set(re.findall(r"`([a-z_]+)`", table)) - {"max_tokens", "n", "patchclamp"} == limits


def test_a_bank_is_bounded_and_says_so(http):
    try:
        for i in range(LIMITS["bank_names"]):
            assert http.put(f"/v1/patchclamp/vectors/v{i}", json=[1.0]).status_code == 200
        full = http.put("/v1/patchclamp/vectors/more", json=[1.0])
        assert full.status_code == 429
        assert "limit bank_names" in message(full)
        large = http.put("/v1/patchclamp/vectors/v0", content=save({"x": np.zeros((1, 1 << 18), np.float32)}))
        assert large.status_code == 429
        assert "limit named_bytes" in message(large)
    finally:
        for i in range(LIMITS["bank_names"]):
            http.delete(f"/v1/patchclamp/vectors/v{i}")


def test_a_run_that_may_capture_too_much_is_refused_before_it_runs(server):
    """`neurons` of 8 layers: 4 * 8 * 512 bytes a token."""
    capture = {
        "capture": [
            {"type": "capture", "at": site} for site in ("neurons", "resid_post", "resid_mid", "mlp_in", "attn_in")
        ]
    }
    with pytest.raises(openai.RateLimitError, match=r"may capture.*limit run_bytes"):
        complete(server, {"patchclamp": capture}, ["a " * 250] * 4, max_tokens=200, n=4, temperature=1)
    with server.http() as http:
        assert http.get("/v1/patchclamp/runs").json() == {"runs": []}


def bound(owner: str, **fields) -> tuple[bytes, str]:
    """A batch of one request with a bound op of our making, and its run."""
    key, run = vector_key(pc.Vector.of(VECTOR)), f"{owner}-attack-{len(fields)}"
    op = BoundOp("edits[0]", Linear(1.0, 1.0), (1,), (key,), (PositionRange(0, 3),), True)
    op = msgspec.structs.replace(op, **{name: value for name, value in fields.items() if name != "sizes"})
    carried = Carried(BoundProgram(run, 3, (op,)), fields.get("sizes", {key: (1, 144)}))
    request = wire.WireRequest(run, [1, 2, 3], 2, msgspec.msgpack.encode(carried), [key])
    return msgspec.msgpack.encode(wire.WireBatch([request], save({key: fields.get("rows", VECTOR)[None]}))), run


@pytest.mark.parametrize(
    "fields",
    [
        {"points": (100_000,)}, {"columns": 100 | 5000 << 16}, {"ranges": (PositionRange(0, 1 << 40),)},
        {"ranges": (PositionRange(0, 1, 50),)}, {"values": ()}, {"reaches_cache": False}, {"sizes": {}},
    ],
    ids=str,
)  # fmt: skip
def test_a_bound_program_of_no_binder_is_refused(http, fields):
    info = msgspec.msgpack.decode(http.get("/v1/patchclamp/engine/info").content)
    body, _ = bound(info["owner"], **fields)
    response = http.post("/v1/patchclamp/engine/run", content=body)
    assert response.status_code == 400, response.text
    assert "invalid bound program" in message(response)
    good, _ = bound(info["owner"])
    answered = http.post("/v1/patchclamp/engine/run", content=good)
    assert answered.status_code == 200
    assert b"error" not in answered.content


def test_two_runs_of_one_name_are_not_mixed_up(http):
    """In one batch, and in another while the first is under way; the first goes on, and its name is free afterwards."""
    path, info = "/v1/patchclamp/engine/run", msgspec.msgpack.decode(http.get("/v1/patchclamp/engine/info").content)
    run = f"{info['owner']}-attack-twice"

    def body(count: int, tokens: int) -> bytes:
        asked = [wire.WireRequest(run, [1, 2, 3], tokens, sampling={"ignore_eos": True}, listens=True)] * count
        return msgspec.msgpack.encode(wire.WireBatch(asked))

    assert http.post(path, content=body(2, 2)).status_code == 409
    with http.stream("POST", path, content=body(1, 400)) as response:
        parts, frames = response.iter_bytes(), wire.Frames()
        frames.feed(next(parts))
        [failed] = wire.Frames().feed(http.post(path, content=body(1, 2)).content)
        assert failed.error[0] == "NameTaken"
        *_, last = (event for part in parts for event in frames.feed(part))
        assert len(last.token_ids) == 400
    *_, last = wire.Frames().feed(http.post(path, content=body(1, 2)).content)
    assert len(last.token_ids) == 2


def graded(
    owner: str, sizes: dict | None = None, program: dict[str, Any] | None = None, **fields: Any
) -> bytes:  # fmt: skip
    """A job of the same program twice, not quite as our client makes it. `program`: fields of its op."""
    key, run = vector_key(pc.Vector.of(VECTOR)), f"{owner}-attack-job"
    op = BoundOp("edits[0]", Linear(1.0, 1.0), (1,), (key,), (PositionRange(0, 3),), True)
    op = msgspec.structs.replace(op, **(program or {}))
    records = cells_of([BoundProgram(run, 3, (op,))] * 2)
    records.keys += [key for key in sizes or {} if key not in records.keys]
    job = {"name": run, "prompt": [1, 2, 3], "suffixes": [[]], "terms": [[(0, 0, 5)]], "kl": False, "top": 0,
           "cells": records.to_bytes()}  # fmt: skip
    rows = {key: rows for key, (rows, _) in (sizes or {}).items()}
    return msgspec.msgpack.encode({"jobs": [job | fields], "vectors": save({key: VECTOR[None]}), "rows": rows})


def _logits(lm: pc.LM) -> int:
    return lm.sites.resolve(pc.logits)[0].point


def test_jobs_that_ask_for_different_things_are_refused(http):
    owner = msgspec.msgpack.decode(http.get("/v1/patchclamp/engine/info").content)["owner"]
    one, other = (msgspec.msgpack.decode(graded(owner, kl=kl)) for kl in (False, True))
    body = msgspec.msgpack.encode(one | {"jobs": [*one["jobs"], *other["jobs"]]})
    assert http.post("/v1/patchclamp/engine/grade", content=body).status_code == 400


OF_VECTOR = vector_key(pc.Vector.of(VECTOR))


@pytest.mark.parametrize("changed", [
    {"terms": [[(1, 0, 5)]]}, {"terms": [[(0, 1, 5)]]}, {"terms": [[(-1, 0, 5)]]}, {"terms": [[(0, 0, 10**9)]]},
    {"suffixes": [[-1]]}, {"suffixes": []}, {"suffixes": [[5] * 10**4]}, {"prompt": []}, {"prompt": [-5]},
    {"top": 10**6}, {"top": -1}, {"name": "other-attack-job"}, {"name": "x"}, {"prompt": [1, 2]},
    {"program": {"ranges": (PositionRange(0, 3, 4, 1),)}}, {"program": {"ranges": (PositionRange(0, 1 << 30),)}},
    {"terms": [[]]}, {"terms": [[(0, 0, 5)]] * (1 << 23)}, {"sizes": {"r:OWN:1": (10**9, 144)}},
    {"sizes": {"r:OWN:01": (1, 144)}}, {"sizes": {"r:OWN:99999": (1, 144)}}, {"sizes": {"r:OWN:-1": (1, 144)}},
    {"sizes": {"r:OWN:-99999": (1, 144)}}, {"sizes": {"r:OWN:-" + "9" * 40: (1, 144)}},
    {"sizes": {"v:" + 64 * "0": (1, 144)}}, {"sizes": {"o:0:1": (1, 144)}}, {"sizes": {"": (1, 144)}},
    {"program": {"points": (10**6,)}}, {"program": {"ranges": (PositionRange(-4, 3),)}}, {"cells": b""},
    {"cells": b"\x93"}, {"cells": msgspec.msgpack.encode((-5, [], []))},
    {"cells": msgspec.msgpack.encode((10**9, [], []))}, {"cells": msgspec.msgpack.encode((1, [[((9,), b"")] * 5], []))},
    {"sizes": {"r:other-attack-job:1": (1, 144)}},
    {"program": {"values": ("r:other-attack-job:1",)}, "sizes": {"r:other-attack-job:1": (1, 144)}},
], ids=reprlib.repr)  # fmt: skip
def test_a_forged_job_is_refused(http, changed):
    owner = msgspec.msgpack.decode(http.get("/v1/patchclamp/engine/info").content)["owner"]
    if sizes := changed.get("sizes"):
        changed = changed | {"sizes": {key.replace("OWN", f"{owner}-attack-run"): size for key, size in sizes.items()}}
    response = http.post("/v1/patchclamp/engine/grade", content=graded(owner, **changed))
    assert 400 <= response.status_code < 500, response.text
    good = http.post("/v1/patchclamp/engine/grade", content=graded(owner))
    assert good.status_code == 200
    assert [type(event) for event in wire.Frames().feed(good.content)] == [wire.GradedPart] * 2


def test_the_rows_of_a_run_are_no_more_than_it_captured(http):
    """Neither in the bank, where they lie beside those of others, nor before they are there."""
    owner = msgspec.msgpack.decode(http.get("/v1/patchclamp/engine/info").content)["owner"]
    with pc.LM(str(http.base_url), api_key=KEYS[0]) as lm:
        run = lm.run([1, 2, 3], max_tokens=1, capture=[pc.resid_post[1]])
        point = lm.sites.resolve(pc.resid_post[1])[0].point
        key = f"r:{run.key}:{point}"
        wide = graded(owner, {key: (1, lm.model.d_vocab)}, {
            "values": (key,), "ranges": (PositionRange(2, 3),), "points": (_logits(lm),), "reaches_cache": False
        })  # fmt: skip
        assert http.post("/v1/patchclamp/engine/grade", content=wide).status_code == 400
        for rows in (9, 3, 9):
            body = graded(owner, {key: (rows, 144)}, {"values": (key,), "ranges": (PositionRange(0, 3, rows - 3, 1),)})
            response = http.post("/v1/patchclamp/engine/grade", content=body)
            events = [*wire.Frames().feed(response.content)] if response.status_code == 200 else []
            assert (rows == 3) == any(isinstance(event, wire.GradedPart) for event in events)


def test_two_jobs_cannot_declare_one_run_differently(http):
    """The bank holds as many rows as are declared, once for all jobs of a request. Two that read what is there pass."""
    owner = msgspec.msgpack.decode(http.get("/v1/patchclamp/engine/info").content)["owner"]
    with pc.LM(str(http.base_url), api_key=KEYS[0]) as lm:
        run = lm.run([1, 2, 3], max_tokens=1, capture=[pc.resid_post[1]])
        point = lm.sites.resolve(pc.resid_post[1])[0].point
        key = f"r:{run.key}:{point}"
        beyond, within = (
            {"values": (key,), "ranges": (PositionRange(0, 1, row),), "points": (point,)} for row in (5, 0)
        )
        many = msgspec.msgpack.decode(graded(owner, {key: (500, 144)}, beyond))
        few = msgspec.msgpack.decode(graded(owner, {key: (1, 144)}, within))
        for rows in (many["rows"], few["rows"]):
            body = msgspec.msgpack.encode(few | {"jobs": [*many["jobs"], *few["jobs"]], "rows": rows})
            response = http.post("/v1/patchclamp/engine/grade", content=body)
            events = [*wire.Frames().feed(response.content)] if response.status_code == 200 else []
            assert not any(isinstance(event, wire.GradedPart) for event in events)
        last = graded(owner, {key: (3, 144)}, beyond | {"ranges": (PositionRange(0, 1, 2),)})
        body = msgspec.msgpack.encode(
            msgspec.msgpack.decode(last) | {"jobs": [*msgspec.msgpack.decode(last)["jobs"], *few["jobs"]]}
        )
        answered = [*wire.Frames().feed(http.post("/v1/patchclamp/engine/grade", content=body).content)]
        assert {event.i for event in answered} == {0, 1}
        assert all(isinstance(event, wire.GradedPart) for event in answered)


def test_a_vector_cannot_take_the_name_of_another(http):
    info = msgspec.msgpack.decode(http.get("/v1/patchclamp/engine/info").content)
    body, _ = bound(info["owner"])
    honest, key = msgspec.msgpack.decode(body), vector_key(pc.Vector.of(VECTOR))
    lie = {**honest, "vectors": save({key: -VECTOR[None]})}
    response = http.post("/v1/patchclamp/engine/run", content=msgspec.msgpack.encode(lie))
    assert response.status_code == 400
    assert "not the hash of its content" in message(response)


@pytest.mark.parametrize("number", range(len(ENGINE)), ids=lambda i: f"{ENGINE[i][0]} {str(ENGINE[i][1])[:60]}")
def test_what_our_client_would_not_say_is_answered_in_kind(server, http, number):
    """Refused, or an answer; an error that a request of a batch meets comes within the answer."""
    route, said = ENGINE[number]
    owner = msgspec.msgpack.decode(http.get("/v1/patchclamp/engine/info").content)["owner"]
    body = msgspec.msgpack.encode(_of_owner(said, owner))
    response = http.post(f"/v1/patchclamp/engine/{route}", content=body)
    assert response.status_code < 500, response.text[:500]
    if response.status_code >= 400:
        assert len(message(response)) <= 2000
    assert http.get("/health").status_code == 200
    http.post("/v1/patchclamp/engine/free", content=msgspec.msgpack.encode(wire.Free([f"{owner}-a-b"])))


def _of_owner(said: object, owner: str) -> object:
    """What is said, with an owner's name in it."""
    if isinstance(said, dict):
        return {key: _of_owner(value, owner) for key, value in said.items()}
    if isinstance(said, list):
        return [_of_owner(value, owner) for value in said]
    return said.replace("OWNER", owner) if isinstance(said, str) else said


def memory(server) -> int:
    return psutil.Process(server.process.pid).memory_info().rss


def test_hostile_requests_leave_no_memory_behind(server, http):
    def attack() -> None:
        for each in (*FILES, *NUMBERS):
            http.put(each.path, content=each.body, headers=JSON if each in NUMBERS else {})

    taken = []
    for _ in range(8):
        attack()
        taken.append(memory(server))
    grown = [after - before for before, after in itertools.pairwise(taken)]
    assert statistics.median(grown) < sum(len(each.body) for each in (*FILES, *NUMBERS)) / 2  # the first rounds warm up
    rows = base64.b64encode(VECTOR.tobytes()).decode()
    value = {"type": "vector", "shape": [144], "data": rows}
    ok = {"edits": [{"type": "add", "at": "resid_post[3]", "scale": 4.0, "value": value}]}
    assert complete(server, {"patchclamp": ok}).choices[0].text != complete(server).choices[0].text


@pytest.mark.parametrize("name", LONG)
def test_long_requests_are_refused_beside_others(server, name):
    """`tests.soak.blocking` measures how long the others wait."""
    path, body = LONG[name]
    with httpx.Client(base_url=server.url) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(refusal, server.url, path, body, KEYS[0])
        assert client.get("/health").status_code == 200
        assert asked.result() in (400, 413)


def test_only_two_routes_run_a_program_by_its_models_name(server, http):
    body = {"model": f"{server.model}:any", "prompt": PROMPT, "messages": [], "input": "a", "max_tokens": 2}
    for path in ("/invocations", "/v1/responses", "/v1/completions"):
        response = http.post(path, json=body)
        assert response.status_code == 404, path
        assert response.json()["error"]["param"] == "model"


def test_only_two_routes_take_a_patchclamp_object(server, http):
    body = {"model": server.model, "input": "a", "prompt": PROMPT, "max_tokens": 2, "max_output_tokens": 2,
            "messages": [{"role": "user", "content": "a"}]}  # fmt: skip
    for path in ("/invocations", "/v1/responses", "/v1/messages", "/v1/chat/completions/batch"):
        response = http.post(path, json=body | {"patchclamp": {"edits": []}})
        assert response.status_code == 400, path
        assert response.json()["error"]["param"] == "patchclamp"
        assert "/v1/completions" in message(response)
    assert http.post("/v1/completions", json={key: body[key] for key in ("model", "prompt", "max_tokens")} | {
        "patchclamp": {"edits": []}}).status_code == 200  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [("patch_clamp", {}), ("patchclamps", {}), ("fuzz_strength", 1.0), ("extra_body", {"patchclamp": {}})],
)
def test_a_field_that_vllm_would_ignore_is_refused(server, http, field, value):
    for path, asked in (("/v1/completions", {"prompt": PROMPT}),
                        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})):  # fmt: skip
        response = http.post(path, json={"model": server.model, "max_tokens": 1, field: value, **asked})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
        others = {"extra_body": {"top_k": 1}, "mine": 1}
        assert http.post(path, json={"model": server.model, "max_tokens": 1, **others, **asked}).status_code == 200


def test_duplicate_keys_are_refused(server, http):
    twice = '{"edits": [], "edits": [{"type": "zero", "at": "embed"}]}'
    begin = f'{{"model": {json.dumps(server.model)}, "max_tokens": 1, '
    prompt, chat = f'"prompt": {json.dumps(PROMPT)}', '"messages": [{"role": "user", "content": "a"}]'
    study = '{"prompt": "a b", "answer": 7, "metric": "prob", "layers": [0], "layers": [1]}'
    for path, body in (
        ("completions", f'{begin} {prompt}, "patchclamp": {twice}}}'),
        ("completions", f'{begin} {prompt}, "patchclamp": {{}}, "patchclamp": {{}}}}'),
        ("completions", f'{begin} {prompt}, "vllm_xargs": {{"patchclamp": {json.dumps(twice)}}}}}'),
        ("chat/completions", f'{begin} {chat}, "patchclamp": {twice}}}'),
        ("patchclamp/studies/ablation_sweep", study),
    ):
        response = http.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, path
        assert "duplicate" in message(response)


def test_a_word_that_is_nearly_ours_is_refused(server, http):
    for path in ("/v1/completions", "/v1/chat/completions", "/invocations"):
        for word in ("fuzz_strenght", "fuzz_sed", "patchclamp_edits"):
            asked = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": PROMPT}
            body = {"model": server.model, "max_tokens": 1, "vllm_xargs": {word: 1}, **asked}
            response = http.post(path, json=body)
            assert response.status_code == 400
            assert word in message(response)


def test_paths_begin_at_the_patchclamp_object(server, http):
    for op in ({"at": "resid_post[99]"}, {"at": "embd"}, {"at": "embed", "tokens": 'span("nowhere")'}, {"at": 5}):
        body = {"prompt": PROMPT, "max_tokens": 1, "patchclamp": {"edits": [{"type": "scale", "factor": 1, **op}]}}
        for stream in (False, True):
            error = http.post("/v1/completions", json={"model": server.model, "stream": stream, **body}).json()["error"]
            assert error["param"].startswith("patchclamp.edits[0].")
