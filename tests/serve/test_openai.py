"""Programs in OpenAI requests: the same as in this process, bit for bit, in stock's shape with our part beside it."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import openai
import pytest
import safetensors.numpy
import torch

import patchclamp as pc
from patchclamp.language.program import to_dict

from .conftest import KEYS

PROMPT = "The capital of France is"
VECTOR = np.random.default_rng(5).standard_normal(576).astype(np.float32)
STEERED = pc.Add(VECTOR, at=pc.resid_post[3], scale=2.0)
PROJECTED = pc.Capture("z[4, 1:3]", pc.prompt[-2:], project=[VECTOR[:128], VECTOR[-128:]])
CAPTURED = [pc.resid_post[2], pc.z[5, 3] @ pc.prompt[-1], PROJECTED]


def program(edits=(), capture=(), **others):
    return {"patchclamp": {**to_dict(pc.Program.of(edits, capture)), **others}}


def complete(server, extra=None, prompt=PROMPT, max_tokens=6, **options):
    return server.openai().completions.create(
        model=server.model, prompt=prompt, max_tokens=max_tokens, temperature=options.pop("temperature", 0),
        extra_body=extra, **options,
    )  # fmt: skip


def tensors(captures: str) -> dict[str, np.ndarray]:
    return safetensors.numpy.load(base64.b64decode(captures))


def test_a_request_without_a_program_is_stocks(server, local):
    response = complete(server, logprobs=1)
    run = local.run(PROMPT, max_tokens=6, logprobs=True)
    assert response.choices[0].text == run.text
    assert response.choices[0].logprobs.token_logprobs == run.logprobs
    assert "patchclamp" not in response.model_extra


def test_a_program_gives_what_it_gives_here_bit_for_bit(server, local):
    run = local.run(PROMPT, max_tokens=6, logprobs=True, edits=[STEERED], capture=CAPTURED)
    plain = local.run(PROMPT, max_tokens=6, logprobs=True)
    response = complete(server, program([STEERED], CAPTURED), logprobs=1)
    ours = response.model_extra["patchclamp"]
    assert response.choices[0].text == run.text
    assert response.choices[0].logprobs.token_logprobs == run.logprobs != plain.logprobs
    assert ours["fingerprint"] == run.program.fingerprint
    [told] = ours["runs"]
    assert told["idle_edits"] == []
    captured = tensors(told["captures"])
    assert sorted(captured) == ["resid_post[2]", "z[4, 1:3]", "z[5, 3]"]
    assert captured["z[4, 1:3]"].shape == (2, 2)
    for site, rows in captured.items():
        assert torch.equal(torch.from_numpy(rows), run[site])


def test_captures_may_be_sites_as_text(server, local):
    run = local.run(PROMPT, max_tokens=6, capture=["resid_post[2]"])
    response = complete(server, {"patchclamp": {"capture": ["resid_post[2]"]}})
    rows = tensors(response.model_extra["patchclamp"]["runs"][0]["captures"])
    assert list(rows) == ["resid_post[2]"]
    assert np.array_equal(rows["resid_post[2]"], run["resid_post[2]"].numpy())


PROBES = [
    pc.Probe(
        [VECTOR, -VECTOR], at=pc.resid_post[3], tokens=pc.prompt[-2:], bias=[1, 2], activation="softmax", name="p"
    ),
    pc.Probe(VECTOR, at=pc.resid_post[1:3], pool="mean", name="mean"),
    pc.Capture(pc.resid_post[4], pool="max"),
]


MATRIX = np.eye(576, dtype=np.float32) + np.outer(VECTOR, VECTOR[::-1]) / 60
LENSES = [pc.Lens(pc.resid_post[1:3], top=3), pc.Lens(pc.attn_out[4], pc.prompt[-1], top=1),
          pc.Lens(pc.resid_post, translators={5: (MATRIX, VECTOR)})]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_lenses_are_tokens_in_the_answer(server, local, stream):
    run = local.run(PROMPT, max_tokens=6, capture=LENSES)
    response = complete(server, program(capture=LENSES), stream=stream)
    [told] = (list(response)[-1] if stream else response).model_extra["patchclamp"]["runs"]
    assert list(told["lens"]) == list(run.lens) == ["resid_post[1]", "resid_post[2]", "attn_out[4]", "resid_post[5]"]
    assert "captures" not in told
    for site, read in run.lens.items():
        assert told["lens"][site]["positions"] == read.positions
        assert told["lens"][site]["ids"] == read.ids.tolist()
        assert told["lens"][site]["tokens"] == read.tokens
        assert np.array_equal(np.float32(told["lens"][site]["logprobs"]), read.logprobs)


@pytest.mark.parametrize(
    ("translators", "path"), [("/etc/passwd", ""), ([{"layer": 5, "matrix": [[1.0]]}], "[0]"), ([], ""), (None, "[5]")]
)
def test_other_translators_are_refused(server, translators, path):
    asked = program(capture=pc.Lens(pc.resid_post, translators={5: np.eye(8)}))
    if translators is not None:
        asked["patchclamp"]["capture"][0]["translators"] = translators
    with pytest.raises(openai.BadRequestError) as raised:
        complete(server, asked)
    assert raised.value.param == f"patchclamp.capture[0].translators{path}"


@pytest.mark.parametrize("stream", [False, True])
def test_probes_are_numbers_in_the_answer_and_tensors_in_the_file(server, local, stream):
    run = local.run(PROMPT, max_tokens=6, capture=PROBES)
    response = complete(server, program(capture=PROBES, keep=True), stream=stream)
    [told] = (list(response)[-1] if stream else response).model_extra["patchclamp"]["runs"]
    with server.http() as http:
        files = [http.get(f"/v1/patchclamp/runs/{told['run']}/captures").content]
        assert http.delete(f"/v1/patchclamp/runs/{told['run']}").is_success
    files += [base64.b64decode(told["captures"])] if told["captures"] is not None else []
    for name in ("p", "mean"):
        assert told["probes"][name]["positions"] == run.probe_positions(name)
        assert np.array_equal(np.float32(told["probes"][name]["scores"]), run.probes[name].numpy())
    for file in files:
        captured = safetensors.numpy.load(file)
        assert sorted(captured) == ["probe mean", "probe p", "resid_post[4]"]
        assert np.array_equal(captured["probe p"], run.probes["p"].numpy())
        assert np.array_equal(captured["probe mean"], run.probes["mean"].numpy())
        assert np.array_equal(captured["resid_post[4]"], run["resid_post[4]"].numpy())


@pytest.mark.parametrize("stream", [False, True])
def test_what_selects_no_token_is_empty_in_the_answer_and_in_the_file(server, stream):
    """Pooled or not; the generation is not lost."""
    capture = [
        pc.Probe([VECTOR, VECTOR], at=pc.resid_post[3], tokens=pc.generated, pool=pool, name=f"p-{pool}")
        for pool in (None, "mean")
    ]
    capture += [
        pc.Capture(pc.resid_post[4], pc.generated, pool="mean"), pc.resid_post[5] @ pc.generated,
        pc.Probe(VECTOR, at=pc.resid_post[1:3], tokens=pc.generated, pool="max", name="layers"),
    ]  # fmt: skip
    response = complete(server, program(capture=capture, keep=True), stream=stream, max_tokens=1)
    [told] = (list(response)[-1] if stream else response).model_extra["patchclamp"]["runs"]
    assert {name: each["scores"] for name, each in told["probes"].items()} == {
        "p-None": [], "p-mean": None, "layers": None,
    }  # fmt: skip
    with server.http() as http:
        file = http.get(f"/v1/patchclamp/runs/{told['run']}/captures").content
    shapes = {name: rows.shape for name, rows in safetensors.numpy.load(file).items()}
    width = len(VECTOR)
    assert shapes == {"probe p-None": (0, 2), "probe p-mean": (0, 2), "probe layers": (2, 0, 1), "resid_post[4]": (0, width),
                      "resid_post[5]": (0, width)}  # fmt: skip
    if told["captures"] is not None:
        assert base64.b64decode(told["captures"]) == file


def test_a_condition_decides_where_its_edits_act(server, local):
    probe = pc.Probe(VECTOR, at=pc.resid_post[3], name="decides")
    scores = local.run(PROMPT, max_tokens=6, capture=probe).probes["decides"]
    edits = [pc.When(probe > float(scores.median()), pc.Add(VECTOR, at=pc.resid_post[4], scale=9.0))]
    run = local.run(PROMPT, max_tokens=6, edits=edits, logprobs=True)
    response = complete(server, program(edits, tokens=True), logprobs=1)
    [told] = response.model_extra["patchclamp"]["runs"]
    assert response.choices[0].logprobs.token_logprobs == run.logprobs
    acted = [position for begin, end in told["acted"]["edits[0].edits[0]"] for position in range(begin, end)]
    assert acted == run.acted["edits[0].edits[0]"] != []
    assert np.array_equal(np.float32(told["probes"]["decides"]["scores"]), run.probes["decides"].numpy())


def test_a_stream_has_the_same_parts_and_ours_at_its_end(server, local):
    run = local.run(PROMPT, max_tokens=6, edits=[STEERED])
    chunks = list(complete(server, program([STEERED]), stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == run.text
    assert chunks[-1].choices == []
    assert chunks[-1].model_extra["patchclamp"]["fingerprint"] == run.program.fingerprint
    assert chunks[-1].id == chunks[0].id


def test_a_chat_and_its_unedited_twin(server, local):
    messages = [{"role": "user", "content": "Name a colour."}]
    steered, plain = (
        local.run(messages=messages, max_tokens=6, edits=[STEERED]),
        local.run(messages=messages, max_tokens=6),
    )
    response = server.openai().chat.completions.create(
        model=server.model, messages=messages, max_tokens=6, temperature=0, extra_body=program([STEERED], compare=True)
    )
    assert response.choices[0].message.content == steered.text
    twin = response.model_extra["patchclamp"]["unedited"]["choices"][0]["message"]["content"]
    assert twin == plain.text != steered.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_messages_are_selected_by_role_and_by_text(server, local, stream):
    """Content in parts, and a continued message, too."""
    messages = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": "Red."},
                {"role": "user", "content": "Another one."}]  # fmt: skip
    edits = [pc.Add(VECTOR, at=pc.resid_post[3], tokens=pc.role("user")[-1], scale=9.0),
             pc.Scale(0.5, at=pc.embed, tokens=pc.role("assistant") | pc.span("colour"))]  # fmt: skip
    run, plain = (local.run(messages=messages, max_tokens=6, edits=each) for each in (edits, []))
    positions = run.select(pc.role("user")[-1]).tolist()
    assert local.tokenizer.token_strings([run.prompt_token_ids[i] for i in positions]) == ["."]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for given in (messages, parts):
        answer = server.openai().chat.completions.create(
            model=server.model, messages=given, max_tokens=6, temperature=0, stream=stream, extra_body=program(edits)
        )
        text = (
            "".join(part.choices[0].delta.content or "" for part in answer if part.choices)
            if stream
            else answer.choices[0].message.content
        )
        assert text == run.text != plain.text


def test_a_role_that_the_chat_lacks_and_a_prompt_that_is_no_chat(server):
    edits = program([pc.Zero(pc.embed, tokens=pc.role("tool"))])
    with pytest.raises(openai.BadRequestError, match="no message of that role; it has: user"):
        server.openai().chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "Hi"}], extra_body=edits
        )
    with pytest.raises(openai.BadRequestError, match="the prompt is not a chat"):
        complete(server, edits)


def test_several_prompts_and_n_as_streams(server, local):
    prompts = [PROMPT, "Water boils at"]
    options = dict(n=2, temperature=1, seed=7, stream=True)
    chunks = list(complete(server, program([STEERED], [pc.embed @ pc.prompt[-1]]), prompts, **options))
    runs = local.run(prompts, max_tokens=6, edits=[STEERED], sampling={"n": 2, "temperature": 1.0, "seed": 7})
    texts = [""] * 4
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [run.text for group in runs for run in group]
    told = chunks[-1].model_extra["patchclamp"]["runs"]
    assert [each["index"] for each in told] == [0, 1, 2, 3]
    assert all(tensors(each["captures"])["embed"].shape == (1, 576) for each in told)


def test_several_prompts_and_n(server, local):
    prompts = [PROMPT, "Water boils at"]
    response = complete(server, program([STEERED], [pc.embed @ pc.prompt[-1]]), prompts, n=2, temperature=1, seed=7)
    runs = local.run(prompts, max_tokens=6, edits=[STEERED], sampling={"n": 2, "temperature": 1.0, "seed": 7})
    assert [choice.text for choice in response.choices] == [run.text for group in runs for run in group]
    told = response.model_extra["patchclamp"]["runs"]
    assert [each["index"] for each in told] == [0, 1, 2, 3]
    assert len({each["run"] for each in told}) == 4
    rows = [tensors(each["captures"])["embed"] for each in told]
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_fuzzing_as_scalars(server, local):
    run = local.run(PROMPT, max_tokens=6, edits=[pc.Noise(0.5, at=pc.embed, relative=True, seed=3)])
    response = complete(server, {"vllm_xargs": {"fuzz_strength": 0.5, "fuzz_seed": 3}})
    assert response.choices[0].text == run.text
    assert response.model_extra["patchclamp"]["fingerprint"] == run.program.fingerprint


def test_a_program_as_text_in_xargs(server, local):
    text = json.dumps(program([STEERED])["patchclamp"])
    response = complete(server, {"vllm_xargs": {"patchclamp": text}})
    assert response.choices[0].text == local.run(PROMPT, max_tokens=6, edits=[STEERED]).text
    assert response.model_extra["patchclamp"]["runs"][0]["idle_edits"] == []


def test_a_kept_run_is_read_patched_and_deleted(server, local):
    source = local.run("The capital of Italy is", capture=[pc.resid_post[4]], max_tokens=1)
    patch = pc.Replace(pc.From(source, pc.resid_post[4]), at=pc.resid_post[4] @ pc.prompt[-1])
    patched = local.run(PROMPT, max_tokens=6, edits=[patch], logprobs=True)
    complete(server, program(capture=[pc.resid_post[4]], run="italy"), "The capital of Italy is", max_tokens=1)
    by_name = pc.Replace(pc.From("italy", pc.resid_post[4]), at=pc.resid_post[4] @ pc.prompt[-1])
    logprobs = [complete(server, extra, logprobs=1).choices[0].logprobs for extra in (program([by_name]), None)]
    assert logprobs[0].token_logprobs == patched.logprobs != logprobs[1].token_logprobs
    with server.http() as http:
        told = http.get("/v1/patchclamp/runs/italy").json()
        assert told["captures"] == ["resid_post[4]"]
        captured = safetensors.numpy.load(http.get("/v1/patchclamp/runs/italy/captures").content)
        assert torch.equal(torch.from_numpy(captured["resid_post[4]"]), source[pc.resid_post[4]])
        assert http.delete("/v1/patchclamp/runs/italy").status_code == 200
        gone = http.get("/v1/patchclamp/runs/italy")
        assert gone.status_code == 410
        assert "it was deleted" in gone.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="italy"):
        complete(server, program([by_name]))


def test_another_key_sees_nothing_of_it(server):
    complete(server, program(capture=[pc.embed], run="mine"), max_tokens=1)
    with server.http("another-key") as http:
        assert http.get("/v1/patchclamp/runs/mine").status_code == 404
        assert http.delete("/v1/patchclamp/runs/mine").status_code == 404
        assert http.get("/v1/patchclamp/runs").json() == {"runs": []}
    with server.http("no-key") as http:
        assert http.get("/v1/patchclamp/runs/mine").status_code == 401
    with server.http() as http:
        assert http.delete("/v1/patchclamp/runs/mine").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("extra", "status", "text"),
    [
        ({"edits": [{"type": "scale", "factor": 0, "at": "attn_oot[1]"}]}, 400, "edits[0].at: no site 'attn_oot'"),
        ({"edits": [{"type": "scale", "factor": 0, "at": "attn_out[99]"}]}, 422, "this model has 8 layers"),
        ({"edits": [{"type": "scale", "factor": 0, "at": "embed", "tokens": 'span("Oslo")'}]}, 400, "Oslo"),
        ({"edits": [{"type": "add", "value": [1.0], "at": "embed"}]}, 400, "576 wide"),
        ({"edit": []}, 400, "no field 'edit'"),
        ({"run": "../../etc"}, 400, "a name has"),
        ([], 400, "an object"),
    ],
)
def test_what_is_wrong_is_said_with_its_status(server, extra, status, text, stream):
    with pytest.raises(openai.APIStatusError) as caught:
        list(complete(server, {"patchclamp": extra}, stream=stream))
    assert caught.value.status_code == status
    assert text in str(caught.value)


def test_an_edit_that_overflows_fails_its_request_alone(server):
    with pytest.raises(openai.APIStatusError, match="not finite") as caught:
        complete(server, program([pc.Scale(3e38, at=pc.resid_post[1]), pc.Scale(3e38, at=pc.resid_post[1])]))
    assert caught.value.status_code == 422
    assert complete(server).choices[0].text


def test_many_answers_with_captures_at_once(server):
    """More than the server has threads for: none of them waits for another one's thread."""
    alone = tensors(complete(server, program(capture=CAPTURED)).model_extra["patchclamp"]["runs"][0]["captures"])

    async def all_at_once() -> list:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0) as client:
            asked = dict(
                model=server.model, prompt=PROMPT, max_tokens=6, temperature=0, extra_body=program(capture=CAPTURED)
            )
            return await asyncio.gather(*(client.completions.create(**asked) for _ in range(48)))

    for answer in asyncio.run(all_at_once()):
        [told] = answer.model_extra["patchclamp"]["runs"]
        captured = tensors(told["captures"])
        assert captured.keys() == alone.keys()
        for site, rows in captured.items():
            np.testing.assert_allclose(rows, alone[site], rtol=1e-3, atol=1e-3)
