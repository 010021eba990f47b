"""OpenAI chats with images in them, and a program beside the messages."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

import patchclamp as pc

from .. import without_torchvision
from ..models import that_reads_images, with_gemma_processor
from .conftest import KEYS, Server, start, stop

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% for m in messages %}w400 {% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<start_of_image>{% endif %} {% endfor %} w401 {% endfor %}"
)
EDIT = {"type": "scale", "factor": -1.0, "at": "resid_pre[1]", "tokens": 'image[0] | span("w12")'}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder, beside = tmp_path_factory.mktemp("gemma3"), tmp_path_factory.mktemp("beside")
    that_reads_images(folder, "gemma3")
    with_gemma_processor(folder)
    (beside / "template.jinja").write_text(TEMPLATE)
    stand_ins = Path(without_torchvision.__file__).read_text()
    (beside / "sitecustomize.py").write_text(f"{stand_ins}\nimport sys\n\nsys.modules.update(stand_ins())\n")
    options = ("--max-model-len=128", "--skip-mm-profiling", f"--chat-template={beside / 'template.jinja'}")
    paths = f"{beside}:{Path(pc.__file__).parents[1]}"
    made = start(str(folder), beside / "log", "--api-key", *KEYS, *options, environment={"PYTHONPATH": paths})
    yield made
    stop(made)


def ask(server: Server, number: int, edits: list[Any] = (), **more: Any) -> tuple[int, dict[str, Any]]:
    """What a server answers about image `number`."""
    data = io.BytesIO()
    Image.fromarray(np.random.RandomState(number).randint(0, 255, (28, 28, 3), dtype=np.uint8)).save(data, "png")
    url = {"url": f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"}
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "w11 w12"}]
    body = {"model": server.model, "max_tokens": 3, "temperature": 0, "logprobs": True, "ignore_eos": True,
            "messages": [{"role": "user", "content": parts}], **more}  # fmt: skip
    if edits:
        capture = [{"type": "capture", "at": "resid_pre[1]", "tokens": "image"}]
        body["patchclamp"] = {"edits": edits, "capture": capture, "tokens": True}
    with server.http() as http:
        response = http.post("/v1/chat/completions", json=body)
    return response.status_code, response.json()


def logprobs(answer: tuple[int, dict[str, Any]]) -> list[float]:
    assert answer[0] == 200, answer
    return [token["logprob"] for token in answer[1]["choices"][0]["logprobs"]["content"]]


def test_a_program_acts_at_the_image_and_captures_it(server):
    plain, edited, again = ask(server, 0), ask(server, 0, [EDIT]), ask(server, 0)
    assert logprobs(again) == logprobs(plain) != pytest.approx(logprobs(edited), abs=0.05)
    runs = [answer[1]["patchclamp"]["runs"][0] for answer in (edited, ask(server, 0, [{**EDIT, "factor": 1.0}]))]
    assert [run["acted"] for run in runs] == [{"edits[0]": [[2, 6], [8, 9]]}] * 2
    rows, unedited = (safetensors.numpy.load(base64.b64decode(run["captures"]))["resid_pre[1]"] for run in runs)
    assert rows.shape == (4, 128)
    assert np.array_equal(rows, -unedited)


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_whose_request_was_refused_is_taken_the_next_time(server, stream):
    """vLLM sends an engine core each image once; this one was made ready for a request that never got there."""
    number = 10 + stream
    status, told = ask(server, number, [{**EDIT, "tokens": "image[1]"}], stream=stream)
    assert status == 400
    assert told["error"]["message"].startswith("patchclamp.edits[0].tokens: image[1]: ")
    plain, edited = ask(server, number), ask(server, number, [EDIT])
    assert logprobs(plain) != pytest.approx(logprobs(edited), abs=0.05)


def test_what_cannot_be_told_is_refused_by_name(server):
    status, told = ask(server, 0, [{**EDIT, "tokens": 'role("user")'}])
    assert (status, told["error"]["type"]) == (400, "TokensError")
    assert "chat with images" in told["error"]["message"]
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        picture = {"prompt": "w9 <start_of_image>", "multi_modal_data": {"image": Image.new("RGB", (28, 28))}}
        with pytest.raises(pc.EngineError, match=r"prompt: .*pc\.LM\(url\)"):
            lm.run(picture, max_tokens=1)


def test_several_runs_of_a_prompt_with_an_image(server):
    status, told = ask(server, 20, [EDIT], n=2, temperature=1.0, seed=3)
    assert status == 200
    first, second = (choice["message"]["content"] for choice in told["choices"])
    assert first != second
    assert [run["acted"] for run in told["patchclamp"]["runs"]] == [{"edits[0]": [[2, 6], [8, 9]]}] * 2
