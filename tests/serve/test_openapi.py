"""The OpenAPI page: every example on it runs, and no request that it describes is answered with a 5xx."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.schemas import APIOperation

from patchclamp.engines.wire import PREFIX
from patchclamp.language.ops import OPS
from patchclamp.serve.schema import EXAMPLES, OP_MODELS, STUDIES

from .conftest import KEYS

KEY = {"Authorization": f"Bearer {KEYS[1]}"}
EXAMPLES_OF_EACH = 12
SITES_SHOWN = ["resid_post[3]", "z[5, 3]", "embed", "attn_out[0:2]", "logits", "router[1]", "nothing[1]"]
TOKENS_SHOWN = ["every", "prompt[-1]", "generated", 'span("Eiffel")', 'role("user")', "token(5)", "prompt[99]"]


@pytest.fixture(scope="module")
def page(server):
    return httpx.get(f"{server.url}/openapi.json", timeout=60).json()


def examples(operation: dict, kind: str = "application/json") -> dict:
    return {name: each["value"] for name, each in operation["requestBody"]["content"][kind]["examples"].items()}


@pytest.mark.parametrize("path", EXAMPLES)
def test_every_example_of_the_openai_routes_runs(page, http, server, path):
    shown = examples(page["paths"][path]["post"])
    assert list(shown) == list(EXAMPLES[path])
    for name, body in shown.items():
        assert body["model"] == server.model
        response = http.post(path, json=body)
        assert response.status_code == 200, (name, response.text)
        text = response.text
        ours = (
            json.loads(text.split("data: ")[-2])["patchclamp"] if body.get("stream") else response.json()["patchclamp"]
        )
        assert len(ours["fingerprint"]) == 64
        assert ours["runs"][0]["idle_edits"] == []
        assert ("unedited" in ours) == (name == "compare")
    for kept in http.get("/v1/patchclamp/runs").json()["runs"]:
        assert http.delete(f"/v1/patchclamp/runs/{kept['run']}").status_code == 200


def test_every_other_example_runs(page, http):
    """What is put under the example name of its path is read and deleted; a run is made by the examples above."""
    paths = {
        path: routes
        for path, routes in page["paths"].items()
        if path.startswith("/v1/patchclamp") and "{" in path and not path.startswith(PREFIX) and "studies" not in path
    }
    assert len(paths) == 4
    for body in examples(page["paths"]["/v1/completions"]["post"]).values():
        http.post("/v1/completions", json=body)
    for method in ("put", "get", "delete"):
        for path, routes in sorted(paths.items(), reverse=True):
            if method not in routes:
                continue
            [name] = routes[method]["parameters"]
            url = path.replace(f"{{{name['name']}}}", name["schema"]["examples"][0])
            for body in examples(routes[method]).values() if method == "put" else (None,):
                response = http.request(method, url, json=body)
                assert response.status_code == 200, response.text
                kind = response.headers["Content-Type"]
                assert kind in routes[method]["responses"]["200"]["content"]


def test_the_page_tells_of_the_object_and_of_every_op(page):
    schemas = page["components"]["schemas"]
    for path in EXAMPLES:
        content = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        body = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        assert body["properties"]["patchclamp"] == {"$ref": "#/components/schemas/PatchclampRequest"}
        assert "prompt" in body["properties"] or "messages" in body["properties"]
    assert list(OP_MODELS) == list(OPS)
    for name, op in OPS.items():
        shown = schemas[OP_MODELS[name].__name__]
        assert set(shown["properties"]) == {"type", *op.__struct_fields__}
        assert shown["description"]
    assert {"edits", "capture", "stop_when", "run", "keep", "compare", "tokens"} == set(
        schemas["PatchclampRequest"]["properties"]
    )


def test_all_routes_of_ours_say_what_they_do(page):
    for path, routes in page["paths"].items():
        for route in routes.values() if path.startswith("/v1/patchclamp") else ():
            assert route["description"], path


def draw(operation: APIOperation, url: str, statuses: Counter[int]) -> None:
    """Sends what the page describes, and to routes that take msgpack any bytes."""

    @seed(7)
    @settings(max_examples=EXAMPLES_OF_EACH, database=None, deadline=None, phases=[Phase.explicit, Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=operation.as_strategy(), noise=st.binary(max_size=200))
    def send(case: Any, noise: bytes) -> None:
        if operation.path.endswith("/live/{session}"):  # goes on for ever
            url_of_case = url + operation.path.replace("{session}", quote(case.path_parameters["session"], safe=""))
            with httpx.stream("GET", url_of_case, headers=KEY) as response:
                statuses[response.status_code] += 1
            assert response.status_code < 500
            return
        if "/studies/" in operation.path and operation.method == "post":  # nobody waits for its events
            path = operation.path.replace("{name}", quote(str(case.path_parameters["name"]), safe=""))
            with httpx.stream("POST", url + path, json=case.body, headers=KEY) as response:
                statuses[response.status_code] += 1
            assert response.status_code < 500, case.body
            return
        if operation.method == "post":
            response = httpx.post(url + operation.path, content=noise, headers=KEY)
        else:
            case.headers = {**(case.headers or {}), **KEY}
            response = case.call(base_url=url)
        assert response.status_code < 500, (operation.label, case.as_curl_command(), response.text[:500])
        statuses[response.status_code] += 1

    send()


@pytest.mark.parametrize(("name", "example"), STUDIES)
def test_the_examples_of_studies_run(http, name, example):
    with http.stream("POST", f"/v1/patchclamp/studies/{name}", json=example) as response:
        events = [line.removeprefix("event: ") for line in response.iter_lines() if line.startswith("event: ")]
    assert events[-1] == "result"
    assert ("spread" in events) == (isinstance(example.get("clean"), list) or "seeds" in example)
    assert (events[0] == "start") == ("answer" in example)


def test_no_object_that_is_drawn_from_the_page_is_a_5xx(page, server):
    """Programs that the page describes, most of which no model could run; some can."""
    body = {
        "type": "object", "required": ["model", "prompt", "max_tokens", "patchclamp"],
        "properties": {"model": {"const": server.model}, "prompt": {"const": "The Eiffel Tower"},
                       "max_tokens": {"const": 2}, "patchclamp": {"$ref": "#/components/schemas/PatchclampRequest"}},
    }  # fmt: skip
    schemas = copy.deepcopy(page["components"]["schemas"])
    for field, texts in (("at", SITES_SHOWN), ("tokens", TOKENS_SHOWN)):
        for each in schemas.values():  # sites and selections are text: most draws of any text say nothing
            if field in each.get("properties", {}) and "type" in each["properties"]:
                each["properties"][field] = {"enum": texts}
    paths = {"/v1/completions": {"post": {"responses": {}, "requestBody": {
        "required": True, "content": {"application/json": {"schema": body}}}}}}  # fmt: skip
    loaded = schemathesis.openapi.from_dict({**page, "paths": paths, "components": {"schemas": schemas}})
    [operation] = [result.ok() for result in loaded.get_all_operations()]
    statuses: Counter[int] = Counter()

    @seed(11)
    @settings(max_examples=20, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        response = httpx.post(f"{server.url}{operation.path}", json=case.body, headers=KEY, timeout=60)
        assert response.status_code < 500, (case.body, response.text[:500])
        statuses[response.status_code] += 1

    send()
    assert {200, 400} <= set(statuses)


def test_nothing_that_is_drawn_from_the_page_is_a_5xx(page, server):
    ours = {path: routes for path, routes in page["paths"].items() if path.startswith("/v1/patchclamp")}
    loaded = schemathesis.openapi.from_dict({**page, "paths": ours})
    operations = [result.ok() for result in loaded.get_all_operations()]
    assert len(operations) == sum(len(routes) for routes in ours.values()) >= 16
    statuses: Counter[int] = Counter()
    for operation in operations:
        before = statuses.total()
        draw(operation, server.url, statuses)
        assert statuses.total() > before, operation.label
    assert {200, 400, 404} <= set(statuses)
    with server.http(KEYS[1]) as http:
        for kind in ("vectors", "programs"):
            for card in http.get(f"/v1/patchclamp/{kind}").json()[kind]:
                assert http.delete(f"/v1/patchclamp/{kind}/{card['name']}").status_code == 200
