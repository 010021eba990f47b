"""Sweeps over HTTP: cells as they finish, the same as here, and an end when the client goes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json

import numpy as np
import pytest

from patchclamp.language.site import SITES
from patchclamp.serve.capture_files import StoppedResponse
from patchclamp.serve.served_studies import KINDS, schema_of
from patchclamp.studies import MeanOf, Resampled, load, patch_sweep

from .conftest import KEYS, becomes

ASKED = {"clean": "The Eiffel Tower is in", "corrupt": "The Colosseum is in", "answer": " Paris", "foil": " Rome",
         "sites": ["resid_pre", "mlp_out"]}  # fmt: skip


LONGER = ASKED | {side: ASKED[side].removesuffix(" is in") + ", which is in another city," * 4 + " is in"
                  for side in ("clean", "corrupt")}  # fmt: skip


def events(lines):
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def test_a_sweep_is_the_same_as_here(server, local):
    with server.http() as http, http.stream("POST", "/v1/patchclamp/studies/patch_sweep", json=ASKED) as response:
        assert response.status_code == 200
        told = list(events(response.iter_lines()))
    here = patch_sweep(local, **ASKED)
    start, *parts, summary, result = told
    assert start[0] == "start"
    assert {name for name, _ in parts} == {"cells"}
    assert (result[0], result[1]["type"], result[1]["part"], result[1]["parts"]) == ("result", "PatchSweepResult", 0, 1)
    there = load(base64.b64decode(result[1]["safetensors"]))
    np.testing.assert_allclose(there.grid, here.grid, atol=1e-3)
    assert there.config == here.config == {"study": "PatchSweep", **ASKED}
    assert parts
    grid = np.full(here.grid.shape, np.nan)
    for _, data in parts:
        for site, layer, column, value in data["cells"]:
            assert np.isnan(grid[site, layer, column])
            grid[site, layer, column] = value
    np.testing.assert_allclose(grid, here.grid, atol=1e-3)
    assert start[1]["cells"] == np.isfinite(grid).sum() > 64
    assert [column["label"] for column in start[1]["columns"]] == [column.label for column in here.columns]
    assert start[1]["clean"] == pytest.approx(here.clean, abs=1e-3)
    assert summary[0] == "summary"
    assert [cell["site"] for cell in summary[1]["best"]] == [cell.site for cell in here.best(5)]


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"sites": ["resid_pro"]}, 400, "resid_pro"),
        ({"answer": ""}, 400, "token"),
        ({"direction": "forward"}, 400, "forward"),
        ({"layers": 99}, 422, "layers"),
        ({"metric": "loss"}, 400, "loss"),
        ({"what": 1}, 400, "what"),
        ({"window": True}, 400, "window"),
        ({"seed": "1"}, 400, "seed"),
        ({"clean": [5.0, True]}, 400, "clean"),
        ({"source": {"type": "mean", "prompts": ["a"], "file": "/etc/passwd"}}, 400, "file"),
        ({"source": {"type": "file", "prompts": ["a"]}}, 400, "source"),
        ({"source": "zero"}, 400, "source: "),
        ({"source": "bank:nobody"}, 404, "source: unknown bank entry 'nobody'"),
        ({"mask": "nobody"}, 404, "mask: unknown bank entry 'nobody'"),
        ({"mask": [1.0, 0.5]}, 400, "mask: resid_pre[0]: "),
        ({"resume": "../a"}, 400, "resume: "),
        ({"zoom": 0}, 400, "zoom"),
        ({"weights": "/etc"}, 400, "weights"),
        ({"clean": ["a b c"] * 2}, 400, "corrupt: "),
        ({"sites": ["resid_pre"] * 65}, 400, "sites"),
        ({"clean": ["a b"] * 7, "corrupt": ["a b"] * 7}, 413, "limit sweep_prompts"),
        ({"source": {"type": "mean", "prompts": ["a"] * 11}}, 413, "limit sweep_prompts"),
        ({"sites": ["neurons"], "group": 1}, 413, "limit sweep_grid"),
        ({"answer": [7] * 300}, 413, "limit sweep_cells"),
        ({"source": {"type": "resampled", "prompts": ["a b"], "draws": 300}}, 413, "limit sweep_cells"),
        (
            {
                "source": {"type": "resampled", "prompts": [[5] * 500] * 10},
                "sites": ["resid_pre", "z", "mlp_out", "neurons", "q"],
            },
            413,
            "limit run_bytes",
        ),
        ({"clean": ""}, 400, ""),
    ],
)
def test_what_is_wrong_is_said_before_it_starts(server, change, status, text):
    with server.http() as http:
        response = http.post("/v1/patchclamp/studies/patch_sweep", json=ASKED | change)
    assert response.status_code == status, response.text
    assert text in response.text


def test_the_schema_has_every_field_but_those_of_files():
    for name, kind in KINDS.items():
        if not kind.not_served:
            hidden = {"weights", "translators", "unembedding", "refusal"}
            properties = schema_of(kind)["properties"]
            assert properties.keys() - {"resume"} == kind.fields().keys() - hidden, name
            assert all(of["description"] for of in properties.values())


PAIRS = {"clean": ["The Eiffel Tower is in", "The Louvre is in", [5, 6, 7]],
         "corrupt": ["The Colosseum is in", "The Forum is in", [5, 9, 7]], "answer": [" Paris", " Paris", 30],
         "foil": " Rome", "sites": ["resid_pre", "z"], "layers": "2:5",
         "positions": {"what": [1, "prompt[2]", 1], "end": "prompt[-1]"}, "seed": 3}  # fmt: skip
OTHERS = ["The Kremlin is in", "A cat is here"]


def run(server, body, key=KEYS[0]) -> dict[str, list]:
    """The events of a sweep, by name."""
    told: dict[str, list] = {}
    with server.http(key) as http, http.stream("POST", "/v1/patchclamp/studies/patch_sweep", json=body) as response:
        assert response.status_code == 200, response.read()
        for name, data in events(response.iter_lines()):
            told.setdefault(name, []).append(data)
    assert "error" not in told, told["error"]
    return told


def grid_of(told, shape) -> np.ndarray:
    grid = np.full(shape, np.nan)
    for data in told["cells"]:
        for site, layer, column, value in data["cells"]:
            grid[site, layer, column] = value
    return grid


def test_several_pairs_have_their_spread(server, local):
    told, here = run(server, PAIRS), patch_sweep(local, **PAIRS)
    np.testing.assert_allclose(grid_of(told, here.grid.shape), here.grid, atol=1e-3)
    [start], [spread] = told["start"], told["spread"]
    assert [pair["columns"][0]["corrupt"] for pair in start["pairs"]] == [
        list(pair.columns[0].corrupt) for pair in here.pairs
    ]
    assert [pair["clean"] for pair in start["pairs"]] == pytest.approx([pair.clean for pair in here.pairs], abs=1e-3)
    names = ("low", "high", "effect_low", "effect_high", "p", "p_family")
    *ends, p, p_family = (here.as_grid(getattr(here, name)) for name in names)
    each = [here.as_grid(values) for values in here.each]
    assert len(spread["cells"]) == len(spread["each"]) == here.values.size
    for (site, layer, column, *found), of_pairs in zip(spread["cells"], spread["each"], strict=True):
        at = site, layer, column
        assert found[:4] == pytest.approx([of[at] for of in ends], abs=1e-3)
        assert found[4:] == [p[at], p_family[at]]
        assert of_pairs == pytest.approx([values[at] for values in each], abs=1e-3)
    assert set(np.unique(p * 8).tolist()) <= {2, 4, 6, 8}, "three pairs have eight signs"


def test_sources_masks_and_a_zoom_are_the_same_as_here(server, local):
    mask = (np.arange(144) % 3 == 0).astype(float).tolist()
    vector = np.linspace(-1, 1, 144).tolist()
    plain = grid_of(run(server, ASKED), (2, 8, 99))
    with server.http() as http:
        assert http.put("/v1/patchclamp/vectors/swept", json=vector).status_code == 200
        assert http.put("/v1/patchclamp/vectors/third", json=mask).status_code == 200
    local.bank["swept"], local.bank["third"] = vector, mask
    length = len(local.tokens(ASKED["corrupt"]))
    drawn = [list(range(40 * i, 40 * i + length)) for i in (1, 2, 3)]
    try:
        for change, as_here in (
            ({"source": "zeros", "alpha": 0.5}, {}),
            ({"source": "bank:swept", "mask": "third"}, {}),
            ({"mask": mask}, {}),
            (
                {"source": {"type": "mean", "prompts": OTHERS, "tokens": "prompt[1:]"}},
                {"source": MeanOf(OTHERS, "prompt[1:]")},
            ),
            (
                {"source": {"type": "resampled", "prompts": drawn, "seed": 4, "draws": 2}},
                {"source": Resampled(drawn, 4, 2)},
            ),
            ({"zoom": 2}, {}),
        ):
            body = ASKED | {"layers": "1:4"} | change
            told, here = run(server, body), patch_sweep(local, **(body | as_here))
            grid = grid_of(told, here.grid.shape)
            np.testing.assert_allclose(grid, here.grid, atol=1e-3)
            assert told["start"][0]["source"] == here.source
            columns = grid.shape[2]
            assert change == {"zoom": 2} or np.nanmax(np.abs(grid - plain[:, 1:4, :columns])) > 0.01
            blocks = told["summary"][0]["blocks"]
            assert len(blocks) == len(here.blocks)
            assert [of["value"] for of in blocks] == pytest.approx([of.value for of in here.blocks], abs=1e-3)
            assert bool(blocks) == ("zoom" in change)
        # names are each key's own
        for change in ({"source": "bank:swept"}, {"mask": "third"}):
            with server.http(KEYS[1]) as http:
                assert http.post("/v1/patchclamp/studies/patch_sweep", json=ASKED | change).status_code == 404
    finally:
        del local.bank["swept"], local.bank["third"]
        with server.http() as http:
            for name in ("swept", "third"):
                http.delete(f"/v1/patchclamp/vectors/{name}")


def test_a_sweep_whose_client_went_away_goes_on(server):
    body = LONGER | {"layers": "2:5", "resume": "left"}
    with server.http() as http:
        with http.stream("POST", "/v1/patchclamp/studies/patch_sweep", json=body) as response:
            left = next(data["cells"] for name, data in events(response.iter_lines()) if name == "cells")
        before = programs(http)
        whole = run(server, body | {"resume": "whole"})
        whole_took = programs(http) - before
        before = programs(http)
        told = run(server, body)
        took = programs(http) - before
    cells = [cell for data in told["cells"] for cell in data["cells"]]
    assert cells[: len(left)] == left, "what was computed is told first, as it was"
    assert took <= whole_took - len(left)
    assert took > 0
    of_whole = [cell for data in whole["cells"] for cell in data["cells"]]
    np.testing.assert_allclose(sorted(cells), sorted(of_whole), atol=1e-3)
    with server.http() as http:
        before = programs(http)
        again = run(server, body)
        assert [cell for data in again["cells"] for cell in data["cells"]] == cells
        assert programs(http) == before, "all is known"
        other = http.post("/v1/patchclamp/studies/patch_sweep", json=body | {"layers": "0:2"})
        assert (other.status_code, "different study" in other.text) == (400, True)
    run(server, ASKED | {"layers": 1, "resume": "left"}, KEYS[1])  # another key's name is another one


def programs(http) -> int:
    """How many programs the server has run."""
    lines = http.get("/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("patchclamp:programs_total{")))


def test_matched_subjects_are_the_same_as_here(server, local):
    match = {"clean": "span('Statue of Liberty')", "corrupt": "span('Big Ben')", "align": "first"}
    body = {"clean": "The Statue of Liberty is in", "corrupt": "Big Ben is in", "answer": " Paris", "foil": " Rome",
            "layers": [1, 4], "positions": [match, -1]}  # fmt: skip
    there, here = load(base64.b64decode(run(server, body)["result"][0]["safetensors"])), patch_sweep(local, **body)
    assert there.columns == here.columns
    assert (there.columns[0].clean, there.columns[0].corrupt) == ((1, 2), (0, 1))
    np.testing.assert_allclose(there.grid, here.grid, atol=1e-3)


def test_one_study_more_than_the_limit_is_asked_to_wait(server):
    body = LONGER | {"sites": ["z", "q"], "group": 1}
    with server.http() as http, contextlib.ExitStack() as until:
        readers = []  # one that is dropped closes its response, and with it its study
        for _ in range(4):
            response = until.enter_context(http.stream("POST", "/v1/patchclamp/studies/patch_sweep", json=body))
            readers.append(events(response.iter_lines()))
            assert next(readers[-1])[0] == "start"
        refused = http.post("/v1/patchclamp/studies/patch_sweep", json=body)
    assert refused.status_code == 429, refused.text
    assert refused.json()["error"]["type"] == "CapacityError"
    assert "wait" in refused.text
    assert "delete" not in refused.text


def test_it_ends_when_the_client_goes(server):
    with (
        server.http() as http,
        http.stream("POST", "/v1/patchclamp/studies/patch_sweep", json=ASKED | {"sites": list(SITES)[:6]}) as response,
    ):
        for name, data in events(response.iter_lines()):
            if name == "start":
                assert data["cells"] > 200
            if name == "cells":
                break

    becomes(lambda: not server.held())
    assert server.held() == {}


def test_the_model_and_its_sites(server, local):
    with server.http() as http:
        model = http.get("/v1/patchclamp").json()
        assert isinstance(model["limits"]["body_bytes"], int)
        sites = {card["name"]: card for card in http.get("/v1/patchclamp/sites").json()["sites"]}
    assert (model["layers"], model["d_model"]) == (local.model.layers, local.model.d_model)
    assert model["limits"]["sweep_cells"] == 20_000
    assert list(sites) == list(SITES)
    assert sites["resid_post"]["layers"] == list(range(8))
    assert sites["router"]["layers"] is None
    assert "experts" in sites["router"]["why_not"]


OTHER_STUDIES = {
    "ablation_sweep": {"prompt": "The Eiffel Tower is in", "answer": " Paris", "foil": " Rome", "layers": "2:4"},
    "edge_sweep": {"prompt": "The Eiffel Tower is in", "answer": " Paris", "foil": " Rome", "layers": "2:4"},
    "causal_trace": {"prompt": "The Eiffel Tower is in", "subject": "Eiffel", "answer": " Paris", "layers": "2:4", "seeds": 2},
    "path_patch": {"clean": [111, 112, 113, 114], "corrupt": [111, 212, 113, 114], "answer": " Paris", "foil": " Rome",
                   "senders": ["z[1]", "z[2]"], "receivers": ["logits", ["q[4, 0]", "k[4, 0]"]]},
    "direct_attribution": {"prompt": "The Eiffel Tower is in", "answer": " Paris", "foil": " Rome"},
    "attention_rollout": {"prompt": "The Eiffel Tower is in"},
    "attention_edges": {"prompt": "The Eiffel Tower is in", "answer": " Paris", "foil": " Rome", "tokens": "prompt[1:]"},
    "head_scores": {"length": 6, "sequences": 2, "layers": "2:4"},
    "logit_lens": {"prompt": "The Eiffel Tower is in", "layers": "2:4", "tokens": [" Paris"]},
    "patchscope": {"source": "The Eiffel Tower is in Paris", "layers": "2:4", "max_tokens": 3},
    "fuzz_sweep": {"prompts": ["The Eiffel Tower is"], "strengths": [0, 0.3], "max_tokens": 3},
    "steering_vectors": {"positive": ["good day", "good dog", "good cat", "good film"],
                 "negative": ["bad day", "bad dog", "bad cat", "bad film"], "layers": "2:4"},
}  # fmt: skip


def test_every_study_that_needs_one_engine_is_served():
    assert {name for name, kind in KINDS.items() if not kind.not_served} == {
        "patch_sweep", "evaluate_sae", "feature_attribution", *OTHER_STUDIES,  # test_sae.py has those of SAEs
    }  # fmt: skip


@pytest.mark.parametrize("name", OTHER_STUDIES)
def test_another_study_is_the_same_as_here(server, local, name):
    body = OTHER_STUDIES[name]
    told: dict[str, list] = {}
    with server.http() as http, http.stream("POST", f"/v1/patchclamp/studies/{name}", json=body) as response:
        assert response.status_code == 200, response.read()
        for event, data in events(response.iter_lines()):
            told.setdefault(event, []).append(data)
    assert "error" not in told, told["error"]
    there = load(b"".join(base64.b64decode(part["safetensors"]) for part in told["result"]))
    here = KINDS[name](**body).run(local)
    assert type(there) is type(here)
    assert there.config == here.config
    assert ("cells" in told) == hasattr(here, "grid")
    assert "cells" in told or told["progress"][0]["of"] > 0  # `begin` checks the limits
    for field in here.__struct_fields__:
        mine, other = getattr(here, field), getattr(there, field)
        if isinstance(mine, np.ndarray) and mine.dtype.kind == "f":
            np.testing.assert_allclose(other, mine, atol=2e-2, err_msg=field)


@pytest.mark.parametrize(
    ("name", "body", "status", "text"),
    [
        ("nothing", {}, 404, "unknown study"),
        ("attribution_patching", {}, 422, "gradients"),
        ("edge_attribution", {}, 422, "gradients"),
        ("logit_lens", {"prompt": "a", "readout": "checkpoint"}, 400, "readout"),
        ("logit_lens", {"prompt": "a", "unembedding": [[1]]}, 400, "unembedding"),
        ("logit_lens", {"prompt": "a", "top": True}, 400, "top"),
        ("logit_lens", {"prompt": "a", "top": 10**9}, 400, "top"),
        ("path_patch", ASKED | {"senders": ["z"], "receivers": [["q[1,0]"] * 100]}, 400, "receivers"),
        ("ablation_sweep", {"prompt": [5] * 9, "answer": " b", "metric": "logprob", "sites": ["z"], "self": 1}, 400, "self"),
        ("ablation_sweep", {"prompt": [5] * 9, "answer": " b", "metric": "logprob", "sites": ["resid_pre"],
                            "source": {"type": "resampled", "prompts": [[5] * 9], "draws": 2**50}}, 413, "limit sweep_cells"),
        ("fuzz_sweep", {"prompts": ["a"], "refusal": "(a+)+$"}, 400, "refusal"),
        ("fuzz_sweep", {"prompts": ["a"] * 13}, 413, "limit sweep_prompts"),
        ("fuzz_sweep", {"prompts": ["a"], "strengths": ["1"]}, 400, "strengths[0]"),
        ("fuzz_sweep", {"prompts": ["a"], "strengths": [0.1], "relative": 1}, 400, "relative"),
        ("ablation_sweep", {"prompt": [5] * 9, "answer": " b", "metric": "logprob", "sites": ["neurons"], "group": 1, "positions": "each"}, 413,
         "limit sweep_grid"),
        ("causal_trace", [1], 400, "object"),
        ("causal_trace", {"prompt": "a", "subject": "a", "answer": " b", "resume": 5}, 400, "resume"),
    ],
)  # fmt: skip
def test_what_a_server_does_not_run_is_refused(server, name, body, status, text):
    with server.http() as http:
        response = http.post(f"/v1/patchclamp/studies/{name}", json=body)
    assert response.status_code == status, response.text[:500]
    assert text in response.text


def test_the_studies_are_listed(server):
    with server.http() as http:
        cards = {card["name"]: card for card in http.get("/v1/patchclamp/studies").json()["studies"]}
    assert cards.keys() == KINDS.keys()
    assert "clean" in cards["patch_sweep"]["body"]["required"]
    assert cards["edge_attribution"]["body"] is None
    assert "gradients" in cards["edge_attribution"]["not_served"]


def test_a_study_stops_even_if_its_events_never_begin():
    stopped = []

    async def events():
        yield "never"

    async def left():
        return {"type": "http.disconnect"}

    async def blocked(message):
        await asyncio.sleep(60)

    response = StoppedResponse(lambda: stopped.append(True), events(), "text/event-stream")
    asyncio.run(response({"type": "http", "asgi": {"spec_version": "2.3"}}, left, blocked))
    assert stopped == [True]
