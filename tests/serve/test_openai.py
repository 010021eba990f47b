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
from patchclamp.language.program import condition_to_dict, to_dict

from .conftest import KEYS, becomes

PROMPT = "The capital of France is"
VECTOR = np.random.default_rng(5).standard_normal(144).astype(np.float32)
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


MATRIX = np.eye(144, dtype=np.float32) + np.outer(VECTOR, VECTOR[::-1]) / 60
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
        assert http.delete(f"/v1/patchclamp/runs/{told['run']}").is_success
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
    run, plain = (local.run(messages=messages, max_tokens=6, edits=each, logprobs=True) for each in (edits, []))
    positions = run.select(pc.role("user")[-1]).tolist()
    assert local.tokenizer.token_strings([run.prompt_token_ids[i] for i in positions]) == ["."]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for given in (messages, parts):
        answer = server.openai().chat.completions.create(
            model=server.model,
            messages=given,
            max_tokens=6,
            temperature=0,
            stream=stream,
            logprobs=True,
            extra_body=program(edits),
        )
        choices = [choice for part in (answer if stream else [answer]) for choice in part.choices if choice.logprobs]
        logprobs = [token.logprob for choice in choices for token in choice.logprobs.content]
        assert logprobs == run.logprobs != plain.logprobs


def test_a_role_that_the_chat_lacks_and_a_prompt_that_is_no_chat(server):
    edits = program([pc.Zero(pc.embed, tokens=pc.role("tool"))])
    with pytest.raises(openai.BadRequestError, match="no messages with this role"):
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
    assert all(tensors(each["captures"])["embed"].shape == (1, 144) for each in told)


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
        ({"edits": [{"type": "scale", "factor": 0, "at": "attn_oot[1]"}]}, 400, "edits[0].at: unknown site 'attn_oot'"),
        ({"edits": [{"type": "scale", "factor": 0, "at": "attn_out[99]"}]}, 422, "8 layers"),
        ({"edits": [{"type": "scale", "factor": 0, "at": "embed", "tokens": 'span("Oslo")'}]}, 400, "Oslo"),
        ({"edits": [{"type": "add", "value": [1.0], "at": "embed"}]}, 400, "144"),
        ({"edit": []}, 400, "unknown field 'edit'"),
        ({"run": "../../etc"}, 400, "up to 64"),
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


# -- scores in a stream, and requests that end at one

SCORED = pc.Probe([VECTOR, -VECTOR], at=pc.resid_post[3], bias=[1, 2], name="p")


def stopped(condition, **others):
    return {"patchclamp": {"stop_when": condition_to_dict(condition), **others}, "ignore_eos": True}


def firing(run, by_rank=-1):
    """The token at which output 0 is the highest so far for the last (or first) time, and a threshold below it."""
    scores = run.probes["p"][len(run.prompt_token_ids) :, 0].tolist()
    token = [i for i, score in enumerate(scores) if score > max(scores[:i], default=score - 1) + 0.01][by_rank]
    return token, (scores[token] + max(scores[:token], default=scores[token] - 1)) / 2


def read(chunks):
    """The text, the positions and scores of the probe, and the last chunk's object."""
    chunks = list(chunks)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    parts = [
        choice.model_extra["patchclamp"]["probes"]["p"] for choice in choices if "patchclamp" in choice.model_extra
    ]
    text = "".join(getattr(choice, "text", None) or (getattr(choice, "delta", None) and choice.delta.content) or ""
                   for choice in choices)  # fmt: skip
    positions, scores = (
        [at for part in parts for at in part["positions"]],
        [row for part in parts for row in part["scores"]],
    )
    return text, positions, scores, choices, chunks[-1]


@pytest.mark.parametrize("chat", [False, True])
def test_scores_come_with_each_chunk(server, local, chat):
    messages = [{"role": "user", "content": PROMPT}]
    given = {"messages": messages} if chat else {"prompt": PROMPT}
    run = local.run(**given, max_tokens=8, capture=[SCORED], sampling={"ignore_eos": True})
    client, asked = server.openai(), {**program(capture=[SCORED], tokens=True), "ignore_eos": True}
    create = client.chat.completions.create if chat else client.completions.create
    for _ in range(2):
        chunks = create(model=server.model, max_tokens=8, temperature=0, stream=True, extra_body=asked, **given)
        text, positions, scores, choices, last = read(chunks)
        [told] = last.model_extra["patchclamp"]["runs"]
        assert text == run.text
        assert positions == told["probes"]["p"]["positions"] == run.probe_positions("p")
        assert scores == told["probes"]["p"]["scores"]
        assert torch.allclose(torch.tensor(scores), run.probes["p"], rtol=1e-4, atol=1e-3)
        tokens, text = told["tokens"][len(run.prompt_token_ids) :], ""
        last_scored = run.probe_positions("p")[-1]
        for choice in choices:  # with their token: the scores so far are of the text so far
            text += (choice.delta.content or "") if chat else choice.text
            found = choice.model_extra.get("patchclamp", {"probes": {"p": {"positions": []}}})["probes"]["p"][
                "positions"
            ]
            if found:  # a busy server sends several tokens in a chunk, in the last one also the token without scores
                is_last = choice.finish_reason is not None
                assert not is_last or found[-1] == last_scored
                assert text == "".join(tokens[: found[-1] - len(run.prompt_token_ids) + 1 + is_last])


def lens_of(choices):
    """What the lenses read in the chunks of a choice, by site."""
    chunks = [choice.model_extra["patchclamp"]["lens"] for choice in choices if "patchclamp" in choice.model_extra]
    names = ("positions", "ids", "tokens", "logprobs")
    return {site: {name: [each for chunk in chunks for each in chunk[site][name]] for name in names}
            for site in chunks[0]}  # fmt: skip


def assert_same_lenses(read, other):
    """Rows are unembedded in other batches, which round differently."""
    assert read.keys() == other.keys()
    for site, each in other.items():
        assert read[site]["positions"] == each["positions"]
        np.testing.assert_allclose(read[site]["logprobs"], each["logprobs"], atol=1e-4)
        differing = np.array(read[site]["ids"]) != np.array(each["ids"])
        assert differing.mean() < 0.02
        assert (np.array(read[site]["tokens"]) != np.array(each["tokens"])).sum() <= differing.sum()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("scored", [False, True])
def test_lenses_come_with_each_chunk(server, local, chat, scored):
    given = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    capture = [*LENSES, pc.Lens(pc.mlp_out[4] @ pc.generated, top=2), *([SCORED] if scored else [])]
    run = local.run(**given, max_tokens=8, capture=capture, sampling={"ignore_eos": True})
    client, asked = server.openai(), {**program(capture=capture, tokens=True), "ignore_eos": True}
    create = client.chat.completions.create if chat else client.completions.create
    for _ in range(2):
        chunks = list(create(model=server.model, max_tokens=8, temperature=0, stream=True, extra_body=asked, **given))
        choices, prompt = [chunk.choices[0] for chunk in chunks if chunk.choices], len(run.prompt_token_ids)
        [told] = chunks[-1].model_extra["patchclamp"]["runs"]
        assert_same_lenses(lens_of(choices), told["lens"])
        assert_same_lenses(told["lens"], {site: {
            "positions": read.positions, "ids": read.ids, "tokens": read.tokens, "logprobs": read.logprobs,
        } for site, read in run.lens.items()})  # fmt: skip
        tokens, text = told["tokens"][prompt:], ""
        for choice in choices:  # with their token
            text += (choice.delta.content or "") if chat else choice.text
            if "patchclamp" in choice.model_extra:
                assert choice.model_extra["patchclamp"].keys() == ({"probes", "lens"} if scored else {"lens"})
                if found := choice.model_extra["patchclamp"]["lens"]["resid_post[1]"]["positions"]:
                    is_last = choice.finish_reason is not None
                    assert text == "".join(tokens[: found[-1] - prompt + 1 + is_last])


def test_samples_of_several_prompts_have_lenses_of_their_own(server):
    asked = {**program(capture=LENSES), "ignore_eos": True}
    chunks = list(complete(server, asked, [PROMPT, "x"], n=2, stream=True, temperature=1.0, seed=7))
    runs = {run["index"]: run["lens"] for run in chunks[-1].model_extra["patchclamp"]["runs"]}
    assert len(runs) == 4
    assert len({str(run["resid_post[1]"]["tokens"]) for run in runs.values()}) == 4
    for index, lens in runs.items():
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert_same_lenses(lens_of(mine), lens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_rank", [0, -1])
def test_a_request_ends_at_the_first_token_where_the_score_fires(server, local, stream, by_rank):
    whole = local.run(PROMPT, max_tokens=16, capture=[SCORED], logprobs=True, sampling={"ignore_eos": True})
    token, threshold = firing(whole, by_rank)
    length = len(whole.prompt_token_ids) + token + 1
    asked = stopped(SCORED[0] > threshold, capture=["resid_post[5]"], keep=True)
    for _ in range(2):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        response = complete(server, asked, max_tokens=16, logprobs=1, stream=stream, **options)
        if stream:
            chunks = list(response)
            text, positions, scores, choices, last = read(chunks)
            usage = next(chunk.usage for chunk in chunks if chunk.usage)
            logprobs = [number for choice in choices for number in choice.logprobs.token_logprobs]
            ended = choices[-1]
            last = next(chunk for chunk in chunks if "patchclamp" in chunk.model_extra)
        else:
            [ended], last, usage = response.choices, response, response.usage
            text, logprobs = ended.text, ended.logprobs.token_logprobs
        assert (ended.finish_reason, ended.model_extra["stop_reason"]) == ("stop", "probe:p")
        assert text == local.tokenizer.decode(whole.token_ids[: token + 1])
        assert logprobs == pytest.approx(whole.logprobs[: token + 1], abs=1e-4)
        assert usage.completion_tokens == token + 1
        [told] = last.model_extra["patchclamp"]["runs"]
        assert told["probes"]["p"]["positions"] == list(range(length))
        assert told["probes"]["p"]["scores"][-1][0] > threshold
        if stream:
            assert (positions, scores) == (told["probes"]["p"]["positions"], told["probes"]["p"]["scores"])
        with server.http() as http:
            rows = safetensors.numpy.load(http.get(told["captures_url"]).content)["resid_post[5]"]
            assert http.delete(f"/v1/patchclamp/runs/{told['run']}").is_success
        assert len(rows) == length
    never = complete(server, stopped(SCORED > 1e9), max_tokens=16)
    assert (never.choices[0].finish_reason, never.choices[0].text) == ("length", whole.text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_rank", [0, -1])
def test_a_chat_ends_at_the_first_token_where_the_score_fires(server, local, stream, by_rank):
    """Text, token ids, log-probabilities and usage end at one token, also beside tools."""
    messages = [{"role": "user", "content": PROMPT}]
    whole = local.run(messages=messages, max_tokens=16, capture=[SCORED], logprobs=1, sampling={"ignore_eos": True})
    token, threshold = firing(whole, by_rank)
    asked = {**stopped(SCORED[0] > threshold), "return_token_ids": True, "return_tokens_as_token_ids": True}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

    def choices_of(**options):
        response = server.openai().chat.completions.create(
            model=server.model, messages=messages, max_tokens=16, temperature=0, stream=stream, logprobs=True,
            top_logprobs=2, extra_body=asked, **usage, **options,
        )  # fmt: skip
        answers = list(response) if stream else [response]
        [run] = next(each.model_extra["patchclamp"]["runs"] for each in answers if "patchclamp" in each.model_extra)
        tokens = next(each.usage.completion_tokens for each in answers if each.usage)
        return [each.choices[0] for each in answers if each.choices], run["probes"]["p"]["positions"], tokens

    choices, positions, tokens = choices_of()
    text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
    logprobs = [each.logprob for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert text == local.tokenizer.decode(whole.token_ids[: token + 1])
    assert [at for choice in choices for at in choice.model_extra.get("token_ids") or ()] == whole.token_ids[
        : token + 1
    ]
    assert logprobs == pytest.approx(whole.logprobs[: token + 1], abs=1e-4)
    assert positions == list(range(len(whole.prompt_token_ids) + token + 1))
    assert tokens == token + 1
    assert (choices[-1].finish_reason, choices[-1].model_extra["stop_reason"]) == ("stop", "probe:p")
    choices, positions, tokens = choices_of(tools=[tool], tool_choice="none")
    assert len([each for choice in choices if choice.logprobs for each in choice.logprobs.content]) == tokens
    is_stopped = choices[-1].model_extra["stop_reason"] == "probe:p"
    assert choices[-1].finish_reason == ("stop" if is_stopped else "length")


def test_samples_and_prompts_end_by_themselves(server, local):
    """Several prompts with two samples each, streamed and not: each equals the request alone."""
    prompts = [PROMPT, "x", "One two three four five"]
    wholes = [local.run(p, max_tokens=16, capture=[SCORED], sampling={"ignore_eos": True}) for p in prompts]
    threshold = float(torch.cat([run.probes["p"][len(run.prompt_token_ids) :, 0] for run in wholes]).quantile(0.8))
    asked = stopped(SCORED[0] > threshold)
    options = {"max_tokens": 16, "temperature": 1.0, "seed": 7}
    alone = [complete(server, asked, p, n=2, **options).choices for p in prompts]
    together = complete(server, asked, prompts, n=2, **options).choices
    assert [c.text for c in together] == [c.text for choices in alone for c in choices]
    assert len({len(c.text) for c in together}) > 2
    chunks = list(complete(server, asked, prompts, n=2, stream=True, **options))
    runs = {run["index"]: run["probes"]["p"] for run in chunks[-1].model_extra["patchclamp"]["runs"]}
    for index, choice in enumerate(together):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert "".join(each.text for each in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason
        parts = [each.model_extra["patchclamp"]["probes"]["p"] for each in mine if "patchclamp" in each.model_extra]
        assert [at for part in parts for at in part["positions"]] == runs[index]["positions"]
        assert [row for part in parts for row in part["scores"]] == runs[index]["scores"]


async def _disconnecting(server, asked):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0)
    stream = await client.completions.create(
        model=server.model, prompt=PROMPT, max_tokens=400, temperature=0, stream=True, extra_body=asked
    )
    async for _ in stream:
        break
    await stream.close()
    await client.close()


def test_a_client_that_disconnects_leaves_nothing_behind(server):
    asked, never = {**program(capture=[SCORED]), "ignore_eos": True}, stopped(SCORED > 1e9)
    read = {**program(capture=LENSES), "ignore_eos": True}

    async def together():
        await asyncio.gather(*(_disconnecting(server, each) for each in [asked, never, read] * 3))

    asyncio.run(together())
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        assert becomes(lambda: [lm.engine.status()[name] for name in ("programs", "requests")] == [0, 0], 60)


@pytest.mark.parametrize(
    ("condition", "path"),
    [
        ("p > 1", "stop_when"),
        ({"type": "above", "threshold": 1}, "stop_when.probe"),
        ({**condition_to_dict(SCORED > 1), "threshold": "high"}, "stop_when.threshold"),
        ({"type": "every", "conditions": []}, "stop_when.conditions"),
        (condition_to_dict(pc.Probe(VECTOR, at=pc.resid_post[3], pool="max", name="m") > 1), "stop_when.pool"),
        (condition_to_dict(SCORED[2] > 1), "stop_when"),
        (condition_to_dict(pc.Probe(VECTOR, at=pc.resid_post[3], tokens=pc.prompt, name="m") > 1), "stop_when"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("edits", [0, 40])
def test_malformed_conditions_are_refused(server, condition, path, stream, edits):
    """Also where the program is long, and bound on another thread."""
    same = [{"type": "scale", "factor": 1, "at": "attn_out[0]"}] * edits
    with pytest.raises(openai.BadRequestError) as raised:
        complete(server, {"patchclamp": {"stop_when": condition, "edits": same}}, "word " * 200, stream=stream)
    assert raised.value.param == f"patchclamp.{path}"
