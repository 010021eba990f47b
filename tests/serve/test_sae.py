"""Attached SAEs over HTTP: read and set by plain clients, and by ours, as on an engine of one's own."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import httpx
import msgspec
import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

import patchclamp as pc
from patchclamp.cli.study_commands import app
from patchclamp.engines import wire
from patchclamp.engines.base import Wanted
from patchclamp.engines.vllm.server import with_config

from .conftest import KEYS, Server, in_parts
from .test_openai import program
from .test_sweeps import events

PROMPTS = ["The capital of France is", "Water boils at a temperature of one hundred degrees, and it", "x"]
SITE = pc.resid_post[3]


@pytest.fixture(scope="module")
def here(local, saes) -> Iterator[pc.LM]:
    for name in ("plain", "topk"):
        local.attach(saes[name], at=SITE, name=name)
    yield local
    for name in ("plain", "topk"):
        local.detach(name)


def test_a_plain_client_reads_and_sets_features(server: Server, here: pc.LM, saes):
    capture = [pc.Features("plain", top=5), pc.Features("topk", pc.prompt[-1], ids=[3, 8])]
    edits = [pc.SetFeature("plain", [3, 8], [9.0, 0.0]), pc.SetFeature("topk", 5, 2.0, pc.generated)]
    response = server.openai().completions.create(
        model=server.model, prompt=PROMPTS[1], max_tokens=4, temperature=0,
        extra_body=program(edits, capture),
    )  # fmt: skip
    [told] = response.model_extra["patchclamp"]["runs"]
    run = here.run(PROMPTS[1], max_tokens=4, edits=edits, capture=capture)
    assert response.choices[0].text == run.text
    assert told["features"].keys() == {"plain", "topk"}
    for name, read in told["features"].items():
        assert read["positions"] == run.features[name].positions
        np.testing.assert_allclose(read["values"], run.features[name].values, atol=1e-4)
    assert told["features"]["topk"]["ids"] == [[3, 8]]
    assert max(map(max, told["features"]["plain"]["values"])) > 5  # the edited row is read
    plain = here.run(PROMPTS[1], max_tokens=4)
    assert plain.text != run.text


def test_our_client_does_what_the_engine_does(server: Server, here: pc.LM, saes):
    capture = [pc.Features("plain", top=4), pc.Features("topk", pc.generated, ids=[1, 2, 3])]
    edits = [
        [pc.SetFeature("plain", 7, 3.0, mode="scale")], [pc.Reconstruct("topk", pc.prompt[1:])],
        [pc.When(pc.Features("plain", ids=[9])[0] > 0.5, pc.Scale(0.2, pc.mlp_out[5]))],
    ]  # fmt: skip
    asked = {"max_tokens": 3, "edits": edits, "capture": capture, "logprobs": True, "sampling": {"ignore_eos": True}}
    ours = here.run(PROMPTS, **asked)
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        theirs = lm.run(PROMPTS, **asked)
        lm.lens(theirs)
        for run, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(run.logprobs, other.logprobs, atol=1e-3)
            assert run.acted == other.acted
            for name in ("plain", "topk"):
                assert run.features[name].positions == other.features[name].positions
                np.testing.assert_allclose(run.features[name].values, other.features[name].values, atol=1e-4)
        programs = [pc.SetFeature("plain", i, 4.0) for i in range(12)]
        one, two = (each.grade(PROMPTS[0], programs, score=[260, 198]) for each in (here, lm))
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-3)
        assert two.route == "bulk"
        with pytest.raises(pc.EngineError, match="patchclamp serve --sae"):
            lm.attach(saes["plain"], at=SITE, name="mine")
        for call, message in {
            lambda: lm.run("x", capture=pc.Features("none")): "SAE 'none'",
            lambda: lm.run("x", edits=pc.SetFeature("plain", 48, 1.0)): "from 0 to 47, got 48",
        }.items():
            with pytest.raises(pc.PatchclampError, match=message):
                call()


@pytest.mark.parametrize("n", [1, 2])
def test_features_come_with_each_chunk(server: Server, here: pc.LM, saes, n: int):
    """Of both clients: those of the rows, which the engine in this process has; beside a lens, and samples' own."""
    capture = [pc.Features("plain", top=3), pc.Features("topk", pc.generated, ids=[8, 2]), SITE]
    asked = {**program([], [*capture, pc.Lens(pc.resid_post[2], top=1)]), "ignore_eos": True}

    def told_of(chunks: list, index: int) -> list:
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        return [choice.model_extra["patchclamp"] for choice in choices if "patchclamp" in choice.model_extra]

    chunks = in_parts(
        lambda: list(server.openai().completions.create(
            model=server.model, prompt=PROMPTS[1], max_tokens=12, temperature=float(n > 1), seed=3, n=n, stream=True,
            extra_body=asked,
        )), lambda chunks: min(len(told_of(chunks, index)) for index in range(n)), 3,
    )  # fmt: skip
    runs = {run["index"]: run for run in chunks[-1].model_extra["patchclamp"]["runs"]}
    assert sorted(runs) == list(range(n))
    length = len(here.tokens(PROMPTS[1]))
    for index, run in runs.items():
        told = told_of(chunks, index)
        rows = safetensors.numpy.load(base64.b64decode(run["captures"]))["resid_post[3]"]
        for part in told:
            assert part.keys() == {"lens", "features"}
            assert part["features"]["plain"]["positions"] == part["lens"]["resid_post[2]"]["positions"]
        for name in ("plain", "topk"):
            read = [part["features"][name] for part in told]
            positions, ids, values = (
                [each for one in read for each in one[of]] for of in ("positions", "ids", "values")
            )
            assert positions == list(range(0 if name == "plain" else length, length + 11))
            every = saes[name].encode(rows)[positions]
            best = np.sort(every, 1)[:, ::-1][:, :3] if name == "plain" else every[:, [8, 2]]
            np.testing.assert_allclose(values, best, atol=1e-4)
            np.testing.assert_allclose(np.take_along_axis(every, np.array(ids), 1), best, atol=1e-4)
            assert (positions, ids) == (run["features"][name]["positions"], run["features"][name]["ids"])
    if n == 1:
        options = {"max_tokens": 12, "sampling": {"ignore_eos": True}, "capture": capture}
        expected = here.run(PROMPTS[1], **options)
        with pc.LM(server.url, api_key=KEYS[0]) as lm:
            stream = lm.stream(PROMPTS[1], **options)
            parts = list(stream)
            assert stream.run.token_ids == expected.token_ids
            for name in ("plain", "topk"):
                found = [part.features[name] for part in parts]
                assert [at for each in found for at in each.positions] == expected.features[name].positions
                values = np.concatenate([each.values for each in found])
                np.testing.assert_allclose(values, expected.features[name].values, atol=1e-4)
            stream.run.close()


def test_an_sae_is_evaluated_on_the_server_and_from_a_client(server: Server, here: pc.LM, saes):
    """By name on the server, which has its numbers; from a client by the same numbers, or not at all."""
    body = {"sae": "topk", "prompts": PROMPTS[:2], "tokens": "every[1:]", "ablation": "mean"}
    expected = pc.studies.evaluate_sae(here, **body)
    with server.http() as http:
        with http.stream("POST", "/v1/patchclamp/studies/evaluate_sae", json=body) as response:
            *_, (kind, told) = events(response.iter_lines())
        assert kind == "result"
        found = pc.studies.load(base64.b64decode(told["safetensors"]))
        for wrong in ("none", {"type": "SAE"}, str(saes["folder"] / "topk")):  # a server reads no path
            answer = http.post("/v1/patchclamp/studies/evaluate_sae", json={**body, "sae": wrong})
            assert answer.status_code in (400, 404)
            assert answer.json()["error"]["message"].startswith("sae: ")
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        theirs = pc.studies.evaluate_sae(lm, saes["topk"], PROMPTS[:2], at=SITE, tokens="every[1:]", ablation="mean")
        with pytest.raises(pc.ProgramError, match=r"sae: .*SAE\.load"):
            pc.studies.evaluate_sae(lm, **body)
    for other in (found, theirs):
        np.testing.assert_allclose(other.losses, expected.losses, atol=1e-3)
        np.testing.assert_allclose(other.density, expected.density)
    assert abs(expected.totals["loss_sae"] - expected.totals["loss"]) > 0.1


@pytest.fixture(scope="module")
def gradients(model: str) -> Iterator[pc.LM]:
    with pc.LM(model, engine="transformers", dtype="float32") as lm:
        yield lm


@pytest.mark.parametrize("name", ["plain", "topk"])
def test_features_are_ablated_on_the_server_and_from_a_client(
    server: Server, here: pc.LM, gradients: pc.LM, saes, name: str
):
    """All on the server, by the name of the SAE; from a client all, or those that gradients in the client propose."""
    asked = {
        "prompt": PROMPTS[0],
        "answer": " Paris",
        "foil": " Rome",
        "tokens": "every[1:]",
        "by_token": name == "topk",
    }
    swept = {"sae": saes[name], "at": SITE, "estimate": False, **asked}
    expected, body = pc.studies.feature_attribution(here, **swept), {**asked, "sae": name, "estimate": False}
    with server.http() as http:
        with http.stream("POST", "/v1/patchclamp/studies/feature_attribution", json=body) as response:
            told = list(events(response.iter_lines()))
        found = pc.studies.load(
            b"".join(base64.b64decode(part["safetensors"]) for kind, part in told if kind == "result")
        )
        done = [each for kind, each in told if kind == "progress"]
        assert {each["of"] for each in done} == {2 + len(expected.features) + len(expected.sizes)}
        assert 0 < done[-1]["done"] <= done[-1]["of"]
        for change, status, path in (({"estimate": True}, 422, "estimate"), ({"sae": "none"}, 400, "sae"),
                                     ({"tokens": "prompt[900]"}, 400, "tokens")):  # fmt: skip
            answer = http.post("/v1/patchclamp/studies/feature_attribution", json=body | change)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, path)
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        theirs = pc.studies.feature_attribution(lm, **swept)
        proposed = pc.studies.feature_attribution(gradients, on=lm, **{**swept, "estimate": True, "verify": 6})
        with pytest.raises(pc.UnsupportedStudy, match="gradients"):
            pc.studies.feature_attribution(lm, **{**swept, "estimate": True})
    for other in (found, theirs):
        assert other.features.tolist() == expected.features.tolist()
        np.testing.assert_allclose(other.exact, expected.exact, atol=1e-3)
        np.testing.assert_allclose(other.kept, expected.kept, atol=5e-3)
    assert np.abs(expected.exact).max() > 0.01
    engines = (proposed.provenance.engine.split()[0], proposed.verified_on.engine.split()[0])
    assert engines == ("transformers", "vllm")
    assert proposed.features.tolist() == expected.features.tolist()
    best = np.flatnonzero(np.isfinite(proposed.exact))
    assert set(best) == set(np.argsort(-np.abs(proposed.estimates), kind="stable")[:6])
    np.testing.assert_allclose(proposed.exact[best], expected.exact[best], atol=2e-3)
    assert abs(proposed.faithfulness[-1] - 1) < 1e-2


def test_features_are_harvested_from_a_client(server: Server, here: pc.LM, tmp_path):
    """By the name of the server's SAE, as here; top contexts are read from the harvest. Adapters are not served."""
    sites = [pc.Features("plain", top=6), SITE, pc.Features("topk", ids=[*range(24)])]
    asked = {"dtype": "float32", "shard_rows": 9, "batch_tokens": 12}
    with pc.LM(server.url, api_key=KEYS[0]) as lm:
        there = pc.studies.harvest(lm, PROMPTS, tmp_path / "there", sites=sites, **asked).open()
        local = pc.studies.harvest(here, PROMPTS, tmp_path / "here", sites=sites, **asked).open()
        for name in ("plain", "topk"):
            ours, theirs = (data.features(name).to_pydict() for data in (local, there))
            np.testing.assert_allclose(theirs.pop("value"), ours.pop("value"), atol=1e-4)
            assert ours == theirs
        feature = ours["feature"][0]
        contexts = [
            pc.studies.top_contexts(each, sae="topk", harvest=data, features=[feature]).contexts
            for each, data in ((here, local), (lm, there))
        ]
        made = pc.studies.top_contexts(lm, sae="topk", documents=PROMPTS, folder=tmp_path / "made")
    assert [(one.document, one.position, one.tokens) for one in contexts[0]] == [
        (one.document, one.position, one.tokens) for one in contexts[1]
    ] != []  # fmt: skip
    assert set(zip(*list(ours.values()), strict=True)) <= set(
        zip(*list(made.table().drop(["value"]).to_pydict().values()), strict=True)
    )
    (tmp_path / "texts.txt").write_text("\n".join(PROMPTS))
    words = ["harvest", server.url, str(tmp_path / "texts.txt"), str(tmp_path / "there"), "--shard-rows", "9",
             "--store", "float32", "--site", str(SITE), "--site", '{"type": "features", "name": "plain", "top": 6}',
             "--site", json.dumps({"type": "features", "name": "topk", "ids": [*range(24)]})]  # fmt: skip
    done = CliRunner().invoke(app, words, env={"VLLM_API_KEY": KEYS[0], "COLUMNS": "200"})
    assert done.output.splitlines()[0] == str(there.folder), done.output
    assert f"{len(there)} rows of resid_post[3], features of plain, features of topk" in done.output
    with server.http() as http:
        answer = http.post("/v1/patchclamp/studies/adapter_features", json={"sae": "plain", "prompts": ["x"]})
        assert answer.status_code == 422
        assert "adapter" in answer.json()["error"]["message"]


def test_a_hostile_client_gets_errors(server: Server, here: pc.LM):
    """Other SAEs, features and rows than there are, and rows of another key."""
    with pc.LM(server.url, api_key=KEYS[1]) as other:
        run = other.run(PROMPTS[0], max_tokens=1, capture=pc.Features("plain"))
        mine, [(point, op)] = run.key, run._feature_ops.values()
        posts = {
            "dictionary": [wire.DictionaryWanted("none", [1]), wire.DictionaryWanted("plain", [-1]),
                           wire.DictionaryWanted("plain", [1] * 5000)],
        }  # fmt: skip
        with server.http(KEYS[1]) as http:
            for route, bodies in posts.items():
                for body in bodies:
                    answer = http.post(f"{wire.PREFIX}/{route}", content=msgspec.msgpack.encode(body))
                    assert 400 <= answer.status_code < 500, (route, body)
        with server.http(KEYS[0]) as http:  # rows of another key
            fetch = msgspec.msgpack.encode(wire.Fetch([Wanted(mine, point, op)]))
            assert http.post(f"{wire.PREFIX}/fetch", content=fetch).status_code == 404
    for bad in ({"type": "features", "name": "none"}, {"type": "features", "name": "plain", "ids": [48]},
                {"type": "features", "name": "plain", "top": 1000}):  # fmt: skip
        body = {"model": server.model, "prompt": "x", "max_tokens": 1, "patchclamp": {"capture": [bad]}}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEYS[0]}"})
        assert answer.status_code in (400, 404), answer.text


def test_the_options_of_a_server():
    config = msgspec.json.decode(
        with_config(["--sae", "a=x@resid_post[1]", "--sae=b=y", "--sae-precision", "model"])[-1]
    )
    assert config["patchclamp"] == {"saes": ["a=x@resid_post[1]", "b=y"], "sae_precision": "model"}
