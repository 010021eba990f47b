"""Vectors and programs by name: put, used, read, listed and deleted, each by the key that put them."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest
import safetensors.numpy
from safetensors.numpy import save
from typer.testing import CliRunner

import patchclamp as pc
from patchclamp.cli.study_commands import app
from patchclamp.language.program import to_dict

from .conftest import KEYS
from .test_openai import PROMPT, VECTOR, complete, program, tensors

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def http(http):
    yield http
    for kind in ("vectors", "programs"):
        for card in http.get(f"/v1/patchclamp/{kind}").json()[kind]:
            assert http.delete(f"/v1/patchclamp/{kind}/{card['name']}").status_code == 200


def test_a_vector_is_put_used_read_and_deleted(server, local, http):
    run = local.run(PROMPT, max_tokens=6, edits=[pc.Add(VECTOR, at=pc.resid_post[3], scale=2.0)], logprobs=True)
    named = program([pc.Add("calm", at=pc.resid_post[3], scale=2.0)])
    with pytest.raises(openai.NotFoundError, match="calm"):
        complete(server, named)
    card = http.put("/v1/patchclamp/vectors/calm", content=save({"anything": VECTOR})).json()
    assert card == {"name": "calm", "shape": [144], "bytes": 4 * 144, "sites": None}
    response = complete(server, named, logprobs=1)
    assert response.choices[0].logprobs.token_logprobs == run.logprobs
    assert complete(server, logprobs=1).choices[0].logprobs.token_logprobs != run.logprobs
    kept = complete(server, program(capture=[pc.Capture("resid_post[3]", project="calm")])).model_extra["patchclamp"]
    here = local.run(PROMPT, max_tokens=6, capture=[pc.Capture("resid_post[3]", project=VECTOR)])
    assert np.array_equal(tensors(kept["runs"][0]["captures"])["resid_post[3]"], here["resid_post[3]"])
    read = http.get("/v1/patchclamp/vectors/calm").content
    assert np.array_equal(safetensors.numpy.load(read)["calm"], VECTOR)
    assert http.put("/v1/patchclamp/vectors/again", content=read).json()["shape"] == [144]
    listed = http.get("/v1/patchclamp/vectors").json()
    assert [card["name"] for card in listed["vectors"]] == ["calm", "again"]
    assert listed["named_bytes"] == 2 * 4 * 144
    assert http.delete("/v1/patchclamp/vectors/calm").json() == {"deleted": "calm"}
    assert http.get("/v1/patchclamp/vectors/calm").status_code == 404
    with pytest.raises(openai.NotFoundError, match="calm"):
        complete(server, named)


def test_numbers_as_json_are_the_same_vector(http):
    put = http.put("/v1/patchclamp/vectors/rows", content=json.dumps([[1, 2.5], [3, -4]]), headers=JSON)
    assert put.json()["shape"] == [2, 2]
    rows = safetensors.numpy.load(http.get("/v1/patchclamp/vectors/rows").content)["rows"]
    assert np.array_equal(rows, np.float32([[1, 2.5], [3, -4]]))


def test_means_are_put_and_written_where_an_op_names_them(server, local, http):
    local.bank.mean("usual", local.run(["One", "Two words"], max_tokens=1, capture=[pc.attn_out]), pc.attn_out)
    edit = pc.Mean("usual", at=pc.attn_out[2])
    run = local.run(PROMPT, max_tokens=6, edits=[edit], logprobs=True)
    means = local.bank["usual"]
    rows = np.stack([row.array() for row in means.rows.values()])
    file = save({"usual": rows}, {"means": json.dumps({"usual": list(means.rows)})})
    assert http.put("/v1/patchclamp/vectors/usual", content=file).json()["sites"] == list(means.rows)
    assert complete(server, program([edit]), logprobs=1).choices[0].logprobs.token_logprobs == run.logprobs
    again = http.get("/v1/patchclamp/vectors/usual").content
    assert http.put("/v1/patchclamp/vectors/copied", content=again).json()["sites"] == list(means.rows)


def test_a_program_is_put_used_and_read(server, local, http):
    edits = [pc.Add(VECTOR, at=pc.resid_post[3], scale=2.0), pc.Noise(0.25, at=pc.resid_mid[1], seed=4)]
    text = {"edits": to_dict(pc.Program.of(edits))["edits"]}
    card = http.put("/v1/patchclamp/programs/module", json=text).json()
    assert card["edits"] == 2
    assert card["fingerprint"] == pc.Program.of(edits).fingerprint
    assert http.get("/v1/patchclamp/programs/module").json() == json.loads(json.dumps(text))
    assert http.get("/v1/patchclamp/programs").json() == {"programs": [card]}
    local.bank["module"] = edits
    run = local.run(PROMPT, max_tokens=6, edits=[pc.Use("module", scale=0.5)], logprobs=True)
    response = complete(server, program([pc.Use("module", scale=0.5)]), logprobs=1)
    assert response.choices[0].logprobs.token_logprobs == run.logprobs


def test_a_name_is_one_things(server, http):
    vector, scale = save({"x": VECTOR}), {"edits": [{"type": "scale", "factor": 0.5, "at": "embed"}]}
    assert http.put("/v1/patchclamp/vectors/one", content=vector).status_code == 200
    taken = http.put("/v1/patchclamp/programs/one", json=scale)
    assert taken.status_code == 409
    assert "'one' is already a vector" in taken.json()["error"]["message"]
    with pytest.raises(openai.ConflictError, match="'one' is already a vector"):
        complete(server, program(capture=[pc.embed], run="one"), max_tokens=1)
    complete(server, program(capture=[pc.embed], run="two"), max_tokens=1)
    for kind, body in (("vectors", {"content": vector}), ("programs", {"json": scale})):
        assert http.put(f"/v1/patchclamp/{kind}/two", **body).status_code == 409
    assert http.delete("/v1/patchclamp/runs/two").status_code == 200
    assert http.put("/v1/patchclamp/vectors/two", content=vector).status_code == 200


def test_another_key_has_another_bank(server, http):
    assert http.put("/v1/patchclamp/vectors/calm", content=save({"x": VECTOR})).status_code == 200
    with server.http("another-key") as other:
        assert other.get("/v1/patchclamp/vectors").json()["vectors"] == []
        assert other.get("/v1/patchclamp/vectors/calm").status_code == 404
        assert other.delete("/v1/patchclamp/vectors/calm").status_code == 404
        assert other.put("/v1/patchclamp/vectors/calm", content=save({"x": -VECTOR})).status_code == 200
        assert other.delete("/v1/patchclamp/vectors/calm").status_code == 200
    mine = safetensors.numpy.load(http.get("/v1/patchclamp/vectors/calm").content)["calm"]
    assert np.array_equal(mine, VECTOR)


def test_a_program_that_could_never_run_is_not_kept(http):
    for edits, status, text in (
        (
            [{"type": "scale", "factor": 0, "at": "attn_out[99]"}],
            422,
            "edits[0].at: attn_out[99]: layer is out of range",
        ),
        ([{"type": "scale", "factor": 0, "at": "attn_oot[1]"}], 400, "edits[0].at: unknown site"),
        ([{"type": "capture", "at": "embed"}], 400, "without captures"),
        ([], 400, "without captures"),
        ([{"type": "apply", "fn": "print", "at": "embed"}], 400, "edits[0].type: unknown op 'apply'"),
    ):
        response = http.put("/v1/patchclamp/programs/wrong", json={"edits": edits})
        assert response.status_code == status
        assert text in response.json()["error"]["message"]
    assert http.get("/v1/patchclamp/programs").json() == {"programs": []}


def test_a_bank_is_pushed(server, local, http, tmp_path):
    bank = type(local.bank)()
    bank["calm"], bank["quiet"] = VECTOR, [pc.Scale(0.25, at=pc.resid_post[3]), pc.Add("calm", at=pc.resid_post[4])]
    bank.mean("usual", [local.run(PROMPT, max_tokens=1, capture=[pc.mlp_out[2]])], pc.mlp_out[2])
    assert bank.push(server.url, api_key=KEYS[0]) == ["calm", "quiet", "usual"]
    named = local.run(PROMPT, max_tokens=6, logprobs=True, edits=[
        pc.Scale(0.25, at=pc.resid_post[3]), pc.Add(VECTOR, at=pc.resid_post[4])])  # fmt: skip
    response = complete(server, program([pc.Use("quiet")]), logprobs=1)
    assert response.choices[0].logprobs.token_logprobs == named.logprobs
    assert http.get("/v1/patchclamp/vectors").json()["vectors"][1]["sites"] == ["mlp_out[2]"]
    np.save(tmp_path / "again.npy", VECTOR)
    bank.save(tmp_path / "quiet.safetensors", ["quiet"])
    (tmp_path / "half.json").write_text('{"type": "scale", "factor": 0.5, "at": "mlp_out[1]"}')
    (tmp_path / "listed.json").write_text(str([float(number) for number in np.asarray(VECTOR)]))
    for file, name in (
        ("again.npy", "again"),
        ("listed.json", "listed"),
        ("quiet.safetensors", "silent"),
        ("half.json", "half"),
    ):
        status = CliRunner().invoke(app, ["push", server.url, name, str(tmp_path / file), "--api-key", KEYS[0]])
        assert status.exit_code == 0, status.output
    assert {card["name"] for card in http.get("/v1/patchclamp/programs").json()["programs"]} == {
        "quiet",
        "silent",
        "half",
    }
    again, listed = (http.get(f"/v1/patchclamp/vectors/{name}").content for name in ("again", "listed"))
    assert listed[-len(VECTOR) * 4 :] == again[-len(VECTOR) * 4 :]
    for change, text in [(lambda: bank.push(server.url, api_key="wrong"), "rejected 'calm'"),
                         (lambda: bank.push("http://127.0.0.1:9"), "no response")]:  # fmt: skip
        with pytest.raises(pc.EngineError, match=text):
            change()
    bank["late"] = pc.Zero(at=pc.resid_post[99])
    with pytest.raises(pc.EngineError, match=r"rejected 'late'.*resid_post\[99\]"):
        bank.push(server.url, ["late"], api_key=KEYS[0])
    with pytest.raises(pc.MissingSource, match="'nobody'"):
        bank.push(server.url, ["nobody"], api_key=KEYS[0])
