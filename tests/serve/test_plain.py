"""A plain vLLM server with one flag: our general plugin beside others, programs in `vllm_xargs`, vLLM's own routes."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import safetensors.numpy
import torch

import patchclamp as pc

from .conftest import Server, start, stop
from .stock_requests import differences, metric_names
from .test_openai import CAPTURED, PROMPT, STEERED, complete, program

pytestmark = pytest.mark.slow  # a second server
PLUGIN = """
from pathlib import Path

def register():
    Path(__file__).with_name("registered").touch()
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    """A general plugin of somebody else's."""
    folder = tmp_path_factory.mktemp("plugin")
    info = folder / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nsomebodys = somebodys_plugin:register\n")
    (folder / "somebodys_plugin.py").write_text(PLUGIN)
    return folder


@pytest.fixture(scope="module")
def plain(model, plugin, tmp_path_factory) -> Iterator[Server]:
    path = ":".join([str(plugin), str(Path(pc.__file__).parents[1])])
    made = start(
        model, tmp_path_factory.mktemp("log") / "plain.log", '--additional-config={"patchclamp": {}}',
        command=("-m", "vllm.entrypoints.openai.api_server", "--model"), environment={"PYTHONPATH": path},
    )  # fmt: skip
    yield made
    stop(made)


def xargs(edits=(), capture=(), **others):
    return {"vllm_xargs": {"patchclamp": json.dumps(program(edits, capture)["patchclamp"]), **others}}


def test_other_plugins_stay_on_and_our_routes_are_not_there(plain, plugin):
    assert (plugin / "registered").exists()
    assert httpx.get(f"{plain.url}/v1/patchclamp/runs", timeout=60).status_code == 404
    assert "/v1/patchclamp" not in str(httpx.get(f"{plain.url}/openapi.json", timeout=60).json()["paths"].keys())


def test_one_prompt_with_a_program(plain, local):
    run = local.run(PROMPT, max_tokens=6, logprobs=True, edits=[STEERED], capture=CAPTURED)
    response = complete(plain, xargs([STEERED], CAPTURED), logprobs=1)
    assert response.choices[0].logprobs.token_logprobs == run.logprobs
    assert complete(plain, logprobs=1).choices[0].logprobs.token_logprobs != run.logprobs
    ours = response.model_extra["kv_transfer_params"]["patchclamp"]
    assert ours["fingerprint"] == run.program.fingerprint
    captured = safetensors.numpy.load(base64.b64decode(ours["runs"][0]["captures"]))
    assert all(torch.equal(torch.from_numpy(rows), run[site]) for site, rows in captured.items())


def test_a_chat_with_fuzzing(plain, local):
    messages = [{"role": "user", "content": "Name a colour."}]
    asked = {"messages": messages, "max_tokens": 6}
    run = local.run(**asked, logprobs=True, edits=[pc.Noise(0.5, at=pc.embed, relative=True, seed=3)])
    response = plain.openai().chat.completions.create(
        model=plain.model, **asked, temperature=0, logprobs=True,
        extra_body={"vllm_xargs": {"fuzz_strength": 0.5, "fuzz_seed": 3}},
    )  # fmt: skip
    logprobs = [token.logprob for token in response.choices[0].logprobs.content]
    assert logprobs == run.logprobs != local.run(**asked, logprobs=True).logprobs
    ours = response.model_extra["kv_transfer_params"]["patchclamp"]
    assert ours["fingerprint"] == run.program.fingerprint


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (dict(stream=True), 400, "stream"), (dict(n=2, temperature=1), 400, "n=1"),
        (dict(prompt=[PROMPT, "Another"]), 400, "one prompt"), (dict(run="mine"), 400, "cannot name its run"),
        (dict(compare=True), 400, "compare"), (dict(edits=[{"type": "zero", "at": "attn_oot"}]), 400, "attn_out"),
        (dict(edits=[{"type": "zero", "at": "attn_out[99]"}]), 422, "8 layers"),
        (dict(edits=[{"type": "add", "value": {"type": "named", "name": "calm"}, "at": "embed"}]), 404, "calm"),
        (dict(capture=[{"type": "capture", "at": "resid_post", "tokens": "every"}], prompt="a " * 300), 413, "inline_bytes"),
        (dict(capture=[{"type": "lens", "at": "resid_post", "top": 100}], prompt="a " * 300), 413, "inline_bytes"),
    ],
)  # fmt: skip
def test_what_vllms_own_answers_have_no_room_for_is_refused(plain, options, status, text):
    parts = {name: options.pop(name) for name in ("edits", "capture", "run", "compare") if name in options}
    data = json.dumps(parts or program([STEERED])["patchclamp"])
    with pytest.raises(openai.APIStatusError) as caught:
        list(complete(plain, {"vllm_xargs": {"patchclamp": data}}, **options))
    assert caught.value.status_code == status
    assert text in str(caught.value)
    assert complete(plain).choices[0].text


def test_vllms_own_routes_and_ours_answer_alike_where_there_is_no_program(plain, server):
    with server.http() as ours, httpx.Client(base_url=plain.url, timeout=120) as stock:
        assert differences(ours, stock, server.model) == []


def test_vllms_own_routes_and_metrics_are_all_there(plain, server):
    with server.http() as ours, httpx.Client(base_url=plain.url) as stock:
        assert metric_names(ours) == metric_names(stock)
        assert "vllm:time_to_first_token_seconds" in metric_names(stock)
        paths = [{(path, method) for path, methods in each.get("/openapi.json").json()["paths"].items() for method in methods}
                 for each in (ours, stock)]  # fmt: skip
    assert {path for path in paths[0] - paths[1] if "patchclamp" not in path[0]} == set()
    assert paths[1] - paths[0] == set()


def test_requests_without_a_program_are_stocks(plain, local):
    chunks = list(complete(plain, stream=True, n=2, temperature=1, seed=3))
    assert {chunk.choices[0].index for chunk in chunks if chunk.choices} == {0, 1}
    assert (
        complete(plain, logprobs=1).choices[0].logprobs.token_logprobs
        == local.run(PROMPT, max_tokens=6, logprobs=True).logprobs
    )
